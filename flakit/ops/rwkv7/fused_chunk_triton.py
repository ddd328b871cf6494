"""RWKV7 in chunks of 16 tokens, a head's whole sequence in one program: one kernel forward, one backward.

What 16-bit heads of 33 to 64 channels take where batch times heads fill a GPU by themselves, or where chunks of 16 are
asked for; not packed ones. Nothing but the states and U goes through memory between the two kernels, and a decay, a
factor or a tile is made once for all that need it.

Two rows are made of every token and stacked: r's above a's, k's above b's, v's above v2's, do's above y's. So one
product gives all four score matrices of a chunk, and one all gradients of them. With reads R = [r*; a*], what they meet
E = [k*; b*], and their scores A, zero where E's token is later (a does not see its own token's, r does),

    v2 = U (A_ak v + a* S)         F = [v; v2]      o = r* S + A_r F        S <- E^T F + S      U = (I - A_ab)^{-1}
    y = U^T (A_rb^T do + b* D)     G = [do; y]      dv = k* D + A_k^T G     D <- R^T G + D
    dR = G S^T + P E               dE = F D^T + P^T R                       P = G F^T where A is not zero

There are two ways, compiled apart; which one the sequence of a head takes depends on its lowest decay.
- Mild, where no token decays more than `BLOCK_TOKEN`: decays are taken about the middle of the chunk, r* = scale r
  e^{upto - mid}, a* = a e^{before - mid}, k* = k e^{mid - upto}, b* likewise; S stands for e^{mid} S, and D for
  e^{rest} D, rest = total - mid. The decay's gradient is a difference of the same products.
- Any other: decays are taken from the chunk's ends, no factor is above 1, and scores are formed by dyadic levels: at
  each, rows of right halves are reads and rows of left halves keys, so that one product serves all four scores.

Operands are split into two bfloat16 numbers (`blocks_triton.split`), which leaves 2^-17 of them. The products are those
that every GPU since sm_80 has, none of Hopper's own.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_product,
    add_split_by_given,
    add_sums,
    add_whole_product,
    exp,
    level_pairs,
    split,
    sums,
)
from ..common.chunks_triton import (
    BLOCK,
    BLOCK_TOKEN,
    kept_state,
    load_decays,
    state_pointers,
    store_state,
)
from ..common.launch import ENOUGH, TABLE, cdiv
from .fused_mild_triton import mild_backward_kernel, mild_forward_kernel, scores_kernel

CHUNK = BLOCK.value
LEVELS = CHUNK.bit_length() - 1
CHANNELS = 64
"""Of every tile: what is narrower is padded."""
SCALES = tl.constexpr(CHANNELS + 1)
"""Powers of two that what is kept of a chunk and head is multiples of: v2's rows and the state, or the state's rows."""


@triton.jit
def _rows(start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Offsets and mask of a chunk's rows, twice, [2 C, BD]."""
    o_c, o_d = tl.arange(0, 2 * C) % C, tl.arange(0, BD)
    m = (o_c < end - start)[:, None] & (o_d < D)[None, :]
    return (start * H + i_h) * D + o_c[:, None] * (H * D) + o_d[None, :], m


@triton.jit
def _upper(C: tl.constexpr):
    """Which rows are the upper ones, [2 C, 1]."""
    return (tl.arange(0, 2 * C) < C)[:, None]


@triton.jit
def _ahead(C: tl.constexpr):
    """How many tokens a row is after a column, [2 C, 2 C]."""
    o_c = tl.arange(0, 2 * C) % C
    return o_c[:, None] - o_c[None, :]


@triton.jit
def _load_both(x, y, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Rows of x above the same of y, [2 C, BD], in float32."""
    o, m = _rows(start, end, i_h, H, D, C, BD)
    upper = _upper(C)
    if x.dtype == y.dtype:
        b_x = tl.load(tl.where(upper, x, y) + o, mask=m, other=0.0).to(tl.float32)
    else:
        b_x = tl.load(x + o, mask=m & upper, other=0.0).to(tl.float32)
        b_x += tl.load(y + o, mask=m & (upper == 0), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _load_upper(x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Rows of x above zeros, [2 C, BD], as they were given."""
    o, m = _rows(start, end, i_h, H, D, C, BD)
    return tl.load(x + o, mask=m & _upper(C), other=0.0)


@triton.jit
def _store_both(p, q, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """The upper half of x to p, the lower to q."""
    o, m = _rows(start, end, i_h, H, D, C, BD)
    upper = _upper(C)
    if p.dtype == q.dtype:
        tl.store(tl.where(upper, p, q) + o, x.to(p.dtype.element_ty), mask=m)
    else:
        tl.store(p + o, x.to(p.dtype.element_ty), mask=m & upper)
        tl.store(q + o, x.to(q.dtype.element_ty), mask=m & (upper == 0))


@triton.jit
def _store_upper(p, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    o, m = _rows(start, end, i_h, H, D, C, BD)
    tl.store(p + o, x.to(p.dtype.element_ty), mask=m & _upper(C))


@triton.jit
def _folded(x):
    """The upper half of x [2 C, D] and the lower, added."""
    return tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0)


@triton.jit
def _row(x, row: tl.constexpr):
    """Row `row` of x [2 C, D], as [D]."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == row)[:, None], x, 0.0), 0)


@triton.jit
def _product(a_high, a_low, b_high, b_low):
    return add_product(tl.zeros([a_high.shape[0], b_high.shape[1]], dtype=tl.float32), a_high, a_low, b_high, b_low)


@triton.jit
def _add_written(b_S, x_high, x_low, y_high, y_low):
    """b_S + x^T y, [BK, BV], of split operands [2 C, ...].

    In four bands of rows, a warp's each: as one product of 64 rows it would be Hopper's own instruction, and as Triton
    3.6 compiles that here, what it adds up is wrong where the state starts from zeros, from the second chunk on.
    """
    N: tl.constexpr = b_S.shape[0] // 4
    C: tl.constexpr = x_high.shape[0]
    x_high, x_low = tl.reshape(tl.trans(x_high), (4, N, C)), tl.reshape(tl.trans(x_low), (4, N, C))
    y_high = tl.broadcast_to(y_high[None, :, :], (4, C, b_S.shape[1]))
    y_low = tl.broadcast_to(y_low[None, :, :], (4, C, b_S.shape[1]))
    b_S = add_product(tl.reshape(b_S, (4, N, b_S.shape[1])), x_high, x_low, y_high, y_low)
    return tl.reshape(b_S, (4 * N, b_S.shape[2]))


@triton.jit
def _inverse(b_A, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I - A)^{-1} of A's blocks of 2^LEVELS rows, strictly lower triangular, [C, C]: at each level the lower left
    blocks join two inverses."""
    o_c = tl.arange(0, C)
    b_U = tl.where(o_c[:, None] == o_c[None, :], 1.0, tl.where(level_pairs(1, C), b_A, 0.0))
    for level in tl.static_range(1, LEVELS):
        A_high, A_low = split(tl.where(level_pairs(1 << level, C), b_A, 0.0))
        U_high, U_low = split(b_U)
        x_high, x_low = split(_product(A_high, A_low, U_high, U_low))
        b_U = add_product(b_U, U_high, U_low, x_high, x_low)
    return b_U


@triton.jit
def _passed(C: tl.constexpr):
    """The decays that what a row reads of the entering state has passed, and what a row's key writes will have in the
    leaving one, [2 C, C] each: r's its own token's too, a's and a key's not."""
    o_r, o_c = tl.arange(0, 2 * C), tl.arange(0, C)
    ahead = (o_r % C)[:, None] - o_c[None, :]
    return tl.where(_upper(C), ahead >= 0, ahead > 0), ahead < 0


@triton.jit
def _factors(b_w, C: tl.constexpr, MILD: tl.constexpr):
    """Log decays of reads and of keys, [2 C, BK] each. MILD: counted from the middle of the chunk."""
    reads, keys = _passed(C)
    if MILD:
        half = (tl.arange(0, C) < C // 2)[None, :].to(tl.float32)
        read, key = sums(reads.to(tl.float32) - half, b_w), sums(keys.to(tl.float32) + half - 1.0, b_w)
    else:
        read, key = sums(reads, b_w), sums(keys, b_w)
    return read, key


@triton.jit
def _level(level, b_w, b_reads, b_keys, C: tl.constexpr):
    """Of each row at a dyadic level: the decays between it and its half's boundary [2 C, C] and their product
    [2 C, BK], what the row is, read or key [2 C, BK], which rows it meets [2 C, 2 C], and whether it is a read."""
    o_r = tl.arange(0, 2 * C)
    o_i = o_r % C + (level >> 8)  # as in `halves`: masks that are known before the loop would lie in registers
    size = o_i * 0 + (1 << level)
    is_read, first = ((o_i & size) != 0)[:, None], (o_i & -size)[:, None]
    o_c = tl.arange(0, C)[None, :]
    upto = o_i[:, None] + (o_r < C)[:, None].to(tl.int32)
    passed = tl.where(is_read, (o_c >= first) & (o_c < upto), (o_c > o_i[:, None]) & (o_c < first + size[:, None]))
    meet = ((o_i[:, None] ^ o_i[None, :]) >> level) == 1
    return passed, exp(sums(passed, b_w)), tl.where(is_read, b_reads, b_keys), meet, is_read


@triton.jit
def _any_scores(b_reads, b_keys, b_w, C: tl.constexpr, LEVELS: tl.constexpr):
    """The scores for any decay, [2 C, 2 C]. b_reads, b_keys: without decay."""
    x_high, x_low = split(b_reads)
    y_high, y_low = split(b_keys)
    b_A = tl.where((_ahead(C) == 0) & _upper(C), _product(x_high, x_low, tl.trans(y_high), tl.trans(y_low)), 0.0)
    for level in range(LEVELS):
        _, weight, x, meet, _ = _level(level, b_w, b_reads, b_keys, C)
        high, low = split(x * weight)
        b_A += tl.where(meet & (_ahead(C) > 0), _product(high, low, tl.trans(high), tl.trans(low)), 0.0)
    return b_A


@triton.jit
def _any_grads(b_reads, b_keys, b_w, b_P, b_dw, C: tl.constexpr, LEVELS: tl.constexpr):
    """What the scores' P makes of the gradients of reads and keys, and adds to b_dw. Nothing is subtracted."""
    high, low = split(tl.where((_ahead(C) == 0) & _upper(C), b_P, 0.0))
    x_high, x_low = split(b_keys)
    d_reads = _product(high, low, x_high, x_low)
    x_high, x_low = split(b_reads)
    d_keys = _product(tl.trans(high), tl.trans(low), x_high, x_low)
    b_P = tl.where(_ahead(C) > 0, b_P, 0.0)
    b_P += tl.trans(b_P)
    for level in range(LEVELS):
        passed, weight, x, meet, is_read = _level(level, b_w, b_reads, b_keys, C)
        high, low = split(tl.where(meet, b_P, 0.0))
        x_high, x_low = split(x * weight)
        grad = _product(high, low, x_high, x_low) * weight
        d_reads += tl.where(is_read, grad, 0.0)
        d_keys += tl.where(is_read, 0.0, grad)
        b_dw = add_sums(b_dw, tl.trans(passed), grad * x, False)
    return d_reads, d_keys, b_dw


@triton.jit
def forward_kernel(
    r, w, k, v, a, b, o, states, found, scales, inverse, mild, first, last, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, KEEP: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr,
):  # fmt: skip
    """o, chunk after chunk; to KEEP, the state that enters each (about its middle) and its U. In registers: S [BK, BV].

    The mild way goes first, through everything, and leaves a flag where it was not the right one: there the other way
    writes all of it again. From one chunk's middle to the next it is one factor, of which `passing` is yet to come.
    """
    i_nh = tl.program_id(0)
    if not MILD:
        if tl.load(mild + i_nh) != 0:
            return
    i_n, i_h = i_nh // H, i_nh % H
    chunks = tl.cdiv(T, C)
    begin = i_n.to(tl.int64) * T
    end = begin + T
    o_r = tl.arange(0, 2 * C)
    upper = _upper(C)
    seen = (_ahead(C) > 0) | ((_ahead(C) == 0) & upper)
    solved = (o_r >= C)[:, None] & (o_r >= C)[None, :]
    o_u = tl.where(o_r < C, 0, o_r - C)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(first, i_nh, 0, 0, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    passing = tl.zeros([BK], dtype=tl.float32)
    lowest = tl.zeros([C, BK], dtype=tl.float32)
    for i_c in range(0, chunks):
        start = begin + i_c * C
        i = (i_n * chunks + i_c) * H + i_h
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
        b_reads = _load_both(r, a, start, end, i_h, H, K, C, BK) * tl.where(upper, scale, 1.0)
        b_keys = _load_both(k, b, start, end, i_h, H, K, C, BK)
        b_v = _load_upper(v, start, end, i_h, H, V, C, BV)
        if MILD:
            lowest = tl.minimum(lowest, b_w.to(tl.float32))
            b_w = tl.where(b_w <= BLOCK_TOKEN, 0.0, b_w).to(b_w.dtype)  # wrong, but finite, and written again
        read, key = _factors(b_w, C, MILD)
        # The first row of a's reads is what comes before the chunk's first token, the last of r's what comes after all.
        mid, rest = -_row(read, C), _row(read, C - 1)
        b_S *= exp(passing + mid)[:, None]
        if KEEP:
            store_state(states, scales + i.to(tl.int64) * (SCALES - K), i, b_S, 0, 0, K, V, BK, BV, True)
        r_high, r_low = split(b_reads * exp(read))
        k_high, k_low = split(b_keys * exp(key))
        if MILD:
            b_A = tl.where(seen, _product(r_high, r_low, tl.trans(k_high), tl.trans(k_low)), 0.0)
        else:
            b_A = _any_scores(b_reads, b_keys, b_w, C, LEVELS)
        A_high, A_low = split(b_A)
        b_U = _inverse(tl.where(solved, b_A, 0.0), 2 * C, LEVELS)
        if KEEP:
            tl.store(inverse + i.to(tl.int64) * 2 * C * C + o_u[:, None] * C + o_u[None, :], b_U, mask=solved)
        U_high, U_low = split(b_U)
        S_high, S_low = split(b_S)
        b_o = _product(r_high, r_low, S_high, S_low)
        b_x = add_split_by_given(b_o, A_high, A_low, b_v)
        x_high, x_low = split(tl.where(upper, b_v.to(tl.float32), b_x))
        f_high, f_low = split(_product(U_high, U_low, x_high, x_low))
        _store_upper(o, add_product(b_o, A_high, A_low, f_high, f_low), start, end, i_h, H, V, C, BV)
        if MILD:
            passing = rest
        else:
            b_S *= exp(rest)[:, None]
        b_S = _add_written(b_S, k_high, k_low, f_high, f_low)
    if MILD:
        tl.store(mild + i_nh, (tl.min(lowest) > BLOCK_TOKEN).to(tl.float32))
    if WANTS_LAST:
        b_S *= exp(passing)[:, None]
        p_S, m_S = state_pointers(last, i_nh, 0, 0, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@triton.jit
def backward_kernel(
    r, w, k, v, a, b, do, states, found, scales, inverse, mild, dr, dw, dk, dv, da, db, last, first, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """All gradients, chunk after chunk from the last. last: that of the final state; first: where the initial one's
    goes. In registers: D [BK, BV].

    With what the states make of dR and dE, G S^T and F D^T, and with what has passed t as in `_passed`,
    dw_t = e^{total} sum_v S D + sum_{i passed t} R_i (G S^T)_i + sum_{j passes t} E_j (F D^T)_j + the pairs' share,
    which in mild chunks is sum_{i passed t} R_i (P E)_i - sum_{j >= t} E_j (P^T R)_j.
    """
    i_nh = tl.program_id(0)
    if tl.load(mild + i_nh) != MILD:
        return
    i_n, i_h = i_nh // H, i_nh % H
    chunks = tl.cdiv(T, C)
    begin = i_n.to(tl.int64) * T
    end = begin + T
    o_r, o_c, o_k = tl.arange(0, 2 * C), tl.arange(0, C), tl.arange(0, BK)
    upper = _upper(C)
    seen = (_ahead(C) > 0) | ((_ahead(C) == 0) & upper)
    solved = (o_r >= C)[:, None] & (o_r >= C)[None, :]
    o_u = tl.where(o_r < C, 0, o_r - C)
    b_D = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_LAST:
        p_D, m_D = state_pointers(last, i_nh, 0, 0, K, V, BK, BV)
        b_D += tl.load(p_D, mask=m_D, other=0.0)
    passing = tl.zeros([BK], dtype=tl.float32)
    for j in range(0, chunks):
        i_c = chunks - 1 - j
        start = begin + i_c * C
        i = (i_n * chunks + i_c) * H + i_h
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
        by_scale = tl.where(upper, scale, 1.0)
        b_reads = _load_both(r, a, start, end, i_h, H, K, C, BK) * by_scale
        b_keys = _load_both(k, b, start, end, i_h, H, K, C, BK)
        b_v = _load_upper(v, start, end, i_h, H, V, C, BV)
        b_do = _load_upper(do, start, end, i_h, H, V, C, BV)
        b_S, unit = kept_state(states, scales + i.to(tl.int64) * (SCALES - K), i, True, 0, 0, K, V, BK, BV, True)
        b_S = b_S.to(tl.float32) * unit[:, None]
        b_U = tl.load(inverse + i.to(tl.int64) * 2 * C * C + o_u[:, None] * C + o_u[None, :], mask=solved, other=0.0)
        U_high, U_low = split(tl.where(upper & (o_r[:, None] == o_r[None, :]), 1.0, b_U))
        read, key = _factors(b_w, C, MILD)
        mid, rest = -_row(read, C), _row(read, C - 1)
        read, key = exp(read), exp(key)
        r_high, r_low = split(b_reads * read)
        k_high, k_low = split(b_keys * key)
        if MILD:
            b_A = tl.where(seen, _product(r_high, r_low, tl.trans(k_high), tl.trans(k_low)), 0.0)
            b_D *= exp(passing + rest)[:, None]
        else:
            b_A = _any_scores(b_reads, b_keys, b_w, C, LEVELS)
        A_high, A_low = split(b_A)
        S_high, S_low = split(b_S)
        D_high, D_low = split(b_D)
        b_SD = tl.sum(b_S * b_D, 1)

        b_x = add_split_by_given(_product(r_high, r_low, S_high, S_low), A_high, A_low, b_v)
        x_high, x_low = split(tl.where(upper, b_v.to(tl.float32), b_x))
        f_high, f_low = split(_product(U_high, U_low, x_high, x_low))
        b_x = add_split_by_given(_product(k_high, k_low, D_high, D_low), tl.trans(A_high), tl.trans(A_low), b_do)
        x_high, x_low = split(tl.where(upper, b_do.to(tl.float32), b_x))
        b_G = _product(tl.trans(U_high), tl.trans(U_low), x_high, x_low)
        g_high, g_low = split(b_G)
        x_high, x_low = split(tl.where(upper, 0.0, b_G))
        b_dv = add_product(b_x, tl.trans(A_high), tl.trans(A_low), x_high, x_low)
        _store_upper(dv, b_dv, start, end, i_h, H, V, C, BV)

        b_P = _product(g_high, g_low, tl.trans(f_high), tl.trans(f_low))
        x_reads = _product(g_high, g_low, tl.trans(S_high), tl.trans(S_low))
        x_keys = _product(f_high, f_low, tl.trans(D_high), tl.trans(D_low))
        b_dw = tl.zeros([C, BK], dtype=tl.float32)
        if MILD:
            P_high, P_low = split(tl.where(seen, b_P, 0.0))
            # The same products in both, of which a decay's gradient is the difference: nothing of them is left out.
            d_reads = add_whole_product(x_reads, P_high, P_low, k_high, k_low)
            d_keys = add_whole_product(tl.zeros_like(x_keys), tl.trans(P_high), tl.trans(P_low), r_high, r_low)
            of_reads = (r_high.to(tl.float32) + r_low.to(tl.float32)) * d_reads
            keys = k_high.to(tl.float32) + k_low.to(tl.float32)
            b_dw = add_sums(b_dw, o_c[:, None] <= o_c[None, :], _folded(of_reads - keys * d_keys), True)
            b_dw = add_sums(b_dw, o_c[:, None] > o_c[None, :], _folded(keys * x_keys), False)
            b_dw += b_SD[None, :] - _folded(tl.where(upper, 0.0, of_reads))  # a has not passed its own token's decay
            b_dw = tl.where((o_c == 0)[:, None] & (unit < 2.0**-118)[None, :], 0.0, b_dw)  # no state: as `is_zero`
            d_reads *= read
            d_keys = (d_keys + x_keys) * key
            passing = mid
        else:
            x_reads, x_keys = x_reads * read, x_keys * key
            passed_reads, passed_keys = _passed(C)
            b_dw = add_sums(b_dw, tl.trans(passed_reads), b_reads * x_reads, False)
            b_dw = add_sums(b_dw, tl.trans(passed_keys), b_keys * x_keys, False)
            d_reads, d_keys, b_dw = _any_grads(b_reads, b_keys, b_w, b_P, b_dw, C, LEVELS)
            d_reads += x_reads
            d_keys += x_keys
            b_dw += (b_SD * exp(rest))[None, :]
            b_D *= exp(rest)[:, None]
        _store_both(dr, da, d_reads * by_scale, start, end, i_h, H, K, C, BK)
        _store_both(dk, db, d_keys, start, end, i_h, H, K, C, BK)
        p_w = dw + (start * H + i_h) * K + o_c[:, None] * (H * K) + o_k[None, :]
        tl.store(p_w, b_dw.to(dw.dtype.element_ty), mask=(o_c < end - start)[:, None] & (o_k < K)[None, :])
        b_D = _add_written(b_D, r_high, r_low, g_high, g_low)
    b_D *= exp(passing)[:, None]
    p_D, m_D = state_pointers(first, i_nh, 0, 0, K, V, BK, BV)
    tl.store(p_D, b_D, mask=m_D)


def takes(r, v, cu_seqlens, chunk_size) -> bool:
    """Whether these kernels are the ones for a call: asked for with chunks of 16, or fastest by themselves."""
    B, _, H, K = r.shape
    fits = cu_seqlens is None and r.element_size() == 2 and 32 < K <= CHANNELS and 32 < v.shape[-1] <= CHANNELS
    return fits and (chunk_size == CHUNK or (not chunk_size and B * H >= ENOUGH // 4))


def kept_shapes(r, w, k, v, a, b, cu_seqlens, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Shapes of what `forward` keeps for `backward`: the state entering every chunk, 16-bit, two to a number; what its
    rows are multiples of; each chunk's scores or U; and which heads' sequences are mild."""
    (B, T, H, K), V = r.shape, v.shape[-1]
    chunks = B * cdiv(T, CHUNK)
    halves = chunks * H * (K + CHUNK) * V
    return (cdiv(halves, 2),), (chunks, H, SCALES.value), (chunks, H, 2, CHUNK, CHUNK), (B, H)


def _states_and_found(kept, r, v):
    """The states and v2's in a tensor that is kept."""
    (B, T, H, K), V = r.shape, v.shape[-1]
    halves = kept.view(torch.float16)
    return halves, halves[B * cdiv(T, CHUNK) * H * K * V :]


def _options(name, r, v):
    launch = TABLE[f"rwkv7.fused.{name}", "16-bit"]
    return dict(
        H=r.shape[2], K=r.shape[3], C=CHUNK, BK=CHANNELS,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip


def forward(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep):
    """o, the final state (None unless asked for), and as in `kept_shapes`."""
    (B, T, H, K), V = r.shape, v.shape[-1]
    shapes = kept_shapes(r, w, k, v, a, b, cu_seqlens, chunk_size)
    states, scales = (r.new_empty(shape if keep else (0,) * len(shape), dtype=torch.float32) for shape in shapes[:2])
    scores, mild = (r.new_empty(shape, dtype=torch.float32) for shape in shapes[2:])
    if (K + CHUNK) * V * scales.shape[0] * H % 2:
        states[-1:] = 0  # half of it is written, and no output may be left to chance
    o, final_state = torch.empty_like(v), scales.new_empty(B, H, K, V) if output_final_state else None
    written = (*_states_and_found(states, r, v), scales, scores, mild)
    given = r, w, k, v, a, b, o, *written, initial_state, final_state, scale, T
    switches = dict(V=V, BV=CHANNELS, KEEP=keep, HAS_FIRST=initial_state is not None, WANTS_LAST=output_final_state)
    options = _options("scores", r, v)
    together = options["num_warps"]
    scores_kernel[(B * cdiv(T, CHUNK * together) * H,)](
        r, w, k, a, b, scores, scale, T, LEVELS=LEVELS, CHUNKS=together, **options
    )
    mild_forward_kernel[(B * H,)](*given, **switches, **_options("forward.mild", r, v))
    forward_kernel[(B * H,)](*given, LEVELS=LEVELS, MILD=0, **switches, **_options("forward.dyadic", r, v))
    return o, final_state, (states, scales, scores, mild)


def backward(r, w, k, v, a, b, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dr, dw, dk, dv, da, db in their inputs' dtypes and dinitial_state [N, H, K, V] in float32."""
    states, scales, scores, mild = kept
    (B, T, H, K), V = r.shape, v.shape[-1]
    dr, dw, dk, dv, da, db = (torch.empty_like(x) for x in (r, w, k, v, a, b))
    dinitial_state = scales.new_empty(B, H, K, V)
    read = (*_states_and_found(states, r, v), scales, scores, mild)
    given = r, w, k, v, a, b, do, *read, dr, dw, dk, dv, da, db, dfinal_state, dinitial_state, scale, T
    switches = dict(V=V, BV=CHANNELS, HAS_LAST=dfinal_state is not None)
    mild_backward_kernel[(B * H,)](*given, **switches, **_options("backward.mild", r, v))
    backward_kernel[(B * H,)](*given, LEVELS=LEVELS, MILD=0, **switches, **_options("backward.dyadic", r, v))
    return dr, dw, dk, dv, da, db, dinitial_state
