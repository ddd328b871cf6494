"""Kernels that carry the states between chunks. Each head has a state S [K, V]. It decays along K, and each chunk
updates it: S <- e^{total} S + written.

`stream_kernel` walks from chunk to chunk and stores the state entering each. Where heads and sequences are too few to
fill a GPU, sequences are cut into parts, in three launches. The stream computes what each part writes; `scan_kernel`
replaces that, in place, by the state entering each part; the stream starts again from there.
"""

import triton
import triton.language as tl

from .blocks_triton import (
    add_products,
    clamped_decay,
    columns,
    exp,
    input_terms,
    kernel,
    program,
    sums,
    sums_of_columns,
    terms,
)
from .positions_triton import locate_part, pieces_of
from .tiles_triton import (
    SUMMED_BY_PRODUCT,
    halves_and_mild,
    load_decays,
    load_tile,
    row_units,
    state_pointers,
    store_state,
    total_decay,
)


@triton.jit
def _passed(o_t, o_i, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr):
    """Return whether token o_t's decay acts between token o_i and the chunk's end; REVERSE: between the chunk's start
    and o_i, with o_i's own decay if INCLUSIVE."""
    if not REVERSE:
        passed = o_t > o_i
    elif INCLUSIVE:
        passed = o_t <= o_i
    else:
        passed = o_t < o_i
    return passed


@triton.jit
def _walk(
    x, units, y, w, states, scales, mild_scales, remainders, decay, mild, initial, last, scale, begin, end,
    first_chunk, chunks, i_p, i_h, i_k, i_v,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr, TOTALS: tl.constexpr,
    SCALED: tl.constexpr, BLOCKS: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr,
):  # fmt: skip
    """Carry a tile [BK, BV] of a state through a part, as `stream_kernel` does, whose arguments these are. units,
    remainders, decay and mild may be None."""
    NK: tl.constexpr = (K + BK - 1) // BK
    # x^T e^{after}, with the channels k as rows, is then the left operand in the registers where it is computed.
    BY_COLUMNS: tl.constexpr = SCALED and C == SUMMED_BY_PRODUCT and w.dtype.element_ty != tl.float32
    i_ph = i_p * H + i_h
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(initial, i_ph, i_k, i_v, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    b_all = tl.zeros([BK], dtype=tl.float32)
    o_c = tl.arange(0, C)
    if BY_COLUMNS:  # asked for a turn ahead: Triton's pipeline asks at the end of the turn before, too late for a chain
        first_row = tl.maximum(begin + (chunks - 1) * C, begin) if REVERSE else begin
        next_w = load_tile(w, first_row, end, i_h, i_k, 0, H, K, C, BK)
    for j in range(0, chunks):
        i_c = chunks - 1 - j if REVERSE else j
        start = begin + i_c * C
        i_ch = (first_chunk + i_c) * H + i_h
        if BY_COLUMNS:
            b_w = clamped_decay(next_w)
            next_start = tl.maximum(start - C, begin) if REVERSE else start + C
            next_w = load_tile(w, next_start, end, i_h, i_k, 0, H, K, C, BK)
        else:
            b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
        if (SCALED or BLOCKS) and not TOTALS:
            first, second, is_mild = halves_and_mild(b_w, C, BLOCKS, SCALED)
            total = first + second
            half = exp(second if REVERSE else first)
            store_state(states, scales, i_ch, b_S, i_k, i_v, K, V, BK, BV, SCALED, mild_scales, half, remainders)
            if mild is not None:
                tl.store(mild + i_ch * NK + i_k, is_mild, mask=i_v == 0)
        else:
            total = total_decay(b_w, C, SCALED)
            if TOTALS:
                b_all += total
            else:
                store_state(states, scales, i_ch, b_S, i_k, i_v, K, V, BK, BV, SCALED)
        # e^{total} S + (x e^{after})^T y; REVERSE: the gradient before the chunk, with e^{before}.
        if BY_COLUMNS:
            after = sums_of_columns(b_w, _passed(o_c[:, None], o_c[None, :], REVERSE, INCLUSIVE))
        else:
            after = sums(_passed(o_c[None, :], o_c[:, None], REVERSE, INCLUSIVE), b_w)
        factor = exp(after) if SCALED else tl.exp(after)
        if REVERSE:
            factor *= scale
        b_S *= tl.exp(total)[:, None]
        for i_g in tl.static_range(G):
            b_x = load_tile(x, start, end, i_h * G + i_g, i_k, 0, H * G, K, C, BK)
            b_y = load_tile(y, start, end, i_h * G + i_g, i_v, 0, H * G, V, C, BV)
            if BY_COLUMNS:
                b_x = columns(b_x) * factor
                if units is not None:
                    b_x *= row_units(units, start, end, i_h * G + i_g, H * G, C)[None, :]
                x_terms = terms(b_x, 2)
            else:
                b_x = b_x.to(tl.float32) * factor
                if units is not None:
                    b_x *= row_units(units, start, end, i_h * G + i_g, H * G, C)[:, None]
                x_terms = [tl.trans(term) for term in terms(b_x, 2 if SCALED else 3)]
            b_S = add_products(b_S, x_terms, input_terms(b_y))
    if TOTALS:
        if decay is not None:
            o_k = i_k * BK + tl.arange(0, BK)
            tl.store(decay + i_ph.to(tl.int64) * K + o_k, tl.exp(b_all), mask=(o_k < K) & (i_v == 0))
        p_S, m_S = state_pointers(states, i_ph, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
    if WANTS_LAST:
        p_S, m_S = state_pointers(last, i_ph, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@kernel
def stream_kernel(
    x, y, states, scales, mild_scales, initial, last,
    other_x, other_y, other_states, other_scales, other_mild_scales, other_initial, other_last,
    units, remainders, w, decay, mild, scale, sequence_of_part, parts_before, cu_seqlens, chunks_before, T, L,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, OTHER_V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, OTHER_BV: tl.constexpr, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr,
    TOTALS: tl.constexpr, IN_PARTS: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S <- e^{total} S + (k e^{after})^T v, chunk by chunk through a part; REVERSE: with (scale r e^{before})^T do.

    Store the state before each chunk, and whether the chunk is mild. TOTALS: store only the state after each part,
    started from zeros, and the part's decay factor, e^{its total}. INCLUSIVE: a read decays by its own token's w too.
    G: heads of x and y that write into one state. SCALED: split products, 16-bit states. OTHER_V: columns of a second
    state with the same decay, 0 for none. A program holds a tile [BK, BV] of one state in registers.

    x [B, T, G H, K], y [B, T, G H, V], w [B, T, H, K], units [B, T, G H] or None
    states, remainders [chunks, H, K, V]; with TOTALS, states [parts, H, K, V]
    scales, mild_scales [chunks, H, NV, K], decay [parts, H, K], mild [chunks, H, NK]
    initial, last [N, H, K, V]; with IN_PARTS, initial [parts, H, K, V]
    other_*: as x to last, with OTHER_V columns
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]
    units (`row_units`), remainders (`store_state`): of the first state alone, or None
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    OTHER_NV: tl.constexpr = (OTHER_V + OTHER_BV - 1) // OTHER_BV
    i, i_p = program(NK * (NV + OTHER_NV) * H)
    i_h, i_k, i_v = i % H, (i // H) % NK, i // (H * NK)
    begin, end, first_chunk, chunks = locate_part(
        i_p, sequence_of_part, parts_before, cu_seqlens, chunks_before, T, L, C, IN_PARTS, PACKED
    )
    if i_v < NV:
        _walk(x, units, y, w, states, scales, mild_scales, remainders, decay, mild, initial, last, scale, begin, end,
              first_chunk, chunks, i_p, i_h, i_k, i_v, H, G, K, V, C, BK, BV, REVERSE, INCLUSIVE, TOTALS, SCALED,
              BLOCKS, HAS_FIRST, WANTS_LAST)  # fmt: skip
    elif OTHER_V > 0:
        _walk(other_x, None, other_y, w, other_states, other_scales, other_mild_scales, None, None, None, other_initial,
              other_last, scale, begin, end, first_chunk, chunks, i_p, i_h, i_k, i_v - NV, H, G, K, OTHER_V, C, BK,
              OTHER_BV, REVERSE, INCLUSIVE, TOTALS, SCALED, BLOCKS, HAS_FIRST, WANTS_LAST)  # fmt: skip


@kernel
def scan_kernel(
    written, decay, first, last, parts_before, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BE: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Replace what each part of a sequence writes by the state before the part: S <- e^{total} S + written. REVERSE: by
    the gradient of the state after the part, from the last part to the first.

    A program holds BE elements of S in registers.

    written [all parts, H, K, V], decay [all parts, H, K], first, last [N, H, K, V]
    parts_before [N + 1], or None; parts: the number in each sequence unless packed
    """
    NE: tl.constexpr = (K * V + BE - 1) // BE
    i_e, i_nh = program(NE)
    i_n, i_h = i_nh // H, i_nh % H
    first_part, parts = pieces_of(i_n, parts_before, parts, PACKED)
    o_e = i_e * BE + tl.arange(0, BE)
    m_e = o_e < K * V
    b_S = tl.zeros([BE], dtype=tl.float32)
    if HAS_FIRST:
        b_S += tl.load(first + i_nh.to(tl.int64) * K * V + o_e, mask=m_e, other=0.0)
    p_e, p_d = written + o_e, decay + o_e // V
    for j in range(0, parts, 4):
        # Issue the loads of four parts before using the first: a scan is bound by load latency.
        i, m, b_written, b_decay = (), (), (), ()
        for n in tl.static_range(4):
            part = first_part + (parts - 1 - (j + n) if REVERSE else j + n)
            i += (tl.cast(part, tl.int64) * H + i_h,)
            m += (m_e & (j + n < parts),)
        for n in tl.static_range(4):
            b_written += (tl.load(p_e + i[n] * K * V, mask=m[n], other=0.0),)
        for n in tl.static_range(4):
            b_decay += (tl.load(p_d + i[n] * K, mask=m[n], other=1.0),)
        for n in tl.static_range(4):
            tl.store(p_e + i[n] * K * V, b_S, mask=m[n])
            b_S = b_decay[n] * b_S + b_written[n]
    if WANTS_LAST:
        tl.store(last + i_nh.to(tl.int64) * K * V + o_e, b_S, mask=m_e)
