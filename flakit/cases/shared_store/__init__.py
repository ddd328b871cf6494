"""Several blocks of values that store one place: each has its own share of a gradient, and the last store wins.

A kernel splits the V columns of v into blocks, one program each. A program owns its columns of o and dv. But dr, dk, dw
and du are sums over all columns, of which a program has its block's partial sum. If all programs store their partial
sums at the same address, the last store wins.

The symptom: the gradients are right at one head size and wrong at the next. As measured: right while V is one block; of
n partial sums one remains, and dr, dk and dw have a relative error of sqrt((n - 1) / n). o, dv and the states are
right, everything is finite, and which partial sum remains depends on the order of the programs. The cure: each program
stores its partial sum at its own address, and a second step adds them up (or atomics do, in varying order).
"""

import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ...numerics.evaluate import cotangents, evaluate
from ...numerics.inputs import inputs
from ..laws import Measured, Row

T, K = 96, 16
"""Tokens, and key channels, of one head."""
SHARED = ("dr", "dk", "dw", "du")
"""The gradients of RWKV6 that sum over the columns of v."""
SIZES = (16, 32, 64, 128)


def shares(V: int, block: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return for each program, which has `block` columns of v, the outputs and gradients of RWKV6 from those columns
    alone, by name; gradients in `SHARED` are partial sums."""
    x = inputs("rwkv6", T=T, H=1, K=K, V=V, decay=-0.3, seed=seed)
    do, _ = cotangents("rwkv6", x, grad_seed=seed)
    partial = []
    for start in range(0, V, block):
        columns = slice(start, start + block)
        inputs_of_block = x | {"v": x["v"][..., columns]}
        partial.append(evaluate("rwkv6", inputs_of_block, arriving=(do[..., columns], None)))
    return partial


def law(V: int, block: int) -> float:
    """Predict the relative L2 error of dr, dk and dw if one of V / block partial sums remains.

    The partial sums have equal numbers of independent products, so each has the norm of the total / sqrt(n).

    >>> law(64, 64), law(128, 32)
    (0.0, 0.8660254037844386)
    """
    n = max(1, math.ceil(V / block))
    return math.sqrt(1 - 1 / n)


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, one gradient, stored and true, [T, K], and the relative L2 errors of `SHARED`."""

    stored: Tensor
    true: Tensor
    errors: dict[str, float]
    V: int
    block: int
    summed: bool

    @property
    def blocks(self) -> int:
        return math.ceil(self.V / self.block)


def show(
    *,
    V: Annotated[int, SIZES] = 64,
    block: Annotated[int, SIZES] = 32,
    tensor: Annotated[str, ("dr", "dk", "dw")] = "dk",
    summed: bool = False,
    seed: int = 0,
) -> Shown:
    """Compute RWKV6 in V / block programs, each of a block of v's columns. Return the relative L2 error of `tensor` if
    the last partial sum remains, beside the prediction of `law`. summed: True for the cure, all partial sums added."""
    parts = shares(V, block, seed)
    true = {name: sum(part[name].double() for part in parts) for name in SHARED}
    stored = true if summed else {name: parts[-1][name].double() for name in SHARED}
    errors = {name: ((stored[name] - true[name]).norm() / true[name].norm()).item() for name in SHARED}
    setting = f"V = {V} in blocks of {block}, shares added" if summed else f"V = {V} in blocks of {block}"
    row = Row(f"{setting}: error of {tensor}", math.nan, 0.0 if summed else law(V, block), errors[tensor], 0.12)
    return Shown([row], stored[tensor][0, :, 0], true[tensor][0, :, 0], errors, V, block, summed)


def reproduce() -> list[Row]:
    """Return predicted and measured errors of each gradient by number of blocks, and with partial sums added."""
    rows = [row for V in SIZES for tensor in ("dr", "dk", "dw") for row in show(V=V, block=16, tensor=tensor).rows]
    return rows + show(V=128, block=16, summed=True).rows
