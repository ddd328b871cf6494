"""RWKV7 in chunks of 16 tokens, for heads of 33 to 64 channels: one program walks a head's whole sequence. A
forward and a backward kernel; before them, a kernel that is parallel over all chunks solves each.

Every token has two rows. With reads R = [r*; a*], keys E = [k*; b*], and their scores A, zero where E's token is later
(r sees its own token's keys, a does not), the entering state S and the leaving one's gradient D,

    v2 = U (A_ak v + a* S)         F = [v; v2]      o = r* S + A_r F        S <- E^T F + e^{total} S
    y = U^T (A_rb^T do + b* D)     G = [do; y]      dv = k* D + A_k^T G     D <- R^T G + e^{total} D
    dR = G S^T + P E               dE = F D^T + P^T R                       P = G F^T where A is not zero

and U = (I - A_ab)^{-1}. `scores_kernel` computes A_rk, A_ak, U and N = A_rb U of every chunk; with x = A_ak v + a* S,

    v2 = U x,   o = r* S + A_rk v + N x,   y = N^T do + U^T b* D

so that only a few products with the state remain sequential. `forward_kernel` stores S and v2 for the backward
kernel: in float16, or of float32 inputs in float32.

**Parts.** Where heads are few or sequences packed, each sequence is cut into parts, one for each program
(`bands_triton.Parts`). A part maps the state entering it to M S + N; the kernels of `carry_triton` compute M and N, and
from these the state entering each part.

**All tiles are transposed, in bands** (`common.bands_triton`) of 16 channels of v for each warp: a warp holds 16 rows
and all columns of S^T, F^T, G^T and D^T [V, ...]. Warps exchange only what all read: R* and E*, of which each computes
16 channels of k, and the scores. Sums over channels of v, the gradients of R and E, are in bands of channels of k.

**Paths.** A chunk is mild if each of its log decays is above `BLOCK_TOKEN`. `scores_kernel` processes several chunks at
a time. If all of them are mild, their scores are products of operands decayed about each one's middle: r* = scale r
e^{upto - mid}, a* = a e^{before - mid}, k* = k e^{mid - upto}, b* likewise (before, upto: sums of w over rows before a
row, up to and with it; mid, total: over the first half, over all); if not, they are computed by dyadic levels
(`common.decay`). In products with states decays start at the chunk's ends, where no factor exceeds 1, so one forward
kernel serves all. The backward kernel chooses for each chunk. In one that is not mild, dyadic levels compute the
gradients, and every term of the decay's gradient carries its decay. In a mild one they use the middle: S stands for
e^{mid} S, D for e^{rest} D, rest = total - mid, and the decay's gradient is a difference of the same products,

    dw_t = sum_v S D + sum_{i after t} R_i dR_i - sum_{j >= t} E_j (P^T R)_j + sum_{j < t} E_j (F D^T)_j

where "i after t" is t <= i for r_i and t < i for a_i.

Operands are sums of two bfloat16 numbers (`blocks_triton.terms`), with a relative error of 2^-17; of float32
inputs, sums of three, which are exact. Their scores are about the middle where log decays are above `MILD_FLOAT32`;
`backward_triton` takes no chunk for mild: the decay's gradient as a difference would lose float32's precision.

On Hopper GPUs, `forward_gluon` and `backward_gluon` compute bfloat16 heads of 64 channels: forward, one kernel instead
of `forward_kernel`; backward, one that walks the chunks for D and y, and others for all chunks' gradients in parallel.
"""

from functools import cached_property

import torch
import triton
import triton.language as tl

from ..common.bands_triton import (
    BANDS,
    CHANNELS,
    CHUNK,
    LEVELS,
    MILD_FLOAT32,
    Parts,
    bands,
    by_transpose,
    column,
    flat,
    flats,
    joined,
    launch_options,
    load_banded,
    load_pair,
    load_transposed,
    narrow_product,
    per_band,
    per_bands,
    power_of_two,
    product,
    sides,
    store_banded,
    store_pair,
    store_transposed,
    takes_gluon,
    transposed,
    turned,
)
from ..common.blocks_triton import (
    add_products,
    arrived,
    clamped_decay,
    exp,
    input_terms,
    kernel,
    level_pairs,
    prefetch,
    sums,
    sums_along,
    terms,
    whole,
)
from ..common.launch import TABLE, width
from ..common.pairs_triton import BLOCK_TOKEN, level_rows, level_tokens, masked
from ..common.positions_triton import locate_program
from ..common.tiles_triton import load_tile
from .carry_triton import carry_grads_kernel, carry_kernel, decays_from_ends, entering_kernel

UNITS = CHANNELS + 1
"""Scales of a chunk and head, powers of two: one for each row of v2^T, and one for the state."""
LOWEST_DECAY = tl.constexpr(-128.0)
"""The log decay at which kernels clamp w: e^-128 is 0 in float32. Clamping drops NaNs, but the scores keep them."""


@triton.jit
def _fill_pairs(x):
    """Return x [N, C, C] with each block of 2 x 2 filled with its sum."""
    N: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = tl.sum(tl.sum(tl.reshape(x, (N, C // 2, 2, C // 2, 2)), 4), 2)
    return tl.reshape(tl.broadcast_to(x[:, :, None, :, None], (N, C // 2, 2, C // 2, 2)), (N, C, C))


@triton.jit
def _inverse_and_transpose(b_A, C: tl.constexpr, LEVELS: tl.constexpr, TERMS: tl.constexpr):
    """Return (I - A)^{-1} and its transpose, of strictly lower triangular matrices A [N, C, C]: at each level the lower
    left blocks join two inverses, U + U A U. A product's result has the layout of a left operand, or transposed of a
    right one, so that with both at hand threads exchange nothing.
    """
    o_c = tl.arange(0, C)
    eye = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)[None, :, :]
    pairs = level_pairs(1, C)
    x = tl.where(pairs[None, :, :], b_A, 0.0)
    b_U, b_X = eye + x, eye + tl.where(tl.trans(pairs)[None, :, :], _fill_pairs(x), 0.0)
    for level in tl.static_range(1, LEVELS):
        A_terms = terms(tl.where(level_pairs(1 << level, C)[None, :, :], b_A, 0.0), TERMS)
        U_terms = terms(b_U, TERMS)
        y_terms = terms(by_transpose(terms(b_X, TERMS), A_terms), TERMS)
        b_U = add_products(b_U, U_terms, transposed(y_terms))
        b_X = add_products(b_X, y_terms, transposed(U_terms))
    return b_U, b_X


@triton.jit
def level_columns(level, C: tl.constexpr):
    """Return three masks for 2 C columns, reads (r, a) or keys (k, b) of a chunk's tokens, at a dyadic level: of decays
    (rows) between a token and the boundary of its block's halves [C, 2 C]; of right halves, whose tokens read [1, 2 C];
    of pairs in opposite halves of a block [2 C, 2 C]. Of r, the first C, decays include the token's own."""
    o = tl.arange(0, 2 * C)
    i = o % C + (level >> 8)  # as in `halves`: masks hoisted out of the loop would stay in registers
    size = i * 0 + (1 << level)
    is_read, first = (i & size) != 0, i & -size
    t = tl.arange(0, C)[:, None]
    upto = i + (o < C).to(tl.int32)
    begin, end = tl.where(is_read, first, i + 1)[None, :], tl.where(is_read, upto, first + size)[None, :]
    return (t >= begin) & (t < end), is_read[None, :], ((i[:, None] ^ i[None, :]) >> level) == 1


@kernel
def scores_kernel(
    r, w, k, a, b, scores, mild, scale, T, sequence_of_group, groups_before, cu_seqlens, chunks_before,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute A_rk, A_ak, N = A_rb U and U = (I - A_ab)^{-1} of CHUNKS chunks of a head, one a warp, and `mild`.

    Two matrices [C, C] of a chunk hold all four: A_rk and N, transposed, on and above the diagonal, A_ak and U below.

    r, w, k, a, b [B, T, H, K], scores [chunks, H, 2, C, C], mild [chunks, H] float32, 0 or 1; LEVELS = log2 C
    sequence_of_group [groups], groups_before, cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i_g, i_n, i_h, start, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_group, groups_before, cu_seqlens, chunks_before, CHUNKS, H, C, PACKED
    )
    o_c, o_b = tl.arange(0, C), tl.arange(0, CHUNKS)
    i, j = o_c[:, None], o_c[None, :]
    N: tl.constexpr = C * CHUNKS
    TERMS: tl.constexpr = 3 if r.dtype.element_ty == tl.float32 else 2
    LEAST: tl.constexpr = MILD_FLOAT32 if TERMS == 3 else BLOCK_TOKEN
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, N, BK)
    b_r = load_tile(r, start, end, i_h, 0, 0, H, K, N, BK)
    b_a = load_tile(a, start, end, i_h, 0, 0, H, K, N, BK)
    b_k = load_tile(k, start, end, i_h, 0, 0, H, K, N, BK)
    b_b = load_tile(b, start, end, i_h, 0, 0, H, K, N, BK)
    b_w, b_r, b_a, b_k, b_b = arrived(b_w), arrived(b_r), arrived(b_a), arrived(b_k), arrived(b_b)
    lowest = tl.min(tl.min(bands(b_w, CHUNKS).to(tl.float32), 2), 1)
    b_w = bands(clamped_decay(b_w), CHUNKS)
    b_r, b_a, b_k, b_b = bands(b_r, CHUNKS), bands(b_a, CHUNKS), bands(b_k, CHUNKS), bands(b_b, CHUNKS)
    if tl.min(lowest) > LEAST:
        half = (j < C // 2).to(tl.float32)
        decay = sums(per_band((j <= i).to(tl.float32) - half, CHUNKS), b_w)
        before = sums(per_band((j < i).to(tl.float32) - half, CHUNKS), b_w)
        key = exp(-decay)
        r_terms = terms(b_r.to(tl.float32) * (exp(decay) * scale), TERMS)
        a_terms = terms(b_a.to(tl.float32) * exp(before), TERMS)
        k_terms = terms(b_k.to(tl.float32) * key, TERMS)
        b_terms = terms(b_b.to(tl.float32) * key, TERMS)
        A_rk = by_transpose(r_terms, k_terms)
        A_rb = by_transpose(r_terms, b_terms)
        A_ak = by_transpose(a_terms, k_terms)
        b_A = by_transpose(a_terms, b_terms)
    else:
        own_k = tl.sum(b_r.to(tl.float32) * b_k.to(tl.float32), 2)[:, :, None] * scale
        own_b = tl.sum(b_r.to(tl.float32) * b_b.to(tl.float32), 2)[:, :, None] * scale
        there = (start + o_b * C < end)[:, None, None]
        p = scores + ((first_chunk + o_b) * H + i_h).to(tl.int64)[:, None, None] * (2 * C * C)
        for level in range(LEVELS):
            b_R = level_rows(r, a, b_w, level, start, end, i_h, True, H, K, BK, TERMS)
            b_E = level_rows(k, b, b_w, level, start, end, i_h, False, H, K, BK, TERMS)
            b_A = by_transpose(b_R, b_E) * tl.where(i < C // 2, scale, 1.0)[None, :, :]
            x, y = level_tokens(i, level, True, C), level_tokens(j, level, False, C)
            place = tl.where(i < C // 2, y * C + x, x * C + y) + j // (C // 2) * (C * C)
            tl.store(p + place[None, :, :], b_A, mask=there & ((x ^ y) >> level == 1)[None, :, :])
        tl.debug_barrier()  # the scores are in memory
        p_ij, p_ji = p + (i * C + j)[None, :, :], p + (j * C + i)[None, :, :]
        A_rk, A_rb = tl.load(p_ji, mask=there, other=0.0), tl.load(p_ji + C * C, mask=there, other=0.0)
        A_ak, b_A = tl.load(p_ij, mask=there, other=0.0), tl.load(p_ij + C * C, mask=there, other=0.0)
        A_rk, A_rb = tl.where((i == j)[None, :, :], own_k, A_rk), tl.where((i == j)[None, :, :], own_b, A_rb)
    b_A = tl.where((i > j)[None, :, :], b_A, 0.0)
    b_U, b_X = _inverse_and_transpose(b_A, C, LEVELS, TERMS)
    A_rb = tl.where((i >= j)[None, :, :], A_rb, 0.0)
    at, there = ((first_chunk + o_b) * H + i_h).to(tl.int64), start + o_b * C < end
    tl.store(mild + at, (lowest > BLOCK_TOKEN).to(tl.float32), mask=there)
    p = scores + at[:, None, None] * (2 * C * C)
    p, p_transposed = p + (i * C + j)[None, :, :], p + (j * C + i)[None, :, :]
    upto, later = there[:, None, None] & (i >= j)[None, :, :], there[:, None, None] & (i > j)[None, :, :]
    tl.store(p_transposed, A_rk, mask=upto)
    tl.store(p, A_ak, mask=later)
    tl.store(p_transposed + C * C, by_transpose(terms(A_rb, TERMS), terms(b_X, TERMS)), mask=upto)
    tl.store(p + C * C, b_U, mask=later)


@triton.jit
def _load_scores(p, there, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """Load A_rk above A_ak, or N above U - I, [2 C, C], from matrix p of `scores`, or TRANSPOSED, [C, 2 C]; zeros
    unless `there`."""
    if TRANSPOSED:
        o_r, j = tl.arange(0, 2 * C)[None, :], tl.arange(0, C)[:, None]
    else:
        o_r, j = tl.arange(0, 2 * C)[:, None], tl.arange(0, C)[None, :]
    i = o_r % C
    m = tl.where(o_r < C, i >= j, i > j)
    return tl.load(p + tl.where(o_r < C, j * C + i, i * C + j), mask=m & there, other=0.0)


@triton.jit
def _load_right(p, OF_U: tl.constexpr, C: tl.constexpr):
    """Load N or U, whose triangle `scores_kernel` stored at p, to the right of zeros, [C, 2 C]."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :] - C
    if OF_U:
        p, m = p + i * C + j, (j >= 0) & (i > j)
    else:
        p, m = p + j * C + i, (j >= 0) & (i >= j)
    return tl.load(p, mask=m, other=0.0)


@triton.jit
def _decays_about_middle(b_w, C: tl.constexpr):
    """Return log decays from the chunk's middle to reads r and a, side by side, from keys to it, [4, N, 2 C] each."""
    o_c, o_r = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)
    half, i = (o_c < C // 2).to(tl.float32), (o_r % C)[None, :]
    upto = (o_c <= i).to(tl.float32)
    of_read = tl.where((o_r < C)[None, :], upto, (o_c < i).to(tl.float32)) - half
    return sums_along(b_w, per_band(of_read)), sums_along(b_w, per_band(half - upto))


@triton.jit
def _v2_pointers(v2, i, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
    """Return pointers to v2^T of i = chunk * H + head, in v2 [chunks, H, C, V], and their mask, [BV, C] each."""
    o_c, o_v = tl.arange(0, C), tl.arange(0, BV)
    return v2 + i * C * V + o_v[:, None] + o_c[None, :] * V, (o_v < V)[:, None] & (o_c < C)[None, :]


@kernel
def forward_kernel(
    r, w, k, v, a, b, o, states, v2, units, scores, first, last, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KEEP: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute o of a part of a sequence, L chunks of one head, one by one. KEEP: store S entering each, and v2. In
    registers: S^T and, while they load, the next chunk's rows.

    r, w, k, a, b [B, T, H, K], v, o [B, T, H, V], scores [chunks, H, 2, C, C]
    states [chunks, H, V, K], v2 [chunks, H, C, V] float16, units [chunks, H, BV + 1]: scales of v2^T's rows and of S
    first [parts, H, K, V]: the state entering each part; last [N, H, K, V]: final states
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    o_r, o_k, o_v = tl.arange(0, 2 * C), tl.arange(0, BK), tl.arange(0, BV)
    left = (o_r < C)[None, None, :]
    m_S = (o_v < V)[:, None] & (o_k < K)[None, :]
    b_S = tl.zeros([BANDS, BV // BANDS, BK], dtype=tl.float32)
    if HAS_FIRST:
        b_S += load_banded(first, i_p * H + i_h, True, K, V, BK, BV)
    TERMS: tl.constexpr = 3 if r.dtype.element_ty == tl.float32 else 2
    p_A = scores + (first_chunk * H + i_h).to(tl.int64) * (2 * C * C)
    w_next = load_transposed(w, begin, end, i_h, H, K, C, BK)
    R_next = load_pair(r, a, begin, end, i_h, H, K, C, BK)
    E_next = load_pair(k, b, begin, end, i_h, H, K, C, BK)
    v_next = load_transposed(v, begin, end, i_h, H, V, C, BV)
    A_next = _load_scores(p_A, count > 0, True, C)
    U_next = _load_scores(p_A + C * C, count > 0, True, C)
    for n in range(0, count):
        start = begin + n * C
        i = ((first_chunk + n) * H + i_h).to(tl.int64)
        b_w, b_R, b_E, b_v, b_A, b_U = w_next, R_next, E_next, v_next, A_next, U_next
        more = n + 1 < count
        stop = tl.where(more, end, start + C)
        w_next = load_transposed(w, start + C, stop, i_h, H, K, C, BK)
        R_next = load_pair(r, a, start + C, stop, i_h, H, K, C, BK)
        E_next = load_pair(k, b, start + C, stop, i_h, H, K, C, BK)
        v_next = load_transposed(v, start + C, stop, i_h, H, V, C, BV)
        p_A += H * 2 * C * C
        A_next = _load_scores(p_A, more, True, C)
        U_next = _load_scores(p_A + C * C, more, True, C)
        read, key = decays_from_ends(bands(tl.maximum(b_w, LOWEST_DECAY).to(b_w.dtype)), C)
        total = column(read, C - 1)
        R_terms = terms(flat(bands(b_R).to(tl.float32) * (exp(read) * tl.where(left, scale, 1.0))), TERMS)
        E_terms = terms(flat(bands(b_E).to(tl.float32) * exp(key)), TERMS)
        if KEEP:
            reciprocal, unit = power_of_two(tl.max(tl.reshape(tl.abs(b_S), (BV * BK,)), 0, keep_dims=True))
            p_S = states + i * K * V + o_k[None, :] + o_v[:, None] * K
            tl.store(p_S, flat((b_S * reciprocal[None, None, :]).to(states.dtype.element_ty)), mask=m_S)
            tl.store(units + i * (BV + 1) + BV + tl.zeros([1], tl.int32), unit)
        U_terms = terms(b_U + tl.where((o_r - C)[None, :] == tl.arange(0, C)[:, None], 1.0, 0.0), TERMS)
        b_x = product(terms(b_S, TERMS), per_bands(R_terms))
        b_v = input_terms(bands(b_v))
        b_x = add_products(b_x, b_v, per_bands(terms(b_A, TERMS)))
        b_f = product(terms(sides(b_x)[1], TERMS), per_bands(U_terms))
        store_transposed(o, sides(b_x + b_f)[0], start, end, i_h, H, V, C, BV)
        if KEEP:
            b_x = sides(b_f)[1]
            reciprocal, unit = power_of_two(tl.max(tl.abs(b_x), 2))
            p_v2, m_v2 = _v2_pointers(v2, i, V, C, BV)
            tl.store(p_v2, flat((b_x * reciprocal[:, :, None]).to(v2.dtype.element_ty)), mask=m_v2)
            tl.store(units + i * (BV + 1) + o_v, tl.reshape(unit, (BV,)))
        F_terms = joined(left, b_v, terms(b_f, TERMS))
        b_S *= exp(total)[None, None, :]
        b_S = add_products(b_S, F_terms, per_bands(turned(E_terms)))
    if WANTS_LAST:
        store_banded(last, b_S, i_n * H + i_h, is_last, K, V, BK, BV)


@triton.jit
def _dyadic_pairs(b_R, b_E, b_w, b_P, C: tl.constexpr, LEVELS: tl.constexpr):
    """Return what pairs inside a chunk add to the gradients of reads and keys, [4, N, 2 C] each, and of w, [4, N, C],
    without subtractions. b_R, b_E [4, N, 2 C]: reads and keys without decay; b_P [2 C, 2 C]: G F^T, unmasked."""
    o = tl.arange(0, 2 * C)
    ahead = (o % C)[:, None] - (o % C)[None, :]
    own = terms(tl.where((ahead == 0) & (o < C)[:, None], b_P, 0.0), 2)  # r reads its own token's keys
    d_reads = product(terms(b_E, 2), per_bands(turned(own)))
    d_keys = product(terms(b_R, 2), per_bands(own))
    b_P = tl.where(ahead > 0, b_P, 0.0)
    P_terms = terms(b_P + tl.trans(b_P), 2)
    b_dw = tl.zeros([b_R.shape[0], b_R.shape[1], C], dtype=tl.float32)
    for level in range(LEVELS):
        between, is_read, meet = level_columns(level, C)
        is_read = is_read[None, :, :]
        weight = exp(sums_along(b_w, per_band(between)))
        b_x = tl.where(is_read, b_R, b_E) * weight
        grad = product(terms(b_x, 2), [per_band(masked(meet, term)) for term in P_terms])
        b_dw += sums_along(grad * b_x, per_band(tl.trans(between)), False)
        grad *= weight
        d_reads += tl.where(is_read, grad, 0.0)
        d_keys += tl.where(is_read, 0.0, grad)
    return d_reads, d_keys, b_dw


@triton.jit
def chunk_grads(
    r, w, k, v, a, b, do, states, v2, units, scores, dr, dw, dk, dv, da, db, b_D, passing, scale, start, end, i_h, i,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    """Store the gradients of i = chunk * H + head, from the one of the state leaving it, b_D e^{passing}, b_D in bands
    of D^T. Return that of the state entering it as such a pair (b_D, passing [K]). Shapes as in `backward_kernel`."""
    o_c, o_r, o_k, o_v = tl.arange(0, C), tl.arange(0, 2 * C), tl.arange(0, BK), tl.arange(0, BV)
    left = (o_r < C)[None, None, :]
    by_scale = tl.where(left, scale, 1.0)
    ahead = (o_r % C)[:, None] - (o_r % C)[None, :]
    visible = (ahead > 0) | ((ahead == 0) & (o_r < C)[:, None])
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    b_w = load_transposed(w, start, end, i_h, H, K, C, BK)
    b_R = load_pair(r, a, start, end, i_h, H, K, C, BK)
    b_E = load_pair(k, b, start, end, i_h, H, K, C, BK)
    b_v = load_transposed(v, start, end, i_h, H, V, C, BV)
    b_do = load_transposed(do, start, end, i_h, H, V, C, BV)
    p_v2, m_v2 = _v2_pointers(v2, i, V, C, BV)
    b_v2 = tl.load(p_v2, mask=m_v2, other=0.0)
    unit = tl.load(units + i * (BV + 1) + BV + tl.zeros([BK], tl.int32))
    v2_unit = tl.load(units + i * (BV + 1) + o_v)
    p_A = scores + i * (2 * C * C)
    prefetch(states + i * K * V + o_v * K, o_v < V, 1)  # no registers are free for it yet
    b_N, b_U = _load_right(p_A + C * C, False, C), _load_right(p_A + C * C, True, C)
    b_A = _load_scores(p_A, True, False, C)
    b_w, b_R, b_E = arrived(b_w), arrived(b_R), arrived(b_E)
    b_v, b_do, b_v2 = bands(arrived(b_v)), bands(arrived(b_do)), bands(arrived(b_v2))
    b_N, b_U, b_A = arrived(b_N), arrived(b_U), arrived(b_A)
    if MILD:
        read, key = _decays_about_middle(bands(b_w), C)
        mid, rest = -column(read, C), column(read, C - 1)
    else:
        b_w = bands(clamped_decay(b_w))
        read, key = decays_from_ends(b_w, C)
        mid, rest = tl.zeros([BK], dtype=tl.float32), column(read, C - 1)
    read, key = exp(read), exp(key)
    b_R, b_E = bands(b_R), bands(b_E)
    R_terms = terms(b_R.to(tl.float32) * (read * by_scale), 2)
    E_terms = terms(b_E.to(tl.float32) * key, 2)

    # In bands of channels of v: F, G and dv. Products with ones place F's halves side by side: a product's result has
    # the layout that the next product needs, a load's has not.
    b_F = tl.dot(b_v2, per_band(o_c[:, None] + C == o_r[None, :]).to(b_v2.dtype))
    b_F *= tl.reshape(v2_unit, (BANDS, BV // BANDS))[:, :, None]
    b_F += tl.dot(b_v, per_band(o_c[:, None] == o_r[None, :]).to(b_v.dtype))
    F_terms = terms(b_F, 2)
    b_D *= exp(passing + rest if MILD else passing)[None, None, :]
    D_terms = terms(b_D, 2)
    b_x, b_y = sides(product(D_terms, per_bands(flats(E_terms))))
    N_terms = terms(b_N + tl.where(o_c[:, None] == o_r[None, :], 1.0, 0.0), 2)  # do itself, and N^T do
    U_terms = terms(b_U + tl.where(o_c[:, None] + C == o_r[None, :], 1.0, 0.0), 2)
    b_G = narrow_product(terms(b_y, 2), per_bands(U_terms))
    b_G = add_products(b_G, input_terms(b_do), per_bands(N_terms))
    G_terms = terms(b_G, 2)
    b_x = add_products(b_x, G_terms, per_bands(terms(b_A, 2)))
    store_transposed(dv, b_x, start, end, i_h, H, V, C, BV)

    # In bands of channels of k: all others.
    g_terms, f_terms = flats(G_terms), flats(F_terms)
    b_P = add_products(tl.zeros([2 * C, 2 * C], tl.float32), turned(g_terms), f_terms)
    D_terms = [bands(term) for term in turned(flats(D_terms))]
    x_keys = product(D_terms, per_bands(f_terms))
    if MILD:
        P_terms = terms(tl.where(visible, b_P, 0.0), 2)
        d_keys = add_products(tl.zeros_like(x_keys), R_terms, per_bands(P_terms), True)
        keys = whole(E_terms)
        of_k, of_b = sides(keys * d_keys)
        by_k, by_b = sides(keys * x_keys)
        store_pair(dk, db, (d_keys + x_keys) * key, start, end, i_h, H, K, C, BK)
        b_dw = sums_along(by_k + by_b, per_band((o_c[:, None] < o_c[None, :]).to(tl.float32)), False)
        of_keys = of_k + of_b
    else:
        b_R, b_E = b_R.to(tl.float32) * by_scale, b_E.to(tl.float32)
        d_reads, d_keys, b_dw = _dyadic_pairs(b_R, b_E, b_w, b_P, C, LEVELS)
        x_keys *= key
        b_dw += sums_along(b_E * x_keys, per_band((o_r % C)[:, None] < o_c[None, :]), False)
        store_pair(dk, db, d_keys + x_keys, start, end, i_h, H, K, C, BK)
    b_S = tl.load(states + i * K * V + o_k[:, None] + o_v[None, :] * K, mask=m_S, other=0.0)
    of_S = unit
    if MILD:
        of_S = exp(mid) * unit
    b_S = bands(b_S.to(tl.float32) * of_S[:, None])
    S_terms = terms(b_S, 2)
    b_SD = by_transpose(S_terms, D_terms)
    b_SD = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_SD, 0.0), 2)
    x_reads = product(S_terms, per_bands(g_terms))
    if MILD:
        d_reads = add_products(x_reads, E_terms, per_bands(turned(P_terms)), True)
        of_r, of_a = sides(whole(R_terms) * d_reads)
        b_dw += sums_along((of_r + of_a) - of_keys, per_band((o_c[:, None] >= o_c[None, :]).to(tl.float32)))
        b_dw += b_SD[:, :, None] - of_a  # a excludes its own token's decay
        b_dR = d_reads * (read * by_scale)
    else:
        x_reads *= read
        upto = (o_r % C)[:, None] + (o_r < C)[:, None].to(tl.int32)
        b_dw += sums_along(b_R * x_reads, per_band(upto > o_c[None, :]), False)
        b_SD *= tl.reshape(exp(rest), (BANDS, BK // BANDS))
        b_dw += b_SD[:, :, None]
        b_dR = (d_reads + x_reads) * by_scale
        b_D *= exp(rest)[None, None, :]
    empty = tl.reshape(unit < 2.0**-118, (BANDS, BK // BANDS))[:, :, None]
    b_dw = tl.where((o_c == 0)[None, None, :] & empty, 0.0, b_dw)  # as `is_zero`
    store_transposed(dw, b_dw, start, end, i_h, H, K, C, BK)
    store_pair(dr, da, b_dR, start, end, i_h, H, K, C, BK)
    return add_products(b_D, G_terms, per_bands(turned(flats(R_terms)))), mid


@kernel
def backward_kernel(
    r, w, k, v, a, b, do, states, v2, units, scores, mild, dr, dw, dk, dv, da, db, last, first, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, HAS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a part of a sequence, for one head, from its last chunk to its first. In registers: D^T.

    r, w, k, a, b, dr, dw, dk, da, db [B, T, H, K], v, do, dv [B, T, H, V], scores [chunks, H, 2, C, C]
    states [chunks, H, V, K], v2 [chunks, H, C, V] float16, units [chunks, H, BV + 1], mild [chunks, H]
    last [parts, H, K, V]: gradients of the states leaving the parts; first [N, H, K, V]: of the initial states
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    b_D = tl.zeros([BANDS, BV // BANDS, BK], dtype=tl.float32)
    if HAS_LAST:
        b_D += load_banded(last, i_p * H + i_h, True, K, V, BK, BV)
    passing = tl.zeros([BK], dtype=tl.float32)
    for n in range(0, count):
        start = begin + (count - 1 - n) * C
        i = ((first_chunk + count - 1 - n) * H + i_h).to(tl.int64)
        if tl.load(mild + i) > 0:
            b_D, passing = chunk_grads(
                r, w, k, v, a, b, do, states, v2, units, scores, dr, dw, dk, dv, da, db, b_D, passing, scale, start,
                end, i_h, i, H, K, V, C, BK, BV, LEVELS, True,
            )  # fmt: skip
        else:
            b_D, passing = chunk_grads(
                r, w, k, v, a, b, do, states, v2, units, scores, dr, dw, dk, dv, da, db, b_D, passing, scale, start,
                end, i_h, i, H, K, V, C, BK, BV, LEVELS, False,
            )  # fmt: skip
    b_D *= exp(passing)[None, None, :]
    store_banded(first, b_D, i_n * H + i_h, is_first, K, V, BK, BV)


class _Plan(Parts):
    """The parts of RWKV7's sequences, and the sizes of the tensors saved for the backward."""

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Numbers of elements saved for the backward: of states and v2, units, scores, mild flags, parts' products."""
        heads = self.chunks * self.H
        products = self.parts * self.H * self.K**2 if self.several else 0
        return heads * (self.K + CHUNK) * self.V, heads * UNITS, heads * 2 * CHUNK * CHUNK, heads, products

    @property
    def saved_shapes(self) -> tuple[tuple[int], ...]:
        """The shapes of the float32 tensors saved for the backward: states and v2; units; scores; mild and products."""
        states, units, scores, mild, products = self.sizes
        return (self.lines(states),), (units,), (scores,), (mild + products,)

    def entering(self, products, written, first, where, reverse: bool):
        """Return the states entering all parts (reverse: the gradients of those leaving them), [parts, H, K, V];
        arguments as in `entering_kernel`; where: of `Parts.where`."""
        launch = TABLE["rwkv7.fused.entering", width(self.stored.itemsize)]
        entering = torch.zeros_like(written) if self.packed else torch.empty_like(written)
        entering_kernel[(self.N * self.H,)](
            products, written, entering, first, self.parts // self.N, where[2], H=self.H, K=self.K, V=written.shape[-1],
            BK=CHANNELS, BV=CHANNELS, REVERSE=reverse, HAS_FIRST=first is not None, PACKED=self.packed,
            TERMS=2 if self.stored.itemsize == 2 else 3,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        return entering

    def leaving(self, products, written, where, reverse: bool):
        """Return the state leaving each sequence (reverse: the initial one's gradient). Arguments as in `entering`."""
        entering = self.entering(products, written, None, where, reverse)
        P, W, S = (self.last_visited(x, reverse) for x in (products, written, entering))
        return W + _product(P, S, reverse)

    def last_visited(self, x, reverse: bool):
        """Return a view of x (products: flat) of each sequence's last part (reverse: of its first), [N, H, K, *]."""
        x = x.view(self.parts, self.H, self.K, -1).unflatten(0, (self.N, -1))
        return x[:, 0 if reverse else -1]

    def states_and_v2(self, stored):
        """Return the states and v2, which share one saved tensor, as flat views in float16 (or float32)."""
        halves, states = stored.view(self.stored), self.chunks * self.H * self.K * self.V
        return halves[:states], halves[states:]


def _product(P, S, transposed: bool):
    """Return P S or P^T S, computed in float64, which no PyTorch setting turns into TF32."""
    return ((P.mT if transposed else P).double() @ S.double()).to(S.dtype)


ACCEPTS_FUNCTIONS = True
"""Whether a state may be a function that exchanges states with other ranks (`ahead_triton.Kernels`)."""


def saved_shapes(r, w, k, v, a, b, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: the state entering every chunk and v2, two 16-bit
    numbers in one; their scales; the scores; and, in one, the mild flags and each part's M (`carry_kernel`)."""
    return _Plan(r, v, packing).saved_shapes


def forward(r, w, k, v, a, b, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and `saved_shapes`' tensors, S and v2 only if keep."""
    plan = _Plan(r, v, packing)
    N, H, K, V = plan.N, plan.H, plan.K, plan.V
    shapes = plan.saved_shapes
    if not keep:
        shapes = (0,), (0,), *shapes[2:]
    # Packed sequences may not fill what is allocated, and what an operator returns must be initialized.
    allocate = r.new_zeros if plan.packed and packing.returned else r.new_empty
    states, units, scores = (allocate(shape, dtype=torch.float32) for shape in shapes[:3])
    if keep and plan.stored.itemsize == 2 and plan.sizes[0] % 2:
        states[-1:] = 0  # the kernel writes half of it
    others = allocate(shapes[3], dtype=torch.float32)
    mild, products = others.split_with_sizes(plan.sizes[3:])
    o, final_state = torch.empty_like(v), scores.new_empty(N, H, K, V) if output_final_state else None
    options = launch_options("rwkv7.fused.scores", r)
    group_size = options["num_warps"]
    scores_kernel[(plan.capacity(CHUNK * group_size) * H,)](
        r, w, k, a, b, scores, mild, scale, *plan.where(CHUNK * group_size), LEVELS=LEVELS, CHUNKS=group_size,
        PACKED=plan.packed, **options,
    )  # fmt: skip
    where, first, deferred = plan.where(CHUNK * plan.L, plan.L), initial_state, callable(initial_state)
    if deferred:
        first = None
        products = products if plan.several else scores.new_empty(plan.parts * H * K * K)
    if plan.several or deferred:
        written = scores.new_empty(plan.parts, H, K, V)
        carry_kernel[(plan.parts * H,)](
            w, k, v, a, b, scores, first, products, written, *where, V=V, BV=CHANNELS,
            HAS_FIRST=first is not None, ALL_PARTS=deferred, PACKED=plan.packed,
            **launch_options("rwkv7.fused.carry", r),
        )  # fmt: skip
    if deferred:
        # M is the state leaving a sequence whose first part writes its own product.
        first_products = plan.last_visited(products, True)
        unit = torch.zeros_like(products).view(plan.parts, H, K, K)
        plan.last_visited(unit, True).copy_(first_products)
        M, N = (plan.leaving(products, x, where, reverse=False) for x in (unit, written))
        (first,) = initial_state(M, [N])()
        plan.last_visited(written, True).add_(_product(first_products, first, False))
    if plan.several:
        first = plan.entering(products, written, first, where, reverse=False)
    tensors = r, w, k, v, a, b, o, *plan.states_and_v2(states), units, scores
    if takes_gluon(tensors[:7], tensors[7:]):
        from . import forward_gluon

        forward_gluon.outputs(plan, tensors, first, final_state, scale, where, keep)
    else:
        forward_kernel[(plan.parts * H,)](
            *tensors, first, final_state, scale, *where, V=V, BV=CHANNELS, KEEP=keep, HAS_FIRST=first is not None,
            WANTS_LAST=output_final_state, PACKED=plan.packed, **launch_options("rwkv7.fused.forward", r),
        )  # fmt: skip
    return o, final_state, (states, units, scores, others)


def backward(r, w, k, v, a, b, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dw, dk, dv, da, db in their inputs' dtypes and dinitial_state [N, H, K, V] in float32."""
    states, units, scores, others = saved
    plan = _Plan(r, v, packing)
    N, H, K, V = plan.N, plan.H, plan.K, plan.V
    mild, products = others.split_with_sizes(plan.sizes[3:])
    dr, dw, dk, dv, da, db = (torch.empty_like(x) for x in (r, w, k, v, a, b))
    dinitial_state = units.new_empty(N, H, K, V)
    where, last, deferred = plan.where(CHUNK * plan.L, plan.L), dfinal_state, callable(dfinal_state)
    if deferred:
        last = None
    inputs, grads = (r, w, k, v, a, b), (dr, dw, dk, dv, da, db)
    saved = *plan.states_and_v2(states), units, scores, mild
    in_gluon = takes_gluon((*inputs, do), saved)
    if in_gluon:
        from . import backward_gluon
    elif r.element_size() == 4:
        from . import backward_triton
    if plan.several or deferred:
        written = scores.new_empty(plan.parts, H, K, V)
        if in_gluon:
            backward_gluon.carry_grads(plan, inputs, do, scores, last, written, scale, where)
        else:
            carry_grads_kernel[(plan.parts * H,)](
                r, w, None, a, b, do, scores, *[None] * 6, last, written, scale, *where, V=V, BV=CHANNELS,
                HAS_LAST=last is not None, ALL_PARTS=deferred, KEEP=False, PACKED=plan.packed,
                **launch_options("rwkv7.fused.carry_grads", r),
            )  # fmt: skip
    if deferred and plan.several:
        (last,) = dfinal_state(None, [plan.leaving(products, written, where, reverse=True)])()
        plan.last_visited(written, False).add_(_product(plan.last_visited(products, False), last, True))
    elif deferred:
        (last,) = dfinal_state(None, [written])()
    if plan.several:
        last = plan.entering(products, written, last, where, reverse=True)
    if in_gluon:
        backward_gluon.gradients(plan, inputs, do, saved, grads, last, dinitial_state, scale, where)
    elif r.element_size() == 4:
        backward_triton.gradients(plan, inputs, do, saved, grads, last, dinitial_state, scale, where)
    else:
        backward_kernel[(plan.parts * plan.H,)](
            *inputs, do, *saved, *grads, last, dinitial_state, scale, *where, V=V, BV=CHANNELS, LEVELS=LEVELS,
            HAS_LAST=last is not None, PACKED=plan.packed, **launch_options("rwkv7.fused.backward", r),
        )  # fmt: skip
    return dr, dw, dk, dv, da, db, dinitial_state
