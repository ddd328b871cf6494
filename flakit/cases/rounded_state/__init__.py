"""A state that stops counting: handed on in 16 bits between tokens, it takes no more of a write that repeats.

A kernel that goes through a sequence in pieces stores the state between them, and 16 bits take half the memory.
Beside a large number a small one then vanishes: a format with p significant bits holds whole numbers up to 2^p, and at
2^p one more rounds back to it. A state that forgets nothing and is written the same amount at every token stops there.

As told: states are stored in the dtype of the inputs, which bfloat16 training tolerates. As measured: after 256 equal
writes a bfloat16 state stands still, a float16 one after 2,048, and all that comes later is lost. Nothing is NaN, and
the gradients are those of a state that went on. Random writes hide it: their sum grows like the root of the tokens.
The cure is a float32 state, which counts to 2^24; rounding once, where the state is handed out, costs one rounding.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.gradients import rounding_error
from ..knobs import Range
from ..laws import Row

BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of each format, the hidden one included."""
WRITES = ("all equal", "at random")


def written(T: int, writes: str = WRITES[0], seed: int = 0) -> Tensor:
    """What each of T tokens adds to the one number of the state: 1, or a normal number."""
    if writes not in WRITES:
        raise ValueError(f"writes: expected one of {', '.join(WRITES)}, got {writes!r}")
    generator = torch.Generator().manual_seed(seed)
    return torch.ones(T) if writes == WRITES[0] else torch.randn(T, generator=generator)


def run(v: Tensor, dtype: str, *, between: bool = True) -> Tensor:
    """The state after each token, [T] float32, where nothing is forgotten and keys are 1: the sum of what was written.

    v: what is written, [T]. dtype: of the state, to which it is rounded between two tokens or, with between False, at
    the end alone.
    """
    kind = getattr(torch, dtype)
    if not between:
        return v.cumsum(0).to(kind).float()
    state, found = v.new_zeros(()), []
    for value in v:
        state = (state + value).to(kind).float()
        found.append(state)
    return torch.stack(found)


def law(tokens: int, dtype: str, between: bool = True) -> float:
    """The state after so many writes of 1: it stands still from 2^p on.

    >>> law(1000, "bfloat16"), law(1000, "float16"), law(1000, "bfloat16", between=False)
    (256.0, 1000.0, 1000.0)
    """
    return float(min(tokens, 2 ** BITS[dtype])) if between else float(tokens)


def spread(true: Tensor, dtype: str, between: bool = True) -> float:
    """How far independent roundings of the states [T] move the last, of the largest: the root of their squares' sum."""
    rounded = true if between else true[-1:]
    return (rounding_error(getattr(torch, dtype)) * rounded.norm() / true.abs().max()).item()


@dataclass(frozen=True)
class Shown:
    """The state after each token, rounded and in float64, [T] each."""

    rounded: Tensor
    true: Tensor
    dtype: str
    writes: str
    between: bool

    @property
    def stopped(self) -> int | None:
        """The first token whose write changes nothing."""
        steps = torch.diff(self.rounded, prepend=self.rounded.new_zeros(1))
        at = (steps == 0).nonzero()
        return int(at[0]) if self.writes == WRITES[0] and self.between and len(at) else None

    @property
    def lost(self) -> float:
        """How far the last state is off, of the largest that there was."""
        return ((self.rounded[-1] - self.true[-1]).abs() / self.true.abs().max()).item()


@functools.lru_cache(maxsize=8)
def show(*, tokens: int, dtype: str, writes: str, between: bool, seed: int) -> Shown:
    """What `at` measures."""
    v = written(tokens, writes, seed)
    return Shown(run(v, dtype, between=between).double(), v.double().cumsum(0), dtype, writes, between)


def at(
    *,
    tokens: Annotated[int, Range(16, 4096, log=True)] = 1024,
    dtype: Annotated[str, BITS] = "bfloat16",
    writes: Annotated[str, WRITES] = WRITES[0],
    between: bool = True,
    seed: int = 0,
) -> list[Row]:
    """So many writes to a state that forgets nothing: what it is in the end."""
    shown = show(tokens=tokens, dtype=dtype, writes=writes, between=between, seed=seed)
    how = (
        f"{tokens} writes, {writes}, {dtype} at each token"
        if between
        else f"{tokens} writes, {writes}, {dtype} at last"
    )
    if writes == WRITES[1]:
        most = 4 * spread(shown.true, dtype, between)
        return [Row(f"{how}: the state is off by no more than its roundings", math.nan, True, shown.lost <= most)]
    within = 2.0 ** -BITS[dtype]
    return [Row(f"{how}: the state", math.nan, law(tokens, dtype, between), float(shown.rounded[-1]), within)]


def reproduce() -> list[Row]:
    """Where each format stops, that float32 does not, and what random writes show of it."""
    rows = [row for dtype in BITS for tokens in (200, 1024, 4096) for row in at(tokens=tokens, dtype=dtype)]
    return [*rows, *at(between=False), *at(writes=WRITES[1])]
