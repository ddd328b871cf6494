"""What all launches of a call over chunks have in common: sizes, how chunks are cut, what is kept of their states, and
the launches that find the state entering each chunk (`stream_triton`)."""

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
    """Kept states [chunks, H, K, V]; where they are 16-bit, the scales of their rows, and those of the states at the
    middles of chunks."""

    states: torch.Tensor
    scales: torch.Tensor | None
    mild_scales: torch.Tensor | None


class ChunkPlan:
    """What all launches of a call share: sizes, where the chunks are, precision, and the launch table's word.

    op: prefix of its rows in the launch table; x: a sequence with a state's rows, [B, T, H, rows]; V: its columns.
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
        # Chunks and heads that a program looks at where a launch may find that few or none are its own.
        enough = self.chunks * self.H // (2 * ENOUGH)
        self.at_once = min(8, 1 << enough.bit_length()) if self.width == "16-bit" else 1
        self.empty = x.new_empty(0, dtype=torch.float32).new_empty
        # The guard looks at blocks of K as `stream_kernel` cuts them, unless the operator says otherwise.
        self.flags = flags or _flags(op, x)

    @cached_property
    def where(self) -> tuple:
        """What a kernel takes to find its chunk: the sequence of each, and how many come before each sequence."""
        if self.packing is None:
            return None, None, None, self.T
        chunks = self.packing.pieces(self.C)
        return chunks.sequence, self.packing.offsets, chunks.before, self.T

    def sizes(self, kernel: str, V: int | None = None) -> tuple[dict, int, int]:
        """Keyword arguments every kernel takes, and the numbers of blocks along K and V (default: the state's)."""
        launch, V = TABLE[f"{self.op}.{kernel}", self.width], self.columns if V is None else V
        common, *blocks = _sizes(launch, self.H, self.rows, V, self.C, self.packing is not None, self.precision)
        return dict(common), *blocks

    def ways(self, kernel: str):
        """The launches of a kernel that works inside chunks: (keyword arguments, blocks along V)."""
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            common, _, NV = self.sizes(f"{kernel}.{way}")
            yield common | dict(FLAGS=self.flags, LEVELS=self.C.bit_length() - 1, MILD=int(way == "mild")), NV

    def kept_shape(self, V: int) -> tuple[int, ...]:
        """Of the float32 tensor that holds the state entering every chunk."""
        return _kept_shape(self.scaled, self.op, self.chunks, self.H, self.rows, V)

    def room_for_states(self, V: int) -> torch.Tensor:
        """A tensor of `kept_shape` in which what no kernel will write is 0: no output may be left to chance."""
        kept = self.empty(self.kept_shape(V))
        if self.packing is not None:
            kept.zero_()  # a packed batch has room for more chunks than it fills
        elif self.scaled:
            scales = _scales(self.op, self.chunks, self.H, self.rows, V)
            used = _scales(self.op, self.chunks, self.H, self.rows, V, rounded=False)
            if used < scales:
                kept[: 2 * scales].view(2, scales)[:, used:] = 0
            if self.chunks * self.H * self.rows * V % 2:
                kept[-1:] = 0
        return kept

    def unpacked(self, kept: torch.Tensor, V: int) -> Kept:
        """What lies in a tensor of `kept_shape`."""
        if not self.scaled:
            return Kept(kept, None, None)
        states = cdiv(self.chunks * self.H * self.rows * V, 2)
        scales = (kept.numel() - states) // 2
        own, mild, states = kept.split_with_sizes([scales, scales, states])
        return Kept(states.view(torch.float16), own, mild)

    def taken_apart(self, given, mild: bool) -> list:
        """What a kernel takes: given, but each `Kept` as its states and their scales."""
        taken = []
        for x in given:
            if type(x) is Kept:
                taken += x.states, x.mild_scales if mild else x.scales
            else:
                taken.append(x)
        return taken

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.H, self.rows, self.columns

    def states(self, x, y, w, scale, first, last, reverse, inclusive=False, beside=None, remainders=None):
        """The state entering each chunk (reverse: the gradient leaving it), and which chunks are mild (reverse: None).

        The states come in one tensor of `kept_shape`, which `unpacked` takes apart.

        x [B, T, G H, K] and y [B, T, G H, V] make each chunk's writing, G heads one state's; V is y's own, whatever the
        plan's is. inclusive: in reverse, a read is faded by its own token's decay too.
        first and last [N, H, K, V]: where to begin, and where to leave the end; None: zeros, nowhere. first may also be
        a function of what this makes of any state: of the factor [N, H, K] and the list of what it makes of zeros. What
        it returns gives first, and beside's, in a list, and may wait for it.
        beside: (x, y, first, last) of another state that decays alike, of which all is as of this one but V. It goes
        through the same launch, and a tensor for each comes back.
        remainders: a float16 tensor [chunks, H, K, V] for what 16-bit states lose of the first, in their rows' scales.
        """
        given = [(x, y, first, last)] + ([beside] if beside else [])
        columns = [y.shape[-1] for _, y, _, _ in given]
        common, NK, NV = self.sizes("stream", columns[0])
        common |= dict(
            G=x.shape[2] // self.H, REVERSE=reverse, INCLUSIVE=inclusive, SCALED=self.scaled, OTHER_V=0, OTHER_BV=1,
        )  # fmt: skip
        if beside:
            other, _, other_NV = self.sizes("stream", columns[1])
            common |= dict(OTHER_V=columns[1], OTHER_BV=other["BV"])
            NV += other_NV
        kept = [self.room_for_states(V) for V in columns]
        mild = None
        if not reverse:
            mild = self.empty(self.chunks, self.H, NK, dtype=torch.int32)
            if self.packing is not None or not self.scaled:
                mild.zero_()
        L, segments, pieces = self.segments(NK * NV * self.H)
        where = (None, None) if pieces is None else (pieces.sequence, pieces.before)
        where = (*where, *self.where[1:], L)
        grid = (NK * NV * self.H * segments,)
        if segments > self.N or callable(first):
            entering = self._entering(given, w, scale, segments, where, grid, common)
            given = [(x, y, S, None) for (x, y, _, _), S in zip(given, entering, strict=True)]
        streams = [
            (x, y, *self.unpacked(S, V), first, last)
            for (x, y, first, last), S, V in zip(given, kept, columns, strict=True)
        ]
        _, _, first, last = given[0]
        stream_kernel[grid](
            *_pair(streams), remainders, w, None, mild, scale, *where, TOTALS=False, SEGMENTED=segments > self.N,
            HAS_FIRST=first is not None, WANTS_LAST=last is not None, **common,
        )  # fmt: skip
        return (tuple(kept) if beside else kept[0]), mild

    def segments(self, programs):
        """Chunks a segment, how many segments there are, and of a packed batch the `Pieces` that they are.

        programs: of one segment. Sequences stay whole where these are enough to fill a GPU. A packed batch, whose
        sequences may be of any length, is cut whenever that is needed to make them alike.
        """
        enough = ENOUGH // 2 if self.scaled else ENOUGH  # each with a state twice as large
        if self.packing is None and self.N * programs >= enough:
            return cdiv(self.T, self.C), self.N, None
        L = max(SHORTEST_SEGMENT, cdiv(self.chunks * programs, 2 * enough))  # finer: pieces are of unlike length
        if self.packing is None:
            return L, self.N * cdiv(self.T, self.C * L), None
        self.packing.pieces(self.C)  # which `where` needs: one launch lays out both
        segments = self.packing.pieces(self.C * L)
        return L, segments.room, segments

    def lay_out(self, *columns: int) -> None:
        """Ask for the pieces of a launch of `states` of so many columns, which launches before it need in part."""
        if self.packing is not None:
            self.segments(sum(NK * NV for _, NK, NV in (self.sizes("stream", V) for V in columns)) * self.H)

    def entering(
        self, x, y, w, scale, first, parts, sequence_of_part, offsets, tokens, reverse, meanwhile=lambda: None
    ):
        """The state entering each of so many parts of so many tokens, [parts, H, K, V] (reverse: the gradient of the
        one that leaves it). tokens: a multiple of all chunks. meanwhile: launches what needs none of these states,
        while first is awaited. Else as of `states`."""
        common, NK, NV = self.sizes("stream")
        common |= dict(G=1, REVERSE=reverse, INCLUSIVE=False, SCALED=self.scaled, OTHER_V=0, OTHER_BV=1)
        # The offsets of chunks tell where their states go, of which none is kept here.
        cu_seqlens = None if self.packing is None else self.packing.offsets
        where = (sequence_of_part, offsets, cu_seqlens, offsets, self.T, tokens // self.C)
        grid = (NK * NV * self.H * parts,)
        return self._entering([(x, y, first, None)], w, scale, parts, where, grid, common, meanwhile)[0]

    def _entering(self, given, w, scale, segments, where, grid, common, meanwhile=lambda: None):
        """Of each state that is given, as to `states`, what enters each segment."""
        entering = [self.empty(segments, self.H, self.rows, y.shape[-1]) for _, y, _, _ in given]
        decay = self.empty(segments, self.H, self.rows)
        totals = [(x, y, S, None, None, None, None) for (x, y, _, _), S in zip(given, entering, strict=True)]
        stream_kernel[grid](
            *_pair(totals), None, w, decay, None, scale, *where,
            TOTALS=True, SEGMENTED=True, HAS_FIRST=False, WANTS_LAST=False, **common,
        )  # fmt: skip
        _, segment_offsets, *_ = where
        rest = segments // self.N, segment_offsets, common["REVERSE"]
        firsts = [first for _, _, first, _ in given]
        if callable(firsts[0]):
            written = [S.new_empty(self.N, *S.shape[1:]) for S in entering]
            for S, whole in zip(entering, written, strict=True):
                self._scan(S.clone(), decay, None, whole, *rest)
            arrived = firsts[0](decay.unflatten(0, (self.N, -1)).prod(1), written)
            meanwhile()
            firsts = arrived()
        else:
            meanwhile()
        for (_, _, _, last), first, S in zip(given, firsts, entering, strict=True):
            self._scan(S, decay, first, last, *rest)
        return entering

    def _scan(self, written, decay, first, last, parts, offsets, reverse):
        """Put the state entering each part where its writing [parts, H, K, V] was; decay e^{total} [parts, H, K]."""
        V = written.shape[-1]
        launch = TABLE["scan", self.width]
        BE = elements(self.rows * V, self.N * self.H, launch.BV)
        scan_kernel[(cdiv(self.rows * V, BE) * self.N * self.H,)](
            written, decay, first, last, offsets, parts, H=self.H, K=self.rows, V=V, BE=BE,
            REVERSE=reverse, HAS_FIRST=first is not None, WANTS_LAST=last is not None,
            PACKED=self.packing is not None, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def _pair(streams: list[tuple]) -> tuple:
    """What `stream_kernel` takes of one stream or two."""
    return (*streams[0], *(streams[1] if len(streams) > 1 else (None,) * len(streams[0])))


def block_of(C: int, size: int, limit: int) -> int:
    """As `launch.block`, but in long chunks of `NARROWEST` at least, whatever the limit."""
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
    """Whether states between chunks are 16-bit, each row over a power of two, and tokens a chunk. As of `ChunkPlan`."""
    narrow = x.element_size() == 2
    if op == "rwkv7":
        return False, min(chunk_size or (CHUNK_SIZE if narrow else SHORT_CHUNK_SIZE), CHUNK_SIZE)
    # In the interpreter, which cannot multiply bfloat16, float16 stands in for it.
    tried = narrow and (x.dtype == torch.bfloat16 or interpreted())
    long = block(x.shape[-1], 128) == 64 and (op == "gsa" or block(V, 128) == 64)
    most = LONG_CHUNK_SIZE if tried and long else CHUNK_SIZE
    return narrow, min(chunk_size or most, most)


def _flags(op: str, x: torch.Tensor) -> int:
    """Of each chunk and head: blocks along K whose decay is said to be mild or not."""
    K = x.shape[-1]
    return cdiv(K, block(K, TABLE[f"{op}.stream", width(x.element_size())].BK))


def _scales(op: str, states: int, H: int, K: int, V: int, rounded: bool = True) -> int:
    """Numbers that scale the rows of so many states, one for each block along V, rounded up to whole cache lines. There
    are as many again, of the states at the middles of chunks."""
    numbers = states * H * K * cdiv(V, block(V, TABLE[f"{op}.stream", "16-bit"].BV))
    return cdiv(numbers, 32) * 32 if rounded else numbers


def _kept_shape(scaled: bool, op: str, states: int, H: int, K: int, V: int) -> tuple[int, ...]:
    if not scaled:
        return states, H, K, V
    return (2 * _scales(op, states, H, K, V) + cdiv(states * H * K * V, 2),)


def chunks_of(op, x, V, packing, chunk_size) -> int:
    _, C = cut_into_chunks(op, x, V, chunk_size)
    B, T = x.shape[:2]
    return B * -(-T // C) if packing is None else packing.room(C)


def kept_states_shape(op, x, V, packing, chunk_size) -> tuple[int, ...]:
    """Shape of what `ChunkPlan.states` returns, known without the offsets' values; arguments as of `ChunkPlan`."""
    scaled, _ = cut_into_chunks(op, x, V, chunk_size)
    return _kept_shape(scaled, op, chunks_of(op, x, V, packing, chunk_size), *x.shape[2:], V)


def flags_of(op, x, V, packing, chunk_size) -> int:
    """How many flags say which chunks are mild; arguments as of `ChunkPlan`."""
    return chunks_of(op, x, V, packing, chunk_size) * x.shape[2] * _flags(op, x)
