"""RWKV7's scores on Hopper GPUs, in Gluon: `fused_chunk_triton.scores_kernel` with one warp for each chunk.

Symbols are those of `fused_chunk_triton`. A product's result is, in the same registers, a left operand, and transposed
a right one. A dyadic level of a chunk that is not mild needs the rows of 8 tokens that read and of 8 that are read.
Views of the rows in shared memory bring them together (`rows_of_half`): one product [16 x 64] [64 x 16] of r and a with
k and b computes all scores of the level.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common import bands_gluon as bg
from ..common.bands_triton import CHUNK, LEVELS
from ..common.blocks_triton import clamped_decay, exp
from ..common.pairs_triton import BLOCK_TOKEN
from ..common.positions_triton import locate_program

C = gl.constexpr(CHUNK)
LAST_LEVEL = gl.constexpr(LEVELS)
WARP = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
"""The result of a product of one warp; below, its operands, and rows of 64 channels in the order of global memory."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, WARP.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, WARP.value, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@gluon.jit
def left(x):
    """Return float32 x as a left operand, split."""
    high, low = bg.split(x)
    return gl.convert_layout(high, LEFT, assert_trivial=True), gl.convert_layout(low, LEFT, assert_trivial=True)


@gluon.jit
def turned(x):
    """Return float32 x, transposed, as a right operand, split."""
    high, low = bg.split(x)
    high, low = gl.permute(high, (1, 0)), gl.permute(low, (1, 0))
    return gl.convert_layout(high, RIGHT, assert_trivial=True), gl.convert_layout(low, RIGHT, assert_trivial=True)


@gluon.jit
def product(a, b):
    """Return a @ b [16, 16] of split operands, by two sums."""
    a_high, a_low = a
    b_high, b_low = b
    zero = gl.zeros([16, 16], gl.float32, WARP)
    return mma_v2(a_high, b_high, zero) + mma_v2(a_low, b_high, mma_v2(a_high, b_low, zero))


@gluon.jit
def sums(ones, b_w):
    """Return ones @ b_w [16, 64]. ones: -1, 0 or 1; b_w: log decays, a right operand."""
    return mma_v2(ones.to(gl.float32).to(gl.bfloat16), b_w, gl.zeros([16, b_w.shape[1]], gl.float32, WARP))


@gluon.jit
def parts(x):
    """Return the upper and the lower half of the rows of x."""
    N: gl.constexpr = x.shape[0] // 2
    return gl.split(gl.permute(gl.reshape(x, (2, N, x.shape[1])), (1, 2, 0)))


@gluon.jit
def above(x, y):
    """Return x [8, 64] above y, in layout WARP, the inverse of `parts`."""
    both = gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), (16, 64))
    return gl.convert_layout(both, WARP, assert_trivial=True)


@gluon.jit
def rows_of_half(s_x, LEVEL: gl.constexpr, READS: gl.constexpr):
    """Load the rows of tokens in a level's right halves (READS) or left ones, in float32. s_x [N, 64]: the rows of one
    or of two tensors; result [N / 2, 64]. All are loaded, but those not used cost nothing."""
    N: gl.constexpr = s_x.shape[0]
    SIZE: gl.constexpr = 1 << LEVEL
    s_x = s_x.reshape([N // (2 * SIZE), 2, SIZE, 64]).permute([1, 0, 2, 3]).reshape([N, 64])
    left_half, right_half = parts(s_x.load(WARP))
    return (right_half if READS else left_half).to(gl.float32)


@gluon.jit
def solve(b_A):
    """Return U = (I - A)^{-1} and its transpose, of a strictly lower triangular matrix A [16, 16]: at each level, lower
    left blocks join two inverses, U + U A U."""
    i, j = bg.tile_indices(16, 16, WARP)
    s_A = gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_A.store(b_A)
    eye = (i == j).to(gl.float32)
    U = eye + gl.where((i ^ j) == 1, b_A, 0.0)
    X = eye + gl.where((i ^ j) == 1, s_A.permute([1, 0]).load(WARP), 0.0)
    for level in gl.static_range(1, LAST_LEVEL):
        y = product(left(X), turned(gl.where((i ^ j) >> level == 1, b_A, 0.0)))
        U_new = U + product(left(U), turned(y))
        X += product(left(y), turned(U))
        U = U_new
    return U, X


@gluon.jit
def add_product(acc, a, b):
    """Return acc + a @ b of split operands."""
    a_high, a_low = a
    b_high, b_low = b
    return mma_v2(a_high, b_high, mma_v2(a_low, b_high, mma_v2(a_high, b_low, acc)))


@gluon.jit
def mild_scores(s_R, s_E, s_w, scale):
    """Return A_rk, A_rb, A_ak and A_ab [16, 16] of a mild chunk: products of operands decayed about its middle.

    s_R, s_E [32, 64]: r above a, k above b, in shared memory. s_w [16, 64]: log decays.
    """
    m, n = bg.tile_indices(16, 16, LEFT)
    half = (n < C // 2).to(gl.float32)
    zero = gl.zeros([16, 16], gl.float32, WARP)
    A_rk, A_rb, A_ak, b_A = zero, zero, zero, zero
    for channel in gl.static_range(0, 64, 32):  # fewer at a time, so that registers suffice
        b_w = s_w.slice(channel, 32, 1).load(RIGHT)
        s_r, s_k = s_R.slice(channel, 32, 1), s_E.slice(channel, 32, 1)
        decay = sums((n <= m).to(gl.float32) - half, b_w)
        key = exp(-decay)
        b_k = turned(s_k.slice(0, 16).load(WARP).to(gl.float32) * key)
        b_b = turned(s_k.slice(16, 16).load(WARP).to(gl.float32) * key)
        b_r = left(s_r.slice(0, 16).load(WARP).to(gl.float32) * (exp(decay) * scale))
        A_rk, A_rb = add_product(A_rk, b_r, b_k), add_product(A_rb, b_r, b_b)
        b_a = left(s_r.slice(16, 16).load(WARP).to(gl.float32) * exp(sums((n < m).to(gl.float32) - half, b_w)))
        A_ak, b_A = add_product(A_ak, b_a, b_k), add_product(b_A, b_a, b_b)
    return A_rk, A_rb, A_ak, b_A


@gluon.jit
def dyadic_scores(s_R, s_E, s_w, b_w, p, scale):
    """Return what `mild_scores` returns, for any decay, by dyadic levels. p: the chunk's scores in memory, which first
    take each level's results. s_w [16, 64]: log decays in shared memory."""
    i, j = bg.tile_indices(16, 16, WARP)
    m, n = bg.tile_indices(16, 16, LEFT)
    for level in gl.static_range(LAST_LEVEL):
        size = 1 << level
        b_r, b_a = parts(gl.convert_layout(rows_of_half(s_R, level, True), WARP, assert_trivial=True))
        b_k, b_b = parts(gl.convert_layout(rows_of_half(s_E, level, False), WARP, assert_trivial=True))
        b_r *= exp(rows_of_half(s_w, level, True))  # r is decayed by its own token too
        if level > 0:
            block, within = ((m & 7) >> level) * (2 * size), m & (size - 1)
            begin = block + gl.where(m < 8, size, within + 1)
            stop = block + gl.where(m < 8, size + within, size)
            of_reads, of_keys = parts(exp(sums((n >= begin) & (n < stop), b_w)))
            b_r, b_a, b_k, b_b = b_r * of_reads, b_a * of_reads, b_k * of_keys, b_b * of_keys
        of_level = product(left(above(b_r, b_a)), turned(above(b_k, b_b))) * gl.where(i < 8, scale, 1.0)
        token = ((i & 7) >> level) * (2 * size) + size + (i & (size - 1))
        key_token = ((j & 7) >> level) * (2 * size) + (j & (size - 1))
        place = gl.where(i < 8, key_token * C + token, token * C + key_token) + (j // 8) * (C * C)
        gl.store(p + place, of_level, mask=((token ^ key_token) >> level) == 1)
    tl.debug_barrier()  # the scores are in memory
    b_r = s_R.slice(0, 16).load(LEFT)
    zero = gl.zeros([16, 16], gl.float32, WARP)
    own_k = mma_v2(b_r, s_E.slice(0, 16).permute([1, 0]).load(RIGHT), zero) * scale
    own_b = mma_v2(b_r, s_E.slice(16, 16).permute([1, 0]).load(RIGHT), zero) * scale
    A_rk, A_rb = gl.load(p + (j * C + i)), gl.load(p + (C * C + j * C + i))
    A_ak, b_A = gl.load(p + (i * C + j)), gl.load(p + (C * C + i * C + j))
    A_rk, A_rb = gl.where(i == j, own_k, A_rk), gl.where(i == j, own_b, A_rb)
    return A_rk, A_rb, A_ak, b_A


@bg.kernel
def scores_kernel(
    r, w, k, a, b, scores, mild, scale, T, sequence_of_chunk, chunks_before, cu_seqlens, all_chunks_before,
    H: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute A_rk, A_ak, N = A_rb U and U = (I - A_ab)^{-1} of a chunk of a head, and whether it is mild.

    r, w, k, a, b [B, T, H, 64] bfloat16; scores, mild: as in the kernel in Triton
    sequence_of_chunk [chunks], chunks_before, cu_seqlens, all_chunks_before [N + 1]; None unless PACKED
    """
    i_c, i_n, i_h, start, end, chunk, count, is_first, is_last = locate_program(
        T, sequence_of_chunk, chunks_before, cu_seqlens, all_chunks_before, 1, H, C, PACKED
    )
    if count == 0:
        return
    rows = (end - start).to(gl.int32)
    at = (chunk * H + i_h).to(gl.int64)
    base = (start * H + i_h) * 64
    s_w = gl.allocate_shared_memory(gl.bfloat16, [C, 64], bg.SWIZZLED)
    s_R = gl.allocate_shared_memory(gl.bfloat16, [2 * C, 64], bg.SWIZZLED)
    s_E = gl.allocate_shared_memory(gl.bfloat16, [2 * C, 64], bg.SWIZZLED)
    t, d = bg.tile_indices(C, 64, ROWS)
    o = base + t * (H * 64) + d
    async_copy.async_copy_global_to_shared(s_w, w + o, mask=t < rows)
    bg.copy_rows((s_R.slice(0, 16), s_R.slice(16, 16), s_E.slice(0, 16), s_E.slice(16, 16)), (r, a, k, b), o, t < rows)
    async_copy.commit_group()
    async_copy.wait_group(0)
    b_w = clamped_decay(s_w.load(RIGHT))
    is_mild = gl.min(gl.min(b_w.to(gl.float32), 1), 0) > BLOCK_TOKEN
    gl.store(mild + at, is_mild.to(gl.float32))
    i, j = bg.tile_indices(16, 16, WARP)
    p = scores + at * (2 * C * C)
    if is_mild:
        A_rk, A_rb, A_ak, b_A = mild_scores(s_R, s_E, s_w, scale)
    else:
        A_rk, A_rb, A_ak, b_A = dyadic_scores(s_R, s_E, s_w, b_w, p, scale)
    U, X = solve(gl.where(i > j, b_A, 0.0))
    b_N = product(left(gl.where(i >= j, A_rb, 0.0)), turned(X))
    s_A = gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_N = gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_A.store(A_rk)
    s_N.store(b_N)
    gl.store(p + (i * C + j), gl.where(i > j, A_ak, s_A.permute([1, 0]).load(WARP)))
    gl.store(p + (C * C + i * C + j), gl.where(i > j, U, s_N.permute([1, 0]).load(WARP)))


def compute(plan, r, w, k, a, b, scores, mild, scale) -> None:
    """Launch the kernel. plan: the `_Plan` of `fused_chunk_triton`; the others as in `scores_kernel`."""
    scores_kernel[(plan.capacity(CHUNK) * plan.H,)](
        r, w, k, a, b, scores, mild, scale, *plan.where(CHUNK), PACKED=plan.packed,
        **bg.options("rwkv7.fused.scores", plan.H) | {"num_warps": 1},
    )  # fmt: skip
