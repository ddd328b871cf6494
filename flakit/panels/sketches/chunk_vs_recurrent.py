"""The sketches of lesson 07_chunk_vs_recurrent: rounding of the two forms, measures of error, amplified differences."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...cases.chunk_vs_recurrent import perturbed
from ...figures import Bars, Canvas, Cell, CellGrid, HeatMap, Ring, name_rows, style
from ...language import Words, say
from ...numerics.errors import Errors, compare, relative_l2
from ...numerics.evaluate import recurrence, truth
from ...numerics.inputs import inputs
from ...numerics.words import error, number
from ...ops.rwkv6 import chunk_rwkv6
from ..knobs import choice, integer, steps
from .sketch import Sketch, percent

SIZES = {"T": 256, "H": 1, "K": 64, "decay": "logsigmoid"}

_FIRST = 40  # tokens that "two_forms" shows
_TOKENS = 64  # that "amplified" reads
_WRONG = {"inputs in bfloat16": "inputs", "doubled": "doubled", "one token lost": "token", "one number off": "element"}

WORDS = Words() | {
    "two_forms": {
        "alt": "Left, one number of the output of each of some tokens: how far the chunk form and the recurrent form "
        "are from the true value, in steps of the format; right, a bar for how far each form is off in all",
        "steps": "off by so many steps of the format",
        "all": "all outputs off by",
        "true": "true value",
        "chunk": "chunk",
        "recurrent": "recurrent",
        "beyond": ("≤ -{steps}", "≥ {steps}"),
        "say": "Stored with {digits} binary digits{name}, {share} of the outputs differ between the two forms.\n"
        "The chunk form is off by {chunk} of the true values, the recurrent form by {recurrent}.",
        "names": {24: ", as in float32", 11: ", as in float16", 8: ", as in bfloat16"},
        "arithmetic": "token {t}: true {true:.9g}, chunk {chunk:.9g}, recurrent {recurrent:.9g}; a step is {step:.3g} "
        "here",
        "off": "{form}: |difference| / |truth| over all outputs is {off}",
    },
    "measures": {
        "alt": "Left, a map of how far every number of an output is off, tokens from left to right and channels from "
        "top to bottom; right, a bar for what each of five measures says of it, on a scale of powers of ten",
        "map": "off by, in units of the RMS",
        "measures": "what the measures say",
        "names": {
            "difference": "largest difference",
            "relative": "largest in its own units",
            "l2": "relative L2",
            "row": "worst row",
            "element": "worst element / RMS",
        },
        "wrong": {
            "inputs": "The inputs were stored in bfloat16, and everything else is right.",
            "doubled": "Every number is twice what it should be.",
            "token": "The output of one token is zero, and all others are right.",
            "element": "A single number is off, and all others are right.",
        },
        "say": "{wrong}\nRelative L2 {l2}, worst row {row}, worst element {element}; the largest error in its own "
        "units is {relative}.",
        "cell": "token {t}, channel {c}: {got} (true: {true}), off by {off:.3g}",
        "times": ", which is {times:.3g} of the value and {rms:.3g} of the RMS",
        "bar": "{name}: {value:.3g}{of}",
        "of": {
            "difference": " in the units of the output, whose RMS is {rms:.3g}",
            "relative": ": {got:.3g} where {true:.3g} is true",
            "l2": ", the length of the difference divided by the length of the truth",
            "row": ", the relative L2 of token {t} alone",
            "element": ", the largest difference divided by the RMS",
        },
    },
    "amplified": {
        "alt": "A line: the distance between the states of two runs that began a little apart, as a share of what it "
        "was in the beginning, token by token on a scale of powers of ten; and what the sum of the log decays predicts",
        "x": "tokens read, t",
        "y": "distance left",
        "law": "law $e^{t w}$",
        "same": "as in the beginning",
        "shrinks": "With w = {w} the difference shrinks: after {T} tokens {left} of it is left.",
        "stays": "With w = 0 nothing is forgotten, and the difference stays as it was: after {T} tokens it is "
        "{left:.3g} times what it was.",
        "grows": "With w = +{w}, which is no decay and which no operator accepts, the difference grows: after {T} "
        "tokens it is {left:.3g} times what it was.",
        "arithmetic": "after {n} tokens: {left} of the difference (law: e^({n} · {w}) = {law})",
    },
}


@dataclass(frozen=True)
class TwoFormsShown:
    """One output channel of the first N tokens, [N] each: the two forms rounded to `digits` binary digits, and the
    truth."""

    digits: int
    chunk: np.ndarray
    recurrent: np.ndarray
    true: np.ndarray
    step: np.ndarray
    """The distance between neighbouring numbers of the format at each true value, [N]."""
    share: float
    """The share of outputs that differ between the forms."""
    off: Mapping[str, float]
    """The relative L2 error over all outputs, by form."""


class TwoForms(Sketch, name="two_forms", words=WORDS):
    """The distance of the chunked and the recurrent output from the truth, in steps of the format that stores them."""

    knobs = {"digits": lambda: integer(24, 6, 24, "digits kept")}
    presets = {"float32": {"digits": 24}, "float16": {"digits": 11}, "bfloat16": {"digits": 8}}
    script = """import flakit
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import recurrence, truth
from flakit.panels.sketches.chunk_vs_recurrent import SIZES, rounded

x = flakit.inputs("rwkv6", seed={seed}, **SIZES)
forms = flakit.chunk_rwkv6(**x).o, recurrence("rwkv6", x)["o"]  # both in float32
chunk, recurrent = (rounded(o.double(), {digits}) for o in forms)
print("share that differs", (chunk != recurrent).double().mean().item())
print("off by", [relative_l2(o, truth("rwkv6", x)["o"]) for o in (chunk, recurrent)])
"""
    random = True

    @staticmethod
    def compute(digits: int, seed: int = 0) -> TwoFormsShown:
        *forms, true = _outputs(seed)
        chunk, recurrent = (rounded(o, digits) for o in forms)
        first = slice(_FIRST), 0
        step = torch.ldexp(torch.ones_like(true[first]), torch.frexp(true[first]).exponent - digits)
        return TwoFormsShown(
            digits,
            *(x.numpy() for x in (chunk[first], recurrent[first], true[first], step)),
            (chunk != recurrent).double().mean().item(),
            {"chunk": relative_l2(chunk, true), "recurrent": relative_l2(recurrent, true)},
        )

    _MOST = 4.0  # end of the axis, in steps
    _LOW, _HIGH = -9, 0  # ends of the axis of errors, powers of ten
    _LOOKS = {
        "chunk": {"color": style.BLUE, "marker": "o", "markersize": 6.5},
        "recurrent": {
            "color": style.PURPLE, "marker": "s", "markersize": 3.4, "markerfacecolor": "white",
            "markeredgewidth": 1.3,
        },
    }  # fmt: skip

    def __init__(self, width: float):
        top, down, bottom, left, gap, side = 0.32, 1.8, 0.75, 0.55, 0.95, 0.22 * width
        self.canvas = Canvas(width, top + down + bottom)
        across = width - left - gap - side - 0.3
        most = self._MOST
        ax = self.canvas.axes(left, top, across, down)
        low, high = (each.format(steps=f"{most:.0f}") for each in self.words["beyond"])
        ax.set(title=self.words["steps"], xlabel=say("token"))
        ax.set(xlim=(-0.5, _FIRST - 0.5), ylim=(-most - 0.4, most + 0.4))
        ax.set_yticks((-most, -2, 0, 2, most), (low, "-2", "0", "2", high))
        ax.axhspan(-0.5, 0.5, color=style.FINITE, linewidth=0, zorder=0)
        true = ax.axhline(0, color=style.BLACK, linewidth=0.9, zorder=1, label=self.words["true"])
        self._dots = {}
        for n, (name, look) in enumerate(self._LOOKS.items()):
            label = self.words[name]
            self._dots[name] = self.canvas.line(ax, linestyle="none", label=label, zorder=3 + n, **look)
        self.canvas.legend(*self._dots.values(), true, loc="lower left", columnspacing=1.2)
        beside = self.canvas.axes(left + across + gap, top, side, down)
        beside.set(title=self.words["all"], xlim=(self._LOW, self._HIGH), ylim=(1.6, -0.6))
        name_rows(beside, (self.words["chunk"], self.words["recurrent"]))
        beside.set_xticks((-8, -4, 0), ("$10^{-8}$", "$10^{-4}$", "1"))
        self._bars = {
            name: Bars(self.canvas, beside, horizontal=True, thick=0.5, facecolor=look["color"])
            for name, look in self._LOOKS.items()
        }
        self._off = [beside.text(self._LOW + 0.3, n - 0.36, "", va="center", fontsize=8.5) for n in (0, 1)]
        self.canvas.moving(*self._off)
        CellGrid(self.canvas, beside, "off", 2, 1)
        CellGrid(self.canvas, ax, "tokens", 1, _FIRST)

    def update(self, shown: TwoFormsShown) -> None:
        for n, (name, dots) in enumerate(self._dots.items()):
            steps = (getattr(shown, name) - shown.true) / shown.step
            dots.set_data(range(_FIRST), np.clip(steps, -self._MOST, self._MOST))
            ends = np.full(2, np.nan)
            ends[n] = np.clip(np.log10(shown.off[name]), self._LOW, self._HIGH) if shown.off[name] else np.nan
            self._bars[name].update(ends, begin=self._LOW)
            self._off[n].set_text(error(shown.off[name]))

    def say(self, shown: TwoFormsShown) -> str:
        return self.words.say(
            "say", digits=shown.digits, name=self.words["names"].get(shown.digits, ""),
            share=percent(shown.share) if shown.share else say("none"), chunk=error(shown.off["chunk"]),
            recurrent=error(shown.off["recurrent"]),
        )  # fmt: skip

    def arithmetic(self, shown: TwoFormsShown, cell: Cell) -> str:
        if cell.map == "off":
            form = list(self._LOOKS)[cell.row]
            return self.words.say("off", form=self.words[form], off=error(shown.off[form]))
        t = cell.column
        numbers = {name: getattr(shown, name)[t] for name in ("true", "chunk", "recurrent", "step")}
        return self.words.say("arithmetic", t=t, **numbers)


@dataclass(frozen=True)
class MeasuresShown:
    """An output with a fault, named `wrong`, and the true one, [T, V] each; and what `numerics.errors.compare`
    gives."""

    wrong: str
    got: np.ndarray
    true: np.ndarray
    errors: Errors


class Measures(Sketch, name="measures", words=WORDS):
    """A map of an output's errors, and a bar for each of five measures of error."""

    knobs = {"wrong": lambda: choice("inputs", _WRONG, "wrong is")}
    script = """import numpy as np
from flakit.panels import sketch

shown = sketch("measures", wrong={wrong}, seed={seed}).result
print("largest error in its own units", np.abs(shown.got / shown.true - 1).max())
print(shown.errors)
"""
    random = True

    @staticmethod
    def compute(wrong: str, seed: int = 0) -> MeasuresShown:
        true, stored = _exact(seed)
        got = {"inputs": stored, "doubled": 2 * true}.get(wrong, true).clone()
        if wrong == "token":
            got[100] = 0
        if wrong == "element":
            got[100, 20] += 3 * true.square().mean().sqrt()
        return MeasuresShown(wrong, got.numpy(), true.numpy(), compare(got, true))

    _LOW, _HIGH = -4, 5  # powers of ten

    def __init__(self, width: float):
        top, down, bottom = 0.32, 1.75, 0.5
        left, gap, side = 0.62, 0.7 + 1.45, 0.27 * width
        self.canvas = Canvas(width, top + down + bottom)
        across = width - left - gap - side - 0.15
        ax = self.canvas.axes(left, top, across, down)
        ax.set(title=self.words["map"], xlabel=say("token"), ylabel=say("channel"))
        self._map = HeatMap(self.canvas, ax, vmin=-4, vmax=1, name="map")
        self._ring = Ring(self.canvas, ax)
        bar = self._map.colorbar(self.canvas.axes(left + across + 0.1, top, 0.1, down), "")
        bar.set_ticks((-4, -2, 0), labels=("$10^{-4}$", "$10^{-2}$", "1"))
        beside = self.canvas.axes(left + across + gap, top, side, down)
        names = list(self.words["names"].values())
        beside.set(title=self.words["measures"], xlim=(self._LOW, self._HIGH), ylim=(len(names) - 0.5, -0.5))
        name_rows(beside, names)
        beside.set_xticks((-4, -2, 0, 2, 4), ("$10^{-4}$", "$10^{-2}$", "1", "$10^{2}$", "$10^{4}$"))
        self._bars = Bars(self.canvas, beside, horizontal=True, thick=0.55, facecolor=style.PURPLE)
        self._words = self.canvas.moving(*(beside.text(0, n, "", va="center", fontsize=8.5) for n in range(5)))
        CellGrid(self.canvas, beside, "measures", len(names), 1)

    def update(self, shown: MeasuresShown) -> None:
        off = np.abs(shown.got - shown.true) / _rms(shown.true)
        self._map.update(np.log10(np.maximum(off, 1e-4)).T)
        self._ring.update(off.T > 0 if np.count_nonzero(off) < 10 else np.zeros(off.T.shape, bool))
        values = self._measured(shown)
        places = [np.clip(np.log10(x), self._LOW, self._HIGH) for x in values.values()]
        self._bars.update(places, begin=self._LOW)
        for text, place, x in zip(self._words, places, values.values(), strict=True):
            far = place > 0.45 * self._HIGH
            text.set(x=place + (-0.15 if far else 0.15), text=_short(x), ha="right" if far else "left")
            text.set_color("white" if far else style.BLACK)

    @staticmethod
    def _measured(shown: MeasuresShown) -> dict[str, float]:
        difference = np.abs(shown.got - shown.true)
        errors = shown.errors
        return {
            "difference": float(difference.max()),
            "relative": float((difference / np.abs(shown.true)).max()),
            "l2": errors.l2,
            "row": errors.worst_row,
            "element": errors.worst,
        }

    def say(self, shown: MeasuresShown) -> str:
        values = {name: _short(x) for name, x in self._measured(shown).items()}
        return self.words.say("say", wrong=self.words["wrong"][shown.wrong], **values)

    def arithmetic(self, shown: MeasuresShown, cell: Cell) -> str:
        difference = np.abs(shown.got - shown.true)
        if cell.map == "map":
            t, c = cell.column, cell.row
            off = float(difference[t, c])
            line = self.words.say("cell", t=t, c=c, got=shown.got[t, c], true=shown.true[t, c], off=off)
            return line + self.words.say("times", times=off / abs(shown.true[t, c]), rms=off / _rms(shown.true))
        name = list(self.words["names"])[cell.row]
        at = np.unravel_index((difference / np.abs(shown.true)).argmax(), shown.true.shape)
        rows = np.linalg.norm(difference, axis=1) / np.linalg.norm(shown.true, axis=1)
        of = self.words.say(
            "of", name, rms=_rms(shown.true), got=shown.got[at], true=shown.true[at], t=int(rows.argmax())
        )
        return self.words.say("bar", name=self.words["names"][name], value=self._measured(shown)[name], of=of)


@dataclass(frozen=True)
class AmplifiedShown:
    """A log decay w; two runs' distance of states after 1 … T tokens over the initial one, measured and predicted."""

    w: float
    measured: np.ndarray
    law: np.ndarray


class Amplified(Sketch, name="amplified", words=WORDS):
    """The distance between the states of two runs over the tokens, which a decay shrinks."""

    knobs = {"w": lambda: steps(-0.1, (-0.3, -0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.05, 0.1), "decay w")}
    presets = {"a decay": {"w": -0.1}, "w = 0": {"w": 0.0}, "w above 0": {"w": 0.1}}
    script = """import flakit
from flakit.cases.chunk_vs_recurrent import perturbed

x = flakit.inputs("rwkv6", T=64, H=1, K=16, decay=0.0)
measured, law = perturbed(x | {{"w": x["w"] + {w}}})
print("after 64 tokens", measured[-1].item(), "law", law[-1].item())
"""

    @staticmethod
    def compute(w: float) -> AmplifiedShown:
        x = inputs("rwkv6", T=_TOKENS, H=1, K=16, decay=0.0)
        measured, law = perturbed(x | {"w": torch.full_like(x["w"], w, dtype=torch.float64)})
        return AmplifiedShown(w, measured.numpy(), law.numpy())

    _LOW, _HIGH = -10, 4  # powers of ten

    def __init__(self, width: float):
        ax = self.plot(width, 2.52, left=0.75, right=1.45, top=0.12, bottom=0.5)
        ax.set(xlabel=self.words["x"], xlim=(0.5, _TOKENS + 0.5))
        ax.set(ylabel=self.words["y"], ylim=(self._LOW, self._HIGH))
        ax.set_yticks((-10, -5, 0, 4), ("$10^{-10}$", "$10^{-5}$", "1", "$10^{4}$"))
        ax.axhline(0, color=style.GREY, linewidth=1, zorder=0)
        ax.text(0.99, 0.7 / (self._HIGH - self._LOW) + 0.715, self.words["same"], transform=ax.transAxes, ha="right",
                va="center", fontsize=8.5, color=style.GREY)  # fmt: skip
        self._line = self.canvas.line(ax, **style.LINES[0] | {"linewidth": 3.2}, label=say("measured"))
        self._law = self.canvas.line(ax, **style.LAW, label=self.words["law"], zorder=4)
        CellGrid(self.canvas, ax, "distance", 1, _TOKENS)
        self.canvas.legend(self._line, self._law, loc="upper right", ncols=1, borderaxespad=0.3)

    def update(self, shown: AmplifiedShown) -> None:
        for line, values in ((self._line, shown.measured), (self._law, shown.law)):
            line.set_data(range(1, _TOKENS + 1), np.log10(values))

    def say(self, shown: AmplifiedShown) -> str:
        left = float(shown.measured[-1])
        which = "stays" if shown.w == 0 else "shrinks" if shown.w < 0 else "grows"
        if which == "shrinks":
            left = percent(left) if left > 1e-4 else number(left, 2)
        return self.words.say(which, w=shown.w, T=_TOKENS, left=left)

    def arithmetic(self, shown: AmplifiedShown, cell: Cell) -> str:
        n = cell.column + 1
        return self.words.say("arithmetic", n=n, w=shown.w, left=shown.measured[n - 1], law=shown.law[n - 1])


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else number(x, 2)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean()))


def rounded(x: Tensor, digits: int) -> Tensor:
    """Return x, float64, rounded to a number of significant binary digits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**digits).round() / 2.0**digits, exponent)


@functools.lru_cache(maxsize=2)
def _outputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [T, V] of one head as float64 tensors: in chunks and by the recurrence, both in float32, and the
    truth."""
    x = inputs("rwkv6", seed=seed, **SIZES)
    outputs = chunk_rwkv6(**x).o, recurrence("rwkv6", x)["o"], truth("rwkv6", x)["o"]
    return tuple(o[0, :, 0].double() for o in outputs)


@functools.lru_cache(maxsize=2)
def _exact(seed: int) -> tuple[Tensor, Tensor]:
    """Return o [T, V] of one head in float64, from float32 inputs and from the same inputs rounded to bfloat16."""
    x = inputs("rwkv6", seed=seed, **SIZES)
    stored = {name: tensor.bfloat16() for name, tensor in x.items()}
    return tuple(truth("rwkv6", each)["o"][0, :, 0] for each in (x, stored))
