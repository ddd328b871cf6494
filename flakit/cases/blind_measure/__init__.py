"""An error measure that cannot see: one number for the whole tensor, and a few elements that are totally wrong.

Kernel tests often compare root mean squares: |got - truth| / |truth| over all elements, accepted below 0.005. As
measured: an element replaced by zero adds its own square to the numerator, so the measure is the square root of the
wrong fraction. 0.005 accepts the loss of 2.5e-5 of all elements: 26 in a tensor of a million, or a full row of 26
channels. The largest error of an element and of a row, relative to the tensor's RMS, detect a single one.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.errors import Errors, compare
from ..knobs import Range
from ..laws import Measured, Row

TOLERANCE = 0.005
"""The largest ratio of root mean squares that flash-linear-attention's operator tests accept."""


class Accepted(NamedTuple):
    """How many elements (`lost`) a tolerance accepts as zeros, their share of all, and other measures of the error."""

    lost: int
    share: float
    errors: Errors


def law(tolerance: float = TOLERANCE) -> float:
    """Predict the fraction of elements that may be totally wrong: tolerance^2."""
    return tolerance**2


def ratios(flat: Tensor) -> Tensor:
    """Return |got - truth| / |truth| with the first 1, 2, …, N elements of the truth [N] replaced by zero, [N]."""
    return flat.square().cumsum(0).sqrt() / flat.norm()


def run(truth: Tensor, ratio: Tensor, tolerance: float = TOLERANCE) -> Accepted:
    """Zero elements from the first on while |got - truth| / |truth| is within the tolerance; return what is accepted.
    truth: any shape, N elements. ratio: its `ratios`, [N]. Errors are measured in float64."""
    lost = int((ratio <= tolerance).sum())
    got = truth.detach().double().flatten().clone()
    got[:lost] = 0
    return Accepted(lost, lost / len(got), compare(got.view(truth.shape), truth))


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the start of a tensor with the zeroed elements, and three error measures, ratio,
    worst_row and worst, against the number of zeroed elements. size: number of elements of the full tensor."""

    tolerance: float
    size: int
    accepted: Accepted
    truth: Tensor
    """The tensor's first rows, relative to its RMS, [rows, 64]: twice those with zeroed elements, at least 16."""
    lost: Tensor
    """Which elements of `truth` are zeroed, boolean [rows, 64]."""
    counts: Tensor
    """Numbers of zeroed elements, in steps of about a tenth, [points]."""
    ratio: Tensor
    """|got - truth| / |truth| at each count, [points]."""
    worst_row: Tensor
    """|got - truth| / |truth| of the first row at each count, [points]."""
    worst: Tensor
    """The largest error of an element, relative to the tensor's RMS, at each count, [points]."""


@lru_cache(maxsize=2)
def _drawn(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random truth [size / 64, 64], its `ratios`, and max |x| / RMS of its first n elements, [size]."""
    truth = torch.randn(size // 64, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    flat = truth.flatten()
    return truth, ratios(flat), flat.abs().cummax(0).values / flat.square().mean().sqrt()


def show(
    *,
    tolerance: Annotated[float, Range(1e-3, 0.5, log=True)] = TOLERANCE,
    size: Annotated[int, Range(2**14, 2**20, log=True)] = 2**20,
    seed: int = 0,
) -> Shown:
    """Measure which fraction of `size` normal numbers, in rows of 64, may be zero at a tolerated ratio of root mean
    squares, beside `law`, and whether other measures see it. Raises ValueError unless size is a multiple of 64."""
    if size % 64 or size < 64:
        raise ValueError(f"size: expected a multiple of 64, got {size}")
    truth, ratio, worst = _drawn(size, seed)
    accepted = run(truth, ratio, tolerance)
    drawn = min(len(truth), max(16, 2 * math.ceil(accepted.lost / 64)))
    counts = torch.logspace(0, math.log10(size), 1 + int(24 * math.log10(size)), dtype=torch.float64).long().unique()
    return Shown(
        _rows(accepted, tolerance, size),
        tolerance,
        size,
        accepted,
        truth=truth[:drawn] / truth.square().mean().sqrt(),
        lost=(torch.arange(64 * drawn) < accepted.lost).view(drawn, 64),
        counts=counts,
        ratio=ratio[counts - 1],
        worst_row=ratios(truth[0])[(counts - 1).clamp(max=63)],  # 1 once the first row is lost
        worst=worst[counts - 1],
    )


def _rows(accepted: Accepted, tolerance: float, size: int) -> list[Row]:
    # The count is reached by a sum of squares, whose relative deviation is sqrt(2 / count): allow three of it. The law
    # needs a large count; for a small one the first element's square alone often exceeds the bound, and it is 0.
    count = law(tolerance) * size
    predicted, within, seen = (
        (law(tolerance), 3 * math.sqrt(2 / count), True) if count > 10 else (math.nan, 0, math.nan)
    )
    recorded = 2.5e-5 if tolerance == TOLERANCE else math.nan
    return [
        Row(f"share of elements lost below a ratio of {tolerance:g}", recorded, predicted, accepted.share, within),
        Row("the worst row sees it", math.nan, seen, accepted.errors.worst_row > 0.1),
        Row("the worst element sees it", math.nan, seen, accepted.errors.worst > 1),
    ]


def reproduce() -> list[Row]:
    """Return the recorded, predicted and measured share of elements that a ratio of 0.005 accepts as zeros."""
    return show().rows
