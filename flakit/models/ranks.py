"""A model over several processes, each of which holds a slice of T: what a layer has to know of the slice before its
own, and what is summed over all.

An operator meets the other ranks by itself (`ops.common.ranks`). Beside it a layer looks back by one token, `entering`.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from ..ops.common.ranks import Piece, gathered


class Slice(NamedTuple):
    """What of the sequences lies on this rank."""

    group: object
    piece: Piece
    sequences: int  # on all ranks, N
    cu_seqlens: Tensor | None  # through all ranks
    cu_seqlens_cpu: Tensor | None

    @property
    def own(self) -> slice:
        """Which of all sequences lie here."""
        return slice(self.piece.first, self.piece.first + (self.piece.sequences or 0)) if self.packed else slice(None)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def here(self, state: Tensor | None, like: Tensor) -> Tensor:
        """Of a state [N, D], None for zeros, the rows of those that begin here, zeros for the others; [1, D] of zeros
        where there is none. like: x [B, T, D]."""
        rows = 1 if self.packed else len(like)
        if self.packed and self.piece.sequences:
            rows = self.piece.sequences
        if state is None or self.piece.sequences == 0:
            return like.new_zeros(rows, like.shape[-1])
        return state[self.own].masked_fill(self.rows(self.piece.entering, rows, like.device), 0)

    def entered(self, last: Tensor, has: Tensor, begun: Tensor) -> Tensor:
        """The token before each sequence's first one here, [rows, D].

        last: the last token of each, where `has` says that there is one here. begun: what was there before those that
        begin here. Every rank meets the others, also where nothing enters or leaves.
        """
        rows, piece = len(begun), self.piece
        entering = self.rows(piece.entering, rows, last.device)
        left, known = torch.where(has[:, None], last, begun), has[:, None] | ~entering
        if self.packed:
            left, known = left[-1:], known[-1:] if piece.sequences else known.new_zeros(1, 1)
        return torch.where(entering, _Entering.apply(left, known, self.group), begun)

    def ended(self, state: Tensor) -> Tensor:
        """A state [rows, D] of the sequences here as one [N, D] of all, zero for those that do not end here."""
        state = state.masked_fill(self.rows(self.piece.leaving, len(state), state.device), 0)
        if not self.packed:
            return state
        own = self.own
        return F.pad(state[: self.piece.sequences], (0, 0, own.start, self.sequences - own.stop))

    @staticmethod
    def rows(which: slice, rows: int, device: torch.device) -> Tensor:
        """Those rows as a mask [rows, 1]."""
        found = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        found[which] = True
        return found


class _Entering(torch.autograd.Function):
    """The newest row that a rank before this one has: of left [rows, D] where known [rows, 1] is True there.

    Each rank gathers all of them. The gradient of what entered goes back to the rank that it came from.
    """

    @staticmethod
    def forward(ctx, left, known, group):
        rank = dist.get_rank(group)
        every = gathered(torch.cat((left, known.to(left.dtype)), 1), group)
        left, known = every[..., :-1], every[..., -1:] > 0
        ctx.group, ctx.known = group, known
        found = torch.zeros_like(left[0])
        for r in range(rank):
            found = torch.where(known[r], left[r], found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        every, rank, known = gathered(d.contiguous(), ctx.group), dist.get_rank(ctx.group), ctx.known
        found = torch.zeros_like(d, dtype=torch.promote_types(d.dtype, torch.float32))
        reached = known[rank]
        for r in range(rank + 1, len(known)):
            found += torch.where(reached, every[r], 0)
            reached = reached & ~known[r]
        return found.to(d.dtype), None, None


def sum_gradients(parameters: Iterable[Parameter], group) -> None:
    """Add up every parameter's gradient over the ranks of a group: each has that of its own slice.

    Every rank has a gradient of the same parameters, or none.
    """
    grads = sorted((p.grad for p in parameters if p.grad is not None), key=lambda x: str(x.dtype))
    for _, some in groupby(grads, key=lambda x: x.dtype):
        some = list(some)
        total = torch.cat([x.flatten() for x in some])
        dist.all_reduce(total, group=group)
        for x, part in zip(some, total.split([x.numel() for x in some]), strict=True):
            x.copy_(part.view_as(x))
