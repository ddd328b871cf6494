"""RWKV6 in chunks as Triton kernels: everything is parallel over chunks but a light stream of states.

Forward:  `stream_kernel`   the state entering each chunk, and whether the chunk's decay is mild
          `output_kernel`   o from a chunk's tokens and its entering state
Backward: `stream_kernel`   in reverse: the gradient of the state leaving each chunk
          `value_grads_kernel`, `key_grads_kernel`  dv; dr, dk, dw and each chunk's share of du

Formulas as in `chunk_torch`. There are two ways through a chunk, compiled apart so that the common one stays small;
both are launched and each leaves the other's chunks alone:
- mild (16-bit inputs; the chunk's whole decay fits float32): one product about the middle row, e^{before_i - mid} and
  e^{mid - upto_j}, from one running sum;
- any other: log2(C) dyadic products whose factors are all in [0, 1] (`common.decay`), which no w <= 0 can break.

The decay's gradient. On the dyadic path it is summed level by level from terms that each carry their decay. On the
mild path it is a difference of two running sums, which is noise where the two are formed from gradients rounded apart.
Here both are formed from the *same rounded operands*, q* (dA k*) and k* (dA^T q*): the same products are added and
taken away and only float32 accumulation is left to disagree.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import dot, to_operand
from ..common.chunks_triton import (
    ChunkPlan,
    dyadic_pairs,
    kept_states_shape,
    load_tile,
    locate,
    mild_pairs,
    scores,
    state_pointers,
    store_tile,
    takes,
)


@triton.jit
def _add_scores(b_A, b_a, b_q, b_k, b_u, C: tl.constexpr):
    """b_A plus b_a below the diagonal and the bonus on it."""
    o_c = tl.arange(0, C)
    b_d = tl.sum(b_q * b_k * b_u[None, :], 1)
    return b_A + tl.where(o_c[:, None] > o_c[None, :], b_a, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))


@triton.jit
def output_kernel(
    r, k, v, w, u, states, mild, o, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = A v + (scale r e^{before}) S for one chunk and block of V. In registers: A [C, C], o [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if takes(mild, i_c * H + i_h, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_o = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        p_S, m_S = state_pointers(states, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        b_a, before, _ = scores(b_q, b_k, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, MILD, PRECISION)
        b_A = _add_scores(b_A, b_a, b_q, b_k, b_u, C)
        b_o += dot(b_q * tl.exp(before), b_S, PRECISION)
    b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_o += tl.dot(to_operand(b_A, PRECISION), b_v, input_precision=PRECISION)
    store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def value_grads_kernel(
    r, k, w, u, do, dstates, mild, dv, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = A^T do + (k e^{after}) D for one chunk and block of V. In registers: A [C, C], dv [C, BV]."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if takes(mild, i_c * H + i_h, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_dv = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        p_D, m_D = state_pointers(dstates, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
        b_a, _, after = scores(b_q, b_k, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, MILD, PRECISION)
        b_A = _add_scores(b_A, b_a, b_q, b_k, b_u, C)
        b_dv += dot(b_k * tl.exp(after), b_D, PRECISION)
    b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_dv += tl.dot(to_operand(tl.trans(b_A), PRECISION), b_do, input_precision=PRECISION)
    store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def key_grads_kernel(
    r, k, v, w, u, do, states, dstates, mild, dr, dk, dw, du, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dr, dk, dw and the chunk's share of du for one chunk. In registers: dA [C, C], then dq, dk, dw [C, BK] in turn.

    dq = (do S^T) e^{before} + pairs,  dk = (v D^T) e^{after} + pairs,  dr = scale dq,  q = scale r
    dw_t = e^{total} sum_v S D + sum_{i>t} q_i dq_i^S + sum_{j<t} k_j dk_j^D + pairs j < t < i
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i_c * H + i_h, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
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
            p_D, m_D = state_pointers(dstates, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
            b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
            b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
            b_dk += tl.dot(b_v, to_operand(tl.trans(b_D), PRECISION), input_precision=PRECISION)
            p_S, m_S = state_pointers(states, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
            b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
            b_SD += tl.sum(b_S * b_D, 1)
            b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
            b_dq += tl.dot(b_do, to_operand(tl.trans(b_S), PRECISION), input_precision=PRECISION)

        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        if MILD:
            b_dq, b_dk, b_dw = mild_pairs(b_q, b_k, b_w, b_dA, b_dq, b_dk, C, PRECISION)
        else:
            b_prev = load_tile(w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
            b_next = load_tile(w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)
            b_dq, b_dk, b_dw = dyadic_pairs(b_q, b_k, b_prev, b_next, b_dA, b_dq, b_dk, C, BK, LEVELS, PRECISION)

        b_dw += (tl.exp(tl.sum(b_w, 0)) * b_SD)[None, :]
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        b_du = tl.sum(diagonal * b_q * b_k, 0)
        b_dq += diagonal * b_u * b_k
        b_dk += diagonal * b_u * b_q
        store_tile(dr, b_dq * scale, start, end, i_h, i_k, H, K, C, BK)
        store_tile(dk, b_dk, start, end, i_h, i_k, H, K, C, BK)
        store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)
        tl.store(du + (i_c.to(tl.int64) * H + i_h) * K + o_k, b_du, mask=o_k < K)


def kept_shapes(r, k, v, w, u, cu_seqlens, chunk_size) -> tuple[tuple[int, ...]]:
    """Shape of what `forward` keeps for `backward`: the state entering every chunk."""
    return (kept_states_shape(r, v.shape[-1], cu_seqlens, chunk_size),)


def forward(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep):
    """o, the final state (None unless asked for), and as in `kept_shapes`."""
    plan = ChunkPlan("rwkv6", r, v.shape[-1], cu_seqlens, chunk_size)
    o, final_state = torch.empty_like(v), plan.empty(plan.state_shape()) if output_final_state else None
    states, mild = plan.states(k, v, w, 1.0, initial_state, final_state, reverse=False)
    for options, NV in plan.ways("output"):
        output_kernel[(plan.chunks * NV * plan.H,)](r, k, v, w, u, states, mild, o, scale, *plan.where, **options)
    return o, final_state, (states,)


def backward(r, k, v, w, u, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dr, dk, dv, dw in their inputs' dtypes, du [H, K] and dinitial_state [N, H, K, V] in float32."""
    (states,) = kept
    plan = ChunkPlan("rwkv6", r, v.shape[-1], cu_seqlens, chunk_size)
    dr, dk, dv, dw = (torch.empty_like(x) for x in (r, k, v, w))
    dinitial_state, du = plan.empty(plan.state_shape()), plan.empty(plan.chunks, plan.H, plan.K)
    dstates, mild = plan.states(r, do, w, scale, dfinal_state, dinitial_state, reverse=True)
    for options, NV in plan.ways("value_grads"):
        value_grads_kernel[(plan.chunks * NV * plan.H,)](
            r, k, w, u, do, dstates, mild, dv, scale, *plan.where, **options
        )
    for options, _ in plan.ways("key_grads"):
        # The mild path takes a product away from a sum that holds it: a fused multiply-add would not take the same one.
        key_grads_kernel[(plan.chunks * plan.H,)](
            r, k, v, w, u, do, states, dstates, mild, dr, dk, dw, du, scale, *plan.where, **options,
            enable_fp_fusion=False,
        )  # fmt: skip
    return dr, dk, dv, dw, du.sum(0), dinitial_state
