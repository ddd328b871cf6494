"""RWKV6 token by token as Triton kernels: the state stays in registers, [K, BV] a program, in the backward [BK, BV].

The backward needs every S_{t-1}, and cannot divide by a decay to walk back. So the forward stores the state every
CHECKPOINT tokens; the backward recomputes one such segment at a time and walks it in reverse. Then
dw_t = sum_v e^{w_t} S_{t-1} D_t uses the states themselves, without cancellation.
"""

from functools import partial

import torch
import triton.language as tl

from ..common.blocks_triton import kernel, program
from ..common.launch import CHECKPOINT, TABLE, block, cdiv, width
from ..common.positions_triton import locate_sequence
from ..common.recurrence_triton import (
    ROWS,
    arrived_turn,
    as_vector,
    blocks_and_options,
    checkpoints,
    checkpoints_shape,
    column_sums,
    decayed,
    load_turn,
    new_shares,
    relayout,
    row_sums,
    sequences,
    sum_blocks,
    tokens_per_turn,
    turn_decays,
    zeros_as_stored,
)


@kernel
def recurrent_kernel(
    r, k, v, w, u, initial_state, o, states, final_state, scale, cu_seqlens, checkpoints_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, U: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, HAS_INITIAL: tl.constexpr, WANTS_FINAL: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute o_t = q_t^T S + (q_t^T diag(u) k_t) v_t, q_t = scale r_t; then S <- diag(e^{w_t}) S + k_t v_t^T, U tokens
    a turn (`recurrence_triton`). KEEP: store S every C tokens. In registers: S [BK, BV], BK >= K.

    r, k, w [B, T, H, K], v, o [B, T, H, V], u [H, K]; cu_seqlens, checkpoints_before [N + 1]
    initial_state, final_state [N, H, K, V], states [checkpoints, H, K, V]
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = program(NV)
    i_n, i_h = i_nh // H, i_nh % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[:, None] * V + o_v[None, :], m_k[:, None] & m_v[None, :]
    start, end, first = locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C, PACKED)

    b_u = tl.load(u + i_h * K + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_INITIAL:
        b_S += tl.load(initial_state + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0)
    elif KEEP:
        b_S = relayout(states + (first * H + i_h) * K * V + o_s, b_S, m_s)
    elif WANTS_FINAL:
        b_S = relayout(final_state + i_nh.to(tl.int64) * K * V + o_s, b_S, m_s)
    else:
        b_S = zeros_as_stored(o, i_nh.to(tl.int64) * K * V + o_s, m_s, T)
    length = (end - start).to(tl.int32)
    ahead = load_turn((r, k, w), (v,), start, 0, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
    for begin in range(0, length, U):
        if KEEP:
            if begin % C == 0:
                tl.store(states + ((first + begin // C) * H + i_h) * K * V + o_s, b_S, mask=m_s)
        turn = arrived_turn(ahead)
        ahead = load_turn((r, k, w), (v,), start, begin + U, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
        highs, low = turn_decays(turn, 2)
        for n in tl.static_range(U):
            b_r, b_k, _, b_v = turn[n]
            b_r *= scale
            own = tl.sum(b_r * b_u * b_k) * b_v
            # A thread has four consecutive columns here.
            b_o = row_sums(tl.trans(as_vector(b_r)[:, None] * b_S)) + as_vector(own)
            row, within = (start + begin + n) * H + i_h, begin + n < length
            tl.store(o + row * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v & within)
            b_kv = as_vector(b_k)[:, None] * as_vector(b_v)[None, :]
            b_S = decayed(b_S, highs[n], low, b_kv, n == U - 1)
    if WANTS_FINAL:
        tl.store(final_state + i_nh.to(tl.int64) * K * V + o_s, b_S, mask=m_s)


@kernel
def recurrent_grads_kernel(
    r, k, v, w, u, do, states, dfinal_state, scratch, dr, dk, dv, dw, du, dinitial_state, scale,
    cu_seqlens, checkpoints_before, T, tokens, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, U: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients, from the last token on: D <- diag(e^{w_t}) D + scale r_t do_t^T, D the gradient of S. In
    registers: S or D [BK, BV].

    Every element of a state has a recurrence of its own, so blocks may be cut along K and V. Of blocks along K only dv
    is summed; of blocks along V, dr, dk and dw.

    r, k, w [B, T, H, K], v, do [B, T, H, V], u [H, K], tokens = B T; cu_seqlens, checkpoints_before [N + 1]
    dr, dk, dw [NV, B, T, H, K], du [NV, N, H, K]: partial sums, one for each block of V; dv [NK, B, T, H, V]: of K
    states [checkpoints, H, K, V], dfinal_state, dinitial_state [N, H, K, V]
    scratch [NV NK, N, H, C // U, BV, BK]: S^T before each turn of U tokens of a segment of C
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_b, i_nh = program(NK * NV)
    i_k, i_v = i_b % NK, i_b // NK
    i_n, i_h = i_nh // H, i_nh % H
    o_k, o_v = i_k * BK + tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[:, None] * V + o_v[None, :], m_k[:, None] & m_v[None, :]
    start, end, first = locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C, PACKED)
    p_scratch = scratch + (i_b * N * H + i_nh).to(tl.int64) * (C // U) * BK * BV
    p_scratch += tl.arange(0, BK)[:, None] + tl.arange(0, BV)[None, :] * BK
    share_k, share_v = i_v.to(tl.int64) * tokens * H, i_k.to(tl.int64) * tokens * H

    b_u = tl.load(u + i_h * K + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)
    b_du = tl.zeros([1, BK], dtype=tl.float32)
    b_D = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FINAL:
        b_D += tl.load(dfinal_state + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0)
    b_D = relayout(p_scratch, b_D, True)
    segments = tl.cdiv(end - start, C).to(tl.int32)
    for j in range(0, segments):
        i = segments - 1 - j
        begin = start + tl.cast(i, tl.int64) * C
        length = tl.minimum(end - begin, C).to(tl.int32)
        turns = tl.cdiv(length, U)
        b_S = tl.load(states + ((first + i) * H + i_h) * K * V + o_s, mask=m_s, other=0.0)
        b_S = relayout(p_scratch, b_S, True)
        written = load_turn((k, w), (v,), begin, 0, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
        for i_t in range(0, turns):
            tl.store(p_scratch + i_t * BK * BV, b_S)
            turn = arrived_turn(written)
            t = (i_t + 1) * U
            written = load_turn((k, w), (v,), begin, t, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
            highs, low = turn_decays(turn, 1)
            for n in tl.static_range(U):
                b_k, _, b_v = turn[n]
                b_kv = as_vector(b_k)[:, None] * as_vector(b_v)[None, :]
                b_S = decayed(b_S, highs[n], low, b_kv, n == U - 1)
        tl.debug_barrier()
        t = (turns - 1) * U
        ahead = load_turn((r, k, w), (v, do), begin, t, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
        for back in range(0, turns):
            i_t = turns - 1 - back
            b_S = tl.load(p_scratch + i_t * BK * BV)
            rows = arrived_turn(ahead)
            t = (i_t - 1) * U
            ahead = load_turn((r, k, w), (v, do), begin, t, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
            highs, low = turn_decays(rows, 2, True)
            befores = ()
            for n in tl.static_range(U):
                _, b_k, _, b_v, _ = rows[n]
                befores += (b_S,)
                if n + 1 < U:
                    b_S = decayed(b_S, highs[n], low, as_vector(b_k)[:, None] * as_vector(b_v)[None, :], False)
            for n in tl.static_range(U - 1, -1, -1):
                b_q, b_k, _, b_v, b_do = rows[n]
                b_S = befores[n]
                b_q *= scale
                q_do = as_vector(b_q)[:, None] * as_vector(b_do)[None, :]
                v_do = tl.sum(b_v * b_do)
                b_dq = row_sums(b_S * as_vector(b_do)[None, :]) + as_vector(b_u * b_k * v_do)
                b_dk = row_sums(b_D * as_vector(b_v)[None, :]) + as_vector(b_u * b_q * v_do)
                b_dw = highs[n] * row_sums(b_S * b_D)
                b_dv = column_sums(b_D * as_vector(b_k)[:, None]) + as_vector(tl.sum(b_q * b_u * b_k) * b_do)
                b_du += b_q * b_k * v_do
                row, within = (begin + i_t * U + n) * H + i_h, i_t * U + n < length
                at, m_t = (share_k + row) * K + o_k, m_k & within
                tl.store(dr + at, (b_dq * scale).to(dr.dtype.element_ty), mask=m_t)
                tl.store(dk + at, b_dk.to(dk.dtype.element_ty), mask=m_t)
                tl.store(dw + at, b_dw.to(dw.dtype.element_ty), mask=m_t)
                tl.store(dv + (share_v + row) * V + o_v, b_dv.to(dv.dtype.element_ty), mask=m_v & within)
                b_D = decayed(b_D, highs[n], low, q_do, n == 0)
        # The next segment overwrites the scratch buffer that this one still reads.
        tl.debug_barrier()
    tl.store(du + (i_v * N * H + i_nh) * K + o_k[None, :], b_du, mask=m_k[None, :])
    tl.store(dinitial_state + i_nh.to(tl.int64) * K * V + o_s, b_D, mask=m_s)


def saved_shapes(r, k, v, w, u, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: the state every CHECKPOINT tokens, and an empty one."""
    return checkpoints_shape(r, v.shape[-1], packing), (0,)


def forward(memory, r, k, v, w, u, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and the tensors of `saved_shapes` (None unless `keep`)."""
    _, T, H, K = r.shape
    V = v.shape[-1]
    N, offsets = sequences(r, packing)
    BK, BV, NV, options = blocks_and_options("rwkv6.recurrent", r, V)
    empty = partial(r.new_empty, dtype=torch.float32)
    o, final_state = torch.empty_like(v), empty(N, H, K, V) if output_final_state else None
    states = checkpoints(r, V, packing) if keep else None
    memory.launch(
        recurrent_kernel, NV * N * H, (r, k, v, w, u, initial_state, o, states, final_state, scale, *offsets, T),
        lambda: dict(
            H=H, K=K, V=V, C=CHECKPOINT, U=tokens_per_turn(T), BK=BK, BV=BV, HAS_INITIAL=initial_state is not None,
            WANTS_FINAL=output_final_state, KEEP=keep, PACKED=packing is not None, **options,
        ),
    )  # fmt: skip
    return o, final_state, (states, empty(0)) if keep else None


def backward(memory, r, k, v, w, u, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dk, dv, dw, du [H, K] and dinitial_state [N, H, K, V], each in float32 or its input's dtype."""
    states, _ = saved
    B, T, H, K = r.shape
    V = v.shape[-1]
    N, offsets = sequences(r, packing)
    row, U = TABLE["rwkv6.recurrent_grads", width(r.element_size())], tokens_per_turn(T)
    BK, BV = block(K, row.BK), block(V, row.BV)
    NK, NV = cdiv(K, BK), cdiv(V, BV)
    empty = r.new_empty(0, dtype=torch.float32).new_empty
    (dr, dk, dw), (dv,) = new_shares(NV, r, k, w), new_shares(NK, v)
    du, dinitial_state, programs = empty(NV, N, H, K), empty(N, H, K, V), NK * NV * N * H
    memory.launch(
        recurrent_grads_kernel, programs,
        (
            r, k, v, w, u, do, states, dfinal_state, empty(programs, CHECKPOINT // U, BV, BK), dr, dk, dv, dw, du,
            dinitial_state, scale, *offsets, T, B * T, N,
        ),
        lambda: dict(
            H=H, K=K, V=V, C=CHECKPOINT, U=U, BK=BK, BV=BV, HAS_FINAL=dfinal_state is not None,
            PACKED=packing is not None, num_warps=min(16, row.num_warps * max(1, BV // ROWS)),
            num_stages=row.num_stages,
        ),
    )  # fmt: skip
    (dr, dk, dw), (dv,) = sum_blocks(memory, NV, (dr, dk, dw), r, k, w), sum_blocks(memory, NK, (dv,), v)
    return dr, dk, dv, dw, du.sum((0, 1)), dinitial_state
