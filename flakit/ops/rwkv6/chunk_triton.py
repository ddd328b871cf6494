"""RWKV6 in chunks as Triton kernels: all work but a light stream of states is parallel over chunks.

Forward:  `stream_kernel`   the state entering each chunk, and whether the chunk is mild
          `output_kernel`   o from a chunk's tokens and its entering state
Backward: `stream_kernel`, `output_kernel`  in reverse: the gradient of the state leaving each chunk; dv
          `key_grads_kernel`                dr, dk, dw and each chunk's part of du

`fused_chunk_triton` serves heads of 33 to 64 channels, the kernels here all others, in chunks of 32 tokens.

Formulas as in `chunk_torch`: q = scale r, S enters a chunk, D is the gradient of the state leaving it. before, upto and
after are sums of w over the rows before a row, up to and with it, and after it; total is over all rows, mid over the
first half. Each chunk takes one of two paths; kernels are launched for both, and each launch skips the other's chunks:
- MILD (16-bit inputs; the chunk's whole decay fits float32): one product about the middle, of the reads
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
    add_product_by_input,
    add_products,
    add_sums,
    clamped_decay,
    exp,
    kernel,
    program,
    split,
    sums,
    whole,
)
from ..common.kernel_triton import Memory, Part
from ..common.launch import CHUNK_SIZE
from ..common.pairs_triton import about_middles, add_scores, pair_grads, pair_scores
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


@triton.jit
def _skips(mild, first, total, AT_ONCE: tl.constexpr, FLAGS: tl.constexpr, MILD: tl.constexpr):
    """Return whether none of the AT_ONCE pairs of chunk and head from `first` on are of this launch's path."""
    if MILD:
        none = handles(mild, first, FLAGS, 1) == 0
    else:
        none = all_mild(mild, first, total, AT_ONCE, FLAGS)
    return none


@kernel
def output_kernel(
    r, k, v, w, u, states, scales, mild, o, scale, sequence_of_chunk, cu_seqlens, chunks_before, T, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute o = A v + (q e^{before}) S for one chunk, head and block of V. REVERSE: its counterpart dv = A^T do +
    (k e^{after}) D, of v = do and states = D, as o. MILD: q* and k* instead. In registers: A [C, C], o [C, BV].

    r, k, w [B, T, H, K], v, o [B, T, H, V], u [H, K]; sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]
    states [chunks, H, K, V] float16, scales [chunks, H, NV, K]: a row's for each block of V, MILD times e^{mid}, or
    REVERSE e^{total - mid}; with float32 inputs, states are float32 and scales None
    mild [chunks, H, FLAGS] int32: 1 throughout a mild chunk's; chunks: of all sequences; symbols: see the module
    Each program checks AT_ONCE pairs of chunk and head (MILD: one), and computes those of its path.
    """
    i_v, i_g = program((V + BV - 1) // BV)
    first, total = i_g * AT_ONCE, chunks * H
    if _skips(mild, first, total, AT_ONCE, FLAGS, MILD):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + step
        i_h, i_c = i % H, i // H
        if MILD or not_mild(mild, i, total, FLAGS):
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            other = o_c[:, None] < o_c[None, :] if REVERSE else o_c[:, None] > o_c[None, :]
            if MILD:  # all loads first
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
                b_S, unit = load_state(states, scales, i_c * H + i_h, start < end, i_k, i_v, K, V, BK, BV, SCALED)
                b_q, b_k = b_q.to(tl.float32) * scale, b_k.to(tl.float32)
                b_d += tl.sum(b_q * b_k * b_u[None, :], 1)
                if MILD:
                    read, key = about_middles(b_w, C, C)
                    b_q, b_k = b_q * exp(read), b_k * exp(key)
                    b_A = add_scores(b_A, b_q, b_k, REVERSE)
                    x = b_k if REVERSE else b_q
                else:
                    b_w = clamped_decay(b_w)
                    x = (b_k if REVERSE else b_q) * exp(sums(other, b_w))
                x, x_unit = scaled_rows(x * unit[None, :], SCALED)
                b_o += tl.dot(x, b_S, input_precision="tf32x3") * x_unit[:, None]
                if not MILD:
                    b_A += pair_scores(b_q, b_k, b_w, C, LEVELS, REVERSE, SCALED)
            b_A = tl.where(other, b_A, tl.where(o_c[:, None] == o_c[None, :], b_d[:, None], 0.0))
            if not MILD:
                b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
            b_o = add_product_by_input(b_o, b_A, b_v)
            store_tile(o, b_o, start, end, i_h, i_v, H, V, C, BV)


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
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dr, dk, dw and a part of du for one chunk, head and block of K. dA = do v^T below the diagonal, d_i =
    do_i^T v_i. In registers: dA [C, C]; MILD: x, then y, z [C, BK], else dq, dk, dw.

    dq = x e^{before} + pairs + d u k,  x = do S^T,  dr = scale dq
    dk = y e^{after} + pairs + d u q,   y = v D^T
    dw_t = e^{total} sum_v S D + sum_{i>t} q_i e^{before_i} x_i + sum_{j<t} k_j e^{after_j} y_j + pairs j < t < i

    pairs: terms of two tokens of the chunk. MILD, where S stands for e^{mid} S and D for e^{total - mid} D:
    dq = x e^{before - mid} + d u k,        x = dA k* + do S^T
    dk = (y + z) e^{mid - upto} + d u q,    z = dA^T q*,  y = v D^T
    dw_t = sum_v S D + sum_{i>t} q*_i x_i - sum_{j>=t} k*_j z_j + sum_{j<t} k*_j y_j

    r, k, w, dr, dk, dw [B, T, H, K], v, do [B, T, H, V], u [H, K], du [chunks, H, K]: a term for each chunk
    others as in `output_kernel`: dstates, dscales as states, scales there with REVERSE
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_g = program((K + BK - 1) // BK)
    first, total = i_g * AT_ONCE, chunks * H
    if _skips(mild, first, total, AT_ONCE, FLAGS, MILD):
        return
    for step in tl.range(0, AT_ONCE, disable_licm=True):
        i_S = first + step
        i_h, i_c = i_S % H, i_S // H
        if MILD or not_mild(mild, i_S, total, FLAGS):
            start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
            o_c = tl.arange(0, C)
            o_k = i_k * BK + tl.arange(0, BK)
            later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
            if MILD:
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
                x = tl.zeros([C, BK], dtype=tl.float32)
                x = add_products(x, split(tl.where(earlier, b_dA, 0.0)), split(b_k * key), True)
                for i_v in range(0, NV):
                    b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
                    b_S, S_unit = load_state(states, scales, i_S, start < end, i_k, i_v, K, V, BK, BV, True)
                    b_do, unit = scaled_rows(b_do, True)
                    x += tl.dot(b_do, tl.trans(b_S)) * unit[:, None] * S_unit[None, :]
                diagonal = diagonal[:, None]
                b_q = load_tile(r, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * scale
                store_tile(dr, (x * read + diagonal * b_u * b_k) * scale, start, end, i_h, i_k, H, K, C, BK)
                tl.store(du + i_S.to(tl.int64) * K + o_k, tl.sum(diagonal * b_q * b_k, 0), mask=o_k < K)
                q_terms = split(b_q * read)
                reads = whole(q_terms) * x

                # Keys. dA^T is computed anew: transposing dA costs more.
                b_dA = tl.zeros([C, C], dtype=tl.float32)
                for i_v in range(0, NV):
                    b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
                    b_do = load_tile(do, start, end, i_h, i_v, 0, H, V, C, BV)
                    b_dA = tl.dot(b_v, tl.trans(b_do), b_dA)
                z = tl.zeros([C, BK], dtype=tl.float32)
                z = add_products(z, split(tl.where(later, b_dA, 0.0)), q_terms, True)
                b_w = load_tile(w, start, end, i_h, i_k, 0, H, K, C, BK)
                _, key = about_middles(b_w, C, C)
                key = exp(key)
                own = whole(split(load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32) * key)) * z
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
            else:
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


ACCEPTS_FUNCTIONS = True
"""Whether a state may be a function that exchanges states with other ranks (`ahead_triton.Kernels`)."""


def saved_shapes(r, k, v, w, u, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: the state entering every chunk, and the mild flags."""
    plan = ChunkPlan(Memory(), "rwkv6", r, v.shape[-1], packing, CHUNK_SIZE)
    return plan.stored_shape(plan.columns), (plan.chunks * plan.H * plan.flags,)


def forward(memory, r, k, v, w, u, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final state (None unless requested), and the tensors of `saved_shapes`; keep is unused."""
    plan = ChunkPlan(memory, "rwkv6", r, v.shape[-1], packing, CHUNK_SIZE)
    o, final_state = torch.empty_like(v), plan.empty(plan.state_shape()) if output_final_state else None
    states, mild = plan.states(k, v, w, 1.0, initial_state, final_state, reverse=False)
    args = r, k, v, w, u, states, mild, o, scale
    plan.launch_paths("output", output_kernel, "V", *args, visits=True, REVERSE=False)
    return o, final_state, (states.whole, mild.whole)


def backward(memory, r, k, v, w, u, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dr, dk, dv, dw in their inputs' dtypes, du [H, K] and dinitial_state [N, H, K, V] in float32."""
    plan = ChunkPlan(memory, "rwkv6", r, v.shape[-1], packing, CHUNK_SIZE)
    dr, dk, dv, dw = (torch.empty_like(x) for x in (r, k, v, w))
    dinitial_state, du = plan.empty(plan.state_shape()), plan.empty(plan.chunks, plan.H, plan.rows)
    dstates, _ = plan.states(r, do, w, scale, dfinal_state, dinitial_state, reverse=True)
    states = plan.unpacked(saved[0], plan.columns)
    mild = Part(saved[1], 0, saved[1].numel(), torch.int32)
    args = r, k, do, w, u, dstates, mild, dv, scale
    plan.launch_paths("value_grads", output_kernel, "V", *args, visits=True, REVERSE=True)
    args = r, k, v, w, u, do, states, dstates, mild, dr, dk, dw, du, scale
    plan.launch_paths("key_grads", key_grads_kernel, "K", *args, visits=True)
    return dr, dk, dv, dw, du.sum(0), dinitial_state
