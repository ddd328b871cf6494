"""Transposed tiles in bands, for kernels in which one program walks a head's whole sequence, 16 tokens at a time.

A program has four warps. Each holds a band of 16 channels and all tokens of a chunk: [4, 16, columns], with the band as
a batch index. A warp's channels are the rows of its products, so the result of one product is, in the same registers,
the left operand of the next. A right operand that all warps read, [rows, columns], goes through shared memory once
(`per_band`). (In the kernels that compute the scores of mild chunks a band is a chunk, one for each warp.) This uses
only mma instructions that every GPU since sm_80 has; Triton compiles wgmma wrongly for such tiles (data/tuning.md).
The *terms* of a tile are a tuple of bfloat16 tiles that add up to it (`blocks_triton.terms`).
"""

from functools import partial

import torch
import triton
import triton.language as tl

from .blocks_triton import add_products, sums_along
from .dispatch import FUSED_CHANNELS
from .kernel_triton import Memory, runs_gluon
from .launch import FULL_GPU, LONG_CHUNK_SIZE, TABLE, Launch, cdiv, width
from .pairs_triton import BLOCK
from .tiles_triton import state_pointers

BANDS = tl.constexpr(4)
CHUNK = BLOCK.value
LEVELS = CHUNK.bit_length() - 1
_, CHANNELS = FUSED_CHANNELS
"""Channels of every tile: narrower heads are padded."""
MILD_FLOAT32 = tl.constexpr(-1.0)
"""As `BLOCK_TOKEN`, the least log decay of a token in a mild chunk, but for float32 inputs: no factor exceeds e^8."""
LONGEST = LONG_CHUNK_SIZE // CHUNK
"""Chunks of CHUNK tokens in the longest chunk of any kernel: the length of a part is a multiple of it."""
SHORTEST_FUSED_PART = 8
"""Chunks in the shortest part; cutting sequences finer costs more than it gains."""


@triton.jit
def bands(x, N: tl.constexpr = BANDS):
    """Return x [rows, columns] as N bands of rows, [N, rows / N, columns]."""
    return tl.reshape(x, (N, x.shape[0] // N, x.shape[1]))


@triton.jit
def flat(x):
    """Return x [4, N, M] as [4 N, M], the inverse of `bands`."""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def per_band(x, N: tl.constexpr = BANDS):
    """Repeat x [rows, columns] for each of N bands, [N, rows, columns]."""
    return tl.broadcast_to(x[None, :, :], (N, x.shape[0], x.shape[1]))


@triton.jit
def per_bands(x):
    """Repeat each term of x [rows, columns] for each of four bands, [4, rows, columns]."""
    return [per_band(term) for term in x]


@triton.jit
def flats(x):
    """Return the terms of x, a tuple of tiles [4, N, M] that add up to it, as [4 N, M]."""
    return [flat(term) for term in x]


@triton.jit
def turned(x):
    """Transpose each term of x, a tuple of tiles that add up to it, [N, M] to [M, N]."""
    return [tl.trans(term) for term in x]


@triton.jit
def transposed(x):
    """Transpose each term of x [4, N, M] to [4, M, N]."""
    return [tl.permute(term, (0, 2, 1)) for term in x]


@triton.jit
def product(a, b):
    """Return a @ b in float32, band by band, [4, N, M] @ [4, M, L]; each operand is a tuple of its bfloat16 terms."""
    return add_products(tl.zeros([a[0].shape[0], a[0].shape[1], b[0].shape[2]], dtype=tl.float32), a, b)


@triton.jit
def narrow_product(a, b):
    """Return a @ b as `product` does, by two accumulators: with few columns, products into one would be serial."""
    total = tl.dot(a[0], b[0])
    if len(a) == 2:
        total += tl.dot(a[1], b[0], tl.dot(a[0], b[1]))
    else:
        small = tl.dot(a[1], b[1], tl.dot(a[2], b[0], tl.dot(a[0], b[2])))
        total += tl.dot(a[1], b[0], tl.dot(a[0], b[1], small))
    return total


@triton.jit
def by_transpose(a, b):
    """Return a @ b^T in float32, band by band, of a [4, N, M] and b [4, L, M], each a tuple of its bfloat16 terms."""
    return narrow_product(a, transposed(b))


@triton.jit
def load_transposed(x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Load C rows of x [rows, H, D] from `start`, head i_h, transposed, [BD, C]; zeros from row `end`, column D on."""
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    m = (o_d < D)[:, None] & (o_c < end - start)[None, :]
    return tl.load(x + (start * H + i_h) * D + o_d[:, None] + o_c[None, :] * (H * D), mask=m, other=0.0)


@triton.jit
def store_transposed(p, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Store x [4, BD / 4, C], transposed, as the C rows from `start`, before `end`, of p [rows, H, D], head i_h."""
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    m = (o_d < D)[:, None] & (o_c < end - start)[None, :]
    p = p + (start * H + i_h) * D + o_d[:, None] + o_c[None, :] * (H * D)
    tl.store(p, flat(x).to(p.dtype.element_ty), mask=m)


@triton.jit
def load_banded(p, i, there, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Load state i of p [states, K, V], transposed, in bands of V, [4, BV / 4, BK]; zeros unless `there`."""
    p, m = state_pointers(p, i, 0, 0, K, V, BK, BV)
    return bands(tl.trans(tl.load(p, mask=m & there, other=0.0)))


@triton.jit
def store_banded(p, x, i, there, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Store x [4, BV / 4, BK] where `load_banded` loads it, where `there`."""
    p, m = state_pointers(p, i, 0, 0, K, V, BK, BV)
    tl.store(p, tl.trans(flat(x)), mask=m & there)


@triton.jit
def sides(x):
    """Return the left and the right C columns of x [4, N, 2 C]."""
    C: tl.constexpr = x.shape[2] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], 2, C)), (0, 1, 3, 2)))


@triton.jit
def repeat_columns(x):
    """Return the columns of x [4, N, C] twice, side by side, [4, N, 2 C]."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], 1, x.shape[2]))
    x = tl.broadcast_to(x, (x.shape[0], x.shape[1], 2, x.shape[3]))
    return tl.reshape(x, (x.shape[0], x.shape[1], 2 * x.shape[3]))


@triton.jit
def joined(left, v, f):
    """Return the terms f [4, N, 2 C] with the input terms v [4, N, C] in their left C columns (a mask, `left`)."""
    high = tl.where(left, repeat_columns(v[0]), f[0])
    if len(v) == 1:
        result = (high, tl.where(left, tl.zeros_like(f[1]), f[1]))
    elif len(v) == 2:
        result = (high, tl.where(left, repeat_columns(v[1]), f[1]))
    else:
        middle = tl.where(left, repeat_columns(v[1]), f[1])
        result = (high, middle, tl.where(left, repeat_columns(v[2]), f[2]))
    return result


@triton.jit
def _pair(start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Return offsets and mask of rows as in `load_transposed`, twice side by side, [BD, 2 C]; a mask of the left C."""
    o_r, o_d = tl.arange(0, 2 * C), tl.arange(0, BD)
    o_c = o_r % C
    m = (o_d < D)[:, None] & (o_c < end - start)[None, :]
    return (start * H + i_h) * D + o_d[:, None] + o_c[None, :] * (H * D), m, (o_r < C)[None, :]


@triton.jit
def load_pair(x, y, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Load x and y [rows, H, D], each as `load_transposed` does, side by side, [BD, 2 C]."""
    o, m, left = _pair(start, end, i_h, H, D, C, BD)
    if x.dtype == y.dtype:
        b_x = tl.load(tl.where(left, x, y) + o, mask=m, other=0.0)
    else:
        b_x = tl.load(x + o, mask=m & left, other=0.0).to(tl.float32)
        b_x += tl.load(y + o, mask=m & (left == 0), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def store_pair(p, q, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Store the left C columns of x [4, BD / 4, 2 C] in p, the right in q [rows, H, D], as `store_transposed` does."""
    o, m, left = _pair(start, end, i_h, H, D, C, BD)
    x = flat(x)
    if p.dtype == q.dtype:
        tl.store(tl.where(left, p, q) + o, x.to(p.dtype.element_ty), mask=m)
    else:
        tl.store(p + o, x.to(p.dtype.element_ty), mask=m & left)
        tl.store(q + o, x.to(q.dtype.element_ty), mask=m & (left == 0))


@triton.jit
def decays_to_ends(b_w, C: tl.constexpr):
    """Return log decays [4, N, 2 C], over the tokens before each token (left C columns) and after it (right), and
    those of the whole chunk, [4 N]. b_w [4, N, C]: finite natural-log decays, in bands."""
    t, o_i = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)
    i = (o_i % C)[None, :]
    between = tl.where((o_i < C)[None, :], t < i, t > i)
    return sums_along(b_w, per_band(between)), total_decay(b_w, C)


@triton.jit
def total_decay(b_w, C: tl.constexpr):
    """Return the log decay of a whole chunk, [4 N]. b_w [4, N, C]: finite natural-log decays, in bands."""
    total = tl.max(sums_along(b_w, per_band(tl.full([C, C], 1.0, tl.float32))), 2)
    return tl.reshape(total, (b_w.shape[0] * b_w.shape[1],))


@triton.jit
def column(x, at: tl.constexpr):
    """Return column `at` of x [4, N, M] as [4 N]."""
    x = tl.sum(tl.where((tl.arange(0, x.shape[2]) == at)[None, None, :], x, 0.0), 2)
    return tl.reshape(x, (x.shape[0] * x.shape[1],))


@triton.jit
def power_of_two(largest):
    """Return 1 / p and p, the largest power of two not above float32 `largest`, but from 2^-119 to 2^119 (`scaled`)."""
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x04000000), 0x7B000000)  # so that its reciprocal is finite too
    return (0x7F000000 - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)


def takes_gluon(rows, others) -> bool:
    """Whether Gluon kernels take a call: rows are bfloat16 [B, T, H, 64], and `runs_gluon` holds for all tensors."""
    fits = all(x.shape[-1] == CHANNELS and x.dtype == torch.bfloat16 for x in rows)
    return fits and runs_gluon(*rows, *others)


class Parts:
    """The cut of a call's sequences into chunks of 16 tokens, and into parts of L chunks, which one program walks each;
    the launches of kernels in bands.

    A part is a whole sequence where sequences are not packed and have more than 128 heads together, about one for each
    multiprocessor of an H200. Otherwise there are as many parts as fill a GPU. N, chunks, parts: numbers of sequences,
    chunks and parts, of packed sequences upper bounds. several: whether a sequence may have more than one part.
    """

    def __init__(self, memory: Memory, r, v, packing, enough: int = FULL_GPU // 2):
        """Cut the sequences of a call with r [B, T, H, K] and v [B, T, H, V]. packing: packed sequences, or None.
        enough: programs that fill a GPU, given the registers of each; the default is two a multiprocessor."""
        (B, self.T, self.H, self.K), self.V, self.memory = r.shape, v.shape[-1], memory
        self.packing, self.packed = packing, packing is not None
        self.stored = torch.float16 if r.element_size() == 2 else torch.float32
        self.N = packing.N if self.packed else B
        self.chunks = self.capacity(CHUNK)
        heads = self.N * self.H
        if self.packed:
            L = cdiv(self.chunks * self.H, 2 * enough)  # finer: sequences differ in length
        elif heads > FULL_GPU // 4:
            L = cdiv(self.T, CHUNK)
        else:
            parts = enough // max(1, heads)
            if parts < 8:  # more, if that leaves fewer multiprocessors idle
                parts = min(range(parts, 2 * parts + 2), key=lambda n: cdiv(n * heads, enough) / n)
            L = cdiv(cdiv(self.T, CHUNK), parts)
        self.L = cdiv(max(SHORTEST_FUSED_PART, L), LONGEST) * LONGEST
        self.parts = self.capacity(CHUNK * self.L)
        self.several = self.parts > self.N
        if self.packed:  # requested here, so that one launch lays out all sizes
            packing.request(CHUNK)
            packing.request(CHUNK * self.L, least=1)

    def row(self, name: str) -> Launch:
        """Return a row of the launch table."""
        return TABLE[name, width(self.stored.itemsize)]

    def launch(self, row: str, kernel, programs, args, **flags) -> None:
        """Launch a kernel as `Memory.launch` does, with the sizes and options of every kernel in bands. row: its row of
        the launch table, such as "rwkv6.fused.forward"."""
        self.memory.launch(kernel, programs, args, partial(self._constants, kernel, row), **flags)

    def _constants(self, kernel, row: str) -> dict:
        launch = self.row(row)._asdict()
        sizes = dict(H=self.H, K=self.K, V=self.V, C=CHUNK, LEVELS=LEVELS, PACKED=self.packed)
        sizes |= dict(BK=CHANNELS, BV=CHANNELS, TERMS=2 if self.stored.itemsize == 2 else 3)
        stages = () if getattr(kernel, "is_gluon", bool)() else ("num_stages",)
        options = {n: launch[n] for n in ("num_warps", "maxnreg", *stages)}
        return {n: x for n, x in sizes.items() if n in kernel.arg_names} | options

    def lines(self, elements: int) -> int:
        """Return how many float32 elements hold `elements` of stored states, float16 or float32 as the inputs."""
        return cdiv(elements * self.stored.itemsize, 4)

    def capacity(self, tokens: int) -> int:
        """Return the number of pieces of `tokens` tokens; for packed sequences an upper bound."""
        return self.packing.capacity(tokens) if self.packed else self.N * cdiv(self.T, tokens)

    def where(self, tokens: int, *more) -> tuple:
        """Return the arguments of `locate_program` for pieces of `tokens` tokens: T, sequence_of_part, parts_before,
        cu_seqlens and chunks_before; unless packed, all but T are None. more: further arguments, appended."""
        if not self.packed:
            return self.T, None, None, None, None, *more
        pieces, chunks = self.packing.pieces(tokens, least=1), self.packing.pieces(CHUNK)
        return self.T, pieces.sequence, pieces.before, self.packing.offsets, chunks.before, *more
