"""Tiles of a chunk, stored states between chunks, and a chunk's decay, for the kernels of the chunked form.

A chunk is *mild* where its whole decay, taken about the middle row, provably fits float32. Kernels that work inside
chunks are compiled once for mild chunks and once for all others, so that the common path stays small.
"""

import triton
import triton.language as tl

from .blocks_triton import clamped_decay, prefetch, sums_of_columns
from .launch import LONG_CHUNK_SIZE

MILD_HALF = tl.constexpr(-55.0)
"""A chunk is mild if no channel's log decay over a half is below this: no factor about the middle reaches e^55, …"""
MILD_TOKEN = tl.constexpr(-4.0)
"""… and if no token's log decay is: the mild path's decay gradient loses a factor e^{-w} of precision."""

BLOCK = tl.constexpr(16)
"""Rows of the blocks into which chunks of larger decays are cut. A block is mild under the conditions of a chunk, …"""
BLOCK_TOKEN = tl.constexpr(-6.0)
"""… with this instead of `MILD_TOKEN`: a difference spans a quarter of the rows."""
HALF_FLOAT32 = tl.constexpr(-8.0)
"""As `MILD_HALF`, for float32 inputs: a factor e^x has a relative error of x 2^-24, the rounding of x."""
TOKEN_FLOAT32 = tl.constexpr(-3.0)
"""As `MILD_TOKEN` and `BLOCK_TOKEN`, for float32 inputs."""


@triton.jit
def load_tile(p, start, end, i_h, i_d, shift: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
              BD: tl.constexpr):  # fmt: skip
    """Load rows start + shift … of head i_h of p [rows, H, D], columns i_d * BD …, as a tile [C, BD]; zero outside the
    chunk and the sequence, which ends at row `end`."""
    o_c = tl.arange(0, C) + shift
    o_d = i_d * BD + tl.arange(0, BD)
    m = ((o_c >= 0) & (o_c < C) & (o_c < end - start))[:, None] & (o_d < D)[None, :]
    return tl.load(p + (start * H + i_h) * D + o_c[:, None] * (H * D) + o_d[None, :], mask=m, other=0.0)


@triton.jit
def store_tile(p, x, start, end, i_h, i_d, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Store a tile x [C, BD] where `load_tile` loads one without a shift, in p's dtype."""
    o_c = tl.arange(0, C)
    o_d = i_d * BD + tl.arange(0, BD)
    m = (o_c < end - start)[:, None] & (o_d < D)[None, :]
    tl.store(p + (start * H + i_h) * D + o_c[:, None] * (H * D) + o_d[None, :], x.to(p.dtype.element_ty), mask=m)


@triton.jit
def prefetch_tile(p, start, end, i_h, i_d, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Prefetch into the L2 cache what `load_tile` will load with these arguments."""
    o_c = tl.arange(0, C)
    prefetch(p + (start * H + i_h) * D + o_c * (H * D) + i_d * BD, o_c < end - start, BD)


@triton.jit
def prefetch_state(states, i, there, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Prefetch into the L2 cache what `load_state` will load with these arguments, where `there`."""
    o_k = i_k * BK + tl.arange(0, BK)
    prefetch(states + i.to(tl.int64) * K * V + o_k * V + i_v * BV, (o_k < K) & there, BV)


@triton.jit
def state_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return pointers to a [BK, BV] tile of state i of p [states, K, V], and its mask."""
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    return p + i.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :], (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def matrix_pointers(p, i, N: tl.constexpr):
    """Return pointers to matrix i of p [matrices, N, N]."""
    o = tl.arange(0, N)
    return p + i.to(tl.int64) * N * N + o[:, None] * N + o[None, :]


@triton.jit
def scale_pointers(p, i, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return pointers to the row scales of a [BK, BV] tile of state i of p [states, NV, K], and their mask."""
    o_k = i_k * BK + tl.arange(0, BK)
    NV: tl.constexpr = (V + BV - 1) // BV
    return p + (i.to(tl.int64) * NV + i_v) * K + o_k, o_k < K


@triton.jit
def scaled(x, BITS: tl.constexpr = 0):
    """Return x [N, D] in float16, each row divided by a power of two, and the powers [N]. A row's largest element is
    from 2^BITS to 2^(BITS + 1) then; with 14 BITS one of 2^-28 of it keeps all its digits."""
    x = x.to(tl.float32)
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000) - (BITS << 23)
    exponent = tl.minimum(tl.maximum(exponent, 0x04000000), 0x7B000000)  # so that its reciprocal is finite too
    reciprocal = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return (x * reciprocal[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)


@triton.jit
def row_units(units, start, end, i_h, H: tl.constexpr, C: tl.constexpr):
    """Load what `store_in_units` stored of a chunk's rows in units [rows, H], [C]; ones outside the sequence."""
    o_c = tl.arange(0, C)
    return tl.load(units + start * H + i_h + o_c * H, mask=o_c < end - start, other=1.0)


@triton.jit
def store_in_units(p, units, x, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
                   BD: tl.constexpr):  # fmt: skip
    """Store float32 x [C, D] in float16 where `load_tile` loads it, `scaled` by row, and the rows' powers of two in
    units [rows, H]. Return what was stored, in float32."""
    x, unit = scaled(x, 14)
    store_tile(p, x, start, end, i_h, 0, H, D, C, BD)
    o_c = tl.arange(0, C)
    tl.store(units + start * H + i_h + o_c * H, unit, mask=o_c < end - start)
    return x.to(tl.float32) * unit[:, None]


@triton.jit
def store_state(states, scales, i, b_S, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, SCALED: tl.constexpr, mild_scales=None, half=None, remainders=None):  # fmt: skip
    """Store a tile b_S [BK, BV] of state i of `states` [states, K, V]. SCALED: in float16, `scaled` by row.

    scales, mild_scales [states, NV, K]: receive the row scales, 0 for rows of zeros (or below 2^-118), and the row
    scales of the state at the chunk's middle, scales * half. half [BK]: the decay factor of half a chunk.
    remainders [states, K, V] float16, or None: receives the rounding errors, in units of the row scales.
    """
    p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
    if SCALED:
        whole = b_S
        b_S, unit = scaled(whole)
        if remainders is not None:
            p_R, _ = state_pointers(remainders, i, i_k, i_v, K, V, BK, BV)
            tl.store(p_R, (whole / unit[:, None] - b_S.to(tl.float32)).to(tl.float16), mask=m_S)
        unit = tl.where(unit < 2.0**-118, 0.0, unit)
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        apart = (mild_scales.to(tl.int64) - scales.to(tl.int64)) // 4
        p_s = p_s[:, None] + apart * tl.arange(0, 2)[None, :]
        tl.store(p_s, tl.join(unit, unit * half), mask=m_s[:, None])  # one change of layout instead of two
    tl.store(p_S, b_S.to(states.dtype.element_ty), mask=m_S)


@triton.jit
def load_state(states, scales, i, there, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Load a tile that `store_state` stored, [BK, BV], and its row scales, [BK], or ones; zeros unless `there`."""
    p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
    b_S = tl.load(p_S, mask=m_S & there, other=0.0)
    unit = tl.full([BK], 1.0, tl.float32)
    if SCALED:
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        unit = tl.load(p_s, mask=m_s & there, other=0.0)
    return b_S, unit


@triton.jit
def is_zero(scales, i, there, i_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return the mask [BK] of the rows of state i that are 0 (or below 2^-118), read from their scales.

    The decay of a chunk's first token acts on the state alone. Where the state is 0, that decay's gradient is exactly
    0, and not the rounding residue of a difference over pairs of later tokens.
    """
    largest = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        p_s, m_s = scale_pointers(scales, i, i_k, i_v, K, V, BK, BV)
        largest = tl.maximum(largest, tl.load(p_s, mask=m_s & there, other=0.0))
    return largest == 0.0


@triton.jit
def scaled_rows(x, SCALED: tl.constexpr):
    """Return x [N, D] as the operand of one float16 product, and its row scales [N]; without SCALED, x and ones."""
    unit = tl.full([x.shape[0]], 1.0, tl.float32)
    if SCALED:
        x, unit = scaled(x)
    return x, unit


@triton.jit
def half_decays(b_w, C: tl.constexpr):
    """Return the log decay of the first half of a chunk's rows and of the second, [BK] each, from b_w [C, BK]."""
    first = (tl.arange(0, C) < C // 2)[:, None]
    b_w = b_w.to(tl.float32)
    return tl.sum(tl.where(first, b_w, 0.0), 0), tl.sum(tl.where(first, 0.0, b_w), 0)


SUMMED_BY_PRODUCT = tl.constexpr(LONG_CHUNK_SIZE)
"""Chunk length at which 16-bit decays are summed by a matrix product, which needs no reduction across warps.

In shorter chunks the product would be a wgmma with an operand narrower than `NARROWEST`. float32 decays are not summed
this way either: a setting of RWKV6 with them ended in a misaligned address on an H200 (Triton 3.6, data/tuning.md).
"""


@triton.jit
def total_decay(b_w, C: tl.constexpr, SCALED: tl.constexpr):
    """Return the log decay of a whole chunk, [BK], from b_w [C, BK]. SCALED: the inputs are 16-bit."""
    if SCALED and C == SUMMED_BY_PRODUCT and b_w.dtype != tl.float32:
        total = tl.max(sums_of_columns(b_w, tl.full([C, C], 1.0, tl.float32)), 1)
    else:
        first, second = half_decays(b_w, C)
        total = first + second
    return total


@triton.jit
def halves_and_mild(b_w, C: tl.constexpr, BLOCKS: tl.constexpr, SCALED: tl.constexpr):
    """Return `half_decays` of a chunk's rows b_w [C, BK], and 1 if every decay is mild, else 0.

    BLOCKS: 2 if the chunk is mild, 1 if only each of its blocks of `BLOCK` rows is, 0 otherwise. SCALED: the inputs are
    16-bit; float32 inputs have bounds of their own.
    """
    HALF: tl.constexpr = MILD_HALF if SCALED else HALF_FLOAT32
    TOKEN: tl.constexpr = MILD_TOKEN if SCALED else TOKEN_FLOAT32
    OF_BLOCK: tl.constexpr = BLOCK_TOKEN if SCALED else TOKEN_FLOAT32
    if C == SUMMED_BY_PRODUCT and b_w.dtype != tl.float32:
        o_c = tl.arange(0, C)
        # The sums of each half of a block or of the chunk, once for each of its rows.
        ROWS: tl.constexpr = BLOCK // 2 if BLOCKS else C // 2
        by_row = sums_of_columns(b_w, (o_c // ROWS)[:, None] == (o_c // ROWS)[None, :])
        first, second = tl.split(tl.sum(tl.reshape(by_row, (by_row.shape[0], 2, C // 2)), 2) / ROWS)
        lowest = tl.min(b_w.to(tl.float32))
        least = tl.minimum(first, second)
        if BLOCKS:  # one minimum over the channels, for which warps wait for each other, says both
            level = (least > HALF).to(tl.int32) + (tl.min(by_row, 1) > HALF).to(tl.int32)
            token = (lowest > TOKEN).to(tl.int32) + (lowest > OF_BLOCK).to(tl.int32)
            mild = tl.minimum(tl.min(level), token)
        else:
            mild = (tl.min(least) > HALF) & (lowest > TOKEN)
    else:
        first, second = half_decays(b_w, C)
        lowest = tl.min(b_w.to(tl.float32), 0)
        margin = tl.minimum(tl.minimum(first, second) - HALF, lowest - TOKEN)
        mild = tl.min(margin, 0) > 0
        if BLOCKS:
            halves = tl.sum(tl.reshape(b_w.to(tl.float32), (C // (BLOCK // 2), BLOCK // 2, b_w.shape[1])), 1)
            blocks_mild = tl.min(tl.minimum(tl.min(halves, 0) - HALF, lowest - OF_BLOCK), 0) > 0
            mild = mild.to(tl.int32) + (mild | blocks_mild).to(tl.int32)
    return first, second, mild.to(tl.int32)


@triton.jit
def mildest(mild, i, FLAGS: tl.constexpr):
    """Return the least flag of chunk-and-head i, from `halves_and_mild`: 0 if not even all of its blocks are mild."""
    o = tl.arange(0, triton.next_power_of_2(FLAGS))
    return tl.min(tl.load(mild + i * FLAGS + o, mask=o < FLAGS, other=2), 0)


@triton.jit
def handles(mild, i, FLAGS: tl.constexpr, MILD: tl.constexpr):
    """Return whether this launch handles chunk-and-head i. The mild launch takes those that are mild in every block of
    K, the other launch the rest."""
    return mildest(mild, i, FLAGS) == MILD


@triton.jit
def all_mild(mild, first, total, AT_ONCE: tl.constexpr, FLAGS: tl.constexpr):
    """Return whether AT_ONCE chunks-and-heads from `first` on are all mild, so that the dyadic launch has no work. One
    load reads all their flags: a launch without work spends its time waiting for these loads."""
    o = first * FLAGS + tl.arange(0, triton.next_power_of_2(AT_ONCE * FLAGS))
    flags = tl.load(mild + o, mask=o < tl.minimum(first + AT_ONCE, total) * FLAGS, other=1)
    return tl.min(flags, 0) > 0


@triton.jit
def not_mild(mild, i, total, FLAGS: tl.constexpr):
    """Return whether chunk-and-head i is below `total` and not mild in some block of K."""
    o = tl.arange(0, triton.next_power_of_2(FLAGS))
    return tl.min(tl.load(mild + i * FLAGS + o, mask=(o < FLAGS) & (i < total), other=1), 0) == 0


@triton.jit
def load_decays(w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Load log decays of a chunk as `clamped_decay` returns them, [C, BK]."""
    return clamped_decay(load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK))
