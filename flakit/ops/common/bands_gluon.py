"""Shared code of kernels in Gluon, Triton's language of explicit layouts: decorator, layouts, split bfloat16 operands,
the pairs of tokens in a chunk.

Tiles lie in bands of 16 channels, one for each warp, as in `bands_triton`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .blocks_triton import LENGTHS, exp
from .kernel_triton import Kernel, Translated
from .pairs_triton import BLOCK_LEVELS


class _Source(Translated, GluonASTSource):
    """The source of a Gluon kernel. The compiling thread releases `TURN` once it has translated it."""


class _GluonKernel(Kernel):
    SOURCE = _Source

    def is_gluon(self) -> bool:
        return True


def kernel(function) -> _GluonKernel:
    """Decorate a launched Gluon kernel; its helpers have `gluon.jit`."""
    return _GluonKernel(function, do_not_specialize=LENGTHS)


BAND = tl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""The result of a product [64, *], 16 rows per warp; LEFT and RIGHT are its operands."""
LEFT = tl.constexpr(gl.DotOperandLayout(0, BAND.value, 2))
RIGHT = tl.constexpr(gl.DotOperandLayout(1, BAND.value, 2))
COLUMNS = tl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
"""The result of a product [16, 64], 16 columns per warp, for rows that are not transposed; below, its operands."""
COLUMNS_LEFT = tl.constexpr(gl.DotOperandLayout(0, COLUMNS.value, 2))
COLUMNS_RIGHT = tl.constexpr(gl.DotOperandLayout(1, COLUMNS.value, 2))
ROWS = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of 64 channels in the order of global memory, 16 bytes of 16-bit numbers per thread."""
SWIZZLED = tl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Swizzled rows of 64 16-bit numbers in shared memory; below, rows of 32 and of 16."""
SWIZZLED_32 = tl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
SWIZZLED_16 = tl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
PLAIN = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FOUR = tl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""A vector of 4 numbers; every thread holds all of them."""
SQUARE = tl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
"""A matrix [16, 16]."""


@gluon.jit
def truncated(x):
    """Return float32 x truncated to bfloat16, and the remainder in float32, as in `blocks_triton`."""
    bits = x.to(gl.int32, bitcast=True)
    high = (bits & -65536).to(gl.float32, bitcast=True)
    rest = gl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, high], gl.float32, True, 1)
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [bits], gl.bfloat16, True, 2), rest


@gluon.jit
def to_bfloat16(x):
    """Round float32 x to bfloat16, two numbers per instruction."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)


@gluon.jit
def to_half(x):
    """Round float32 x to float16, two numbers per instruction."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, True, 2)


@gluon.jit
def split(x):
    """Split float32 x into high + low, two bfloat16 tiles: 16 bits of mantissa."""
    high, rest = truncated(x)
    return high, to_bfloat16(rest)


@gluon.jit
def split_left(x):
    """Split float32 x [64, *] into the two parts of a left operand."""
    high, low = split(x)
    return gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)


@gluon.jit
def mask(x):
    """Convert a condition to bfloat16 zeros and ones, an operand of a product."""
    return x.to(gl.float32).to(gl.bfloat16)


@gluon.jit
def allocate_pair(N: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = gl.bfloat16):
    """Allocate shared memory [N, M] for the high and for the low part of a split operand."""
    high = gl.allocate_shared_memory(DTYPE, [N, M], LAYOUT)
    return high, gl.allocate_shared_memory(DTYPE, [N, M], LAYOUT)


@gluon.jit
def load_pair(pair):
    """Load both parts of a right operand."""
    high, low = pair
    return high.load(RIGHT), low.load(RIGHT)


@gluon.jit
def load_pair_transposed(pair):
    """Load both parts of a right operand, transposed."""
    high, low = pair
    return high.permute([1, 0]).load(RIGHT), low.permute([1, 0]).load(RIGHT)


@gluon.jit
def store_pair(pair, x):
    """Split float32 x into the high and low part of an operand, store them in pair, two buffers of shared memory, and
    return them."""
    s_high, s_low = pair
    high, low = split(x)
    s_high.store(high)
    s_low.store(low)
    return high, low


@gluon.jit
def full_product(acc, a_high, a_low, b_high, b_low):
    """Return acc + a @ b of split operands with all four products of their parts."""
    acc = mma_v2(a_high, b_low, mma_v2(a_low, b_low, acc))
    return mma_v2(a_high, b_high, mma_v2(a_low, b_high, acc))


@gluon.jit
def decays_by_token(b_w):
    """Return four sums of a chunk's log decays for each token, [16, 64] each, in COLUMNS: over the rows up to its own,
    over those before it, over those after it, and over all rows (the same for every token).

    b_w [16, 64]: finite log decays, a right operand.
    """
    t, j = tile_indices(16, 16, COLUMNS_LEFT)
    zero = gl.zeros([16, 64], gl.float32, COLUMNS)
    upto, before = mma_v2(mask(j <= t), b_w, zero), mma_v2(mask(j < t), b_w, zero)
    return upto, before, mma_v2(mask(j > t), b_w, zero), mma_v2(mask(t + j >= 0), b_w, zero)


@gluon.jit
def store_band_maxima(s_largest, b_D):
    """Store max |D| of each warp's band of b_D [64, 64] in s_largest [4]. After a barrier, every warp can take the
    maximum of all four."""
    s_largest.store(gl.max(gl.max(gl.abs(gl.reshape(b_D, (4, 16, 64))), 2), 1))


@gluon.jit
def recomputed(x, CONTIGUOUS: gl.constexpr):
    """Return int32 x, which the compiler then computes anew in every iteration of a loop.

    Otherwise it computes once whatever follows from x, such as an address for each tensor, and holds that in registers
    through the loop. CONTIGUOUS: columns of x that are contiguous, from a multiple of this number on.
    """
    x = gl.inline_asm_elementwise("", "=r,0", [x], gl.int32, False, 1)
    return gl.max_contiguous(gl.multiple_of(x, [1, CONTIGUOUS]), [1, CONTIGUOUS])


@gluon.jit
def tile_indices(N: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the row indices [N, 1] and the column indices [1, M] of a tile in this layout."""
    return gl.arange(0, N, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, M, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def row_offsets(N: gl.constexpr, STRIDE: gl.constexpr):
    """Return the row indices [N, 1] of a tile of 64 columns, and the offsets of its elements, [N, 64], in rows that are
    STRIDE elements apart."""
    t, d = tile_indices(N, 64, ROWS)
    return t, t * STRIDE + d


@gluon.jit
def allocate_rows(COUNT: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr = 0):
    """Allocate shared memory [N, 64] for N rows of each of COUNT tensors; with STAGES, [STAGES, N, 64].

    Each tensor has an allocation of its own: between accesses to one allocation the compiler inserts barriers, even
    where the indices differ.
    """
    buffers = ()
    for _ in gl.static_range(COUNT):
        if STAGES == 0:
            buffers += (gl.allocate_shared_memory(gl.bfloat16, [N, 64], SWIZZLED),)
        else:
            buffers += (gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 64], SWIZZLED),)
    return buffers


@gluon.jit
def copy_rows(buffers, tensors, o, there):
    """Start the asynchronous copy of rows of each tensor, at offsets o [N, 64], to its buffer in shared memory; rows
    outside the mask `there` become zeros."""
    for n in gl.static_range(len(tensors)):
        async_copy.async_copy_global_to_shared(buffers[n], tensors[n] + o, mask=there)


@gluon.jit
def sums_along(x, ones, ALL_BITS: gl.constexpr):
    """Return x @ ones in float32, sums of columns of float32 x [64, 16]. ones [16, *]: 1 in the columns to add, else 0.

    Products take x as two bfloat16 terms, 16 bits of its mantissa; with ALL_BITS as three, all 24 bits.
    """
    high, rest = truncated(x)
    acc = gl.zeros([x.shape[0], ones.shape[1]], gl.float32, BAND)
    acc = mma_v2(gl.convert_layout(high, LEFT), ones, acc)
    if ALL_BITS:
        high, rest = truncated(rest)
        acc = mma_v2(gl.convert_layout(high, LEFT), ones, acc)
    return mma_v2(gl.convert_layout(to_bfloat16(rest), LEFT), ones, acc)


# --- pairs of tokens in a chunk, by dyadic levels (`common.decay`) ---------------------------------------------------


@gluon.jit
def level_masks():
    """Store two masks [4, 16, 16] of tokens i (rows) and t, one for each dyadic level, in shared memory: an element
    takes several instructions to compute, loading a mask one. Return where they are.

    between: one where t lies between i and the boundary of the halves of i's block, not i itself, else zero
    meets: all bits set where i and t lie in opposite halves of one block, else zero
    """
    s_between = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_LEVELS, 16, 16], SWIZZLED_16)
    s_meets = gl.allocate_shared_memory(gl.int16, [BLOCK_LEVELS, 16, 16], SWIZZLED_16)
    i, t = tile_indices(16, 16, SQUARE)
    for level in gl.static_range(BLOCK_LEVELS):
        is_read, first = (i & (1 << level)) != 0, i & -(1 << level)
        begin, end = gl.where(is_read, first, i + 1), gl.where(is_read, i, first + (1 << level))
        s_between.index(level).store(mask((t >= begin) & (t < end)))
        s_meets.index(level).store(gl.where(((t ^ i) >> level) == 1, -1, 0).to(gl.int16))
    return s_between, s_meets


@gluon.jit
def columns(s_x, n: gl.constexpr = 0):
    """Load rows 16 n to 16 n + 15 of s_x [*, 64] from shared memory, transposed, as float32 [64, 16]."""
    return gl.convert_layout(s_x.slice(16 * n, 16).permute([1, 0]).load(LEFT), BAND, assert_trivial=True).to(gl.float32)


@gluon.jit
def selected(mask, x):
    """Return bfloat16 x where all bits of int16 `mask` are set, else zero, two numbers per instruction."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [mask, x], gl.bfloat16, True, 2)


@gluon.jit
def add_product(acc, x, s_P, i: gl.constexpr, j: gl.constexpr, mask):
    """Return acc + x @ P_ij. x [64, 16]: a left operand in one or two terms; P_ij: what `mask` selects of a block
    [16, 16] of P, which is in shared memory, split."""
    s_high, s_low = s_P
    P_high = selected(mask, s_high.slice(16 * i, 16).slice(16 * j, 16, 1).load(RIGHT))
    P_low = selected(mask, s_low.slice(16 * i, 16).slice(16 * j, 16, 1).load(RIGHT))
    if len(x) == 2:
        acc = mma_v2(x[1], P_high, acc)
    return mma_v2(x[0], P_high, mma_v2(x[0], P_low, acc))


@gluon.jit
def add_dyadic_pairs(d_reads, d_keys, b_dw, s_reads, s_keys, b_w, own, s_P, LAYOUT: gl.constexpr):
    """Return the gradients of reads and keys, tuples of N tiles [64, 16], and dw, plus the terms of pairs of tokens.

    s_reads, s_keys [16 N, 64]: rows in shared memory. b_w [64, 16]: log decays, a left operand. own [64, 16]: a further
    factor of the first of the N reads. s_P [16 N, 16 N]: gradients of the scores, split; LAYOUT: to add its transpose.
    """
    N: gl.constexpr = len(d_reads)
    s_between, s_meets = level_masks()
    s_high, s_low = s_P
    s_pairs = allocate_pair(16 * N, 16 * N, SWIZZLED_16 if N == 1 else SWIZZLED_32)
    s_pairs[0].store(s_high.load(LAYOUT) + s_high.permute([1, 0]).load(LAYOUT))
    s_pairs[1].store(s_low.load(LAYOUT) + s_low.permute([1, 0]).load(LAYOUT))
    tl.debug_barrier()  # in the loop, where the compiler would insert it, it would be one a level
    m, zero = gl.arange(0, 16, gl.SliceLayout(0, BAND))[None, :], gl.zeros([64, 16], gl.float32, BAND)
    for level in range(BLOCK_LEVELS):
        reads = ((m >> level) & 1) != 0
        weight = exp(mma_v2(b_w, s_between.index(level).permute([1, 0]).load(RIGHT), zero))
        weights = (gl.where(reads, weight * own, weight), weight)
        x, x_terms = (), ()
        for n in gl.static_range(N):
            x += (gl.where(reads, columns(s_reads, n), columns(s_keys, n)) * weights[n],)
            x_terms += (split_left(x[n]),)
        meets, of_decay, d_r, d_k = s_meets.index(level).load(RIGHT), zero, (), ()
        for j in gl.static_range(N):
            grad = zero
            for i in gl.static_range(N):
                grad = add_product(grad, x_terms[i], s_pairs, i, j, meets)
            of_decay += grad * x[j]
            grad *= weights[j]
            d_r += (d_reads[j] + gl.where(reads, grad, 0.0),)
            d_k += (d_keys[j] + gl.where(reads, 0.0, grad),)
        d_reads, d_keys = d_r, d_k
        b_dw += sums_along(of_decay, s_between.index(level).load(RIGHT), False)
    return d_reads, d_keys, b_dw
