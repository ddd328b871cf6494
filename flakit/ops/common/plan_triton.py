"""The plan of a chunked call in Triton: sizes, the partition into chunks, the storage of states, and the launches that
compute the state entering each chunk (`stream_triton`).

A chunk is mild if e^(its decays relative to its middle row) fits float32 (`tiles_triton`): kernels have a faster path.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch

from .dispatch import interpreted
from .kernel_triton import Memory, Part
from .launch import (
    CHUNK_SIZE,
    FULL_GPU,
    LONG_CHUNK_SIZE,
    NARROWEST,
    SHORT_CHUNK_SIZE,
    SHORTEST_PART,
    TABLE,
    Launch,
    block,
    cdiv,
    elements,
    width,
)
from .packed_triton import Packing
from .stream_triton import scan_kernel, stream_kernel


class Stored(NamedTuple):
    """The states entering all chunks. In float32: [chunks, H, K, V]. In float16: flat, with the scales of their rows
    and mild_scales, those of the states decayed to the chunks' middles, flat [chunks, H, NV, K] each. whole: the tensor
    of `ChunkPlan.stored_shape` of which they are views."""

    whole: torch.Tensor
    states: torch.Tensor | Part
    scales: torch.Tensor | Part | None
    mild_scales: torch.Tensor | Part | None


class ChunkPlan:
    """What all launches of a call share: sizes, positions of chunks, and rows of the launch table.

    op: prefix of its rows in the launch table, "rwkv6" for example. x: a sequence [B, T, H, rows]; V: columns of the
    state [rows, V]. chunk_size: 0 for the default. flags: how many numbers say whether a chunk of a head is mild; 0:
    one for each block of K. Attributes: N, chunks: numbers of sequences and chunks (packed: an upper bound of these);
    C: the chunk length; scaled: states are stored in float16 with row scales; empty(shape): allocates float32.
    """

    blocks = False
    """Whether the operator has kernels for chunks of which only the blocks are mild (`halves_and_mild`)."""

    def __init__(
        self, memory: Memory, op: str, x: torch.Tensor, V: int, packing: Packing | None, chunk_size: int, flags: int = 0
    ):
        self.memory = memory
        (B, self.T, self.H, self.rows), self.columns = x.shape, V
        self.op, self.width = op, width(x.element_size())
        self.scaled, self.C = memory.once("chunks", lambda: cut_into_chunks(op, x, V, chunk_size))
        self.packing = packing
        if packing is None:
            self.N, self.chunks = B, B * cdiv(self.T, self.C)
        else:
            self.N, self.chunks = packing.N, packing.capacity(self.C)
        self.empty = x.new_empty(0, dtype=torch.float32).new_empty
        # Flags a chunk and head: one for each block of K of `stream_kernel`, unless the operator has its own number.
        self.flags = memory.once("flags", lambda: flags or self._stream_blocks_of(self.rows, self.columns)[0])

    def _stream_blocks_of(self, K: int, V: int) -> tuple[int, int]:
        """Return `stream_kernel`'s numbers of blocks along K and V, which may be symbolic; those of `sizes` may not."""
        return _blocks_of(TABLE[f"{self.op}.stream", self.width], self.C, K, V)

    @cached_property
    def at_once(self) -> int:
        """How many (chunk, head) pairs a program for chunks that are not mild visits, with one load of their flags."""
        enough = self.chunks * self.H // (2 * FULL_GPU)
        return min(8, 1 << enough.bit_length()) if self.width == "16-bit" or self.blocks else 1

    @cached_property
    def where(self) -> tuple:
        """The arguments of `locate_chunk`: sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1], and T; unless
        packed, all but T are None."""
        if self.packing is None:
            return None, None, None, self.T
        chunks = self.packing.pieces(self.C)
        return chunks.sequence, self.packing.offsets, chunks.before, self.T

    def sizes(self, kernel: str, V: int | None = None) -> tuple[dict, int, int]:
        """Return the keyword arguments of a kernel, and its numbers of blocks along K and V (default: the state's)."""
        launch, V = TABLE[f"{self.op}.{kernel}", self.width], self.columns if V is None else V
        common, *blocks = _sizes(launch, self.H, self.rows, V, self.C, self.packing is not None)
        return dict(common), *blocks

    def launch_paths(self, row: str, kernel, along: str, *args, visits: bool = False, **switches) -> None:
        """Launch a kernel with a program for each chunk, head and block along "K", "V" or "", none: for mild chunks,
        of 16-bit inputs alone, then for others, of which a program `visits` one or, if that is set, `at_once`.

        row: of the launch table, without its path; args: the kernel's before `where`; switches: constants by name."""
        for path, flat in zip(("mild", "dyadic"), self.flattened(args), strict=True):
            if (mild := path == "mild") and self.width != "16-bit":
                continue
            flat += self.where
            _, NK, NV = self.memory.once((row, path), partial(self.sizes, f"{row}.{path}"))
            at_once, blocks = self.at_once if visits and not mild else 1, NK if along == "K" else NV if along else 1
            flags = switches | (dict(AT_ONCE=at_once, SCALED=self.scaled) if visits else {})
            self.memory.launch(
                kernel, cdiv(self.chunks * self.H, at_once) * blocks, [*flat, self.chunks] if visits else flat,
                lambda path=path: dict(
                    **self.sizes(f"{row}.{path}")[0], FLAGS=self.flags, LEVELS=self.C.bit_length() - 1
                ),
                MILD=int(mild), **flags,
            )  # fmt: skip

    def stored_shape(self, V: int) -> tuple[int, ...]:
        """Return the shape of the float32 tensor that stores the states entering all chunks: [chunks, H, rows, V], or
        where `scaled` one axis, which `unpacked` divides into 16-bit states and their two sets of scales."""
        if not self.scaled:
            return self.chunks, self.H, self.rows, V
        states = cdiv(self.chunks * self.H * self.rows * V, 2)
        return (2 * whole_lines(self._scales(V)) + states,)

    def _scales(self, V: int) -> int:
        """Return the number of `Stored.scales`, as many as mild_scales: one for each state's row and block along V."""
        return self.chunks * self.H * self.rows * self.memory.once(V, lambda: self._stream_blocks_of(self.rows, V)[1])

    def allocate_states(self, V: int) -> torch.Tensor:
        """Allocate a tensor for the state entering each chunk, of `stored_shape`, with zeros where no kernel writes if
        an operator may return it."""
        stored = self.empty(self.stored_shape(V))
        if self.packing is not None:
            if self.packing.returned:
                stored.zero_()  # a packed batch may fill fewer chunks than are allocated
        elif self.scaled:
            used = self._scales(V)
            scales = whole_lines(used)
            if used < scales:
                stored[: 2 * scales].view(2, scales)[:, used:] = 0
            if self.chunks * self.H * self.rows * V % 2:
                stored[-1:] = 0
        return stored

    def unpacked(self, stored: torch.Tensor, V: int) -> Stored:
        """Return the states and scales in a tensor of `stored_shape`."""
        if not self.scaled:
            return Stored(stored, stored, None, None)
        states = cdiv(self.chunks * self.H * self.rows * V, 2)
        scales = (stored.numel() - states) // 2
        return Stored(
            stored, Part(stored, 2 * scales, states, torch.float16), Part(stored, 0, scales, torch.float32),
            Part(stored, scales, scales, torch.float32),
        )  # fmt: skip

    def flattened(self, args) -> tuple[list, list]:
        """Return args with each `Stored` replaced by its states and its mild_scales, and with its scales instead."""
        mild, others = [], []
        for x in args:
            if type(x) is Stored:
                mild += x.states, x.mild_scales
                others += x.states, x.scales
            else:
                mild.append(x)
                others.append(x)
        return mild, others

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.H, self.rows, self.columns

    def states(
        self, x, y, w, scale, first, last, reverse, inclusive=False, beside=None, units=None, remainders=None, mild=None
    ):  # fmt: skip
        """Compute the state entering each chunk (reverse: the gradient leaving it), as `Stored`, and which chunks are
        mild, int32, chunks x H x NK numbers (reverse: None).

        x [B, T, G H, K] and y [B, T, G H, V] add x^T y, with decays, to the states, G heads to each; V may differ from
        the plan's. w [B, T, H, K]: natural-log decays. scale: factor of x in reverse. inclusive: in reverse, x decays
        by its own token's w too.
        first, last [N, H, K, V]: initial state (None: zeros) and output for the final one (None: not stored). first may
        also be a function of this call's affine map: it receives the factor [N, H, K] and the list of final states of
        zeros, and returns a function that returns the list of first and beside's first, and may wait for them.
        beside: (x, y, first, last) of another state with the same decay and sizes, except V. Both go through one
        launch, and `Stored` states of each are returned.
        units [B, T, G H]: factors of the rows of x, not of beside's; None: 1.
        remainders: float16 output [chunks, H, K, V], the rounding errors of the stored states, not of beside's
        (`store_state`). mild: the tensor to be filled and returned as the second result, if it is allocated already.
        """
        inputs = [(x, y, first, last)] + ([beside] if beside else [])
        columns = [y.shape[-1] for _, y, _, _ in inputs]
        kind = columns, y.shape[2] // self.H, reverse, inclusive
        # Kernels read only what was written, and gradients of states are no operator's output.
        wholes = [self.empty(self.stored_shape(V)) if reverse else self.allocate_states(V) for V in columns]
        stored = [self.unpacked(x, V) for x, V in zip(wholes, columns, strict=True)]
        programs, NK = self._stream_blocks(columns)
        if not reverse:
            count = self.chunks * self.H * NK
            mild = Part(self.empty(count), 0, count, torch.int32) if mild is None else mild
            if self.packing is not None:
                self.packing.zero(mild)
            elif not (self.scaled or self.blocks):
                mild.view().zero_()
        L, parts, are_pieces = self.parts(programs)
        where = (None, None, *self.where[1:], L)
        if are_pieces:
            _, *pieces = self.packing.pieces(self.C * L)
            where = *pieces, *where[2:]
        if parts > self.N or callable(first):
            entering = self._start_parts(inputs, units, w, scale, parts, where, programs * parts, kind)()
            inputs = [(x, y, S, None) for (x, y, _, _), S in zip(inputs, entering, strict=True)]
        args = []
        for (x, y, first, last), S in zip(inputs, stored, strict=True):
            args += x, y, S.states, S.scales, S.mild_scales, first, last
        args = [*_filled(args), units, remainders, w, None, mild, scale, *where]
        self._launch_stream(programs * parts, args, False, parts > self.N, *kind)
        return (stored if beside else stored[0]), mild

    def _stream_blocks(self, columns: Sequence[int]) -> tuple[int, int]:
        """Return the programs of `stream_kernel` for a part of states of so many columns, and its blocks along K."""

        def blocks():
            blocks = [self.sizes("stream", V)[1:] for V in columns]
            NK = blocks[0][0]
            return NK * sum(NV for _, NV in blocks) * self.H, NK

        return self.memory.once(("blocks", *columns), blocks)

    def _launch_stream(self, programs, args, totals: bool, in_parts: bool, columns, G, reverse, inclusive) -> None:
        """Launch `stream_kernel` for states of so many columns. G: heads of x to one of w; totals, in_parts: whether
        the kernel has these switches."""
        first, last = args[5:7]

        def constants():
            common, *others = [self.sizes("stream", V)[0] for V in columns]
            return dict(
                **common, G=G, INCLUSIVE=inclusive, SCALED=self.scaled, BLOCKS=self.blocks,
                OTHER_V=others[0]["V"] if others else 0, OTHER_BV=others[0]["BV"] if others else 1,
            )  # fmt: skip

        flags = dict(REVERSE=reverse, TOTALS=totals, IN_PARTS=in_parts, HAS_FIRST=first, WANTS_LAST=last)
        self.memory.launch(stream_kernel, programs, args, constants, **flags)

    def parts(self, programs):
        """Return the number of chunks a part, the number of parts, and whether they are `Pieces` of a packed batch.

        programs: how many walk one part. Sequences stay whole where those of all sequences fill a GPU. A packed batch
        is always cut, since its sequences may differ in length.
        """
        enough = FULL_GPU // 2 if self.scaled else FULL_GPU  # a scaled program holds a state twice as large
        if self.packing is None and self.N * programs >= enough:
            return cdiv(self.T, self.C), self.N, False
        L = max(SHORTEST_PART, cdiv(self.chunks * programs, 2 * enough))  # finer: pieces differ in length
        if self.packing is None:
            return L, self.N * cdiv(self.T, self.C * L), False
        self.packing.request(self.C * L)
        return L, self.packing.capacity(self.C * L), True

    def request_layout(self, *columns: int) -> None:
        """Request the pieces that `states` of so many columns will need, to be laid out with those needed earlier."""
        if self.packing is not None:
            programs, _ = self._stream_blocks(columns)
            self.parts(programs)

    def start_parts(self, x, y, w, scale, first, parts, sequence_of_part, parts_before, tokens, reverse):
        """Start to compute the state entering each part, [parts, H, K, V] (reverse: the gradient of the state leaving
        it); return a function that returns it, and may wait for `first`.

        parts: their number. sequence_of_part [parts], parts_before [N + 1]: as in `positions_triton`. tokens: of a
        part, a multiple of every chunk length. Other arguments as of `states`."""
        # Offsets of chunks say where to store their states; none is stored here.
        cu_seqlens = None if self.packing is None else self.packing.offsets
        where = (sequence_of_part, parts_before, cu_seqlens, parts_before, self.T, tokens // self.C)
        kind = columns, *_ = (self.columns,), 1, reverse, False
        programs, _ = self._stream_blocks(columns)
        finish = self._start_parts([(x, y, first, None)], None, w, scale, parts, where, programs * parts, kind)
        return lambda: finish()[0]

    def _start_parts(self, inputs, units, w, scale, parts, where, programs, kind):
        """Start to compute the states entering each part, for several (x, y, first, last) together. Return a function
        that waits for `first` and returns a list of [parts, H, K, V]. units: as of `states`. where, programs, kind:
        positions of `stream_kernel`, and other arguments of `_launch_stream`; others as in `start_parts`."""
        entering = [self.empty(parts, self.H, self.rows, y.shape[-1]) for _, y, _, _ in inputs]
        decay = self.empty(parts, self.H, self.rows)
        args = []
        for (x, y, _, _), S in zip(inputs, entering, strict=True):
            args += x, y, S, None, None, None, None
        args = [*_filled(args), units, None, w, decay, None, scale, *where]
        self._launch_stream(programs, args, True, True, *kind)
        (_, _, reverse, _), (_, parts_before, *_) = kind, where
        rest = parts // self.N, parts_before, reverse
        firsts = [first for _, _, first, _ in inputs]
        wait = None
        if callable(firsts[0]):
            written = [S.new_empty(self.N, *S.shape[1:]) for S in entering]
            for S, full in zip(entering, written, strict=True):
                self._scan(S.clone(), decay, None, full, *rest)
            wait = firsts[0](decay.unflatten(0, (self.N, -1)).prod(1), written)

        def finish():
            initial = wait() if wait else firsts
            for (_, _, _, last), first, S in zip(inputs, initial, entering, strict=True):
                self._scan(S, decay, first, last, *rest)
            return entering

        return finish

    def _scan(self, written, decay, first, last, parts, parts_before, reverse):
        """Replace what each part writes, [parts, H, K, V], by the state entering it. decay: e^{total} [parts, H, K].
        first, last [N, H, K, V]: the initial states and the output for the final ones, or None. parts: of one sequence
        or, packed, parts_before [N + 1] instead."""
        V, row = written.shape[-1], TABLE["scan", self.width]
        BE = elements(self.rows * V, self.N * self.H, row.BV)
        self.memory.launch(
            scan_kernel, cdiv(self.rows * V, BE) * self.N * self.H,
            (written, decay, first, last, parts_before, parts),
            lambda: dict(
                H=self.H, K=self.rows, PACKED=self.packing is not None, num_warps=row.num_warps,
                num_stages=row.num_stages,
            ),
            V=V, BE=BE, REVERSE=reverse, HAS_FIRST=first, WANTS_LAST=last,
        )  # fmt: skip


def _filled(args: list) -> list:
    """Return `stream_kernel`'s arguments of one state, with None for those of the second, or of two."""
    return args if len(args) == 14 else [*args, *[None] * 7]


def block_of(C: int, size: int, limit: int) -> int:
    """Return `launch.block(size, limit)`, but in long chunks of C rows at least `NARROWEST`, whatever the limit."""
    return max(block(size, limit), NARROWEST if C == LONG_CHUNK_SIZE else 0)


def _blocks_of(launch: Launch, C: int, K: int, V: int) -> tuple[int, int]:
    """Return the numbers of blocks along K and V of a kernel with this launch row."""
    return cdiv(K, block_of(C, K, launch.BK)), cdiv(V, block_of(C, V, launch.BV))


def whole_lines(count: int) -> int:
    """Round a number of float32 elements up to whole cache lines of 128 bytes."""
    return cdiv(count, 32) * 32


@lru_cache(1024)
def _sizes(launch: Launch, H: int, K: int, V: int, C: int, packed: bool) -> tuple[dict, int, int]:
    common = dict(
        H=H, K=K, V=V, C=C, BK=block_of(C, K, launch.BK), BV=block_of(C, V, launch.BV), PACKED=packed,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip
    return common, *_blocks_of(launch, C, K, V)


def cut_into_chunks(op: str, x: torch.Tensor, V: int, chunk_size: int) -> tuple[bool, int]:
    """Return whether states between chunks are stored as scaled float16, and the chunk length, for heads of x [B, T, H,
    K] and V columns. chunk_size: the requested length, 0 for the default."""
    narrow = x.element_size() == 2
    if op == "rwkv7":
        return False, min(chunk_size or (CHUNK_SIZE if narrow else SHORT_CHUNK_SIZE), CHUNK_SIZE)
    # Of 16-bit inputs, bfloat16 has long chunks; the interpreter, which cannot multiply it, takes them for float16.
    supported = x.dtype == torch.bfloat16 or interpreted() if narrow else op == "gsa"
    long = block(x.shape[-1], 128) == 64 and (op == "gsa" or block(V, 128) == 64)
    longest = LONG_CHUNK_SIZE if supported and long else CHUNK_SIZE
    return narrow, min(chunk_size or longest, longest)
