"""What every chunked operator's kernels share: where a chunk lies, its tiles, and the states between chunks.

A state S [K, V] per head decays along K between chunks and each chunk writes into it: S <- e^{total} S + written.
`stream_kernel` walks from chunk to chunk and leaves the state entering each. Where heads and sequences alone are too
few to fill a GPU, sequences are cut into segments: the stream first finds what each segment writes, `scan_kernel` turns
that, in place, into the state entering each segment, and the stream starts there.
`ChunkPlan` holds what all launches of a call have in common.

A chunk is *mild* where its whole decay provably fits float32 about the middle row; kernels that work inside chunks are
compiled for mild chunks and for any other apart, so that the common way stays small.
"""

from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks_triton import (
    add_operands,
    add_product,
    add_split_by_given,
    add_sums,
    decay_after,
    decay_before,
    exp,
    expect,
    kernel,
    operand,
    program,
    split,
    sums,
    sums_of_columns,
    to_operand,
)
from .dispatch import interpreted
from .launch import (
    CHUNK_SIZE,
    ENOUGH,
    LONG_CHUNK_SIZE,
    NARROWEST,
    SHORT_CHUNK_SIZE,
    SHORTEST_SEGMENT,
    TABLE,
    block,
    cdiv,
    elements,
    width,
)
from .packed_triton import Packing

MILD_HALF = tl.constexpr(-55.0)
"""A chunk is mild if no channel decays as much as this over either half: no factor about the middle reaches e^55."""
MILD_TOKEN = tl.constexpr(-4.0)
"""… and no token more than this: the mild path's decay gradient loses a factor e^{-w} of float32's digits."""

BLOCK = tl.constexpr(16)
BLOCK_LEVELS = tl.constexpr(4)
"""Rows that one product about their middle takes the place of so many dyadic levels for, where that fits."""
BLOCK_TOKEN = tl.constexpr(-6.0)
"""Of no token more than this: as `MILD_TOKEN`, but with a quarter of the rows that a difference is taken over."""

RAISED = tl.constexpr(2.0**-28)
"""What two operands with weights 2^14 times too large make right again: so much room float16 has above what is
scaled, and below it e^-19 then still has all its digits."""


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
def expect_tile(p, start, end, i_h, i_d, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """As `expect`, of what `load_tile` will load."""
    o_c = tl.arange(0, C)
    expect(p + (start * H + i_h) * D + o_c * (H * D) + i_d * BD, o_c < end - start, BD)


@triton.jit
def expect_state(states, i, there, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """As `expect`, of what `kept_state` will load."""
    o_k = i_k * BK + tl.arange(0, BK)
    expect(states + i.to(tl.int64) * K * V + o_k * V + i_v * BV, (o_k < K) & there, BV)


@triton.jit
def state_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a [BK, BV] tile of state number i."""
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    return p + i.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :], (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def matrix_pointers(p, i, N: tl.constexpr):
    """Pointers of the [N, N] matrix number i."""
    o = tl.arange(0, N)
    return p + i.to(tl.int64) * N * N + o[:, None] * N + o[None, :]


@triton.jit
def scale_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of the scales of the rows of a [BK, BV] tile of state number i."""
    o_k = i_k * BK + tl.arange(0, BK)
    NV: tl.constexpr = (V + BV - 1) // BV
    return p + (i.to(tl.int64) * NV + i_v) * K + o_k, o_k < K


@triton.jit
def scaled(x):
    """x [N, D] as float16, each row over the power of two below its largest element, and these powers [N]."""
    x = x.to(tl.float32)
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x04000000), 0x7B000000)  # so that its reciprocal is a number too
    over = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return (x * over[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)


@triton.jit
def store_state(states, scales, i, b_S, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, SCALED: tl.constexpr, mild_scales=None, half=None, remainders=None):  # fmt: skip
    """A tile of state number i. SCALED: in float16, each row over the power of two below its largest element.

    half: what half a chunk leaves of the state, [BK], so that rows of the state at the chunk's middle are multiples of
    mild_scales; 0 there says that a row is 0 (or below 2^-118).
    remainders: where, as multiples of the same scales, what float16 rounds away goes.
    """
    p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
    if SCALED:
        whole = b_S
        b_S, unit = scaled(whole)
        if remainders is not None:
            p_R, _ = state_pointers(remainders, i, i_k, i_v, K, V, BK, BV)
            tl.store(p_R, (whole / unit[:, None] - b_S.to(tl.float32)).to(tl.float16), mask=m_S)
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        tl.store(p_s, unit, mask=m_s)
        p_s, m_s = scale_pointers(mild_scales, i, i_k, i_v, K, V, BK, BV)
        tl.store(p_s, tl.where(unit < 2.0**-118, 0.0, unit * half), mask=m_s)
    tl.store(p_S, b_S.to(states.dtype.element_ty), mask=m_S)


@triton.jit
def kept_state(states, scales, i, there, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """What `store_state` put there, [BK, BV], and what its rows are multiples of, [BK]; 0 if nothing is `there`."""
    p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
    b_S = tl.load(p_S, mask=m_S & there, other=0.0)
    unit = tl.full([BK], 1.0, tl.float32)
    if SCALED:
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        unit = tl.load(p_s, mask=m_s & there, other=0.0)
    return b_S, unit


@triton.jit
def is_zero(mild_scales, i, there, i_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Which rows of state number i are 0 (or below 2^-118), [BK], by what they are multiples of.

    The decay of a chunk's first token falls on the state alone: where that is 0 so is the decay's gradient, and not
    what the pairs of later tokens leave of a difference.
    """
    largest = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        p_s, m_s = scale_pointers(mild_scales, i, i_k, i_v, K, V, BK, BV)
        largest = tl.maximum(largest, tl.load(p_s, mask=m_s & there, other=0.0))
    return largest == 0.0


@triton.jit
def by_rows(x, SCALED: tl.constexpr):
    """x [N, D] for a single product in float16, and what its rows are multiples of, [N]: `scaled`, or as it is."""
    unit = tl.full([x.shape[0]], 1.0, tl.float32)
    if SCALED:
        x, unit = scaled(x)
    return x, unit


@triton.jit
def from_middle(b_w, C: tl.constexpr):
    """Log decay up to and with each row, counted from the middle of the chunk, [C, BK]. b_w: as it was given."""
    o_c = tl.arange(0, C)
    return sums((o_c[:, None] >= o_c[None, :]).to(tl.float32) - (o_c[None, :] < C // 2).to(tl.float32), b_w)


@triton.jit
def half_decays(b_w, C: tl.constexpr):
    """Log decay of the first half of a chunk's rows, and of the second, [BK] each."""
    first = (tl.arange(0, C) < C // 2)[:, None]
    b_w = b_w.to(tl.float32)
    return tl.sum(tl.where(first, b_w, 0.0), 0), tl.sum(tl.where(first, 0.0, b_w), 0)


SUMMED_BY_PRODUCT = tl.constexpr(LONG_CHUNK_SIZE)
"""Rows of a chunk whose 16-bit decays are summed by a product, for which no warps have to agree.

In shorter chunks it would be Hopper's own product with an operand narrower than `NARROWEST`. Nor are float32 decays
summed so: a setting of RWKV6 with them ended in a misaligned address on an H200 (Triton 3.6, data/tuning.md).
"""


@triton.jit
def whole_decay(b_w, C: tl.constexpr, SCALED: tl.constexpr):
    """Log decay of all of a chunk's rows, [BK]; SCALED: beside 16-bit inputs."""
    if SCALED and C == SUMMED_BY_PRODUCT and b_w.dtype != tl.float32:
        total = tl.max(sums_of_columns(b_w, tl.full([C, C], 1.0, tl.float32)), 1)
    else:
        first, second = half_decays(b_w, C)
        total = first + second
    return total


@triton.jit
def halves_and_mild(b_w, C: tl.constexpr):
    """`half_decays` of a chunk's rows b_w [C, BK], and whether every decay is mild, 1 or 0."""
    if C == SUMMED_BY_PRODUCT and b_w.dtype != tl.float32:
        in_first = (tl.arange(0, C) < C // 2)[None, :]
        halves = sums_of_columns(b_w, (tl.arange(0, C) < C // 2)[:, None] == in_first)
        mild = (tl.min(halves) > MILD_HALF) & (tl.min(b_w.to(tl.float32)) > MILD_TOKEN)
        first = tl.max(tl.where(in_first, halves, -float("inf")), 1)
        second = tl.max(tl.where(in_first, -float("inf"), halves), 1)
    else:
        first, second = half_decays(b_w, C)
        spare = tl.minimum(tl.minimum(first, second) - MILD_HALF, tl.min(b_w.to(tl.float32), 0) - MILD_TOKEN)
        mild = tl.min(spare, 0) > 0
    return first, second, mild.to(tl.int32)


@triton.jit
def takes(mild, i, FLAGS: tl.constexpr, MILD: tl.constexpr):
    """Whether chunk-and-head i is this launch's: mild everywhere for the mild one, anything else for the other."""
    o = tl.arange(0, triton.next_power_of_2(FLAGS))
    return tl.min(tl.load(mild + i * FLAGS + o, mask=o < FLAGS, other=1), 0) == MILD


@triton.jit
def none_to_do(mild, first, total, AT_ONCE: tl.constexpr, FLAGS: tl.constexpr):
    """Whether each of AT_ONCE chunks-and-heads from the first on is mild, so that there is nothing for the other way.

    One look at memory for all of them: a launch that finds nothing is all waiting for such looks.
    """
    o = first * FLAGS + tl.arange(0, triton.next_power_of_2(AT_ONCE * FLAGS))
    flags = tl.load(mild + o, mask=o < tl.minimum(first + AT_ONCE, total) * FLAGS, other=1)
    return tl.min(flags, 0) == 1


@triton.jit
def not_mild(mild, i, total, FLAGS: tl.constexpr):
    """Whether chunk-and-head i is one of the total and anything but mild everywhere."""
    o = tl.arange(0, triton.next_power_of_2(FLAGS))
    return tl.min(tl.load(mild + i * FLAGS + o, mask=(o < FLAGS) & (i < total), other=1), 0) == 0


@triton.jit
def load_decays(w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """The decay of C rows, none below -128: its exponential is 0 already, and what `sums` adds has to be finite."""
    b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
    return tl.where(b_w < -128.0, -128.0, b_w).to(b_w.dtype)


@triton.jit
def within(first, end, C: tl.constexpr):
    """Whether first_i <= j < end_i, [C, C]: two instructions an element, of masks that would else cost as much as
    products."""
    o_c = tl.arange(0, C)
    return (o_c[None, :] - first[:, None]).to(tl.uint32) < (end - first)[:, None].to(tl.uint32)


@triton.jit
def halves(level, C: tl.constexpr):
    """Of each row at a dyadic level, [C] each: its number, whether it lies in a right half, the first row of its half,
    and the half's size.

    The compiler is kept from knowing that rows are the same at every level: masks made of them would lie in registers.
    """
    o_c = tl.arange(0, C) + (level >> 8)
    size = o_c * 0 + (1 << level)
    return o_c, (o_c & size) != 0, o_c & -size, size


@triton.jit
def level_decays(b_w, level, C: tl.constexpr):
    """Log decay between each row and its half's boundary, [C, BK]: over the rows before it in a right half, after it
    in a left one."""
    o_c, right, first, size = halves(level, C)
    return sums(within(tl.where(right, first, o_c + 1), tl.where(right, o_c, first + size), C), b_w)


@triton.jit
def level_weight(b_w, level, C: tl.constexpr, SCALED: tl.constexpr):
    """e^{`level_decays`}, for SCALED 2^14 times that (`RAISED`)."""
    weight = exp(level_decays(b_w, level, C))
    if SCALED:
        weight *= 16384.0
    return weight


@triton.jit
def meet(level, C: tl.constexpr):
    """Whether two rows are of the two halves of one block of a dyadic level, [C, C]."""
    _, _, first, size = halves(level, C)
    return within(first ^ size, (first ^ size) + size, C)


@triton.jit
def only(mask, x):
    return tl.where(mask, x, tl.zeros_like(x))


@triton.jit
def same_block(C: tl.constexpr):
    first = tl.arange(0, C) // BLOCK * BLOCK
    return within(first, first + BLOCK, C)


@triton.jit
def about_middles(b_w, B: tl.constexpr, C: tl.constexpr):
    """Log decays of reads and of keys counted from the middle of each block of B rows, [C, BK]."""
    o_c = tl.arange(0, C)
    middle = o_c // B * B + B // 2
    second = o_c >= middle
    mask = within(tl.where(second, middle, o_c + 1), tl.where(second, o_c + 1, middle), C)
    upto = sums(tl.where(mask, tl.where(second, 1.0, -1.0)[:, None], 0.0), b_w)
    return upto - b_w.to(tl.float32), -upto


@triton.jit
def about_blocks(b_w, C: tl.constexpr):
    """`about_middles` of blocks of `BLOCK` rows, and whether every one of these is mild."""
    read, key = about_middles(b_w, BLOCK, C)
    spare = tl.minimum(-tl.maximum(tl.abs(read), tl.abs(key)) - MILD_HALF, b_w.to(tl.float32) - BLOCK_TOKEN)
    return read, key, tl.min(spare) > 0


@triton.jit
def pair_scores(b_q, b_k, b_w, C: tl.constexpr, LEVELS: tl.constexpr, TURNED: tl.constexpr, SCALED: tl.constexpr):
    """sum over a block of k of q_i k_j e^{decay strictly between j and i}, [C, C], right for i > j only; TURNED: its
    transpose."""
    within_blocks = tl.zeros([C, C], dtype=tl.float32)
    first_level = 0
    if SCALED and b_w.dtype != tl.float32:  # as in `SUMMED_BY_PRODUCT`
        read, key, fit = about_blocks(b_w, C)
        if fit:
            q_high, q_low = split(b_q * exp(read))
            k_high, k_low = split(b_k * exp(key))
            if TURNED:
                within_blocks = add_product(within_blocks, k_high, k_low, tl.trans(q_high), tl.trans(q_low))
            else:
                within_blocks = add_product(within_blocks, q_high, q_low, tl.trans(k_high), tl.trans(k_low))
            within_blocks = only(same_block(C), within_blocks)
        first_level = fit.to(tl.int32) * BLOCK_LEVELS
    q, q_unit = by_rows(b_q, SCALED)
    k, k_unit = by_rows(b_k, SCALED)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for level in range(first_level, LEVELS):
        _, right, _, _ = halves(level, C)
        p = tl.where(right[:, None], q, k) * level_weight(b_w, level, C, SCALED).to(q.dtype)
        b_A += tl.where(meet(level, C), tl.dot(p, tl.trans(p), input_precision="tf32x3"), 0.0)
    if SCALED:
        k_unit *= RAISED
    if TURNED:
        b_A *= k_unit[:, None] * q_unit[None, :]
    else:
        b_A *= q_unit[:, None] * k_unit[None, :]
    return b_A + within_blocks


@triton.jit
def add_pair_sums(b_x, pairs_high, pairs_low, b_k, b_w, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """b_x + sum_{j<i} pairs_ij k_j e^{decay strictly between j and i}, [C, BK]. pairs: an `operand`, [C, C]."""
    o_c = tl.arange(0, C)
    first_level = 0
    if SCALED:
        read, key, mild = about_blocks(b_w, C)
        if mild:
            below = same_block(C) & (o_c[:, None] > o_c[None, :])
            k_high, k_low = split(b_k * exp(key))
            x = tl.zeros_like(b_x)
            b_x += add_product(x, only(below, pairs_high), only(below, pairs_low), k_high, k_low) * exp(read)
        first_level = mild.to(tl.int32) * BLOCK_LEVELS
    for level in range(first_level, LEVELS):
        _, right, _, _ = halves(level, C)
        right_by_left = right[:, None] & meet(level, C)
        weight = exp(level_decays(b_w, level, C))
        k_high, k_low = operand(b_k * weight, SCALED)
        x = tl.zeros_like(b_x)
        b_x += (
            add_operands(x, only(right_by_left, pairs_high), only(right_by_left, pairs_low), k_high, k_low, SCALED)
            * weight
        )
    return b_x


@triton.jit
def pair_grads(b_q, b_k, b_w, pairs, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """What the pairs inside the chunk add to dq, dk and dw. pairs: dA + dA^T, the diagonal left out."""
    o_c = tl.arange(0, C)
    b_dq, b_dk, b_dw = tl.zeros_like(b_q), tl.zeros_like(b_k), tl.zeros_like(b_q)
    q, q_unit = by_rows(b_q, SCALED)
    k, k_unit = by_rows(b_k, SCALED)
    pairs *= tl.where(o_c[:, None] > o_c[None, :], k_unit[None, :], q_unit[None, :])
    pairs, unit = by_rows(pairs, SCALED)
    if SCALED:
        unit *= RAISED
    for level in range(LEVELS):
        # Rows of right halves meet those of left halves and the other way round: one product serves dq and dk.
        o_c, right, first, size = halves(level, C)
        p = tl.where(right[:, None], q, k)
        weight = level_weight(b_w, level, C, SCALED)
        b_g = tl.dot(only(meet(level, C), pairs), p * weight.to(q.dtype), input_precision="tf32x3")
        b_g *= weight * unit[:, None]
        b_dq += tl.where(right[:, None], b_g, 0.0)
        b_dk += tl.where(right[:, None], 0.0, b_g)
        # The decay at t is passed by the reads after t in its right half, by the keys before t in its left half.
        passing = within(tl.where(right, o_c + 1, first), tl.where(right, first + size, o_c), C)
        b_dw = add_sums(b_dw, passing, b_g * p * tl.where(right, q_unit, k_unit)[:, None], not SCALED)
    return b_dq, b_dk, b_dw


@triton.jit
def _passed(b_S, b_w, total, x, y, w, scale, start, end, i_h, i_k, i_v, H: tl.constexpr, G: tl.constexpr,
            K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after C rows with decays b_w, in reverse its gradient before them. As in `stream_kernel`."""
    o_c = tl.arange(0, C)
    if REVERSE:
        if INCLUSIVE and SCALED:
            factor = tl.exp(sums(o_c[:, None] >= o_c[None, :], b_w)) * scale
        elif INCLUSIVE:
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
def _walk(
    x, y, w, states, scales, mild_scales, remainders, decay, mild, initial, last, scale, begin, end, first_chunk,
    chunks, i_s, i_h, i_k, i_v,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr, TOTALS: tl.constexpr,
    SCALED: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one state through one segment; remainders, decay and mild may be None. As in `stream_kernel`."""
    NK: tl.constexpr = (K + BK - 1) // BK
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
        if SCALED:
            b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
        else:
            b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        if SCALED and not TOTALS:
            first, second, is_mild = halves_and_mild(b_w, C)
            total = first + second
            if REVERSE:
                half = exp(second)
            else:
                half = exp(first)
            store_state(
                states, scales, i_ch, b_S, i_k, i_v, K, V, BK, BV, SCALED, mild_scales, half, remainders
            )  # fmt: skip
            if mild is not None:
                tl.store(mild + i_ch * NK + i_k, is_mild, mask=i_v == 0)
        else:
            total = whole_decay(b_w, C, SCALED)
            if TOTALS:
                b_all += total
            else:
                store_state(states, scales, i_ch, b_S, i_k, i_v, K, V, BK, BV, SCALED)
        b_S = _passed(b_S, b_w, total, x, y, w, scale, start, end, i_h, i_k, i_v, H, G, K, V, C, BK, BV, REVERSE,
                      INCLUSIVE, SCALED, PRECISION)  # fmt: skip
    if TOTALS:
        if decay is not None:
            o_k = i_k * BK + tl.arange(0, BK)
            tl.store(decay + i_sh.to(tl.int64) * K + o_k, tl.exp(b_all), mask=(o_k < K) & (i_v == 0))
        p_S, m_S = state_pointers(states, i_sh, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
    if WANTS_LAST:
        p_S, m_S = state_pointers(last, i_sh, i_k, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@triton.jit
def locate_segment(i_s, sequence_of_segment, segment_offsets, cu_seqlens, offsets, T, L, C: tl.constexpr,
                   SEGMENTED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """First row of segment i_s of L chunks and the end of its sequence, its first chunk, and how many it has."""
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
    return begin, end, first_chunk, chunks


@kernel
def stream_kernel(
    x, y, states, scales, mild_scales, initial, last,
    other_x, other_y, other_states, other_scales, other_mild_scales, other_initial, other_last,
    remainders, w, decay, mild, scale, sequence_of_segment, segment_offsets, cu_seqlens, offsets, T, L,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, OTHER_V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, OTHER_BV: tl.constexpr, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr,
    TOTALS: tl.constexpr, SEGMENTED: tl.constexpr, SCALED: tl.constexpr,
    HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- e^{total} S + (k e^{after})^T v, chunk after chunk of a segment of L; in reverse (scale r e^{before})^T do.

    The state before each chunk is stored, and whether its decays are mild; or, for TOTALS, what the whole segment makes
    of a zero state, and e^{its total}. INCLUSIVE: a read is faded by its own token's decay too.
    G: heads of x and y that write into one state. SCALED: products of split operands, and states in 16 bits.
    OTHER_V: columns of another state that decays alike, 0 if there is none. In registers: a tile of one, [BK, BV].
    remainders: as of `store_state`, of the first state alone; None where nobody needs them.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    OTHER_NV: tl.constexpr = (OTHER_V + OTHER_BV - 1) // OTHER_BV
    i, i_s = program(NK * (NV + OTHER_NV) * H)
    i_h, i_k, i_v = i % H, (i // H) % NK, i // (H * NK)
    begin, end, first_chunk, chunks = locate_segment(
        i_s, sequence_of_segment, segment_offsets, cu_seqlens, offsets, T, L, C, SEGMENTED, PACKED
    )
    if i_v < NV:
        _walk(x, y, w, states, scales, mild_scales, remainders, decay, mild, initial, last, scale, begin, end,
              first_chunk, chunks, i_s, i_h, i_k, i_v, H, G, K, V, C, BK, BV, REVERSE, INCLUSIVE, TOTALS, SCALED,
              HAS_FIRST, WANTS_LAST, PRECISION)  # fmt: skip
    elif OTHER_V > 0:
        _walk(other_x, other_y, w, other_states, other_scales, other_mild_scales, None, None, None, other_initial,
              other_last, scale, begin, end, first_chunk, chunks, i_s, i_h, i_k, i_v - NV, H, G, K, OTHER_V, C, BK,
              OTHER_BV, REVERSE, INCLUSIVE, TOTALS, SCALED, HAS_FIRST, WANTS_LAST, PRECISION)  # fmt: skip


@triton.jit
def _scan_index(j, first_part, parts, i_h, H: tl.constexpr, REVERSE: tl.constexpr):
    """The number, in memory, of the j-th state that a scan comes to."""
    if REVERSE:
        i = first_part + parts - 1 - j
    else:
        i = first_part + j
    return tl.cast(i, tl.int64) * H + i_h


@kernel
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


class Kept(NamedTuple):
    """Kept states [chunks, H, K, V]; where they are 16-bit, the scales of their rows, and those of the states at the
    middles of chunks."""

    states: torch.Tensor
    scales: torch.Tensor | None
    mild_scales: torch.Tensor | None


class ChunkPlan:
    """What all launches of a call share: sizes, where the chunks are, precision, and the launch table's word.

    op: prefix of its rows in the launch table; x: a sequence with a state's rows, [B, T, H, rows]; V: its columns.
    """

    def __init__(self, op: str, x: torch.Tensor, V: int, packing: Packing | None, chunk_size: int, flags: int = 0):
        (B, self.T, self.H, self.rows), self.columns = x.shape, V
        self.op, self.width = op, width(x.element_size())
        self.scaled, self.C = cut_into_chunks(op, x, V, chunk_size)
        self.precision = "tf32" if self.width == "16-bit" else "tf32x3"
        self.packing = packing
        if packing is None:
            self.N, self.chunks = B, B * cdiv(self.T, self.C)
        else:
            self.N, self.chunks = packing.N, packing.room(self.C)
        # Chunks and heads that a program looks at where a launch may find that few or none are its own.
        enough = self.chunks * self.H // (2 * ENOUGH)
        self.at_once = min(8, 1 << enough.bit_length()) if self.width == "16-bit" else 1
        self.empty = x.new_empty(0, dtype=torch.float32).new_empty
        # The guard looks at blocks of K as `stream_kernel` cuts them, unless the operator says otherwise.
        self.flags = flags or _flags(op, x)

    @cached_property
    def where(self) -> tuple:
        """What a kernel takes to find its chunk: the sequence of each, and how many come before each sequence."""
        if self.packing is None:
            return None, None, None, self.T
        chunks = self.packing.pieces(self.C)
        return chunks.sequence, self.packing.offsets, chunks.before, self.T

    def block(self, size: int, limit: int) -> int:
        """As `launch.block`, but in long chunks of `NARROWEST` at least, whatever the limit."""
        return max(block(size, limit), NARROWEST if self.C == LONG_CHUNK_SIZE else 0)

    def sizes(self, kernel: str, V: int | None = None) -> tuple[dict, int, int]:
        """Keyword arguments every kernel takes, and the numbers of blocks along K and V (default: the state's)."""
        launch, V = TABLE[f"{self.op}.{kernel}", self.width], self.columns if V is None else V
        BK, BV = self.block(self.rows, launch.BK), self.block(V, launch.BV)
        common = dict(
            H=self.H, K=self.rows, V=V, C=self.C, BK=BK, BV=BV, PACKED=self.packing is not None,
            PRECISION=self.precision, num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
        )  # fmt: skip
        return common, cdiv(self.rows, BK), cdiv(V, BV)

    def ways(self, kernel: str):
        """The launches of a kernel that works inside chunks: (keyword arguments, blocks along V)."""
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            common, _, NV = self.sizes(f"{kernel}.{way}")
            yield common | dict(FLAGS=self.flags, LEVELS=self.C.bit_length() - 1, MILD=int(way == "mild")), NV

    def kept_shape(self, V: int) -> tuple[int, ...]:
        """Of the float32 tensor that holds the state entering every chunk."""
        return _kept_shape(self.scaled, self.op, self.chunks, self.H, self.rows, V)

    def room_for_states(self, V: int) -> torch.Tensor:
        """A tensor of `kept_shape` in which what no kernel will write is 0: no output may be left to chance."""
        kept = self.empty(self.kept_shape(V))
        if self.packing is not None:
            kept.zero_()  # a packed batch has room for more chunks than it fills
        elif self.scaled:
            scales = _scales(self.op, self.chunks, self.H, self.rows, V)
            used = _scales(self.op, self.chunks, self.H, self.rows, V, rounded=False)
            if used < scales:
                kept[: 2 * scales].view(2, scales)[:, used:] = 0
            if self.chunks * self.H * self.rows * V % 2:
                kept[-1:] = 0
        return kept

    def unpacked(self, kept: torch.Tensor, V: int) -> Kept:
        """What lies in a tensor of `kept_shape`."""
        if not self.scaled:
            return Kept(kept, None, None)
        scales = _scales(self.op, self.chunks, self.H, self.rows, V)
        own, mild, states = kept.split([scales, scales, kept.numel() - 2 * scales])
        return Kept(states.view(torch.float16), own, mild)

    def taken_apart(self, given, mild: bool) -> list:
        """What a kernel takes: given, but each `Kept` as its states and their scales."""
        taken = []
        for x in given:
            if type(x) is Kept:
                taken += x.states, x.mild_scales if mild else x.scales
            else:
                taken.append(x)
        return taken

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.H, self.rows, self.columns

    def states(self, x, y, w, scale, first, last, reverse, inclusive=False, beside=None, remainders=None):
        """The state entering each chunk (reverse: the gradient leaving it), and which chunks are mild (reverse: None).

        The states come in one tensor of `kept_shape`, which `unpacked` takes apart.

        x [B, T, G H, K] and y [B, T, G H, V] make each chunk's writing, G heads one state's; V is y's own, whatever the
        plan's is. inclusive: in reverse, a read is faded by its own token's decay too.
        first and last [N, H, K, V]: where to begin, and where to leave the end; None: zeros, nowhere. first may also be
        a function of what this makes of any state: of the factor [N, H, K] and the list of what it makes of zeros. What
        it returns gives first, and beside's, in a list, and may wait for it.
        beside: (x, y, first, last) of another state that decays alike, of which all is as of this one but V. It goes
        through the same launch, and a tensor for each comes back.
        remainders: a float16 tensor [chunks, H, K, V] for what 16-bit states lose of the first, in their rows' scales.
        """
        given = [(x, y, first, last)] + ([beside] if beside else [])
        columns = [y.shape[-1] for _, y, _, _ in given]
        common, NK, NV = self.sizes("stream", columns[0])
        common |= dict(
            G=x.shape[2] // self.H, REVERSE=reverse, INCLUSIVE=inclusive, SCALED=self.scaled, OTHER_V=0, OTHER_BV=1,
        )  # fmt: skip
        if beside:
            other, _, other_NV = self.sizes("stream", columns[1])
            common |= dict(OTHER_V=columns[1], OTHER_BV=other["BV"])
            NV += other_NV
        kept = [self.room_for_states(V) for V in columns]
        mild = None
        if not reverse:
            mild = self.empty(self.chunks, self.H, NK, dtype=torch.int32)
            if self.packing is not None or not self.scaled:
                mild.zero_()
        L, segments, segment_offsets, sequence_of_segment = self.segments(NK * NV * self.H)
        where = (sequence_of_segment, segment_offsets, *self.where[1:], L)
        grid = (NK * NV * self.H * segments,)
        if segments > self.N or callable(first):
            entering = self._entering(given, w, scale, segments, where, grid, common)
            given = [(x, y, S, None) for (x, y, _, _), S in zip(given, entering, strict=True)]
        streams = [
            (x, y, *self.unpacked(S, V), first, last)
            for (x, y, first, last), S, V in zip(given, kept, columns, strict=True)
        ]
        _, _, first, last = given[0]
        stream_kernel[grid](
            *_pair(streams), remainders, w, None, mild, scale, *where, TOTALS=False, SEGMENTED=segments > self.N,
            HAS_FIRST=first is not None, WANTS_LAST=last is not None, **common,
        )  # fmt: skip
        return (tuple(kept) if beside else kept[0]), mild

    def segments(self, programs):
        """Chunks a segment, segments, and of a packed batch the segments before each sequence and whose each is.

        programs: of one segment. Sequences stay whole where these are enough to fill a GPU. A packed batch, whose
        sequences may be of any length, is cut whenever that is needed to make them alike.
        """
        enough = ENOUGH // 2 if self.scaled else ENOUGH  # each with a state twice as large
        if self.packing is None and self.N * programs >= enough:
            return cdiv(self.T, self.C), self.N, None, None
        L = max(SHORTEST_SEGMENT, cdiv(self.chunks * programs, 2 * enough))  # finer: pieces are of unlike length
        if self.packing is None:
            return L, self.N * cdiv(self.T, self.C * L), None, None
        segments = self.packing.pieces(self.C * L)
        return L, segments.room, segments.before, segments.sequence

    def entering(
        self, x, y, w, scale, first, parts, sequence_of_part, offsets, tokens, reverse, meanwhile=lambda: None
    ):
        """The state entering each of so many parts of so many tokens, [parts, H, K, V] (reverse: the gradient of the
        one that leaves it). tokens: a multiple of all chunks. meanwhile: launches what needs none of these states,
        while first is awaited. Else as of `states`."""
        common, NK, NV = self.sizes("stream")
        common |= dict(G=1, REVERSE=reverse, INCLUSIVE=False, SCALED=self.scaled, OTHER_V=0, OTHER_BV=1)
        # The offsets of chunks tell where their states go, of which none is kept here.
        cu_seqlens = None if self.packing is None else self.packing.offsets
        where = (sequence_of_part, offsets, cu_seqlens, offsets, self.T, tokens // self.C)
        grid = (NK * NV * self.H * parts,)
        return self._entering([(x, y, first, None)], w, scale, parts, where, grid, common, meanwhile)[0]

    def _entering(self, given, w, scale, segments, where, grid, common, meanwhile=lambda: None):
        """Of each state that is given, as to `states`, what enters each segment."""
        entering = [self.empty(segments, self.H, self.rows, y.shape[-1]) for _, y, _, _ in given]
        decay = self.empty(segments, self.H, self.rows)
        totals = [(x, y, S, None, None, None, None) for (x, y, _, _), S in zip(given, entering, strict=True)]
        stream_kernel[grid](
            *_pair(totals), None, w, decay, None, scale, *where,
            TOTALS=True, SEGMENTED=True, HAS_FIRST=False, WANTS_LAST=False, **common,
        )  # fmt: skip
        _, segment_offsets, *_ = where
        rest = segments // self.N, segment_offsets, common["REVERSE"]
        firsts = [first for _, _, first, _ in given]
        if callable(firsts[0]):
            written = [S.new_empty(self.N, *S.shape[1:]) for S in entering]
            for S, whole in zip(entering, written, strict=True):
                self._scan(S.clone(), decay, None, whole, *rest)
            arrived = firsts[0](decay.unflatten(0, (self.N, -1)).prod(1), written)
            meanwhile()
            firsts = arrived()
        else:
            meanwhile()
        for (_, _, _, last), first, S in zip(given, firsts, entering, strict=True):
            self._scan(S, decay, first, last, *rest)
        return entering

    def _scan(self, written, decay, first, last, parts, offsets, reverse):
        """Put the state entering each part where its writing [parts, H, K, V] was; decay e^{total} [parts, H, K]."""
        V = written.shape[-1]
        launch = TABLE["scan", self.width]
        BE = elements(self.rows * V, self.N * self.H, launch.BV)
        scan_kernel[(cdiv(self.rows * V, BE) * self.N * self.H,)](
            written, decay, first, last, offsets, parts, H=self.H, K=self.rows, V=V, BE=BE,
            REVERSE=reverse, HAS_FIRST=first is not None, WANTS_LAST=last is not None,
            PACKED=self.packing is not None, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def _pair(streams: list[tuple]) -> tuple:
    """What `stream_kernel` takes of one stream or two."""
    return (*streams[0], *(streams[1] if len(streams) > 1 else (None,) * len(streams[0])))


def cut_into_chunks(op: str, x: torch.Tensor, V: int, chunk_size: int) -> tuple[bool, int]:
    """Whether states between chunks are 16-bit, each row over a power of two, and tokens a chunk. As of `ChunkPlan`."""
    narrow = x.element_size() == 2
    if op == "rwkv7":
        return False, min(chunk_size or (CHUNK_SIZE if narrow else SHORT_CHUNK_SIZE), CHUNK_SIZE)
    # In the interpreter, which cannot multiply bfloat16, float16 stands in for it.
    tried = narrow and (x.dtype == torch.bfloat16 or interpreted())
    long = block(x.shape[-1], 128) == 64 and (op == "gsa" or block(V, 128) == 64)
    most = LONG_CHUNK_SIZE if tried and long else CHUNK_SIZE
    return narrow, min(chunk_size or most, most)


def _flags(op: str, x: torch.Tensor) -> int:
    """Of each chunk and head: blocks along K whose decay is said to be mild or not."""
    K = x.shape[-1]
    return cdiv(K, block(K, TABLE[f"{op}.stream", width(x.element_size())].BK))


def _scales(op: str, states: int, H: int, K: int, V: int, rounded: bool = True) -> int:
    """Numbers that scale the rows of so many states, one for each block along V, rounded up to whole cache lines. There
    are as many again, of the states at the middles of chunks."""
    numbers = states * H * K * cdiv(V, block(V, TABLE[f"{op}.stream", "16-bit"].BV))
    return cdiv(numbers, 32) * 32 if rounded else numbers


def _kept_shape(scaled: bool, op: str, states: int, H: int, K: int, V: int) -> tuple[int, ...]:
    if not scaled:
        return states, H, K, V
    return (2 * _scales(op, states, H, K, V) + cdiv(states * H * K * V, 2),)


def chunks_of(op, x, V, packing, chunk_size) -> int:
    _, C = cut_into_chunks(op, x, V, chunk_size)
    B, T = x.shape[:2]
    return B * -(-T // C) if packing is None else packing.room(C)


def kept_states_shape(op, x, V, packing, chunk_size) -> tuple[int, ...]:
    """Shape of what `ChunkPlan.states` returns, known without the offsets' values; arguments as of `ChunkPlan`."""
    scaled, _ = cut_into_chunks(op, x, V, chunk_size)
    return _kept_shape(scaled, op, chunks_of(op, x, V, packing, chunk_size), *x.shape[2:], V)


def flags_of(op, x, V, packing, chunk_size) -> int:
    """How many flags say which chunks are mild; arguments as of `ChunkPlan`."""
    return chunks_of(op, x, V, packing, chunk_size) * x.shape[2] * _flags(op, x)
