"""An error measure that cannot see: one number for the whole tensor, and a few elements that are totally wrong.

Kernel tests often compare root mean squares: |got - truth| / |truth| over all elements, accepted below 0.005. As
measured: an element replaced by zero adds its own square to the numerator, so the measure is the square root of the
wrong share. 0.005 accepts 2.5e-5 of all elements lost: 26 in a tensor of a million, a whole row of 26 channels if they
sit together. The worst element and the worst row, relative to the tensor's size, see a single one.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
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
    return _accepted(truth, ratios(truth.detach().double().flatten()), tolerance)


def ratios(flat: Tensor) -> Tensor:
    """|got - truth| / |truth| with the first 1, 2, 3, ... elements lost, [N] from the truth [N]."""
    return flat.square().cumsum(0).sqrt() / flat.norm()


def _accepted(truth: Tensor, found: Tensor, tolerance: float) -> Accepted:
    """found: `ratios` of the truth."""
    lost = int((found <= tolerance).sum())
    got = truth.detach().double().flatten().clone()
    got[:lost] = 0
    return Accepted(lost, lost / len(got), compare(got.view(truth.shape), truth))


@dataclass(frozen=True)
class Shown:
    """A tensor whose first elements are lost, and what three measures say as more and more are."""

    tolerance: float
    size: int
    accepted: Accepted
    truth: Tensor
    """The tensor's first rows, relative to its RMS, [rows, 64]: twice as many as have lost elements, or 16."""
    lost: Tensor
    """Their elements that are 0 now, boolean."""
    counts: Tensor
    """Of lost elements, each about a tenth more than the one before, [points]."""
    ratio: Tensor
    """|got - truth| / |truth| with so many lost, [points]."""
    worst_row: Tensor
    worst: Tensor


@lru_cache(maxsize=2)
def _drawn(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A truth [size / 64, 64], its `ratios`, and the size of the worst of its first n elements relative to its RMS."""
    truth = torch.randn(size // 64, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    flat = truth.flatten()
    return truth, ratios(flat), flat.abs().cummax(0).values / flat.square().mean().sqrt()


@lru_cache(maxsize=4)
def show(*, tolerance: float, size: int, seed: int = 0) -> Shown:
    """What `at` measures, element by element."""
    if size % 64 or size < 64:
        raise ValueError(f"size: expected a multiple of 64, got {size}")
    truth, ratio, worst = _drawn(size, seed)
    accepted = _accepted(truth, ratio, tolerance)
    rows = min(len(truth), max(16, 2 * math.ceil(accepted.lost / 64)))
    counts = torch.logspace(0, math.log10(size), 1 + int(24 * math.log10(size)), dtype=torch.float64).long().unique()
    return Shown(
        tolerance,
        size,
        accepted,
        truth=truth[:rows] / truth.square().mean().sqrt(),
        lost=(torch.arange(64 * rows) < accepted.lost).view(rows, 64),
        counts=counts,
        ratio=ratio[counts - 1],
        worst_row=ratios(truth[0])[(counts - 1).clamp(max=63)],  # 1 where the first row is lost
        worst=worst[counts - 1],
    )


def at(
    *,
    tolerance: Annotated[float, Range(1e-3, 0.5, log=True)] = TOLERANCE,
    size: Annotated[int, Range(2**14, 2**20, log=True)] = 2**20,
    seed: int = 0,
) -> list[Row]:
    """A tensor of standard normal numbers, `size` of them in rows of 64, and one tolerance."""
    found = show(tolerance=tolerance, size=size, seed=seed).accepted
    # The count is a sum of squares that has to reach a bound: three of the sqrt(2 / count) by which it scatters. The
    # law is of many; where it lets go of a few, the first element's square alone is often more, and it is none.
    count = law(tolerance) * size
    predicted, within, seen = (
        (law(tolerance), 3 * math.sqrt(2 / count), True) if count > 10 else (math.nan, 0, math.nan)
    )
    recorded = 2.5e-5 if tolerance == TOLERANCE else math.nan
    return [
        Row(f"share of elements lost below a ratio of {tolerance:g}", recorded, predicted, found.share, within),
        Row("the worst row sees it", math.nan, seen, found.errors.worst_row > 0.1),
        Row("the worst element sees it", math.nan, seen, found.errors.worst > 1),
    ]


def reproduce() -> list[Row]:
    """The share of elements that a ratio of 0.005 lets go, and whether the other measures see them."""
    return at()
