"""RWKV6's scores on Hopper GPUs, in Gluon: `fused_chunk_triton.scores_kernel` with one warp for each chunk.

A dyadic level of a chunk that is not mild needs the rows of 8 tokens that read and of 8 that are read. Views of the
rows in shared memory bring them together (`warps_gluon.rows_of_half`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..common import bands_gluon as bg
from ..common import warps_gluon as wg
from ..common.bands_triton import CHUNK
from ..common.blocks_triton import clamped_decay, exp
from ..common.pairs_triton import BLOCK_LEVELS, BLOCK_TOKEN
from ..common.positions_triton import locate_program

C = gl.constexpr(CHUNK)


@gluon.jit
def mild_scores(s_r, s_w, s_k, scale):
    """Return the scores of pairs in a mild chunk, [16, 16]: a product of operands decayed about its middle. s_r, s_w,
    s_k [16, 64]: in shared memory."""
    m, n = bg.tile_indices(16, 16, wg.LEFT)
    half = (n < C // 2).to(gl.float32)
    b_A = gl.zeros([16, 16], gl.float32, wg.WARP)
    for channel in gl.static_range(0, 64, 32):  # fewer at a time, so that registers suffice
        b_w = s_w.slice(channel, 32, 1).load(wg.RIGHT)
        read = exp(wg.sums((n < m).to(gl.float32) - half, b_w))
        key = exp(-wg.sums((n <= m).to(gl.float32) - half, b_w))
        b_q = s_r.slice(channel, 32, 1).load(wg.WARP).to(gl.float32) * read
        b_k = s_k.slice(channel, 32, 1).load(wg.WARP).to(gl.float32) * key
        b_A = wg.add_product(b_A, wg.left(b_q), wg.turned(b_k))
    return b_A * scale


@gluon.jit
def store_dyadic_scores(p, s_r, s_w, s_k, scale):
    """Store the scores of pairs in a chunk of any decay at p, by dyadic levels. s_r, s_w, s_k: as in `mild_scores`."""
    b_w = clamped_decay(s_w.load(wg.RIGHT))
    i, j = bg.tile_indices(16, 16, wg.WARP)
    for level in gl.static_range(BLOCK_LEVELS):
        b_r, b_k = wg.rows_of_half(s_r, level, True), wg.rows_of_half(s_k, level, False)
        if level > 0:
            of_reads, of_keys = wg.factors_of_halves(b_w, level)
            b_r, b_k = b_r * of_reads, b_k * of_keys
        both = wg.above(b_r, b_k)
        b_A = wg.product(wg.left(both), wg.turned(both)) * scale
        x, y = wg.token_of(i, level, True), wg.token_of(j, level, False)
        gl.store(p + (x * C + y), b_A, mask=(i < 8) & (j >= 8) & (((x ^ y) >> level) == 1))


@bg.kernel
def scores_kernel(
    r, w, k, u, scores, mild, scale, T, sequence_of_chunk, chunks_before, cu_seqlens, all_chunks_before,
    H: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute the scores A of a chunk of a head, and whether it is mild.

    r, w, k [B, T, H, 64] bfloat16, u [H, 64]; scores, mild: as in the kernel in Triton
    sequence_of_chunk [chunks], chunks_before, cu_seqlens, all_chunks_before [N + 1]; None unless PACKED
    """
    i_c, i_n, i_h, start, end, chunk, count, is_first, is_last = locate_program(
        T, sequence_of_chunk, chunks_before, cu_seqlens, all_chunks_before, 1, H, C, PACKED
    )
    if count == 0:
        return
    at = (chunk * H + i_h).to(gl.int64)
    s_w, s_r, s_k = bg.allocate_rows(3, C)
    t, d = bg.tile_indices(C, 64, wg.ROWS)
    o = (start * H + i_h) * 64 + t * (H * 64) + d
    bg.copy_rows((s_w, s_r, s_k), (w, r, k), o, t < (end - start).to(gl.int32))
    async_copy.commit_group()
    async_copy.wait_group(0)
    is_mild = gl.min(gl.min(s_w.load(wg.RIGHT).to(gl.float32), 1), 0) > BLOCK_TOKEN
    gl.store(mild + at, is_mild.to(gl.float32))
    i, j = bg.tile_indices(16, 16, wg.WARP)
    o_k = gl.arange(0, 32, gl.SliceLayout(0, wg.WARP))
    p = scores + at * (C * C)
    own = gl.zeros([16], gl.float32, gl.SliceLayout(1, wg.WARP))
    for channel in gl.static_range(0, 64, 32):
        b_q = s_r.slice(channel, 32, 1).load(wg.WARP).to(gl.float32) * scale
        b_k = s_k.slice(channel, 32, 1).load(wg.WARP).to(gl.float32)
        b_u = gl.load(u + i_h * 64 + channel + o_k).to(gl.float32)
        own += gl.sum(b_q * b_k * b_u[None, :], 1)
    if is_mild:
        b_A = mild_scores(s_r, s_w, s_k, scale)
        gl.store(p + (i * C + j), gl.where(i == j, own[:, None], gl.where(i > j, b_A, 0.0)))
    else:
        # Zeros above the diagonal too: saved tensors are initialized.
        gl.store(p + (i * C + j), gl.where(i == j, own[:, None], 0.0), mask=i <= j)
        store_dyadic_scores(p, s_r, s_w, s_k, scale)


def compute(plan, r, w, k, u, scores, mild, scale) -> None:
    """Launch the kernel. plan: the `_Plan` of `fused_chunk_triton`; the others as in `scores_kernel`."""
    scores_kernel[(plan.capacity(CHUNK) * plan.H,)](
        r, w, k, u, scores, mild, scale, *plan.where(CHUNK), PACKED=plan.packed,
        **wg.options("rwkv6.fused.scores", plan.H),
    )  # fmt: skip
