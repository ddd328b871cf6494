"""What every chunked operator's kernels share: where a chunk lies, its tiles, and the states between chunks.

A state S [K, V] per head decays along K between chunks and each chunk writes into it: S <- e^{total} S + written.
`stream_kernel` walks from chunk to chunk and leaves the state entering each. Where heads and sequences alone are too
few to fill a GPU, sequences are cut into segments: the stream first finds what each segment writes, `scan_kernel` turns
that, in place, into the state entering each segment, and the stream starts there.
`ChunkPlan` holds what all launches of a call have in common.

A chunk is *mild* where its whole decay provably fits float32 about the middle row; kernels that work inside chunks are
compiled for mild chunks and for any other apart, so that the common way stays small.
"""

import torch
import triton
import triton.language as tl

from .blocks_triton import (
    add_split_by_given,
    decay_after,
    decay_before,
    dot,
    level_pairs,
    level_weights,
    program,
    row_at,
    split,
    sums,
    to_operand,
)
from .dispatch import interpreted
from .launch import CHUNK_SIZE, ENOUGH, LONG_CHUNK_SIZE, SHORTEST_SEGMENT, TABLE, block, elements, width
from .packed import chunk_offsets, max_chunks

MILD_HALF = tl.constexpr(-55.0)
"""A chunk is mild if no channel decays as much as this over either half: no factor about the middle reaches e^55."""
MILD_TOKEN = tl.constexpr(-4.0)
"""… and no token more than this: the mild path's decay gradient loses a factor e^{-w} of float32's digits."""


@triton.jit
def locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C: tl.constexpr, PACKED: tl.constexpr):
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
def load_tile(p, start, end, i_h, i_d, shift: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    """Rows start + shift … of one head of x [*, H, D], [C, BD]; zero outside the chunk and the sequence."""
    o_c = tl.arange(0, C) + shift
    o_d = i_d * BD + tl.arange(0, BD)
    m = ((o_c >= 0) & (o_c < C) & (o_c < end - start))[:, None] & (o_d < D)[None, :]
    return tl.load(p + (start * H + i_h) * D + o_c[:, None] * (H * D) + o_d[None, :], mask=m, other=0.0)


@triton.jit
def store_tile(p, x, start, end, i_h, i_d, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    o_c = tl.arange(0, C)
    o_d = i_d * BD + tl.arange(0, BD)
    m = (o_c < end - start)[:, None] & (o_d < D)[None, :]
    tl.store(p + (start * H + i_h) * D + o_c[:, None] * (H * D) + o_d[None, :], x.to(p.dtype.element_ty), mask=m)


@triton.jit
def state_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a [BK, BV] tile of state number i."""
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    return p + i.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :], (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def scale_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of the scales of the rows of a [BK, BV] tile of state number i."""
    o_k = i_k * BK + tl.arange(0, BK)
    NV: tl.constexpr = (V + BV - 1) // BV
    return p + (i.to(tl.int64) * NV + i_v) * K + o_k, o_k < K


@triton.jit
def store_state(states, scales, i, b_S, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """A tile of state number i. SCALED: in float16, each row over the power of two below its largest element."""
    p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
    if SCALED:
        exponent = tl.max(tl.abs(b_S), 1).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 0x04000000), 0x7B000000)  # so that its reciprocal is a number too
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        tl.store(p_s, exponent.to(tl.float32, bitcast=True), mask=m_s)
        b_S *= (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
    tl.store(p_S, b_S.to(states.dtype.element_ty), mask=m_S)


@triton.jit
def load_state(states, scales, i, there, factor, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """What `store_state` put there in float32, its rows times a factor (a number or [BK]); 0 if nothing is `there`."""
    p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
    b_S = tl.load(p_S, mask=m_S & there, other=0.0).to(tl.float32)
    if SCALED:
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        b_S *= (tl.load(p_s, mask=m_s & there, other=0.0) * factor)[:, None]
    return b_S


@triton.jit
def half_decays(b_w, C: tl.constexpr):
    """Log decay of the first half of a chunk's rows, and of the second, [BK] each."""
    first = (tl.arange(0, C) < C // 2)[:, None]
    b_w = b_w.to(tl.float32)
    return tl.sum(tl.where(first, b_w, 0.0), 0), tl.sum(tl.where(first, 0.0, b_w), 0)


@triton.jit
def is_mild(b_w, first, second):
    """Whether every decay of a chunk's rows b_w [C, BK], with its `half_decays`, is mild, 1 or 0."""
    spare = tl.minimum(tl.minimum(first, second) - MILD_HALF, tl.min(b_w.to(tl.float32), 0) - MILD_TOKEN)
    return (tl.min(spare, 0) > 0).to(tl.int32)


@triton.jit
def takes(mild, i, FLAGS: tl.constexpr, MILD: tl.constexpr):
    """Whether chunk-and-head i is this launch's: mild everywhere for the mild one, anything else for the other."""
    o = tl.arange(0, triton.next_power_of_2(FLAGS))
    return tl.min(tl.load(mild + i * FLAGS + o, mask=o < FLAGS, other=1), 0) == MILD


@triton.jit
def about_middle(b_w, C: tl.constexpr):
    """Mild decays from one running sum: before each row, of reads and of keys about the middle row. [C, BK] each.

    read_i key_j is the decay strictly between j and i.
    """
    upto = tl.cumsum(b_w, 0)
    before = upto - b_w
    mid = row_at(before, C // 2, C)[None, :]
    return before, tl.exp(before - mid), tl.exp(mid - upto)


@triton.jit
def dyadic_scores(b_q, b_k, b_prev, b_next, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
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
def scores(b_q, b_k, p_w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sum over a block of k of q_i k_j e^{decay strictly between j and i}, right for i > j only, [C, C]; and the log
    decay before and after each row, [C, BK]."""
    if MILD:
        b_w = load_tile(p_w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        before, read, key = about_middle(b_w, C)
        b_A = dot(b_q * read, tl.trans(b_k * key), PRECISION)
        after = tl.sum(b_w, 0)[None, :] - before - b_w
    else:
        b_prev = load_tile(p_w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32)
        b_next = load_tile(p_w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)
        b_A = dyadic_scores(b_q, b_k, b_prev, b_next, C, BK, LEVELS, PRECISION)
        before, after = decay_before(b_prev), decay_after(b_next)
    return b_A, before, after


@triton.jit
def dyadic_pairs(b_q, b_k, b_prev, b_next, b_dA, b_dq, b_dk, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """dq, dk and dw without its e^{total} term, for any decay: nothing is subtracted. b_dq, b_dk come as do S^T and
    v D^T, before their decay."""
    o_c = tl.arange(0, C)
    b_dq *= tl.exp(decay_before(b_prev))
    b_dk *= tl.exp(decay_after(b_next))
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
def _decays(w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            SCALED: tl.constexpr):  # fmt: skip
    """The decay of C rows, as it was given."""
    b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
    if SCALED:  # e^-128 is 0 in float32 already, and what is summed by a product has to be finite
        b_w = tl.where(b_w < -128.0, -128.0, b_w).to(b_w.dtype)
    return b_w


@triton.jit
def _passed(b_S, b_w, total, x, y, w, scale, start, end, i_h, i_k, i_v, H: tl.constexpr, G: tl.constexpr,
            K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after C rows with decays b_w, in reverse its gradient before them. As in `stream_kernel`."""
    o_c = tl.arange(0, C)
    if REVERSE:
        if INCLUSIVE:
            factor = tl.exp(tl.cumsum(b_w.to(tl.float32), 0)) * scale
        elif SCALED:
            factor = tl.exp(sums(o_c[:, None] > o_c[None, :], b_w)) * scale
        else:
            factor = tl.exp(decay_before(load_tile(w, start, end, i_h, i_k, -1, H, K, C, BK).to(tl.float32))) * scale
    elif SCALED:
        factor = tl.exp(sums(o_c[:, None] < o_c[None, :], b_w))
    else:
        factor = tl.exp(decay_after(load_tile(w, start, end, i_h, i_k, 1, H, K, C, BK).to(tl.float32)))
    b_S *= tl.exp(total)[:, None]
    for i_g in tl.static_range(G):
        b_x = load_tile(x, start, end, i_h * G + i_g, i_k, 0, H * G, K, C, BK).to(tl.float32) * factor
        b_y = load_tile(y, start, end, i_h * G + i_g, i_v, 0, H * G, V, C, BV)
        if SCALED:
            x_high, x_low = split(b_x)
            b_S = add_split_by_given(b_S, tl.trans(x_high), tl.trans(x_low), b_y)
        else:
            b_S += tl.dot(to_operand(tl.trans(b_x), PRECISION), b_y.to(tl.float32), input_precision=PRECISION)
    return b_S


@triton.jit
def stream_kernel(
    x, y, w, states, scales, decay, mild, initial, last, scale, sequence_of_segment, segment_offsets, cu_seqlens,
    offsets, T, L,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr, TOTALS: tl.constexpr, SEGMENTED: tl.constexpr,
    MAY_BE_MILD: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, HAS_FIRST: tl.constexpr,
    WANTS_LAST: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- e^{total} S + (k e^{after})^T v, chunk after chunk of a segment of L; in reverse (scale r e^{before})^T do.

    The state before each chunk is stored, and whether its decays are mild; or, for TOTALS, what the whole segment makes
    of a zero state, and e^{its total}. INCLUSIVE: a read is faded by its own token's decay too.
    G: heads of x and y that write into one state. PARTS: 2 stores the state in the middle of a chunk too, unless it is
    mild. SCALED: products of split operands, and states in 16 bits. In registers: S [BK, BV].
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i, i_s = program(NK * NV * H)
    i_h, i_k, i_v = i % H, (i // H) % NK, i // (H * NK)
    if PACKED:
        if SEGMENTED:
            i_n = tl.load(sequence_of_segment + i_s)
            skipped = (i_s - tl.load(segment_offsets + i_n)) * L
        else:
            i_n = i_s
            skipped = i_s * 0
        begin = tl.load(cu_seqlens + i_n).to(tl.int64) + skipped * C
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        first_chunk = tl.load(offsets + i_n) + skipped
    else:
        NT = tl.cdiv(T, C)
        NS = tl.cdiv(NT, L)
        i_n = i_s // NS
        skipped = (i_s % NS) * L
        begin = i_n.to(tl.int64) * T + skipped * C
        end = (i_n + 1).to(tl.int64) * T
        first_chunk = i_n * NT + skipped
    chunks = tl.minimum(tl.maximum(end - begin + C - 1, 0) // C, L).to(tl.int32)
    i_sh = i_s * H + i_h
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(initial, i_sh, i_k, i_v, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    b_all = tl.zeros([BK], dtype=tl.float32)
    for j in range(0, chunks):
        if REVERSE:
            i_c = chunks - 1 - j
        else:
            i_c = j
        start = begin + i_c * C
        i_ch = (first_chunk + i_c) * H + i_h
        b_w = _decays(w, start, end, i_h, i_k, H, K, C, BK, SCALED)
        first, second = half_decays(b_w, C)
        total = first + second
        if TOTALS:
            b_all += total
        else:
            # In reverse a chunk's first state is the one that leaves its last part.
            i_p = i_ch // H * PARTS * H + i_h
            store_state(states, scales, i_p + (PARTS - 1) * H * REVERSE, b_S, i_k, i_v, K, V, BK, BV, SCALED)
            mildness = is_mild(b_w, first, second) * MAY_BE_MILD
            tl.store(mild + i_ch * NK + i_k, mildness, mask=i_v == 0)
            if PARTS == 2:
                if (mildness == 0) | (NK > 1):  # of several blocks, another may not be mild
                    part = start + C // 2 * REVERSE
                    b_part = _decays(w, part, end, i_h, i_k, H, K, C // 2, BK, SCALED)
                    half = second if REVERSE else first
                    b_M = _passed(b_S, b_part, half, x, y, w, scale, part, end, i_h, i_k, i_v, H, G, K, V, C // 2, BK,
                                  BV, REVERSE, INCLUSIVE, SCALED, PRECISION)  # fmt: skip
                    store_state(states, scales, i_p + H * (1 - REVERSE), b_M, i_k, i_v, K, V, BK, BV, SCALED)
        b_S = _passed(b_S, b_w, total, x, y, w, scale, start, end, i_h, i_k, i_v, H, G, K, V, C, BK, BV, REVERSE,
                      INCLUSIVE, SCALED, PRECISION)  # fmt: skip
    if TOTALS:
        o_k = i_k * BK + tl.arange(0, BK)
        tl.store(decay + i_sh.to(tl.int64) * K + o_k, tl.exp(b_all), mask=(o_k < K) & (i_v == 0))
        p_S, m_S = state_pointers(states, i_sh, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
    if WANTS_LAST:
        p_S, m_S = state_pointers(last, i_sh, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@triton.jit
def _scan_index(j, first_part, parts, i_h, H: tl.constexpr, REVERSE: tl.constexpr):
    """The number, in memory, of the j-th state that a scan comes to."""
    if REVERSE:
        i = first_part + parts - 1 - j
    else:
        i = first_part + j
    return tl.cast(i, tl.int64) * H + i_h


@triton.jit
def scan_kernel(
    written, decay, first, last, offsets, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BE: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Put the state before each part of a sequence where its writing was: S <- e^{total} S + written.

    parts: of each sequence, where they are not packed. In registers: BE elements of S.
    """
    NE: tl.constexpr = (K * V + BE - 1) // BE
    i_e, i_nh = program(NE)
    i_n, i_h = i_nh // H, i_nh % H
    if PACKED:
        first_part = tl.load(offsets + i_n)
        parts = tl.load(offsets + i_n + 1) - first_part
    else:
        first_part = i_n * parts
    o_e = i_e * BE + tl.arange(0, BE)
    m_e = o_e < K * V
    b_S = tl.zeros([BE], dtype=tl.float32)
    if HAS_FIRST:
        b_S += tl.load(first + i_nh.to(tl.int64) * K * V + o_e, mask=m_e, other=0.0)
    p_e, p_d = written + o_e, decay + o_e // V
    for j in range(0, parts, 4):
        # Four parts' loads are under way before the first is waited for: a scan is all waiting.
        i_0 = _scan_index(j, first_part, parts, i_h, H, REVERSE)
        i_1 = _scan_index(j + 1, first_part, parts, i_h, H, REVERSE)
        i_2 = _scan_index(j + 2, first_part, parts, i_h, H, REVERSE)
        i_3 = _scan_index(j + 3, first_part, parts, i_h, H, REVERSE)
        m_1, m_2, m_3 = m_e & (j + 1 < parts), m_e & (j + 2 < parts), m_e & (j + 3 < parts)
        b_0 = tl.load(p_e + i_0 * K * V, mask=m_e, other=0.0)
        b_1 = tl.load(p_e + i_1 * K * V, mask=m_1, other=0.0)
        b_2 = tl.load(p_e + i_2 * K * V, mask=m_2, other=0.0)
        b_3 = tl.load(p_e + i_3 * K * V, mask=m_3, other=0.0)
        d_0 = tl.load(p_d + i_0 * K, mask=m_e, other=0.0)
        d_1 = tl.load(p_d + i_1 * K, mask=m_1, other=1.0)
        d_2 = tl.load(p_d + i_2 * K, mask=m_2, other=1.0)
        d_3 = tl.load(p_d + i_3 * K, mask=m_3, other=1.0)
        tl.store(p_e + i_0 * K * V, b_S, mask=m_e)
        b_S = d_0 * b_S + b_0
        tl.store(p_e + i_1 * K * V, b_S, mask=m_1)
        b_S = d_1 * b_S + b_1
        tl.store(p_e + i_2 * K * V, b_S, mask=m_2)
        b_S = d_2 * b_S + b_2
        tl.store(p_e + i_3 * K * V, b_S, mask=m_3)
        b_S = d_3 * b_S + b_3
    if WANTS_LAST:
        tl.store(last + i_nh.to(tl.int64) * K * V + o_e, b_S, mask=m_e)


class ChunkPlan:
    """What all launches of a call share: sizes, where the chunks are, precision, and the launch table's word.

    op: prefix of its rows in the launch table; x: a sequence with the rows of the state, [B, T, H, K]; V: its columns.
    """

    def __init__(
        self, op: str, x: torch.Tensor, V: int, cu_seqlens: torch.Tensor | None, chunk_size: int, flags: int = 0
    ):
        (B, self.T, self.H, self.K), self.V = x.shape, V
        self.op, self.width = op, width(x.element_size())
        self.scaled, self.C, self.parts = _cut(op, x, V, chunk_size)
        self.precision = "tf32" if self.width == "16-bit" else "tf32x3"
        self.cu_seqlens, self.offsets, self.sequence_of_chunk = cu_seqlens, None, None
        if cu_seqlens is None:
            self.N, self.chunks = B, B * triton.cdiv(self.T, self.C)
        else:
            self.N = len(cu_seqlens) - 1
            self.chunks, self.sequence_of_chunk, self.offsets = self._packed_parts(self.C)
        self.empty = x.new_empty(0, dtype=torch.float32).new_empty
        self.where = (self.sequence_of_chunk, cu_seqlens, self.offsets, self.T)
        # The guard looks at blocks of K as `stream_kernel` cuts them, unless the operator says otherwise.
        self.flags = flags or triton.cdiv(self.K, block(self.K, TABLE[f"{op}.stream", self.width].BK))

    def _packed_parts(self, tokens: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """A packed batch cut into parts: room for so many, the sequence of each, and how many come before each one."""
        parts, offsets = max_chunks(self.T, self.N, tokens), chunk_offsets(self.cu_seqlens, tokens)
        order = torch.arange(parts, device=offsets.device, dtype=torch.int32)
        found = torch.searchsorted(offsets[1:], order, right=True)
        return parts, found.clamp_(max=self.N - 1).to(torch.int32), offsets

    def sizes(self, kernel: str, V: int | None = None) -> tuple[dict, int, int]:
        """Keyword arguments every kernel takes, and the numbers of blocks along K and V (default: the state's)."""
        launch, V = TABLE[f"{self.op}.{kernel}", self.width], self.V if V is None else V
        BK, BV = block(self.K, launch.BK), block(V, launch.BV)
        common = dict(
            H=self.H, K=self.K, V=V, C=self.C, BK=BK, BV=BV, PACKED=self.cu_seqlens is not None,
            PRECISION=self.precision, num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
        )  # fmt: skip
        return common, triton.cdiv(self.K, BK), triton.cdiv(V, BV)

    def ways(self, kernel: str):
        """The launches of a kernel that works inside chunks: (keyword arguments, blocks along V)."""
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            common, _, NV = self.sizes(f"{kernel}.{way}")
            C = self.C if way == "mild" else self.C // self.parts
            yield common | dict(C=C, FLAGS=self.flags, LEVELS=C.bit_length() - 1, MILD=int(way == "mild")), NV

    def kept_shape(self, V: int) -> tuple[int, ...]:
        """Of the float32 tensor that holds the state entering every part of a chunk."""
        return _kept_shape(self.scaled, self.op, self.chunks * self.parts, self.H, self.K, V)

    def unpacked(self, kept: torch.Tensor, V: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states [chunks parts, H, K, V] in such a tensor; where they are 16-bit, the scales of their rows too."""
        if not self.scaled:
            return kept, None
        scales = _scales(self.op, self.chunks * self.parts, self.H, self.K, V)
        return kept[scales:].view(torch.float16), kept[:scales]

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.H, self.K, self.V

    def states(self, x, y, w, scale, first, last, reverse, inclusive=False):
        """The state entering each part of a chunk (reverse: the gradient leaving it), and which chunks are mild.

        The states come in one tensor of `kept_shape`, which `unpacked` takes apart. Of a mild chunk only the state that
        enters it is there (reverse: the gradient leaving its last part).

        x [B, T, G H, K] and y [B, T, G H, V] make each chunk's writing, G heads one state's; V is y's own, whatever the
        plan's is. inclusive: in reverse, a read is faded by its own token's decay too.
        first and last [N, H, K, V]: where to begin, and where to leave the end; None: zeros, nowhere.
        """
        V = y.shape[-1]
        common, NK, NV = self.sizes("stream", V)
        kept, mild = self.empty(self.kept_shape(V)), self.empty(self.chunks, self.H, NK, dtype=torch.int32)
        if self.cu_seqlens is not None:
            # A packed batch has room for more chunks than it fills, and no output may be left to chance.
            kept.zero_()
            mild.zero_()
        states, scales = self.unpacked(kept, V)
        common |= dict(
            G=x.shape[2] // self.H, REVERSE=reverse, INCLUSIVE=inclusive, MAY_BE_MILD=self.width == "16-bit",
        )  # fmt: skip
        L, segments, segment_offsets, sequence_of_segment = self.segments(NK * NV * self.H)
        where = (sequence_of_segment, segment_offsets, self.cu_seqlens, self.offsets, self.T, L)
        grid = (NK * NV * self.H * segments,)
        if segments > self.N:
            entering, decay = self.empty(segments, self.H, self.K, V), self.empty(segments, self.H, self.K)
            stream_kernel[grid](
                x, y, w, entering, None, decay, mild, None, None, scale, *where,
                TOTALS=True, SEGMENTED=True, PARTS=self.parts, SCALED=self.scaled, HAS_FIRST=False, WANTS_LAST=False,
                **common,
            )  # fmt: skip
            self._scan(entering, decay, first, last, segments // self.N, segment_offsets, reverse)
            first, last = entering, None
        stream_kernel[grid](
            x, y, w, states, scales, None, mild, first, last, scale, *where, TOTALS=False, SEGMENTED=segments > self.N,
            PARTS=self.parts, SCALED=self.scaled, HAS_FIRST=first is not None, WANTS_LAST=last is not None, **common,
        )  # fmt: skip
        return kept, mild

    def segments(self, programs):
        """Chunks a segment, segments, and of a packed batch the segments before each sequence and whose each is.

        programs: of one segment. Sequences stay whole where these are enough to fill a GPU. A packed batch, whose
        sequences may be of any length, is cut whenever that is needed to make them alike.
        """
        enough = ENOUGH // 2 if self.scaled else ENOUGH  # each with a state twice as large
        if self.cu_seqlens is None and self.N * programs >= enough:
            return triton.cdiv(self.T, self.C), self.N, None, None
        L = max(SHORTEST_SEGMENT, triton.cdiv(self.chunks * programs, 2 * enough))  # finer: pieces are of unlike length
        if self.cu_seqlens is None:
            return L, self.N * triton.cdiv(self.T, self.C * L), None, None
        segments, sequence_of_segment, offsets = self._packed_parts(self.C * L)
        return L, segments, offsets, sequence_of_segment

    def _scan(self, written, decay, first, last, parts, offsets, reverse):
        """Put the state entering each part where its writing [parts, H, K, V] was; decay e^{total} [parts, H, K]."""
        V = written.shape[-1]
        launch = TABLE["scan", self.width]
        BE = elements(self.K * V, self.N * self.H, launch.BV)
        scan_kernel[(triton.cdiv(self.K * V, BE) * self.N * self.H,)](
            written, decay, first, last, offsets, parts, H=self.H, K=self.K, V=V, BE=BE,
            REVERSE=reverse, HAS_FIRST=first is not None, WANTS_LAST=last is not None,
            PACKED=self.cu_seqlens is not None, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def _cut(op: str, x: torch.Tensor, V: int, chunk_size: int) -> tuple[bool, int, int]:
    """Whether states between chunks are 16-bit, each row over a power of two; tokens a chunk; its parts, each of which
    a kernel for any decay goes through by itself. Arguments as of `ChunkPlan`."""
    scaled = op == "rwkv6" and x.element_size() == 2
    # In the interpreter, which cannot multiply bfloat16, float16 stands in for it.
    tried = scaled and (x.dtype == torch.bfloat16 or interpreted())
    long = tried and block(x.shape[-1], 128) == block(V, 128) == 64
    C = chunk_size or (LONG_CHUNK_SIZE if long else CHUNK_SIZE)
    if scaled and not long:
        C = min(C, CHUNK_SIZE)
    return scaled, C, max(1, C // CHUNK_SIZE)


def _scales(op: str, states: int, H: int, K: int, V: int) -> int:
    """Numbers that scale the rows of so many states, one for each block along V, rounded up to whole cache lines."""
    blocks = triton.cdiv(V, block(V, TABLE[f"{op}.stream", "16-bit"].BV))
    return triton.cdiv(states * H * K * blocks, 32) * 32


def _kept_shape(scaled: bool, op: str, states: int, H: int, K: int, V: int) -> tuple[int, ...]:
    if not scaled:
        return states, H, K, V
    return (_scales(op, states, H, K, V) + triton.cdiv(states * H * K * V, 2),)


def kept_states_shape(op, x, V, cu_seqlens, chunk_size) -> tuple[int, ...]:
    """Shape of what `ChunkPlan.states` returns, known without the offsets' values; arguments as of `ChunkPlan`."""
    scaled, C, parts = _cut(op, x, V, chunk_size)
    B, T, H, K = x.shape
    chunks = B * -(-T // C) if cu_seqlens is None else max_chunks(T, cu_seqlens.shape[0] - 1, C)
    return _kept_shape(scaled, op, chunks * parts, H, K, V)
