"""What all launches of a chunked call share: sizes, the partition into chunks, the storage of states, and the launches
that compute the state entering each chunk (`stream_triton`)."""

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from .dispatch import interpreted
from .launch import (
    CHUNK_SIZE,
    ENOUGH,
    LONG_CHUNK_SIZE,
    NARROWEST,
    SHORT_CHUNK_SIZE,
    SHORTEST_SEGMENT,
    TABLE,
    Launch,
    block,
    cdiv,
    elements,
    width,
)
from .packed_triton import Packing
from .stream_triton import scan_kernel, stream_kernel


class Kept(NamedTuple):
    """Stored states [chunks, H, K, V]; where they are 16-bit, the scales of their rows and of the rows of the states at
    the middles of chunks, [chunks, H, NV, K] each, flat."""

    states: torch.Tensor
    scales: torch.Tensor | None
    mild_scales: torch.Tensor | None


class ChunkPlan:
    """What all launches of a call share: sizes, positions of chunks, precision, and rows of the launch table.

    op: prefix of its rows in the launch table; x: a sequence [B, T, H, rows]; V: columns of the state [rows, V].
    """

    def __init__(self, op: str, x: torch.Tensor, V: int, packing: Packing | None, chunk_size: int, flags: int = 0):
        (B, self.T, self.H, self.rows), self.columns = x.shape, V
        self.op, self.width = op, width(x.element_size())
        self.scaled, self.C = cut_into_chunks(op, x, V, chunk_size)
        self.precision = "tf32" if self.width == "16-bit" else "tf32x3"
        self.packing = packing
        if packing is None:
            self.N, self.chunks = B, B * cdiv(self.T, self.C)
        else:
            self.N, self.chunks = packing.N, packing.room(self.C)
        # Chunks and heads whose flags a program reads at once, where few or none may be left for its launch.
        enough = self.chunks * self.H // (2 * ENOUGH)
        self.at_once = min(8, 1 << enough.bit_length()) if self.width == "16-bit" else 1
        self.empty = x.new_empty(0, dtype=torch.float32).new_empty
        # Flags a chunk and head: one for each block of K of `stream_kernel`, unless the operator has its own number.
        self.flags = flags or _flags(op, x)

    @cached_property
    def where(self) -> tuple:
        """The kernel arguments that locate a chunk: sequence_of_chunk [chunks], cu_seqlens and offsets (in chunks)
        [N + 1], T; all but T are None unless packed."""
        if self.packing is None:
            return None, None, None, self.T
        chunks = self.packing.pieces(self.C)
        return chunks.sequence, self.packing.offsets, chunks.before, self.T

    def sizes(self, kernel: str, V: int | None = None) -> tuple[dict, int, int]:
        """Return every kernel's keyword arguments, and the numbers of blocks along K and V (default: the state's)."""
        launch, V = TABLE[f"{self.op}.{kernel}", self.width], self.columns if V is None else V
        common, *blocks = _sizes(launch, self.H, self.rows, V, self.C, self.packing is not None, self.precision)
        return dict(common), *blocks

    def ways(self, kernel: str):
        """Yield the launches of a kernel that works inside chunks: (keyword arguments, blocks along V)."""
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            common, _, NV = self.sizes(f"{kernel}.{way}")
            yield common | dict(FLAGS=self.flags, LEVELS=self.C.bit_length() - 1, MILD=int(way == "mild")), NV

    def kept_shape(self, V: int) -> tuple[int, ...]:
        """Return the shape of the float32 tensor that stores the state entering every chunk."""
        return _kept_shape(self.scaled, self.op, self.chunks, self.H, self.rows, V)

    def room_for_states(self, V: int) -> torch.Tensor:
        """Allocate a tensor of `kept_shape`, with zeros where no kernel writes: outputs must not be uninitialized."""
        stored = self.empty(self.kept_shape(V))
        if self.packing is not None:
            stored.zero_()  # a packed batch may fill fewer chunks than are allocated
        elif self.scaled:
            scales = _scales(self.op, self.chunks, self.H, self.rows, V)
            used = _scales(self.op, self.chunks, self.H, self.rows, V, rounded=False)
            if used < scales:
                stored[: 2 * scales].view(2, scales)[:, used:] = 0
            if self.chunks * self.H * self.rows * V % 2:
                stored[-1:] = 0
        return stored

    def unpacked(self, stored: torch.Tensor, V: int) -> Kept:
        """Return the states and scales in a tensor of `kept_shape`, as views."""
        if not self.scaled:
            return Kept(stored, None, None)
        states = cdiv(self.chunks * self.H * self.rows * V, 2)
        scales = (stored.numel() - states) // 2
        own, mild, states = stored.split_with_sizes([scales, scales, states])
        return Kept(states.view(torch.float16), own, mild)

    def taken_apart(self, args, mild: bool) -> list:
        """Return the arguments of a kernel, with each `Kept` as its states and their scales."""
        flat = []
        for x in args:
            if type(x) is Kept:
                flat += x.states, x.mild_scales if mild else x.scales
            else:
                flat.append(x)
        return flat

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.H, self.rows, self.columns

    def states(self, x, y, w, scale, first, last, reverse, inclusive=False, beside=None, remainders=None):
        """Compute the state entering each chunk (reverse: the gradient leaving it) and which chunks are mild (reverse:
        None).

        The states share one tensor of `kept_shape`, which `unpacked` splits.

        x [B, T, G H, K] and y [B, T, G H, V] write into the states, G heads into each; V may differ from the plan's.
        inclusive: in reverse, a read decays by its own token's w too.
        first, last [N, H, K, V]: initial state (None: zeros) and output for the final one (None: not stored). first may
        also be a function of this call's affine map: it receives the factor [N, H, K] and the list of final states of
        zeros, and returns a function that returns the list of first and beside's first, and may wait for them.
        beside: (x, y, first, last) of another state with the same decay and sizes, except V. Both go through one
        launch, and a tensor for each is returned.
        remainders: float16 output [chunks, H, K, V], the rounding errors of the first 16-bit states (`store_state`).
        """
        inputs = [(x, y, first, last)] + ([beside] if beside else [])
        columns = [y.shape[-1] for _, y, _, _ in inputs]
        common, NK, NV = self.sizes("stream", columns[0])
        common |= dict(
            G=x.shape[2] // self.H, REVERSE=reverse, INCLUSIVE=inclusive, SCALED=self.scaled, OTHER_V=0, OTHER_BV=1,
        )  # fmt: skip
        if beside:
            other, _, other_NV = self.sizes("stream", columns[1])
            common |= dict(OTHER_V=columns[1], OTHER_BV=other["BV"])
            NV += other_NV
        stored = [self.room_for_states(V) for V in columns]
        mild = None
        if not reverse:
            mild = self.empty(self.chunks, self.H, NK, dtype=torch.int32)
            if self.packing is not None or not self.scaled:
                mild.zero_()
        L, segments, are_pieces = self.segments(NK * NV * self.H)
        where = (None, None, *self.where[1:], L)
        if are_pieces:
            _, *pieces = self.packing.pieces(self.C * L)
            where = *pieces, *where[2:]
        grid = (NK * NV * self.H * segments,)
        if segments > self.N or callable(first):
            entering = self._entering(inputs, w, scale, segments, where, grid, common)
            inputs = [(x, y, S, None) for (x, y, _, _), S in zip(inputs, entering, strict=True)]
        streams = [
            (x, y, *self.unpacked(S, V), first, last)
            for (x, y, first, last), S, V in zip(inputs, stored, columns, strict=True)
        ]
        _, _, first, last = inputs[0]
        stream_kernel[grid](
            *_pair(streams), remainders, w, None, mild, scale, *where, TOTALS=False, SEGMENTED=segments > self.N,
            HAS_FIRST=first is not None, WANTS_LAST=last is not None, **common,
        )  # fmt: skip
        return (tuple(stored) if beside else stored[0]), mild

    def segments(self, programs):
        """Return the chunks a segment, the number of segments, and whether they are `Pieces` of a packed batch.

        programs: of one segment. Sequences stay whole where these fill a GPU. A packed batch is always cut, since its
        sequences may differ in length.
        """
        enough = ENOUGH // 2 if self.scaled else ENOUGH  # a scaled program holds a state twice as large
        if self.packing is None and self.N * programs >= enough:
            return cdiv(self.T, self.C), self.N, False
        L = max(SHORTEST_SEGMENT, cdiv(self.chunks * programs, 2 * enough))  # finer: pieces differ in length
        if self.packing is None:
            return L, self.N * cdiv(self.T, self.C * L), False
        self.packing.ask(self.C * L)
        return L, self.packing.room(self.C * L), True

    def lay_out(self, *columns: int) -> None:
        """Request the pieces that `states` with these numbers of columns needs, before an earlier launch needs some."""
        if self.packing is not None:
            self.segments(sum(NK * NV for _, NK, NV in (self.sizes("stream", V) for V in columns)) * self.H)

    def entering(
        self, x, y, w, scale, first, parts, sequence_of_part, offsets, tokens, reverse, meanwhile=lambda: None
    ):
        """Compute the state entering each part, [parts, H, K, V] (reverse: the gradient of the state leaving it).

        tokens: of a part, a multiple of every chunk length. meanwhile: launches work that needs none of these states
        while first is awaited. Other arguments as of `states`."""
        common, NK, NV = self.sizes("stream")
        common |= dict(G=1, REVERSE=reverse, INCLUSIVE=False, SCALED=self.scaled, OTHER_V=0, OTHER_BV=1)
        # Offsets of chunks say where to store their states; none is stored here.
        cu_seqlens = None if self.packing is None else self.packing.offsets
        where = (sequence_of_part, offsets, cu_seqlens, offsets, self.T, tokens // self.C)
        grid = (NK * NV * self.H * parts,)
        return self._entering([(x, y, first, None)], w, scale, parts, where, grid, common, meanwhile)[0]

    def _entering(self, inputs, w, scale, segments, where, grid, common, meanwhile=lambda: None):
        """Compute the state entering each segment, [segments, H, K, V], for each (x, y, first, last) of inputs."""
        entering = [self.empty(segments, self.H, self.rows, y.shape[-1]) for _, y, _, _ in inputs]
        decay = self.empty(segments, self.H, self.rows)
        totals = [(x, y, S, None, None, None, None) for (x, y, _, _), S in zip(inputs, entering, strict=True)]
        stream_kernel[grid](
            *_pair(totals), None, w, decay, None, scale, *where,
            TOTALS=True, SEGMENTED=True, HAS_FIRST=False, WANTS_LAST=False, **common,
        )  # fmt: skip
        _, segment_offsets, *_ = where
        rest = segments // self.N, segment_offsets, common["REVERSE"]
        firsts = [first for _, _, first, _ in inputs]
        if callable(firsts[0]):
            written = [S.new_empty(self.N, *S.shape[1:]) for S in entering]
            for S, whole in zip(entering, written, strict=True):
                self._scan(S.clone(), decay, None, whole, *rest)
            wait = firsts[0](decay.unflatten(0, (self.N, -1)).prod(1), written)
            meanwhile()
            firsts = wait()
        else:
            meanwhile()
        for (_, _, _, last), first, S in zip(inputs, firsts, entering, strict=True):
            self._scan(S, decay, first, last, *rest)
        return entering

    def _scan(self, written, decay, first, last, parts, offsets, reverse):
        """Replace what each part writes, [parts, H, K, V], by the state entering it; decay: e^{total} [parts, H, K]."""
        V = written.shape[-1]
        launch = TABLE["scan", self.width]
        BE = elements(self.rows * V, self.N * self.H, launch.BV)
        scan_kernel[(cdiv(self.rows * V, BE) * self.N * self.H,)](
            written, decay, first, last, offsets, parts, H=self.H, K=self.rows, V=V, BE=BE,
            REVERSE=reverse, HAS_FIRST=first is not None, WANTS_LAST=last is not None,
            PACKED=self.packing is not None, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def _pair(streams: list[tuple]) -> tuple:
    """Return `stream_kernel`'s arguments for one stream or two."""
    return (*streams[0], *(streams[1] if len(streams) > 1 else (None,) * len(streams[0])))


def block_of(C: int, size: int, limit: int) -> int:
    """Return `launch.block`, but at least `NARROWEST` in long chunks, whatever the limit."""
    return max(block(size, limit), NARROWEST if C == LONG_CHUNK_SIZE else 0)


@lru_cache(1024)
def _sizes(launch: Launch, H: int, K: int, V: int, C: int, packed: bool, precision: str) -> tuple[dict, int, int]:
    BK, BV = block_of(C, K, launch.BK), block_of(C, V, launch.BV)
    common = dict(
        H=H, K=K, V=V, C=C, BK=BK, BV=BV, PACKED=packed, PRECISION=precision,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip
    return common, cdiv(K, BK), cdiv(V, BV)


def cut_into_chunks(op: str, x: torch.Tensor, V: int, chunk_size: int) -> tuple[bool, int]:
    """Return whether states between chunks are stored as scaled float16, and the chunk length; as in `ChunkPlan`."""
    narrow = x.element_size() == 2
    if op == "rwkv7":
        return False, min(chunk_size or (CHUNK_SIZE if narrow else SHORT_CHUNK_SIZE), CHUNK_SIZE)
    # Long chunks are for bfloat16; the interpreter, which cannot multiply it, takes them for float16.
    supported = narrow and (x.dtype == torch.bfloat16 or interpreted())
    long = block(x.shape[-1], 128) == 64 and (op == "gsa" or block(V, 128) == 64)
    longest = LONG_CHUNK_SIZE if supported and long else CHUNK_SIZE
    return narrow, min(chunk_size or longest, longest)


def _flags(op: str, x: torch.Tensor) -> int:
    """Return the flags a chunk and head: blocks along K, each marked as mild or not."""
    K = x.shape[-1]
    return cdiv(K, block(K, TABLE[f"{op}.stream", width(x.element_size())].BK))


def _scales(op: str, states: int, H: int, K: int, V: int, rounded: bool = True) -> int:
    """Return the number of row scales of so many states, one for each row and block along V, rounded up to whole cache
    lines. The states at the middles of chunks have as many again."""
    count = states * H * K * cdiv(V, block(V, TABLE[f"{op}.stream", "16-bit"].BV))
    return cdiv(count, 32) * 32 if rounded else count


def _kept_shape(scaled: bool, op: str, states: int, H: int, K: int, V: int) -> tuple[int, ...]:
    if not scaled:
        return states, H, K, V
    return (2 * _scales(op, states, H, K, V) + cdiv(states * H * K * V, 2),)


def chunks_of(op, x, V, packing, chunk_size) -> int:
    _, C = cut_into_chunks(op, x, V, chunk_size)
    B, T = x.shape[:2]
    return B * -(-T // C) if packing is None else packing.room(C)


def kept_states_shape(op, x, V, packing, chunk_size) -> tuple[int, ...]:
    """Return the shape of the result of `ChunkPlan.states`; it does not depend on the offsets' values."""
    scaled, _ = cut_into_chunks(op, x, V, chunk_size)
    return _kept_shape(scaled, op, chunks_of(op, x, V, packing, chunk_size), *x.shape[2:], V)


def flags_of(op, x, V, packing, chunk_size) -> int:
    """Return the number of flags that mark mild chunks; arguments as of `ChunkPlan`."""
    return chunks_of(op, x, V, packing, chunk_size) * x.shape[2] * _flags(op, x)
