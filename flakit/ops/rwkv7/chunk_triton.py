"""RWKV7 in chunks as Triton kernels: all work but a light stream of states is parallel over chunks.

`fused_chunk_triton` serves heads of 33 to 64 channels, the kernels here all others, in chunks of 32, or 16 in float32.

Forward:  `prepare_kernel`        what does not depend on the entering state: U, U A_ak v, U a~
          `stream_kernel`         chunk by chunk: v2 = U A_ak v + (U a~) S, then the state S itself
          `output_kernel`         o from a chunk's tokens, its v2 and its entering state
Backward: the same in reverse, then `key_grads_kernel`
          `prepare_kernel`        U^T A_rb^T do, U^T b^
          `stream_kernel`         y = U^T A_rb^T do + (U^T b^) D, then the gradient D of the state
          `output_kernel`         dv from a chunk's tokens, its y and the D leaving it
          `key_grads_kernel`      dr, dw, dk, da, db

Formulas as in `chunk_torch`: A_xy [C, C] are the scores of reads x and keys y; before, after and total are sums of w
over the rows before a row, after it, and over all; a~ = a e^{before} reads the entering state S, b^ = b e^{after}
writes the leaving one, whose gradient is D. Each chunk takes one of two paths, mild or dyadic (`common.tiles_triton`),
compiled separately; `prepare_kernel` decides.

The inverse U = (I - A_ab)^{-1} is built from recursive 2 x 2 blocks, as full-size products under a mask, and never from
the powers of A_ab, which are huge and cancel where tokens repeat. There, results of U are small differences of large
terms, and da and db consist of these: every product from A_ab to the inputs of `stream_kernel` is more precise than all
others (`SOLVE`), forward and backward. With TF32 alone, the errors of da and db of nearly equal tokens, α = 1.9, are
five times (bfloat16) and thirty times (float16) those of rounding. With TF32 in only one direction all gradients
suffer: the backward must differentiate the forward's actual error.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import below, diagonal, dot, kernel, level_pairs, program, row_at, sums, to_operand
from ..common.dispatch import interpreted
from ..common.kernel_triton import Memory
from ..common.launch import TABLE, block, cdiv
from ..common.pairs_triton import halves, level_decays, masked, opposite_halves, within
from ..common.plan_triton import ChunkPlan
from ..common.positions_triton import locate_chunk, pieces_of, rows_of
from ..common.tiles_triton import (
    MILD_HALF,
    MILD_TOKEN,
    handles,
    load_decays,
    load_tile,
    matrix_pointers,
    state_pointers,
    store_tile,
)

SOLVE = {"tf32": "ieee" if interpreted() else "bf16x3", "tf32x3": "ieee"}
"""Precision of the products with U, by the precision of all others.

Three bfloat16 products have a relative error of 1e-5, a fortieth of TF32's, for 0.1 ms in 8.5, where three TF32
products take 0.7 (data/tuning.md). For float32 inputs, IEEE products add no visible cost, and reduce the error of da
and db of repeated tokens to a tenth. Triton's interpreter does not support bf16x3.
"""


@triton.jit
def _classify(mild, i, w, start, end, i_h, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
              MILD: tl.constexpr):  # fmt: skip
    """Return whether this launch, mild or dyadic, handles i = chunk * H + head; a MILD one sets flag i.

    Mild: no w is below 1 / C of a chunk's limit, 2 MILD_HALF: stricter than the sum, but RWKV7's bounded w passes.
    """
    if MILD:
        lowest = 0.0
        for i_k in range(0, (K + BK - 1) // BK):
            b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
            lowest = tl.minimum(lowest, tl.min(b_w))
        is_mild = (lowest > 2 * MILD_HALF / C) & (lowest > MILD_TOKEN)
        tl.store(mild + i, is_mild.to(tl.int32))
    else:
        is_mild = handles(mild, i, 1, MILD)
    return is_mild


@triton.jit
def _about_middle(b_w, C: tl.constexpr):
    """Return the log decay before each row, and the decay factors of reads and keys about the middle row, [C, BK] each,
    of log decays b_w: read_i key_j is the decay strictly between j and i."""
    upto = tl.cumsum(b_w, 0)
    before = upto - b_w
    mid = row_at(before, C // 2, C)[None, :]
    return before, tl.exp(before - mid), tl.exp(mid - upto)


@triton.jit
def _level_scores(b_x, b_y, weight, level, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return the scores [C, C] of reads x and keys y [C, BK] at one dyadic level. weight [C, BK]: e^`level_decays`."""
    _, right, _, _ = halves(level, C)
    b_xy = tl.where(right[:, None], b_x, b_y) * weight
    right_by_left = right[:, None] & opposite_halves(level, C)
    return masked(right_by_left, dot(b_xy, tl.trans(b_xy), PRECISION))


@triton.jit
def _scores(b_x, b_y, b_p, b_q, p_w, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
            BK: tl.constexpr, LEVELS: tl.constexpr, TWO: tl.constexpr, MILD: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Return A, B [C, C] and the log decays before and after each row [C, BK], of one block of K of a chunk: A_ij =
    sum_k x_i y_j e^{decay strictly between j and i}, valid for i > j only; B likewise of reads p and keys q if TWO,
    else zeros. p_w: pointer to w; MILD: about the middle, else by dyadic levels."""
    b_B = tl.zeros([C, C], dtype=tl.float32)
    if MILD:
        b_w = load_tile(p_w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        before, read, key = _about_middle(b_w, C)
        b_A = dot(b_x * read, tl.trans(b_y * key), PRECISION)
        if TWO:
            b_B = dot(b_p * read, tl.trans(b_q * key), PRECISION)
        after = tl.sum(b_w, 0)[None, :] - before - b_w
    else:
        b_w = load_decays(p_w, start, end, i_h, i_k, H, K, C, BK)
        b_A = tl.zeros([C, C], dtype=tl.float32)
        for level in range(LEVELS):
            weight = tl.exp(level_decays(b_w, level, C))
            b_A += _level_scores(b_x, b_y, weight, level, C, PRECISION)
            if TWO:
                b_B += _level_scores(b_p, b_q, weight, level, C, PRECISION)
        o_c = tl.arange(0, C)
        before = sums(o_c[:, None] > o_c[None, :], b_w)
        after = sums(o_c[:, None] < o_c[None, :], b_w)
    return b_A, b_B, before, after


@triton.jit
def _with_diagonal(b_A, b_d, C: tl.constexpr):
    """Return b_A [C, C] below the diagonal, b_d [C] on it, zeros above."""
    o_c = tl.arange(0, C)
    return below(b_A, C) + tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0)


@triton.jit
def _inverse(b_A, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I - A)^{-1}, A strictly lower triangular [C, C]: each level joins pairs of inverses."""
    o_c = tl.arange(0, C)
    b_U = tl.where(o_c[:, None] == o_c[None, :], 1.0, tl.where(level_pairs(1, C), b_A, 0.0))
    for level in tl.static_range(1, LEVELS):
        b_block = tl.where(level_pairs(1 << level, C), b_A, 0.0)
        b_U += dot(b_U, dot(b_block, b_U, PRECISION), PRECISION)
    return b_U


@kernel
def prepare_kernel(
    r, w, k, v, a, b, inverse, transfer, v2, mild, scale, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Compute U = (I - A_ab)^{-1}, v2 = U A_ak v, transfer = U a~ for one chunk. REVERSE, with U given: y = U^T A_rb^T
    do, transfer = U^T b^, of v = do, y as v2. In registers: A_ab, U, A_ak or A_rb, [C, C].

    r (REVERSE), w, k and a (else), b, transfer [B, T, H, K], v, v2 [B, T, H, V], inverse [chunks, H, C, C]: U
    mild [chunks, H] int32, sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]; symbols: see the module
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    if _classify(mild, i, w, start, end, i_h, H, K, C, BK, MILD) == 0:
        return
    b_A = tl.zeros([C, C], dtype=tl.float32)
    if REVERSE:
        b_U = tl.trans(tl.load(matrix_pointers(inverse, i, C)))
        own = tl.zeros([C], dtype=tl.float32)
        for i_k in range(0, (K + BK - 1) // BK):
            b_r = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
            b_b = load_tile(b, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
            b_q = b_r * tl.exp(load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32))
            b_rb, _, _, after = _scores(
                b_q, b_b, b_q, b_b, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, False, MILD, PRECISION
            )
            b_A += b_rb
            own += tl.sum(b_r * b_b, 1)
            store_tile(transfer, dot(b_U, b_b * tl.exp(after), SOLVE), start, end, i_h, i_k, H, K, C, BK)
        b_A = tl.trans(_with_diagonal(b_A, own, C))
    else:
        b_ab = tl.zeros([C, C], dtype=tl.float32)
        b_a = tl.zeros([C, BK], dtype=tl.float32)
        before = b_a
        for i_k in range(0, (K + BK - 1) // BK):
            b_a = load_tile(a, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
            b_b = load_tile(b, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
            b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
            more_ab, more_ak, before, _ = _scores(
                b_a, b_b, b_a, b_k, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, True, MILD, PRECISION
            )
            b_ab += more_ab
            b_A += more_ak
        b_A = below(b_A, C)
        b_U = _inverse(below(b_ab, C), C, LEVELS, SOLVE)
        tl.store(matrix_pointers(inverse, i, C), b_U)
        if K <= BK:
            store_tile(transfer, dot(b_U, b_a * tl.exp(before), SOLVE), start, end, i_h, 0, H, K, C, BK)
        else:
            for i_k in range(0, (K + BK - 1) // BK):
                b_a = load_tile(a, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
                b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
                before = sums(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], b_w)
                store_tile(transfer, dot(b_U, b_a * tl.exp(before), SOLVE), start, end, i_h, i_k, H, K, C, BK)
    for i_v in range(0, (V + BV - 1) // BV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        store_tile(v2, dot(b_U, dot(b_A, b_v, SOLVE), SOLVE), start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def _rows(start, end, i_h, i_d, shift: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
          BD: tl.constexpr, FLIP: tl.constexpr):  # fmt: skip
    """Return offsets and mask [C, BD] of a chunk's rows, or each one's next (shift = 1) or previous (-1). FLIP:
    reversed."""
    o_c = tl.arange(0, C)
    if FLIP:
        o_c = C - 1 - o_c
    o_c += shift
    o_d = i_d * BD + tl.arange(0, BD)
    m = ((o_c >= 0) & (o_c < C) & (o_c < end - start))[:, None] & (o_d < D)[None, :]
    return (start * H + i_h) * D + o_c[:, None] * (H * D) + o_d[None, :], m


@triton.jit
def _stream_loads(x, y, z, w, transfer, reads, start, end, i_h, i_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                  C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    o_k, m_k = _rows(start, end, i_h, 0, 0, H, K, C, BK, not REVERSE)
    o_v, m_v = _rows(start, end, i_h, i_v, 0, H, V, C, BV, not REVERSE)
    o_w, m_w = _rows(start, end, i_h, 0, -1 if REVERSE else 1, H, K, C, BK, not REVERSE)
    b_W = tl.load(transfer + o_k, mask=m_k, other=0.0)
    b_reads = tl.load(reads + o_v, mask=m_v, other=0.0)
    b_x = tl.load(x + o_k, mask=m_k, other=0.0)
    b_y = tl.load(y + o_v, mask=m_v, other=0.0)
    b_z = tl.load(z + o_k, mask=m_k, other=0.0)
    b_w = tl.load(w + o_k, mask=m_k, other=0.0)
    return b_W, b_reads, b_x, b_y, b_z, b_w, tl.load(w + o_w, mask=m_w, other=0.0)


@triton.jit
def _stream_operands(b_W, b_x, b_y, b_z, b_w, b_next, scale, REVERSE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the operands of a chunk's step, W = transfer, x^T, y and z^T, decays included, and e^{total} [BK]. b_next:
    w shifted by a row, whose prefix sum is the decay before each row, or, without REVERSE, where rows are flipped,
    after it."""
    b_x, b_w, b_next = b_x.to(tl.float32), b_w.to(tl.float32), b_next.to(tl.float32)
    decay = tl.exp(tl.cumsum(b_next, axis=0))
    if REVERSE:
        b_x *= scale * tl.exp(b_w)
    b_x, b_z = to_operand(b_x * decay, PRECISION), to_operand(b_z.to(tl.float32) * decay, PRECISION)
    return to_operand(b_W, PRECISION), tl.trans(b_x), b_y.to(tl.float32), tl.trans(b_z), tl.exp(tl.sum(b_w, 0))


@kernel
def stream_kernel(
    x, y, z, w, transfer, reads, states, first, last, scale, cu_seqlens, chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk a head's chunks: reads += transfer S, then S <- e^{total} S + x^T y + z^T reads. In registers: S [BK, BV].

    x, y, z: k, v, b, REVERSE, where S is its gradient: r, do, a. Above, x and z carry e^{after}, REVERSE e^{before} and
    x is scale r e^w. reads: v2 (REVERSE: y), updated in place. The state before each chunk is stored. Loads overlap the
    previous chunk's computation. Forward, a chunk's rows are read from the last to the first: row order does not
    matter, and the decay after a row becomes a prefix sum.

    x, z, w, transfer [B, T, H, K], y, reads [B, T, H, V], states [chunks, H, K, V], first, last [N, H, K, V]
    cu_seqlens, chunks_before [N + 1]
    """
    # Sequences and heads on the first axis: the others end at 65535. A single axis would spill 800 more bytes.
    i_nh, i_v = tl.program_id(0), tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    first_chunk, chunks = pieces_of(i_n, chunks_before, tl.cdiv(T, C), PACKED)
    begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(first, i_nh, 0, i_v, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    if REVERSE:
        i_c = chunks - 1
        step = -1
    else:
        i_c = chunks * 0
        step = 1
    start = begin + tl.cast(i_c, tl.int64) * C
    # An empty sequence loads nothing: its end is set to the chunk's start, wherever that is.
    b_W, b_reads, b_x, b_y, b_z, b_w, b_next = _stream_loads(
        x, y, z, w, transfer, reads, start, tl.where(chunks > 0, end, start), i_h, i_v, H, K, V, C, BK, BV, REVERSE
    )
    b_W, b_x, b_y, b_z, total = _stream_operands(b_W, b_x, b_y, b_z, b_w, b_next, scale, REVERSE, PRECISION)
    for _ in range(0, chunks):
        # Chunks outside the sequence load nothing: the end is set to the chunk's start.
        later = start + step * C
        inside = (later >= begin) & (later < end)
        n_W, n_reads, n_x, n_y, n_z, n_w, n_next = _stream_loads(
            x, y, z, w, transfer, reads, later, tl.where(inside, end, later), i_h, i_v, H, K, V, C, BK, BV, REVERSE
        )
        p_S, m_S = state_pointers(states, (first_chunk + i_c) * H + i_h, 0, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
        b_reads += tl.dot(b_W, to_operand(b_S, PRECISION), input_precision=PRECISION)
        o_v, m_v = _rows(start, end, i_h, i_v, 0, H, V, C, BV, not REVERSE)
        tl.store(reads + o_v, b_reads, mask=m_v)
        b_S = total[:, None] * b_S + tl.dot(b_x, b_y, input_precision=PRECISION)
        b_S += tl.dot(b_z, to_operand(b_reads, PRECISION), input_precision=PRECISION)
        b_W, b_x, b_y, b_z, total = _stream_operands(n_W, n_x, n_y, n_z, n_w, n_next, scale, REVERSE, PRECISION)
        b_reads = n_reads
        start = later
        i_c += step
    if WANTS_LAST:
        p_S, m_S = state_pointers(last, i_nh, 0, i_v, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@kernel
def output_kernel(
    r, w, k, v, x, v2, states, mild, o, scale, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute o = A_rk v + A_rb v2 + (q e^{before}) S for one chunk, head and block of V, of x = b. REVERSE: its
    counterpart dv = A_rk^T do + A_ak^T y + (k e^{after}) D, of v = do, x = a, v2 = y and states = D, as o. In
    registers: A_rk and A_rb, or A_ak, [C, C].

    r, w, k, x [B, T, H, K], v, v2, o [B, T, H, V], states [chunks, H, K, V], mild [chunks, H] int32
    sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]; q = scale r e^w; symbols: see the module
    """
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if handles(mild, i_c * H + i_h, FLAGS, MILD) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    b_rk = tl.zeros([C, C], dtype=tl.float32)
    b_other = tl.zeros([C, C], dtype=tl.float32)  # A_rb, or A_ak
    d_rk = tl.zeros([C], dtype=tl.float32)
    d_other = tl.zeros([C], dtype=tl.float32)
    b_o = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        b_r = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_x = load_tile(x, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_q = b_r * tl.exp(load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32))
        p_S, m_S = state_pointers(states, i_c * H + i_h, i_k, i_v, K, V, BK, BV)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        read, key = (b_x, b_k) if REVERSE else (b_q, b_x)
        b_A, b_B, before, after = _scores(
            b_q, b_k, read, key, w, start, end, i_h, i_k, H, K, C, BK, LEVELS, True, MILD, PRECISION
        )
        b_rk += b_A
        b_other += b_B
        d_rk += tl.sum(b_r * b_k, 1)
        if REVERSE:
            b_o += dot(b_k * tl.exp(after), b_S, PRECISION)
        else:
            d_other += tl.sum(b_r * b_x, 1)
            b_o += dot(b_q * tl.exp(before), b_S, PRECISION)
    b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
    b_v2 = load_tile(v2, start, end, i_h, i_v, 0, H, V, C, BV)
    b_rk, b_other = _with_diagonal(b_rk, d_rk, C), _with_diagonal(b_other, d_other, C)
    if REVERSE:
        b_rk, b_other = tl.trans(b_rk), tl.trans(b_other)
    b_o += tl.dot(to_operand(b_rk, PRECISION), b_v, input_precision=PRECISION)
    b_o += dot(b_other, b_v2, PRECISION)
    store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def _read_states(x, y, states, start, end, i, i_h, i_k, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                 C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return x S^T and y S^T, [C, BK] each, of a chunk's rows of x and y [B, T, H, V] and state i, chunk * H + head."""
    b_xS = tl.zeros([C, BK], dtype=tl.float32)
    b_yS = tl.zeros([C, BK], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
        b_S = to_operand(tl.trans(tl.load(p_S, mask=m_S & (start < end), other=0.0)), PRECISION)
        b_x = load_tile(x, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_y = load_tile(y, start, end, i_h, i_v, 0, H, V, C, BV)
        b_xS += tl.dot(b_x, b_S, input_precision=PRECISION)
        b_yS += tl.dot(to_operand(b_y, PRECISION), b_S, input_precision=PRECISION)
    return b_xS, b_yS


@triton.jit
def _mild_reads(b_q, b_a, b_km, b_bm, b_qk, b_qb, b_ak, b_ab, b_dq, b_da, before, read, PRECISION: tl.constexpr):
    """Return dq, da, and the sum of reads times their gradients, [C, BK] each, in a mild chunk. b_km, b_bm: k, b times
    key; b_qk … b_ab: gradients of the scores; b_dq, b_da: do S^T, y S^T; before, read: factors from the start and the
    middle."""
    b_qm, b_am = to_operand(b_q * read, PRECISION), to_operand(b_a * read, PRECISION)
    g_q = tl.dot(b_qb, b_bm, tl.dot(b_qk, b_km, input_precision=PRECISION), input_precision=PRECISION)
    g_a = tl.dot(b_ab, b_bm, tl.dot(b_ak, b_km, input_precision=PRECISION), input_precision=PRECISION)
    b_dq *= before
    b_da *= before
    reads = b_q * b_dq + b_a * b_da + b_qm * g_q + b_am * g_a
    return b_dq + g_q * read, b_da + g_a * read, reads


@triton.jit
def _mild_keys(b_qm, b_am, b_k, b_b, b_km, b_bm, b_qk, b_qb, b_ak, b_ab, b_dk, b_db, reads, after, key,
               PRECISION: tl.constexpr):  # fmt: skip
    """Return dk, db, and the part of dw of reads and keys of other tokens. b_dk, b_db: v D^T, v2 D^T; b_qm, b_am: q, a
    times read; reads: from `_mild_reads`; after, key: decay factors to the end and to the middle.

    dw_t is sum_{i>t} over reads minus sum_{j>=t} over the pairs' keys, plus sum_{j<t} over the keys written to the
    state: a difference of two prefix sums of the *same rounded products*, which only float32 accumulation can make
    differ. One prefix sum serves all: the sum after t is the total minus the sum up to t.
    """
    g_k = tl.dot(tl.trans(b_qk), b_qm, input_precision=PRECISION)
    g_k = tl.dot(tl.trans(b_ak), b_am, g_k, input_precision=PRECISION)
    g_b = tl.dot(tl.trans(b_qb), b_qm, input_precision=PRECISION)
    g_b = tl.dot(tl.trans(b_ab), b_am, g_b, input_precision=PRECISION)
    b_dk *= after
    b_db *= after
    keys = b_k * b_dk + b_b * b_db
    pairs = b_km * g_k + b_bm * g_b
    net = reads - pairs
    b_dw = tl.sum(net, 0)[None, :] - tl.cumsum(net - keys, axis=0) - pairs - keys
    return b_dk + g_k * key, b_db + g_b * key, b_dw


@triton.jit
def _dyadic_grads(b_q, b_a, b_k, b_b, b_w, b_qk, b_qb, b_ak, b_ab, b_dq, b_da, b_dk, b_db,
                  C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return dq, da, dk, db and the part of dw of reads and keys of other tokens, for any decay, without subtractions.

    b_qk … b_ab [C, C]: gradients of the scores; b_dq … b_db: do S^T, y S^T, v D^T, v2 D^T. At each level rows of right
    halves are reads and rows of left halves keys, so one product serves both: x holds q or k, y holds a or b, and each
    pairs with the other kind in the other half.
    """
    o_c = tl.arange(0, C)
    later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    before, after = tl.exp(sums(earlier, b_w)), tl.exp(sums(later, b_w))
    b_dq *= before
    b_da *= before
    b_dk *= after
    b_db *= after
    b_dw = dot(later.to(tl.float32), b_q * b_dq + b_a * b_da, PRECISION)
    b_dw += dot(earlier.to(tl.float32), b_k * b_dk + b_b * b_db, PRECISION)
    b_xx, b_yy = b_qk + tl.trans(b_qk), b_ab + tl.trans(b_ab)
    b_xy = b_qb + tl.trans(b_ak)
    for level in range(LEVELS):
        o_c, right, first, size = halves(level, C)
        met = opposite_halves(level, C)
        m_xx, m_yy, m_xy = masked(met, b_xx), masked(met, b_yy), masked(met, b_xy)
        weight = tl.exp(level_decays(b_w, level, C))
        b_x, b_y = tl.where(right[:, None], b_q, b_k) * weight, tl.where(right[:, None], b_a, b_b) * weight
        g_x = dot(m_xx, b_x, PRECISION) + dot(m_xy, b_y, PRECISION)
        g_y = dot(tl.trans(m_xy), b_x, PRECISION) + dot(m_yy, b_y, PRECISION)
        # The decay at t acts on the reads after t in a right half, on the keys before t in a left half.
        passes = within(tl.where(right, o_c + 1, first), tl.where(right, first + size, o_c), C)
        b_dw += dot(passes.to(tl.float32), b_x * g_x + b_y * g_y, PRECISION)
        g_x *= weight
        g_y *= weight
        b_dq += tl.where(right[:, None], g_x, 0.0)
        b_dk += tl.where(right[:, None], 0.0, g_x)
        b_da += tl.where(right[:, None], g_y, 0.0)
        b_db += tl.where(right[:, None], 0.0, g_y)
    return b_dq, b_da, b_dk, b_db, b_dw


@kernel
def key_grads_kernel(
    r, w, k, v, a, b, v2, do, y, states, dstates, mild, dr, dw, dk, da, db, scale,
    sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dr, dw, dk, da, db for one chunk and block of K.

    In registers: the gradients of four scores [C, C], then five rows [C, BK].

    dq = (do S^T) e^{before} + pairs, da = (y S^T) e^{before} + pairs, dk = (v D^T) e^{after} + pairs, db likewise of v2
    dr = scale (e^w dq + diagonal), as q = scale r e^w reads every key except its own token's
    dw_t = e^{total} sum_v S D + q_t dq_t + terms of reads and keys of other tokens

    r, w, k, a, b, dr, dw, dk, da, db [B, T, H, K], v, v2, do, y [B, T, H, V]
    states, dstates [chunks, H, K, V], mild [chunks, H] int32
    sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    # A program for each block of K: in a loop Triton would give each block's tiles separate shared memory.
    i_k, i = program((K + BK - 1) // BK)
    i_h, i_c = i % H, i // H
    if handles(mild, i, FLAGS, MILD) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)

    b_qk = tl.zeros([C, C], dtype=tl.float32)
    b_qb = tl.zeros([C, C], dtype=tl.float32)
    b_ak = tl.zeros([C, C], dtype=tl.float32)
    b_ab = tl.zeros([C, C], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_v2 = to_operand(load_tile(v2, start, end, i_h, i_v, 0, H, V, C, BV), PRECISION)
        b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_y = to_operand(load_tile(y, start, end, i_h, i_v, 0, H, V, C, BV), PRECISION)
        b_qk += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_qb += tl.dot(b_do, tl.trans(b_v2), input_precision=PRECISION)
        b_ak += tl.dot(b_y, tl.trans(b_v), input_precision=PRECISION)
        b_ab += tl.dot(b_y, tl.trans(b_v2), input_precision=PRECISION)
    d_k, d_b = diagonal(b_qk, C), diagonal(b_qb, C)
    b_qk, b_qb = to_operand(below(b_qk, C), PRECISION), to_operand(below(b_qb, C), PRECISION)
    b_ak, b_ab = to_operand(below(b_ak, C), PRECISION), to_operand(below(b_ab, C), PRECISION)

    b_SD = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        p_D, m_D = state_pointers(dstates, i, i_k, i_v, K, V, BK, BV)
        p_S, m_S = state_pointers(states, i, i_k, i_v, K, V, BK, BV)
        b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
        b_SD += tl.sum(tl.load(p_S, mask=m_S & (start < end), other=0.0) * b_D, 1)
    b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    b_r = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
    b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    b_a = load_tile(a, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    b_b = load_tile(b, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    own = tl.exp(b_w)
    b_q = b_r * own
    b_dq, b_da = _read_states(do, y, states, start, end, i, i_h, i_k, H, K, V, C, BK, BV, PRECISION)
    if MILD:
        before, read, key = _about_middle(b_w, C)
        after = tl.exp(tl.sum(b_w, 0)[None, :] - before - b_w)
        b_km, b_bm = to_operand(b_k * key, PRECISION), to_operand(b_b * key, PRECISION)
        b_dq, b_da, reads = _mild_reads(
            b_q, b_a, b_km, b_bm, b_qk, b_qb, b_ak, b_ab, b_dq, b_da, tl.exp(before), read, PRECISION
        )
        # Store at once: tiles that live until the end are spilled.
        own_dw = b_q * b_dq
        store_tile(dr, (own * b_dq + d_k * b_k + d_b * b_b) * scale, start, end, i_h, i_k, H, K, C, BK)
        store_tile(da, b_da, start, end, i_h, i_k, H, K, C, BK)
        b_qm, b_am = to_operand(b_q * read, PRECISION), to_operand(b_a * read, PRECISION)
        b_dk, b_db = _read_states(v, v2, dstates, start, end, i, i_h, i_k, H, K, V, C, BK, BV, PRECISION)
        b_dk, b_db, b_dw = _mild_keys(
            b_qm, b_am, b_k, b_b, b_km, b_bm, b_qk, b_qb, b_ak, b_ab, b_dk, b_db, reads, after, key, PRECISION
        )
        b_dw += own_dw
    else:
        b_dk, b_db = _read_states(v, v2, dstates, start, end, i, i_h, i_k, H, K, V, C, BK, BV, PRECISION)
        decays = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
        b_dq, b_da, b_dk, b_db, b_dw = _dyadic_grads(
            b_q, b_a, b_k, b_b, decays, b_qk, b_qb, b_ak, b_ab, b_dq, b_da, b_dk, b_db, C, LEVELS, PRECISION
        )
        b_dw += b_q * b_dq
        store_tile(dr, (own * b_dq + d_k * b_k + d_b * b_b) * scale, start, end, i_h, i_k, H, K, C, BK)
        store_tile(da, b_da, start, end, i_h, i_k, H, K, C, BK)
    b_dw += (tl.exp(tl.sum(b_w, 0)) * b_SD)[None, :]
    store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)
    store_tile(dk, b_dk + d_k * b_r, start, end, i_h, i_k, H, K, C, BK)
    store_tile(db, b_db + d_b * b_r, start, end, i_h, i_k, H, K, C, BK)


class _Plan(ChunkPlan):
    """RWKV7's chunk plan, whose `stream`, the walk over chunks that passes on the state, is a kernel of its own, since
    what a chunk writes into the state depends on what it reads from it."""

    def __init__(self, memory, r, v, packing, chunk_size):
        super().__init__(memory, "rwkv7", r, v.shape[-1], packing, chunk_size, flags=1)
        self.precision = "tf32" if self.width == "16-bit" else "tf32x3"

    def sizes(self, kernel, V=None):
        common, *blocks = super().sizes(kernel, V)
        return common | dict(PRECISION=self.precision), *blocks

    def zero_flags(self):
        """Return zeros [chunks, H, 1] int32, in which the mild path's first kernel, if there is one, flags chunks."""
        return torch.zeros_like(self.empty(self.chunks, self.H, 1, dtype=torch.int32))

    def stream(self, x, y, z, w, transfer, reads, first, last, scale, reverse):
        """Launch `stream_kernel`: return the states entering chunks [chunks, H, K, V] (reverse: the gradients leaving
        them), and update reads. Arguments as there; raises ValueError if K exceeds the largest block."""
        launch = TABLE["rwkv7.stream", self.width]
        BK = block(self.rows, launch.BK)
        if self.rows > BK:
            raise ValueError(f"r: expected K <= {BK} for the chunk kernels, got K = {self.rows}")
        BV = block(self.columns, max(16, launch.BV * 64 // BK))  # keeps the state's registers constant for any shape
        states = self.empty(self.chunks, self.H, self.rows, self.columns)
        if self.packing is not None and self.packing.returned and not reverse:
            states.zero_()  # a packed batch may fill fewer than are allocated
        self.memory.launch(
            stream_kernel, (self.N * self.H, cdiv(self.columns, BV)),
            (x, y, z, w, transfer, reads, states, first, last, scale, *self.where[1:]),
            lambda: self.sizes("stream")[0] | dict(BV=BV), REVERSE=reverse, HAS_FIRST=first, WANTS_LAST=last,
        )  # fmt: skip
        return states


def saved_shapes(r, w, k, v, a, b, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: the state entering every chunk, v2, each chunk's U."""
    plan = _Plan(Memory(), r, v, packing, chunk_size)
    return plan.stored_shape(plan.columns), tuple(v.shape), (plan.chunks, plan.H, plan.C, plan.C), (0,)


def forward(memory, r, w, k, v, a, b, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and the tensors of `saved_shapes`; keep is unused."""
    plan = _Plan(memory, r, v, packing, chunk_size)
    o, final_state = torch.empty_like(v), plan.empty(plan.state_shape()) if output_final_state else None
    transfer, v2 = plan.empty(r.shape), plan.empty(v.shape)
    if packing is not None:
        packing.saved_rows.append(v2)
    inverse, mild = plan.empty(plan.chunks, plan.H, plan.C, plan.C), plan.zero_flags()
    plan.launch_paths(
        "prepare", prepare_kernel, "", None, w, k, v, a, b, inverse, transfer, v2, mild, scale,
        REVERSE=False, SOLVE=SOLVE[plan.precision],
    )  # fmt: skip
    states = plan.stream(k, v, b, w, transfer, v2, initial_state, final_state, 1.0, reverse=False)
    args = r, w, k, v, b, v2, states, mild, o, scale
    plan.launch_paths("output", output_kernel, "V", *args, REVERSE=False)
    return o, final_state, (states, v2, inverse, plan.empty(0))


def backward(memory, r, w, k, v, a, b, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dw, dk, dv, da, db in their inputs' dtypes and dinitial_state [N, H, K, V] in float32."""
    states, v2, inverse, _ = saved
    plan = _Plan(memory, r, v, packing, chunk_size)
    dr, dw, dk, dv, da, db = (torch.empty_like(x) for x in (r, w, k, v, a, b))
    dinitial_state = plan.empty(plan.state_shape())
    transfer, y, mild = plan.empty(r.shape), plan.empty(v.shape), plan.zero_flags()
    plan.launch_paths(
        "prepare_grads", prepare_kernel, "", r, w, None, do, None, b, inverse, transfer, y, mild, scale,
        REVERSE=True, SOLVE=SOLVE[plan.precision],
    )  # fmt: skip
    dstates = plan.stream(r, do, a, w, transfer, y, dfinal_state, dinitial_state, scale, reverse=True)
    args = r, w, k, do, a, y, dstates, mild, dv, scale
    plan.launch_paths("value_grads", output_kernel, "V", *args, REVERSE=True)
    # The mild path subtracts a product from a sum that contains it: a fused multiply-add would subtract another.
    plan.launch_paths(
        "key_grads", key_grads_kernel, "K",
        r, w, k, v, a, b, v2, do, y, states, dstates, mild, dr, dw, dk, da, db, scale, enable_fp_fusion=False,
    )  # fmt: skip
    return dr, dw, dk, dv, da, db, dinitial_state
