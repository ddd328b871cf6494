"""RWKV6 in chunks of 16 tokens, for heads of 33 to 64 channels: one program walks a head's whole sequence.

With q = scale r and the scores A, A_ij = sum_k q_i k_j e^{decay strictly between j and i} for i > j, sum_k q_i u k_i on
the diagonal, 0 above it, the state S entering a chunk and the gradient D of the one leaving it, a chunk is

    o = A v + (q e^{before}) S                     S <- (k e^{after})^T v + e^{total} S
    dv = A^T do + (k e^{after}) D                  D <- (q e^{before})^T do + e^{total} D

before, upto and after are sums of w over the chunk's rows before a row, up to and with it, and after it; total is over
all rows, mid over the first half. `scores_kernel` computes all A in parallel; only products with a state remain
sequential. `forward_kernel` stores S for the backward, in float16 (float32 inputs: float32). All tiles are transposed,
in bands of channels (`common.bands_triton`): S^T, D^T, o^T and dv^T of channels of v, the gradients of q, k and w of k.

**Parts.** Where heads are few or sequences packed, each sequence is cut into parts, one for each program
(`bands_triton.Parts`). The state entering each part is computed first: a part maps S to e^{total} S + N, where N is its
result for S = 0; likewise D (`stream_triton`).

**Paths.** No factor of `forward_kernel` exceeds 1, whatever the decay. A chunk is mild if each of its log decays is
above `BLOCK_TOKEN`. `scores_kernel` processes several chunks at a time. If all of them are mild, the scores of each are
one product about its middle, of q*_i = q_i e^{before_i - mid}, k*_j = k_j e^{mid - upto_j}; if not, they are computed
by dyadic levels (`common.decay`). `backward_kernel` chooses for each chunk; the paths differ only in the pairs inside
the chunk. In a mild chunk these use the middle too. With S for e^{mid} S, D for e^{rest} D, rest = total - mid, and
P = do v^T below the diagonal,

    x = P k* + do S^T,   y = v D^T,   z = P^T q*   dq = x e^{before - mid} + bonus,  dk = (y + z) e^{mid - upto} + bonus
    dw_t = sum_v S D + sum_{i>t} q*_i x_i - sum_{j>=t} k*_j z_j + sum_{j<t} k*_j y_j

where x and z come from the same split operands, with all four products of their parts: dw adds and subtracts the same
terms. In any other chunk q* = q e^{before}, k* = k e^{total - upto}, S and D are unscaled, the sum over S D carries
e^{total}, x and y contain the states' terms alone, and dyadic levels add the pairs: dw is a sum of terms that each
carry their decay, without subtractions.

Operands are sums of two bfloat16 numbers (`blocks_triton.terms`), with a relative error of 2^-17; of float32
inputs, sums of three, which are exact. There the backward takes no chunk for mild: the decay's gradient as a difference
would lose float32's precision. The scores are about the middle where log decays are above `MILD_FLOAT32`.

On Hopper GPUs, kernels in `fused_chunk_gluon` compute bfloat16 heads of 64 channels. Backward, one walks a sequence for
D alone and stores it every 64 tokens; in another, a program for each 64 tokens walks their chunks.
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
    decays_to_ends,
    flat,
    flats,
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
    store_transposed,
    takes_gluon,
    total_decay,
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
    sums,
    sums_along,
    terms,
    whole,
)
from ..common.launch import CHUNK_SIZE, FULL_GPU, LONG_CHUNK_SIZE
from ..common.pairs_triton import BLOCK_TOKEN, halves, masked, opposite_halves, to_boundary
from ..common.plan_triton import ChunkPlan
from ..common.positions_triton import locate_program
from ..common.tiles_triton import load_tile


@kernel
def scores_kernel(
    r, w, k, u, scores, mild, scale, T, sequence_of_group, groups_before, cu_seqlens, chunks_before,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the scores A of a group of CHUNKS chunks of a head, one chunk a warp, and which of the chunks are mild.

    r, w, k [B, T, H, K], u [H, K], scores [chunks, H, C, C], mild [chunks, H] float32, 0 or 1; LEVELS = log2 C
    sequence_of_group [groups], groups_before, cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i_g, i_n, i_h, start, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_group, groups_before, cu_seqlens, chunks_before, CHUNKS, H, C, PACKED
    )
    o_c, o_b, o_k = tl.arange(0, C), tl.arange(0, CHUNKS), tl.arange(0, BK)
    i, j = o_c[:, None], o_c[None, :]
    N: tl.constexpr = C * CHUNKS
    TERMS: tl.constexpr = 3 if r.dtype.element_ty == tl.float32 else 2
    LEAST: tl.constexpr = MILD_FLOAT32 if TERMS == 3 else BLOCK_TOKEN
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, N, BK)
    b_q = load_tile(r, start, end, i_h, 0, 0, H, K, N, BK)
    b_k = load_tile(k, start, end, i_h, 0, 0, H, K, N, BK)
    b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_w, b_q, b_k = arrived(b_w), arrived(b_q), arrived(b_k)
    lowest = tl.min(tl.min(bands(b_w, CHUNKS).to(tl.float32), 2), 1)
    b_w = bands(clamped_decay(b_w), CHUNKS)
    b_q, b_k = bands(b_q, CHUNKS).to(tl.float32) * scale, bands(b_k, CHUNKS).to(tl.float32)
    own = tl.sum(b_q * b_k * b_u[None, None, :], 2)
    if tl.min(lowest) > LEAST:
        half = (j < C // 2).to(tl.float32)
        q_terms = terms(b_q * exp(sums(per_band((j < i).to(tl.float32) - half, CHUNKS), b_w)), TERMS)
        k_terms = terms(b_k * exp(-sums(per_band((j <= i).to(tl.float32) - half, CHUNKS), b_w)), TERMS)
        b_A = by_transpose(q_terms, k_terms)
    else:
        b_A = tl.zeros([CHUNKS, C, C], dtype=tl.float32)
        for level in range(LEVELS):
            _, is_read, _, _ = halves(level, C)
            weight = exp(sums(per_band(to_boundary(level, C), CHUNKS), b_w))
            b_x = terms(tl.where(is_read[None, :, None], b_q, b_k) * weight, TERMS)
            b_A += masked(per_band(opposite_halves(level, C), CHUNKS), by_transpose(b_x, b_x))
    b_A = tl.where((i == j)[None, :, :], own[:, :, None], masked((i > j)[None, :, :], b_A))
    at, there = ((first_chunk + o_b) * H + i_h).to(tl.int64), start + o_b * C < end
    tl.store(mild + at, ((lowest > BLOCK_TOKEN) & (TERMS == 2)).to(tl.float32), mask=there)
    p = scores + at[:, None, None] * (C * C) + (i * C + j)[None, :, :]
    tl.store(p, b_A, mask=there[:, None, None])  # zeros above the diagonal too: saved tensors are initialized


@triton.jit
def _load_scores(p, there, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """Load A [C, C], or TRANSPOSED A^T, from p; zeros unless `there`."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if TRANSPOSED:
        i, j = j, i
    return tl.load(p + i * C + j, mask=(i >= j) & there, other=0.0)


@kernel
def forward_kernel(
    r, w, k, v, o, states, units, scores, first, last, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KEEP: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute o of a part of a sequence, L chunks of one head, one by one. KEEP: store the state entering each. In
    registers: S^T and, while they load, the next chunk's rows.

    r, w, k [B, T, H, K], v, o [B, T, H, V], scores [chunks, H, C, C]
    states [chunks, H, V, K] float16 (float32 with float32 inputs), units [chunks, H]: their scales, powers of two
    first [parts, H, K, V]: the state entering each part; last [N, H, K, V]: final states
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_S = (o_v < V)[:, None] & (o_k < K)[None, :]
    b_S = tl.zeros([BANDS, BV // BANDS, BK], dtype=tl.float32)
    if HAS_FIRST:
        b_S += load_banded(first, i_p * H + i_h, True, K, V, BK, BV)
    TERMS: tl.constexpr = 3 if r.dtype.element_ty == tl.float32 else 2
    by_scale = tl.where(tl.arange(0, 2 * C) < C, scale, 1.0)[None, None, :]
    p_A = scores + (first_chunk * H + i_h).to(tl.int64) * (C * C)
    w_next = load_transposed(w, begin, end, i_h, H, K, C, BK)
    x_next = load_pair(r, k, begin, end, i_h, H, K, C, BK)
    v_next = load_transposed(v, begin, end, i_h, H, V, C, BV)
    A_next = _load_scores(p_A, count > 0, True, C)
    for n in range(0, count):
        start = begin + n * C
        i = ((first_chunk + n) * H + i_h).to(tl.int64)
        b_w, b_x, b_v, b_A = w_next, x_next, v_next, A_next
        more = n + 1 < count
        stop = tl.where(more, end, start + C)
        p_A += H * C * C
        w_next = load_transposed(w, start + C, stop, i_h, H, K, C, BK)
        x_next = load_pair(r, k, start + C, stop, i_h, H, K, C, BK)
        v_next = load_transposed(v, start + C, stop, i_h, H, V, C, BV)
        A_next = _load_scores(p_A, more, True, C)
        decays, total = decays_to_ends(bands(clamped_decay(b_w)), C)
        pairs = [sides(term) for term in terms(bands(b_x).to(tl.float32) * (exp(decays) * by_scale), TERMS)]
        b_q, b_k = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if KEEP:
            reciprocal, unit = power_of_two(tl.max(tl.reshape(tl.abs(b_S), (BV * BK,)), 0, keep_dims=True))
            p_S = states + i * K * V + o_k[None, :] + o_v[:, None] * K
            tl.store(p_S, flat((b_S * reciprocal[None, None, :]).to(states.dtype.element_ty)), mask=m_S)
            tl.store(units + i + tl.zeros([1], tl.int32), unit)
        b_v = input_terms(bands(b_v))
        b_o = product(terms(b_S, TERMS), per_bands(flats(b_q)))
        b_o = add_products(b_o, b_v, per_bands(terms(b_A, TERMS)))
        store_transposed(o, b_o, start, end, i_h, H, V, C, BV)
        b_S *= exp(total)[None, None, :]
        b_S = add_products(b_S, b_v, per_bands(turned(flats(b_k))))
    if WANTS_LAST:
        store_banded(last, b_S, i_n * H + i_h, is_last, K, V, BK, BV)


@triton.jit
def _decays(b_w, is_mild, C: tl.constexpr):
    """Return the log decays from point a to each read and from each key to point b, [4, N, C] each, and those from the
    chunk's beginning to a and from b to its end, [4 N] each. a = b is a mild chunk's middle; else they are its ends."""
    t, i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    read, key = sums_along(b_w, per_band(t < i)), sums_along(b_w, per_band(t > i))
    mid, rest = is_mild * column(read, C // 2), is_mild * column(key, C // 2 - 1)
    shape: tl.constexpr = (b_w.shape[0], b_w.shape[1])
    read -= tl.reshape(mid, shape)[:, :, None]
    key -= tl.reshape(rest, shape)[:, :, None]
    return read, key, mid, rest


@triton.jit
def _dyadic_pairs(b_q, b_k, b_w, b_P, C: tl.constexpr, LEVELS: tl.constexpr, TERMS: tl.constexpr):
    """Return what pairs of tokens add to dq, dk and dw, [4, N, C] each. b_P: P + P^T, with P = do v^T, i > j."""
    dq, dk, b_dw = tl.zeros_like(b_q), tl.zeros_like(b_k), tl.zeros_like(b_q)
    P_terms = terms(b_P, TERMS)
    for level in range(LEVELS):
        _, is_read, _, _ = halves(level, C)
        is_read = is_read[None, None, :]
        between, meets = to_boundary(level, C), opposite_halves(level, C)
        weight = exp(sums_along(b_w, per_band(tl.trans(between))))
        b_x = tl.where(is_read, b_q, b_k) * weight
        grad = narrow_product(terms(b_x, TERMS), [per_band(masked(meets, term)) for term in P_terms])
        b_dw += sums_along(grad * b_x, per_band(between), TERMS == 3)
        grad *= weight
        dq += tl.where(is_read, grad, 0.0)
        dk += tl.where(is_read, 0.0, grad)
    return dq, dk, b_dw


@kernel
def backward_kernel(
    r, w, k, v, u, do, states, units, scores, mild, dr, dw, dk, dv, du, last, first, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, HAS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a part of a head's sequence, from its last chunk to its first. In registers: D^T, du.

    r, w, k, dr, dw, dk [B, T, H, K], v, do, dv [B, T, H, V], u [H, K], du [parts, H, K]: a term for each part
    states [chunks, H, V, K] float16, units: their scales, mild [chunks, H], scores [chunks, H, C, C]
    last [parts, H, K, V]: gradients of the states leaving the parts; first [N, H, K, V]: of the initial states
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    t, s = o_c[:, None], o_c[None, :]
    TERMS: tl.constexpr = 3 if r.dtype.element_ty == tl.float32 else 2
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_u = tl.reshape(b_u, (BANDS, BK // BANDS))[:, :, None]
    b_D = tl.zeros([BANDS, BV // BANDS, BK], dtype=tl.float32)
    if HAS_LAST:
        b_D += load_banded(last, i_p * H + i_h, True, K, V, BK, BV)
    b_du = tl.zeros([BANDS, BK // BANDS, C], dtype=tl.float32)
    passing = tl.zeros([BK], dtype=tl.float32)
    for n in range(0, count):
        start = begin + (count - 1 - n) * C
        i = ((first_chunk + count - 1 - n) * H + i_h).to(tl.int64)
        b_w = load_transposed(w, start, end, i_h, H, K, C, BK)
        b_r = load_transposed(r, start, end, i_h, H, K, C, BK)
        b_k = load_transposed(k, start, end, i_h, H, K, C, BK)
        b_v = load_transposed(v, start, end, i_h, H, V, C, BV)
        b_do = load_transposed(do, start, end, i_h, H, V, C, BV)
        b_A = _load_scores(scores + i * (C * C), True, False, C)
        unit = tl.load(units + i + tl.zeros([BK], tl.int32))
        is_mild = tl.load(mild + i)
        prefetch(states + i * K * V + o_v * K, o_v < V, 1)  # no registers are free for it yet
        more = (o_c >= 0) & (n + 1 < count)
        p_rows = (start - C + o_c) * H + i_h
        prefetch(w + p_rows * K, more, BK)
        prefetch(r + p_rows * K, more, BK)
        prefetch(k + p_rows * K, more, BK)
        prefetch(v + p_rows * V, more, BV)
        prefetch(do + p_rows * V, more, BV)
        prefetch(scores + (i - H) * (C * C) + o_c * C, more & (o_c % 2 == 0), 1)
        b_w, b_r, b_k = arrived(b_w), arrived(b_r), arrived(b_k)
        b_v, b_do, b_A = arrived(b_v), arrived(b_do), arrived(b_A)
        b_w = bands(clamped_decay(b_w))
        read, key, mid, rest = _decays(b_w, is_mild, C)
        b_D *= exp(passing + rest)[None, None, :]
        of_S, passing = exp(mid) * unit, mid
        read, key = exp(read), exp(key)
        b_q, b_k = bands(b_r).to(tl.float32) * scale, bands(b_k).to(tl.float32)
        q_terms = terms(b_q * read, TERMS)
        k_terms = terms(b_k * key, TERMS)

        # In bands of channels of v.
        D_terms = terms(b_D, TERMS)
        b_dv = product(D_terms, per_bands(flats(k_terms)))
        b_dv = add_products(b_dv, input_terms(bands(b_do)), per_bands(terms(b_A, TERMS)))
        store_transposed(dv, b_dv, start, end, i_h, H, V, C, BV)

        # In bands of channels of k: keys.
        if TERMS == 3:
            b_P = add_products(tl.zeros([C, C], tl.float32), turned(input_terms(b_do)), input_terms(b_v))
        else:
            b_P = tl.dot(tl.trans(b_do), b_v)
        own = tl.sum(masked(t == s, b_P), 0)[None, None, :]
        b_P = masked(t > s, b_P)
        D_terms = [bands(term) for term in turned(flats(D_terms))]
        y = product(D_terms, per_bands(input_terms(b_v)))
        b_du += own * b_q * b_k
        # Reads.
        b_S = tl.load(states + i * K * V + o_k[:, None] + o_v[None, :] * K, mask=m_S, other=0.0)
        S_terms = terms(bands(b_S.to(tl.float32) * of_S[:, None]), TERMS)
        b_SD = by_transpose(S_terms, D_terms)
        b_SD = tl.sum(tl.where(t == s, b_SD, 0.0), 2)
        x = product(S_terms, per_bands(input_terms(b_do)))

        # Pairs of tokens inside the chunk.
        keys, reads = whole(k_terms), whole(q_terms)
        b_dw = sums_along(keys * y, per_band(t < s), TERMS == 3)
        if TERMS == 2 and is_mild > 0:
            P_terms = terms(b_P, TERMS)
            z = add_products(tl.zeros_like(y), q_terms, per_bands(P_terms), True)
            x = add_products(x, k_terms, per_bands(turned(P_terms)), True)
            of_pairs = keys * z
            b_dw += sums_along(reads * x - of_pairs, per_band(t > s))
            b_dw += b_SD[:, :, None] - of_pairs
            b_dq, b_dk = x * read, (y + z) * key
        else:
            b_dq, b_dk, of_pairs = _dyadic_pairs(b_q, b_k, b_w, b_P + tl.trans(b_P), C, LEVELS, TERMS)
            total = exp(total_decay(b_w, C))
            b_dw += of_pairs + sums_along(reads * x, per_band(t > s), TERMS == 3)
            b_dw += (b_SD * tl.reshape(total, (BANDS, BK // BANDS)))[:, :, None]
            b_dq += x * read
            b_dk += y * key
            b_D *= total[None, None, :]
        empty = tl.reshape(unit < 2.0**-118, (BANDS, BK // BANDS))[:, :, None]
        b_dw = tl.where((o_c == 0)[None, None, :] & empty, 0.0, b_dw)  # as `is_zero`
        store_transposed(dw, b_dw, start, end, i_h, H, K, C, BK)
        store_transposed(dk, b_dk + own * b_u * b_q, start, end, i_h, H, K, C, BK)
        store_transposed(dr, (b_dq + own * b_u * b_k) * scale, start, end, i_h, H, K, C, BK)
        b_D = add_products(b_D, input_terms(bands(b_do)), per_bands(turned(flats(q_terms))))
    b_D *= exp(passing)[None, None, :]
    store_banded(first, b_D, i_n * H + i_h, is_first, K, V, BK, BV)
    tl.store(du + (i_p * H + i_h) * K + o_k, tl.reshape(tl.sum(b_du, 2), (BK,)), mask=o_k < K)


FORWARD = 3 * FULL_GPU // 4
"""Programs of the forward kernel that fill a GPU, three a multiprocessor. Of the backward kernel two fit."""


class _Plan(Parts):
    """The parts of RWKV6's sequences, and the sizes of the tensors saved for the backward."""

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Elements saved for the backward: of states (in their dtype), scores, units and mild flags."""
        heads = self.chunks * self.H
        return heads * self.K * self.V, heads * CHUNK * CHUNK, heads, heads

    @property
    def saved_shapes(self) -> tuple[tuple[int], tuple[int]]:
        """The shapes of the float32 tensors saved for the backward: states, and one for all others of `sizes`."""
        states, *others = self.sizes
        return (self.lines(states),), (sum(others),)

    def start_parts(self, x, y, w, scale, first, where, reverse: bool):
        """Return a function that waits for the state entering each part, [parts, H, K, V], or None (reverse: the
        gradient of the state leaving it). Arguments as in `ChunkPlan.start_parts`; where: of `Parts.where`."""
        if not self.several and not callable(first):
            return lambda: first
        _, sequence_of_part, parts_before, *_ = where
        stream = ChunkPlan(
            "rwkv6", x, self.V, self.packing, LONG_CHUNK_SIZE if self.stored.itemsize == 2 else CHUNK_SIZE
        )  # whose chunks are longer
        return stream.start_parts(
            x, y, w, scale, first, self.parts, sequence_of_part, parts_before, CHUNK * self.L, reverse
        )


FEWEST = 8192
"""Fewest chunks times heads for the backward in Gluon: with fewer, its one more launch can cost what it saves."""
ACCEPTS_FUNCTIONS = True
"""Whether a state may be a function that exchanges states with other ranks (`ahead_triton.Kernels`)."""


def saved_shapes(r, k, v, w, u, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the float32 tensors that `forward` saves for `backward`: the state entering every chunk, two
    float16 numbers in one element; and, in one tensor, the scores, the states' scales, and the mild flags."""
    return _Plan(r, v, packing).saved_shapes


def forward(r, k, v, w, u, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and `saved_shapes`' tensors, S only if keep."""
    plan = _Plan(r, v, packing, FORWARD)
    options = launch_options("rwkv6.fused.scores", r)
    group_size = options["num_warps"]
    # Packed sequences may not fill what is allocated, and what an operator returns must be initialized.
    allocate = r.new_zeros if plan.packed and packing.returned else r.new_empty
    shapes = plan.saved_shapes if keep else ((0,), plan.saved_shapes[1])
    states, others = (allocate(shape, dtype=torch.float32) for shape in shapes)
    if keep and plan.stored.itemsize == 2 and plan.sizes[0] % 2:
        states[-1:] = 0  # the kernel writes half of it
    scores, units, mild = others.split_with_sizes(plan.sizes[1:])
    final_state = others.new_empty(plan.N, plan.H, plan.K, plan.V) if output_final_state else None
    o = torch.empty_like(v)
    where_scores, where = plan.where(CHUNK * group_size), plan.where(CHUNK * plan.L, plan.L)
    first = plan.start_parts(k, v, w, 1.0, initial_state, where, reverse=False)
    # Launched before these states are needed: other ranks may have to send them.
    scores_kernel[(plan.capacity(CHUNK * group_size) * plan.H,)](
        r, w, k, u, scores, mild, scale, *where_scores, LEVELS=LEVELS, CHUNKS=group_size, PACKED=plan.packed, **options,
    )  # fmt: skip
    first = first()
    tensors = r, w, k, v, o, states.view(plan.stored), units, scores
    if takes_gluon((r, w, k, v, o), (states, scores)):
        from . import fused_chunk_gluon

        walk, launch = fused_chunk_gluon.forward_kernel, fused_chunk_gluon.options("rwkv6.fused.forward", plan.H)
    else:
        walk, launch = forward_kernel, dict(V=plan.V, BV=CHANNELS, **launch_options("rwkv6.fused.forward", r))
    walk[(plan.parts * plan.H,)](
        *tensors, first, final_state, scale, *where, KEEP=keep, HAS_FIRST=first is not None,
        WANTS_LAST=output_final_state, PACKED=plan.packed, **launch,
    )  # fmt: skip
    return o, final_state, (states, others)


def backward(r, k, v, w, u, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dk, dv, dw in their inputs' dtypes, du [H, K] and dinitial_state [N, H, K, V] in float32."""
    states, others = saved
    plan = _Plan(r, v, packing)
    dr, dk, dv, dw = (torch.empty_like(x) for x in (r, k, v, w))
    dinitial_state = others.new_empty(plan.N, plan.H, plan.K, plan.V)
    inputs, grads = (r, w, k, v, u), (dr, dw, dk, dv)
    states = states.view(plan.stored)
    scores, units, mild = others.split_with_sizes(plan.sizes[1:])
    saved = states, units, scores, mild
    if plan.chunks * plan.H >= FEWEST and takes_gluon((r, w, k, v, do), (states, scores)):
        from .fused_chunk_gluon import gradients

        du = gradients(plan, inputs, do, saved, grads, dfinal_state, dinitial_state, scale)
        return dr, dk, dv, dw, du, dinitial_state
    du = others.new_empty(plan.parts, plan.H, plan.K)
    where = plan.where(CHUNK * plan.L, plan.L)
    last = plan.start_parts(r, do, w, scale, dfinal_state, where, reverse=True)()
    backward_kernel[(plan.parts * plan.H,)](
        *inputs, do, *saved, *grads, du, last, dinitial_state, scale, *where, V=plan.V, BV=CHANNELS, LEVELS=LEVELS,
        HAS_LAST=last is not None, PACKED=plan.packed, **launch_options("rwkv6.fused.backward", r),
    )  # fmt: skip
    return dr, dk, dv, dw, du.sum(0), dinitial_state
