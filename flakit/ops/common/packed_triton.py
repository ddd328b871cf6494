"""Packed sequences for kernels: checked offsets, the layout of pieces of the sequences, unused rows.

Reading offsets on the host would synchronize with the GPU, so a kernel checks them: from 0, non-decreasing, at most T.
It replaces invalid ones by zeros: every sequence is then empty, no kernel accesses memory out of bounds, and
`Packing.close` fills all results with NaN. Rows past the last offset belong to no sequence; `close` zeroes them.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_triton import Memory, Part, launched, parts
from .launch import cdiv

BLOCK = 1024
"""Offsets or elements that a program handles at a time."""
MAX_PROGRAMS = 512
"""Largest grid of `close_kernel`, whose programs loop over blocks, so that a call without unused rows launches few."""
SIZES = 3
"""Sizes of pieces that one launch lays out, as many as a call needs."""


@triton.jit
def _fill(p, first, end, value, BLOCK: tl.constexpr):
    """Fill elements first … end - 1 of p with value, by all programs together."""
    i, programs = tl.program_id(0), tl.num_programs(0)
    turns = tl.cdiv(tl.maximum(end - first, 0), programs * BLOCK).to(tl.int32)
    for n in range(0, turns):
        o = first + (tl.cast(n, tl.int64) * programs + i) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p + o, tl.full([BLOCK], value, tl.float32).to(p.dtype.element_ty), mask=o < end)


@launched("N", "T", "steps", "size", *(f"{name}_{i}" for name in ("tokens", "least", "capacity") for i in range(SIZES)))
def layout_kernel(
    cu_seqlens, layout, zeros, size, N, T, steps, tokens_0, least_0, capacity_0, tokens_1, least_1, capacity_1,
    tokens_2, least_2, capacity_2, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check the offsets cu_seqlens [N + 1] of T rows and cut the sequences into pieces of tokens_i tokens, i = 0, 1, 2.
    Write zeros into zeros [size], unless that is None.

    layout: one int32 buffer. First [N + 2]: cu_seqlens if valid, else zeros, then 1 if they were invalid, else 0. Then
    for each i: the number of pieces before each sequence [N + 1], and the sequence of each piece [capacity_i]. All
    begin at multiples of 4 elements. A sequence has at least least_i pieces; unused slots belong to the last sequence.

    Each i has its own programs, one for each BLOCK slots; none if capacity_i is 0. Every program checks the offsets and
    computes all N + 1 counts, so that none waits for another, then bisects them, in `steps` steps, for its slots.
    """
    o, i = tl.arange(0, BLOCK), tl.program_id(0)
    if zeros is not None:
        _fill(zeros, 0, size, 0, BLOCK)
    invalid = ((tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + N) > T)).to(tl.int32)
    for begin in range(0, N, BLOCK):
        m = begin + o < N
        start = tl.load(cu_seqlens + begin + o, mask=m, other=0)
        end = tl.load(cu_seqlens + begin + o + 1, mask=m, other=0)
        invalid = tl.maximum(invalid, tl.max((end < start).to(tl.int32), 0))
    if i == 0:
        for begin in range(0, N + 1, BLOCK):
            m = begin + o <= N
            x = tl.load(cu_seqlens + begin + o, mask=m, other=0)
            tl.store(layout + begin + o, tl.where(invalid != 0, 0, x).to(tl.int32), mask=m)
        tl.store(layout + N + 1, invalid)

    programs_0 = tl.maximum(tl.cdiv(capacity_0, BLOCK), 1)
    programs_1 = programs_0 + tl.maximum(tl.cdiv(capacity_1, BLOCK), 1)
    is_first, is_third = i < programs_0, i >= programs_1
    tokens = tl.where(is_first, tokens_0, tl.where(is_third, tokens_2, tokens_1))
    least = tl.where(is_first, least_0, tl.where(is_third, least_2, least_1))
    capacity = tl.where(is_first, capacity_0, tl.where(is_third, capacity_2, capacity_1))
    own = i - tl.where(is_first, 0, tl.where(is_third, programs_1, programs_0))
    width = tl.cdiv(N + 1, 4) * 4
    second = tl.cdiv(N + 2, 4) * 4 + width + tl.cdiv(capacity_0, 4) * 4
    third = second + width + tl.cdiv(capacity_1, 4) * 4
    before = layout + tl.where(is_first, tl.cdiv(N + 2, 4) * 4, tl.where(is_third, third, second))

    total = N * 0
    for begin in range(0, N, BLOCK):
        m = begin + o < N
        start = tl.load(cu_seqlens + begin + o, mask=m, other=0)
        end = tl.load(cu_seqlens + begin + o + 1, mask=m, other=0)
        length = tl.where(invalid != 0, 0, end - start).to(tl.int32)
        count = tl.where(m, tl.maximum(tl.cdiv(length, tokens), least), 0)
        tl.store(before + begin + o + 1, total + tl.cumsum(count, 0), mask=m)
        total += tl.sum(count, 0)
    tl.store(before, 0)
    tl.debug_barrier()
    slot = own * BLOCK + o
    low, high = tl.zeros_like(slot), tl.zeros_like(slot) + N
    for _ in range(0, steps):
        middle = (low + high) // 2
        later = (low < high) & (tl.load(before + 1 + middle, mask=middle < N, other=0) <= slot)
        high = tl.where(later, high, tl.minimum(high, middle))
        low = tl.where(later, middle + 1, low)
    tl.store(before + width + slot, tl.minimum(low, N - 1), mask=slot < capacity)


@launched("N", "T", *(f"width_{i}" for i in range(6)), *(f"size_{i}" for i in range(3)))
def close_kernel(
    offsets, N, T, rows_0, rows_1, rows_2, rows_3, rows_4, rows_5, width_0, width_1, width_2, width_3, width_4, width_5,
    whole_0, whole_1, whole_2, size_0, size_1, size_2, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write zeros into the rows past the last offset; if offsets were invalid, NaN into all rows and whole tensors.

    offsets [N + 2]: from `layout_kernel`, the last is 1 if they were invalid. rows_i [T, width_i] and whole_i
    [size_i]: contiguous, or None.
    """
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
    """The layout of all packed sequences cut into pieces of one size in tokens, chunks for example."""

    capacity: int
    """An upper bound on the number of pieces, independent of the offsets' values."""
    sequence: Part
    """The sequence of each piece, int32 [capacity], plus up to three elements of padding."""
    before: Part
    """The number of pieces before each sequence, int32 [N + 1], plus up to three elements of padding."""


class Packing:
    """N sequences packed into T rows, for the kernels of one call. Offsets stay on the device. `layout_kernel` computes
    a layout once, for a forward and its backward, and not before `offsets` or `pieces` is read.

    returned: whether an operator returns what the forward saves for its backward. It must then be initialized, also
    where no sequence has a token or a chunk; no kernel reads it there. memory: of the forward's launches, later of the
    backward's.
    """

    memory = Memory()

    def __init__(self, cu_seqlens: Tensor, T: int, returned: bool = False):
        self.cu_seqlens, self.T, self.N, self.returned = cu_seqlens, T, cu_seqlens.shape[0] - 1, returned
        self.saved_rows: list[Tensor] = []
        """Tensors [1, T, ...] that a forward saves for its backward; `close` completes them too if `returned`."""
        self._requested: list[tuple[int, int]] = []
        self._laid_out: dict[tuple[int, int], Pieces] = {}
        self._offsets: Part | None = None
        self._zeros: Part | None = None

    def anew(self) -> "Packing":
        """Return the same packing, of which nothing is laid out."""
        return Packing(self.cu_seqlens, self.T, self.returned)

    @property
    def offsets(self) -> Part:
        """The checked offsets, int32 [N + 2] as from `layout_kernel`, plus up to three elements of padding."""
        if self._offsets is None:
            self._lay_out()
        return self._offsets

    def zero(self, x: Part) -> None:
        """Set x to zeros, which no kernel uses before one that needs the layout of the sequences."""
        if self._offsets is None:
            self._zeros = x
        else:
            x.view().zero_()

    def capacity(self, tokens: int) -> int:
        """Return an upper bound on the number of pieces of `tokens` tokens."""
        return self.T // tokens + self.N

    def request(self, tokens: int, least: int = 0) -> None:
        """Request `pieces` of `tokens` tokens, at least `least` a sequence; one launch lays out several requests."""
        if (tokens, least) not in self._laid_out and (tokens, least) not in self._requested:
            self._requested.append((tokens, least))

    def pieces(self, tokens: int, least: int = 0) -> Pieces:
        """Return the layout in pieces of `tokens` tokens, at least `least` for each sequence; launch it if needed."""
        while (pieces := self._laid_out.get((tokens, least))) is None:
            self.request(tokens, least)
            self._lay_out()
        return pieces

    def _lay_out(self) -> None:
        """Lay out the requested sizes of pieces in one launch, at most SIZES of them."""
        keys, self._requested = (*self._requested[:SIZES],), self._requested[SIZES:]
        # A program writes `before` of some size in any case.
        programs, sizes, args = _layout(self.N, self.T, keys := keys or ((max(self.T, 1), 0),))
        layout, zeros = self.cu_seqlens.new_empty(sum(sizes), dtype=torch.int32), self._zeros
        args = self.cu_seqlens, layout, zeros, 0 if zeros is None else zeros.size, *args
        self.memory.launch(layout_kernel, programs, args, dict, zeros is None, BLOCK=BLOCK)
        offsets, *rest = parts(layout, sizes)
        self._offsets, self._zeros = offsets if self._offsets is None else self._offsets, None
        for key, before, sequence in zip(keys, rest[::2], rest[1::2], strict=True):
            self._laid_out[key] = Pieces(self.capacity(key[0]), sequence, before)

    def close(self, rows: list[Tensor], whole: list[Tensor]) -> None:
        """Complete a call's results in place: zero rows past the last offset, NaN everywhere if offsets are invalid.
        rows: up to six tensors [1, T, ...]; whole: up to three of any shape; all contiguous."""
        rows = [*rows, *self.saved_rows] if self.returned else rows
        self.saved_rows = []
        kind = len(rows), len(whole)
        widths = self.memory.once(kind, lambda: [*[x.numel() // self.T for x in rows], *[0] * (6 - len(rows))])
        sizes = [x.numel() for x in whole]
        programs = min(cdiv(max(self.T * max(widths), *sizes, 1), BLOCK), MAX_PROGRAMS)
        rows, whole, sizes = (_filled(rows, 6, None), _filled(whole, 3, None), _filled(sizes, 3, 0))
        args = self.offsets, self.N, self.T, *rows, *widths, *whole, *sizes
        self.memory.launch(close_kernel, programs, args, dict, *kind, BLOCK=BLOCK)


@lru_cache(1024)
def _layout(N: int, T: int, keys: tuple[tuple[int, int], ...]) -> tuple[int, list[int], list[int]]:
    """Return, of the launch that lays out pieces of these (tokens, least) for N sequences in T rows: its programs, the
    sizes of the parts of `layout`, and the kernel's arguments from N on."""
    sizes, args, programs = [cdiv(N + 2, 4) * 4], [N, T, N.bit_length()], 0
    for tokens, least in keys:
        capacity = T // tokens + N
        sizes += cdiv(N + 1, 4) * 4, cdiv(capacity, 4) * 4
        args += tokens, least, capacity
        programs += cdiv(capacity, BLOCK)
    return programs, sizes, [*args, *(1, 0, 0) * (SIZES - len(keys))]


def _filled(x: list, size: int, filler) -> list:
    return [*x, *[filler] * (size - len(x))]
