"""A phase diagram of decay: where chunks stay finite, over decay and length, chunk or the token of one strong decay."""

import functools
import math

import numpy as np
import torch

from ..cases import anchor
from ..figures.phase import Map, PhaseFigure
from ..numerics.evaluate import truth
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from ..numerics.sweep import Sweep, sweep
from ..numerics.words import error
from . import knobs
from .base import ButtonRun, Panel
from .shared import in_words, mode, own_options, scheme_knobs, tensors

H, K = 1, 16
AGAINST = {"length T": "T", "chunk": "chunk", "token of the only decay": "at"}
"""What the vertical axis is. With "at", the decay is that of one token; with the others, that of every token."""

ANY = "any"
_UP = {"T": "length T (tokens)", "chunk": "chunk (tokens)", "at": "token t that decays"}
_ROWS = {
    "coarse": {
        "T": (16, 32, 48, 64, 128, 256),
        "chunk": (8, 16, 32, 64, 128),
        "at": (0, 8, 15, 16, 17, 32, 63, 64),
    },
    "fine": {
        "T": (4, 6, 8, 12, 15, 16, 17, 24, 32, 40, 48, 56, 63, 64, 65, 80, 96, 127, 128, 129, 192, 256),
        "chunk": (4, 8, 16, 32, 64, 128, 256),
        "at": (0, 1, 8, 14, 15, 16, 17, 18, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 96),
    },
}
_DECAYS = {"coarse": 11, "fine": 41}
_KEPT = 16  # fine maps, the latest
_LOWEST, _HIGHEST = 0.05, 500.0  # |log decay|


class PhaseDiagram(Panel):
    """A coarse map at once; behind the button a fine one, with the error against float64 where all is finite."""

    name = "phase-diagram"
    readout_lines = 3

    def __init__(self, op: str = "rwkv6", **settings):
        self._figure, self._fine = PhaseFigure(), {}
        first = next(iter(OPERATORS))
        made = {
            "op": knobs.operator_choice(first),
            "against": knobs.choice("T", AGAINST, "against"),
            "tensor": knobs.choice(ANY, _offered(first), "tensor"),
            **scheme_knobs(),
            "chunk": knobs.choice(64, (16, 32, 64, 128), "chunk"),
            "T": knobs.choice(128, (16, 32, 48, 64, 100, 128, 192, 256), "length T"),
        }
        own_options(self, made["op"], made["tensor"], _offered, dict.fromkeys(OPERATORS, ANY))
        made["against"].observe(lambda _: self._disable(), "value")
        self.run = ButtonRun("measure finely", self._measure_finely, done=self._keep, failed=self.fail)
        super().__init__(
            made,
            {"op": op, **settings},
            alt="Map of decay against length, chunk or token: hatched where a value is not finite, coloured by error "
            "against float64 elsewhere, with the border that the law predicts drawn over it",
            runs=(self.run,),
        )
        self._disable()

    def _disable(self) -> None:
        """The axis that varies has no knob."""
        for name in ("T", "chunk"):
            self.knobs[name].disabled = self.knobs["against"].value == name

    def compute(self, op, tensor, **setting) -> Map:
        key = _key(op=op, **setting)
        fine = self._fine.get(key)
        found, law = fine or _coarse(key)
        names = tensors(op) if tensor == ANY else (tensor,)
        rows, decay = found.axes.values()
        return Map(
            rows=rows,
            decay=np.array(decay),
            share=np.min([found[f"{name}.finite"] for name in names], axis=0),
            error=np.max([found[f"{name}.l2"] for name in names], axis=0) if fine else None,
            law=np.array([min(limits[name] for name in names) for limits in law]),
        )

    def draw(self, result, *, op, against, scheme, mask, dtype, tensor, T, chunk, **_):
        what = "every tensor" if tensor == ANY else tensor
        fixed = {"T": f"chunk {chunk}", "chunk": f"T {T}", "at": f"T {T} · chunk {chunk}"}[against]
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"Where {what} of {OPERATORS[op].label} in chunks is finite",
            subtitle=f"{fixed} · {in_words(scheme, mask, dtype)}",
            across="|log decay|" + (" of that token, all others 0" if against == "at" else " per token (natural log)"),
            up=_UP[against],
            measured=result,
        )

    def describe(self, result, *, op, against, **_) -> str:
        known = ~np.isnan(result.share)
        rows, columns = result.share.shape
        lines = [
            f"{known.sum()} of {rows} x {columns} settings measured: {result.broken[known].mean():.0%} not finite. "
            + _agreement(result, known)
        ]
        whole = known & ~result.broken
        if result.error is None:
            lines.append('A coarse map of finiteness; "measure finely" adds the error where all is finite.')
        elif whole.any():
            row, column = np.unravel_index(np.where(whole, result.error, -1).argmax(), whole.shape)
            lines.append(
                f"Largest error where all is finite: {error(result.error[row, column])}, at {against} = "
                f"{result.rows[row]}, |{OPERATORS[op].decay}| = {result.decay[column]:.3g}."
            )
        return "\n".join(lines)

    def script(self, *, op, against, scheme, mask, dtype, tensor, T, chunk, seed):
        key = _key(
            op=op, against=against, scheme=scheme, mask=mask, dtype=dtype, T=T, chunk=chunk, seed=seed
        )  # fmt: skip
        how = "fine" if key in self._fine else "coarse"
        rows, _ = _grid(key, how)
        decays, number_format = f"np.geomspace({_LOWEST}, {_HIGHEST}, {_DECAYS[how]}).round(6)", f"torch.{dtype}"
        length, size = ("T" if against == "T" else T), ("chunk" if against == "chunk" else chunk)
        which, names = OPERATORS[op].decay, tuple(tensors(op)) if tensor == ANY else (tensor,)
        spiked = f"    x[{which!r}][:, at] = -decay\n" if against == "at" else ""
        return f"""import numpy as np
import torch

import flakit
from flakit.cases import anchor
from flakit.numerics.evaluate import truth
from flakit.numerics.sweep import sweep

names = {names!r}


def setting(decay, {against}):
    x = flakit.inputs(
        {op!r}, decay={"0.0" if against == "at" else "-decay"}, T={length}, H={H}, K={K},
        dtype={number_format}, decay_dtype=torch.float32, seed={seed},
    )
{spiked}    return x, dict(op={op!r}, chunk={size}, mask={mode(mask)!r}, dtype={number_format})


def measure(decay, {against}):
    x, how = setting(decay, {against})
    found, exact = anchor.run(x, {scheme!r}, **how).tensors, truth({op!r}, x, recurrence=False)
    return {{name: (found[name], exact[name]) for name in names}}


{against}s = {rows}
measured = sweep(measure, {{{against!r}: {against}s, "decay": {decays}}})
for {against}, onset in zip({against}s, measured.onset("decay")):
    x, how = setting(1.0, {against})
    limits = anchor.limits({scheme!r}, x, **how)
    law = min(limits[name] for name in names)
    print(f"{against} = {{{against}:3}}: law |{which}| <= {{law:.4g}}, first non-finite setting at {{onset:.4g}}")
"""

    def _measure_finely(self, progress, cancelled):
        setting = self.setting
        del setting["tensor"]
        key = _key(**setting)
        return key, _measure(key, "fine", progress, cancelled)

    def _keep(self, found) -> None:
        key, measured = found
        self._fine[key] = measured
        if len(self._fine) > _KEPT:
            del self._fine[next(iter(self._fine))]
        self.redraw()


def _offered(op: str) -> tuple[str, ...]:
    return ANY, *tensors(op)


def _key(*, op, against, scheme, mask, dtype, T, chunk, seed) -> tuple:
    """Everything a map depends on; what varies along its rows is left out."""
    return op, against, scheme, mask, dtype, None if against == "T" else T, None if against == "chunk" else chunk, seed


def _grid(key, how) -> tuple[list[int], np.ndarray]:
    _, against, *_, T, _, _ = key
    rows = [row for row in _ROWS[how][against] if against != "at" or row < T]
    return rows, np.geomspace(_LOWEST, _HIGHEST, _DECAYS[how]).round(6)


@functools.lru_cache(maxsize=256)
def _coarse(key) -> tuple[Sweep, list[dict[str, float]]]:
    return _measure(key, "coarse")


def _measure(key, how, progress=None, cancelled=None) -> tuple[Sweep, list[dict[str, float]]]:
    """The sweep, and the law's limits for each row."""
    op, against, scheme, mask, dtype, T, chunk, seed = key
    names, number_format = tensors(op), getattr(torch, dtype)
    rows, decays = _grid(key, how)

    def setting(decay, **row):
        x = inputs(
            op, T=row.get("T", T), H=H, K=K, decay=0.0 if "at" in row else -decay, dtype=number_format,
            decay_dtype=torch.float32, seed=seed,
        )  # fmt: skip
        if "at" in row:
            x[OPERATORS[op].decay][:, row["at"]] = -decay
        return x, {"op": op, "chunk": row.get("chunk", chunk), "mask": mode(mask), "dtype": number_format}

    def measure(decay, **row):
        x, knobs = setting(decay, **row)
        found = anchor.run(x, scheme, **knobs).tensors
        if how == "coarse":
            return {name: found[name] for name in names}
        exact = truth(op, x, recurrence=False)
        return {name: (found[name], exact[name]) for name in names}

    law = []
    for row in rows:
        x, knobs = setting(1.0, **{against: row})
        law.append(anchor.limits(scheme, x, **knobs))
    found = sweep(measure, {against: rows, "decay": decays}, progress=progress, cancelled=cancelled)
    return found, law


def _agreement(result: Map, known: np.ndarray) -> str:
    wrong = known & (result.predicted != result.broken)
    if not wrong.any():
        return "The law foretells every one of them."
    said = f"The law foretells {known.sum() - wrong.sum()} of them"
    step = math.log(result.decay[1] / result.decay[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.abs(np.log(result.decay / result.law[:, None])) / step
    return f"{said}; the others are up to {distance[wrong].max():.1f} columns from its line."


def phase_diagram(op: str = "rwkv6", **settings) -> PhaseDiagram:
    """Panel: where chunked computation is finite, and the law's border, over decay and another setting.

    A coarse map comes at once; the button "measure finely" takes some seconds and adds the error against float64.

    op: an operator of `flakit.numerics.operators.OPERATORS`. settings: starting values of the knobs:
        against: the vertical axis, "T", "chunk" or "at": the token that has a decay where all others have none.
        scheme: one of `flakit.cases.anchor.SCHEMES`. mask: one of its `masks`, or "right".
        dtype: "float32", "bfloat16" or "float16", of the inputs and of the stored factors. seed: of the inputs.
        tensor: "any", "o" or the gradient of one of the operator's inputs, such as "dw".
        T, chunk: length and tokens a chunk, where they are not an axis.

    >>> phase_diagram(scheme="first-row", against="at")
    """
    return PhaseDiagram(op, **settings)
