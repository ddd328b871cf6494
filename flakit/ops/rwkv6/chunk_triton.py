"""RWKV6 in chunks as Triton kernels: all work but a light stream of states is parallel over chunks.

Forward:  `stream_kernel`   the state entering each chunk, and whether the chunk is mild
          `output_kernel`   o from a chunk's tokens and its entering state
Backward: `stream_kernel`   in reverse: the gradient of the state leaving each chunk
          `value_grads_kernel`, `key_grads_kernel`  dv; dr, dk, dw and each chunk's part of du

`fused_chunk_triton` serves heads of 33 to 64 channels, the kernels here all others, in chunks of 32 tokens.

Formulas as in `chunk_torch`: q = scale r, S enters a chunk, D is the gradient of the state leaving it. before, upto and
after are sums of w over the rows before a row, up to and with it, and after it; total is over all rows, mid over the
first half. Each chunk takes one of two paths; both kernels are launched, and each skips the chunks of the other:
- `mild_*` (16-bit inputs; the chunk's whole decay fits float32): one product about the middle, of the reads
  q*_i = q_i e^{before_i - mid} and the keys k*_j = k_j e^{mid - upto_j}. The products with states use the same
  operands; the remaining factors e^{mid} and e^{total - mid} are part of the scales of mild kernels (`store_state`);
- any other: dyadic products whose factors are all in [0, 1] (`common.decay`), valid for every w <= 0. Where blocks of
  16 rows are mild, each of those is one product about its own middle (`about_blocks`).

For 16-bit inputs, operands that contain decays about the middle are split into two bfloat16 numbers
(`blocks_triton.split`): 16 bits of mantissa instead of TF32's 11, the range of float32, twice TF32's speed, and tensor
cores can read them from shared memory transposed or not. A state is stored in float16 with a power of two for each row;
products with it scale the rows of the other operand to float16 too, as dyadic products do with both operands: one
product instead of three. The rounding error, 2^-12 of a row's largest element, is that of the state itself. A prefix
sum is one more product, with a matrix of ones and zeros: exact for 16-bit decays, with its result in the layout that
products need, where a scan would shuffle it between threads.

The decay's gradient. From dyadic products it is summed level by level from terms that each carry their decay. From a
product about the middle it is a difference of two prefix sums, which is noise if the two use gradients that were
rounded separately. Here both use the same split operands, q* (dA k*) and k* (dA^T q*), with all four products of their
parts, and are summed in three parts, which hold all of float32: the same products are added and subtracted, and only
float32 accumulation can differ.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_full_product,
    add_product,
    add_split_by_input,
    add_sums,
    exp,
    kernel,
    operand,
    program,
    split,
    sums,
)
from ..common.launch import CHUNK_SIZE, cdiv
from ..common.pairs_triton import about_middles, pair_grads, pair_scores
from ..common.plan_triton import ChunkPlan
from ..common.positions_triton import locate_chunk
from ..common.tiles_triton import (
    all_mild,
    handles,
    is_zero,
    load_decays,
    load_state,
    load_tile,
    not_mild,
    prefetch_state,
    prefetch_tile,
    scaled_rows,
    store_tile,
)


@kernel
def mild_output_kernel(
    r, k, v, w, u, states, scales, mild, o, scale, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute o = A v + q* (e^{mid} S) for one mild chunk, head and block of V. In registers: A [C, C], o [C, BV].

    r, k, w [B, T, H, K], v, o [B, T, H, V], u [H, K]; sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]
    states [chunks, H, K, V] float16, scales [chunks, H, NV, K]: a row's, times e^{mid}, for each block of V
    mild [chunks, H, FLAGS] int32: 1 throughout a mild chunk's; symbols as in the module docstring
    """
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_o = tl.zeros([C, BV], dtype=tl.float32)
    b_d = tl.zeros([C], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK)
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_S, unit = load_state(states, scales, i_c * H + i_h, start < end, i_k, i_v, K, V, BK, BV, True)
        b_q, b_k = b_q.to(tl.float32) * scale, b_k.to(tl.float32)
        b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
        read, key = about_middles(b_w, C, C)
        q_high, q_low = split(b_q * exp(read))
        k_high, k_low = split(b_k * exp(key))
        b_A = add_product(b_A, q_high, q_low, tl.trans(k_high), tl.trans(k_low))
        x, x_unit = scaled_rows(b_q * exp(read) * unit[None, :], True)
        b_o += tl.dot(x, b_S) * x_unit[:, None]
    b_A = tl.where(o_c[:, None] > o_c[None, :], b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))
    A_high, A_low = split(b_A)
    b_o = add_split_by_input(b_o, A_high, A_low, b_v)
    store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@kernel
def mild_value_grads_kernel(
    r, k, w, u, do, dstates, dscales, mild, dv, scale, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dv = A^T do + k* (e^{total - mid} D) for one mild chunk, head and block of V. In registers: A^T, dv.

    r, k, w [B, T, H, K], do, dv [B, T, H, V], u [H, K]; sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]
    dstates [chunks, H, K, V] float16, dscales [chunks, H, NV, K]: times e^{total - mid}
    mild, symbols: as in `mild_output_kernel`
    """
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h, i_v, i_c = i % H, (i // H) % NV, i // (H * NV)
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_dv = tl.zeros([C, BV], dtype=tl.float32)
    b_d = tl.zeros([C], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
        b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK)
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK)
        b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_D, unit = load_state(dstates, dscales, i_c * H + i_h, start < end, i_k, i_v, K, V, BK, BV, True)
        b_q, b_k = b_q.to(tl.float32) * scale, b_k.to(tl.float32)
        b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
        read, key = about_middles(b_w, C, C)
        q_high, q_low = split(b_q * exp(read))
        k_high, k_low = split(b_k * exp(key))
        b_A = add_product(b_A, k_high, k_low, tl.trans(q_high), tl.trans(q_low))
        x, x_unit = scaled_rows(b_k * exp(key) * unit[None, :], True)
        b_dv += tl.dot(x, b_D) * x_unit[:, None]
    b_A = tl.where(o_c[:, None] < o_c[None, :], b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[None, :], 0.0))
    A_high, A_low = split(b_A)
    b_dv = add_split_by_input(b_dv, A_high, A_low, b_do)
    store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)


@kernel
def mild_key_grads_kernel(
    r, k, v, w, u, do, states, scales, dstates, dscales, mild, dr, dk, dw, du, scale, sequence_of_chunk, cu_seqlens,
    chunks_before, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dr, dk, dw and a part of du for one mild chunk, head and block of K. dA = do v^T below the diagonal, d_i
    = do_i^T v_i. In registers: dA [C, C], x, then y, z [C, BK].

    x = dA k* + do (e^{mid} S)^T                    dq = x e^{before - mid} + d u k,  dr = scale dq
    z = dA^T q*,  y = v (e^{total - mid} D)^T       dk = (y + z) e^{mid - upto} + d u q
    dw_t = e^{total} sum_v S D + sum_{i>t} q*_i x_i - sum_{j>=t} k*_j z_j + sum_{j<t} k*_j y_j

    r, k, w, dr, dk, dw [B, T, H, K], v, do [B, T, H, V], u [H, K], du [chunks, H, K]: a term for each chunk
    states, dstates [chunks, H, K, V] float16, scales, dscales [chunks, H, NV, K], mild: as in `mild_output_kernel`
    sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]; symbols as in the module docstring
    """
    i = tl.program_id(0)
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_h, i_c = i % NK, (i // NK) % H, i // (NK * H)
    if handles(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    o_c = tl.arange(0, C)
    later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    i_S = i_c * H + i_h
    o_k = i_k * BK + tl.arange(0, BK)
    b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
    b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK)
    b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]

    # Reads.
    b_dA = tl.zeros([C, C], dtype=tl.float32)
    diagonal = tl.zeros([C], dtype=tl.float32)
    for i_v in range(0, NV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
        prefetch_state(states, i_S, start < end, i_k, i_v, K, V, BK, BV)
        prefetch_state(dstates, i_S, start < end, i_k, i_v, K, V, BK, BV)
        prefetch_tile(r, start, end, i_h, i_k, H, K, C, BK)
        diagonal += tl.sum(b_v.to(tl.float32) * b_do.to(tl.float32), 1)
        b_dA = tl.dot(b_do, tl.trans(b_v), b_dA)
    read, key = about_middles(b_w, C, C)
    read, key = exp(read), exp(key)
    b_k = b_k.to(tl.float32)
    k_high, k_low = split(b_k * key)
    dA_high, dA_low = split(tl.where(earlier, b_dA, 0.0))
    x = add_full_product(tl.zeros([C, BK], dtype=tl.float32), dA_high, dA_low, k_high, k_low)
    for i_v in range(0, NV):
        b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
        b_S, S_unit = load_state(states, scales, i_S, start < end, i_k, i_v, K, V, BK, BV, True)
        b_do, unit = scaled_rows(b_do, True)
        x += tl.dot(b_do, tl.trans(b_S)) * unit[:, None] * S_unit[None, :]
    diagonal = diagonal[:, None]
    b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
    store_tile(dr, (x * read + diagonal * b_u * b_k) * scale, start, end, i_h, i_k, H, K, C, BK)
    tl.store(du + i_S.to(tl.int64) * K + o_k, tl.sum(diagonal * b_q * b_k, 0), mask=o_k < K)
    q_high, q_low = split(b_q * read)
    reads = (q_high.to(tl.float32) + q_low.to(tl.float32)) * x

    # Keys. dA^T is computed anew: transposing dA costs more.
    b_dA = tl.zeros([C, C], dtype=tl.float32)
    for i_v in range(0, NV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
        b_dA = tl.dot(b_v, tl.trans(b_do), b_dA)
    dA_high, dA_low = split(tl.where(later, b_dA, 0.0))
    z = add_full_product(tl.zeros([C, BK], dtype=tl.float32), dA_high, dA_low, q_high, q_low)
    b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
    _, key = about_middles(b_w, C, C)
    key = exp(key)
    k_high, k_low = split(load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * key)
    own = (k_high.to(tl.float32) + k_low.to(tl.float32)) * z
    passing = reads - own
    b_dw = add_sums(-own, later, passing, True)
    y = tl.zeros([C, BK], dtype=tl.float32)
    b_SD = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, NV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        b_D, D_unit = load_state(dstates, dscales, i_S, start < end, i_k, i_v, K, V, BK, BV, True)
        b_S, S_unit = load_state(states, scales, i_S, start < end, i_k, i_v, K, V, BK, BV, True)
        b_SD += tl.sum(b_S.to(tl.float32) * b_D, 1) * D_unit * S_unit
        b_v, unit = scaled_rows(b_v, True)
        y += tl.dot(b_v, tl.trans(b_D)) * unit[:, None] * D_unit[None, :]
    tl.debug_barrier()
    b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
    b_dw = add_sums(b_dw + b_SD[None, :], earlier, b_k * key * y, False)
    empty = is_zero(scales, i_S, start < end, i_k, K, V, BK, BV)
    b_dw = tl.where((o_c == 0)[:, None] & empty[None, :], 0.0, b_dw)
    b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
    store_tile(dk, (y + z) * key + diagonal * b_u * b_q, start, end, i_h, i_k, H, K, C, BK)
    store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)


@kernel
def output_kernel(
    r, k, v, w, u, states, scales, mild, o, scale, sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute o = A v + (scale r e^{before}) S for one chunk and block of V. In registers: A [C, C], o [C, BV].

    Each program checks AT_ONCE pairs of chunk and head, and computes those that are not mild. chunks: of all sequences.
    Shapes and symbols as in `mild_output_kernel`; with float32 inputs, states are float32 and scales None.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_g = program(BLOCKS)
    first, total = i_g * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            earlier = o_c[:, None] > o_c[None, :]
            b_A = tl.zeros([C, C], dtype=tl.float32)
            b_o = tl.zeros([C, BV], dtype=tl.float32)
            b_d = tl.zeros([C], dtype=tl.float32)
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
                b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
                b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
                b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
                b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
                b_S, unit = load_state(states, scales, i_c * H + i_h, start < end, i_k, i_v, K, V, BK, BV, SCALED)
                x, x_unit = scaled_rows(b_q * exp(sums(earlier, b_w)) * unit[None, :], SCALED)
                b_o += tl.dot(x, b_S, input_precision="tf32x3") * x_unit[:, None]
                b_A += pair_scores(b_q, b_k, b_w, C, LEVELS, False, SCALED)
            b_A = tl.where(earlier, b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))
            b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
            A_high, A_low = operand(b_A, SCALED)
            b_o = add_split_by_input(b_o, A_high, A_low, b_v)
            store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


@kernel
def value_grads_kernel(
    r, k, w, u, do, dstates, dscales, mild, dv, scale, sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dv = A^T do + (k e^{after}) D for one chunk and block of V. In registers: A^T [C, C], dv [C, BV].

    Each program checks AT_ONCE pairs of chunk and head, and computes those that are not mild. chunks: of all sequences.
    Shapes and symbols as in `mild_value_grads_kernel`; with float32 inputs, dstates are float32 and dscales None.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_g = program(BLOCKS)
    first, total = i_g * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            later = o_c[:, None] < o_c[None, :]
            b_A = tl.zeros([C, C], dtype=tl.float32)
            b_dv = tl.zeros([C, BV], dtype=tl.float32)
            b_d = tl.zeros([C], dtype=tl.float32)
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
                b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
                b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
                b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
                b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
                b_D, unit = load_state(dstates, dscales, i_c * H + i_h, start < end, i_k, i_v, K, V, BK, BV, SCALED)
                x, x_unit = scaled_rows(b_k * exp(sums(later, b_w)) * unit[None, :], SCALED)
                b_dv += tl.dot(x, b_D, input_precision="tf32x3") * x_unit[:, None]
                b_A += pair_scores(b_q, b_k, b_w, C, LEVELS, True, SCALED)
            b_A = tl.where(later, b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[None, :], 0.0))
            b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
            A_high, A_low = operand(b_A, SCALED)
            b_dv = add_split_by_input(b_dv, A_high, A_low, b_do)
            store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)


@triton.jit
def _load_pair(r, k, scale, start, end, i_h, i_k, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Reload q = scale r and k of a chunk, in float32: keeping them would spill other tiles from registers. The barrier
    prevents the compiler from merging two loads."""
    tl.debug_barrier()
    b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
    return b_q, load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)


@kernel
def key_grads_kernel(
    r, k, v, w, u, do, states, scales, dstates, dscales, mild, dr, dk, dw, du, scale, sequence_of_chunk, cu_seqlens,
    chunks_before, T, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dr, dk, dw and a part of du for one chunk and block of K. In registers: dA [C, C]; dq, dk, dw [C, BK].

    dq = (do S^T) e^{before} + pairs,  dk = (v D^T) e^{after} + pairs,  dr = scale dq,  q = scale r
    dw_t = e^{total} sum_v S D + sum_{i>t} q_i dq_i^S + sum_{j<t} k_j dk_j^D + pairs j < t < i

    pairs: terms of two tokens of the chunk, and of a token with itself; dq^S, dk^D: the terms with S and D alone.
    Each program checks AT_ONCE pairs of chunk and head, and computes those that are not mild. chunks: of all sequences.
    Shapes and symbols as in `mild_key_grads_kernel`; with float32 inputs, states are float32 and scales None.
    """
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    i_k, i_g = program(BLOCKS)
    first, total = i_g * AT_ONCE, chunks * H
    if all_mild(mild, first, total, AT_ONCE, FLAGS):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            NV: tl.constexpr = (V + BV - 1) // BV
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            o_k = i_k * BK + tl.arange(0, BK)
            later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
            i_S = i_c * H + i_h

            below, above = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
            diagonal = tl.zeros([C], dtype=tl.float32)
            for i_v in range(0, NV):
                b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
                b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
                diagonal += tl.sum(b_v.to(tl.float32) * b_do.to(tl.float32), 1)
                below = tl.dot(b_do, tl.trans(b_v), below, input_precision="tf32x3")
                above = tl.dot(b_v, tl.trans(b_do), above, input_precision="tf32x3")
            pairs = tl.where(earlier, below, tl.where(later, above, 0.0))
            diagonal = diagonal[:, None]
            b_q, b_k = _load_pair(r, k, scale, start, end, i_h, i_k, H, K, C, BK)
            tl.store(du + i_S.to(tl.int64) * K + o_k, tl.sum(diagonal * b_q * b_k, 0), mask=o_k < K)

            b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
            b_dq, b_dk, b_dw = pair_grads(b_q, b_k, b_w, pairs, C, LEVELS, SCALED)

            # The part of the states.
            x, y = tl.zeros_like(b_dq), tl.zeros_like(b_dk)
            b_SD = tl.zeros([BK], dtype=tl.float32)
            for i_v in range(0, NV):
                b_S, S_unit = load_state(states, scales, i_S, start < end, i_k, i_v, K, V, BK, BV, SCALED)
                b_D, D_unit = load_state(dstates, dscales, i_S, start < end, i_k, i_v, K, V, BK, BV, SCALED)
                b_SD += tl.sum(b_S.to(tl.float32) * b_D, 1) * S_unit * D_unit
                b_do, unit = scaled_rows(load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV), SCALED)
                x += tl.dot(b_do, tl.trans(b_S), input_precision="tf32x3") * unit[:, None] * S_unit[None, :]
                b_v, unit = scaled_rows(load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV), SCALED)
                y += tl.dot(b_v, tl.trans(b_D), input_precision="tf32x3") * unit[:, None] * D_unit[None, :]
            b_q, b_k = _load_pair(r, k, scale, start, end, i_h, i_k, H, K, C, BK)
            b_w = load_decays(w, start, end, i_h, i_k, H, K, C, BK)
            b_dw += (exp(tl.sum(b_w.to(tl.float32), 0)) * b_SD)[None, :]
            x *= exp(sums(earlier, b_w))
            b_dw = add_sums(b_dw, later, b_q * x, not SCALED)
            b_dq += x
            y *= exp(sums(later, b_w))
            b_dw = add_sums(b_dw, earlier, b_k * y, not SCALED)
            b_dk += y

            b_q, b_k = _load_pair(r, k, scale, start, end, i_h, i_k, H, K, C, BK)
            b_u = tl.load(u + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
            store_tile(dr, (b_dq + diagonal * b_u * b_k) * scale, start, end, i_h, i_k, H, K, C, BK)
            store_tile(dk, b_dk + diagonal * b_u * b_q, start, end, i_h, i_k, H, K, C, BK)
            store_tile(dw, b_dw, start, end, i_h, i_k, H, K, C, BK)


def _launch(plan, kernel, mild_kernel, dyadic_kernel, *args):
    """Launch the kernels of both paths, the mild one for 16-bit inputs only. args: those before `plan.where`."""
    for options, NV in plan.paths(kernel):
        blocks = cdiv(plan.rows, options["BK"]) if kernel == "key_grads" else NV
        grid = (plan.chunks * plan.H * blocks,)
        path_is_mild = options.pop("MILD")
        flat = plan.flattened(args, mild=path_is_mild)
        if path_is_mild:
            del options["LEVELS"]
            mild_kernel[grid](*flat, *plan.where, **options)
        else:
            grid = (cdiv(plan.chunks * plan.H, plan.at_once) * blocks,)
            dyadic_kernel[grid](*flat, *plan.where, plan.chunks, SCALED=plan.scaled, AT_ONCE=plan.at_once, **options)


ACCEPTS_FUNCTIONS = True
"""Whether a state may be a function that exchanges states with other ranks (`ahead_triton.Kernels`)."""


def saved_shapes(r, k, v, w, u, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: the state entering every chunk, and the mild flags."""
    plan = ChunkPlan("rwkv6", r, v.shape[-1], packing, CHUNK_SIZE)
    return plan.stored_shape(plan.columns), (plan.chunks * plan.H * plan.flags,)


def forward(r, k, v, w, u, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and the tensors of `saved_shapes`; keep is unused."""
    plan = ChunkPlan("rwkv6", r, v.shape[-1], packing, CHUNK_SIZE)
    o, final_state = torch.empty_like(v), plan.empty(plan.state_shape()) if output_final_state else None
    states, mild = plan.states(k, v, w, 1.0, initial_state, final_state, reverse=False)
    _launch(plan, "output", mild_output_kernel, output_kernel, r, k, v, w, u, states, mild, o, scale)
    return o, final_state, (states.whole, mild.view(torch.float32).flatten())


def backward(r, k, v, w, u, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dk, dv, dw in their inputs' dtypes, du [H, K] and dinitial_state [N, H, K, V] in float32."""
    plan = ChunkPlan("rwkv6", r, v.shape[-1], packing, CHUNK_SIZE)
    dr, dk, dv, dw = (torch.empty_like(x) for x in (r, k, v, w))
    dinitial_state, du = plan.empty(plan.state_shape()), plan.empty(plan.chunks, plan.H, plan.rows)
    dstates, _ = plan.states(r, do, w, scale, dfinal_state, dinitial_state, reverse=True)
    states = plan.unpacked(saved[0], plan.columns)
    mild = saved[1].view(torch.int32)
    _launch(plan, "value_grads", mild_value_grads_kernel, value_grads_kernel, r, k, w, u, do, dstates, mild, dv, scale)
    _launch(
        plan, "key_grads", mild_key_grads_kernel, key_grads_kernel,
        r, k, v, w, u, do, states, dstates, mild, dr, dk, dw, du, scale,
    )  # fmt: skip
    return dr, dk, dv, dw, du.sum(0), dinitial_state
