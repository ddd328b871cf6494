"""A state that stops counting: handed on in 16 bits between tokens, it takes no more of a write that repeats.

A kernel that processes a sequence in pieces stores the state between them, and 16 bits take half the memory. A small
number added to a large one then vanishes: a format with p significand bits represents integers up to 2^p, and 2^p + 1
rounds back to 2^p. A state without decay that gets an equal write at every token stops there.

Commonly assumed: states are stored in the dtype of the inputs, which bfloat16 training tolerates. As measured: a
bfloat16 state stops after 256 equal writes, a float16 one after 2,048, and later writes are lost. Nothing is NaN, and
the gradients are those of a state that continues. Random writes hide it: their sum grows like the root of the number of
tokens. The cure is a float32 state, which counts to 2^24; rounding the returned state costs a single rounding.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.gradients import rounding_error
from ..knobs import Range
from ..laws import Row

BITS = {"bfloat16": 8, "float16": 11}
"""Significand bits of each format, including the hidden one."""
WRITES = ("all equal", "at random")


def written(T: int, writes: str = WRITES[0], seed: int = 0) -> Tensor:
    """Draw what each of T tokens adds to a state of one number, [T]: 1, or a normal number. ValueError for others."""
    one_of("writes", writes, WRITES)
    generator = torch.Generator().manual_seed(seed)
    return torch.ones(T) if writes == WRITES[0] else torch.randn(T, generator=generator)


def run(v: Tensor, dtype: str, *, between: bool = True) -> Tensor:
    """Return the state after each token, [T] float32, without decay and with keys of 1: the running sum of the writes.

    v: the writes, [T]. dtype: of the state, which is rounded to it after every token, or only at the end with
    between=False.
    """
    kind = getattr(torch, dtype)
    if not between:
        return v.cumsum(0).to(kind).float()
    state, states = v.new_zeros(()), []
    for value in v:
        state = (state + value).to(kind).float()
        states.append(state)
    return torch.stack(states)


def law(tokens: int, dtype: str, between: bool = True) -> float:
    """Predict the state after so many writes of 1: it stops at 2^p.

    >>> law(1000, "bfloat16"), law(1000, "float16"), law(1000, "bfloat16", between=False)
    (256.0, 1000.0, 1000.0)
    """
    return float(min(tokens, 2 ** BITS[dtype])) if between else float(tokens)


def spread(true: Tensor, dtype: str, between: bool = True) -> float:
    """Return the RMS error of the last state from independent roundings of the states [T], relative to the largest."""
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
        """The first token whose write does not change the state."""
        steps = torch.diff(self.rounded, prepend=self.rounded.new_zeros(1))
        at = (steps == 0).nonzero()
        return int(at[0]) if self.writes == WRITES[0] and self.between and len(at) else None

    @property
    def lost(self) -> float:
        """The error of the last state, relative to the largest state."""
        return ((self.rounded[-1] - self.true[-1]).abs() / self.true.abs().max()).item()


@functools.lru_cache(maxsize=8)
def show(*, tokens: int, dtype: str, writes: str, between: bool, seed: int) -> Shown:
    """Return the states behind `at`."""
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
    """Compare the final state with the law, after so many writes without decay."""
    shown = show(tokens=tokens, dtype=dtype, writes=writes, between=between, seed=seed)
    label = f"{tokens} writes, {writes}, {dtype} at each token"
    if not between:
        label = f"{tokens} writes, {writes}, {dtype} at last"
    if writes == WRITES[1]:
        limit = 4 * spread(shown.true, dtype, between)
        return [Row(f"{label}: the state is off by no more than its roundings", math.nan, True, shown.lost <= limit)]
    within = 2.0 ** -BITS[dtype]
    return [Row(f"{label}: the state", math.nan, law(tokens, dtype, between), float(shown.rounded[-1]), within)]


def reproduce() -> list[Row]:
    """Return where each format stops, that float32 does not, and that random writes hide it."""
    rows = [row for dtype in BITS for tokens in (200, 1024, 4096) for row in at(tokens=tokens, dtype=dtype)]
    return [*rows, *at(between=False), *at(writes=WRITES[1])]
