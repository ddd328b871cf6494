"""The affine map of each part of a sequence on its state, and the state entering each part: for `fused_chunk_triton`,
which explains the symbols.

A part, some chunks that one program walks, maps a state S to M S + N. `carry_kernel` computes both: M by walking from
the identity with v = 0, N from zeros, or in the first part from the initial state; `carry_grads_kernel` computes the
counterpart of N for the gradient D. From these `entering_kernel` computes the state entering each part.
"""

import triton
import triton.language as tl

from ..common.bands_triton import (
    BANDS,
    bands,
    column,
    decays_to_ends,
    flat,
    flats,
    load_banded,
    load_pair,
    load_transposed,
    narrow_product,
    per_band,
    per_bands,
    sides,
    store_banded,
    store_transposed,
    turned,
)
from ..common.blocks_triton import (
    add_products,
    arrived,
    clamped_decay,
    exp,
    input_terms,
    kernel,
    prefetch,
    sums_along,
    terms,
)
from ..common.positions_triton import locate_program, pieces_of
from ..common.tiles_triton import state_pointers


@triton.jit
def decays_from_ends(b_w, C: tl.constexpr):
    """Return the log decays from the chunk's beginning to reads, r and (without their own token's) a side by side, and
    from keys to its end, [4, N, 2 C] each."""
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
    """Compute the map S -> M S + N of each part and head, L chunks of C tokens: M [K, K] as products, N [K, V] as
    written; of the first part written is M S_0 + N. Skips each sequence's last part unless ALL_PARTS. In registers:
    both, transposed, and, while they load, the next chunk's rows.

    w, k, a, b [B, T, H, K], v [B, T, H, V], scores [chunks, H, 2, C, C] (see `fused_chunk_triton.scores_kernel`)
    first [N, H, K, V]: initial states S_0; products [parts, H, K, K], written [parts, H, K, V]
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; symbols as in `fused_chunk_triton`
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    if not ALL_PARTS:
        count = tl.where(is_last, 0, count)  # unused, but saved tensors must not be uninitialized
    i, j = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None]
    below, eye = i > j, tl.where(i == j, 1.0, 0.0)
    o_k = tl.arange(0, BK)
    TERMS: tl.constexpr = 3 if v.dtype.element_ty == tl.float32 else 2
    b_M = bands(tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0))
    b_S = tl.zeros([BANDS, BV // BANDS, BK], dtype=tl.float32)
    if HAS_FIRST:
        b_S += load_banded(first, i_n * H + i_h, is_first, K, V, BK, BV)
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
        x = [sides(term) for term in terms(bands(b_x).to(tl.float32) * decays, TERMS)]
        b_a, b_b = per_bands([flat(pair[0]) for pair in x]), per_bands([tl.trans(flat(pair[1])) for pair in x])
        k_terms = terms(bands(b_k).to(tl.float32) * sides(decays)[1], TERMS)
        U_terms = per_bands(terms(b_U + eye, TERMS))
        v_terms = input_terms(b_v)
        total = exp(total)[None, None, :]
        b_f = narrow_product(terms(b_M, TERMS), b_a)
        b_f = narrow_product(terms(b_f, TERMS), U_terms)
        b_M = add_products(b_M * total, terms(b_f, TERMS), b_b)
        b_f = narrow_product(terms(b_S, TERMS), b_a)
        b_f = add_products(b_f, v_terms, per_bands(terms(b_A, TERMS)))
        b_f = narrow_product(terms(b_f, TERMS), U_terms)
        b_S = add_products(b_S * total, terms(b_f, TERMS), b_b)
        b_S = add_products(b_S, v_terms, per_bands(turned(flats(k_terms))))
    store_banded(products, b_M, i_p * H + i_h, True, K, K, BK, BK)
    store_banded(written, b_S, i_p * H + i_h, True, K, V, BK, BV)


@triton.jit
def pointers_of_D(dr, dk, da, db, start, i_h, o_k, o_v, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Return pointers to D^T [V, K] of a full chunk, in the rows of its gradients: C rows of D^T in each tensor."""
    p = tl.where(o_v < 2 * C, tl.where(o_v < C, dr, dk), tl.where(o_v < 3 * C, da, db))
    return (p + ((start + o_v % C) * H + i_h) * K)[:, None] + o_k[None, :]


@kernel
def carry_grads_kernel(
    r, w, k, a, b, do, scores, dr, dk, dv, da, db, y, last, first, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_LAST: tl.constexpr, ALL_PARTS: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient D of the state entering each part, from zero for the state leaving it, or in the last part
    from the final state's: `last` to `first`. ALL_PARTS: of first parts too. KEEP: start from each part's own `last`,
    and store dv, and y and D (`pointers_of_D`) for `backward_triton`. In registers: D^T.

    r, w, k, a, b, dr, dk, da, db [B, T, H, K], do, dv [B, T, H, V], scores [chunks, H, 2, C, C], y [chunks, H, C, V]
    last [N, H, K, V], first [parts, H, K, V]; KEEP: last [parts, H, K, V], first [N, H, K, V]
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; symbols as in `fused_chunk_triton`
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    if not ALL_PARTS:
        if is_first:
            return
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    eye = tl.where(i == j, 1.0, 0.0)
    by_scale = tl.where(tl.arange(0, 2 * C) < C, scale, 1.0)[None, None, :]
    TERMS: tl.constexpr = 3 if r.dtype.element_ty == tl.float32 else 2
    if KEEP:
        i_last, i_first, has_last, has_first = i_p, i_n, count >= 0, is_first
    else:
        i_last, i_first, has_last, has_first = i_n, i_p, is_last, count >= 0
    b_D = tl.zeros([BANDS, BV // BANDS, BK], dtype=tl.float32)
    if HAS_LAST:
        b_D += load_banded(last, i_last * H + i_h, has_last, K, V, BK, BV)
    for n in range(0, count):
        start = begin + (count - 1 - n) * C
        i_c = ((first_chunk + count - 1 - n) * H + i_h).to(tl.int64)
        p_A = scores + i_c * (2 * C * C)
        b_w = load_transposed(w, start, end, i_h, H, K, C, BK)
        b_R = load_pair(r, a, start, end, i_h, H, K, C, BK)
        b_b = load_transposed(b, start, end, i_h, H, K, C, BK)
        b_do = load_transposed(do, start, end, i_h, H, V, C, BV)
        b_N = tl.load(p_A + C * C + j * C + i, mask=i >= j, other=0.0)
        b_U = tl.load(p_A + C * C + i * C + j, mask=i > j, other=0.0)
        if KEEP:
            b_k = load_transposed(k, start, end, i_h, H, K, C, BK)
            A_rk = tl.load(p_A + j * C + i, mask=i >= j, other=0.0)
            A_ak = tl.load(p_A + i * C + j, mask=i > j, other=0.0)
        more = (o_c >= 0) & (n + 1 < count)
        p_rows = (start - C + o_c) * H + i_h
        prefetch(w + p_rows * K, more, BK)
        prefetch(r + p_rows * K, more, BK)
        prefetch(a + p_rows * K, more, BK)
        prefetch(b + p_rows * K, more, BK)
        prefetch(do + p_rows * V, more, BV)
        prefetch(scores + (i_c - H) * (2 * C * C) + o_c * (2 * C), more, 2 * C)
        b_w, b_R, b_b, b_do = arrived(b_w), arrived(b_R), arrived(b_b), bands(arrived(b_do))
        b_N, b_U = arrived(b_N), arrived(b_U)
        if KEEP:
            prefetch(k + p_rows * K, more, BK)
            b_k, A_rk, A_ak = arrived(b_k), arrived(A_rk), arrived(A_ak)
        read, key = decays_from_ends(bands(clamped_decay(b_w)), C)
        total, key = column(read, C - 1), exp(sides(key)[0])
        x = [sides(term) for term in terms(bands(b_R).to(tl.float32) * (exp(read) * by_scale), TERMS)]
        b_terms = terms(bands(b_b).to(tl.float32) * key, TERMS)
        D_terms = terms(b_D, TERMS)
        b_y = narrow_product(D_terms, per_bands(flats(b_terms)))
        do_terms = input_terms(b_do)
        b_y = narrow_product(terms(b_y, TERMS), per_bands(terms(b_U + eye, TERMS)))
        b_y = add_products(b_y, do_terms, per_bands(terms(b_N, TERMS)))
        y_terms = terms(b_y, TERMS)
        if KEEP:
            p_D = pointers_of_D(dr, dk, da, db, start, i_h, o_k, o_v, H, K, C)
            m_D = (o_v < V)[:, None] & (o_k < K)[None, :]
            tl.store(p_D, flat(b_D), mask=m_D & (end - start >= C))
            tl.store(y + i_c * C * V + o_v[:, None] + o_c[None, :] * V, flat(b_y), mask=(o_v < V)[:, None])
            k_terms = terms(bands(b_k).to(tl.float32) * key, TERMS)
            b_dv = narrow_product(D_terms, per_bands(flats(k_terms)))
            b_dv = add_products(b_dv, do_terms, per_bands(terms(A_rk, TERMS)))
            b_dv = add_products(b_dv, y_terms, per_bands(terms(A_ak, TERMS)))
            store_transposed(dv, b_dv, start, end, i_h, H, V, C, BV)
        b_D *= exp(total)[None, None, :]
        b_D = add_products(b_D, y_terms, per_bands([tl.trans(flat(pair[1])) for pair in x]))
        b_D = add_products(b_D, do_terms, per_bands([tl.trans(flat(pair[0])) for pair in x]))
    store_banded(first, b_D, i_first * H + i_h, has_first, K, V, BK, BV)


@kernel
def entering_kernel(
    products, written, entering, first, parts, parts_before,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, PACKED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Compute the state entering each part, S <- product S + written; or REVERSE the gradient leaving each, from the
    last on, D <- product^T D + written. The part visited first has `first` in `written` already.

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
            b_P = tl.load(p_P, mask=m_P & (n > 0), other=0.0)
            if REVERSE:
                b_P = tl.trans(b_P)
            p_W, m_W = state_pointers(written, i, 0, 0, K, V, BK, BV)
            b_S = add_products(tl.load(p_W, mask=m_W, other=0.0), terms(b_P, TERMS), terms(b_S, TERMS))
