"""Packed sequences for kernels: offsets that every kernel may trust, where pieces of the sequences lie, unused rows.

The host would wait for the GPU to look at offsets, so a kernel checks them: from 0, non-decreasing, at most T. Invalid
ones are replaced by zeros: every sequence is then empty, no kernel leaves its tensors, and `Packing.close` fills all
results with NaN. Rows behind the last offset belong to no sequence; `close` writes zeros there.
"""

from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv

BLOCK = 1024
"""Offsets or elements that a program handles at a time."""
MOST_PROGRAMS = 512
"""Of `close_kernel`; each goes on to its next block, so that a call without unused rows launches few."""


@triton.jit(do_not_specialize=("N", "T"))
def check_kernel(cu_seqlens, offsets, N, T, BLOCK: tl.constexpr):
    """offsets [N + 2]: cu_seqlens [N + 1] if valid, zeros if not; then whether they were invalid, 1 or 0."""
    o = tl.arange(0, BLOCK)
    invalid = ((tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + N) > T)).to(tl.int32)
    for begin in range(0, N, BLOCK):
        m = begin + o < N
        start = tl.load(cu_seqlens + begin + o, mask=m, other=0)
        end = tl.load(cu_seqlens + begin + o + 1, mask=m, other=0)
        invalid = tl.maximum(invalid, tl.max((end < start).to(tl.int32), 0))
    for begin in range(0, N + 1, BLOCK):
        m = begin + o <= N
        x = tl.load(cu_seqlens + begin + o, mask=m, other=0)
        tl.store(offsets + begin + o, tl.where(invalid != 0, 0, x).to(tl.int32), mask=m)
    tl.store(offsets + N + 1, invalid)


@triton.jit(do_not_specialize=("N", "tokens", "least", "room", "steps"))
def pieces_kernel(offsets, before, sequence, N, tokens, least, room, steps, BLOCK: tl.constexpr):
    """before [N + 1]: pieces of so many tokens before each sequence; sequence [room], or None: which one each is of.

    A sequence has at least `least` pieces; slots that no piece fills belong to the last sequence. Every program
    computes all of `before`, so that none waits for another, then bisects it, in `steps`, for each of its own slots.
    """
    o = tl.arange(0, BLOCK)
    total = N * 0
    for begin in range(0, N, BLOCK):
        m = begin + o < N
        start = tl.load(offsets + begin + o, mask=m, other=0)
        end = tl.load(offsets + begin + o + 1, mask=m, other=0)
        count = tl.where(m, tl.maximum(tl.cdiv(end - start, tokens), least), 0)
        tl.store(before + begin + o + 1, total + tl.cumsum(count, 0), mask=m)
        total += tl.sum(count, 0)
    tl.store(before, 0)
    if sequence is not None:
        tl.debug_barrier()
        slot = tl.program_id(0) * BLOCK + o
        low, high = tl.zeros_like(slot), tl.zeros_like(slot) + N
        for _ in range(0, steps):
            middle = (low + high) // 2
            later = (low < high) & (tl.load(before + 1 + middle, mask=middle < N, other=0) <= slot)
            high = tl.where(later, high, tl.minimum(high, middle))
            low = tl.where(later, middle + 1, low)
        tl.store(sequence + slot, tl.minimum(low, N - 1), mask=slot < room)


@triton.jit
def _fill(p, first, end, value, BLOCK: tl.constexpr):
    """The value into elements first … end - 1 of p, by all programs together."""
    i, programs = tl.program_id(0), tl.num_programs(0)
    turns = tl.cdiv(tl.maximum(end - first, 0), programs * BLOCK).to(tl.int32)
    for n in range(0, turns):
        o = first + (tl.cast(n, tl.int64) * programs + i) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p + o, tl.full([BLOCK], value, tl.float32).to(p.dtype.element_ty), mask=o < end)


@triton.jit(do_not_specialize=("N", "T", *(f"width_{i}" for i in range(6)), *(f"size_{i}" for i in range(3))))
def close_kernel(
    offsets, N, T, rows_0, rows_1, rows_2, rows_3, rows_4, rows_5, width_0, width_1, width_2, width_3, width_4, width_5,
    whole_0, whole_1, whole_2, size_0, size_1, size_2, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros into the rows [T, width] behind the last offset; NaN into all rows and all of [size] where offsets were
    invalid."""
    last, invalid = tl.load(offsets + N).to(tl.int64), tl.load(offsets + N + 1)
    T = tl.cast(T, tl.int64)
    value = tl.where(invalid != 0, float("nan"), 0.0)
    _fill(rows_0, last * width_0, T * width_0, value, BLOCK)
    if rows_1 is not None:
        _fill(rows_1, last * width_1, T * width_1, value, BLOCK)
    if rows_2 is not None:
        _fill(rows_2, last * width_2, T * width_2, value, BLOCK)
    if rows_3 is not None:
        _fill(rows_3, last * width_3, T * width_3, value, BLOCK)
    if rows_4 is not None:
        _fill(rows_4, last * width_4, T * width_4, value, BLOCK)
    if rows_5 is not None:
        _fill(rows_5, last * width_5, T * width_5, value, BLOCK)
    first = tl.where(invalid != 0, 0, 1).to(tl.int64)
    if whole_0 is not None:
        _fill(whole_0, first * size_0, tl.cast(size_0, tl.int64), value, BLOCK)
    if whole_1 is not None:
        _fill(whole_1, first * size_1, tl.cast(size_1, tl.int64), value, BLOCK)
    if whole_2 is not None:
        _fill(whole_2, first * size_2, tl.cast(size_2, tl.int64), value, BLOCK)


class Pieces(NamedTuple):
    """All sequences cut into pieces of so many tokens."""

    room: int
    """An upper bound on their number, known without the offsets' values."""
    sequence: Tensor
    """Which sequence each is of, int32 [room]."""
    before: Tensor
    """How many come before each sequence, int32 [N + 1]."""


class Packing:
    """N sequences packed into T rows. Launches what a call asks for, once; `kept_shapes` asks for sizes alone."""

    def __init__(self, cu_seqlens: Tensor, T: int):
        self.cu_seqlens, self.T, self.N = cu_seqlens, T, cu_seqlens.shape[0] - 1
        self.kept_rows: list[Tensor] = []
        """[1, T, ...] that a forward keeps for its backward; `close` completes them too, for no output of an operator
        may be left to chance."""

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [N + 2], as `check_kernel` leaves them."""
        offsets = self.cu_seqlens.new_empty(self.N + 2, dtype=torch.int32)
        check_kernel[(1,)](self.cu_seqlens, offsets, self.N, self.T, BLOCK=BLOCK)
        return offsets

    def room(self, tokens: int) -> int:
        """Pieces of so many tokens that there may be."""
        return self.T // tokens + self.N

    def pieces(self, tokens: int, least: int = 0) -> Pieces:
        """least: pieces of a sequence that has fewer."""
        room, at = self.room(tokens), cdiv(self.N + 1, 4) * 4  # both parts aligned to 16 bytes
        both = self.offsets.new_empty(at + room)
        before, sequence = both[: self.N + 1], both[at:]
        pieces_kernel[(cdiv(room, BLOCK),)](
            self.offsets, before, sequence, self.N, tokens, least, room, self.N.bit_length(), BLOCK=BLOCK
        )
        return Pieces(room, sequence, before)

    def before(self, tokens: int) -> Tensor:
        """`pieces(tokens).before` alone."""
        before = self.offsets.new_empty(self.N + 1)
        pieces_kernel[(1,)](self.offsets, before, None, self.N, tokens, 0, 0, 0, BLOCK=BLOCK)
        return before

    def close(self, rows: list[Tensor], whole: list[Tensor]) -> None:
        """Complete a call's results in place: zero rows [1, T, ...] behind the last offset, NaN everywhere if offsets
        are invalid. Up to six of rows, three of the others; all contiguous.
        """
        rows = [*rows, *self.kept_rows]
        widths = [x[0, 0].numel() for x in rows]
        programs = cdiv(max(self.T * max(widths), *(x.numel() for x in whole), 1), BLOCK)
        close_kernel[(min(programs, MOST_PROGRAMS),)](
            self.offsets, self.N, self.T, *_filled(rows, 6, None), *_filled(widths, 6, 0), *_filled(whole, 3, None),
            *_filled([x.numel() for x in whole], 3, 0), BLOCK=BLOCK,
        )  # fmt: skip


def _filled(x: list, size: int, filler) -> list:
    return [*x, *[filler] * (size - len(x))]
