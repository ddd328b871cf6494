"""The registry of cases: each failure with its sources, and how to run it; `flakit cases` in a terminal.

    CASES["anchor"].reproduce()                     the numbers of the case, predicted and measured
    CASES["anchor"].at(w=-88.8, row=16)             the same at one setting of its knobs, the arguments of `show`

`flakit.cases` describes a case's module. Its submodule `picture` is a `PictureModule`. Both are imported on first use.
"""

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from ..language import Words
from .knobs import Knob, knobs_of
from .laws import Measured, Row, on_cpu

if TYPE_CHECKING:  # a case runs without matplotlib
    from ..figures.drawing import Drawing


class PictureModule(Protocol):
    """What a case's `picture.py` defines, so that `panels.case` can show it."""

    WORDS: Words
    """Every text of the picture, by key. "knobs": the label of each knob that is not labelled by its name; "alt": a
    description for readers who do not see the picture; optional "inf": how an infinite onset is printed."""
    ON_VIEW: tuple[str, ...]
    """The knobs shown first; the others are folded under "more". The play button moves the first one."""
    LINE: str
    """A part of the `what` of the `Row` that the panel quotes."""
    PRESETS: Mapping[str, Mapping]
    """Settings of the knobs by the words on their buttons: one that works, one that fails, one that is repaired."""
    Picture: "type[Drawing]"
    """The class that draws what the case's `show` returns."""


@dataclass(frozen=True)
class Case:
    """One failure of the casebook. name: of its module. notebook: the lesson on it. threads: the public reports,
    owner/repository#number. reported: what they say, or what is commonly assumed. measured: what the case measures."""

    name: str
    notebook: str
    threads: tuple[str, ...]
    reported: str
    measured: str

    @cached_property
    def module(self) -> types.ModuleType:
        return import_module(f".{self.name}", __package__)

    @cached_property
    def picture(self) -> PictureModule:
        return import_module(f".{self.name}.picture", __package__)

    @property
    def title(self) -> str:
        """The first paragraph of the module's docstring, without its full stop."""
        return " ".join(self.module.__doc__.split("\n\n")[0].split()).removesuffix(".")

    @cached_property
    def knobs(self) -> dict[str, Knob]:
        """The keyword arguments of `show`, each with its range and default."""
        return knobs_of(self.module.show)

    def reproduce(self) -> list[Row]:
        """Return the recorded numbers of the case, each with its prediction and a new measurement."""
        with on_cpu():
            return self.module.reproduce()

    def at(self, **knobs) -> list[Row]:
        """Return prediction and measurement at one setting. Raises ValueError as `show` does."""
        return self.show(**knobs).rows

    def show(self, **knobs) -> Measured:
        """Return prediction, measurement and picture's arrays at one setting. Raises ValueError for an invalid knob."""
        for name, value in knobs.items():
            knob = self._knob(name)
            if not knob.fits(value):
                raise ValueError(f"{name}: expected {knob.expects}, got {value!r}")
        with on_cpu():
            return self.module.show(**knobs)

    def parse(self, texts: Mapping[str, str]) -> dict:
        """Parse knobs from strings, as on a command line. Raises ValueError for an unknown knob or an invalid value."""
        values = {}
        for name, text in texts.items():
            knob = self._knob(name)
            try:
                values[name] = knob.parse(text)
            except ValueError:
                raise ValueError(f"{name}: expected {knob.expects}, got {text!r}") from None
        return values

    def _knob(self, name: str) -> Knob:
        if name not in self.knobs:
            raise ValueError(f"{name}: {self.name} has no such knob{_suggestion(name, self.knobs)}")
        return self.knobs[name]


def find(name: str) -> Case:
    """Return the case of that name, "-" and "_" alike. Raises ValueError with the closest names if there is none."""
    case = CASES.get(name.replace("-", "_"))
    if case is None:
        raise ValueError(f"case: there is none named {name!r}{_suggestion(name, CASES)}")
    return case


def _suggestion(name: str, names: Mapping) -> str:
    close = difflib.get_close_matches(name, names, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; expected one of {', '.join(names)}"


_FLA = "fla-org/flash-linear-attention"

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "log_space", "02_rwkv6_backward", (f"{_FLA}#11",),
            reported="the sigmoid's gradient is unstable; log space is the same in other numbers",
            measured="the state grows by e^0.5 a token and overflows in the forward pass, at t = 161",
        ),
        Case(
            "gate_gradient", "02_rwkv6_backward", (f"{_FLA}#19",),
            reported="-exp is not stable yet: the loss turns NaN, and logsigmoid cures it",
            measured="the kernel is blameless: dx = dw w = 0 * inf from x = 88.73 on, in float16 11.1; the limit is 0",
        ),
        Case(
            "chunk_vs_recurrent", "07_chunk_vs_recurrent", (f"{_FLA}#36", f"{_FLA}#37"),
            reported="w was shared between the two calls, and small differences are amplified along the sequence",
            measured="one call had scale K^-0.5 and the other 1: that gives all six differences; nothing is amplified",
        ),
        Case(
            "decay_gradient", "07_chunk_vs_recurrent", (f"{_FLA}#29", f"{_FLA}#36"),
            reported="dw of a bfloat16 chunk kernel is off by 8% and more",
            measured="two running sums of rounded terms cancel; the noise grows like sqrt(T) e^|w|",
        ),
        Case(
            "aliasing", "12_states_and_shapes", (f"{_FLA}#36", f"{_FLA}#1191"),
            reported="a kernel overwrites an input that the next call is given",
            measured="constructed for w; real in GSA's decoding, which wrote into the caller's initial state",
        ),
        Case(
            "anchor", "06_the_anchor", (f"{_FLA}#77", f"{_FLA}#78"),
            reported="exclusive cumulative decays explode, inclusive ones are immune",
            measured="the anchor was the block's first row: one token's decay of -88.8 at that row suffices",
        ),
        Case(
            "padding", "11_gsa", (f"{_FLA}#77", f"{_FLA}#694"),
            reported="GSA's gradients turn NaN as training goes on; a forget gate below some clamp is to blame",
            measured="rows beyond T forget nothing: 0 * inf from |g| = 88.72 / min(T mod 64, 48) on, backward only",
        ),
        Case(
            "anomaly", "11_gsa", (f"{_FLA}#77",),
            reported="anomaly detection names output 3 of GSA's backward pass, so the fault is in what makes it",
            measured="it names one node's first NaN, ds, and neither token nor operation; infinities pass unseen",
        ),
        Case(
            "masking", "05_one_infinity", ("huggingface/transformers#48455",),
            reported="a gated linear attention trains until its loss turns NaN",
            measured="masked after exp: the output is right, the gradient 0 * inf from |w| = 88.72 / C on",
        ),
        Case(
            "zero_key", "08_delta_rule", (),
            reported="the epsilon in a normalised key only prevents a division by zero",
            measured="a key of length l sends back a gradient 1 / max(l, epsilon) times as large: 10^12 at zeros",
        ),
        Case(
            "inverse", "09_delta_rule_in_chunks", (),
            reported="(I - L)^-1 is a product of four brackets, all on tensor cores",
            measured="with repeated tokens its powers cancel: 0.8 off in bfloat16, NaN in float16 from alpha = 1.45 on",
        ),
        Case(
            "transposed_mask", "12_states_and_shapes", (f"{_FLA}#18",),
            reported="it does not compile: a matter of GPU and Triton version",
            measured="a shape error on any GPU, and silent in square tiles: 992 wrong entries at K, V = 100, 120",
        ),
        Case(
            "final_state_gradient", "12_states_and_shapes", (),
            reported="gradients through the state are off by 39 to 46%",
            measured="the backward pass began with zeros whatever arrived at the final state; no error is raised",
        ),
        Case(
            "strides", "12_states_and_shapes", (f"{_FLA}#759", f"{_FLA}#1138"),
            reported="gradients are wrong after .sum().backward(), and for transposed inputs",
            measured="a kernel that takes memory for contiguous reads other elements; a law counts them",
        ),
        Case(
            "strided_offsets", "12_states_and_shapes", (),
            reported="packed sequences come out wrong where the offsets are a column of a table, with no message",
            measured="every other number that it reads is no offset; beside the ends, half the sequences are skipped",
        ),
        Case(
            "unwritten_rows", "12_states_and_shapes", (f"{_FLA}#892",),
            reported="gradients of a padded packed batch are NaN in some runs and not in others",
            measured="no program writes the rows behind the last offset; a weight's gradient sums over what lay there",
        ),
        Case(
            "shared_store", "12_states_and_shapes", (),
            reported="gradients are right at one head size and wrong at the next",
            measured="each of n blocks of V stores its share of dr, dk, dw at one place; sqrt((n - 1) / n) is missing",
        ),
        Case(
            "rounded_state", "12_states_and_shapes", (),
            reported="a state in the dtype of the inputs is good enough, as all else in training is",
            measured="a bfloat16 state counts to 256: further equal writes change nothing; random ones hide it",
        ),
        Case(
            "backstepping", "09_delta_rule_in_chunks", (f"{_FLA}#105",),
            reported="kernels step backwards over the states to avoid recomputation; somebody asks how precise that is",
            measured="a rounding grows by e^(n |w|) over n tokens: RWKV7's bound of 0.6065 allows 16, no more",
        ),
        Case(
            "rounded_chain", "17_over_gpus", (f"{_FLA}#1180",),
            reported="transitions of slices are multiplied in TF32, and precision is lost in a long context",
            measured="n products are off by sqrt(n) times 0.6 · 2^-11: from 33 chunks on more than bfloat16 rounds",
        ),
        Case(
            "clamping", "06_the_anchor", ("sgl-project/sglang#39971",),
            reported="a fast prefill path collapses for strong decays",
            measured="tokens beyond the clamp on one side of the anchor read each other at full weight; all is finite",
        ),
        Case(
            "wrong_head_anchor", "12_states_and_shapes", (f"{_FLA}#1084", f"{_FLA}#1085"),
            reported="a short stride selects another head's row and corrupts scores and gradients",
            measured="it cancels to 1e-7 until the decay is strong, then NaN; one head never shows it",
        ),
        Case(
            "over_ranks", "17_over_gpus", (f"{_FLA}#1115",),
            reported="dk, dv and the decay's gradient are off by some 10% on all ranks but the last",
            measured="every head fades as head 0 in the pre-pass of the backward; the error follows from two decays",
        ),
        Case(
            "future_anchor", "12_states_and_shapes", (f"{_FLA}#1240", f"{_FLA}#1242"),
            reported="outputs before a token depend on gates from that token on",
            measured="the anchor in the middle is a sum over the future for the rows before it: last digits change",
        ),
        Case(
            "nan_guard", "12_states_and_shapes", (f"{_FLA}#104", f"{_FLA}#461"),
            reported="results change where the log decay is set to zero",
            measured="a guard d < 0 takes d = 0 for forbidden: a run of L tokens loses L (L + 1) / 2 pairs",
        ),
        Case(
            "blind_measure", "07_chunk_vs_recurrent", (),
            reported="the ratio of root mean squares is below 0.005",
            measured="tolerance^2 of all elements, 2.5e-5, may be totally wrong",
        ),
        Case(
            "weak_test", "07_chunk_vs_recurrent", (),
            reported="the operator agrees with its reference on random inputs",
            measured="with decays of e^-7 per token an operator that remembers three tokens passes as well",
        ),
        Case(
            "gradient_accumulation", "13_training", (f"{_FLA}#218", "huggingface/transformers#47688"),
            reported="the loss is not divided by the accumulation steps, 4 * 4 = 16 times too large; upgrading helps",
            measured="a forward with **kwargs leaves the division to a model that does not do it: 4 times",
        ),
        Case(
            "unscaled_term", "13_training", (f"{_FLA}#963",),
            reported="a term that holds the logits back is too small wherever the loss is scaled before its backward",
            measured="1 / c of it is left where the loss is multiplied by c: in n parts it is n times too large",
        ),
    )
}  # fmt: skip
"""Every case by the name of its module, in the order of the casebook."""
