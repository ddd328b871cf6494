"""RWKV6 in chunks as Triton kernels: everything is parallel over chunks but a light stream of states.

Forward:  `stream_kernel`   the state entering each chunk, and whether the chunk's decay is mild
          `output_kernel`   o from a chunk's tokens and its entering state
Backward: `stream_kernel`   in reverse: the gradient of the state leaving each chunk
          `value_grads_kernel`, `key_grads_kernel`  dv; dr, dk, dw and each chunk's share of du

Formulas as in `chunk_torch`. There are two ways through a chunk; both are launched and each leaves the other's chunks
alone:
- `mild_*` (16-bit inputs; the chunk's whole decay fits float32): one product about the middle, of the reads
  q*_i = q_i e^{before_i - mid} and the keys k*_j = k_j e^{mid - upto_j}. These are made once and serve for the products
  with states too, whose rows take up what is left, e^{mid} and e^{total - mid};
- any other: log2(C) dyadic products whose factors are all in [0, 1] (`common.decay`), which no w <= 0 can break. Their
  tiles are float32, and registers hold those of 32 tokens: a chunk of 64 is gone through in two parts.
Chunks have 64 tokens where heads have 33 to 64 channels of bfloat16, else 32.

Mild operands are split into two bfloat16 numbers (`blocks_triton.split`): 16 bits of mantissa instead of TF32's 11, all
of float32's range, twice TF32's speed, and tensor cores read them from shared memory in either direction. A running sum
is one more product, with a triangle of ones: exact for 16-bit decays, and its result lies where the products need it,
where a scan would shuffle it through the threads.

The decay's gradient. On the dyadic path it is summed level by level from terms that each carry their decay. On the
mild path it is a difference of two running sums, which is noise where the two are formed from gradients rounded apart.
Here both are formed from the same split operands, q* (dA k*) and k* (dA^T q*), with all four products of their parts,
and summed from three parts, which is all of float32: the same products are added and taken away, and only float32
accumulation is left to disagree.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_given_by_split,
    add_product,
    add_split_by_given,
    add_whole_product,
    decay_after,
    decay_before,
    dot,
    split,
    sums,
    to_bfloat16,
    to_operand,
)
from ..common.chunks_triton import (
    ChunkPlan,
    dyadic_pairs,
    dyadic_scores,
    half_decays,
    kept_states_shape,
    load_state,
    load_tile,
    locate,
    store_tile,
    takes,
)


@triton.jit
def _upto(b_w, C: tl.constexpr):
    """Log decay up to and with each row, counted from the middle of the chunk, [C, BK]. b_w: as it was given."""
    o_c = tl.arange(0, C)
    return sums((o_c[:, None] >= o_c[None, :]).to(tl.float32) - (o_c[None, :] < C // 2).to(tl.float32), b_w)


@triton.jit
def mild_output_kernel(
    r, k, v, w, u, states, scales, mild, o, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o = A v + q* (e^{mid} S) for one chunk and block of V. In registers: A [C, C], o [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_o = tl.zeros([C, BV], dtype=tl.float32)
    b_d = tl.zeros([C], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
        upto = _upto(b_w, C)
        q_high, q_low = split(b_q * tl.exp(upto - b_w.to(tl.float32)))
        k_high, k_low = split(b_k * tl.exp(-upto))
        b_A = add_product(b_A, q_high, q_low, tl.trans(k_high), tl.trans(k_low))
        mid, _ = half_decays(b_w, C)
        i_S = i_c * PARTS * H + i_h
        S_high, S_low = split(load_state(states, scales, i_S, start < end, tl.exp(mid), i_k, i_v, K, V, BK, BV, True))
        b_o = add_product(b_o, q_high, q_low, S_high, S_low)
    b_A = tl.where(o_c[:, None] > o_c[None, :], b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))
    b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
    A_high, A_low = split(b_A)
    b_o = add_split_by_given(b_o, A_high, A_low, b_v)
    store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def mild_value_grads_kernel(
    r, k, w, u, do, dstates, dscales, mild, dv, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dv = A^T do + k* (e^{total - mid} D) for one chunk and block of V. In registers: A^T [C, C], dv [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_dv = tl.zeros([C, BV], dtype=tl.float32)
    b_d = tl.zeros([C], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
        upto = _upto(b_w, C)
        q_high, q_low = split(b_q * tl.exp(upto - b_w.to(tl.float32)))
        k_high, k_low = split(b_k * tl.exp(-upto))
        b_A = add_product(b_A, k_high, k_low, tl.trans(q_high), tl.trans(q_low))
        _, rest = half_decays(b_w, C)
        i_D = (i_c * PARTS + PARTS - 1) * H + i_h
        b_D = load_state(dstates, dscales, i_D, start < end, tl.exp(rest), i_k, i_v, K, V, BK, BV, True)
        D_high, D_low = split(b_D)
        b_dv = add_product(b_dv, k_high, k_low, D_high, D_low)
    b_A = tl.where(o_c[:, None] < o_c[None, :], b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[None, :], 0.0))
    b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
    A_high, A_low = split(b_A)
    b_dv = add_split_by_given(b_dv, A_high, A_low, b_do)
    store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def mild_key_grads_kernel(
    r, k, v, w, u, do, states, scales, dstates, dscales, mild, dr, dk, dw, du, scale, sequence_of_chunk, cu_seqlens,
    offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dr, dk, dw and the chunk's share of du for one chunk. In registers: dA [C, C], x, then y and z, [C, BK].

    x = dA k* + do (e^{mid} S)^T                    dq = x e^{before - mid} + bonus,  dr = scale dq
    z = dA^T q*,  y = v (e^{total - mid} D)^T       dk = (y + z) e^{mid - upto} + bonus
    dw_t = e^{total} sum_v S D + sum_{i>t} q*_i x_i - sum_{j>=t} k*_j z_j + sum_{j<t} k*_j y_j
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    i_S = i_c * PARTS * H + i_h
    i_D = i_S + (PARTS - 1) * H
    NV: tl.constexpr = (V + BV - 1) // BV
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        upto = _upto(b_w, C)
        mid, rest = half_decays(b_w, C)
        read, key = tl.exp(upto - b_w.to(tl.float32)), tl.exp(-upto)
        k_high, k_low = split(b_k * key)

        # Reads.
        b_dA = tl.zeros([C, C], dtype=tl.float32)
        diagonal = tl.zeros([C], dtype=tl.float32)
        for i_v in range(0, NV):
            b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
            b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
            diagonal += tl.sum(b_v.to(tl.float32) * b_do.to(tl.float32), 1)
            b_dA = tl.dot(b_do, tl.trans(b_v), b_dA)
        dA_high, dA_low = split(tl.where(earlier, b_dA, 0.0))
        x = add_whole_product(tl.zeros([C, BK], dtype=tl.float32), dA_high, dA_low, k_high, k_low)
        for i_v in range(0, NV):
            b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
            b_S = load_state(states, scales, i_S, start < end, tl.exp(mid), i_k, i_v, K, V, BK, BV, True)
            S_high, S_low = split(b_S)
            x = add_given_by_split(x, b_do, tl.trans(S_high), tl.trans(S_low))
        diagonal = diagonal[:, None]
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        store_tile(dr, (x * read + diagonal * b_u * b_k) * scale, start, end, i_h, i_k, H, K, C, BK)
        p_du = du + i_S.to(tl.int64) * K + o_k
        tl.store(p_du, tl.sum(diagonal * b_q * b_k, 0), mask=o_k < K)
        if PARTS == 2:
            tl.store(p_du + H * K, tl.zeros([BK], dtype=tl.float32), mask=o_k < K)
        q_high, q_low = split(b_q * read)
        reads = (q_high.to(tl.float32) + q_low.to(tl.float32)) * x

        # Keys. dA is formed again, the other way round: to turn it costs more.
        b_dA = tl.zeros([C, C], dtype=tl.float32)
        for i_v in range(0, NV):
            b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
            b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
            b_dA = tl.dot(b_v, tl.trans(b_do), b_dA)
        dA_high, dA_low = split(tl.where(later, b_dA, 0.0))
        z = add_whole_product(tl.zeros([C, BK], dtype=tl.float32), dA_high, dA_low, q_high, q_low)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        key = tl.exp(-_upto(b_w, C))
        k_high, k_low = split(load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * key)
        own = (k_high.to(tl.float32) + k_low.to(tl.float32)) * z
        passing = reads - own
        passing_high, passing_low = split(passing)
        passing -= passing_high.to(tl.float32) + passing_low.to(tl.float32)
        which = to_bfloat16(later.to(tl.float32))
        b_dw = tl.dot(which, passing_high, -own)
        b_dw = tl.dot(which, passing_low, b_dw)
        b_dw = tl.dot(which, to_bfloat16(passing), b_dw)
        y = tl.zeros([C, BK], dtype=tl.float32)
        b_SD = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, NV):
            b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
            b_D = load_state(dstates, dscales, i_D, start < end, tl.exp(rest), i_k, i_v, K, V, BK, BV, True)
            b_S = load_state(states, scales, i_S, start < end, tl.exp(mid), i_k, i_v, K, V, BK, BV, True)
            b_SD += tl.sum(b_S * b_D, 1)
            D_high, D_low = split(b_D)
            y = add_given_by_split(y, b_v, tl.trans(D_high), tl.trans(D_low))
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        keys_high, keys_low = split(b_k * key * y)
        which = to_bfloat16(earlier.to(tl.float32))
        b_dw = tl.dot(which, keys_high, b_dw + b_SD[None, :])
        b_dw = tl.dot(which, keys_low, b_dw)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        store_tile(dk, (y + z) * key + diagonal * b_u * b_q, start, end, i_h, i_k, H, K, C, BK)
        store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)


@triton.jit
def _neighbours(w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """The decay of the row before each row, and of the row after it, in float32; 0 outside these rows."""
    b_prev = load_tile(w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
    return b_prev, load_tile(w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)


@triton.jit
def _add_scores(b_A, b_a, b_q, b_k, b_u, C: tl.constexpr):
    """b_A plus b_a below the diagonal and the bonus on it."""
    o_c = tl.arange(0, C)
    b_d = tl.sum(b_q * b_k * b_u[None, :], 1)
    return b_A + tl.where(o_c[:, None] > o_c[None, :], b_a, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))


@triton.jit
def output_kernel(
    r, k, v, w, u, states, scales, mild, o, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o = A v + (scale r e^{before}) S for one part of a chunk and block of V. In registers: A [C, C], o [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_p = i % H, (i // H) % NV, i // (H * NV)
    if takes(mild, i_p // PARTS * H + i_h, FLAGS, 0) == 0:
        return
    start, end = locate(i_p // PARTS, sequence_of_chunk, cu_seqlens, offsets, T, C * PARTS, PACKED)
    start += i_p % PARTS * C
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_o = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_S = load_state(states, scales, i_p * H + i_h, start < end, 1.0, i_k, i_v, K, V, BK, BV, SCALED)
        b_prev, b_next = _neighbours(w, start, end, i_h, i_k, H, K, C, BK)
        b_a = dyadic_scores(b_q, b_k, b_prev, b_next, C, BK, LEVELS, PRECISION)
        b_A = _add_scores(b_A, b_a, b_q, b_k, b_u, C)
        b_o += dot(b_q * tl.exp(decay_before(b_prev)), b_S, PRECISION)
    b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_o += tl.dot(to_operand(b_A, PRECISION), b_v, input_precision=PRECISION)
    store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def value_grads_kernel(
    r, k, w, u, do, dstates, dscales, mild, dv, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = A^T do + (k e^{after}) D for one part of a chunk and block of V. In registers: A [C, C], dv [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_p = i % H, (i // H) % NV, i // (H * NV)
    if takes(mild, i_p // PARTS * H + i_h, FLAGS, 0) == 0:
        return
    start, end = locate(i_p // PARTS, sequence_of_chunk, cu_seqlens, offsets, T, C * PARTS, PACKED)
    start += i_p % PARTS * C
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_dv = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_D = load_state(dstates, dscales, i_p * H + i_h, start < end, 1.0, i_k, i_v, K, V, BK, BV, SCALED)
        b_prev, b_next = _neighbours(w, start, end, i_h, i_k, H, K, C, BK)
        b_a = dyadic_scores(b_q, b_k, b_prev, b_next, C, BK, LEVELS, PRECISION)
        b_A = _add_scores(b_A, b_a, b_q, b_k, b_u, C)
        b_dv += dot(b_k * tl.exp(decay_after(b_next)), b_D, PRECISION)
    b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_dv += tl.dot(to_operand(tl.trans(b_A), PRECISION), b_do, input_precision=PRECISION)
    store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def key_grads_kernel(
    r, k, v, w, u, do, states, scales, dstates, dscales, mild, dr, dk, dw, du, scale, sequence_of_chunk, cu_seqlens,
    offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dr, dk, dw and the share of du of one part of a chunk. In registers: dA [C, C], then dq, dk, dw [C, BK] in turn.

    dq = (do S^T) e^{before} + pairs,  dk = (v D^T) e^{after} + pairs,  dr = scale dq,  q = scale r
    dw_t = e^{total} sum_v S D + sum_{i>t} q_i dq_i^S + sum_{j<t} k_j dk_j^D + pairs j < t < i
    """
    i = tl.program_id(0)
    i_h, i_p = i % H, i // H
    if takes(mild, i_p // PARTS * H + i_h, FLAGS, 0) == 0:
        return
    start, end = locate(i_p // PARTS, sequence_of_chunk, cu_seqlens, offsets, T, C * PARTS, PACKED)
    start += i_p % PARTS * C
    o_c = tl.arange(0, C)

    b_dA = tl.zeros([C, C], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
        b_dA += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_dA, 0.0), 1)[:, None]
    b_dA = to_operand(tl.where(o_c[:, None] > o_c[None, :], b_dA, 0.0), PRECISION)

    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_dq = tl.zeros([C, BK], dtype=tl.float32)
        b_dk = tl.zeros([C, BK], dtype=tl.float32)
        b_SD = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, (V + BV - 1) // BV):
            b_D = load_state(dstates, dscales, i_p * H + i_h, start < end, 1.0, i_k, i_v, K, V, BK, BV, SCALED)
            b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
            b_dk += tl.dot(b_v, to_operand(tl.trans(b_D), PRECISION), input_precision=PRECISION)
            b_S = load_state(states, scales, i_p * H + i_h, start < end, 1.0, i_k, i_v, K, V, BK, BV, SCALED)
            b_SD += tl.sum(b_S * b_D, 1)
            b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
            b_dq += tl.dot(b_do, to_operand(tl.trans(b_S), PRECISION), input_precision=PRECISION)

        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_prev, b_next = _neighbours(w, start, end, i_h, i_k, H, K, C, BK)
        b_dq, b_dk, b_dw = dyadic_pairs(b_q, b_k, b_prev, b_next, b_dA, b_dq, b_dk, C, BK, LEVELS, PRECISION)

        b_dw += (tl.exp(tl.sum(b_w, 0)) * b_SD)[None, :]
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        b_du = tl.sum(diagonal * b_q * b_k, 0)
        b_dq += diagonal * b_u * b_k
        b_dk += diagonal * b_u * b_q
        store_tile(dr, b_dq * scale, start, end, i_h, i_k, H, K, C, BK)
        store_tile(dk, b_dk, start, end, i_h, i_k, H, K, C, BK)
        store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)
        tl.store(du + (i_p.to(tl.int64) * H + i_h) * K + o_k, b_du, mask=o_k < K)


def _launch(plan, kernel, mild_kernel, any_kernel, *given):
    """Both ways through a chunk; given: what the kernels take before `plan.where`."""
    for options, NV in plan.ways(kernel):
        blocks = plan.H if kernel == "key_grads" else NV * plan.H
        if options.pop("MILD"):
            del options["LEVELS"], options["PRECISION"]
            mild_kernel[(plan.chunks * blocks,)](*given, *plan.where, PARTS=plan.parts, **options)
        else:
            any_kernel[(plan.chunks * plan.parts * blocks,)](
                *given, *plan.where, PARTS=plan.parts, SCALED=plan.scaled, **options
            )


def kept_shapes(r, k, v, w, u, cu_seqlens, chunk_size) -> tuple[tuple[int, ...]]:
    """Shape of what `forward` keeps for `backward`: the state entering every part of a chunk."""
    return (kept_states_shape("rwkv6", r, v.shape[-1], cu_seqlens, chunk_size),)


def forward(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep):
    """o, the final state (None unless asked for), and as in `kept_shapes`."""
    plan = ChunkPlan("rwkv6", r, v.shape[-1], cu_seqlens, chunk_size)
    o, final_state = torch.empty_like(v), plan.empty(plan.state_shape()) if output_final_state else None
    kept, mild = plan.states(k, v, w, 1.0, initial_state, final_state, reverse=False)
    states = plan.unpacked(kept, plan.V)
    _launch(plan, "output", mild_output_kernel, output_kernel, r, k, v, w, u, *states, mild, o, scale)
    return o, final_state, (kept,)


def backward(r, k, v, w, u, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dr, dk, dv, dw in their inputs' dtypes, du [H, K] and dinitial_state [N, H, K, V] in float32."""
    plan = ChunkPlan("rwkv6", r, v.shape[-1], cu_seqlens, chunk_size)
    dr, dk, dv, dw = (torch.empty_like(x) for x in (r, k, v, w))
    dinitial_state, du = plan.empty(plan.state_shape()), plan.empty(plan.chunks * plan.parts, plan.H, plan.K)
    dkept, mild = plan.states(r, do, w, scale, dfinal_state, dinitial_state, reverse=True)
    states, dstates = plan.unpacked(kept[0], plan.V), plan.unpacked(dkept, plan.V)
    _launch(plan, "value_grads", mild_value_grads_kernel, value_grads_kernel, r, k, w, u, do, *dstates, mild, dv, scale)
    _launch(
        plan, "key_grads", mild_key_grads_kernel, key_grads_kernel,
        r, k, v, w, u, do, *states, *dstates, mild, dr, dk, dw, du, scale,
    )  # fmt: skip
    return dr, dk, dv, dw, du.sum(0), dinitial_state
