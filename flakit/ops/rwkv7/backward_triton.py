"""RWKV7's backward in float32: `fused_chunk_triton.backward_kernel` split into the recurrence over chunks and the
gradients of each chunk, which are computed in parallel. `fused_chunk_triton` explains the symbols.

1. `carry_grads_kernel` walks each part from its last chunk to its first; it stores dv, y and D, the gradient of the
   state leaving each chunk. D waits in the rows of the chunk's gradients, 64 rows in four tensors. A chunk of fewer
   than 16 rows is the last of its sequence: its D is `last`.
2. `grads_kernel` computes all other gradients of a chunk and head, by dyadic levels, in BLOCK channels a program: these
   are also the columns of D that it overwrites. Two warps need few barriers, and their tiles select no wgmma, so that
   they need no bands.

Three terms an operand leave one kernel too few registers: it spilled 1.5 KB a thread (data/tuning.md).
"""

import triton.language as tl

from ..common.bands_triton import CHANNELS, CHUNK, turned
from ..common.blocks_triton import add_products, arrived, clamped_decay, exp, kernel, sums_along, terms
from ..common.pairs_triton import masked
from ..common.positions_triton import locate_program, pieces_of
from .carry_triton import carry_grads_kernel, pointers_of_D
from .fused_chunk_triton import level_columns

BLOCK = tl.constexpr(CHANNELS // 2)
TERMS = tl.constexpr(3)


@kernel
def grads_kernel(
    r, w, k, v, a, b, do, states, v2, units, y, dr, dw, dk, da, db, last, scale,
    T, sequence_of_chunk, before, cu_seqlens, chunks_before, parts, parts_before,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, HAS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of r, w, k, a and b of one chunk and head, in BLOCK of its K channels.

    r, w, k, a, b, dr, dw, dk, da, db [B, T, H, K], v, do [B, T, H, V]; dr … db hold D (`pointers_of_D`)
    states [chunks, H, V, K], v2, y [chunks, H, C, V], units [chunks, H, BV + 1]: scales of v2 and states
    last [all parts, H, K, V]: D of the last chunk of each part; parts: their number in a sequence unless packed
    sequence_of_chunk [chunks], before, cu_seqlens, chunks_before, parts_before [N + 1]; symbols: see the module
    """
    SPLITS: tl.constexpr = BK // BLOCK
    i_c, i_n, i_h, start, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_chunk, before, cu_seqlens, chunks_before, 1, H, C, PACKED, tl.program_id(0) // SPLITS
    )
    if count == 0:
        return
    i = (first_chunk * H + i_h).to(tl.int64)
    o_c, o_r, o_v = tl.arange(0, C), tl.arange(0, 2 * C), tl.arange(0, BV)
    o_n = tl.program_id(0) % SPLITS * BLOCK + tl.arange(0, BLOCK)
    o_k, c, left = o_n[:, None], (o_r % C)[None, :], (o_r < C)[None, :]
    rows = start * H + i_h
    m = (o_v < V)[:, None] & (c < end - start)
    o = rows * V + o_v[:, None] + c * (H * V)
    o_2 = i * C * V + o_v[:, None] + c * V
    b_F = tl.load(tl.where(left, v + o, v2 + o_2), mask=m, other=0.0)
    b_G = tl.load(tl.where(left, do + o, y + o_2), mask=m, other=0.0)
    m = (o_k < K) & (o_v < V)[None, :]
    b_S = tl.load(states + i * K * V + o_k + o_v[None, :] * K, mask=m, other=0.0)
    if end - start >= C:
        b_D = tl.load(tl.trans(pointers_of_D(dr, dk, da, db, start, i_h, o_n, o_v, H, K, C)), mask=m, other=0.0)
    elif HAS_LAST:
        first_part, parts = pieces_of(i_n, parts_before, parts, PACKED)
        i_p = ((first_part + parts - 1) * H + i_h).to(tl.int64)
        b_D = tl.load(last + i_p * K * V + o_k * V + o_v[None, :], mask=m, other=0.0)
    else:
        b_D = tl.zeros_like(b_S)
    v2_unit = tl.load(units + i * (BV + 1) + o_v)
    unit = tl.load(units + i * (BV + 1) + BV + tl.zeros([BLOCK], tl.int32))
    b_F, b_G, b_S, b_D = arrived(b_F), arrived(b_G), arrived(b_S), arrived(b_D)
    b_S *= unit[:, None]
    b_SD = tl.sum(b_S * b_D, 1)
    F_terms, G_terms = terms(tl.where(left, b_F, b_F * v2_unit[:, None]), TERMS), terms(b_G, TERMS)
    b_P = add_products(tl.zeros([2 * C, 2 * C], tl.float32), turned(G_terms), F_terms)
    x_keys = add_products(tl.zeros([BLOCK, 2 * C], tl.float32), terms(b_D, TERMS), F_terms)
    x_reads = add_products(tl.zeros([BLOCK, 2 * C], tl.float32), terms(b_S, TERMS), G_terms)
    o_w = rows * K + o_k + o_c[None, :] * (H * K)
    m_w = (o_k < K) & (o_c < end - start)[None, :]
    o = rows * K + o_k + c * (H * K)
    m = (o_k < K) & (c < end - start)
    b_w = tl.load(w + o_w, mask=m_w, other=0.0)
    b_R = tl.load(tl.where(left, r, a) + o, mask=m, other=0.0)
    b_E = tl.load(tl.where(left, k, b) + o, mask=m, other=0.0)
    b_w, b_R, b_E = arrived(b_w), arrived(b_R), arrived(b_E)
    by_scale = tl.where(left, scale, 1.0)
    b_w, b_R = clamped_decay(b_w), b_R * by_scale
    upto = c + left.to(tl.int32)
    x_reads *= exp(sums_along(b_w, o_c[:, None] < upto))
    x_keys *= exp(sums_along(b_w, o_c[:, None] > c))
    total = exp(tl.max(sums_along(b_w, tl.full([C, C], 1.0, tl.float32)), 1))
    b_dw = sums_along(b_E * x_keys, tl.trans(c) < o_c[None, :])
    b_dw += sums_along(b_R * x_reads, tl.trans(upto) > o_c[None, :])
    b_dw += (b_SD * total)[:, None]
    ahead = tl.trans(c) - c
    own = tl.where((ahead == 0) & tl.trans(left), b_P, 0.0)  # r reads its own token's keys
    own_k, own_b = tl.sum(tl.where(left, own, 0.0), 1), tl.sum(tl.where(left, 0.0, own), 1)
    own = tl.sum(own, 0)
    b_P = tl.where(ahead > 0, b_P, 0.0)
    P_terms = terms(b_P + tl.trans(b_P), TERMS)
    d_reads, d_keys = x_reads, x_keys
    for level in range(LEVELS):
        between, is_read, meet = level_columns(level, C)
        weight = exp(sums_along(b_w, between))
        b_x = tl.where(is_read, b_R, b_E) * weight
        grad = add_products(tl.zeros_like(b_x), terms(b_x, TERMS), [masked(meet, x) for x in P_terms])
        b_dw += sums_along(grad * b_x, tl.trans(between))
        grad *= weight
        d_reads += tl.where(is_read, grad, 0.0)
        d_keys += tl.where(is_read, 0.0, grad)
    b_dw = tl.where((o_c == 0)[None, :] & (unit < 2.0**-118)[:, None], 0.0, b_dw)  # as `is_zero`
    b_r = tl.load(r + o, mask=m, other=0.0)
    b_k, b_b = tl.load(k + o, mask=m & left, other=0.0), tl.load(b + o, mask=m & left, other=0.0)
    d_keys += b_r * (own * scale)[None, :]
    d_reads += b_k * own_k[None, :] + b_b * own_b[None, :]
    tl.store(dw + o_w, b_dw, mask=m_w)
    tl.store(tl.where(left, dr, da) + o, d_reads * by_scale, mask=m)
    tl.store(tl.where(left, dk, db) + o, d_keys, mask=m)


def gradients(plan, inputs, do, saved, grads, last, first, scale, where) -> None:
    """Launch the kernels: write the gradients of `inputs` to `grads`, and those of the initial states to `first`.
    Arguments as in `backward_gluon.gradients`, but float32, and of any heads that the fused kernels take."""
    r, w, k, v, a, b = inputs
    dr, dw, dk, dv, da, db = grads
    states, v2, units, scores, _ = saved
    y = r.new_empty(plan.chunks * plan.H * CHUNK * plan.V)
    args = r, w, k, a, b, do, scores, dr, dk, dv, da, db, y, last, first, scale, *where
    flags = dict(HAS_LAST=last, ALL_PARTS=True, KEEP=True)
    plan.launch("rwkv7.fused.carry_grads", carry_grads_kernel, plan.parts * plan.H, args, **flags)
    args = *inputs, do, states, v2, units, y, dr, dw, dk, da, db, last, scale, *plan.where(CHUNK)
    programs, parts = plan.chunks * plan.H * (CHANNELS // BLOCK.value), (plan.parts // plan.N, where[2])
    plan.launch("rwkv7.fused.grads", grads_kernel, programs, (*args, *parts), HAS_LAST=last)
