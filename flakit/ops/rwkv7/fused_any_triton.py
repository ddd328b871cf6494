"""RWKV7 in chunks of 16, any decay: for the chunks and heads that are not mild enough for `fused_chunk_triton`'s
products about a middle.

Two kernels, which do nothing about all others. Decays are taken from the chunk's ends, so that no factor is above 1,
and scores are formed by dyadic levels: at each, rows of right halves are reads and rows of left halves keys, so that
one product serves all four scores. Two rows are made of every token and stacked: r's above a's, k's above b's, v's
above v2's, do's above y's. Names are those of `fused_chunk_triton`.
"""

import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_product,
    add_split_by_given,
    add_sums,
    exp,
    level_pairs,
    split,
    sums,
)
from ..common.chunks_triton import load_decays, state_pointers


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
def _decays(b_w, C: tl.constexpr):
    """Log decays of reads from the chunk's beginning, and of keys to its end, [2 C, BK] each."""
    reads, keys = _passed(C)
    return sums(reads, b_w), sums(keys, b_w)


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
def any_scores_kernel(
    r, w, k, a, b, scores, mild_chunks, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """As `scores_kernel`, of those of CHUNKS chunks of a head that are not mild."""
    i_g, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    chunks = tl.cdiv(T, C)
    groups = tl.cdiv(chunks, CHUNKS)
    i_n, first = i_g // groups, i_g % groups * CHUNKS
    o_n = tl.arange(0, CHUNKS)
    flags = mild_chunks + (i_n * chunks + first + o_n) * H + i_h
    if tl.min(tl.load(flags, mask=first + o_n < chunks, other=1), 0) == 1:
        return
    o_r = tl.arange(0, 2 * C)
    i, j = (o_r % C)[:, None], (o_r % C)[None, :]
    upper, left = _upper(C), (o_r < C)[None, :]
    solved = (upper == 0) & (left == 0)
    for n in tl.range(0, CHUNKS, disable_licm=True):
        i_c = first + n
        at = (i_n * chunks + i_c) * H + i_h
        if tl.load(mild_chunks + at, mask=i_c < chunks, other=1) == 0:
            start = i_n.to(tl.int64) * T + i_c * C
            end = (i_n + 1).to(tl.int64) * T
            b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
            b_reads = _load_both(r, a, start, end, i_h, H, K, C, BK) * tl.where(upper, scale, 1.0)
            b_keys = _load_both(k, b, start, end, i_h, H, K, C, BK)
            b_A = _any_scores(b_reads, b_keys, b_w, C, LEVELS)
            b_U = _inverse(tl.where(solved, b_A, 0.0), 2 * C, LEVELS)
            A_high, A_low = split(tl.where(upper & (left == 0), b_A, 0.0))
            U_high, U_low = split(b_U)
            b_N = _product(A_high, A_low, U_high, U_low)
            # As `_load_scores` expects them: r's reads turned, on and above the diagonal, a's below it.
            p = scores + at.to(tl.int64) * (2 * C * C) + tl.where(upper, j * C + i, i * C + j)
            m = tl.where(upper, i >= j, i > j)
            tl.store(p, b_A, mask=m & left)
            tl.store(p + C * C, tl.where(upper, b_N, b_U), mask=m & (left == 0))


@triton.jit
def any_backward_kernel(
    r, w, k, v, a, b, do, states, found, units, scores, mild, dr, dw, dk, dv, da, db, last, first, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """As `mild_backward_kernel`, of heads of which some token is not mild.

    With what the states make of dR and dE, G S^T and F D^T, and with what has passed t as in `_passed`,
    dw_t = e^{total} sum_v S D + sum_{i passed t} R_i (G S^T)_i + sum_{j passes t} E_j (F D^T)_j + the pairs' share.
    """
    i_nh = tl.program_id(0)
    if tl.load(mild + i_nh) != 0:
        return
    i_n, i_h = i_nh // H, i_nh % H
    chunks = tl.cdiv(T, C)
    begin = i_n.to(tl.int64) * T
    end = begin + T
    o_r, o_c, o_k, o_v = tl.arange(0, 2 * C), tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    upper = _upper(C)
    solved = (o_r >= C)[:, None] & (o_r >= C)[None, :]
    o_u = tl.where(o_r < C, 0, o_r - C)
    b_D = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_LAST:
        p_D, m_D = state_pointers(last, i_nh, 0, 0, K, V, BK, BV)
        b_D += tl.load(p_D, mask=m_D, other=0.0)
    for n in range(0, chunks):
        i_c = chunks - 1 - n
        start = begin + i_c * C
        i = (i_n * chunks + i_c) * H + i_h
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
        by_scale = tl.where(upper, scale, 1.0)
        b_reads = _load_both(r, a, start, end, i_h, H, K, C, BK) * by_scale
        b_keys = _load_both(k, b, start, end, i_h, H, K, C, BK)
        b_do = _load_upper(do, start, end, i_h, H, V, C, BV)
        # F: v's rows above v2's.
        unit = units + i.to(tl.int64) * (BV + 1)
        p_f = found + i.to(tl.int64) * C * V + (o_r % C)[:, None] * V + o_v[None, :]
        b_F = tl.load(p_f, mask=(upper == 0) & (o_v < V)[None, :], other=0.0).to(tl.float32)
        b_F = b_F * tl.load(unit + o_v)[None, :] + _load_upper(v, start, end, i_h, H, V, C, BV).to(tl.float32)
        f_high, f_low = split(b_F)
        p_S = states + i.to(tl.int64) * K * V + o_k[:, None] + o_v[None, :] * K
        b_S = tl.load(p_S, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0).to(tl.float32)
        b_S *= tl.load(unit + BV)
        p_U = scores + i.to(tl.int64) * 2 * C * C + C * C + o_u[:, None] * C + o_u[None, :]
        b_U = tl.load(p_U, mask=solved & (o_r[:, None] > o_r[None, :]), other=0.0)
        U_high, U_low = split(tl.where(o_r[:, None] == o_r[None, :], 1.0, b_U))
        read, key = _decays(b_w, C)
        rest = _row(read, C - 1)
        read, key = exp(read), exp(key)
        r_high, r_low = split(b_reads * read)
        k_high, k_low = split(b_keys * key)
        A_high, A_low = split(_any_scores(b_reads, b_keys, b_w, C, LEVELS))
        S_high, S_low = split(b_S)
        D_high, D_low = split(b_D)
        b_SD = tl.sum(b_S * b_D, 1)

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
    p_D, m_D = state_pointers(first, i_nh, 0, 0, K, V, BK, BV)
    tl.store(p_D, b_D, mask=m_D)
