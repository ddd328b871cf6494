"""GSA's kernels for chunks with any decay, by dyadic levels; `chunk_triton` explains them."""

import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_full_product,
    add_input_by_split,
    add_operands,
    add_split_by_input,
    add_sums,
    decay_factor,
    diagonal,
    kernel,
    operand,
    program,
    split,
    sums,
)
from ..common.pairs_triton import (
    BLOCK_LEVELS,
    about_blocks,
    add_pair_sums,
    halves,
    level_decays,
    masked,
    opposite_halves,
    pair_scores,
    same_block,
    within,
)
from ..common.positions_triton import locate_chunk
from ..common.tiles_triton import (
    all_mild,
    load_decays,
    load_tile,
    not_mild,
    store_tile,
)
from .slots_triton import memory, softmax, softmax_grads, units


@triton.jit
def _operand_memory(states, scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
                    BD: tl.constexpr, BS: tl.constexpr, SCALED: tl.constexpr, remainders=None):  # fmt: skip
    """Load a block of columns of memory i, [BM, BD], as an operand. remainders: its rounding errors, or None."""
    b_S = memory(states, i, there, i_d, M, D, BM, BD).to(tl.float32)
    if remainders is not None:
        b_S += memory(remainders, i, there, i_d, M, D, BM, BD).to(tl.float32)
    return operand(b_S * units(scales, i, there, i_d, M, D, BM, BD, BS, SCALED)[:, None], SCALED)


@triton.jit
def _products(x, y, states, scales, start, end, i_hx, i_h, i_s, HX: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
              M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
              SCALED: tl.constexpr, remainders=None):  # fmt: skip
    """Return x y^T [C, C] and x S^T [C, BM], summed over D, for q, k, hk or for do, v, hv."""
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_base = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_A = tl.dot(b_x, tl.trans(b_y), b_A, input_precision="tf32x3")
        S_high, S_low = _operand_memory(
            states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED, remainders
        )  # fmt: skip
        b_base = add_input_by_split(b_base, b_x, tl.trans(S_high), tl.trans(S_low))
    return b_A, b_base


@triton.jit
def _reads(b_A, b_base, b_s, b_g, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """Return each row's read: sum_{j<=i} A_ij s_j e^{decay after j up to i} + base_i e^{upto_i}, [C, BM]."""
    o_c = tl.arange(0, C)
    A_high, A_low = operand(b_A, SCALED)
    decayed = add_pair_sums(tl.zeros_like(b_base), A_high, A_low, b_s, b_g, C, LEVELS, SCALED)
    reads = b_base * decay_factor(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED)
    reads += decay_factor(b_g.to(tl.float32), SCALED) * decayed
    return reads + diagonal(b_A, C) * b_s


@triton.jit
def _scores(b_x, b_s, b_g, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """Return sum_m x_i s_j e^{decay after j up to i} for j <= i, else 0, as an operand [C, C]."""
    o_c = tl.arange(0, C)
    own = tl.sum(b_x * b_s, 1)[:, None]
    b_E = pair_scores(b_x * decay_factor(b_g.to(tl.float32), SCALED), b_s, b_g, C, LEVELS, False, SCALED)
    b_E = tl.where(o_c[:, None] > o_c[None, :], b_E, tl.where(o_c[:, None] == o_c[None, :], own, 0.0))
    return operand(b_E, SCALED)


@kernel
def output_kernel(
    q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, mild, o, logits, scale,
    sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale logits), o = B v + (p e^{upto}) hv for one chunk and query head, B the scores of p with s.

    In registers: A, then B [C, C]; q's reads, then p [C, BM]; o [C, BV].

    Each program visits AT_ONCE chunks and heads and computes those that are not mild. chunks: of all sequences.
    Shapes as in `mild_triton.mild_output_kernel`; with float32 inputs, memories are float32 and scales None.
    """
    i_g, i_p = program(G)
    first, total = i_p * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        i_hq = i_h * G + i_g
        if not_mild(mild, i, total, FLAGS):
            i_s = i_c * H + i_h
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            b_A, b_base = _products(
                q, k, hk, hk_scales, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, BS, SCALED, remainders
            )  # fmt: skip
            b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
            b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
            b_p = _reads(b_A, b_base, b_s, b_g, C, LEVELS, SCALED)
            if KEEP:
                store_tile(logits, b_p, start, end, i_hq, 0, H * G, M, C, BM)
            b_p = softmax(b_p * scale, M, BM)
            B_high, B_low = _scores(b_p, b_s, b_g, C, LEVELS, SCALED)
            p_high, p_low = operand(b_p * decay_factor(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED), SCALED)
            for i_v in range(0, (V + BV - 1) // BV):
                S_high, S_low = _operand_memory(hv, hv_scales, i_s, start < end, i_v, M, V, BM, BV, BS, SCALED)
                b_o = add_operands(tl.zeros([C, BV], dtype=tl.float32), p_high, p_low, S_high, S_low, SCALED)
                b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
                b_o = add_split_by_input(b_o, B_high, B_low, b_v)
                store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@kernel
def softmax_grads_kernel(
    v, s, g, do, hv, hv_scales, logits, mild, p, dscores, reads, scale,
    sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute p and scale dscores = scale p (dp - <p, dp>) [B, T, HQ, M], where dp is do's read, for one chunk and
    query head. reads: unused, of the mild path. In registers: do v^T [C, C]; dp and p [C, BM].

    Each program visits AT_ONCE chunks and heads and computes those that are not mild. chunks: of all sequences.
    Shapes as in `mild_triton.mild_softmax_grads_kernel`; with float32 inputs, memories are float32 and scales None.
    """
    i_g, i_p = program(G)
    first, total = i_p * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        i_hq = i_h * G + i_g
        if not_mild(mild, i, total, FLAGS):
            i_s = i_c * H + i_h
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            b_dA, b_base = _products(
                do, v, hv, hv_scales, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, BS, SCALED
            )
            b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
            b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
            b_dp = _reads(b_dA, b_base, b_s, b_g, C, LEVELS, SCALED)
            b_p = softmax(load_tile(logits, start, end, i_hq, 0, 0, H * G, M, C, BM) * scale, M, BM)
            store_tile(p, b_p, start, end, i_hq, 0, H * G, M, C, BM)
            b_dp = softmax_grads(b_p, b_dp, SCALED)
            store_tile(dscores, b_dp * scale, start, end, i_hq, 0, H * G, M, C, BM)


@triton.jit
def _load_reads(p, dscores, second, start, end, i_hq, HQ: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
                BM: tl.constexpr):  # fmt: skip
    """Load x of the first or second pass, [C, BM]."""
    if second:
        b_x = load_tile(p, start, end, i_hq, 0, 0, HQ, M, C, BM).to(tl.float32)
    else:
        b_x = load_tile(dscores, start, end, i_hq, 0, 0, HQ, M, C, BM).to(tl.float32)
    return b_x


@triton.jit
def _add_slot_pairs(b_ds, b_dg, pairs_high, pairs_low, blocks_mild, p, dscores, second, s, g, start, end, i_hq, i_h,
                    HQ: tl.constexpr, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                    LEVELS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Return ds and dg [C, BM] plus the terms of pairs of rows of one query in one pass.

    pairs: z y^T below the diagonal and its transpose above it, an `operand`. As `pair_grads`, but the gate of a read's
    own token lies between the two too, and x needs no gradient. Tiles are reloaded for each product: they are in the
    cache, and registers are the scarcest resource.
    """
    o_c = tl.arange(0, C)
    first = 0
    if SCALED:
        if blocks_mild:
            read, key, _ = about_blocks(load_decays(g, start, end, i_h, 0, H, M, C, BM), C)
            b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM).to(tl.float32)
            below = same_block(C) & (o_c[:, None] > o_c[None, :])
            above = same_block(C) & (o_c[:, None] < o_c[None, :])
            b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
            s_high, s_low = split(b_s * decay_factor(key, SCALED))
            decayed = tl.zeros_like(b_ds)
            decayed = add_full_product(decayed, masked(below, pairs_high), masked(below, pairs_low), s_high, s_low)
            b_x = _load_reads(p, dscores, second, start, end, i_hq, HQ, M, C, BM)
            x_high, x_low = split(b_x * decay_factor(b_g + read, SCALED))
            passing = (x_high.to(tl.float32) + x_low.to(tl.float32)) * decayed
            b_z = tl.zeros_like(b_ds)
            b_z = add_full_product(b_z, masked(above, pairs_high), masked(above, pairs_low), x_high, x_low)
            passing -= (s_high.to(tl.float32) + s_low.to(tl.float32)) * b_z
            b_ds += b_z * decay_factor(key, SCALED)
            b_dg = add_sums(b_dg, same_block(C) & (o_c[:, None] <= o_c[None, :]), passing, True)
        first = blocks_mild.to(tl.int32) * BLOCK_LEVELS
    for level in range(first, LEVELS):
        tl.debug_barrier()
        # Rows of right halves pair with rows of left halves and vice versa: one product serves both.
        o_c, right, first_row, size = halves(level, C)
        met = opposite_halves(level, C)
        b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
        weight = decay_factor(level_decays(b_g, level, C), SCALED)
        b_x = _load_reads(p, dscores, second, start, end, i_hq, HQ, M, C, BM) * decay_factor(b_g.to(tl.float32), SCALED)
        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        b_met = tl.where(right[:, None], b_x, b_s) * weight
        high, low = operand(b_met, SCALED)
        b_z = tl.zeros_like(b_ds)
        b_z = add_operands(b_z, masked(met, pairs_high), masked(met, pairs_low), high, low, SCALED)
        b_ds += tl.where(right[:, None], 0.0, b_z * weight)
        # The gate at t acts on the reads from t on in a right half, on the keys before t in a left half.
        passes = within(tl.where(right, o_c, first_row), tl.where(right, first_row + size, o_c), C)
        b_dg = add_sums(b_dg, passes, b_met * b_z, not SCALED)
    return b_ds, b_dg


@triton.jit
def _written(y, states, scales, dstates, dscales, start, end, i_h, i_s, H: tl.constexpr, M: tl.constexpr,
             D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
             SCALED: tl.constexpr):  # fmt: skip
    """Return y D_S^T [C, BM] and sum_d S D_S [BM] of one pass."""
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_SD = tl.zeros([BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        unit = units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        unit *= units(dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        b_S = memory(states, i_s, start < end, i_d, M, D, BM, BD).to(tl.float32)
        b_SD += tl.sum(b_S * memory(dstates, i_s, start < end, i_d, M, D, BM, BD).to(tl.float32), 1) * unit
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        D_high, D_low = _operand_memory(dstates, dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        b_ds = add_input_by_split(b_ds, b_y, tl.trans(D_high), tl.trans(D_low))
    return b_ds, b_SD


@triton.jit
def _pass_tensors(second, z, y, states, scales, dstates, dscales, z_2, y_2, states_2, scales_2, dstates_2, dscales_2,
                  SCALED: tl.constexpr):  # fmt: skip
    """Return the tensors of the first or second pass."""
    if second:
        z, y, states, dstates = z_2, y_2, states_2, dstates_2
    if SCALED:
        if second:
            scales, dscales = scales_2, dscales_2
    else:
        scales, dscales = states, dstates  # unused placeholders: every result must be a tensor
    return z, y, states, scales, dstates, dscales


@kernel
def memory_grads_kernel(
    q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv, dhv_scales, p, dscores, mild, ds, dg,
    sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the memories' part of ds and dg of one chunk and head, in float32, for `slot_grads_kernel`.

    Over both passes, x, y, z, S and D_S as in `pass_grads_kernel`, and a group's queries:
        ds = Y = sum (y D_S^T) e^{after}
        dg_t = e^{total} sum S D_S + sum_{j<t} s_j Y_j + sum_{i>=t} x_i (z_i S^T) e^{upto_i}
    In registers: two of [C, BM].

    Each program visits AT_ONCE chunks and heads and computes those that are not mild. chunks: of all sequences.
    Shapes as in `mild_triton.mild_slot_grads_kernel`; with float32 inputs, memories are float32 and scales None.
    """
    BD: tl.constexpr = max(BK, BV)
    first, total = tl.program_id(0) * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            i_s = i_c * H + i_h
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            b_ds = tl.zeros([C, BM], dtype=tl.float32)
            b_dg = tl.zeros([C, BM], dtype=tl.float32)
            for n in range(2):
                second = n == 1
                D = tl.where(second, V, K)
                z, y, states, scales, dstates, dscales = _pass_tensors(
                    second, q, k, hk, hk_scales, dhk, dhk_scales, do, v, hv, hv_scales, dhv, dhv_scales, SCALED
                )
                b_y, b_SD = _written(
                    y, states, scales, dstates, dscales, start, end, i_h, i_s, H, M, D, C, BM, BD, BS, SCALED
                )
                b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
                b_y *= decay_factor(sums(o_c[:, None] < o_c[None, :], b_g), SCALED)
                b_ds += b_y
                b_dg += (decay_factor(tl.sum(b_g.to(tl.float32), 0), SCALED) * b_SD)[None, :]
                b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                b_dg = add_sums(b_dg, o_c[:, None] > o_c[None, :], b_s * b_y, not SCALED)
                for i_g in range(G):
                    tl.debug_barrier()
                    i_hq = i_h * G + i_g
                    b_x = tl.zeros([C, BM], dtype=tl.float32)
                    for i_d in range(0, (D + BD - 1) // BD):
                        b_z = load_tile(z, start, end, i_hq, i_d, 0, H * G, D, C, BD)
                        S_high, S_low = _operand_memory(states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                        b_x = add_input_by_split(b_x, b_z, tl.trans(S_high), tl.trans(S_low))
                    b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
                    b_x *= decay_factor(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED)
                    b_x *= _load_reads(p, dscores, second, start, end, i_hq, H * G, M, C, BM)
                    b_dg = add_sums(b_dg, o_c[:, None] <= o_c[None, :], b_x, not SCALED)
            store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
            store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@kernel
def slot_grads_kernel(
    q, k, v, s, g, do, p, dscores, ds_of_memories, dg_of_memories, mild, ds, dg,
    sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute ds and dg for one chunk and head: add the terms of pairs of its rows, for both passes and each query of a
    group in turn, to the results of `memory_grads_kernel`.

    A single kernel would exceed a multiprocessor's instruction cache, and take more than twice as long.
    In registers: z y^T [C, C]; x, ds, dg [C, BM].

    Each program visits AT_ONCE chunks and heads and computes those that are not mild. chunks: of all sequences.
    Shapes as in `mild_triton.mild_slot_grads_kernel`; *_of_memories [B, T, H, M] are float32.
    """
    BD: tl.constexpr = max(BK, BV)
    first, total = tl.program_id(0) * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            b_ds = load_tile(ds_of_memories, start, end, i_h, 0, 0, H, M, C, BM)
            b_dg = load_tile(dg_of_memories, start, end, i_h, 0, 0, H, M, C, BM)
            blocks_mild = False
            if SCALED:
                _, _, blocks_mild = about_blocks(load_decays(g, start, end, i_h, 0, H, M, C, BM), C)
            for n in range(2 * G):  # one loop for both passes: two would hold masks in registers for each other
                tl.debug_barrier()
                i_hq, second = i_h * G + n // 2, n % 2 == 1
                D = tl.where(second, V, K)
                if second:
                    y, z = v, do
                else:
                    y, z = k, q
                b_A = tl.zeros([C, C], dtype=tl.float32)
                for i_d in range(0, (D + BD - 1) // BD):
                    b_z = load_tile(z, start, end, i_hq, i_d, 0, H * G, D, C, BD)
                    b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
                    b_A = tl.dot(b_z, tl.trans(b_y), b_A, input_precision="tf32x3")
                b_ds += diagonal(b_A, C) * _load_reads(p, dscores, second, start, end, i_hq, H * G, M, C, BM)
                earlier, later = o_c[:, None] > o_c[None, :], o_c[:, None] < o_c[None, :]
                pairs_high, pairs_low = operand(tl.where(earlier, b_A, tl.where(later, tl.trans(b_A), 0.0)), SCALED)
                b_ds, b_dg = _add_slot_pairs(
                    b_ds, b_dg, pairs_high, pairs_low, blocks_mild, p, dscores, second, s, g, start, end, i_hq, i_h,
                    H * G, H, M, C, BM, LEVELS, SCALED,
                )  # fmt: skip
            store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
            store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@kernel
def pass_grads_kernel(
    x, y, z, s, g, states, scales, dstates, dscales, mild, dy, dz,
    sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, FIRST: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute one pass's gradients for one chunk and head: x = p, y = v, z = do or x = scale dscores, y = k, z = q.

    With E the scores of x with s, S the memory entering and D_S the gradient of the one leaving the chunk:
        dy = E^T z + (s e^{after}) D_S,   dz = E y + (x e^{upto}) S (dq; do has no gradient)
    In registers: E [C, C]; x, s and decays [C, BM]; dy or dz [C, BD].
    Each query of a group has its own E, computed for one block of D: a program loops over all blocks only if G is 1.

    Each program visits AT_ONCE chunks and heads and computes those that are not mild. chunks: of all sequences.
    Shapes as in `mild_triton.mild_pass_grads_kernel`; with float32 inputs, memories are float32 and scales None.
    """
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    OWN_BLOCKS: tl.constexpr = BLOCKS if G == 1 else 1
    i_b, i_p = program(1 if G == 1 else BLOCKS)
    first, total = i_p * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            i_s = i_c * H + i_h
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
            b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
            left_high, left_low = operand(b_s * decay_factor(sums(o_c[:, None] < o_c[None, :], b_g), SCALED), SCALED)
            if G == 1:
                b_x = load_tile(x, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                E_high, E_low = _scores(b_x, b_s, b_g, C, LEVELS, SCALED)
            for n in range(OWN_BLOCKS):
                i_d = i_b + n
                D_high, D_low = _operand_memory(dstates, dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                b_dy = add_operands(tl.zeros([C, BD], dtype=tl.float32), left_high, left_low, D_high, D_low, SCALED)
                for i_g in range(G):
                    if G > 1:
                        tl.debug_barrier()
                        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                        b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
                        b_x = load_tile(x, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM).to(tl.float32)
                        E_high, E_low = _scores(b_x, b_s, b_g, C, LEVELS, SCALED)
                    b_z = load_tile(z, start, end, i_h * G + i_g, i_d, 0, H * G, D, C, BD)
                    b_dy = add_split_by_input(b_dy, tl.trans(E_high), tl.trans(E_low), b_z)
                store_tile(dy, b_dy, start, end, i_h, i_d, H, D, C, BD)
            if FIRST:
                tl.debug_barrier()
                for i_g in range(G):
                    i_hq = i_h * G + i_g
                    if G > 1:
                        tl.debug_barrier()
                        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                        b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
                    b_x = load_tile(x, start, end, i_hq, 0, 0, H * G, M, C, BM).to(tl.float32)
                    if G > 1:
                        E_high, E_low = _scores(b_x, b_s, b_g, C, LEVELS, SCALED)
                    x_high, x_low = operand(b_x * decay_factor(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED), SCALED)
                    for n in range(OWN_BLOCKS):
                        i_d = i_b + n
                        S_high, S_low = _operand_memory(states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                        b_dz = add_operands(tl.zeros([C, BD], dtype=tl.float32), x_high, x_low, S_high, S_low, SCALED)
                        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
                        b_dz = add_split_by_input(b_dz, E_high, E_low, b_y)
                        store_tile(dz, b_dz, start, end, i_hq, i_d, H * G, D, C, BD)
