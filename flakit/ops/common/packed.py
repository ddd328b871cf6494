"""Packed sequences in PyTorch: N sequences laid end to end in a batch of one, with offsets cu_seqlens [N + 1]."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]
"""Initial or final states of N sequences, [N, ...]: a tensor or a tuple of tensors."""


class Bucket(NamedTuple):
    """n of the N sequences as one batch, each padded to the longest of them, of L tokens. members [n]: their indices.
    tokens [n, L]: the row in the packed batch of each token. filled [n, L]: False for padding."""

    members: Tensor
    tokens: Tensor
    filled: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """Return the bucket's rows [n, L, ...] of x [1, T, ...]; padding is 0: no decay, no read, no write."""
        return x[0, self.tokens].masked_fill_(~self.filled.view(*self.filled.shape, *[1] * (x.ndim - 2)), 0)

    def states(self, x: State | None) -> State | None:
        """Return the bucket's states, [n, ...] of x [N, ...]; None for None."""
        return None if x is None else x[self.members] if isinstance(x, Tensor) else tuple(y[self.members] for y in x)


def buckets(cu_seqlens: Tensor) -> list[Bucket]:
    """Group N sequences into a few batches of similar lengths, the longest first.

    A bucket is full when one more sequence would bring its padded size above twice its tokens. So padding is at most a
    factor of two (a bucket of empty sequences has one row each), the next bucket is at most half as long, and there are
    no more than 2 + log2(T) buckets.
    """
    starts, lengths = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    groups, tokens = [], 0
    for n in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > 2 * (tokens + lengths[n]):
            groups.append([])
            tokens = 0
        groups[-1].append(n)
        tokens += lengths[n]

    batches = []
    for members in groups:
        row = torch.arange(max(1, lengths[members[0]]), device=cu_seqlens.device)
        first, length = (torch.tensor([x[n] for n in members], device=row.device)[:, None] for x in (starts, lengths))
        filled = row < length
        batches.append(Bucket(torch.tensor(members, device=row.device), (first + row).where(filled, 0), filled))
    return batches


def joined_rows(cut: Iterable[Bucket], parts: Sequence[Tensor], T: int) -> Tensor:
    """Join the buckets' rows, [n, L, ...] each, to [1, T, ...]; rows of no sequence are zero."""
    return _joined([x.tokens[x.filled] for x in cut], [y[x.filled] for x, y in zip(cut, parts, strict=True)], T)[None]


def joined_states(cut: Iterable[Bucket], parts: Sequence[State]) -> State:
    """Join the buckets' states, [n, ...] each, to [N, ...]."""
    if isinstance(parts[0], Tensor):
        return _joined([x.members for x in cut], parts, sum(len(x.members) for x in cut))
    return tuple(joined_states(cut, x) for x in zip(*parts, strict=True))


def _joined(places: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> Tensor:
    """Scatter rows to their places in a tensor [size, ...] that is zero elsewhere, and return it."""
    joined = parts[0].new_zeros(size, *parts[0].shape[1:])
    for place, part in zip(places, parts, strict=True):
        joined[place] = part
    return joined


def positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return each token's position in its own sequence, [T], on cu_seqlens' device, without synchronizing.

    Rows past the last offset count from there.
    """
    cu_seqlens = cu_seqlens.contiguous()
    token = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]


def one_by_one(
    run: Callable[[Mapping[str, Tensor], State | None], tuple[Tensor, State]],
    rows: Mapping[str, Tensor],
    state: State | None,
    cu_seqlens: Tensor,
    zeros: Callable[[], State],
) -> tuple[Tensor, State]:
    """Call `run(rows, state)` on each of N sequences in a batch of one; return o [1, T, ...] and the states [N, ...].

    rows: [1, T, ...] by name. zeros: returns the state [1, ...] of an empty sequence that has no initial one. Rows of
    no sequence are zero in o.
    """
    outputs, states, ends = [], [], cu_seqlens.tolist()
    for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        own = None if state is None else _each(lambda x, n=n: x[n : n + 1], state)
        if begin == end:
            states.append(zeros() if own is None else own)
            continue
        o, final = run({name: x[:, begin:end] for name, x in rows.items()}, own)
        outputs.append(o)
        states.append(final)
    tokens = next(iter(rows.values())).shape[1]
    outputs.append(outputs[0].new_zeros(1, tokens - ends[-1], *outputs[0].shape[2:]))
    if isinstance(states[0], Tensor):
        return torch.cat(outputs, 1), torch.cat(states)
    return torch.cat(outputs, 1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _each(change: Callable[[Tensor], Tensor], state: State) -> State:
    return change(state) if isinstance(state, Tensor) else tuple(change(part) for part in state)
