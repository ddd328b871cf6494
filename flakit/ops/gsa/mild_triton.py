"""GSA's kernels for mild chunks; `chunk_triton` explains them and their precision."""

import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_full_product,
    add_product,
    add_split_by_input,
    add_sums,
    exp,
    kernel,
    program,
    split,
)
from ..common.positions_triton import locate_chunk
from ..common.tiles_triton import (
    from_middle,
    handles,
    is_zero,
    load_tile,
    prefetch_state,
    prefetch_tile,
    scaled,
    store_tile,
)
from .slots_triton import memory, softmax, softmax_grads, units


@triton.jit
def _lower(b_A, C: tl.constexpr):
    """Return the lower triangle of b_A [C, C] with its diagonal."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] >= o_c[None, :], b_A, 0.0)


@triton.jit
def _upper(b_A, C: tl.constexpr):
    """Return the upper triangle of b_A [C, C] with its diagonal."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] <= o_c[None, :], b_A, 0.0)


@triton.jit
def _mild_reads(x, y, states, scales, b_s, upto, start, end, i_hx, i_h, i_s, HX: tl.constexpr, H: tl.constexpr,
                D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
                BS: tl.constexpr, remainders=None):  # fmt: skip
    """Return x's read of each slot without the factor e^{upto - mid}, [C, BM]: lower(x y^T) s* + (x S^T) e^{mid}.

    remainders: S's rounding errors, or None.
    """
    b_A = tl.zeros([C, C], dtype=tl.float32)
    reads = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_S = memory(states, i_s, start < end, i_d, M, D, BM, BD)
        unit = units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_A = tl.dot(b_x, tl.trans(b_y), b_A)
        x_16, x_unit = scaled(b_x)
        b_read = tl.dot(x_16, tl.trans(b_S))
        if remainders is not None:
            b_read += tl.dot(x_16, tl.trans(memory(remainders, i_s, start < end, i_d, M, D, BM, BD)))
        reads += b_read * x_unit[:, None] * unit[None, :]
    A_high, A_low = split(_lower(b_A, C))
    s_high, s_low = split(b_s * exp(-upto))
    return add_full_product(reads, A_high, A_low, s_high, s_low)


@kernel
def mild_output_kernel(
    q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, mild, o, logits, scale,
    sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale logits), o = B v + (p* e^{mid}) hv for one chunk and query head, B = lower(p* s*^T).

    In registers: A, then B [C, C]; q's reads, then p [C, BM]; o [C, BV].

    q [B, T, H G, K], k [B, T, H, K], v [B, T, H, V], s, g [B, T, H, M], o [B, T, H G, V], logits [B, T, H G, M]
    hk, remainders [chunks, H, M, K], hv [chunks, H, M, V] float16, *_scales [chunks, H, NS, M], NS = ceil(K or V / BS)
    mild [chunks, H, FLAGS] int32, sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    prefetch_state(hv, i_s, start < end, 0, 0, M, V, BM, V)
    prefetch_tile(v, start, end, i_h, 0, H, V, C, V)
    upto = from_middle(b_g, C)
    b_s = b_s.to(tl.float32)
    b_p = _mild_reads(
        q, k, hk, hk_scales, b_s, upto, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, BS, remainders
    )  # fmt: skip
    b_p *= exp(upto)
    if KEEP:
        store_tile(logits, b_p, start, end, i_hq, 0, H * G, M, C, BM)
    b_p = softmax(b_p * scale, M, BM) * exp(upto)
    p_high, p_low = split(b_p)
    s_high, s_low = split(b_s * exp(-upto))
    b_B = tl.zeros([C, C], dtype=tl.float32)
    b_B = add_product(b_B, p_high, p_low, tl.trans(s_high), tl.trans(s_low))
    B_high, B_low = split(_lower(b_B, C))
    for i_v in range(0, (V + BV - 1) // BV):
        unit = units(hv_scales, i_s, start < end, i_v, M, V, BM, BV, BS, True)
        b_hv = memory(hv, i_s, start < end, i_v, M, V, BM, BV)
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        p_16, p_unit = scaled(b_p * unit[None, :])
        b_o = tl.dot(p_16, b_hv) * p_unit[:, None]
        b_o = add_split_by_input(b_o, B_high, B_low, b_v)
        store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@kernel
def mild_softmax_grads_kernel(
    v, s, g, do, hv, hv_scales, logits, mild, p, dscores, reads, scale, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute p, scale dscores = scale p (dp - <p, dp>), where dp is do's read, and reads for one chunk and query head.

    reads: the part of a read in the gradient of the decays up to it, of both passes, p dp + scale dscores logits, from
    the operands x* of `mild_slot_grads_kernel`. In registers: do v^T [C, C]; dp, p and logits [C, BM].

    v [B, T, H, V], s, g [B, T, H, M], do [B, T, H G, V], logits, p, dscores, reads [B, T, H G, M]
    hv [chunks, H, M, V] float16, hv_scales [chunks, H, NS, M]; mild, sequence_of_chunk, … as of `mild_output_kernel`
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    prefetch_tile(logits, start, end, i_hq, 0, H * G, M, C, M)
    upto = from_middle(b_g, C)
    b_s = b_s.to(tl.float32)
    b_dp = _mild_reads(do, v, hv, hv_scales, b_s, upto, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, BS)
    b_logits = load_tile(logits, start, end, i_hq, 0, 0, H * G, M, C, BM)
    b_p = softmax(b_logits * scale, M, BM)
    stored = b_p.to(p.dtype.element_ty)
    store_tile(p, stored, start, end, i_hq, 0, H * G, M, C, BM)
    read = exp(upto)
    high, low = split(stored.to(tl.float32) * read)
    b_reads = (high.to(tl.float32) + low.to(tl.float32)) * b_dp
    b_dp *= read
    b_x = softmax_grads(b_p, b_dp, True) * scale
    store_tile(dscores, b_x, start, end, i_hq, 0, H * G, M, C, BM)
    high, low = split(b_x * read)
    b_reads += (high.to(tl.float32) + low.to(tl.float32)) * (b_logits * exp(-upto))
    store_tile(reads, b_reads, start, end, i_hq, 0, H * G, M, C, BM)


@triton.jit
def _add_key_reads(b_z, x, y, z, read, start, end, i_hq, i_h, HQ: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
                   D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Return b_z + upper(y z^T) x*, the reads of a key in one pass, [C, BM]."""
    b_dA = tl.zeros([C, C], dtype=tl.float32)
    b_x = load_tile(x, start, end, i_hq, 0, 0, HQ, M, C, BM)
    for i_d in range(0, (D + BD - 1) // BD):
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_z1 = load_tile(z, start, end, i_hq, i_d, 0, HQ, D, C, BD)
        b_dA = tl.dot(b_y, tl.trans(b_z1), b_dA)
    dA_high, dA_low = split(_upper(b_dA, C))
    x_high, x_low = split(b_x.to(tl.float32) * read)
    return add_full_product(b_z, dA_high, dA_low, x_high, x_low)


@triton.jit
def _mild_written(y, states, scales, dstates, dscales, start, end, i_h, i_s, H: tl.constexpr, M: tl.constexpr,
                  D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Return y D_S^T [C, BM] and sum_d S D_S [BM] of one pass."""
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_SD = tl.zeros([BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        y_16, y_unit = scaled(load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD))
        b_D = memory(dstates, i_s, start < end, i_d, M, D, BM, BD)
        unit = units(dscales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_S = memory(states, i_s, start < end, i_d, M, D, BM, BD)
        b_ds += tl.dot(y_16, tl.trans(b_D)) * y_unit[:, None] * unit[None, :]
        unit *= units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_SD += tl.sum(b_S.to(tl.float32) * b_D.to(tl.float32), 1) * unit
    return b_ds, b_SD


@kernel
def mild_slot_grads_kernel(
    q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv, dhv_scales, p, dscores, reads, mild, ds, dg,
    sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute ds and dg for one chunk and head. In registers: y z^T [C, C], then Z, dg and Y [C, BM].

    Over both passes, x and z of each query of a group, S and D_S as in `mild_pass_grads_kernel`:
        Z = sum upper(y z^T) x*,   Y = sum (y D_S^T) e^{total - mid},   ds = (Y + Z) e^{mid - upto}
        dg_t = e^{total} sum S D_S + sum_{i>=t} reads_i - sum_{j>=t} s*_j Z_j + sum_{j<t} s*_j Y_j

    q [B, T, H G, K], k [B, T, H, K], v [B, T, H, V], do [B, T, H G, V], s, g, ds, dg [B, T, H, M]
    p, dscores, reads [B, T, H G, M], hk, dhk [chunks, H, M, K], hv, dhv [chunks, H, M, V] float16
    *_scales [chunks, H, NS, M]; mild, sequence_of_chunk, … as of `mild_output_kernel`
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    o_c = tl.arange(0, C)
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    for i_g in range(G):
        i_hq = i_h * G + i_g
        prefetch_tile(dscores, start, end, i_hq, 0, H * G, M, C, M)
        prefetch_tile(do, start, end, i_hq, 0, H * G, V, C, V)
        prefetch_tile(p, start, end, i_hq, 0, H * G, M, C, M)
        prefetch_tile(reads, start, end, i_hq, 0, H * G, M, C, M)
    prefetch_tile(v, start, end, i_h, 0, H, V, C, V)
    upto = from_middle(b_g, C)
    read = exp(upto)
    b_z = tl.zeros([C, BM], dtype=tl.float32)
    passing = tl.zeros([C, BM], dtype=tl.float32)
    for i_g in range(G):
        i_hq = i_h * G + i_g
        b_z = _add_key_reads(b_z, dscores, k, q, read, start, end, i_hq, i_h, H * G, H, M, K, C, BM, BK)
        b_z = _add_key_reads(b_z, p, v, do, read, start, end, i_hq, i_h, H * G, H, M, V, C, BM, BV)
        passing += load_tile(reads, start, end, i_hq, 0, 0, H * G, M, C, BM)
    prefetch_tile(s, start, end, i_h, 0, H, M, C, M)
    prefetch_state(dhk, i_s, start < end, 0, 0, M, K, BM, K)
    prefetch_state(hk, i_s, start < end, 0, 0, M, K, BM, K)
    prefetch_state(dhv, i_s, start < end, 0, 0, M, V, BM, V)
    prefetch_state(hv, i_s, start < end, 0, 0, M, V, BM, V)
    high, low = split(load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32) * exp(-upto))
    passing -= (high.to(tl.float32) + low.to(tl.float32)) * b_z
    b_dg = add_sums(tl.zeros([C, BM], dtype=tl.float32), o_c[:, None] <= o_c[None, :], passing, True)
    tl.debug_barrier()
    b_y, b_SD = _mild_written(k, hk, hk_scales, dhk, dhk_scales, start, end, i_h, i_s, H, M, K, C, BM, BK, BS)
    b_y2, b_SD2 = _mild_written(v, hv, hv_scales, dhv, dhv_scales, start, end, i_h, i_s, H, M, V, C, BM, BV, BS)
    tl.debug_barrier()
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    key = exp(-from_middle(b_g, C))
    b_y += b_y2
    b_dg += (b_SD + b_SD2)[None, :]
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_dg = add_sums(b_dg, o_c[:, None] > o_c[None, :], b_s * key * b_y, False)
    store_tile(ds, (b_y + b_z) * key, start, end, i_h, 0, H, M, C, BM)
    empty = is_zero(hk_scales, i_s, start < end, 0, M, K, BM, BS) & is_zero(
        hv_scales, i_s, start < end, 0, M, V, BM, BS
    )
    b_dg = tl.where((o_c == 0)[:, None] & empty[None, :], 0.0, b_dg)
    store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@triton.jit
def _mild_scores(b_x, b_s, C: tl.constexpr):
    """Return lower(x* s*^T) [C, C] of unsplit operands, as two bfloat16 tiles."""
    x_high, x_low = split(b_x)
    s_high, s_low = split(b_s)
    b_E = tl.zeros([C, C], dtype=tl.float32)
    return split(_lower(add_product(b_E, x_high, x_low, tl.trans(s_high), tl.trans(s_low)), C))


@kernel
def mild_pass_grads_kernel(
    x, y, z, s, g, states, scales, dstates, dscales, mild, dy, dz, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, FIRST: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute one pass's gradients for one chunk and head: x = p, y = v, z = do or x = scale dscores, y = k, z = q.

    With E = lower(x* s*^T), S the memory entering and D_S the gradient of the one leaving the chunk:
        dy = E^T z + (s* e^{total - mid}) D_S,   dz = E y + (x* e^{mid}) S (dq; do has no gradient)
    In registers: E [C, C]; x* and s* [C, BM]; dy or dz [C, BD].
    Each query of a group has its own E, computed for one block of D: a program loops over all blocks only if G is 1.

    x [B, T, H G, M], y, dy [B, T, H, D], z, dz [B, T, H G, D], s, g [B, T, H, M]
    states, dstates [chunks, H, M, D] float16, scales, dscales [chunks, H, NS, M]
    mild, sequence_of_chunk, … as of `mild_output_kernel`
    """
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    OWN_BLOCKS: tl.constexpr = BLOCKS if G == 1 else 1
    i_b, i = program(BLOCKS // OWN_BLOCKS)
    i_h, i_c = i % H, i // H
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    if G == 1:
        b_x = load_tile(x, start, end, i_h, 0, 0, H, M, C, BM)
        prefetch_state(dstates, i_s, start < end, 0, 0, M, D, BM, D)
        prefetch_tile(z, start, end, i_h, 0, H, D, C, D)
        if FIRST:
            prefetch_state(states, i_s, start < end, 0, 0, M, D, BM, D)
            prefetch_tile(y, start, end, i_h, 0, H, D, C, D)
    upto = from_middle(b_g, C)
    read = exp(upto)
    b_s = b_s.to(tl.float32) * exp(-upto)
    if G == 1:
        b_x = b_x.to(tl.float32) * read
        E_high, E_low = _mild_scores(b_x, b_s, C)
    for n in tl.range(0, OWN_BLOCKS, disable_licm=True):
        i_d = i_b + n
        unit = units(dscales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_D = memory(dstates, i_s, start < end, i_d, M, D, BM, BD)
        s_16, s_unit = scaled(b_s * unit[None, :])
        b_dy = tl.dot(s_16, b_D) * s_unit[:, None]
        for i_g in range(G):
            if G > 1:
                b_x = load_tile(x, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM).to(tl.float32) * read
                E_high, E_low = _mild_scores(b_x, b_s, C)
            b_z = load_tile(z, start, end, i_h * G + i_g, i_d, 0, H * G, D, C, BD)
            b_dy = add_split_by_input(b_dy, tl.trans(E_high), tl.trans(E_low), b_z)
        store_tile(dy, b_dy, start, end, i_h, i_d, H, D, C, BD)
    if FIRST:
        tl.debug_barrier()
        for i_g in range(G):
            i_hq = i_h * G + i_g
            b_x = load_tile(x, start, end, i_hq, 0, 0, H * G, M, C, BM).to(tl.float32) * read
            if G > 1:
                E_high, E_low = _mild_scores(b_x, b_s, C)
            for n in tl.range(0, OWN_BLOCKS, disable_licm=True):
                i_d = i_b + n
                unit = units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
                b_S = memory(states, i_s, start < end, i_d, M, D, BM, BD)
                b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
                x_16, x_unit = scaled(b_x * unit[None, :])
                b_dz = tl.dot(x_16, b_S) * x_unit[:, None]
                b_dz = add_split_by_input(b_dz, E_high, E_low, b_y)
                store_tile(dz, b_dz, start, end, i_hq, i_d, H * G, D, C, BD)
