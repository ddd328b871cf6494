"""GSA token by token as Triton kernels: the memory stays in registers.

A single token is one kernel, hk [K, M] and a block of hv [M, BV] a program, so that scores, softmax and read need no
other program. Where V is split, each of its blocks walks all of hk.

More tokens are two passes of the same form over a state S [M, D], S <- diag(e^{g_t}) S + s_t y_t^T: hk transposed to
[M, K] with y = k, and hv with y = v; PyTorch's softmax of the scores is between them. A program then has a block of one
warp, whose rows need no barriers, and none walks the same state as another.

A turn of U tokens is one step of S. With S before the turn, a token's state is never computed: its read S_n z_n is
diag(e^{g_0 + ... + g_n}) S z_n and, from each token i <= n of the turn, diag(e^{g_{i+1} + ... + g_n}) s_i (y_i^T z_n).

In the backward, with a row x over the slots (dscores or p) and one z over D (q or do), and D_S the gradient of S with
the read x z^T at t included:

    dx = S z,   dz = S^T x,   ds += D_S y,   dy = D_S^T s,   dg += e^{g} sum_d S_{t-1} D_S

These too come from S before and D_S after a turn, of the products S z, S^T x, D_S y, D_S^T s and one sum_d S D_S a
turn, each term with the decays between its tokens: no term is divided by a decay or subtracted.

The second pass runs first: its dx is dp, which gives dscores (`dscores_kernel`). Each block of slots and D has a
program. States before each turn are recomputed from checkpoints by segments, as in `rwkv6.recurrent_triton`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import kernel, program
from ..common.kernel_triton import launched
from ..common.launch import CHECKPOINT, TABLE, Launch, block, cdiv, width
from ..common.positions_triton import locate_sequence
from ..common.recurrence_triton import (
    ROWS,
    arrived_turn,
    as_vector,
    checkpoints,
    checkpoints_shape,
    column_sums,
    load_turn,
    new_shares,
    relayout,
    row_sums,
    sequences,
    split_decay,
    sum_blocks,
    sums_together,
    tokens_per_turn,
    zeros_as_stored,
)
from .slots_triton import softmax_grads

FEW = 64
"""Fewest programs for one token: with fewer, BV is halved, down to 16, though every block of V walks hk again."""

WARP = 1024
"""Elements of a state for which the launch table's num_warps of a forward's passes holds; more get more warps."""

TURN = 4
"""Tokens times queries a token in a turn of a pass; divides CHECKPOINT."""

HK_ELEMENTS = 8192
"""Elements of hk [BK, BM] that the launch table's num_warps is for; a larger hk gets more warps."""


@kernel
def token_kernel(
    q, k, v, s, g, initial_hk, initial_hv, o, final_hk, final_hv, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, HAS_INITIAL: tl.constexpr, WANTS_FINAL: tl.constexpr,
):  # fmt: skip
    """Compute one token of N sequences: update hk and hv as `pass_kernel` does, then o = softmax(scale q^T hk) hv for
    each of the G query heads that share them. In registers: hk [BK, BM] and hv [BM, BV].

    All programs of a head have the same hk: each stores some of its rows.

    q [N, 1, H G, K], k [N, 1, H, K], v [N, 1, H, V], s, g [N, 1, H, M], o [N, 1, H G, V]
    initial_hk, final_hk [N, H, K, M], initial_hv, final_hv [N, H, M, V]
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = program(NV)
    row = i_nh.to(tl.int64)
    o_k, o_v, o_m = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, BM)
    m_k, m_v, m_m = o_k < K, o_v < V, o_m < M
    o_hk, o_hv = o_k[:, None] * M + o_m[None, :], o_m[:, None] * V + o_v[None, :]
    m_hk, m_hv = m_k[:, None] & m_m[None, :], m_m[:, None] & m_v[None, :]
    m_own = m_hk & (o_k % NV == i_v)[:, None]

    b_hk = tl.zeros([BK, BM], dtype=tl.float32)
    b_hv = tl.zeros([BM, BV], dtype=tl.float32)
    if HAS_INITIAL:
        b_hk += tl.load(initial_hk + row * K * M + o_hk, mask=m_hk, other=0.0)
        b_hv += tl.load(initial_hv + row * M * V + o_hv, mask=m_hv, other=0.0)
    elif WANTS_FINAL:
        b_hk = relayout(final_hk + row * K * M + o_hk, b_hk, m_own)
        b_hv = relayout(final_hv + row * M * V + o_hv, b_hv, m_hv)
    token = load_turn((k,), (v,), row, 0, 1, 0, o_k, m_k, o_v, m_v, 1, K, V, 1)
    slots = load_turn((s, g), (), row, 0, 1, 0, o_m, m_m, o_m, m_m, 1, M, M, 1)
    b_k, b_v = arrived_turn(token)[0]
    b_s, b_g = arrived_turn(slots)[0]
    high, low = split_decay(b_g)
    high, low, b_s = as_vector(high), as_vector(low), as_vector(b_s)
    b_hk = high[None, :] * b_hk + (low[None, :] * b_hk + as_vector(b_k)[:, None] * b_s[None, :])
    b_hv = high[:, None] * b_hv + (low[:, None] * b_hv + b_s[:, None] * as_vector(b_v)[None, :])
    for i_g in range(G):
        query = row * G + i_g
        b_q = tl.load(q + query * K + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)
        b_p = tl.where(m_m, scale * tl.sum(b_hk * as_vector(b_q)[:, None], 0), -float("inf"))
        b_p = tl.exp(b_p - tl.max(b_p, 0))
        b_p /= tl.sum(b_p, 0)
        tl.store(o + query * V + o_v, tl.sum(b_hv * b_p[:, None], 0).to(o.dtype.element_ty), mask=m_v)
    if WANTS_FINAL:
        tl.store(final_hk + row * K * M + o_hk, b_hk, mask=m_own)
        tl.store(final_hv + row * M * V + o_hv, b_hv, mask=m_hv)


@triton.jit
def turn_steps(turn, U: tl.constexpr):
    """Return what takes a state over a turn of (s, g, y): each token's e^g [1, BM]; e^g of all as high and low [BM];
    s times e^g of the turn's later tokens [BM], and y [BD]."""
    decays, writes, columns = (), (), ()
    total, later = 0.0, 1.0
    for n in tl.static_range(U - 1, -1, -1):
        b_s, b_g, b_y = turn[n]
        decays = (tl.exp(b_g),) + decays
        writes = (as_vector(b_s * later),) + writes
        columns = (as_vector(b_y),) + columns
        later *= decays[0]
        total += b_g
    high, low = split_decay(total)
    return decays, as_vector(high), as_vector(low), writes, columns


@triton.jit
def added_by(rows, columns, low, b_S):
    """Return diag(low) S + sum_n rows_n columns_n^T: low S alone would be rounded away."""
    added = low[:, None] * b_S
    for n in tl.static_range(len(rows)):
        added += rows[n][:, None] * columns[n][None, :]
    return added


@triton.jit
def inner_products(turn, queries, decays, SLOTS: tl.constexpr, U: tl.constexpr, G: tl.constexpr):
    """Return, for tokens i <= n of a turn and each query of n, s_i^T diag(e^{g_{i+1} + ... + g_n}) x_n (SLOTS) or
    y_i^T z_n, and 0 for other i: U U G numbers."""
    products = ()
    for i in tl.static_range(U):
        b_row = turn[i][0 if SLOTS else 2]
        for n in tl.static_range(U):
            if SLOTS and n > i:
                b_row *= decays[n]
            for i_g in tl.static_range(G):
                b_query = queries[i_g * U + n][0 if SLOTS else len(queries[0]) - 1]
                products += (b_row * b_query if n >= i else tl.zeros_like(b_row),)
    return sums_together(products)


@triton.jit
def slots_read(b_x, turn, decays, y_z, n, i_g, U: tl.constexpr, G: tl.constexpr):
    """Return S z, token n's read of its state, from the read [BM] of the state before the turn."""
    b_x = b_x[None, :]
    for i in tl.static_range(n + 1):
        b_x = decays[i] * b_x + turn[i][0] * y_z[(i * U + n) * G + i_g]
    return b_x


@triton.jit
def columns_read(b_z, turn, s_x, n, i_g, U: tl.constexpr, G: tl.constexpr):
    """Return S^T x likewise, from the read [BD] with x times e^g of the turn's tokens up to n."""
    b_z = b_z[:, None]
    for i in tl.static_range(n + 1):
        b_z += turn[i][2] * s_x[(i * U + n) * G + i_g]
    return b_z


@kernel
def pass_kernel(
    x, y, z, s, g, initial_state, out, states, final_state, scale, cu_seqlens, checkpoints_before, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, WANTS_FINAL: tl.constexpr,
    KEEP: tl.constexpr, PACKED: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Compute one pass, S <- diag(e^{g_t}) S + s_t y_t^T and its reads. FIRST: S = hk^T, y = k, z = q; out, scale S z,
    is the scores. The second: S = hv, y = v, x = p; out, S^T x, is o. In registers: S [BM, BD].

    Programs of the first pass have some of the slots, those of the second some of D, so that no sum is over programs.
    LONG sums S with compensation (Kahan). The softmax exponentiates the scores: without decay, the rounding error of
    4096 additions is 1e-3 of a score of thousands, and changes its weight as much. KEEP: store S every C tokens.

    x [B, T, H G, M], y [B, T, H, D], z [B, T, H G, D], s, g [B, T, H, M], out [B, T, H G, M] (first) or [B, T, H G, D]
    initial_state, final_state [N, H, M, D], states [checkpoints, H, M, D]; first pass: [..., D, M]
    cu_seqlens, checkpoints_before [N + 1]
    """
    BLOCKS: tl.constexpr = (M + BM - 1) // BM if FIRST else (D + BD - 1) // BD
    i_b, i_nh = program(BLOCKS)
    i_n, i_h = i_nh // H, i_nh % H
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    if FIRST:
        o_m += i_b * BM
    else:
        o_d += i_b * BD
    m_m, m_d = o_m < M, o_d < D
    o_s = o_m[:, None] + o_d[None, :] * M if FIRST else o_m[:, None] * D + o_d[None, :]
    m_s = m_m[:, None] & m_d[None, :]
    start, end, first = locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C, PACKED)

    b_S = tl.zeros([BM, BD], dtype=tl.float32)
    if HAS_INITIAL:
        b_S += tl.load(initial_state + i_nh.to(tl.int64) * M * D + o_s, mask=m_s, other=0.0)
    elif KEEP:
        b_S = relayout(states + (first * H + i_h) * M * D + o_s, b_S, m_s)
    elif WANTS_FINAL:
        b_S = relayout(final_state + i_nh.to(tl.int64) * M * D + o_s, b_S, m_s)
    else:
        b_S = zeros_as_stored(out, i_nh.to(tl.int64) * M * D + o_s, m_s, T)
    b_lost = tl.zeros_like(b_S)
    length = (end - start).to(tl.int32)
    keys, values = ((), (z,)) if FIRST else ((x,), ())
    ahead = load_turn((s, g), (y,), start, 0, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U)
    next_queries = load_turn(keys, values, start, 0, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U, G)
    for begin in range(0, length, U):
        if KEEP:
            if begin % C == 0:
                tl.store(states + ((first + begin // C) * H + i_h) * M * D + o_s, b_S, mask=m_s)
        turn, queries = arrived_turn(ahead), arrived_turn(next_queries)
        ahead = load_turn((s, g), (y,), start, begin + U, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U)
        next_queries = load_turn(keys, values, start, begin + U, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U, G)
        decays, high, low, writes, columns = turn_steps(turn, U)
        inner = inner_products(turn, queries, decays, not FIRST, U, G)
        earlier, row = 1.0, (start + begin) * H + i_h
        for n in tl.static_range(U):
            earlier *= decays[n]
            for i_g in tl.static_range(G):
                query, later, within = (row * G + i_g), n * H * G, begin + n < length
                b_q = queries[i_g * U + n][0]
                if FIRST:
                    b_o = slots_read(row_sums(b_S * as_vector(b_q)[None, :]), turn, decays, inner, n, i_g, U, G)
                    tl.store(out + query * M + o_m[None, :] + later * M, scale * b_o, mask=m_m[None, :] & within)
                else:
                    b_o = row_sums(tl.trans(b_S * as_vector(b_q * earlier)[:, None]))  # of four columns a thread
                    b_o = columns_read(b_o, turn, inner, n, i_g, U, G)
                    b_o = b_o.to(out.dtype.element_ty)
                    tl.store(out + query * D + o_d[:, None] + later * D, b_o, mask=m_d[:, None] & within)
        b_added = added_by(writes, columns, low, b_S)
        if LONG:
            b_added += high[:, None] * b_lost
            b_sum = high[:, None] * b_S + b_added
            b_lost = (high[:, None] * b_S - b_sum) + b_added
            b_S = b_sum
        else:
            b_S = high[:, None] * b_S + b_added
    if WANTS_FINAL:
        tl.store(final_state + i_nh.to(tl.int64) * M * D + o_s, b_S, mask=m_s)


@kernel
def pass_grads_kernel(
    x, y, z, s, g, states, dfinal_state, scratch, dx, dy, dz, ds, dg, dinitial_state,
    cu_seqlens, checkpoints_before, T, tokens, N,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, FIRST: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one pass, from the last token on. In registers: S and its gradient [BM, BD].

    The first pass computes dz (dq), the second dx (dp). Stored states of the first pass have the slots as columns.
    Every element of a state has a recurrence of its own, so blocks are cut along the slots and along D.

    x [B, T, H G, M], z [B, T, H G, D], y [B, T, H, D], s, g [B, T, H, M], tokens = B T
    dx [ND, B, T, H G, M], ds, dg [ND, B, T, H, M]: partial sums, one for each block of D
    dz [NM, B, T, H G, D], dy [NM, B, T, H, D]: one for each block of slots
    states [checkpoints, H, M, D], dfinal_state, dinitial_state [N, H, M, D]; FIRST: [..., D, M]
    scratch [ND NM, N, H, C // U, BD, BM]: S^T before each turn of U tokens; cu_seqlens, checkpoints_before [N + 1]
    """
    NM: tl.constexpr = (M + BM - 1) // BM
    ND: tl.constexpr = (D + BD - 1) // BD
    i_b, i_nh = program(NM * ND)
    i_m, i_d = i_b % NM, i_b // NM
    i_n, i_h = i_nh // H, i_nh % H
    o_m, o_d = i_m * BM + tl.arange(0, BM), i_d * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    o_s = o_m[:, None] + o_d[None, :] * M if FIRST else o_m[:, None] * D + o_d[None, :]
    m_s = m_m[:, None] & m_d[None, :]
    start, end, first = locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C, PACKED)
    p_scratch = scratch + (i_b * N * H + i_nh).to(tl.int64) * (C // U) * BM * BD
    p_scratch += tl.arange(0, BM)[:, None] + tl.arange(0, BD)[None, :] * BM
    share_m, share_d = i_d.to(tl.int64) * tokens * H, i_m.to(tl.int64) * tokens * H

    b_D = tl.zeros([BM, BD], dtype=tl.float32)
    if HAS_FINAL:
        b_D += tl.load(dfinal_state + i_nh.to(tl.int64) * M * D + o_s, mask=m_s, other=0.0)
    b_D = relayout(p_scratch, b_D, True)
    segments = tl.cdiv(end - start, C).to(tl.int32)
    for j in range(0, segments):
        i_c = segments - 1 - j
        begin = start + tl.cast(i_c, tl.int64) * C
        length = tl.minimum(end - begin, C).to(tl.int32)
        turns = tl.cdiv(length, U)
        written = load_turn((s, g), (y,), begin, 0, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U)
        t = (turns - 1) * U
        ahead = load_turn((s, g), (y,), begin, t, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U)
        next_queries = load_turn((x,), (z,), begin, t, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U, G)
        b_S = tl.load(states + ((first + i_c) * H + i_h) * M * D + o_s, mask=m_s, other=0.0)
        b_S = relayout(p_scratch, b_S, True)
        for i_t in range(1, turns):
            turn = arrived_turn(written)
            written = load_turn((s, g), (y,), begin, i_t * U, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U)
            _, high, low, writes, columns = turn_steps(turn, U)
            b_S = high[:, None] * b_S + added_by(writes, columns, low, b_S)
            tl.store(p_scratch + i_t * BM * BD, b_S)
        tl.debug_barrier()
        for back in range(0, turns):
            i_t = turns - 1 - back
            turn, queries = arrived_turn(ahead), arrived_turn(next_queries)
            t = (i_t - 1) * U
            ahead = load_turn((s, g), (y,), begin, t, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U)
            next_queries = load_turn((x,), (z,), begin, t, length, i_h, o_m, m_m, o_d, m_d, H, M, D, U, G)
            decays, high, low, writes, columns = turn_steps(turn, U)
            y_z = inner_products(turn, queries, decays, False, U, G)
            s_x = inner_products(turn, queries, decays, True, U, G)
            row = (begin + i_t * U) * H + i_h
            at_m, at_d = (share_m + row) * M + o_m[None, :], (share_d + row) * D + o_d[:, None]
            at_x = (share_m + row) * G * M + o_m[None, :]
            at_z = (share_d + row) * G * D + o_d[:, None]
            # First all that reads S, so that the next one can load into its registers.
            S_D = row_sums(b_S * b_D)[None, :]
            reads, targets, from_S = (), (), ()
            earlier = 1.0
            for n in tl.static_range(U):
                earlier *= decays[n]
                for i_g in tl.static_range(G):
                    b_x, b_z = queries[i_g * U + n]
                    reads += (as_vector(b_x * earlier),)
                    targets += (as_vector(b_z),)
                    b_dx = row_sums(b_S * targets[n * G + i_g][None, :])
                    from_S += (b_dx[None, :],)
                    within = i_t * U + n < length
                    if FIRST:
                        b_dz = column_sums(b_S * reads[n * G + i_g][:, None])
                        b_dz = columns_read(b_dz, turn, s_x, n, i_g, U, G).to(dz.dtype.element_ty)
                        tl.store(dz + at_z + (n * H * G + i_g) * D, b_dz, mask=m_d[:, None] & within)
                    else:
                        b_dx = slots_read(b_dx, turn, decays, y_z, n, i_g, U, G)
                        tl.store(dx + at_x + (n * H * G + i_g) * M, b_dx, mask=m_m[None, :] & within)
            b_S = tl.load(p_scratch + tl.maximum(i_t - 1, 0) * BM * BD)
            from_D = ()
            for n in tl.static_range(U):
                from_D += (row_sums(b_D * columns[n][None, :])[None, :],)
            # From here on at token n: S before the turn times D, summed over columns; D times y of each token up to n.
            for n in tl.static_range(U - 1, -1, -1):
                within = i_t * U + n < length
                later = decays[n + 1] if n + 1 < U else 1.0
                from_later, from_D = from_D, ()
                S_D *= later
                for i_g in tl.static_range(G):
                    S_D += queries[i_g * U + n][0] * from_S[n * G + i_g]
                for i in tl.static_range(n + 1):
                    b_ds = later * from_later[i]
                    for i_g in tl.static_range(G):
                        b_ds += queries[i_g * U + n][0] * y_z[(i * U + n) * G + i_g]
                    from_D += (b_ds,)
                b_dg = S_D
                for i in tl.static_range(n):  # S before token n
                    b_dg = decays[i] * b_dg + turn[i][0] * from_D[i]
                tl.store(ds + at_m + n * H * M, from_D[n], mask=m_m[None, :] & within)
                tl.store(dg + at_m + n * H * M, decays[n] * b_dg, mask=m_m[None, :] & within)
                b_dy = column_sums(b_D * writes[n][:, None])[:, None]
                for m in tl.static_range(n, U):
                    for i_g in tl.static_range(G):
                        b_dy += s_x[(n * U + m) * G + i_g] * queries[i_g * U + m][1]
                tl.store(dy + at_d + n * H * D, b_dy.to(dy.dtype.element_ty), mask=m_d[:, None] & within)
            b_D = high[:, None] * b_D + added_by(reads, targets, low, b_D)
        # The next segment overwrites the scratch buffer that this one still reads.
        tl.debug_barrier()
    tl.store(dinitial_state + i_nh.to(tl.int64) * M * D + o_s, b_D, mask=m_s)


@launched("rows")
def dscores_kernel(
    p, dp, dscores, scale, rows, M: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    """Compute dscores = scale p (dp - <p, dp>), ROWS rows a program, dp being the sum of partial ones.

    p, dscores [rows, M], dp [BLOCKS, rows, M]
    """
    o_r, o_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BM)
    o, m = o_r[:, None] * M + o_m[None, :], (o_r < rows)[:, None] & (o_m < M)[None, :]
    b_p = tl.load(p + o, mask=m, other=0.0)
    b_dp = tl.load(dp + o, mask=m, other=0.0)
    for i in range(1, BLOCKS):
        b_dp += tl.load(dp + tl.cast(rows, tl.int64) * M * i + o, mask=m, other=0.0)
    tl.store(dscores + o, scale * softmax_grads(b_p, b_dp, False), mask=m)


def saved_shapes(q, k, v, s, g, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: p, and hk and hv every CHECKPOINT tokens."""
    M, V = s.shape[-1], v.shape[-1]
    return (*q.shape[:3], M), checkpoints_shape(k, M, packing), checkpoints_shape(s, V, packing)


@lru_cache(1024)
def _blocks_and_options(launch: Launch, heads: int, K: int, V: int, M: int) -> tuple[dict, int, dict]:
    """Return BK (covering K), BV and BM (covering M), the number of blocks along V, and launch options. heads: N H."""
    BK, BV, BM = block(K, launch.BK), block(V, launch.BV), block(M, 128)
    while BV > 16 and -(-V // BV) * heads < FEW:
        BV //= 2
    warps = min(16, launch.num_warps * max(1, BK * BM // HK_ELEMENTS))
    blocks = dict(BK=BK, BV=BV, BM=BM)
    return blocks, -(-V // BV), dict(num_warps=warps, num_stages=launch.num_stages)


def forward(memory, q, k, v, s, g, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final (hk, hv) (None unless requested), and the tensors of `saved_shapes` (None unless `keep`)."""
    (B, T, H, K), V, M, HQ = k.shape, v.shape[-1], s.shape[-1], q.shape[2]
    N, offsets = sequences(s, packing)
    empty = q.new_empty(0, dtype=torch.float32).new_empty
    o = q.new_empty(B, T, HQ, V)
    final = (empty(N, H, K, M), empty(N, H, M, V)) if output_final_state else (None, None)
    initial = initial_state or (None, None)

    def flags():
        return dict(H=H, G=HQ // H, M=M, HAS_INITIAL=initial_state is not None, WANTS_FINAL=output_final_state)

    if T == 1 and packing is None and not keep:
        blocks, NV, options = _blocks_and_options(TABLE["gsa.recurrent", width(s.element_size())], N * H, K, V, M)
        memory.launch(
            token_kernel, NV * N * H, (q, k, v, s, g, *initial, o, *final, scale),
            lambda: dict(K=K, V=V, **blocks, **flags(), **options),
        )  # fmt: skip
        return o, final if output_final_state else None, None
    p, states_hk, states_hv = empty(B, T, HQ, M), None, None
    if keep:
        states_hk, states_hv = checkpoints(k, M, packing), checkpoints(s, V, packing)
        if packing is not None:
            packing.saved_rows.append(p)
    row = TABLE["gsa.recurrent_pass", width(s.element_size())]

    def constants(D, BM, BD):
        more = dict(C=CHECKPOINT, U=tokens_per_turn(T, HQ // H, TURN), KEEP=keep, PACKED=packing is not None, **flags())
        return more | dict(
            D=D, BM=BM, BD=BD, num_warps=row.num_warps * max(1, BM * BD // WARP), num_stages=row.num_stages,
        )  # fmt: skip

    memory.launch(
        pass_kernel, cdiv(M, row.BK) * N * H,
        (None, k, q, s, g, initial[0], p, states_hk, final[0], scale, *offsets, T),
        lambda: constants(K, row.BK, block(K, 512)), FIRST=True, LONG=T > 1 and k.dtype == torch.float32,
    )  # fmt: skip
    torch.softmax(p, -1, out=p)
    memory.launch(
        pass_kernel, cdiv(V, row.BV) * N * H,
        (p, v, None, s, g, initial[1], o, states_hv, final[1], scale, *offsets, T),
        lambda: constants(V, block(M, 128), row.BV), FIRST=False, LONG=False,
    )  # fmt: skip
    return o, final if output_final_state else None, (p, states_hk, states_hv) if keep else None


def backward(memory, q, k, v, s, g, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dq, dk, dv, ds and dg in their inputs' dtypes, and those of the initial (hk, hv) in float32."""
    (p, hk, hv), (dhk, dhv) = saved, dfinal_state or (None, None)
    (B, T, H, M), G = s.shape, q.shape[2] // s.shape[2]
    N, offsets = sequences(s, packing)
    row, U = TABLE["gsa.recurrent_grads", width(s.element_size())], tokens_per_turn(T, G, TURN)
    BM, BK, BV = block(M, row.BK), block(k.shape[-1], row.BV), block(v.shape[-1], row.BV)
    NM, NK, NV = cdiv(M, BM), cdiv(k.shape[-1], BK), cdiv(v.shape[-1], BV)
    empty = s.new_empty(0, dtype=torch.float32).new_empty

    def differentiate(x, y, z, dx, dy, dz, ds, dg, states, dfinal_state, BD):
        """Launch the first pass, with dz, or the second, with dx. Return dinitial_state."""
        D, dinitial_state = y.shape[-1], empty(N, *states.shape[1:])
        programs = NM * cdiv(D, BD) * N * H
        memory.launch(
            pass_grads_kernel, programs,
            (
                x, y, z, s, g, states, dfinal_state, empty(programs, CHECKPOINT // U, BD, BM), dx, dy, dz, ds, dg,
                dinitial_state, *offsets, T, B * T, N,
            ),
            lambda: dict(
                H=H, G=G, M=M, D=D, C=CHECKPOINT, U=U, BM=BM, BD=BD,
                HAS_FINAL=dfinal_state is not None, PACKED=packing is not None,
                num_warps=row.num_warps * max(1, BM // ROWS), num_stages=row.num_stages,
            ),
            FIRST=dx is None,
        )  # fmt: skip
        return dinitial_state

    ds, dg = (empty(NV + NK, *s.shape) for _ in range(2))  # partial sums of both passes
    dp, (dv,) = empty(NV, *p.shape), new_shares(NM, v)
    dhv = differentiate(p, v, do, dp, dv, None, ds, dg, hv, dhv, BV)
    (dv,) = sum_blocks(memory, NM, (dv,), v)
    dscores, rows, slots = torch.empty_like(p), p.numel() // M, block(M, 128)
    BR = 4096 // slots  # rows that 128 threads have in 32 registers
    memory.launch(
        dscores_kernel, cdiv(rows, BR), (p, dp, dscores, scale, rows),
        lambda: dict(M=M, BM=slots, BLOCKS=NV, ROWS=BR),
    )  # fmt: skip
    del dp
    (dq,), (dk,) = new_shares(NM, q), new_shares(NM, k)
    dhk = differentiate(dscores, k, q, None, dk, dq, ds[NV:], dg[NV:], hk, dhk, BK)
    ds, dg = sum_blocks(memory, NV + NK, (ds, dg), s, g)
    (dq,), (dk,) = sum_blocks(memory, NM, (dq,), q), sum_blocks(memory, NM, (dk,), k)
    return dq, dk, dv, ds, dg, (dhk, dhv)
