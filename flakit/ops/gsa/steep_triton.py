"""GSA's gradients ds and dg of steep chunks (`chunk_triton` defines them), by dyadic levels."""

import triton
import triton.language as tl

from ..common.blocks_triton import add_products, add_sums, diagonal, kernel, sums
from ..common.pairs_triton import halves, masked, opposite_halves
from ..common.positions_triton import locate_chunk
from ..common.tiles_triton import all_mild, load_tile, not_mild, store_tile
from .slots_triton import (
    TO_BOUNDARY,
    TO_END,
    TO_START,
    add_input_product,
    add_written,
    decays,
    factor,
    in_terms,
    load_exponents,
    load_reads,
    matrix,
    read_memory,
)


@triton.jit
def _load_reads(p, dscores, units, second, start, end, i_hq, HQ: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
                BM: tl.constexpr):  # fmt: skip
    """Load the reads of a pass for one query, float32 [C, BM]: p of the `second`, dscores of the first."""
    if second:
        b_x = load_tile(p, start, end, i_hq, 0, 0, HQ, M, C, BM).to(tl.float32)
    else:
        b_x = load_reads(dscores, units, start, end, i_hq, HQ, M, C, BM).to(tl.float32)
    return b_x


@triton.jit
def _add_slot_pairs(b_ds, b_dg, pairs, p, dscores, units, second, s, g, ones, start, end, i_hq, i_h,
                    HQ: tl.constexpr, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                    LEVELS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Return ds and dg [C, BM] plus the terms of pairs of rows of one query in one pass.

    pairs [C, C]: z y^T below the diagonal and its transpose above it, in terms. As `pair_grads`,
    but the gate of a read's own token lies between the two too, and x needs no gradient. Tiles are reloaded for each
    product: they are in the cache, and registers are the scarcest resource.
    """
    for level in range(LEVELS):
        tl.debug_barrier()
        # Rows of right halves pair with rows of left halves and vice versa: one product serves both.
        _, right, _, _ = halves(level, C)
        met = opposite_halves(level, C)
        b_g = load_exponents(g, start, end, i_h, H, M, C, BM, False, SCALED)
        between = matrix(ones, TO_BOUNDARY + level, C)
        weight = factor(sums(between, b_g), SCALED)
        b_x = _load_reads(p, dscores, units, second, start, end, i_hq, HQ, M, C, BM)
        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        b_met = tl.where(right[:, None], b_x, b_s) * weight
        x_or_s = in_terms(b_met, SCALED)
        b_z = add_products(tl.zeros_like(b_ds), [masked(met, term) for term in pairs], x_or_s)
        b_ds += tl.where(right[:, None], 0.0, b_z * weight)
        # The gate at t acts on the reads from t on in a right half, on the keys before t in a left half.
        b_dg = add_sums(b_dg, tl.trans(between), b_met * b_z, not SCALED)
    return b_ds, b_dg


@triton.jit
def _pass_tensors(second, z, y, states, scales, dstates, dscales, z_2, y_2, states_2, scales_2, dstates_2, dscales_2,
                  SCALED: tl.constexpr):  # fmt: skip
    """Return z, y, states, scales, dstates and dscales of the first pass or, if `second`, those named _2."""
    if second:
        z, y, states, dstates = z_2, y_2, states_2, dstates_2
    if SCALED:
        if second:
            scales, dscales = scales_2, dscales_2
    else:
        scales, dscales = states, dstates  # unused placeholders: every result must be a tensor
    return z, y, states, scales, dstates, dscales


@kernel
def steep_slot_grads_kernel(
    q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv, dhv_scales, p, dscores, units, reads, mild,
    ds, dg, ones, sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute ds and dg for one chunk and head. In registers: z y^T [C, C]; x, ds, dg [C, BM].

    First the memories' part over both passes, x, y, z, S, D_S as in `inside_triton.pass_grads_kernel`, and a group's
    queries; after, upto, total: sums of g in the chunk after a row, up to and with it, and over all rows:
        ds = Y = sum (y D_S^T) e^{after}
        dg_t = e^{total} sum S D_S + sum_{j<t} s_j Y_j + sum_{i>=t} x_i (z_i S^T) e^{upto_i}
    Then the terms of pairs of rows, for both passes and each query of a group in turn.

    Each program checks AT_ONCE pairs of chunk and head, and computes those that are not mild. chunks: of all sequences.
    Shapes as in `inside_triton.slot_grads_kernel`; with float32 inputs, memories are float32 and scales None.
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
                b_y, b_SD = tl.zeros([C, BM], dtype=tl.float32), tl.zeros([BM], dtype=tl.float32)
                b_y, b_SD = add_written(
                    b_y, b_SD, y, states, scales, dstates, dscales, start, end, i_h, i_s, H, M, D, C, BM, BD, BS, SCALED
                )  # fmt: skip
                b_g = load_exponents(g, start, end, i_h, H, M, C, BM, False, SCALED)
                b_y *= factor(decays(ones, TO_END, b_g, C), SCALED)
                b_ds += b_y
                b_dg += (factor(tl.sum(b_g.to(tl.float32), 0), SCALED) * b_SD)[None, :]
                b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                b_dg = add_sums(b_dg, tl.trans(matrix(ones, TO_END, C)), b_s * b_y, not SCALED)
                for i_g in range(G):
                    tl.debug_barrier()
                    i_hq = i_h * G + i_g
                    b_x = tl.zeros([C, BM], dtype=tl.float32)
                    for i_d in range(0, (D + BD - 1) // BD):
                        b_z = load_tile(z, start, end, i_hq, i_d, 0, H * G, D, C, BD)
                        b_x += read_memory(b_z, states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                    b_g = load_exponents(g, start, end, i_h, H, M, C, BM, False, SCALED)
                    b_x *= factor(decays(ones, TO_START, b_g, C), SCALED)
                    b_x *= _load_reads(p, dscores, units, second, start, end, i_hq, H * G, M, C, BM)
                    b_dg = add_sums(b_dg, tl.trans(matrix(ones, TO_START, C)), b_x, not SCALED)
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
                    b_A = add_input_product(b_A, b_z, b_y)
                b_ds += diagonal(b_A, C) * _load_reads(p, dscores, units, second, start, end, i_hq, H * G, M, C, BM)
                earlier, later = o_c[:, None] > o_c[None, :], o_c[:, None] < o_c[None, :]
                pairs = in_terms(tl.where(earlier, b_A, tl.where(later, tl.trans(b_A), 0.0)), SCALED)
                b_ds, b_dg = _add_slot_pairs(
                    b_ds, b_dg, pairs, p, dscores, units, second, s, g, ones, start, end, i_hq, i_h,
                    H * G, H, M, C, BM, LEVELS, SCALED,
                )  # fmt: skip
            store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
            store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)
