"""GSA in chunks as Triton kernels: everything is parallel over chunks but a light stream of memories.

Forward:  `gates_kernel`         the running sums of g that the others need, and which chunks are mild
          `stream_kernel`        the memory entering each chunk: twice, for hk and for hv
          `output_kernel`        scores, softmax and o from a chunk's tokens and its entering memories
Backward: `softmax_grads_kernel` dscores, from p and what reaches it through the second pass
          `stream_kernel`        in reverse, twice: the gradient of the memory leaving each chunk
          `slot_grads_kernel`    ds and dg as far as a chunk's own tokens and its entering memory go, once a pass
          `pass_grads_kernel`    dk and dq, or dv, and the rest of ds and dg, once a pass

Both memories are kept with the slots as rows, hk turned to [M, K]. The two passes are then one thing to the backward: a
read x over the slots (dscores or p) meets the key s of the same and of earlier tokens with the score matrix q k^T or
do v^T, and both read a memory that has taken in their own token. All M slots are in registers: the softmax needs them.

There are two ways through a chunk, compiled apart so that the common one stays small; both are launched and each leaves
the other's chunks alone (`common.chunks_triton`). With upto_i the sum of g over the chunk's rows up to i:
- mild (16-bit inputs, the chunk's whole decay fits float32): e^{upto_i - upto_j} = read_i key_j about the middle row;
- dyadic (any g): a read's own fading e^{g_i} is split off, so that what is left lies strictly between j and i as in
  RWKV6, log2(C) products whose factors are all in [0, 1]; a token meets itself without any decay.
Rows beyond a sequence's end are loaded as zeros, g too; no factor is ever above e^55, so that a zero stays a zero.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import decay_after, dot, level_pairs, level_weights, row_at, to_operand
from ..common.chunks_triton import (
    ChunkPlan,
    dyadic_pairs,
    dyadic_scores,
    kept_states_shape,
    load_tile,
    locate,
    state_pointers,
    store_tile,
    takes,
)
from ..common.launch import TABLE, block


@triton.jit
def gates_kernel(
    g, upto, after, decay, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums of g over a chunk's rows up to and after each [B, T, H, M], and e^{total}. In registers: [C, BM].

    Both are sums of what they cover, never the difference of one and the total: -inf stays -inf.
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_next = load_tile(g, start, end, i_h, 0, 1, H, M, C, BM).to(tl.float32)
    store_tile(upto, tl.cumsum(b_g, 0), start, end, i_h, 0, H, M, C, BM)
    store_tile(after, decay_after(b_next), start, end, i_h, 0, H, M, C, BM)
    o_m = tl.arange(0, BM)
    tl.store(decay + (i_c.to(tl.int64) * H + i_h) * M + o_m, tl.exp(tl.sum(b_g, 0)), mask=o_m < M)


@triton.jit
def _gates(g, upto, start, end, i_h, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
           MILD: tl.constexpr):  # fmt: skip
    """Four [C, BM] tiles: e^{upto} and, mild, the decay of reads and of keys about the middle row (the last is unused);
    dyadic, g of the row before and of the row after, and e^g."""
    b_u = load_tile(upto, start, end, i_h, 0, 0, H, M, C, BM)
    if MILD:
        from_middle = b_u - row_at(b_u, C // 2, C)[None, :]
        return tl.exp(b_u), tl.exp(from_middle), tl.exp(-from_middle), b_u
    else:
        b_prev = load_tile(g, start, end, i_h, 0, -1, H, M, C, BM).to(tl.float32)
        b_next = load_tile(g, start, end, i_h, 0, 1, H, M, C, BM).to(tl.float32)
        b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        return tl.exp(b_u), b_prev, b_next, tl.exp(b_g)


@triton.jit
def _lower(b_A, C: tl.constexpr):
    """b_A on and below its diagonal."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] >= o_c[None, :], b_A, 0.0)


@triton.jit
def _below(b_A, C: tl.constexpr):
    """b_A below its diagonal, and its diagonal as a column."""
    o_c = tl.arange(0, C)
    diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_A, 0.0), 1)[:, None]
    return tl.where(o_c[:, None] > o_c[None, :], b_A, 0.0), diagonal


@triton.jit
def _products(x, y, state, start, end, i_hx, i_h, i_s, HX: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
              M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """x y^T [C, C], right on and below the diagonal, and x S^T [C, BM] over all of D: of q, k, hk or of do, v, hv."""
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_base = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_A += tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
        p, m = state_pointers(state, i_s, 0, i_d, M, D, BM, BD)
        b_S = tl.load(p, mask=m & (start < end), other=0.0)
        b_base += dot(b_x.to(tl.float32), tl.trans(b_S), PRECISION)
    return _lower(b_A, C), b_base


@triton.jit
def _read(b_A, b_base, b_s, upto, b_1, b_2, now, C: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
          MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What a row finds in its slots: sum_{j<=i} A_ij s_j e^{decay after j up to i} + base_i e^{upto_i}, [C, BM]."""
    b_found = b_base * upto
    if MILD:
        b_found += dot(b_A, b_s * b_2, PRECISION) * b_1
    else:
        b_A, diagonal = _below(b_A, C)
        faded = tl.zeros([C, BM], dtype=tl.float32)
        for level in tl.static_range(LEVELS):
            b_a = tl.where(level_pairs(1 << level, C), b_A, 0.0)
            if level == 0:
                faded += dot(b_a, b_s, PRECISION)
            else:
                weight = level_weights(b_1, b_2, 1 << level, C, BM)
                faded += dot(b_a, b_s * weight, PRECISION) * weight
        b_found += now * faded + diagonal * b_s
    return b_found


@triton.jit
def _pair_scores(b_x, b_s, b_1, b_2, now, C: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
                 MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sum_m x_i s_j e^{decay after j up to i} for j <= i, else 0, [C, C]."""
    if MILD:
        b_B = _lower(dot(b_x * b_1, tl.trans(b_s * b_2), PRECISION), C)
    else:
        o_c = tl.arange(0, C)
        b_B = dyadic_scores(b_x * now, b_s, b_1, b_2, C, BM, LEVELS, PRECISION)
        b_B += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_x * b_s, 1)[:, None], 0.0)
    return b_B


@triton.jit
def _slot_grads(b_x, b_s, b_dA, b_base, upto, b_1, b_2, now, C: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
                MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """ds and dg [C, BM] from the pairs inside the chunk and the reads of the memory entering it.

    Mild: dg is a difference of two running sums, formed from the *same rounded operands*: the same products are added
    and taken away, a token's with itself altogether, and only float32 accumulation is left to disagree.
    """
    if MILD:
        b_dA = to_operand(b_dA, PRECISION)
        b_xr, b_sk = to_operand(b_x * b_1, PRECISION), to_operand(b_s * b_2, PRECISION)
        g_x = tl.dot(b_dA, b_sk, input_precision=PRECISION)
        g_s = tl.dot(tl.trans(b_dA), b_xr, input_precision=PRECISION)
        b_dg = tl.cumsum(b_xr * g_x - b_sk * g_s + b_x * (b_base * upto), axis=0, reverse=True)
        b_ds = g_s * b_2
    else:
        b_ds = tl.zeros([C, BM], dtype=tl.float32)
        b_dA, diagonal = _below(b_dA, C)
        b_dx, b_ds, b_dg = dyadic_pairs(
            b_x * now, b_s, b_1, b_2, to_operand(b_dA, PRECISION), b_base, b_ds, C, BM, LEVELS, PRECISION
        )
        b_ds += diagonal * b_x
        b_dg += b_x * now * b_dx  # the read's own gate comes before all that it reads
    return b_ds, b_dg


@triton.jit
def output_kernel(
    q, k, v, s, g, upto, hk, hv, mild, o, p, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, KEEP: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p = softmax of the scores, o = B v + (p e^{upto}) hv for one chunk and query head, B the scores of p with s.

    In registers: A, then B [C, C]; the scores, then p [C, BM]; o [C, BV].
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    i_s = i_c * H + i_h
    if takes(mild, i_s, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_A, b_base = _products(q, k, hk, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, PRECISION)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_u, b_1, b_2, now = _gates(g, upto, start, end, i_h, H, M, C, BM, MILD)
    b_p = _read(b_A * scale, b_base * scale, b_s, b_u, b_1, b_2, now, C, BM, LEVELS, MILD, PRECISION)
    b_p = tl.where((tl.arange(0, BM) < M)[None, :], b_p, -float("inf"))
    b_p = tl.exp(b_p - tl.max(b_p, 1)[:, None])
    b_p /= tl.sum(b_p, 1)[:, None]
    if KEEP:
        store_tile(p, b_p, start, end, i_hq, 0, H * G, M, C, BM)

    b_B = to_operand(_pair_scores(b_p, b_s, b_1, b_2, now, C, BM, LEVELS, MILD, PRECISION), PRECISION)
    b_p = to_operand(b_p * b_u, PRECISION)
    for i_v in range(0, (V + BV - 1) // BV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        p_S, m_S = state_pointers(hv, i_s, 0, i_v, M, V, BM, BV)
        b_S = to_operand(tl.load(p_S, mask=m_S & (start < end), other=0.0), PRECISION)
        b_o = tl.dot(b_B, b_v, input_precision=PRECISION)
        b_o += tl.dot(b_p, b_S, input_precision=PRECISION)
        store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@triton.jit
def softmax_grads_kernel(
    v, s, g, upto, do, hv, p, mild, dscores, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale dscores = scale p (dp - <p, dp>) [B, T, HQ, M] for one chunk and query head, dp being what do finds.

    In registers: do v^T [C, C]; dp and p [C, BM].
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    i_s = i_c * H + i_h
    if takes(mild, i_s, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_dB, b_base = _products(do, v, hv, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, PRECISION)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_u, b_1, b_2, now = _gates(g, upto, start, end, i_h, H, M, C, BM, MILD)
    b_dp = _read(b_dB, b_base, b_s, b_u, b_1, b_2, now, C, BM, LEVELS, MILD, PRECISION)
    b_p = load_tile(p, start, end, i_hq, 0, 0, H * G, M, C, BM)
    b_dp = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
    store_tile(dscores, b_dp * scale, start, end, i_hq, 0, H * G, M, C, BM)


@triton.jit
def slot_grads_kernel(
    x, y, z, s, g, upto, states, mild, slot_ds, slot_dg, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, ADD: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ds and dg [B, T, H, M] as far as one pass's pairs and reads of S go, for one chunk and head; or ADD them.

    x, y, z as in `pass_grads_kernel`; a group's queries one after another. In registers: z y^T [C, C], _slot_grads.
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    i_s = i_c * H + i_h
    if takes(mild, i_s, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_dg = tl.zeros([C, BM], dtype=tl.float32)
    for i_g in range(G):
        i_hq = i_h * G + i_g
        b_dA, b_base = _products(z, y, states, start, end, i_hq, i_h, i_s, H * G, H, D, M, C, BD, BM, PRECISION)
        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        b_u, b_1, b_2, now = _gates(g, upto, start, end, i_h, H, M, C, BM, MILD)
        b_x = load_tile(x, start, end, i_hq, 0, 0, H * G, M, C, BM)
        b_ds1, b_dg1 = _slot_grads(b_x, b_s, b_dA, b_base, b_u, b_1, b_2, now, C, BM, LEVELS, MILD, PRECISION)
        b_ds += b_ds1
        b_dg += b_dg1
    if ADD:
        b_ds += load_tile(slot_ds, start, end, i_h, 0, 0, H, M, C, BM)
        b_dg += load_tile(slot_dg, start, end, i_h, 0, 0, H, M, C, BM)
    store_tile(slot_ds, b_ds, start, end, i_h, 0, H, M, C, BM)
    store_tile(slot_dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@triton.jit
def pass_grads_kernel(
    x, y, z, s, g, upto, after, decay, states, dstates, mild, slot_ds, slot_dg, dy, dz, ds, dg,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, FIRST: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rest of one pass's gradients for one chunk and head: x = p, y = v, z = do or x = scale dscores, y = k, z = q.

    With E the scores of x with s, S the memory entering and D_S the gradient of the one leaving the chunk:
        dy = E^T z + (s e^{after}) D_S,   dz = E y + (x e^{upto}) S (dq; nobody asks for do's)
        ds += (y D_S^T) e^{after},   dg_t += e^{total} sum_d S D_S + sum_{j<t} s_j (that part of ds)_j
    The second pass adds to slot_ds and slot_dg [B, T, H, M], the first adds its own and leaves ds and dg.
    In registers: E [C, C]; x, s, decays and that part of ds [C, BM]; dy and dz [C, BD].
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    i_s = i_c * H + i_h
    if takes(mild, i_s, FLAGS, MILD) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_u, b_1, b_2, now = _gates(g, upto, start, end, i_h, H, M, C, BM, MILD)
    b_left = to_operand(b_s * tl.exp(load_tile(after, start, end, i_h, 0, 0, H, M, C, BM)), PRECISION)
    if G == 1:  # then they need not be made again for every block of D
        b_x = load_tile(x, start, end, i_h, 0, 0, H, M, C, BM)
        b_E = to_operand(_pair_scores(b_x, b_s, b_1, b_2, now, C, BM, LEVELS, MILD, PRECISION), PRECISION)
        b_x = to_operand(b_x * b_u, PRECISION)
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_SD = tl.zeros([BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        p_S, m_S = state_pointers(states, i_s, 0, i_d, M, D, BM, BD)
        p_D, _ = state_pointers(dstates, i_s, 0, i_d, M, D, BM, BD)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        b_D = tl.load(p_D, mask=m_S & (start < end), other=0.0)
        b_SD += tl.sum(b_S * b_D, 1)
        b_S, b_D = to_operand(b_S, PRECISION), to_operand(b_D, PRECISION)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD).to(tl.float32)
        b_ds += tl.dot(b_y, tl.trans(b_D), input_precision=PRECISION)
        b_dy = tl.dot(b_left, b_D, input_precision=PRECISION)
        for i_g in range(G):
            i_hq = i_h * G + i_g
            if G > 1:
                b_x = load_tile(x, start, end, i_hq, 0, 0, H * G, M, C, BM)
                b_E = to_operand(_pair_scores(b_x, b_s, b_1, b_2, now, C, BM, LEVELS, MILD, PRECISION), PRECISION)
                b_x = to_operand(b_x * b_u, PRECISION)
            b_z = load_tile(z, start, end, i_hq, i_d, 0, H * G, D, C, BD).to(tl.float32)
            b_dy += tl.dot(tl.trans(b_E), b_z, input_precision=PRECISION)
            if FIRST:
                b_dz = tl.dot(b_E, b_y, input_precision=PRECISION)
                b_dz += tl.dot(b_x, b_S, input_precision=PRECISION)
                store_tile(dz, b_dz, start, end, i_hq, i_d, H * G, D, C, BD)
        store_tile(dy, b_dy, start, end, i_h, i_d, H, D, C, BD)

    o_c, o_m = tl.arange(0, C), tl.arange(0, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_ds *= tl.exp(load_tile(after, start, end, i_h, 0, 0, H, M, C, BM))
    b_total = tl.load(decay + i_s.to(tl.int64) * M + o_m, mask=o_m < M, other=0.0)
    earlier = (o_c[:, None] > o_c[None, :]).to(tl.float32)
    b_dg = (b_total * b_SD)[None, :] + dot(earlier, b_s * b_ds, PRECISION)
    b_dg += load_tile(slot_dg, start, end, i_h, 0, 0, H, M, C, BM)
    b_ds += load_tile(slot_ds, start, end, i_h, 0, 0, H, M, C, BM)
    if FIRST:
        store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
        store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)
    else:
        store_tile(slot_ds, b_ds, start, end, i_h, 0, H, M, C, BM)
        store_tile(slot_dg, b_dg, start, end, i_h, 0, H, M, C, BM)


class _Plan(ChunkPlan):
    """A chunk plan whose states' rows are the slots, with a group of queries' sizes and the gates beside it."""

    def __init__(self, q, k, v, s, g, cu_seqlens, chunk_size):
        super().__init__("gsa" if s.shape[-1] <= 64 else "gsa128", s, v.shape[-1], cu_seqlens, chunk_size)
        self.M, self.D, self.G = self.K, k.shape[-1], q.shape[2] // self.H
        self.upto, self.after = self.empty(g.shape), self.empty(g.shape)
        self.decay = self.empty(self.chunks, self.H, self.M)
        gates_kernel[(self.chunks * self.H,)](
            g, self.upto, self.after, self.decay, *self.where, H=self.H, M=self.M, C=self.C, BM=self.block_M,
            PACKED=cu_seqlens is not None, **self.options("gates"),
        )  # fmt: skip

    @property
    def block_M(self) -> int:
        return block(self.M, 128)

    def options(self, kernel: str) -> dict:
        launch = TABLE[f"{self.op}.{kernel}", self.width]
        return dict(num_warps=launch.num_warps, num_stages=launch.num_stages)

    def ways(self, kernel: str):
        """The launches of a kernel that works inside chunks: (keyword arguments, largest block along K or V)."""
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            common = dict(
                H=self.H, G=self.G, M=self.M, C=self.C, BM=self.block_M, FLAGS=self.flags, MILD=int(way == "mild"),
                LEVELS=self.C.bit_length() - 1, PACKED=self.cu_seqlens is not None, PRECISION=self.precision,
            )  # fmt: skip
            yield common | self.options(f"{kernel}.{way}"), TABLE[f"{self.op}.{kernel}.{way}", self.width].BV


def _slot_rows(states) -> tuple:
    """(hk [N, H, K, M], hv [N, H, M, V]) with hk turned to [N, H, M, K]."""
    return (None, None) if states is None else (states[0].mT.contiguous(), states[1].contiguous())


def kept_shapes(q, k, v, s, g, cu_seqlens, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Shapes of what `forward` keeps for `backward`: p, and hk and hv entering every chunk, slots as rows."""
    states = (kept_states_shape("gsa", s, x.shape[-1], cu_seqlens, chunk_size) for x in (k, v))
    return (*q.shape[:3], s.shape[-1]), *states


def forward(q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep):
    """o, (hk_T, hv_T) (None unless asked for), and as in `kept_shapes` (p empty unless kept)."""
    plan = _Plan(q, k, v, s, g, cu_seqlens, chunk_size)
    (first_hk, first_hv), last_hk, last_hv = _slot_rows(initial_state), None, None
    if output_final_state:
        last_hk, last_hv = (plan.empty(plan.N, plan.H, plan.M, x.shape[-1]) for x in (k, v))
    hk, mild = plan.states(s, k, g, 1.0, first_hk, last_hk, reverse=False)
    hv, _ = plan.states(s, v, g, 1.0, first_hv, last_hv, reverse=False)
    o, p = q.new_empty(*q.shape[:3], plan.V), plan.empty((*q.shape[:3], plan.M) if keep else 0)
    for options, limit in plan.ways("output"):
        output_kernel[(plan.chunks * plan.H * plan.G,)](
            q, k, v, s, g, plan.upto, hk, hv, mild, o, p, scale, *plan.where,
            K=plan.D, V=plan.V, BK=block(plan.D, limit), BV=block(plan.V, limit), KEEP=keep, **options,
        )  # fmt: skip
    return o, (last_hk.mT, last_hv) if output_final_state else None, (p, hk, hv)


def backward(q, k, v, s, g, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dq, dk, dv, ds, dg in their inputs' dtypes and (dhk_0, dhv_0) in float32."""
    plan = _Plan(q, k, v, s, g, cu_seqlens, chunk_size)
    p, hk, hv = kept
    dscores = torch.empty_like(p)
    last_hk, last_hv = _slot_rows(dfinal_state)
    first_hk, first_hv = (plan.empty(plan.N, plan.H, plan.M, x.shape[-1]) for x in (k, v))
    dhv, mild = plan.states(p, do, g, 1.0, last_hv, first_hv, reverse=True, inclusive=True)
    for options, limit in plan.ways("softmax_grads"):
        if q.dtype == torch.float16:
            # dscores is what dp differs from its mean by: of float16's 11 bits TF32's rounding of dp would cost one.
            options["PRECISION"] = "tf32x3"
        softmax_grads_kernel[(plan.chunks * plan.H * plan.G,)](
            v, s, g, plan.upto, do, hv, p, mild, dscores, scale, *plan.where,
            K=plan.D, V=plan.V, BK=block(plan.D, limit), BV=block(plan.V, limit), **options,
        )  # fmt: skip
    dhk, _ = plan.states(dscores, q, g, 1.0, last_hk, first_hk, reverse=True, inclusive=True)
    dq, dk, dv, ds, dg = (torch.empty_like(x) for x in (q, k, v, s, g))
    slot_ds, slot_dg = plan.empty(s.shape), plan.empty(s.shape)
    second, first = (p, v, do, hv, dhv, dv, None), (dscores, k, q, hk, dhk, dk, dq)
    for x, y, z, states, _, _, dz in (second, first):
        for options, limit in plan.ways("slot_grads"):
            # A product is taken away from a sum that holds it: a fused multiply-add would not take the same one.
            slot_grads_kernel[(plan.chunks * plan.H,)](
                x, y, z, s, g, plan.upto, states, mild, slot_ds, slot_dg, *plan.where,
                D=y.shape[-1], BD=block(y.shape[-1], limit), ADD=dz is not None, enable_fp_fusion=False, **options,
            )  # fmt: skip
    for x, y, z, states, dstates, dy, dz in (second, first):
        for options, limit in plan.ways("pass_grads"):
            pass_grads_kernel[(plan.chunks * plan.H,)](
                x, y, z, s, g, plan.upto, plan.after, plan.decay, states, dstates, mild, slot_ds, slot_dg,
                dy, dz, ds, dg, *plan.where, D=y.shape[-1], BD=block(y.shape[-1], limit), FIRST=dz is not None,
                **options,
            )  # fmt: skip
    return dq, dk, dv, ds, dg, (first_hk.mT, first_hv)
