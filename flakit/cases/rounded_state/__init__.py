"""A state that stops counting: handed on in 16 bits between tokens, it takes no more of a write that repeats.

A kernel that processes a sequence in parts stores the state between them, and 16 bits take half the memory. A small
number added to a large one then vanishes: a format with p significand bits represents integers up to 2^p, and 2^p + 1
rounds back to 2^p. A state without decay that gets an equal write at every token stops there.

Commonly assumed: states are stored in the dtype of the inputs, which bfloat16 training tolerates. As measured: a
bfloat16 state stops after 256 equal writes, a float16 one after 2,048, and later writes are lost. Nothing is NaN, and
the gradients are those of a state that continues. Random writes hide it: their sum grows like the root of the number of
tokens. The cure is a float32 state, which counts to 2^24; rounding the returned state costs a single rounding.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.gradients import rounding_error
from ..knobs import Range
from ..laws import Measured, Row

BITS = {"bfloat16": 8, "float16": 11}
"""Significand bits of each format, including the hidden one."""
WRITES = ("all equal", "at random")


def written(T: int, writes: str = WRITES[0], seed: int = 0) -> Tensor:
    """Return what each of T tokens adds to a scalar state, [T]: 1 ("all equal") or a standard normal ("at random").
    Raises ValueError for other `writes`."""
    one_of("writes", writes, WRITES)
    generator = torch.Generator().manual_seed(seed)
    return torch.ones(T) if writes == WRITES[0] else torch.randn(T, generator=generator)


def run(v: Tensor, dtype: str, *, between: bool = True) -> Tensor:
    """Return the state after each token, [T] float32, without decay and with keys of 1: the running sum of v [T].

    dtype: name of the state's dtype. between: round to it after every token, else only each returned state.
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
    """Predict the state after `tokens` writes of 1: if rounded between tokens it stops at 2^p, p = `BITS[dtype]`.

    >>> law(1000, "bfloat16"), law(1000, "float16"), law(1000, "bfloat16", between=False)
    (256.0, 1000.0, 1000.0)
    """
    return float(min(tokens, 2 ** BITS[dtype])) if between else float(tokens)


def spread(true: Tensor, dtype: str, between: bool = True) -> float:
    """Predict the RMS error of the last of the states `true` [T], rounded as in `run`, relative to the largest one."""
    rounded = true if between else true[-1:]
    return (rounding_error(getattr(torch, dtype)) * rounded.norm() / true.abs().max()).item()


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and arguments, and the state after each token, rounded and exact, float64 [T]."""

    rounded: Tensor
    true: Tensor
    dtype: str
    writes: str
    between: bool
    lost: float
    """The absolute error of the last state, relative to the largest |state| in float64."""

    @property
    def stopped(self) -> int | None:
        """Index of the first token whose write does not change the state; None for random writes or no `between`."""
        steps = torch.diff(self.rounded, prepend=self.rounded.new_zeros(1))
        at = (steps == 0).nonzero()
        return int(at[0]) if self.writes == WRITES[0] and self.between and len(at) else None


def show(
    *,
    tokens: Annotated[int, Range(16, 4096, log=True)] = 1024,
    dtype: Annotated[str, BITS] = "bfloat16",
    writes: Annotated[str, WRITES] = WRITES[0],
    between: bool = True,
    seed: int = 0,
) -> Shown:
    """Add one write per token to a state without decay. Return the last state beside the prediction of `law`, or for
    random writes whether its error is within 4 times `spread`. writes, between: as in `written` and `run`."""
    v = written(tokens, writes, seed)
    rounded, true = run(v, dtype, between=between).double(), v.double().cumsum(0)
    lost = ((rounded[-1] - true[-1]).abs() / true.abs().max()).item()
    label = f"{tokens} writes, {writes}, {dtype} at each token"
    if not between:
        label = f"{tokens} writes, {writes}, {dtype} at last"
    if writes == WRITES[1]:
        small = lost <= 4 * spread(true, dtype, between)
        row = Row(f"{label}: the state is off by no more than its roundings", math.nan, True, small)
    else:
        expected, within = law(tokens, dtype, between), 2.0 ** -BITS[dtype]
        row = Row(f"{label}: the state", math.nan, expected, float(rounded[-1]), within)
    return Shown([row], rounded, true, dtype, writes, between, lost)


def reproduce() -> list[Row]:
    """Return predicted and measured states by format and length, with rounding at the end, and with random writes."""
    rows = [row for dtype in BITS for tokens in (200, 1024, 4096) for row in show(tokens=tokens, dtype=dtype).rows]
    return rows + show(between=False).rows + show(writes=WRITES[1]).rows
