"""RWKV7 token by token as Triton kernels: the state stays in registers, [K, BV] a program.

a^T S is a sum over K, so the columns of the state are independent: each block of V has its own program. The backward
needs every S_{t-1}, and cannot divide by a decay to walk back. So the forward stores the state every CHECKPOINT tokens;
the backward recomputes one such segment at a time and walks it in reverse. Then dw_t = sum_v e^{w_t} S_{t-1} D_t uses
the states themselves, without cancellation.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import kernel, program
from ..common.launch import CHECKPOINT
from ..common.positions_triton import locate_sequence
from ..common.recurrence_triton import (
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


@triton.jit
def _added(removed, b_k, b_v, b_b):
    """Return what a token adds to the state, b (a^T S_{t-1}) + k v^T."""
    return as_vector(b_b)[:, None] * removed[None, :] + as_vector(b_k)[:, None] * as_vector(b_v)[None, :]


@kernel
def recurrent_kernel(
    r, w, k, v, a, b, initial_state, o, states, final_state, scale, cu_seqlens, checkpoints_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, U: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, HAS_INITIAL: tl.constexpr, WANTS_FINAL: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute S <- diag(e^{w_t}) S + b_t (a_t^T S) + k_t v_t^T and o_t = scale r_t^T S, U tokens a turn
    (`recurrence_triton`). KEEP: store S every C tokens. In registers: S [BK, BV], BK >= K.

    r, w, k, a, b [B, T, H, K], v, o [B, T, H, V]; cu_seqlens, checkpoints_before [N + 1]
    initial_state, final_state [N, H, K, V], states [checkpoints, H, K, V]
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = program(NV)
    i_n, i_h = i_nh // H, i_nh % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[:, None] * V + o_v[None, :], m_k[:, None] & m_v[None, :]
    start, end, first = locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C, PACKED)

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
    ahead = load_turn((w, k, a, b, r), (v,), start, 0, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
    for begin in range(0, length, U):
        if KEEP:
            if begin % C == 0:
                tl.store(states + ((first + begin // C) * H + i_h) * K * V + o_s, b_S, mask=m_s)
        turn = arrived_turn(ahead)
        ahead = load_turn((w, k, a, b, r), (v,), start, begin + U, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
        highs, low = turn_decays(turn, 0)
        for n in tl.static_range(U):
            _, b_k, b_a, b_b, b_r, b_v = turn[n]
            removed = tl.sum(as_vector(b_a)[:, None] * b_S, 0)
            b_S = decayed(b_S, highs[n], low, _added(removed, b_k, b_v, b_b), n == U - 1)
            b_o = row_sums(tl.trans(as_vector(b_r * scale)[:, None] * b_S))  # of four columns a thread
            row, within = (start + begin + n) * H + i_h, begin + n < length
            tl.store(o + row * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v & within)
    if WANTS_FINAL:
        tl.store(final_state + i_nh.to(tl.int64) * K * V + o_s, b_S, mask=m_s)


@kernel
def recurrent_grads_kernel(
    r, w, k, v, a, b, do, states, dfinal_state, scratch, scratch_removed, dr, dw, dk, dv, da, db, dinitial_state, scale,
    cu_seqlens, checkpoints_before, T, tokens, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, U: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients, from the last token on: D <- D + scale r_t do_t^T, then
    D <- diag(e^{w_t}) D + a_t (b_t^T D), D the gradient of S. In registers: S and D [BK, BV].

    r, w, k, a, b [B, T, H, K], v, do, dv [B, T, H, V], tokens = B T; cu_seqlens, checkpoints_before [N + 1]
    dr, dw, dk, da, db [NV, B, T, H, K]: partial sums, one for each block of V
    states [checkpoints, H, K, V], dfinal_state, dinitial_state [N, H, K, V]
    scratch [NV, N, H, C // U, BV, BK]: S^T before each turn of U tokens of a segment of C
    scratch_removed [NV, N, H, C, BV]: a^T S_{t-1}, which the second walk reads instead of summing again
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = program(NV)
    i_n, i_h = i_nh // H, i_nh % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[:, None] * V + o_v[None, :], m_k[:, None] & m_v[None, :]
    start, end, first = locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C, PACKED)
    p_scratch = scratch + (i_v * N * H + i_nh).to(tl.int64) * (C // U) * BK * BV
    ROWS: tl.constexpr = 4 if BK >= 128 else (BK + 31) // 32  # a thread's: one warp has all rows
    p_scratch += tl.max_contiguous(tl.arange(0, BK), ROWS)[:, None] + tl.arange(0, BV)[None, :] * BK
    p_removed = scratch_removed + (i_v * N * H + i_nh).to(tl.int64) * C * BV + tl.arange(0, BV)
    share = i_v.to(tl.int64) * tokens * H

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
        written = load_turn((w, k, a, b), (v,), begin, 0, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
        for i_t in range(0, turns):
            tl.store(p_scratch + i_t * BK * BV, b_S)
            turn = arrived_turn(written)
            t = (i_t + 1) * U
            written = load_turn((w, k, a, b), (v,), begin, t, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
            highs, low = turn_decays(turn, 0)
            for n in tl.static_range(U):
                _, b_k, b_a, b_b, b_v = turn[n]
                removed = column_sums(as_vector(b_a)[:, None] * b_S, ROWS)
                tl.store(p_removed + (i_t * U + n) * BV, removed)
                b_S = decayed(b_S, highs[n], low, _added(removed, b_k, b_v, b_b), n == U - 1)
        tl.debug_barrier()
        t = (turns - 1) * U
        ahead = load_turn((w, k, a, b, r), (v, do), begin, t, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
        for back in range(0, turns):
            i_t = turns - 1 - back
            b_S = tl.load(p_scratch + i_t * BK * BV)
            rows = arrived_turn(ahead)
            t = (i_t - 1) * U
            ahead = load_turn((w, k, a, b, r), (v, do), begin, t, length, i_h, o_k, m_k, o_v, m_v, H, K, V, U)
            highs, low = turn_decays(rows, 0, True)
            befores, reads = (), ()
            for n in tl.static_range(U):
                _, b_k, _, b_b, _, b_v, _ = rows[n]
                removed = tl.load(p_removed + (i_t * U + n) * BV)
                befores += (b_S,)
                reads += (removed,)
                if n + 1 < U:
                    b_S = decayed(b_S, highs[n], low, _added(removed, b_k, b_v, b_b), False)
            for n in tl.static_range(U - 1, -1, -1):
                _, b_k, b_a, b_b, b_r, b_v, b_do = rows[n]
                high, b_S, removed = highs[n], befores[n], reads[n]
                row, within = (begin + i_t * U + n) * H + i_h, i_t * U + n < length
                at, m_t = share + row, m_k & within
                do_n = as_vector(b_do * scale)
                n_do = do_n[None, :]
                # S_t do from S_{t-1} do: the state after a turn's last token is not needed.
                b_read = tl.sum(b_S * n_do, 1)
                added = as_vector(b_b) * tl.sum(removed * do_n) + as_vector(b_k) * tl.sum(b_v * b_do * scale)
                b_dr = high * b_read + added
                tl.store(dr + at * K + o_k, b_dr.to(dr.dtype.element_ty), mask=m_t)
                b_D += as_vector(b_r)[:, None] * n_do
                dremoved = column_sums(b_D * as_vector(b_b)[:, None], ROWS)
                tl.store(dw + at * K + o_k, (high * tl.sum(b_S * b_D, 1)).to(dw.dtype.element_ty), mask=m_t)
                tl.store(dk + at * K + o_k, tl.sum(b_D * as_vector(b_v)[None, :], 1).to(dk.dtype.element_ty), mask=m_t)
                tl.store(db + at * K + o_k, tl.sum(b_D * removed[None, :], 1).to(db.dtype.element_ty), mask=m_t)
                tl.store(da + at * K + o_k, tl.sum(b_S * dremoved[None, :], 1).to(da.dtype.element_ty), mask=m_t)
                b_dv = column_sums(b_D * as_vector(b_k)[:, None], ROWS)
                tl.store(dv + row * V + o_v, b_dv.to(dv.dtype.element_ty), mask=m_v & within)
                b_D = decayed(b_D, high, low, as_vector(b_a)[:, None] * dremoved[None, :], n == 0)
        # The next segment overwrites the scratch buffer that this one still reads.
        tl.debug_barrier()
    tl.store(dinitial_state + i_nh.to(tl.int64) * K * V + o_s, b_D, mask=m_s)


def saved_shapes(r, w, k, v, a, b, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: the state every CHECKPOINT tokens, and empty ones."""
    return checkpoints_shape(r, v.shape[-1], packing), (0,), (0,), (0,)


def forward(memory, r, w, k, v, a, b, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and the tensors of `saved_shapes` (None unless `keep`)."""
    _, T, H, K = r.shape
    V = v.shape[-1]
    N, offsets = sequences(r, packing)
    BK, BV, NV, options = blocks_and_options("rwkv7.recurrent", r, V)
    empty = partial(r.new_empty, dtype=torch.float32)
    o, final_state = torch.empty_like(v), empty(N, H, K, V) if output_final_state else None
    states = checkpoints(r, V, packing) if keep else None
    memory.launch(
        recurrent_kernel, NV * N * H, (r, w, k, v, a, b, initial_state, o, states, final_state, scale, *offsets, T),
        lambda: dict(
            H=H, K=K, V=V, C=CHECKPOINT, U=tokens_per_turn(T), BK=BK, BV=BV, HAS_INITIAL=initial_state is not None,
            WANTS_FINAL=output_final_state, KEEP=keep, PACKED=packing is not None, **options,
        ),
    )  # fmt: skip
    return o, final_state, (states, empty(0), empty(0), empty(0)) if keep else None


def backward(memory, r, w, k, v, a, b, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dw, dk, dv, da, db and dinitial_state [N, H, K, V], each in float32 or its input's dtype."""
    states, _, _, _ = saved
    B, T, H, K = r.shape
    V = v.shape[-1]
    N, offsets = sequences(r, packing)
    BK, BV, NV, options = blocks_and_options("rwkv7.recurrent_grads", r, V)
    U = tokens_per_turn(T)
    empty = r.new_empty(0, dtype=torch.float32).new_empty
    dr, dw, dk, da, db = new_shares(NV, r, w, k, a, b)
    dv, dinitial_state = torch.empty_like(v), empty(N, H, K, V)
    memory.launch(
        recurrent_grads_kernel, NV * N * H,
        (
            r, w, k, v, a, b, do, states, dfinal_state, empty(NV * N * H, CHECKPOINT // U, BV, BK),
            empty(NV * N * H, CHECKPOINT, BV), dr, dw, dk, dv, da, db, dinitial_state, scale, *offsets, T, B * T, N,
        ),
        lambda: dict(
            H=H, K=K, V=V, C=CHECKPOINT, U=U, BK=BK, BV=BV, HAS_FINAL=dfinal_state is not None,
            PACKED=packing is not None, **options,
        ),
    )  # fmt: skip
    dr, dw, dk, da, db = sum_blocks(memory, NV, (dr, dw, dk, da, db), r, w, k, a, b)
    return dr, dw, dk, dv, da, db, dinitial_state
