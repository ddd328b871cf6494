"""Packed sequences: N sequences laid end to end in a batch of one, with offsets cu_seqlens [N + 1]."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]
"""What a sequence begins or ends with, [N, ...]: a tensor, or several together."""


class Bucket(NamedTuple):
    """Some of the sequences, as one batch in which each is padded to the longest of them, which has L tokens."""

    members: Tensor  # [n], which of the N sequences
    tokens: Tensor  # [n, L], where each row lies in the packed sequence
    filled: Tensor  # [n, L], whether there is a row at all

    def rows(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [n, L, ...]. The rows added are zero: log decay 0, nothing read, nothing written."""
        return x[0, self.tokens].masked_fill_(~self.filled.view(*self.filled.shape, *[1] * (x.ndim - 2)), 0)

    def states(self, x: State | None) -> State | None:
        """[N, ...] -> [n, ...]."""
        return None if x is None else x[self.members] if isinstance(x, Tensor) else tuple(y[self.members] for y in x)


def buckets(cu_seqlens: Tensor) -> list[Bucket]:
    """Cut N sequences into few batches of similar lengths, the longest first.

    A bucket ends where one more sequence would make it more than twice as large as what it holds. So padding is at
    most a factor of two (a bucket of empty sequences has one row each), the next bucket is at most half as long, and
    there are no more than 2 + log2(T) of them.
    """
    starts, lengths = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    cut, held = [], 0
    for n in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not cut or (len(cut[-1]) + 1) * lengths[cut[-1][0]] > 2 * (held + lengths[n]):
            cut.append([])
            held = 0
        cut[-1].append(n)
        held += lengths[n]

    found = []
    for members in cut:
        row = torch.arange(max(1, lengths[members[0]]), device=cu_seqlens.device)
        first, length = (torch.tensor([x[n] for n in members], device=row.device)[:, None] for x in (starts, lengths))
        filled = row < length
        found.append(Bucket(torch.tensor(members, device=row.device), (first + row).where(filled, 0), filled))
    return found


def joined_rows(cut: Iterable[Bucket], parts: Iterable[Tensor]) -> Tensor:
    """Every bucket's rows [n, L, ...] -> [1, T, ...]."""
    return _joined([x.tokens[x.filled] for x in cut], [y[x.filled] for x, y in zip(cut, parts, strict=True)])[None]


def joined_states(cut: Iterable[Bucket], parts: Sequence[State]) -> State:
    """Every bucket's states [n, ...] -> [N, ...]."""
    if isinstance(parts[0], Tensor):
        return _joined([x.members for x in cut], parts)
    return tuple(joined_states(cut, x) for x in zip(*parts, strict=True))


def _joined(places: Iterable[Tensor], parts: Iterable[Tensor]) -> Tensor:
    return torch.cat(tuple(parts))[torch.cat(tuple(places)).argsort()]


def positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Each token's place in its own sequence, [T]; computed where cu_seqlens lives, without waiting for it."""
    cu_seqlens = cu_seqlens.contiguous()
    token = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]


def chunk_offsets(cu_seqlens: Tensor, chunk_size: int, least: int = 0) -> Tensor:
    """Number of chunks before each sequence, int32 [N + 1]; computed where cu_seqlens lives, without waiting for it.

    least: how many a sequence has that has fewer.
    """
    return pieces_before(lengths_behind_zero(cu_seqlens), chunk_size, least)


def lengths_behind_zero(cu_seqlens: Tensor) -> Tensor:
    """0 and the length of each sequence, [N + 1]."""
    return cu_seqlens.diff(prepend=cu_seqlens[:1])


def pieces_before(lengths: Tensor, tokens: int, least: int = 0) -> Tensor:
    """As `chunk_offsets`, by `lengths_behind_zero`, which serve for pieces of several sizes."""
    before = ((lengths + (tokens - 1)) // tokens).clamp_(min=least).cumsum(0, dtype=torch.int32)
    return before.sub_(least) if least else before  # the 0 at the head was raised too


def sequence_of_each(offsets: Tensor, room: int) -> Tensor:
    """Which sequence each chunk is of, int32 [room], by `chunk_offsets`; of what is not filled, the last one."""
    order = torch.arange(room, device=offsets.device, dtype=torch.int32)
    return torch.searchsorted(offsets[1:], order, right=True, out_int32=True).clamp_(max=len(offsets) - 2)


def max_chunks(T: int, N: int, chunk_size: int) -> int:
    """An upper bound on the chunks of N sequences of T tokens together, known without reading the offsets."""
    return T // chunk_size + N
