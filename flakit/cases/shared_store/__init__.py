"""Several blocks of values that store one place: each has its own share of a gradient, and the last store wins.

A kernel cuts the V columns of v into blocks, a program for each. Its columns of o and dv are its own. But dr, dk, dw
and du are sums over all columns, and of these sums a program has the share of its block. If every program stores its
share at the same place, what remains there is that of the program that stored last.

As told: the gradients are right at one head size and wrong at the next. As measured: right while V is one block; of n
blocks one share remains, and dr, dk and dw miss the root of (n - 1) / n of their size. o, dv and the states are right,
everything is finite, and which share remains is a matter of which program was last. The cure: each program stores its
share at a place of its own, and a second step adds them up (or they are added by atomics, in an order that changes).
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ...numerics.evaluate import cotangents, evaluate
from ...numerics.inputs import inputs
from ..laws import Row

T, K = 96, 16
"""Tokens, and channels of keys, of one head."""
SHARED = ("dr", "dk", "dw", "du")
"""The gradients of RWKV6 that sum over the columns of v."""
SIZES = (16, 32, 64, 128)


def shares(V: int, block: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """What each program computes: the gradients of RWKV6 by its block of v's columns alone."""
    x = inputs("rwkv6", T=T, H=1, K=K, V=V, decay=-0.3, seed=seed)
    do, _ = cotangents("rwkv6", x, grad_seed=seed)
    found = []
    for start in range(0, V, block):
        columns = slice(start, start + block)
        given = x | {"v": x["v"][..., columns]}
        found.append(evaluate("rwkv6", given, arriving=(do[..., columns], None)))
    return found


def law(V: int, block: int) -> float:
    """The relative L2 error of dr, dk and dw where one of V / block equal shares remains.

    The shares are sums of as many independent products, so each has the root of its part of the whole.

    >>> law(64, 64), law(128, 32)
    (0.0, 0.8660254037844386)
    """
    n = max(1, math.ceil(V / block))
    return math.sqrt(1 - 1 / n)


@dataclass(frozen=True)
class Shown:
    """One gradient as it is stored and as it is, [T, K] each, and the errors of all by name."""

    stored: Tensor
    true: Tensor
    errors: dict[str, float]
    V: int
    block: int
    summed: bool

    @property
    def blocks(self) -> int:
        return math.ceil(self.V / self.block)


@functools.lru_cache(maxsize=16)
def show(*, V: int, block: int, tensor: str, summed: bool, seed: int) -> Shown:
    """What `at` measures."""
    parts = shares(V, block, seed)
    true = {name: sum(part[name].double() for part in parts) for name in SHARED}
    stored = true if summed else {name: parts[-1][name].double() for name in SHARED}
    errors = {name: ((stored[name] - true[name]).norm() / true[name].norm()).item() for name in SHARED}
    return Shown(stored[tensor][0, :, 0], true[tensor][0, :, 0], errors, V, block, summed)


def at(
    *,
    V: Annotated[int, SIZES] = 64,
    block: Annotated[int, SIZES] = 32,
    tensor: Annotated[str, ("dr", "dk", "dw")] = "dk",
    summed: bool = False,
    seed: int = 0,
) -> list[Row]:
    """A kernel with so many columns of v in so large blocks: how far a gradient that sums over them is off."""
    shown = show(V=V, block=block, tensor=tensor, summed=summed, seed=seed)
    how = f"V = {V} in blocks of {block}, shares added" if summed else f"V = {V} in blocks of {block}"
    what = f"{how}: error of {tensor}"
    return [Row(what, math.nan, 0.0 if summed else law(V, block), shown.errors[tensor], 0.12)]


def reproduce() -> list[Row]:
    """Each gradient over the number of blocks, and with the shares added."""
    rows = [row for V in SIZES for tensor in ("dr", "dk", "dw") for row in at(V=V, block=16, tensor=tensor)]
    return [*rows, *at(V=128, block=16, summed=True)]
