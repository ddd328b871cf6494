"""RWKV6 in chunks as Triton kernels: a light stream over the states, everything else parallel over chunks.

Forward:  `states_kernel`       walks T and stores the state entering every chunk
          `output_kernel`       every chunk at once: o from the chunk's tokens and its entering state
Backward: `state_grads_kernel`  walks T backwards and stores the gradient of the state leaving every chunk
          `value_grads_kernel`  every chunk at once: dv
          `key_grads_kernel`    every chunk at once: dr, dk, dw and each chunk's share of du

Formulas as in `chunk_torch`. Two ways through a chunk, chosen per tile of [C, BK] decays:
- mild (16-bit inputs; its whole decay fits float32): one product about the middle row, e^{before_i - mid} e^{mid - upto_j};
- any other: log2(C) dyadic products whose factors are all in [0, 1] (`common.decay`), which no w <= 0 can break.

The decay's gradient. On the dyadic path it is summed level by level from terms that each carry their decay. On the mild
path it is the difference of two running sums that others form from rounded gradients; here both sums are formed from
the *same rounded operands*, q* (dA k*) and k* (dA^T q*), so that the same products are added and taken away and only
float32 accumulation is left to disagree.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import decay_after, decay_before, dot, level_pairs, level_weights, row_at, to_operand
from ..common.launch import CHUNK_SIZE, TABLE, block, width
from ..common.packed import chunk_offsets, max_chunks

MILD_TOTAL = tl.constexpr(-110.0)
"""A tile is mild if no channel decays more than this over the chunk: half of it on each side of the middle, e^55."""
MILD_TOKEN = tl.constexpr(-4.0)
"""… and no token more than this: the mild path's decay gradient loses a factor e^{-w} of float32's digits."""


@triton.jit
def _locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First row of chunk i_c and the end of its sequence. A surplus chunk of a packed batch starts beyond its end."""
    if PACKED:
        i_n = tl.load(sequence_of_chunk + i_c)
        start = tl.load(cu_seqlens + i_n).to(tl.int64) + (i_c - tl.load(offsets + i_n)) * C
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
    else:
        NT = tl.cdiv(T, C)
        first = (i_c // NT).to(tl.int64) * T
        start = first + (i_c % NT) * C
        end = first + T
    return start, end


@triton.jit
def _tile(p, start, end, i_h, i_d, shift: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    """Rows start + shift … of one head of x [*, H, D], [C, BD]; zero outside the chunk and the sequence."""
    o_c = tl.arange(0, C) + shift
    o_d = i_d * BD + tl.arange(0, BD)
    m = ((o_c >= 0) & (o_c < C) & (start + o_c < end))[:, None] & (o_d < D)[None, :]
    return tl.load(p + ((start + o_c) * H + i_h)[:, None] * D + o_d[None, :], mask=m, other=0.0)


@triton.jit
def _store_tile(p, x, start, end, i_h, i_d, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    o_c = tl.arange(0, C)
    o_d = i_d * BD + tl.arange(0, BD)
    m = (start + o_c < end)[:, None] & (o_d < D)[None, :]
    tl.store(p + ((start + o_c) * H + i_h)[:, None] * D + o_d[None, :], x.to(p.dtype.element_ty), mask=m)


@triton.jit
def _state_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a [BK, BV] tile of state number i."""
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    return p + i.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :], (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def _is_mild(b_w):
    """Whether a tile's whole decay fits float32 on both sides of its middle row."""
    return (tl.min(tl.sum(b_w, 0), 0) > MILD_TOTAL) & (tl.min(tl.min(b_w, 0), 0) > MILD_TOKEN)


@triton.jit
def _about_middle(before, b_w, C: tl.constexpr):
    """Decay of reads and of keys about the middle row; their product is the decay between the two. [C, BK] each."""
    mid = row_at(before, C // 2, C)[None, :]
    return tl.exp(before - mid), tl.exp(mid - before - b_w)


@triton.jit
def _dyadic_scores(b_q, b_k, b_prev, b_next, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for level in tl.static_range(LEVELS):
        right = ((tl.arange(0, C) // (1 << level)) % 2 == 1)[:, None]
        b_p = tl.where(right, b_q, b_k)
        if level > 0:
            b_p *= level_weights(b_prev, b_next, 1 << level, C, BK)
        b_A += tl.where(level_pairs(1 << level, C), dot(b_p, tl.trans(b_p), PRECISION), 0.0)
    return b_A


@triton.jit
def _scores(b_q, b_k, p_w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sum over a block of k of q_i k_j e^{decay strictly between j and i}; right for i > j, anything elsewhere, [C, C]"""
    b_prev = _tile(p_w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
    b_next = _tile(p_w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)
    if MILD:
        b_w = _tile(p_w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        if _is_mild(b_w):
            read, key = _about_middle(decay_before(b_prev), b_w, C)
            b_A = dot(b_q * read, tl.trans(b_k * key), PRECISION)
        else:
            b_A = _dyadic_scores(b_q, b_k, b_prev, b_next, C, BK, LEVELS, PRECISION)
    else:
        b_A = _dyadic_scores(b_q, b_k, b_prev, b_next, C, BK, LEVELS, PRECISION)
    return b_A


@triton.jit
def _mild_pairs(b_q, b_k, b_w, before, b_dA, b_dq, b_dk, C: tl.constexpr, PRECISION: tl.constexpr):
    """What the pairs of a mild chunk add to dq and dk, and dw without its e^{total} term; dq, dk hold the states' part."""
    read, key = _about_middle(before, b_w, C)
    b_qm, b_km = to_operand(b_q * read, PRECISION), to_operand(b_k * key, PRECISION)
    g_q = tl.dot(b_dA, b_km, input_precision=PRECISION)
    g_k = tl.dot(tl.trans(b_dA), b_qm, input_precision=PRECISION)
    reads, keys = b_q * b_dq + b_qm * g_q, b_k * b_dk
    b_dw = tl.cumsum(reads - b_km * g_k, axis=0, reverse=True) - reads + tl.cumsum(keys, axis=0) - keys
    return b_dq + g_q * read, b_dk + g_k * key, b_dw


@triton.jit
def _dyadic_pairs(b_q, b_k, b_prev, b_next, b_dA, b_dq, b_dk, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """The same for any decay."""
    o_c = tl.arange(0, C)
    later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    b_dw = dot(later.to(tl.float32), b_q * b_dq, PRECISION) + dot(earlier.to(tl.float32), b_k * b_dk, PRECISION)
    pairs = b_dA + tl.trans(b_dA)
    for level in tl.static_range(LEVELS):
        right = ((o_c // (1 << level)) % 2 == 1)[:, None]
        half = o_c // (1 << level)
        # Rows of right halves meet those of left halves and the other way round: one product serves dq and dk.
        meet = tl.where((half[:, None] ^ half[None, :]) == 1, pairs, 0.0)
        b_p = tl.where(right, b_q, b_k)
        if level == 0:
            b_g = dot(meet, b_p, PRECISION)
        else:
            weight = level_weights(b_prev, b_next, 1 << level, C, BK)
            b_g = dot(meet, b_p * weight, PRECISION) * weight
            # The decay at t is passed by the reads after t in its right half, by the keys before t in its left half.
            passes = (half[:, None] == half[None, :]) & ((right & later) | ((~right) & earlier))
            b_dw += dot(passes.to(tl.float32), b_p * b_g, PRECISION)
        b_dq += tl.where(right, b_g, 0.0)
        b_dk += tl.where(right, 0.0, b_g)
    return b_dq, b_dk, b_dw


@triton.jit
def states_kernel(
    k, v, w, initial_state, states, final_state, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WANTS_FINAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- diag(e^{sum of w over the chunk}) S + (k e^{after})^T v, chunk after chunk. In registers: S [BK, BV]."""
    i_v, i_k, i_nh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_n, i_h = i_nh // H, i_nh % H
    if PACKED:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        first_chunk = tl.load(offsets + i_n)
    else:
        start = i_n.to(tl.int64) * T
        end = start + T
        first_chunk = i_n * tl.cdiv(T, C)
    chunks = tl.cdiv(end - start, C).to(tl.int32)

    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_INITIAL:
        p_S, m_S = _state_pointers(initial_state, i_nh, i_k, i_v, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    for i in range(0, chunks):
        p_S, m_S = _state_pointers(states, (first_chunk + i) * H + i_h, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
        row = start + tl.cast(i, tl.int64) * C
        b_k = _tile(k, row, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_v = _tile(v, row, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_w = _tile(w, row, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_next = _tile(w, row, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)
        b_kd = b_k * tl.exp(decay_after(b_next))
        b_S = b_S * tl.exp(tl.sum(b_w, 0))[:, None] + dot(tl.trans(b_kd), b_v, PRECISION)
    if WANTS_FINAL:
        p_S, m_S = _state_pointers(final_state, i_nh, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@triton.jit
def output_kernel(
    r, k, v, w, u, states, o, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = A v + (scale r e^{before}) S for one chunk and block of V. In registers: A [C, C], o [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    start, end = _locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_o = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = _tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = _tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_a = _scores(b_q, b_k, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, MILD, PRECISION)
        b_d = tl.sum(b_q * b_k * b_u[None, :], 1)
        b_A += tl.where(o_c[:, None] > o_c[None, :], b_a, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))
        b_prev = _tile(w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
        p_S, m_S = _state_pointers(states, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        b_o += dot(b_q * tl.exp(decay_before(b_prev)), b_S, PRECISION)
    b_v = _tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_o += dot(b_A, b_v, PRECISION)
    _store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def state_grads_kernel(
    r, do, w, dfinal_state, dstates, dinitial_state, scale, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_FINAL: tl.constexpr, WANTS_INITIAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D <- diag(e^{sum of w over the chunk}) D + (scale r e^{before})^T do, last chunk first. In registers: D [BK, BV]."""
    i_v, i_k, i_nh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_n, i_h = i_nh // H, i_nh % H
    if PACKED:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        first_chunk = tl.load(offsets + i_n)
    else:
        start = i_n.to(tl.int64) * T
        end = start + T
        first_chunk = i_n * tl.cdiv(T, C)
    chunks = tl.cdiv(end - start, C).to(tl.int32)

    b_D = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FINAL:
        p_D, m_D = _state_pointers(dfinal_state, i_nh, i_k, i_v, K, V, BK, BV)
        b_D += tl.load(p_D, mask=m_D, other=0.0)
    for j in range(0, chunks):
        i = chunks - 1 - j
        p_D, m_D = _state_pointers(dstates, (first_chunk + i) * H + i_h, i_k, i_v, K, V, BK, BV)
        tl.store(p_D, b_D, mask=m_D)
        row = start + tl.cast(i, tl.int64) * C
        b_q = _tile(r, row, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_do = _tile(do, row, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_w = _tile(w, row, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_prev = _tile(w, row, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
        b_qd = b_q * tl.exp(decay_before(b_prev))
        b_D = b_D * tl.exp(tl.sum(b_w, 0))[:, None] + dot(tl.trans(b_qd), b_do, PRECISION)
    if WANTS_INITIAL:
        p_D, m_D = _state_pointers(dinitial_state, i_nh, i_k, i_v, K, V, BK, BV)
        tl.store(p_D, b_D, mask=m_D)


@triton.jit
def value_grads_kernel(
    r, k, w, u, do, dstates, dv, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = A^T do + (k e^{after}) D for one chunk and block of V. In registers: A [C, C], dv [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    start, end = _locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_dv = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = _tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = _tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_a = _scores(b_q, b_k, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, MILD, PRECISION)
        b_d = tl.sum(b_q * b_k * b_u[None, :], 1)
        b_A += tl.where(o_c[:, None] > o_c[None, :], b_a, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))
        b_next = _tile(w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)
        p_D, m_D = _state_pointers(dstates, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
        b_dv += dot(b_k * tl.exp(decay_after(b_next)), b_D, PRECISION)
    b_do = _tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_dv += dot(tl.trans(b_A), b_do, PRECISION)
    _store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def key_grads_kernel(
    r, k, v, w, u, do, states, dstates, dr, dk, dw, du, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dr, dk, dw and the chunk's share of du for one chunk and block of K. In registers: dA [C, C], dq, dk, dw [C, BK].

    dq = (do S^T) e^{before} + pairs,  dk = (v D^T) e^{after} + pairs,  dr = scale dq,  q = scale r
    dw_t = e^{total} sum_v S D + sum_{i>t} q_i dq_i^S + sum_{j<t} k_j dk_j^D + pairs j < t < i
    """
    i = tl.program_id(0)
    NK: tl.constexpr = (K + BK - 1) // BK
    i_h, i_k, i_c = i % H, (i // H) % NK, i // (H * NK)
    start, end = _locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)

    # 16-bit values are TF32 values: their products need no rounding first.
    b_dA = tl.zeros([C, C], dtype=tl.float32)
    b_dq = tl.zeros([C, BK], dtype=tl.float32)
    b_dk = tl.zeros([C, BK], dtype=tl.float32)
    b_SD = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        b_v = _tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_do = _tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        p_S, m_S = _state_pointers(states, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        p_D, m_D = _state_pointers(dstates, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
        b_dA += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_dq += dot(b_do, tl.trans(b_S), PRECISION)
        b_dk += dot(b_v, tl.trans(b_D), PRECISION)
        b_SD += tl.sum(b_S * b_D, 1)

    b_q = _tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
    b_k = _tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    b_w = _tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    b_prev = _tile(w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
    b_next = _tile(w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)
    before = decay_before(b_prev)
    b_dq *= tl.exp(before)
    b_dk *= tl.exp(decay_after(b_next))
    total = tl.sum(b_w, 0)

    diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_dA, 0.0), 1)[:, None]
    b_dA = to_operand(tl.where(o_c[:, None] > o_c[None, :], b_dA, 0.0), PRECISION)
    if MILD:
        if _is_mild(b_w):
            b_dq, b_dk, b_dw = _mild_pairs(b_q, b_k, b_w, before, b_dA, b_dq, b_dk, C, PRECISION)
        else:
            b_dq, b_dk, b_dw = _dyadic_pairs(b_q, b_k, b_prev, b_next, b_dA, b_dq, b_dk, C, BK, LEVELS, PRECISION)
    else:
        b_dq, b_dk, b_dw = _dyadic_pairs(b_q, b_k, b_prev, b_next, b_dA, b_dq, b_dk, C, BK, LEVELS, PRECISION)

    b_dw += (tl.exp(total) * b_SD)[None, :]
    b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    b_du = tl.sum(diagonal * b_q * b_k, 0)
    b_dq += diagonal * b_u * b_k
    b_dk += diagonal * b_u * b_q
    _store_tile(dr, b_dq * scale, start, end, i_h, i_k, H, K, C, BK)
    _store_tile(dk, b_dk, start, end, i_h, i_k, H, K, C, BK)
    _store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)
    tl.store(du + (i_c.to(tl.int64) * H + i_h) * K + o_k, b_du, mask=o_k < K)


class _Plan:
    """Everything the launches share: sizes, the chunks' whereabouts, precision."""

    def __init__(self, r, v, cu_seqlens, chunk_size):
        (B, self.T, self.H, self.K), self.V = r.shape, v.shape[-1]
        self.width = width(r.element_size())
        self.C = chunk_size or CHUNK_SIZE[self.width]
        self.cu_seqlens, self.offsets, self.sequence_of_chunk = cu_seqlens, None, None
        if cu_seqlens is None:
            self.N, self.chunks = B, B * triton.cdiv(self.T, self.C)
        else:
            self.N = len(cu_seqlens) - 1
            self.chunks = max_chunks(self.T, self.N, self.C)
            self.offsets = chunk_offsets(cu_seqlens, self.C)
            order = torch.arange(self.chunks, device=r.device, dtype=torch.int32)
            found = torch.searchsorted(self.offsets[1:], order, right=True)
            self.sequence_of_chunk = found.clamp_(max=self.N - 1).to(torch.int32)

    def sizes(self, kernel: str) -> tuple[dict, int, int]:
        """Keyword arguments every kernel takes, and the numbers of blocks along K and V."""
        launch = TABLE[f"rwkv6.{kernel}", self.width]
        BK, BV = block(self.K, launch.BK), block(self.V, launch.BV)
        common = dict(
            H=self.H, K=self.K, V=self.V, C=self.C, BK=BK, BV=BV, PACKED=self.cu_seqlens is not None,
            PRECISION="tf32" if self.width == "16-bit" else "tf32x3",
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        return common, triton.cdiv(self.K, BK), triton.cdiv(self.V, BV)

    def inside(self) -> dict:
        """Keyword arguments of the kernels that work inside a chunk."""
        return dict(LEVELS=self.C.bit_length() - 1, MILD=self.width == "16-bit")

    def states(self, x):
        return torch.empty(self.chunks, self.H, self.K, self.V, dtype=torch.float32, device=x.device)


def checkpoint_shape(r, v, cu_seqlens, chunk_size) -> tuple[int, ...]:
    """Shape of what `forward` keeps for `backward`: the state entering every chunk."""
    C = chunk_size or CHUNK_SIZE[width(r.element_size())]
    T = r.shape[1]
    chunks = r.shape[0] * -(-T // C) if cu_seqlens is None else max_chunks(T, cu_seqlens.shape[0] - 1, C)
    return chunks, r.shape[2], r.shape[3], v.shape[3]


def _final_state(plan, x):
    return torch.empty(plan.N, plan.H, plan.K, plan.V, dtype=torch.float32, device=x.device)


def forward(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep_states):
    """o, the final state (empty unless asked for), the states entering every chunk (empty unless kept)."""
    r, k, v, w, u = (x.contiguous() for x in (r, k, v, w, u))
    initial_state = initial_state if initial_state is None else initial_state.contiguous()
    plan = _Plan(r, v, cu_seqlens, chunk_size)
    o, states, empty = torch.empty_like(v), plan.states(r), torch.empty(0, dtype=torch.float32, device=r.device)
    final_state = _final_state(plan, r) if output_final_state else empty

    common, NK, NV = plan.sizes("states")
    states_kernel[NV, NK, plan.N * plan.H](
        k, v, w, initial_state, states, final_state, plan.cu_seqlens, plan.offsets, plan.T,
        HAS_INITIAL=initial_state is not None, WANTS_FINAL=output_final_state, **common,
    )  # fmt: skip
    common, _, NV = plan.sizes("output")
    output_kernel[(plan.chunks * NV * plan.H,)](
        r, k, v, w, u, states, o, scale, plan.sequence_of_chunk, plan.cu_seqlens, plan.offsets, plan.T,
        **plan.inside(), **common,
    )  # fmt: skip
    return o, final_state, states if keep_states else empty.clone()


def backward(r, k, v, w, u, scale, initial_state, cu_seqlens, chunk_size, states, do, dfinal_state):
    """dr, dk, dv, dw in their inputs' dtypes, du [H, K] and dinitial_state [N, H, K, V] in float32."""
    r, k, v, w, u, do = (x.contiguous() for x in (r, k, v, w, u, do))
    dfinal_state = dfinal_state if dfinal_state is None else dfinal_state.contiguous()
    plan = _Plan(r, v, cu_seqlens, chunk_size)
    dr, dk, dv, dw = (torch.empty_like(x) for x in (r, k, v, w))
    dstates, dinitial_state = plan.states(r), _final_state(plan, r)
    du = torch.empty(plan.chunks, plan.H, plan.K, dtype=torch.float32, device=r.device)
    where = (plan.sequence_of_chunk, plan.cu_seqlens, plan.offsets, plan.T)

    common, NK, NV = plan.sizes("state_grads")
    state_grads_kernel[NV, NK, plan.N * plan.H](
        r, do, w, dfinal_state, dstates, dinitial_state, scale, plan.cu_seqlens, plan.offsets, plan.T,
        HAS_FINAL=dfinal_state is not None, WANTS_INITIAL=initial_state is not None, **common,
    )  # fmt: skip
    common, _, NV = plan.sizes("value_grads")
    value_grads_kernel[(plan.chunks * NV * plan.H,)](
        r, k, w, u, do, dstates, dv, scale, *where, **plan.inside(), **common
    )
    common, NK, _ = plan.sizes("key_grads")
    key_grads_kernel[(plan.chunks * NK * plan.H,)](
        r, k, v, w, u, do, states, dstates, dr, dk, dw, du, scale, *where, **plan.inside(), **common
    )
    return dr, dk, dv, dw, du.sum(0), dinitial_state
