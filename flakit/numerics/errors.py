"""Error measures: the distance of a tensor from the truth in three numbers, so that none hides what the others show.

A global root mean square alone tolerates a few totally wrong elements, so every comparison also reports the worst
element and the worst row, and counts the non-finite values by kind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import real_tensor


@dataclass(frozen=True)
class Errors:
    """The distance of a tensor from its truth. Every error is inf where a value that should be finite is not."""

    l2: float  # |got - truth| / |truth|
    worst: float  # largest |got - truth| / RMS of truth
    worst_index: tuple[int, ...] | None  # its index (of the first non-finite one, if any); None if all are equal
    worst_row: float  # largest relative L2 over rows (the last axis); rows of zeros are measured by the tensor's RMS
    non_finite: int  # values that are non-finite where the truth is finite
    share: float  # the same as a share of all values
    nan: int
    pos_inf: int
    neg_inf: int

    @property
    def finite(self) -> bool:
        """Whether every value is finite that should be."""
        return self.non_finite == 0

    def __str__(self) -> str:
        if self.finite:
            where = "" if self.worst_index is None else f" at {list(self.worst_index)}"
            return f"L2 {self.l2:.1e}, worst element {self.worst:.1e}{where}, worst row {self.worst_row:.1e}"
        kinds = (f"{n} {kind}" for kind, n in (("NaN", self.nan), ("+inf", self.pos_inf), ("-inf", self.neg_inf)) if n)
        first = list(self.worst_index or ())
        return f"non-finite {100 * self.share:.3g}% ({', '.join(kinds)}), first at {first}"


def out_of_range(got: Tensor, truth: Tensor) -> Tensor:
    """Return the mask where `got` is rightly infinite: the true value has the same sign and exceeds the largest number
    of `got`'s dtype, or is within four roundings of it."""
    largest, eps = torch.finfo(got.dtype).max, torch.finfo(got.dtype).eps
    return got.isinf() & (got.sign() == truth.sign()) & (truth.abs() > largest * (1 - 4 * eps))


def compare(got: Tensor, truth: Tensor) -> Errors:
    """Compare `got` with `truth` in float64. Raises TypeError unless both are real, ValueError unless of one shape.

    A truth of zeros is compared exactly: the relative errors are 0 or inf. Where the truth itself is infinite, the same
    infinity is correct and anything else is an infinite error; where it is NaN, the error counts as 0.
    """
    got, truth = real_tensor("got", got), real_tensor("truth", truth)
    if got.shape != truth.shape:
        raise ValueError(f"got: expected {list(truth.shape)} like truth, got {list(got.shape)}")
    if got.numel() == 0:
        return Errors(0.0, 0.0, None, 0.0, 0, 0.0, 0, 0, 0)
    truth = truth.detach().double()
    got = got.detach().to(truth)
    finite, kinds = truth.isfinite(), [0, 0, 0]
    # In units of the largest true value, squares cannot overflow.
    unit = torch.where(finite, truth, 0.0).abs().max().item() or 1.0
    size = torch.where(finite, truth / unit, 0.0)
    error = (got / unit - size).abs()
    if not error.isfinite().all() or not finite.all():
        kinds = [int((hit & finite).sum()) for hit in (got.isnan(), got == torch.inf, got == -torch.inf)]
        settled = (got == truth) | truth.isnan()
        error = torch.where(settled, 0.0, (got / unit - truth / unit).abs().nan_to_num(torch.inf, torch.inf))
    non_finite = sum(kinds)

    rms = size.square().mean().sqrt()
    rows = torch.atleast_1d(size).square().mean(-1).sqrt()
    return Errors(
        l2=_ratio(error.norm(), size.norm()),
        worst=_ratio(error.max(), rms),
        worst_index=_first(error, non_finite),
        worst_row=_ratio(torch.atleast_1d(error).square().mean(-1).sqrt(), torch.where(rows > 0, rows, rms)),
        non_finite=non_finite,
        share=non_finite / got.numel(),
        nan=kinds[0],
        pos_inf=kinds[1],
        neg_inf=kinds[2],
    )


def relative_l2(got: Tensor, truth: Tensor) -> float:
    """Return |got - truth| / |truth|, which is `compare(got, truth).l2`."""
    return compare(got, truth).l2


def _ratio(error: Tensor, size: Tensor) -> float:
    """Return the largest element of error / size, both of one shape, with 0 / 0 = 0."""
    return torch.where(error == 0, 0.0, error / size).max().item()


def _first(error: Tensor, non_finite: int) -> tuple[int, ...] | None:
    if not error.any():
        return None
    at = error.isinf().double().argmax() if non_finite else error.argmax()
    return tuple(int(i) for i in torch.unravel_index(at, error.shape))
