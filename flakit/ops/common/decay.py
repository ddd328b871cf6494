"""Decay products inside a chunk, built so that nothing can overflow or cancel.

Every pair i > j of a chunk meets in exactly one *dyadic level* s = C/2, …, 2, 1: the one at which j lies in the left
and i in the right half of one block of 2s rows. There the decay between them factors at the halves' boundary,

    exp(sum between j and i) = exp(sum from the boundary up to i) * exp(sum from j to the boundary),

into two exponentials of *sums* of log decays: both factors are in [0, 1] for every w <= 0, -inf included.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Left and right halves of each block of 2s rows: [..., C, D] -> two views [..., C/(2s), s, D]."""
    return x.unflatten(-2, (-1, 2, s)).unbind(-3)


def level_blocks(A: Tensor, s: int, row: int = 1, column: int = 0) -> Tensor:
    """The (row, column) quarter of each diagonal block of 2s rows, a view: [..., C, C] -> [..., C/(2s), s, s]."""
    blocks = A.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))
    return blocks[..., row, :, :, column, :].diagonal(0, -4, -2).movedim(-1, -3)


def dyadic_levels(w: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (s, log weight [..., C, K]) for s = 1, 2, 4, … C/2, C a power of two.

    The weight of a row in a right half is the decay from that half's start up to the row, exclusive (what a read at
    the row sees); of a row in a left half, the decay from after the row to that half's end (what its key undergoes).
    Sums are formed by doubling, so that no exponent is ever a difference.
    w: natural-log decays <= 0.
    """
    C = w.shape[-2]
    read, key, total = torch.zeros_like(w), torch.zeros_like(w), w
    s = 1
    while s < C:
        yield s, torch.stack((halves(key, s)[0], halves(read, s)[1]), -3).flatten(-4, -2)
        left, right = halves(total, s)
        read = torch.stack((halves(read, s)[0], halves(read, s)[1] + left), -3).flatten(-4, -2)
        key = torch.stack((halves(key, s)[0] + right, halves(key, s)[1]), -3).flatten(-4, -2)
        total = torch.stack((left + right,) * 2, -3).flatten(-4, -2)
        s *= 2


def sum_before(x: Tensor) -> Tensor:
    """Exclusive prefix sum over rows, sum_{j<t} x_j, without subtracting: [..., C, D] -> the same."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :].cumsum(-2)


def sum_after(x: Tensor) -> Tensor:
    """Exclusive suffix sum over rows, sum_{i>t} x_i, without subtracting: [..., C, D] -> the same."""
    return sum_before(x.flip(-2)).flip(-2)
