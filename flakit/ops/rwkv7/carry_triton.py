"""The affine map of each part of a sequence on its state, and the state entering each part: for `fused_chunk_triton`,
which explains the symbols.

A part maps a state S to M S + N. `carry_kernel` computes both in one walk: M from the identity without v, N from zeros,
or in the first part from the initial state; `carry_grads_kernel` computes the counterpart of N for D. From these
`entering_kernel` computes the state entering each part.
"""

import triton
import triton.language as tl

from ..common.bands_triton import (
    bands,
    clamped_decay,
    column,
    decays_to_ends,
    flat,
    load_pair,
    load_transposed,
    narrow_product,
    per_band,
    sides,
)
from ..common.blocks_triton import (
    add_input_by_split,
    add_product,
    exp,
    kernel,
    split,
    sums_along,
)
from ..common.positions_triton import locate_program, pieces_of
from ..common.tiles_triton import state_pointers


@triton.jit
def decays_from_ends(b_w, C: tl.constexpr):
    """Return the log decays of reads r and a, side by side, from the chunk's beginning, and of keys to its end,
    [4, N, 2 C] each."""
    o_c, o_r = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)
    i = (o_r % C)[None, :]
    return sums_along(b_w, per_band(o_c < i + (o_r < C)[None, :])), sums_along(b_w, per_band(o_c > i))


@kernel
def carry_kernel(
    w, k, v, a, b, scores, first, products, written,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_FIRST: tl.constexpr, ALL_PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute M and N of each part: its results for the identity without v, and for zeros, or in the first part for the
    initial state. ALL_PARTS: of the last part too. In registers: both, transposed, and the next chunk's rows, while
    they load.

    w, k, a, b [B, T, H, K], v [B, T, H, V], scores [chunks, H, 2, C, C] (see `fused_chunk_triton.scores_kernel`)
    first [N, H, K, V], products [parts, H, K, K], written [parts, H, K, V]
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    if not ALL_PARTS:
        count = tl.where(is_last, 0, count)  # unused, but saved tensors must not be uninitialized
    i, j = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None]
    below, eye = i > j, tl.where(i == j, 1.0, 0.0)
    o_k = tl.arange(0, BK)
    b_M = bands(tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0))
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(first, i_n * H + i_h, 0, 0, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S & is_first, other=0.0)
    b_S = bands(tl.trans(b_S))
    p_A = scores + (first_chunk * H + i_h).to(tl.int64) * (2 * C * C) + i * C + j
    w_next = load_transposed(w, begin, end, i_h, H, K, C, BK)
    x_next = load_pair(a, b, begin, end, i_h, H, K, C, BK)
    k_next = load_transposed(k, begin, end, i_h, H, K, C, BK)
    v_next = load_transposed(v, begin, end, i_h, H, V, C, BV)
    A_next = tl.load(p_A, mask=below & (count > 0), other=0.0)
    U_next = tl.load(p_A + C * C, mask=below & (count > 0), other=0.0)
    for n in range(0, count):
        start = begin + (n + 1) * C
        more = n + 1 < count
        stop = tl.where(more, end, start)
        b_w, b_x, b_k, b_v, b_A, b_U = w_next, x_next, k_next, bands(v_next), A_next, U_next
        p_A += H * 2 * C * C
        w_next = load_transposed(w, start, stop, i_h, H, K, C, BK)
        x_next = load_pair(a, b, start, stop, i_h, H, K, C, BK)
        k_next = load_transposed(k, start, stop, i_h, H, K, C, BK)
        v_next = load_transposed(v, start, stop, i_h, H, V, C, BV)
        A_next = tl.load(p_A, mask=below & more, other=0.0)
        U_next = tl.load(p_A + C * C, mask=below & more, other=0.0)
        decays, total = decays_to_ends(bands(clamped_decay(b_w)), C)
        decays = exp(decays)
        x_high, x_low = split(bands(b_x).to(tl.float32) * decays)
        k_high, k_low = split(bands(b_k).to(tl.float32) * sides(decays)[1])
        a_high, b_high = sides(x_high)
        a_low, b_low = sides(x_low)
        a_high, a_low, b_high, b_low = flat(a_high), flat(a_low), tl.trans(flat(b_high)), tl.trans(flat(b_low))
        A_high, A_low = split(b_A)
        U_high, U_low = split(b_U + eye)
        total = exp(total)[None, None, :]
        high, low = split(b_M)
        f_high, f_low = split(narrow_product(high, low, per_band(a_high), per_band(a_low)))
        f_high, f_low = split(narrow_product(f_high, f_low, per_band(U_high), per_band(U_low)))
        b_M = add_product(b_M * total, f_high, f_low, per_band(b_high), per_band(b_low))
        high, low = split(b_S)
        b_f = narrow_product(high, low, per_band(a_high), per_band(a_low))
        f_high, f_low = split(add_input_by_split(b_f, b_v, per_band(A_high), per_band(A_low)))
        f_high, f_low = split(narrow_product(f_high, f_low, per_band(U_high), per_band(U_low)))
        b_S = add_product(b_S * total, f_high, f_low, per_band(b_high), per_band(b_low))
        b_S = add_input_by_split(b_S, b_v, per_band(tl.trans(flat(k_high))), per_band(tl.trans(flat(k_low))))
    p_M, m_M = state_pointers(products, i_p * H + i_h, 0, 0, K, K, BK, BK)
    tl.store(p_M, tl.trans(flat(b_M)), mask=m_M)
    p_S, m_S = state_pointers(written, i_p * H + i_h, 0, 0, K, V, BK, BV)
    tl.store(p_S, tl.trans(flat(b_S)), mask=m_S)


@kernel
def carry_grads_kernel(
    r, w, a, b, do, scores, last, written, scale, T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_LAST: tl.constexpr, ALL_PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the state entering each part for a zero gradient of the state leaving it, or in the last
    part for the final state's. ALL_PARTS: of the first part too. In registers: D^T, and the previous chunk's rows,
    while they load.

    r, w, a, b [B, T, H, K], do [B, T, H, V], scores [chunks, H, 2, C, C]
    last [N, H, K, V], written [parts, H, K, V]
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    if not ALL_PARTS:
        if is_first:
            return
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    eye = tl.where(i == j, 1.0, 0.0)
    by_scale = tl.where(tl.arange(0, 2 * C) < C, scale, 1.0)[None, None, :]
    b_D = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_LAST:
        p_D, m_D = state_pointers(last, i_n * H + i_h, 0, 0, K, V, BK, BV)
        b_D += tl.load(p_D, mask=m_D & is_last, other=0.0)
    b_D = bands(tl.trans(b_D))
    start = begin + (count - 1) * C
    p_A = scores + ((first_chunk + count - 1) * H + i_h).to(tl.int64) * (2 * C * C) + C * C
    w_next = load_transposed(w, start, end, i_h, H, K, C, BK)
    R_next = load_pair(r, a, start, end, i_h, H, K, C, BK)
    b_next = load_transposed(b, start, end, i_h, H, K, C, BK)
    do_next = load_transposed(do, start, end, i_h, H, V, C, BV)
    N_next = tl.load(p_A + j * C + i, mask=(i >= j) & (count > 0), other=0.0)
    U_next = tl.load(p_A + i * C + j, mask=(i > j) & (count > 0), other=0.0)
    for n in range(0, count):
        b_w, b_R, b_b, b_do, b_N, b_U = w_next, R_next, b_next, bands(do_next), N_next, U_next
        more = n + 1 < count
        start -= C
        stop = tl.where(more, end, start)
        p_A -= H * 2 * C * C
        w_next = load_transposed(w, start, stop, i_h, H, K, C, BK)
        R_next = load_pair(r, a, start, stop, i_h, H, K, C, BK)
        b_next = load_transposed(b, start, stop, i_h, H, K, C, BK)
        do_next = load_transposed(do, start, stop, i_h, H, V, C, BV)
        N_next = tl.load(p_A + j * C + i, mask=(i >= j) & more, other=0.0)
        U_next = tl.load(p_A + i * C + j, mask=(i > j) & more, other=0.0)
        read, key = decays_from_ends(bands(clamped_decay(b_w)), C)
        total = column(read, C - 1)
        R_high, R_low = split(bands(b_R).to(tl.float32) * (exp(read) * by_scale))
        r_high, a_high = sides(R_high)
        r_low, a_low = sides(R_low)
        b_high, b_low = split(bands(b_b).to(tl.float32) * exp(sides(key)[0]))
        D_high, D_low = split(b_D)
        y_high, y_low = split(narrow_product(D_high, D_low, per_band(flat(b_high)), per_band(flat(b_low))))
        U_high, U_low = split(b_U + eye)
        N_high, N_low = split(b_N)
        b_y = narrow_product(y_high, y_low, per_band(U_high), per_band(U_low))
        b_y = add_input_by_split(b_y, b_do, per_band(N_high), per_band(N_low))
        y_high, y_low = split(b_y)
        b_D *= exp(total)[None, None, :]
        b_D = add_product(b_D, y_high, y_low, per_band(tl.trans(flat(a_high))), per_band(tl.trans(flat(a_low))))
        b_D = add_input_by_split(b_D, b_do, per_band(tl.trans(flat(r_high))), per_band(tl.trans(flat(r_low))))
    p_D, m_D = state_pointers(written, i_p * H + i_h, 0, 0, K, V, BK, BV)
    tl.store(p_D, tl.trans(flat(b_D)), mask=m_D)


@kernel
def entering_kernel(
    products, written, entering, first, parts, parts_before,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S <- product S + written, part by part, or REVERSE D <- product^T D + written from the last part; store what
    enters each. The first visited part has the initial value in `written` already. In registers: S or D.

    products [parts, H, K, K], written, entering [all parts, H, K, V], first [N, H, K, V]
    parts_before [N + 1], or None; parts: the number in each sequence unless packed
    """
    i_nh = tl.program_id(0)
    i_n, i_h = i_nh // H, i_nh % H
    first_part, parts = pieces_of(i_n, parts_before, parts, PACKED)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(first, i_nh, 0, 0, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    for n in range(0, parts):
        if REVERSE:
            i = (first_part + parts - 1 - n) * H + i_h
        else:
            i = (first_part + n) * H + i_h
        p_S, m_S = state_pointers(entering, i, 0, 0, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
        if n + 1 < parts:
            p_P, m_P = state_pointers(products, i, 0, 0, K, K, BK, BK)
            P_high, P_low = split(tl.load(p_P, mask=m_P & (n > 0), other=0.0))
            if REVERSE:
                P_high, P_low = tl.trans(P_high), tl.trans(P_low)
            S_high, S_low = split(b_S)
            p_W, m_W = state_pointers(written, i, 0, 0, K, V, BK, BV)
            b_S = add_product(tl.load(p_W, mask=m_W, other=0.0), P_high, P_low, S_high, S_low)
