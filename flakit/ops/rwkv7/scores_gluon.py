"""RWKV7's scores on Hopper GPUs, in Gluon: `fused_chunk_triton.scores_kernel` with one warp for each chunk.

Symbols are those of `fused_chunk_triton`. A product's result is, in the same registers, a left operand, and transposed
a right one. A dyadic level of a chunk that is not mild needs the rows of 8 tokens that read and of 8 that are read.
Views of the rows in shared memory bring them together (`warps_gluon.rows_of_half`): one product [16 x 64] [64 x 16] of
r and a with k and b computes all scores of the level.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common import bands_gluon as bg
from ..common import warps_gluon as wg
from ..common.bands_triton import CHUNK
from ..common.blocks_triton import clamped_decay, exp
from ..common.pairs_triton import BLOCK_LEVELS, BLOCK_TOKEN
from ..common.positions_triton import locate_program

C = gl.constexpr(CHUNK)


@gluon.jit
def solve(b_A):
    """Return U = (I - A)^{-1} and its transpose, of a strictly lower triangular matrix A [16, 16]: at each level, lower
    left blocks join two inverses, U + U A U."""
    i, j = bg.tile_indices(16, 16, wg.WARP)
    s_A = gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_A.store(b_A)
    eye = (i == j).to(gl.float32)
    U = eye + gl.where((i ^ j) == 1, b_A, 0.0)
    X = eye + gl.where((i ^ j) == 1, s_A.permute([1, 0]).load(wg.WARP), 0.0)
    for level in gl.static_range(1, BLOCK_LEVELS):
        y = wg.product(wg.left(X), wg.turned(gl.where((i ^ j) >> level == 1, b_A, 0.0)))
        of_U = wg.turned(U)
        U = wg.add_product(U, wg.left(U), wg.turned(y))
        X = wg.add_product(X, wg.left(y), of_U)
    return U, X


@gluon.jit
def mild_scores(s_R, s_E, s_w, scale):
    """Return A_rk, A_rb, A_ak and A_ab [16, 16] of a mild chunk: products of operands decayed about its middle.

    s_R, s_E [32, 64]: r above a, k above b, in shared memory. s_w [16, 64]: log decays.
    """
    m, n = bg.tile_indices(16, 16, wg.LEFT)
    half = (n < C // 2).to(gl.float32)
    zero = gl.zeros([16, 16], gl.float32, wg.WARP)
    A_rk, A_rb, A_ak, b_A = zero, zero, zero, zero
    for channel in gl.static_range(0, 64, 32):  # fewer at a time, so that registers suffice
        b_w = s_w.slice(channel, 32, 1).load(wg.RIGHT)
        s_r, s_k = s_R.slice(channel, 32, 1), s_E.slice(channel, 32, 1)
        decay = wg.sums((n <= m).to(gl.float32) - half, b_w)
        key = exp(-decay)
        b_k = wg.turned(s_k.slice(0, 16).load(wg.WARP).to(gl.float32) * key)
        b_b = wg.turned(s_k.slice(16, 16).load(wg.WARP).to(gl.float32) * key)
        b_r = wg.left(s_r.slice(0, 16).load(wg.WARP).to(gl.float32) * exp(decay))
        A_rk, A_rb = wg.add_product(A_rk, b_r, b_k), wg.add_product(A_rb, b_r, b_b)
        b_a = wg.left(s_r.slice(16, 16).load(wg.WARP).to(gl.float32) * exp(wg.sums((n < m).to(gl.float32) - half, b_w)))
        A_ak, b_A = wg.add_product(A_ak, b_a, b_k), wg.add_product(b_A, b_a, b_b)
    return A_rk * scale, A_rb * scale, A_ak, b_A


@gluon.jit
def dyadic_scores(s_R, s_E, s_w, b_w, p, scale):
    """Return what `mild_scores` returns, for any decay, by dyadic levels. p: the chunk's scores in memory, which first
    take each level's results. s_w [16, 64]: log decays in shared memory."""
    i, j = bg.tile_indices(16, 16, wg.WARP)
    for level in gl.static_range(BLOCK_LEVELS):
        b_r, b_a = wg.parts(wg.rows_of_half(s_R, level, True))
        b_k, b_b = wg.parts(wg.rows_of_half(s_E, level, False))
        b_r *= exp(wg.rows_of_half(s_w, level, True))  # r is decayed by its own token too
        if level > 0:
            of_reads, of_keys = wg.factors_of_halves(b_w, level)
            b_r, b_a, b_k, b_b = b_r * of_reads, b_a * of_reads, b_k * of_keys, b_b * of_keys
        b_A = wg.product(wg.left(wg.above(b_r, b_a)), wg.turned(wg.above(b_k, b_b))) * gl.where(i < 8, scale, 1.0)
        x, y = wg.token_of(i, level, True), wg.token_of(j, level, False)
        place = gl.where(i < 8, y * C + x, x * C + y) + j // 8 * (C * C)
        gl.store(p + place, b_A, mask=((x ^ y) >> level) == 1)
    tl.debug_barrier()  # the scores are in memory
    b_r = s_R.slice(0, 16).load(wg.LEFT)
    zero = gl.zeros([16, 16], gl.float32, wg.WARP)
    own_k = mma_v2(b_r, s_E.slice(0, 16).permute([1, 0]).load(wg.RIGHT), zero) * scale
    own_b = mma_v2(b_r, s_E.slice(16, 16).permute([1, 0]).load(wg.RIGHT), zero) * scale
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
    at = (chunk * H + i_h).to(gl.int64)
    s_w = gl.allocate_shared_memory(gl.bfloat16, [C, 64], bg.SWIZZLED)
    s_R, s_E = bg.allocate_rows(2, 2 * C)
    t, d = bg.tile_indices(C, 64, wg.ROWS)
    o, there = (start * H + i_h) * 64 + t * (H * 64) + d, t < (end - start).to(gl.int32)
    s_rows = s_w, s_R.slice(0, C), s_R.slice(C, C), s_E.slice(0, C), s_E.slice(C, C)
    bg.copy_rows(s_rows, (w, r, a, k, b), o, there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    b_w = clamped_decay(s_w.load(wg.RIGHT))
    is_mild = gl.min(gl.min(b_w.to(gl.float32), 1), 0) > BLOCK_TOKEN
    gl.store(mild + at, is_mild.to(gl.float32))
    i, j = bg.tile_indices(16, 16, wg.WARP)
    p = scores + at * (2 * C * C)
    if is_mild:
        A_rk, A_rb, A_ak, b_A = mild_scores(s_R, s_E, s_w, scale)
    else:
        A_rk, A_rb, A_ak, b_A = dyadic_scores(s_R, s_E, s_w, b_w, p, scale)
    U, X = solve(gl.where(i > j, b_A, 0.0))
    b_N = wg.product(wg.left(gl.where(i >= j, A_rb, 0.0)), wg.turned(X))
    s_A = gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_N = gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_A.store(A_rk)
    s_N.store(b_N)
    gl.store(p + (i * C + j), gl.where(i > j, A_ak, s_A.permute([1, 0]).load(wg.WARP)))
    gl.store(p + (C * C + i * C + j), gl.where(i > j, U, s_N.permute([1, 0]).load(wg.WARP)))


def compute(plan, r, w, k, a, b, scores, mild, scale) -> None:
    """Launch the kernel. plan: the `_Plan` of `fused_chunk_triton`; the others as in `scores_kernel`."""
    scores_kernel[(plan.capacity(CHUNK) * plan.H,)](
        r, w, k, a, b, scores, mild, scale, *plan.where(CHUNK), PACKED=plan.packed,
        **wg.options("rwkv7.fused.scores", plan.H),
    )  # fmt: skip
