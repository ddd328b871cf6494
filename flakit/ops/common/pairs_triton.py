"""Scores of token pairs within a chunk, and their gradients, by dyadic levels (`common.decay`), whose factors are all
in [0, 1]; where the decays of a block of rows allow it, by one product about the block's middle.

Terms: at a level, the chunk is cut into halves of 1 << level rows; a right half's rows read the keys of the left half
before it. A row's factor is the decay between it and the boundary of the two halves.
"""

import triton
import triton.language as tl

from .blocks_triton import add_products, add_sums, exp, split, sums, terms
from .tiles_triton import BLOCK, BLOCK_TOKEN, MILD_HALF, scaled_rows

BLOCK_LEVELS = tl.constexpr(4)
"""In a mild block of BLOCK rows, one product about its middle replaces BLOCK_LEVELS dyadic levels."""

UNDO_WEIGHTS = tl.constexpr(2.0**-28)
"""Undoes factors of 2^14 on both operands of a product. float16 has room for these above values scaled to below 2;
with them, e^-19 is still a normal number."""


@triton.jit
def within(first, end, C: tl.constexpr):
    """Return the mask first_i <= j < end_i, [C, C], in two instructions an element; a mask can cost as much
    as a product."""
    o_c = tl.arange(0, C)
    return (o_c[None, :] - first[:, None]).to(tl.uint32) < (end - first)[:, None].to(tl.uint32)


@triton.jit
def halves(level, C: tl.constexpr):
    """Return for each row at a dyadic level, [C] each: its index, whether it lies in a right half, the first row of its
    half, and the half's size.

    Row indices depend on the level here, so that the compiler cannot hoist the masks and keep them in registers.
    """
    o_c = tl.arange(0, C) + (level >> 8)
    size = o_c * 0 + (1 << level)
    return o_c, (o_c & size) != 0, o_c & -size, size


@triton.jit
def to_boundary(level, C: tl.constexpr):
    """Return the mask [C, C] of the decays (columns) between each row and its half's boundary: those of the rows before
    it in a right half, after it in a left one."""
    o_c, right, first, size = halves(level, C)
    return within(tl.where(right, first, o_c + 1), tl.where(right, o_c, first + size), C)


@triton.jit
def level_decays(b_w, level, C: tl.constexpr):
    """Return the log decay between each row and its half's boundary, [C, BK], of b_w [C, BK]."""
    return sums(to_boundary(level, C), b_w)


@triton.jit
def level_weight(b_w, level, C: tl.constexpr, SCALED: tl.constexpr):
    """Return the decay factors of a level's rows, e^`level_decays`, [C, BK]; SCALED: times 2^14 (`UNDO_WEIGHTS`)."""
    weight = exp(level_decays(b_w, level, C))
    if SCALED:
        weight *= 16384.0
    return weight


@triton.jit
def opposite_halves(level, C: tl.constexpr):
    """Return the mask of row pairs in opposite halves of one block of a dyadic level, [C, C]."""
    _, _, first, size = halves(level, C)
    return within(first ^ size, (first ^ size) + size, C)


@triton.jit
def masked(mask, x):
    return tl.where(mask, x, tl.zeros_like(x))


@triton.jit
def same_block(C: tl.constexpr):
    first = tl.arange(0, C) // BLOCK * BLOCK
    return within(first, first + BLOCK, C)


@triton.jit
def about_middles(b_w, B: tl.constexpr, C: tl.constexpr):
    """Return log decays (read, key), [C, BK] each, about the middles of blocks of B rows: read_i + key_j is the log
    decay strictly between rows j < i of a block. b_w [C, BK]: log decays."""
    o_c = tl.arange(0, C)
    middle = o_c // B * B + B // 2
    second = o_c >= middle
    mask = within(tl.where(second, middle, o_c + 1), tl.where(second, o_c + 1, middle), C)
    upto = sums(tl.where(mask, tl.where(second, 1.0, -1.0)[:, None], 0.0), b_w)
    return upto - b_w.to(tl.float32), -upto


@triton.jit
def about_blocks(b_w, C: tl.constexpr):
    """Return `about_middles` of blocks of `BLOCK` rows, and whether all are mild: their exponentials fit float32."""
    read, key = about_middles(b_w, BLOCK, C)
    margin = tl.minimum(-tl.maximum(tl.abs(read), tl.abs(key)) - MILD_HALF, b_w.to(tl.float32) - BLOCK_TOKEN)
    return read, key, tl.min(margin) > 0


@triton.jit
def add_scores(b_A, b_q, b_k, TRANSPOSED: tl.constexpr):
    """Return b_A + b_q b_k^T, or TRANSPOSED b_A + b_k b_q^T, of float32 tiles [C, BK] as split operands."""
    q, k = split(b_q), split(b_k)
    if TRANSPOSED:
        q, k = k, q
    return add_products(b_A, q, [tl.trans(term) for term in k])


@triton.jit
def pair_scores(b_q, b_k, b_w, C: tl.constexpr, LEVELS: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr):
    """Return A_ij = sum over a block of K of q_i k_j e^{decay strictly between j and i}, [C, C], valid for i > j only.
    b_q, b_k, b_w [C, BK]: b_w are log decays. TRANSPOSED: return the transpose. SCALED: for 16-bit inputs."""
    within_blocks = tl.zeros([C, C], dtype=tl.float32)
    first_level = 0
    if SCALED and b_w.dtype != tl.float32:  # as in `SUMMED_BY_PRODUCT`
        read, key, mild = about_blocks(b_w, C)
        if mild:
            within_blocks = add_scores(within_blocks, b_q * exp(read), b_k * exp(key), TRANSPOSED)
            within_blocks = masked(same_block(C), within_blocks)
        first_level = mild.to(tl.int32) * BLOCK_LEVELS
    q, q_unit = scaled_rows(b_q, SCALED)
    k, k_unit = scaled_rows(b_k, SCALED)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for level in range(first_level, LEVELS):
        _, right, _, _ = halves(level, C)
        p = tl.where(right[:, None], q, k) * level_weight(b_w, level, C, SCALED).to(q.dtype)
        b_A += tl.where(opposite_halves(level, C), tl.dot(p, tl.trans(p), input_precision="tf32x3"), 0.0)
    if SCALED:
        k_unit *= UNDO_WEIGHTS
    if TRANSPOSED:
        b_A *= k_unit[:, None] * q_unit[None, :]
    else:
        b_A *= q_unit[:, None] * k_unit[None, :]
    return b_A + within_blocks


@triton.jit
def pair_grads(b_q, b_k, b_w, pairs, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """Return what pairs of rows in a chunk add to dq, dk and dw, [C, BK] each. b_q, b_k, b_w [C, BK]: b_w are log
    decays. pairs [C, C]: dA + dA^T without the diagonal, the scores' gradients. SCALED: for 16-bit inputs."""
    o_c = tl.arange(0, C)
    b_dq, b_dk, b_dw = tl.zeros_like(b_q), tl.zeros_like(b_k), tl.zeros_like(b_q)
    q, q_unit = scaled_rows(b_q, SCALED)
    k, k_unit = scaled_rows(b_k, SCALED)
    pairs *= tl.where(o_c[:, None] > o_c[None, :], k_unit[None, :], q_unit[None, :])
    pairs, unit = scaled_rows(pairs, SCALED)
    if SCALED:
        unit *= UNDO_WEIGHTS
    for level in range(LEVELS):
        # Rows of right halves pair with rows of left halves and vice versa: one product serves dq and dk.
        o_c, right, first, size = halves(level, C)
        p = tl.where(right[:, None], q, k)
        weight = level_weight(b_w, level, C, SCALED)
        b_g = tl.dot(masked(opposite_halves(level, C), pairs), p * weight.to(q.dtype), input_precision="tf32x3")
        b_g *= weight * unit[:, None]
        b_dq += tl.where(right[:, None], b_g, 0.0)
        b_dk += tl.where(right[:, None], 0.0, b_g)
        # The decay at t acts on the reads after t in a right half, on the keys before t in a left half.
        passing = within(tl.where(right, o_c + 1, first), tl.where(right, first + size, o_c), C)
        b_dw = add_sums(b_dw, passing, b_g * p * tl.where(right, q_unit, k_unit)[:, None], not SCALED)
    return b_dq, b_dk, b_dw


@triton.jit
def level_tokens(o, level, READS: tl.constexpr, C: tl.constexpr):
    """Return entries o of a list: the C / 2 tokens in a dyadic level's right halves (READS) or left ones, twice."""
    h = o % (C // 2)
    return (((h >> level) * 2 + READS) << level) + (h & ((1 << level) - 1))


@triton.jit
def level_rows(x, y, b_w, level, start, end, i_h, READS: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
               BK: tl.constexpr, TERMS: tl.constexpr):  # fmt: skip
    """Return for each chunk the rows of x [rows, H, K], then of y, at `level_tokens`, decayed to their halves'
    boundaries, [chunks, C, BK] in terms. b_w [chunks, C, BK]: finite log decays of the chunks from row `start` on."""
    C: tl.constexpr = b_w.shape[1]
    CHUNKS: tl.constexpr = b_w.shape[0]
    o, o_k, t = tl.arange(0, CHUNKS * C)[:, None], tl.arange(0, BK)[None, :], tl.arange(0, C)[None, :]
    i, of_x = level_tokens(o, level, READS, C), o % C < C // 2
    first = (i >> level) << level
    if READS:
        between = (t >= first) & (t < i + of_x.to(tl.int32))  # x, r, is decayed by its own token too
    else:
        between = (t > i) & (t < first + (1 << level))
    weight = exp(sums(tl.reshape(between.to(tl.float32), (CHUNKS, C, C)), b_w))
    i += o // C * C
    p, m = (start * H + i_h) * K + i * (H * K) + o_k, (i < end - start) & (o_k < K)
    if x.dtype == y.dtype:
        b_x = tl.load(tl.where(of_x, x, y) + p, mask=m, other=0.0).to(tl.float32)
    else:
        b_x = tl.load(x + p, mask=m & of_x, other=0.0).to(tl.float32)
        b_x += tl.load(y + p, mask=m & (of_x == 0), other=0.0).to(tl.float32)
    return terms(tl.reshape(b_x, (CHUNKS, C, BK)) * weight, TERMS)
