"""Tiles that lie turned, in bands: for kernels in which one program has a head's whole sequence, 16 tokens at a time.

A program has four warps, and each a band of 16 channels with all tokens of a chunk: [4, 16, columns], the band being
the index of a batch. Products run along those rows, and what one product gives is, in the very registers where it lies,
an operand of the next. What all warps read, [rows, columns], goes through shared memory once (`each`). (In the kernels
that form the scores of mild chunks a band is one chunk, and there is a warp for each.) This also keeps to the products
that every GPU since sm_80 has; Hopper's own is compiled wrongly for such tiles (data/tuning.md).
"""

import triton
import triton.language as tl

from .blocks_triton import add_product, split, sums_along
from .dispatch import FUSED_CHANNELS
from .launch import ENOUGH, LONG_CHUNK_SIZE, TABLE, cdiv
from .pairs_triton import BLOCK

BANDS = tl.constexpr(4)
CHUNK = BLOCK.value
LEVELS = CHUNK.bit_length() - 1
_, CHANNELS = FUSED_CHANNELS
"""Of every tile: what is narrower is padded."""
LONGEST = LONG_CHUNK_SIZE // CHUNK
"""Of these chunks as many as the longest of any other kernel is: parts are multiples of that."""
SHORTEST_PART = 8
"""Chunks; below it, cutting sequences into parts costs more than it brings."""


@triton.jit
def bands(x, N: tl.constexpr = BANDS):
    """The rows of x in N bands, [N, rows / N, columns]."""
    return tl.reshape(x, (N, x.shape[0] // N, x.shape[1]))


@triton.jit
def whole(x):
    """x [4, N, M] as [4 N, M]: what `bands` took apart."""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def each(x, N: tl.constexpr = BANDS):
    """x for each of N bands, [N, rows, columns]."""
    return tl.broadcast_to(x[None, :, :], (N, x.shape[0], x.shape[1]))


@triton.jit
def turned(x):
    """x [4, N, M] as [4, M, N]."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def given(x):
    """A tile of the inputs as two parts, as `split` makes them."""
    if x.dtype == tl.bfloat16:
        high, low = x, tl.zeros_like(x)
    else:
        high, low = split(x)
    return high, low


@triton.jit
def product(a_high, a_low, b_high, b_low):
    """a b of split operands, band by band."""
    acc = tl.zeros([a_high.shape[0], a_high.shape[1], b_high.shape[2]], dtype=tl.float32)
    return add_product(acc, a_high, a_low, b_high, b_low)


@triton.jit
def narrow_product(a_high, a_low, b_high, b_low):
    """As `product`, in two sums: with few columns each product would wait for the one before it."""
    return tl.dot(a_high, b_high) + tl.dot(a_low, b_high, tl.dot(a_high, b_low))


@triton.jit
def by_turned(a_high, a_low, b_high, b_low):
    """a b^T of split operands."""
    return narrow_product(a_high, a_low, turned(b_high), turned(b_low))


@triton.jit
def load_turned(x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """A chunk's rows, turned, [BD, C]."""
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    m = (o_d < D)[:, None] & (o_c < end - start)[None, :]
    return tl.load(x + (start * H + i_h) * D + o_d[:, None] + o_c[None, :] * (H * D), mask=m, other=0.0)


@triton.jit
def store_turned(p, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """x [4, BD / 4, C], turned."""
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    m = (o_d < D)[:, None] & (o_c < end - start)[None, :]
    p = p + (start * H + i_h) * D + o_d[:, None] + o_c[None, :] * (H * D)
    tl.store(p, whole(x).to(p.dtype.element_ty), mask=m)


@triton.jit
def sides(x):
    """The left side and the right side of the columns of x [4, N, 2 C]."""
    C: tl.constexpr = x.shape[2] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], 2, C)), (0, 1, 3, 2)))


@triton.jit
def _pair(start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Offsets and mask of a chunk's rows, turned, and once more, [BD, 2 C]; which are the first, [1, 2 C]."""
    o_r, o_d = tl.arange(0, 2 * C), tl.arange(0, BD)
    o_c = o_r % C
    m = (o_d < D)[:, None] & (o_c < end - start)[None, :]
    return (start * H + i_h) * D + o_d[:, None] + o_c[None, :] * (H * D), m, (o_r < C)[None, :]


@triton.jit
def load_pair(x, y, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Rows of x, turned, beside those of y, [BD, 2 C]."""
    o, m, left = _pair(start, end, i_h, H, D, C, BD)
    if x.dtype == y.dtype:
        b_x = tl.load(tl.where(left, x, y) + o, mask=m, other=0.0)
    else:
        b_x = tl.load(x + o, mask=m & left, other=0.0).to(tl.float32)
        b_x += tl.load(y + o, mask=m & (left == 0), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def store_pair(p, q, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """The left half of x [4, BD / 4, 2 C], turned, to p, the right half to q."""
    o, m, left = _pair(start, end, i_h, H, D, C, BD)
    x = whole(x)
    if p.dtype == q.dtype:
        tl.store(tl.where(left, p, q) + o, x.to(p.dtype.element_ty), mask=m)
    else:
        tl.store(p + o, x.to(p.dtype.element_ty), mask=m & left)
        tl.store(q + o, x.to(q.dtype.element_ty), mask=m & (left == 0))


@triton.jit
def finite(b_w):
    """b_w, none below -128: its exponential is 0 already, and what `sums` adds has to be finite."""
    return tl.where(b_w < -128.0, -128.0, b_w).to(b_w.dtype)


@triton.jit
def to_ends(b_w, C: tl.constexpr):
    """Log decays from the chunk's beginning to each read, beside those from each key to its end, [4, N, 2 C], and of
    all of it, [4 N]. b_w: finite, in bands."""
    t, o_i = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)
    i = (o_i % C)[None, :]
    passed = tl.where((o_i < C)[None, :], t < i, t > i)
    return sums_along(b_w, each(passed)), whole_decay(b_w, C)


@triton.jit
def whole_decay(b_w, C: tl.constexpr):
    """Log decay of all of a chunk's rows, [4 N]. b_w: finite, in bands."""
    total = tl.max(sums_along(b_w, each(tl.full([C, C], 1.0, tl.float32))), 2)
    return tl.reshape(total, (b_w.shape[0] * b_w.shape[1],))


@triton.jit
def column(x, at: tl.constexpr):
    """Column `at` of x [4, N, M], [4 N]."""
    x = tl.sum(tl.where((tl.arange(0, x.shape[2]) == at)[None, None, :], x, 0.0), 2)
    return tl.reshape(x, (x.shape[0] * x.shape[1],))


@triton.jit
def power_of_two(largest):
    """The power of two not above what is largest, as in `scaled`: what takes it away, and itself."""
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x04000000), 0x7B000000)  # so that its reciprocal is a number too
    return (0x7F000000 - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)


@triton.jit
def piece(T, sequence_of_piece, pieces_before, cu_seqlens, chunks_before, L, H: tl.constexpr, C: tl.constexpr,
          PACKED: tl.constexpr):  # fmt: skip
    """This program's piece of L chunks, of all there are (`Parts.where`), its sequence and its head; where the piece
    begins and the sequence ends; the number of its first chunk, and how many it has; whether it is the sequence's
    first, or last."""
    i_p, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if PACKED:
        i_n = tl.load(sequence_of_piece + i_p)
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        chunks = tl.cdiv(end - begin, C).to(tl.int32)
        skipped = (i_p - tl.load(pieces_before + i_n)) * L
        first_chunk = tl.load(chunks_before + i_n)
    else:
        chunks = tl.cdiv(T, C)
        pieces = tl.cdiv(chunks, L)
        i_n, skipped = i_p // pieces, i_p % pieces * L
        begin = i_n.to(tl.int64) * T
        end = begin + T
        first_chunk = i_n * chunks
    # There is room for more pieces than are filled. A sequence without tokens has one, of no chunk.
    count = tl.maximum(tl.minimum(chunks - skipped, L), 0)
    is_last = (skipped + L >= chunks) & ((count > 0) | (skipped == 0))
    return i_p, i_n, i_h, begin + skipped * C, end, first_chunk + skipped, count, skipped == 0, is_last


def options_of(kernel: str, r) -> dict:
    """Keyword arguments that every such kernel takes."""
    launch = TABLE[kernel, "16-bit"]
    return dict(
        H=r.shape[2], K=r.shape[3], C=CHUNK, BK=CHANNELS,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip


class Parts:
    """How the sequences of a call are cut: into chunks, and into parts of L chunks, each of which a program walks.

    Where there are more heads of all sequences than 128, about one for each multiprocessor of an H200, and sequences
    are not packed, a part is all of a sequence. Else there are as many as fill a GPU.
    """

    def __init__(self, r, v, packing, enough: int = ENOUGH // 2):
        """enough: programs that fill a GPU, by the registers that each takes; the default is two a multiprocessor."""
        (B, self.T, self.H, self.K), self.V = r.shape, v.shape[-1]
        self.packing, self.packed = packing, packing is not None
        self.N = packing.N if self.packed else B
        self.chunks = self.room(CHUNK)
        heads = self.N * self.H
        if self.packed:
            L = cdiv(self.chunks * self.H, 2 * enough)  # finer: sequences are of unlike length
        elif heads > ENOUGH // 4:
            L = cdiv(self.T, CHUNK)
        else:
            parts = enough // max(1, heads)
            if parts < 8:  # some more, if fewer of a GPU's places are then left empty
                parts = min(range(parts, 2 * parts + 2), key=lambda n: cdiv(n * heads, enough) / n)
            L = cdiv(cdiv(self.T, CHUNK), parts)
        self.L = cdiv(max(SHORTEST_PART, L), LONGEST) * LONGEST
        self.parts = self.room(CHUNK * self.L)
        self.several = self.parts > self.N

    def room(self, tokens: int) -> int:
        """Pieces of so many tokens; of packed sequences, how many there may be."""
        return self.packing.room(tokens) if self.packed else self.N * cdiv(self.T, tokens)

    def where(self, tokens: int, *more) -> tuple:
        """What `piece` takes to find a program's piece of so many tokens."""
        if not self.packed:
            return self.T, None, None, None, None, *more
        pieces, chunks = self.packing.pieces(tokens, least=1), self.packing.pieces(CHUNK)
        self.packing.pieces(CHUNK * self.L, least=1)  # which every call needs, so that one launch lays out all of them
        return self.T, pieces.sequence, pieces.before, self.packing.offsets, chunks.before, *more
