"""Decay products inside a chunk, built so that nothing can overflow or cancel.

Every pair i > j of a chunk belongs to exactly one *dyadic level* s = C/2, …, 2, 1: the one at which j lies in the left
and i in the right half of one block of 2s rows. There the decay between them factors at the halves' boundary,

    exp(sum between j and i) = exp(sum from the boundary up to i) * exp(sum from j to the boundary),

into two exponentials of *sums* of log decays: both factors are in [0, 1] for every w <= 0, -inf included.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Return the left and right halves of each block of 2s rows of x [..., C, D], as two views [..., C/(2s), s, D]."""
    return x.unflatten(-2, (-1, 2, s)).unbind(-3)


def level_blocks(A: Tensor, s: int, row: int = 1, column: int = 0, width: int | None = None) -> Tensor:
    """Return the (row, column) quarter of each diagonal block of 2s rows of A [..., C, C], as a view [..., C/(2s), s,
    s]. width: columns of a quarter, if not s; A then has `width` columns for each s rows."""
    blocks = A.unflatten(-1, (-1, 2, width or s)).unflatten(-4, (-1, 2, s))
    return blocks[..., row, :, :, column, :].diagonal(0, -4, -2).movedim(-1, -3)


def block_sums(w: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (s, before, after) for s = 1, 2, 4, … C, C a power of two: log decays [..., C, K] inside blocks of s rows.

    before: for each row, the sum of w over the rows of its block before it; after: over those after it. Doubling forms
    them without subtractions, in place: the yielded tensors are valid until the next step.
    """
    before, after, total = torch.zeros_like(w), torch.zeros_like(w), w
    s, C = 1, w.shape[-2]
    while s < C:
        yield s, before, after
        left, right = halves(total, 1)
        halves(before, s)[1].add_(left)
        halves(after, s)[0].add_(right)
        total = (left + right).squeeze(-2)
        s *= 2
    yield C, before, after


def dyadic_levels(w: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (s, log weight [..., C, K]) for s = 1, 2, 4, … C/2, C a power of two.

    The weight of a row in a right half is the decay from that half's start up to the row, exclusive (seen by a read at
    the row); of a row in a left half, the decay from after the row to that half's end (applied to its key).
    w: natural-log decays <= 0.
    """
    for s, before, after in block_sums(w):
        if s < w.shape[-2]:
            yield s, torch.stack((halves(after, s)[0], halves(before, s)[1]), -3).flatten(-4, -2)


class Level(NamedTuple):
    """The decay factors of one dyadic level, between each row of a block of 2s rows and the block's middle."""

    s: int
    key: Tensor  # [..., C/(2s), s, K], of every left half; for s = 1, where no decay lies between two rows, ones
    read: Tensor  # of every right half


class Decays(NamedTuple):
    """All decay factors of a chunk of C rows, in [0, 1], from its natural-log decays."""

    before: Tensor  # e^{sum of w over the chunk's rows before a row}, [..., C, K]
    after: Tensor  # over those after it
    total: Tensor  # over all, [..., K]
    levels: list[Level]  # s = 1, 2, 4, … C/2


def decays(w: Tensor) -> Decays:
    """Return the decay factors of chunks with natural-log decays w [..., C, K], <= 0: exponentials of `block_sums`."""
    levels = []
    for s, before, after in block_sums(w):
        if 1 < s < w.shape[-2]:
            levels.append(Level(s, halves(after, s)[0].exp(), halves(before, s)[1].exp()))
        elif s < w.shape[-2]:
            ones = w.new_ones(()).expand_as(halves(w, 1)[0])
            levels.append(Level(1, ones, ones))
    return Decays(before.exp_(), after.exp_(), w.sum(-2).exp_(), levels)


def sum_before(x: Tensor) -> Tensor:
    """Return the exclusive prefix sum over rows, sum_{j<t} x_j, without subtraction: [..., C, D] -> [..., C, D]."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :].cumsum(-2)


def sum_after(x: Tensor) -> Tensor:
    """Return the exclusive suffix sum over rows, sum_{i>t} x_i, without subtraction: [..., C, D] -> [..., C, D]."""
    return sum_before(x.flip(-2)).flip(-2)
