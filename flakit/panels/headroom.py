"""Bring your own gates: the decays of a real model against the law of every kernel of the casebook."""

import functools
import math
from pathlib import Path

import torch

from ..cases import headroom as case
from ..cases.laws import LN_MAX
from ..figures.headroom import HeadroomFigure
from ..numerics.operators import OPERATORS
from ..numerics.words import number
from . import knobs
from .base import Panel

ALL = "all layers"


class Headroom(Panel):
    """The decays are measured once for each size of chunk; the other knobs only look at them differently."""

    name = "headroom"
    readout_lines = 4

    def __init__(self, w, op: str | None = None, **settings):
        self._w, self._path = w, str(w) if isinstance(w, (str, Path)) else None
        if self._path:
            self._w = case.read(w)
        self._measured = functools.lru_cache(maxsize=16)(self._measure)
        first = case.headroom(self._w, op, settings.get("chunk", 64), block=settings.get("block", 16))
        self.op, self.kernels = first.op, case.kernels(first.op)
        self._figure = HeadroomFigure([case.KERNELS[kernel] for kernel in self.kernels])
        made = {
            "dtype": knobs.choice("float32", [str(dtype).removeprefix("torch.") for dtype in LN_MAX], "dtype"),
            "times": knobs.number(1.0, 0.01, 100.0, "decays times", None, log=True),
            "chunk": knobs.steps(64, (16, 32, 64, 128), "chunk"),
            "block": knobs.steps(16, (4, 8, 16, 32), "block"),
        }
        if len(first.layers) > 1:
            made["layer"] = knobs.choice(ALL, (ALL, *first.layers), "layer")
        super().__init__(
            made,
            settings,
            alt="A histogram of the decays of all tokens; under it a lane for each kernel with the largest exponent "
            "that it makes of them, the limit above which it is NaN, and how far the one is from the other",
        )
        self.knobs["seed"].layout.display = "none"

    def _measure(self, chunk: int, block: int) -> case.Headroom:
        return case.headroom(self._w, self.op, chunk, block=block)

    def compute(self, chunk, block, times, dtype, layer=ALL, **_):
        found = self._measured(chunk, block).times(times)
        dtype = getattr(torch, dtype)
        margins = [found.margin(kernel, dtype, None if layer == ALL else layer) for kernel in self.kernels]
        return found, margins, [found.uniform(kernel, dtype) for kernel in self.kernels]

    def draw(self, result, *, times, dtype, layer=ALL, **_) -> None:
        found, margins, uniform = result
        scaled = "" if times == 1 else f", every decay times {number(times)}"
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"Decays of {OPERATORS[self.op].label}{scaled}",
            subtitle=f"{'' if layer == ALL else f'{layer}, '}operands in {dtype}",
            edges=found.edges,
            counts=found.counts,
            limit=LN_MAX[getattr(torch, dtype)],
            exponents=[m.exponent for m in margins],
            limits=[m.limit for m in margins],
            uniform=uniform,
        )

    def describe(self, result, **_) -> str:
        _, margins, uniform = result
        broken = sorted((m for m in margins if m.breaks), key=lambda m: m.factor)
        near = sorted((m for m in margins if m.token is not None and not m.breaks), key=lambda m: m.factor)
        lines = [f"{len(broken)} of {len(margins)} kernels break on these decays."]
        if broken:
            first = broken[0]
            lines.append(f"First of all {first.kernel}: an exponent of {number(first.exponent)} at {first.place}.")
        if near:
            m = near[0]
            lines.append(f"Nearest to its end: {m.kernel}, which holds up to {number(m.factor, 3)} times these decays.")
        safe = [m.kernel for m, law in zip(margins, uniform, strict=True) if law == math.inf]
        return "\n".join([*lines, f"No decays at all break {', '.join(safe)}." if safe else ""])

    def script(self, *, chunk, block, times, **_) -> str:
        w = repr(self._path) if self._path else "w"
        given = "" if self._path else "# w: the decays that this panel was given\n"
        return f"""import flakit

{given}found = flakit.headroom({w}, {self.op!r}, {chunk}, block={block}).times({times})
print(found)
"""


def headroom(w, op: str | None = None, **settings) -> Headroom:
    """A panel on decays of your own: their histogram, and how far each kernel of the casebook is from its law.

    w, op: as `flakit.headroom` takes them: decays [B, T, H, K], layers by name, or a file of either.
    settings: any of its knobs: dtype (of the operands), times (0.01 … 100, what all decays are multiplied with), chunk,
    block, and layer where there are several.

    >>> headroom(-torch.rand(1, 200, 4, 64), "rwkv6", times=2.0)
    """
    return Headroom(w, op, **settings)
