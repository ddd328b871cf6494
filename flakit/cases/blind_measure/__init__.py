"""An error measure that cannot see: one number for the whole tensor, and a few elements that are totally wrong.

Kernel tests often compare root mean squares: |got - truth| / |truth| over all elements, accepted below 0.005. As
measured: an element replaced by zero adds its own square to the numerator, so the measure is the square root of the
wrong share. 0.005 accepts 2.5e-5 of all elements lost: 26 in a tensor of a million, a whole row of 26 channels if they
sit together. The worst element and the worst row, relative to the tensor's size, see a single one.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.errors import Errors, compare
from ..knobs import Range
from ..laws import Row

TOLERANCE = 0.005
"""What flash-linear-attention's tests of its operators accept at most, as a ratio of root mean squares."""


class Accepted(NamedTuple):
    """The most elements that can be lost before the measure speaks, and what other measures say of them."""

    lost: int
    share: float
    errors: Errors


def law(tolerance: float = TOLERANCE) -> float:
    """The share of elements that may be totally wrong: tolerance^2."""
    return tolerance**2


def run(truth: Tensor, tolerance: float = TOLERANCE) -> Accepted:
    """Lose elements one after the other until |got - truth| / |truth| passes the tolerance; the last that did not."""
    flat = truth.detach().double().flatten()
    errors = flat.square().cumsum(0).sqrt() / flat.norm()
    lost = int((errors <= tolerance).sum())
    got = flat.clone()
    got[:lost] = 0
    return Accepted(lost, lost / flat.numel(), compare(got.view(truth.shape), truth))


def at(
    *,
    tolerance: Annotated[float, Range(1e-3, 0.5, log=True)] = TOLERANCE,
    size: Annotated[int, Range(2**14, 2**20, log=True)] = 2**20,
    seed: int = 0,
) -> list[Row]:
    """A tensor of standard normal numbers, `size` of them in rows of 64, and one tolerance."""
    if size % 64 or size < 64:
        raise ValueError(f"size: expected a multiple of 64, got {size}")
    truth = torch.randn(size // 64, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = run(truth, tolerance)
    # The count is a sum of squares that has to reach a bound: three of the sqrt(2 / count) by which it scatters. The
    # law is of many; where it lets go of one or two, it may be none.
    count = law(tolerance) * size
    predicted, within, seen = (law(tolerance), 3 * math.sqrt(2 / count), True) if count > 4 else (math.nan, 0, math.nan)
    recorded = 2.5e-5 if tolerance == TOLERANCE else math.nan
    return [
        Row(f"share of elements lost below a ratio of {tolerance:g}", recorded, predicted, found.share, within),
        Row("the worst row sees it", math.nan, seen, found.errors.worst_row > 0.1),
        Row("the worst element sees it", math.nan, seen, found.errors.worst > 1),
    ]


def reproduce() -> list[Row]:
    """The share of elements that a ratio of 0.005 lets go, and whether the other measures see them."""
    return at()
