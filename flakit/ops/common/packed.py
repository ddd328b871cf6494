"""Packed sequences: N sequences laid end to end in a batch of one, with offsets cu_seqlens [N + 1]."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def joined_rows(cut: Iterable[Bucket], parts: Sequence[Tensor], T: int) -> Tensor:
    """Every bucket's rows [n, L, ...] -> [1, T, ...]; zero in rows of no sequence."""
    return _joined([x.tokens[x.filled] for x in cut], [y[x.filled] for x, y in zip(cut, parts, strict=True)], T)[None]


def joined_states(cut: Iterable[Bucket], parts: Sequence[State]) -> State:
    """Every bucket's states [n, ...] -> [N, ...]."""
    if isinstance(parts[0], Tensor):
        return _joined([x.members for x in cut], parts, sum(len(x.members) for x in cut))
    return tuple(joined_states(cut, x) for x in zip(*parts, strict=True))


def _joined(places: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> Tensor:
    """[size, ...] with each row at its place, zero elsewhere."""
    joined = parts[0].new_zeros(size, *parts[0].shape[1:])
    for place, part in zip(places, parts, strict=True):
        joined[place] = part
    return joined


def positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Each token's place in its own sequence, [T]; computed where cu_seqlens lives, without waiting for it.

    Rows behind the last offset count from there.
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
    """`run(rows, state)` for each of N sequences in a batch of one, joined: o [1, T, ...] and the states [N, ...].

    rows: [1, T, ...] by name. zeros: makes the state [1, ...] that an empty sequence has where none is given. Rows of
    no sequence are zero.
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
