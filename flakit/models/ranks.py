"""A model over several processes, each of which holds a slice of T: token shift across ranks, and gradient sums.

Operators exchange their states over ranks themselves (`ops.common.ranks`). A layer's token shift also needs the last
token of the previous slice, which `Slice.entered` provides.
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
    """The part of the sequences that this rank, one process of `group`, holds. sequences: their number on all ranks, N.
    piece: which of them are here, enter and leave. cu_seqlens, cu_seqlens_cpu: offsets over all ranks, if packed."""

    group: object
    piece: Piece
    sequences: int
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None

    @property
    def own(self) -> slice:
        """The indices, among all sequences, of those on this rank."""
        return slice(self.piece.first, self.piece.first + (self.piece.sequences or 0)) if self.packed else slice(None)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def here(self, state: Tensor | None, like: Tensor) -> Tensor:
        """Return the rows of an initial state [N, D] (None: zeros) for the sequences on this rank, [rows, D].

        Sequences that began on an earlier rank get zeros; a rank without sequences gets zeros [1, D]. like: x [B, T,
        D], for dtype and device."""
        rows = 1 if self.packed else len(like)
        if self.packed and self.piece.sequences:
            rows = self.piece.sequences
        if state is None or self.piece.sequences == 0:
            return like.new_zeros(rows, like.shape[-1])
        return state[self.own].masked_fill(self.rows(self.piece.entering, rows, like.device), 0)

    def entered(self, last: Tensor, has: Tensor, begun: Tensor) -> Tensor:
        """Return the token before each sequence's first token on this rank, [rows, D].

        last: [rows, D], each sequence's last token here; has: [rows] bool, whether it has a token here. begun: [rows,
        D], the initial state of the sequences that begin here. A collective call: every rank takes part, even one that
        no sequence enters or leaves."""
        rows, piece = len(begun), self.piece
        entering = self.rows(piece.entering, rows, last.device)
        left, known = torch.where(has[:, None], last, begun), has[:, None] | ~entering
        if self.packed:
            left, known = left[-1:], known[-1:] if piece.sequences else known.new_zeros(1, 1)
        return torch.where(entering, _Entering.apply(left, known, self.group), begun)

    def ended(self, state: Tensor) -> Tensor:
        """Return the final states [rows, D] of this rank placed in [N, D], with zeros for sequences that do not end
        here."""
        state = state.masked_fill(self.rows(self.piece.leaving, len(state), state.device), 0)
        if not self.packed:
            return state
        own = self.own
        return F.pad(state[: self.piece.sequences], (0, 0, own.start, self.sequences - own.stop))

    @staticmethod
    def rows(which: slice, rows: int, device: torch.device) -> Tensor:
        """Return a bool mask [rows, 1], True at the rows that `which` selects."""
        mask = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        mask[which] = True
        return mask


class _Entering(torch.autograd.Function):
    """Take each row of left [rows, D] from the nearest earlier rank where known [rows, 1] is True; zeros if there is
    none.

    Forward all-gathers the rows. Backward returns the gradient to the rank that each row came from."""

    @staticmethod
    def forward(ctx, left, known, group):
        rank = dist.get_rank(group)
        rows = gathered(torch.cat((left, known.to(left.dtype)), 1), group)
        left, known = rows[..., :-1], rows[..., -1:] > 0
        ctx.group, ctx.known = group, known
        entering = torch.zeros_like(left[0])
        for r in range(rank):
            entering = torch.where(known[r], left[r], entering)
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        gradients, rank, known = gathered(d.contiguous(), ctx.group), dist.get_rank(ctx.group), ctx.known
        total = torch.zeros_like(d, dtype=torch.promote_types(d.dtype, torch.float32))
        reached = known[rank]
        for r in range(rank + 1, len(known)):
            total += torch.where(reached, gradients[r], 0)
            reached = reached & ~known[r]
        return total.to(d.dtype), None, None


def sum_gradients(parameters: Iterable[Parameter], group) -> None:
    """Sum every parameter's gradient over the ranks of a group in place, one all-reduce per dtype.

    Each rank holds the gradient of its own slice. The same parameters must have gradients on every rank."""
    grads = sorted((p.grad for p in parameters if p.grad is not None), key=lambda x: str(x.dtype))
    for _, same in groupby(grads, key=lambda x: x.dtype):
        same = list(same)
        total = torch.cat([x.flatten() for x in same])
        dist.all_reduce(total, group=group)
        for x, part in zip(same, total.split([x.numel() for x in same]), strict=True):
            x.copy_(part.view_as(x))
