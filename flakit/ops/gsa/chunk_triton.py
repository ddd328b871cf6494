"""GSA in chunks as Triton kernels: everything is parallel over chunks but a light stream of memories.

Forward:  `stream_kernel`        the memories hk and hv entering each chunk, and which chunks are mild
          `output_kernel`        scores, softmax and o from a chunk's tokens and its entering memories
Backward: `softmax_grads_kernel` p again, and dscores from it and from what reaches it through the second pass
          `stream_kernel`        in reverse: the gradients of both memories leaving each chunk
          `slot_grads_kernel`    ds and dg (for any decay `memory_grads_kernel` before it: what memories give)
          `pass_grads_kernel`    dk and dq, then dv

Both memories are kept with the slots as rows, hk turned to [M, K]. The two passes are then one thing to the backward: a
read x over the slots (dscores or p) meets the key s of the same and of earlier tokens with the score matrix q k^T or
do v^T, and both read a memory that has taken in their own token. All M slots are in registers: the softmax needs them.

There are two ways through a chunk; both are launched and each leaves the other's chunks alone. With upto_i the sum of g
over the chunk's rows up to i, and mid that over its first half:
- `mild_*` (16-bit inputs, the chunk's whole decay fits float32): e^{upto_i - upto_j} is the product of what reads are
  multiplied with, e^{upto_i - mid}, and keys, e^{mid - upto_j}: x*_i and s*_j. What is left, e^{mid} where memories are
  read and e^{total - mid} where they are written, lies in the scales that mild kernels are given (`store_state`);
- any other: a read's own fading e^{g_i} is split off, so that what is left lies strictly between j and i as in RWKV6,
  products by dyadic level whose factors are all in [0, 1] (`pair_scores`); a token meets itself without any decay.
Rows beyond a sequence's end are loaded as zeros, g too; no factor is ever above e^55, so that a zero stays a zero.
Chunks have 64 tokens where inputs are bfloat16, slots 33 to 64 and queries as many as heads, else 32.

Mild operands are split into two bfloat16 numbers where decays are in them (`blocks_triton.split`). Products with a
memory, which is kept in float16 with a power of two for each row, take the other operand in float16 too, each of its
rows over a power of two: one product in the place of two or three, and the memory goes from where it lies to the tensor
core as it is. What that rounds, 2^-12, is what the memory has lost already. A score, though, is an exponent: a loss
of 2^-12 there changes p by that times the score. bfloat16 inputs lose more before they come here; beside float16 ones
the stream also stores what hk was rounded by, for the scores alone (`remainders`).

The decay's gradient is a difference of two running sums on the mild way. What a read finds, and what a key is found by,
come from the same split operands with all four products of their parts, and are summed from three parts, which is all
of float32: the same products are added and taken away, and only float32 accumulation is left to disagree. What reads
find is known to the forward (scores) and to softmax_grads (dp), which hand it on in float32.

Where tiles are loaded again so as not to be kept in registers, a `tl.debug_barrier` stands before: else Triton takes
two loads of the same for one, and moves those in a loop before it.
"""

import math

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import (
    add_given_by_split,
    add_operands,
    add_product,
    add_split_by_given,
    add_sums,
    add_whole_product,
    diagonal,
    exp,
    fading,
    kernel,
    operand,
    program,
    split,
    sums,
)
from ..common.chunks_triton import (
    BLOCK_LEVELS,
    ChunkPlan,
    about_blocks,
    add_pair_sums,
    expect_state,
    expect_tile,
    flags_of,
    from_middle,
    halves,
    is_zero,
    kept_states_shape,
    level_decays,
    load_decays,
    load_tile,
    locate,
    meet,
    none_to_do,
    not_mild,
    only,
    pair_scores,
    same_block,
    scaled,
    state_pointers,
    store_tile,
    takes,
    within,
)
from ..common.launch import CHUNK_SIZE, TABLE, cdiv

# --- memories --------------------------------------------------------------------------------------------------------


@triton.jit
def _memory(states, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """A block of columns of memory number i, [BM, BD], as it is kept; 0 if nothing is `there`."""
    p, m = state_pointers(states, i, 0, i_d, M, D, BM, BD)
    return tl.load(p, mask=m & there, other=0.0)


@triton.jit
def _units(scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
           BS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """What the rows of that block are multiples of, [BM]; BS: columns that the stream scaled together."""
    o_m = tl.arange(0, BM)
    if SCALED:
        BLOCKS = (D + BS - 1) // BS
        return tl.load(scales + (i.to(tl.int64) * BLOCKS + i_d * BD // BS) * M + o_m, mask=(o_m < M) & there, other=0.0)
    else:
        return tl.full([BM], 1.0, tl.float32)


@triton.jit
def _lower(b_A, C: tl.constexpr):
    """b_A on and below its diagonal."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] >= o_c[None, :], b_A, 0.0)


@triton.jit
def _upper(b_A, C: tl.constexpr):
    """b_A on and above its diagonal."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] <= o_c[None, :], b_A, 0.0)


@triton.jit
def _softmax(b_scores, M: tl.constexpr, BM: tl.constexpr):
    b_scores = tl.where((tl.arange(0, BM) < M)[None, :], b_scores, -float("inf"))
    b_p = tl.exp(b_scores - tl.max(b_scores, 1)[:, None])
    return b_p / tl.sum(b_p, 1)[:, None]


@triton.jit
def _softmax_grads(b_p, b_dp, SCALED: tl.constexpr):
    """p (dp - <p, dp>), as `chunk_torch.softmax_grads`; SCALED: straight away, beside 16-bit inputs."""
    if not SCALED:
        largest = tl.max(b_p, 1)[:, None]
        b_dp -= tl.max(tl.where(b_p == largest, b_dp, -float("inf")), 1)[:, None]
    return b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])


# --- mild chunks -----------------------------------------------------------------------------------------------------


@triton.jit
def _mild_found(x, y, states, scales, b_s, upto, start, end, i_hx, i_h, i_s, HX: tl.constexpr, H: tl.constexpr,
                D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
                BS: tl.constexpr, remainders=None):  # fmt: skip
    """What x finds in a slot over the read's factor, [C, BM]: lower(x y^T) s* + (x S^T) e^{mid}.

    remainders: what S was rounded by, or None.
    """
    b_A = tl.zeros([C, C], dtype=tl.float32)
    found = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_S = _memory(states, i_s, start < end, i_d, M, D, BM, BD)
        unit = _units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_A = tl.dot(b_x, tl.trans(b_y), b_A)
        x_16, x_unit = scaled(b_x)
        b_read = tl.dot(x_16, tl.trans(b_S))
        if remainders is not None:
            b_read += tl.dot(x_16, tl.trans(_memory(remainders, i_s, start < end, i_d, M, D, BM, BD)))
        found += b_read * x_unit[:, None] * unit[None, :]
    A_high, A_low = split(_lower(b_A, C))
    s_high, s_low = split(b_s * exp(-upto))
    return add_whole_product(found, A_high, A_low, s_high, s_low)


@kernel
def mild_output_kernel(
    q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, mild, o, found, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale found), o = B v + (p* e^{mid}) hv for one chunk and query head, B = lower(p* s*^T).

    In registers: A, then B [C, C]; what q finds, then p [C, BM]; o [C, BV].
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    expect_state(hv, i_s, start < end, 0, 0, M, V, BM, V)
    expect_tile(v, start, end, i_h, 0, H, V, C, V)
    upto = from_middle(b_g, C)
    b_s = b_s.to(tl.float32)
    b_p = _mild_found(
        q, k, hk, hk_scales, b_s, upto, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, BS, remainders
    )  # fmt: skip
    b_p *= exp(upto)
    if KEEP:
        store_tile(found, b_p, start, end, i_hq, 0, H * G, M, C, BM)
    b_p = _softmax(b_p * scale, M, BM) * exp(upto)
    p_high, p_low = split(b_p)
    s_high, s_low = split(b_s * exp(-upto))
    b_B = tl.zeros([C, C], dtype=tl.float32)
    b_B = add_product(b_B, p_high, p_low, tl.trans(s_high), tl.trans(s_low))
    B_high, B_low = split(_lower(b_B, C))
    for i_v in range(0, (V + BV - 1) // BV):
        unit = _units(hv_scales, i_s, start < end, i_v, M, V, BM, BV, BS, True)
        b_hv = _memory(hv, i_s, start < end, i_v, M, V, BM, BV)
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        p_16, p_unit = scaled(b_p * unit[None, :])
        b_o = tl.dot(p_16, b_hv) * p_unit[:, None]
        b_o = add_split_by_given(b_o, B_high, B_low, b_v)
        store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@kernel
def mild_softmax_grads_kernel(
    v, s, g, do, hv, hv_scales, found, mild, p, dscores, reads, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """p, scale dscores = scale p (dp - <p, dp>), dp being what do finds, and reads, all [B, T, HQ, M].

    reads: what the decay up to a read gets from it in both passes, p dp + scale dscores found, from the operands x* of
    `mild_slot_grads_kernel`. For one chunk and query head. In registers: do v^T [C, C]; dp, p and found [C, BM].
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    expect_tile(found, start, end, i_hq, 0, H * G, M, C, M)
    upto = from_middle(b_g, C)
    b_s = b_s.to(tl.float32)
    b_dp = _mild_found(do, v, hv, hv_scales, b_s, upto, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, BS)
    b_found = load_tile(found, start, end, i_hq, 0, 0, H * G, M, C, BM)
    b_p = _softmax(b_found * scale, M, BM)
    kept = b_p.to(p.dtype.element_ty)
    store_tile(p, kept, start, end, i_hq, 0, H * G, M, C, BM)
    read = exp(upto)
    high, low = split(kept.to(tl.float32) * read)
    b_reads = (high.to(tl.float32) + low.to(tl.float32)) * b_dp
    b_dp *= read
    b_x = _softmax_grads(b_p, b_dp, True) * scale
    store_tile(dscores, b_x, start, end, i_hq, 0, H * G, M, C, BM)
    high, low = split(b_x * read)
    b_reads += (high.to(tl.float32) + low.to(tl.float32)) * (b_found * exp(-upto))
    store_tile(reads, b_reads, start, end, i_hq, 0, H * G, M, C, BM)


@triton.jit
def _add_found_by(b_z, x, y, z, read, start, end, i_hq, i_h, HQ: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
                  D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """b_z + upper(y z^T) x*: what finds a key in one pass, [C, BM]."""
    b_dA = tl.zeros([C, C], dtype=tl.float32)
    b_x = load_tile(x, start, end, i_hq, 0, 0, HQ, M, C, BM)
    for i_d in range(0, (D + BD - 1) // BD):
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_z1 = load_tile(z, start, end, i_hq, i_d, 0, HQ, D, C, BD)
        b_dA = tl.dot(b_y, tl.trans(b_z1), b_dA)
    dA_high, dA_low = split(_upper(b_dA, C))
    x_high, x_low = split(b_x.to(tl.float32) * read)
    return add_whole_product(b_z, dA_high, dA_low, x_high, x_low)


@triton.jit
def _mild_written(y, states, scales, dstates, dscales, start, end, i_h, i_s, H: tl.constexpr, M: tl.constexpr,
                  D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """y D_S^T [C, BM], and sum_d S D_S [BM], of one pass."""
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_SD = tl.zeros([BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        y_16, y_unit = scaled(load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD))
        b_D = _memory(dstates, i_s, start < end, i_d, M, D, BM, BD)
        unit = _units(dscales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_S = _memory(states, i_s, start < end, i_d, M, D, BM, BD)
        b_ds += tl.dot(y_16, tl.trans(b_D)) * y_unit[:, None] * unit[None, :]
        unit *= _units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_SD += tl.sum(b_S.to(tl.float32) * b_D.to(tl.float32), 1) * unit
    return b_ds, b_SD


@kernel
def mild_slot_grads_kernel(
    q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv, dhv_scales, p, dscores, reads, mild, ds, dg,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ds and dg for one chunk and head. In registers: y z^T [C, C], then Z, dg and Y [C, BM].

    Over both passes, x and z of each query of a group, S and D_S as in `mild_pass_grads_kernel`:
        Z = sum upper(y z^T) x*,   Y = sum (y D_S^T) e^{total - mid},   ds = (Y + Z) e^{mid - upto}
        dg_t = e^{total} sum S D_S + sum_{i>=t} reads_i - sum_{j>=t} s*_j Z_j + sum_{j<t} s*_j Y_j
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    i_s = i_c * H + i_h
    o_c = tl.arange(0, C)
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    for i_g in range(G):
        i_hq = i_h * G + i_g
        expect_tile(dscores, start, end, i_hq, 0, H * G, M, C, M)
        expect_tile(do, start, end, i_hq, 0, H * G, V, C, V)
        expect_tile(p, start, end, i_hq, 0, H * G, M, C, M)
        expect_tile(reads, start, end, i_hq, 0, H * G, M, C, M)
    expect_tile(v, start, end, i_h, 0, H, V, C, V)
    upto = from_middle(b_g, C)
    read = exp(upto)
    b_z = tl.zeros([C, BM], dtype=tl.float32)
    passing = tl.zeros([C, BM], dtype=tl.float32)
    for i_g in range(G):
        i_hq = i_h * G + i_g
        b_z = _add_found_by(b_z, dscores, k, q, read, start, end, i_hq, i_h, H * G, H, M, K, C, BM, BK)
        b_z = _add_found_by(b_z, p, v, do, read, start, end, i_hq, i_h, H * G, H, M, V, C, BM, BV)
        passing += load_tile(reads, start, end, i_hq, 0, 0, H * G, M, C, BM)
    expect_tile(s, start, end, i_h, 0, H, M, C, M)
    expect_state(dhk, i_s, start < end, 0, 0, M, K, BM, K)
    expect_state(hk, i_s, start < end, 0, 0, M, K, BM, K)
    expect_state(dhv, i_s, start < end, 0, 0, M, V, BM, V)
    expect_state(hv, i_s, start < end, 0, 0, M, V, BM, V)
    high, low = split(load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32) * exp(-upto))
    passing -= (high.to(tl.float32) + low.to(tl.float32)) * b_z
    b_dg = add_sums(tl.zeros([C, BM], dtype=tl.float32), o_c[:, None] <= o_c[None, :], passing, True)
    tl.debug_barrier()
    b_y, b_SD = _mild_written(k, hk, hk_scales, dhk, dhk_scales, start, end, i_h, i_s, H, M, K, C, BM, BK, BS)
    b_y2, b_SD2 = _mild_written(v, hv, hv_scales, dhv, dhv_scales, start, end, i_h, i_s, H, M, V, C, BM, BV, BS)
    tl.debug_barrier()
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    key = exp(-from_middle(b_g, C))
    b_y += b_y2
    b_dg += (b_SD + b_SD2)[None, :]
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_dg = add_sums(b_dg, o_c[:, None] > o_c[None, :], b_s * key * b_y, False)
    store_tile(ds, (b_y + b_z) * key, start, end, i_h, 0, H, M, C, BM)
    empty = is_zero(hk_scales, i_s, start < end, 0, M, K, BM, BS) & is_zero(
        hv_scales, i_s, start < end, 0, M, V, BM, BS
    )
    b_dg = tl.where((o_c == 0)[:, None] & empty[None, :], 0.0, b_dg)
    store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@triton.jit
def _mild_scores(b_x, b_s, C: tl.constexpr):
    """lower(x* s*^T) [C, C] of what is not split yet, as two bfloat16 tiles."""
    x_high, x_low = split(b_x)
    s_high, s_low = split(b_s)
    b_E = tl.zeros([C, C], dtype=tl.float32)
    return split(_lower(add_product(b_E, x_high, x_low, tl.trans(s_high), tl.trans(s_low)), C))


@kernel
def mild_pass_grads_kernel(
    x, y, z, s, g, states, scales, dstates, dscales, mild, dy, dz, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, FIRST: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One pass's gradients for one chunk and head: x = p, y = v, z = do or x = scale dscores, y = k, z = q.

    With E = lower(x* s*^T), S the memory entering and D_S the gradient of the one leaving the chunk:
        dy = E^T z + (s* e^{total - mid}) D_S,   dz = E y + (x* e^{mid}) S (dq; nobody asks for do's)
    In registers: E [C, C]; x* and s* [C, BM]; dy or dz [C, BD].
    A group's queries each have an E, made for one block of D: a program goes through all blocks only where G is 1.
    """
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    AT_ONCE: tl.constexpr = BLOCKS if G == 1 else 1
    i_b, i = program(BLOCKS // AT_ONCE)
    i_h, i_c = i % H, i // H
    if takes(mild, i_c * H + i_h, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    if G == 1:
        b_x = load_tile(x, start, end, i_h, 0, 0, H, M, C, BM)
        expect_state(dstates, i_s, start < end, 0, 0, M, D, BM, D)
        expect_tile(z, start, end, i_h, 0, H, D, C, D)
        if FIRST:
            expect_state(states, i_s, start < end, 0, 0, M, D, BM, D)
            expect_tile(y, start, end, i_h, 0, H, D, C, D)
    upto = from_middle(b_g, C)
    read = exp(upto)
    b_s = b_s.to(tl.float32) * exp(-upto)
    if G == 1:
        b_x = b_x.to(tl.float32) * read
        E_high, E_low = _mild_scores(b_x, b_s, C)
    for n in tl.range(0, AT_ONCE, disable_licm=True):
        i_d = i_b + n
        unit = _units(dscales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
        b_D = _memory(dstates, i_s, start < end, i_d, M, D, BM, BD)
        s_16, s_unit = scaled(b_s * unit[None, :])
        b_dy = tl.dot(s_16, b_D) * s_unit[:, None]
        for i_g in range(G):
            if G > 1:
                b_x = load_tile(x, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM).to(tl.float32) * read
                E_high, E_low = _mild_scores(b_x, b_s, C)
            b_z = load_tile(z, start, end, i_h * G + i_g, i_d, 0, H * G, D, C, BD)
            b_dy = add_split_by_given(b_dy, tl.trans(E_high), tl.trans(E_low), b_z)
        store_tile(dy, b_dy, start, end, i_h, i_d, H, D, C, BD)
    if FIRST:
        tl.debug_barrier()
        for i_g in range(G):
            i_hq = i_h * G + i_g
            b_x = load_tile(x, start, end, i_hq, 0, 0, H * G, M, C, BM).to(tl.float32) * read
            if G > 1:
                E_high, E_low = _mild_scores(b_x, b_s, C)
            for n in tl.range(0, AT_ONCE, disable_licm=True):
                i_d = i_b + n
                unit = _units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, True)
                b_S = _memory(states, i_s, start < end, i_d, M, D, BM, BD)
                b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
                x_16, x_unit = scaled(b_x * unit[None, :])
                b_dz = tl.dot(x_16, b_S) * x_unit[:, None]
                b_dz = add_split_by_given(b_dz, E_high, E_low, b_y)
                store_tile(dz, b_dz, start, end, i_hq, i_d, H * G, D, C, BD)


# --- chunks with any decay -------------------------------------------------------------------------------------------


@triton.jit
def _operand_memory(states, scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
                    BD: tl.constexpr, BS: tl.constexpr, SCALED: tl.constexpr, remainders=None):  # fmt: skip
    """A block of columns of memory number i, [BM, BD], as an operand. remainders: what it was rounded by, or None."""
    b_S = _memory(states, i, there, i_d, M, D, BM, BD).to(tl.float32)
    if remainders is not None:
        b_S += _memory(remainders, i, there, i_d, M, D, BM, BD).to(tl.float32)
    return operand(b_S * _units(scales, i, there, i_d, M, D, BM, BD, BS, SCALED)[:, None], SCALED)


@triton.jit
def _products(x, y, states, scales, start, end, i_hx, i_h, i_s, HX: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
              M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
              SCALED: tl.constexpr, remainders=None):  # fmt: skip
    """x y^T [C, C] and x S^T [C, BM] over all of D: of q, k, hk or of do, v, hv."""
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_base = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_A = tl.dot(b_x, tl.trans(b_y), b_A, input_precision="tf32x3")
        S_high, S_low = _operand_memory(
            states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED, remainders
        )  # fmt: skip
        b_base = add_given_by_split(b_base, b_x, tl.trans(S_high), tl.trans(S_low))
    return b_A, b_base


@triton.jit
def _found(b_A, b_base, b_s, b_g, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """What a row finds in its slots: sum_{j<=i} A_ij s_j e^{decay after j up to i} + base_i e^{upto_i}, [C, BM]."""
    o_c = tl.arange(0, C)
    A_high, A_low = operand(b_A, SCALED)
    faded = add_pair_sums(tl.zeros_like(b_base), A_high, A_low, b_s, b_g, C, LEVELS, SCALED)
    found = (
        b_base * fading(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED) + fading(b_g.to(tl.float32), SCALED) * faded
    )
    return found + diagonal(b_A, C) * b_s


@triton.jit
def _scores(b_x, b_s, b_g, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """sum_m x_i s_j e^{decay after j up to i} for j <= i, else 0, as an operand [C, C]."""
    o_c = tl.arange(0, C)
    own = tl.sum(b_x * b_s, 1)[:, None]
    b_E = pair_scores(b_x * fading(b_g.to(tl.float32), SCALED), b_s, b_g, C, LEVELS, False, SCALED)
    b_E = tl.where(o_c[:, None] > o_c[None, :], b_E, tl.where(o_c[:, None] == o_c[None, :], own, 0.0))
    return operand(b_E, SCALED)


@triton.jit
def _any_output(
    i_hq, i_h, i_c, q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, o, found, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale found), o = B v + (p e^{upto}) hv for one chunk and query head, B the scores of p with s.

    In registers: A, then B [C, C]; what q finds, then p [C, BM]; o [C, BV].
    """
    i_s = i_c * H + i_h
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_A, b_base = _products(
        q, k, hk, hk_scales, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, BS, SCALED, remainders
    )  # fmt: skip
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
    b_p = _found(b_A, b_base, b_s, b_g, C, LEVELS, SCALED)
    if KEEP:
        store_tile(found, b_p, start, end, i_hq, 0, H * G, M, C, BM)
    b_p = _softmax(b_p * scale, M, BM)
    B_high, B_low = _scores(b_p, b_s, b_g, C, LEVELS, SCALED)
    p_high, p_low = operand(b_p * fading(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED), SCALED)
    for i_v in range(0, (V + BV - 1) // BV):
        S_high, S_low = _operand_memory(hv, hv_scales, i_s, start < end, i_v, M, V, BM, BV, BS, SCALED)
        b_o = add_operands(tl.zeros([C, BV], dtype=tl.float32), p_high, p_low, S_high, S_low, SCALED)
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        b_o = add_split_by_given(b_o, B_high, B_low, b_v)
        store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@kernel
def output_kernel(
    q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, mild, o, found, scale,
    sequence_of_chunk, cu_seqlens, offsets, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`_any_output` of those of AT_ONCE chunks and heads that are not mild; chunks: of all sequences."""
    i_g, i_p = program(G)
    first, total = i_p * AT_ONCE, chunks * H
    if none_to_do(mild, first, total, AT_ONCE, FLAGS):
        return
    for n in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + n
        i_h, i_c = i % H, i // H
        i_hq = i_h * G + i_g
        if not_mild(mild, i, total, FLAGS):
            _any_output(
                i_hq, i_h, i_c, q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, o, found, scale,
                sequence_of_chunk, cu_seqlens, offsets, T, H, G, K, V, M, C, BK, BV, BM, BS, KEEP,
                LEVELS, SCALED, PACKED,
            )  # fmt: skip


@triton.jit
def _any_softmax_grads(
    i_hq, i_h, i_c, v, s, g, do, hv, hv_scales, found, p, dscores, reads, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """p and scale dscores = scale p (dp - <p, dp>) [B, T, HQ, M], dp being what do finds. reads: the mild way's alone.

    For one chunk and query head. In registers: do v^T [C, C]; dp and p [C, BM].
    """
    i_s = i_c * H + i_h
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_dA, b_base = _products(do, v, hv, hv_scales, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, BS, SCALED)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
    b_dp = _found(b_dA, b_base, b_s, b_g, C, LEVELS, SCALED)
    b_p = _softmax(load_tile(found, start, end, i_hq, 0, 0, H * G, M, C, BM) * scale, M, BM)
    store_tile(p, b_p, start, end, i_hq, 0, H * G, M, C, BM)
    b_dp = _softmax_grads(b_p, b_dp, SCALED)
    store_tile(dscores, b_dp * scale, start, end, i_hq, 0, H * G, M, C, BM)


@kernel
def softmax_grads_kernel(
    v, s, g, do, hv, hv_scales, found, mild, p, dscores, reads, scale,
    sequence_of_chunk, cu_seqlens, offsets, T, chunks,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`_any_softmax_grads` of those of AT_ONCE chunks and heads that are not mild; chunks: of all sequences."""
    i_g, i_p = program(G)
    first, total = i_p * AT_ONCE, chunks * H
    if none_to_do(mild, first, total, AT_ONCE, FLAGS):
        return
    for n in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + n
        i_h, i_c = i % H, i // H
        i_hq = i_h * G + i_g
        if not_mild(mild, i, total, FLAGS):
            _any_softmax_grads(
                i_hq, i_h, i_c, v, s, g, do, hv, hv_scales, found, p, dscores, reads, scale,
                sequence_of_chunk, cu_seqlens, offsets, T, H, G, V, M, C, BV, BM, BS, LEVELS,
                SCALED, PACKED,
            )  # fmt: skip


@triton.jit
def _read_of(p, dscores, second, start, end, i_hq, HQ: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """x of the first or second pass, [C, BM]."""
    if second:
        b_x = load_tile(p, start, end, i_hq, 0, 0, HQ, M, C, BM).to(tl.float32)
    else:
        b_x = load_tile(dscores, start, end, i_hq, 0, 0, HQ, M, C, BM).to(tl.float32)
    return b_x


@triton.jit
def _add_slot_pairs(b_ds, b_dg, pairs_high, pairs_low, blocks_fit, p, dscores, second, s, g, start, end, i_hq, i_h,
                    HQ: tl.constexpr, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                    LEVELS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """ds and dg [C, BM], and what pairs of rows of one query add to them in one pass.

    pairs: z y^T below the diagonal and its transpose above it, an `operand`. As `add_pair_grads`, but that the gate of
    a read's own token lies between the two, too, and that nobody asks for the gradient of x. Tiles are loaded again for
    each product: they are near, and registers are what there is least of.
    """
    o_c = tl.arange(0, C)
    first = 0
    if SCALED:
        if blocks_fit:
            read, key, _ = about_blocks(load_decays(g, start, end, i_h, 0, H, M, C, BM), C)
            b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM).to(tl.float32)
            below = same_block(C) & (o_c[:, None] > o_c[None, :])
            above = same_block(C) & (o_c[:, None] < o_c[None, :])
            b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
            s_high, s_low = split(b_s * fading(key, SCALED))
            faded = tl.zeros_like(b_ds)
            faded = add_whole_product(faded, only(below, pairs_high), only(below, pairs_low), s_high, s_low)
            b_x = _read_of(p, dscores, second, start, end, i_hq, HQ, M, C, BM)
            x_high, x_low = split(b_x * fading(b_g + read, SCALED))
            passing = (x_high.to(tl.float32) + x_low.to(tl.float32)) * faded
            b_z = tl.zeros_like(b_ds)
            b_z = add_whole_product(b_z, only(above, pairs_high), only(above, pairs_low), x_high, x_low)
            passing -= (s_high.to(tl.float32) + s_low.to(tl.float32)) * b_z
            b_ds += b_z * fading(key, SCALED)
            b_dg = add_sums(b_dg, same_block(C) & (o_c[:, None] <= o_c[None, :]), passing, True)
        first = blocks_fit.to(tl.int32) * BLOCK_LEVELS
    for level in range(first, LEVELS):
        tl.debug_barrier()
        # Rows of right halves meet those of left halves and the other way round: one product serves both.
        o_c, right, first_row, size = halves(level, C)
        met = meet(level, C)
        b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
        weight = fading(level_decays(b_g, level, C), SCALED)
        b_x = _read_of(p, dscores, second, start, end, i_hq, HQ, M, C, BM) * fading(b_g.to(tl.float32), SCALED)
        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        b_met = tl.where(right[:, None], b_x, b_s) * weight
        high, low = operand(b_met, SCALED)
        b_z = tl.zeros_like(b_ds)
        b_z = add_operands(b_z, only(met, pairs_high), only(met, pairs_low), high, low, SCALED)
        b_ds += tl.where(right[:, None], 0.0, b_z * weight)
        # The gate at t is passed by the reads from t on in its right half, by the keys before t in its left half.
        passes = within(tl.where(right, o_c, first_row), tl.where(right, first_row + size, o_c), C)
        b_dg = add_sums(b_dg, passes, b_met * b_z, not SCALED)
    return b_ds, b_dg


@triton.jit
def _written(y, states, scales, dstates, dscales, start, end, i_h, i_s, H: tl.constexpr, M: tl.constexpr,
             D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
             SCALED: tl.constexpr):  # fmt: skip
    """y D_S^T [C, BM], and sum_d S D_S [BM], of one pass."""
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_SD = tl.zeros([BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        unit = _units(scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        unit *= _units(dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        b_S = _memory(states, i_s, start < end, i_d, M, D, BM, BD).to(tl.float32)
        b_SD += tl.sum(b_S * _memory(dstates, i_s, start < end, i_d, M, D, BM, BD).to(tl.float32), 1) * unit
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        D_high, D_low = _operand_memory(dstates, dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        b_ds = add_given_by_split(b_ds, b_y, tl.trans(D_high), tl.trans(D_low))
    return b_ds, b_SD


@triton.jit
def _of_pass(second, z, y, states, scales, dstates, dscales, z_2, y_2, states_2, scales_2, dstates_2, dscales_2,
             SCALED: tl.constexpr):  # fmt: skip
    """The tensors of the first or second pass."""
    if second:
        z, y, states, dstates = z_2, y_2, states_2, dstates_2
    if SCALED:
        if second:
            scales, dscales = scales_2, dscales_2
    else:
        scales, dscales = states, dstates  # there are none, nobody looks, and what is returned has to be a tensor
    return z, y, states, scales, dstates, dscales


@triton.jit
def _any_memory_grads(
    i_h, i_c, q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv, dhv_scales, p, dscores, ds, dg,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What ds and dg of one chunk and head get through the memories, in float32 for `slot_grads_kernel`.

    Over both passes, x, y, z, S and D_S as in `pass_grads_kernel`, and a group's queries:
        ds = Y = sum (y D_S^T) e^{after}
        dg_t = e^{total} sum S D_S + sum_{j<t} s_j Y_j + sum_{i>=t} x_i (z_i S^T) e^{upto_i}
    In registers: two of [C, BM].
    """
    i_s = i_c * H + i_h
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    BD: tl.constexpr = max(BK, BV)
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_dg = tl.zeros([C, BM], dtype=tl.float32)
    for n in range(2):
        second = n == 1
        D = tl.where(second, V, K)
        z, y, states, scales, dstates, dscales = _of_pass(
            second, q, k, hk, hk_scales, dhk, dhk_scales, do, v, hv, hv_scales, dhv, dhv_scales, SCALED
        )
        b_y, b_SD = _written(y, states, scales, dstates, dscales, start, end, i_h, i_s, H, M, D, C, BM, BD, BS, SCALED)
        b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
        b_y *= fading(sums(o_c[:, None] < o_c[None, :], b_g), SCALED)
        b_ds += b_y
        b_dg += (fading(tl.sum(b_g.to(tl.float32), 0), SCALED) * b_SD)[None, :]
        b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        b_dg = add_sums(b_dg, o_c[:, None] > o_c[None, :], b_s * b_y, not SCALED)
        for i_g in range(G):
            tl.debug_barrier()
            i_hq = i_h * G + i_g
            b_x = tl.zeros([C, BM], dtype=tl.float32)
            for i_d in range(0, (D + BD - 1) // BD):
                b_z = load_tile(z, start, end, i_hq, i_d, 0, H * G, D, C, BD)
                S_high, S_low = _operand_memory(states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                b_x = add_given_by_split(b_x, b_z, tl.trans(S_high), tl.trans(S_low))
            b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
            b_x *= fading(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED)
            b_x *= _read_of(p, dscores, second, start, end, i_hq, H * G, M, C, BM)
            b_dg = add_sums(b_dg, o_c[:, None] <= o_c[None, :], b_x, not SCALED)
    store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
    store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@kernel
def memory_grads_kernel(
    q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv, dhv_scales, p, dscores, mild, ds, dg,
    sequence_of_chunk, cu_seqlens, offsets, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`_any_memory_grads` of those of AT_ONCE chunks and heads that are not mild; chunks: of all sequences."""
    first, total = tl.program_id(0) * AT_ONCE, chunks * H
    if none_to_do(mild, first, total, AT_ONCE, FLAGS):
        return
    for n in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + n
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            _any_memory_grads(
                i_h, i_c, q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales, dhv,
                dhv_scales, p, dscores, ds, dg, sequence_of_chunk, cu_seqlens, offsets, T, H, G, K,
                V, M, C, BK, BV, BM, BS, LEVELS, SCALED, PACKED,
            )  # fmt: skip


@triton.jit
def _any_slot_grads(
    i_h, i_c, q, k, v, s, g, do, p, dscores, ds_of_memories, dg_of_memories, ds, dg,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ds and dg for one chunk and head: what `memory_grads_kernel` left and what pairs of its rows add, both passes and
    a group's queries one after another.

    One kernel for all would be more code than a multiprocessor keeps near, and take more than twice as long.
    In registers: z y^T [C, C]; x, ds, dg [C, BM].
    """
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    BD: tl.constexpr = max(BK, BV)
    b_ds = load_tile(ds_of_memories, start, end, i_h, 0, 0, H, M, C, BM)
    b_dg = load_tile(dg_of_memories, start, end, i_h, 0, 0, H, M, C, BM)
    blocks_fit = False
    if SCALED:
        _, _, blocks_fit = about_blocks(load_decays(g, start, end, i_h, 0, H, M, C, BM), C)
    for n in range(2 * G):  # one code for both passes: of two, each would keep masks in registers for the other
        tl.debug_barrier()
        i_hq, second = i_h * G + n // 2, n % 2 == 1
        D = tl.where(second, V, K)
        if second:
            y, z = v, do
        else:
            y, z = k, q
        b_A = tl.zeros([C, C], dtype=tl.float32)
        for i_d in range(0, (D + BD - 1) // BD):
            b_z = load_tile(z, start, end, i_hq, i_d, 0, H * G, D, C, BD)
            b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
            b_A = tl.dot(b_z, tl.trans(b_y), b_A, input_precision="tf32x3")
        b_ds += diagonal(b_A, C) * _read_of(p, dscores, second, start, end, i_hq, H * G, M, C, BM)
        earlier, later = o_c[:, None] > o_c[None, :], o_c[:, None] < o_c[None, :]
        pairs_high, pairs_low = operand(tl.where(earlier, b_A, tl.where(later, tl.trans(b_A), 0.0)), SCALED)
        b_ds, b_dg = _add_slot_pairs(b_ds, b_dg, pairs_high, pairs_low, blocks_fit, p, dscores, second, s, g, start,
                                     end, i_hq, i_h, H * G, H, M, C, BM, LEVELS, SCALED)  # fmt: skip
    store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
    store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@kernel
def slot_grads_kernel(
    q, k, v, s, g, do, p, dscores, ds_of_memories, dg_of_memories, mild, ds, dg,
    sequence_of_chunk, cu_seqlens, offsets, T, chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`_any_slot_grads` of those of AT_ONCE chunks and heads that are not mild; chunks: of all sequences."""
    first, total = tl.program_id(0) * AT_ONCE, chunks * H
    if none_to_do(mild, first, total, AT_ONCE, FLAGS):
        return
    for n in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + n
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            _any_slot_grads(
                i_h, i_c, q, k, v, s, g, do, p, dscores, ds_of_memories, dg_of_memories, ds, dg,
                sequence_of_chunk, cu_seqlens, offsets, T, H, G, K, V, M, C, BK, BV, BM, BS, LEVELS,
                SCALED, PACKED,
            )  # fmt: skip


@triton.jit
def _any_pass_grads(
    i_b, i_h, i_c, x, y, z, s, g, states, scales, dstates, dscales, dy, dz, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, FIRST: tl.constexpr,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One pass's gradients for one chunk and head: x = p, y = v, z = do or x = scale dscores, y = k, z = q.

    With E the scores of x with s, S the memory entering and D_S the gradient of the one leaving the chunk:
        dy = E^T z + (s e^{after}) D_S,   dz = E y + (x e^{upto}) S (dq; nobody asks for do's)
    In registers: E [C, C]; x, s and decays [C, BM]; dy or dz [C, BD].
    A group's queries each have an E, made for one block of D: a program goes through all blocks only where G is 1.
    """
    i_s = i_c * H + i_h
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    HERE: tl.constexpr = BLOCKS if G == 1 else 1
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
    left_high, left_low = operand(b_s * fading(sums(o_c[:, None] < o_c[None, :], b_g), SCALED), SCALED)
    if G == 1:
        b_x = load_tile(x, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
        E_high, E_low = _scores(b_x, b_s, b_g, C, LEVELS, SCALED)
    for n in range(HERE):
        i_d = i_b + n
        D_high, D_low = _operand_memory(dstates, dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        b_dy = add_operands(tl.zeros([C, BD], dtype=tl.float32), left_high, left_low, D_high, D_low, SCALED)
        for i_g in range(G):
            if G > 1:
                tl.debug_barrier()
                b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
                b_x = load_tile(x, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM).to(tl.float32)
                E_high, E_low = _scores(b_x, b_s, b_g, C, LEVELS, SCALED)
            b_z = load_tile(z, start, end, i_h * G + i_g, i_d, 0, H * G, D, C, BD)
            b_dy = add_split_by_given(b_dy, tl.trans(E_high), tl.trans(E_low), b_z)
        store_tile(dy, b_dy, start, end, i_h, i_d, H, D, C, BD)
    if FIRST:
        tl.debug_barrier()
        for i_g in range(G):
            i_hq = i_h * G + i_g
            if G > 1:
                tl.debug_barrier()
                b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
                b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
            b_x = load_tile(x, start, end, i_hq, 0, 0, H * G, M, C, BM).to(tl.float32)
            if G > 1:
                E_high, E_low = _scores(b_x, b_s, b_g, C, LEVELS, SCALED)
            x_high, x_low = operand(b_x * fading(sums(o_c[:, None] >= o_c[None, :], b_g), SCALED), SCALED)
            for n in range(HERE):
                i_d = i_b + n
                S_high, S_low = _operand_memory(states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                b_dz = add_operands(tl.zeros([C, BD], dtype=tl.float32), x_high, x_low, S_high, S_low, SCALED)
                b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
                b_dz = add_split_by_given(b_dz, E_high, E_low, b_y)
                store_tile(dz, b_dz, start, end, i_hq, i_d, H * G, D, C, BD)


@kernel
def pass_grads_kernel(
    x, y, z, s, g, states, scales, dstates, dscales, mild, dy, dz, sequence_of_chunk, cu_seqlens, offsets, T, chunks,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, FIRST: tl.constexpr,
    FLAGS: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`_any_pass_grads` of those of AT_ONCE chunks and heads that are not mild; chunks: of all sequences."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    i_b, i_p = program(1 if G == 1 else BLOCKS)
    first, total = i_p * AT_ONCE, chunks * H
    if none_to_do(mild, first, total, AT_ONCE, FLAGS):
        return
    for n in tl.range(0, AT_ONCE, disable_licm=True):
        i = first + n
        i_h, i_c = i % H, i // H
        if not_mild(mild, i, total, FLAGS):
            _any_pass_grads(
                i_b, i_h, i_c, x, y, z, s, g, states, scales, dstates, dscales, dy, dz,
                sequence_of_chunk, cu_seqlens, offsets, T, H, G, M, D, C, BM, BD, BS, FIRST, LEVELS,
                SCALED, PACKED,
            )  # fmt: skip


# --- launches --------------------------------------------------------------------------------------------------------


def _op(M: int) -> str:
    """Prefix of the rows of the launch table for so many slots."""
    return "gsa" if M <= 64 else "gsa128"


class _Plan(ChunkPlan):
    """A chunk plan whose states' rows are the slots, with the sizes of a group of queries beside it."""

    def __init__(self, q, v, s, packing, chunk_size):
        super().__init__(_op(s.shape[-1]), s, v.shape[-1], packing, _tokens(q, s, chunk_size))
        self.M, self.G = s.shape[-1], q.shape[2] // self.H
        self.scaled_together = TABLE[f"{self.op}.stream", self.width].BV

    def launch(
        self, kernel: str, mild_kernel, any_kernel, heads: int, blocks: dict[str, int], *given, apart=False, **more
    ) -> None:
        """Both ways through a chunk (of which one may be None), a program for each and each of so many heads.

        given: what the kernels take before `where`; blocks: what they go through block by block, as {"K": its size};
        apart: whether each of these blocks has a program of its own; more: further keyword arguments.
        """
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            kernel_of_way = mild_kernel if way == "mild" else any_kernel
            if kernel_of_way is None:
                continue
            row = TABLE[f"{self.op}.{kernel}.{way}", self.width]
            options = dict(
                H=self.H, G=self.G, M=self.M, C=self.C, BM=self.block(self.M, 128),
                BS=self.scaled_together, FLAGS=self.flags, PACKED=self.packing is not None,
                num_warps=row.num_warps, num_stages=row.num_stages, maxnreg=row.maxnreg,
            )  # fmt: skip
            for name, size in blocks.items():
                options |= {name: size, f"B{name}": self.block(size, row.BV)}
            programs, where = self.chunks * heads, self.where
            if way == "dyadic":
                programs = cdiv(self.chunks * self.H, self.at_once) * (heads // self.H)
                where = (*self.where, self.chunks)
                options |= dict(LEVELS=self.C.bit_length() - 1, SCALED=self.scaled, AT_ONCE=self.at_once)
            if apart:
                programs *= math.prod(cdiv(size, options[f"B{name}"]) for name, size in blocks.items())
            taken = self.taken_apart(given, mild=way == "mild")
            kernel_of_way[(programs,)](*taken, *where, **options, **more)


def _slot_rows(states) -> tuple:
    """(hk [N, H, K, M], hv [N, H, M, V]) with hk turned to [N, H, M, K]; as `ChunkPlan.states` takes it, if they are
    known later."""
    if callable(states):

        def asked(factor, written):
            arrived = states(factor, [written[0].mT, written[1]])
            return lambda: _slot_rows(arrived())

        return asked, None
    return (None, None) if states is None else (states[0].mT.contiguous(), states[1].contiguous())


def _tokens(q, s, chunk_size: int) -> int:
    """Tokens a chunk, 0 for as many as is best: 32 where queries share a memory. In chunks of 64 dv of such a group was
    wrong for strong gates on an H200, where a score matrix was made in a loop within a loop (data/tuning.md)."""
    return min(chunk_size or CHUNK_SIZE, CHUNK_SIZE) if q.shape[2] > s.shape[2] else chunk_size


def meets(*tensors) -> bool:
    """As of `ahead_triton.Kernels`: `ChunkPlan` takes a function in the place of a state to begin with."""
    return True


def kept_shapes(q, k, v, s, g, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Shapes of what `forward` keeps for `backward`: what q finds and, behind it, which chunks are mild; hk and hv
    entering every chunk, slots as rows."""
    chunk_size = _tokens(q, s, chunk_size)
    states = (kept_states_shape(_op(s.shape[-1]), s, x.shape[-1], packing, chunk_size) for x in (k, v))
    plan = _op(s.shape[-1]), s, v.shape[-1], packing, chunk_size
    return (q.shape[:3].numel() * s.shape[-1] + flags_of(*plan),), *states


def forward(q, k, v, s, g, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """o, (hk_T, hv_T) (None unless asked for), and as in `kept_shapes` (the first empty unless kept)."""
    plan = _Plan(q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    (first_hk, first_hv), last_hk, last_hv = _slot_rows(initial_state), None, None
    if output_final_state:
        last_hk, last_hv = (plan.empty(plan.N, plan.H, plan.M, D) for D in (K, V))
    remainders = None
    if s.dtype == torch.float16:
        remainders = plan.empty(plan.chunks, plan.H, plan.M, K, dtype=torch.float16)
    (hk, hv), mild = plan.states(
        s, k, g, 1.0, first_hk, last_hk, reverse=False, beside=(s, v, first_hv, last_hv), remainders=remainders
    )
    o, found = q.new_empty(*q.shape[:3], V), plan.empty(q.shape[:3].numel() * plan.M + mild.numel() if keep else 0)
    plan.launch(
        "output", mild_output_kernel, output_kernel, q.shape[2], dict(K=K, V=V),
        q, k, v, s, g, plan.unpacked(hk, K), remainders, plan.unpacked(hv, V), mild, o, found, scale, KEEP=keep,
    )  # fmt: skip
    if keep:
        if packing is not None:
            packing.kept_rows.append(found[: -mild.numel()].view(*q.shape[:3], plan.M))
        found[-mild.numel() :].copy_(mild.view(torch.float32).flatten())
    return o, (last_hk.mT, last_hv) if output_final_state else None, (found, hk, hv)


def backward(q, k, v, s, g, scale, initial_state, packing, chunk_size, kept, do, dfinal_state):
    """dq, dk, dv, ds, dg in their inputs' dtypes and (dhk_0, dhv_0) in float32."""
    plan = _Plan(q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    found, mild = kept[0].split(
        [kept[0].numel() - plan.chunks * plan.H * plan.flags, plan.chunks * plan.H * plan.flags]
    )
    mild = mild.view(torch.int32)
    hk, hv = plan.unpacked(kept[1], K), plan.unpacked(kept[2], V)
    slots = *q.shape[:3], plan.M
    p = found.new_empty(slots, dtype=torch.float16 if plan.scaled else torch.float32)
    dscores, reads = plan.empty(slots), plan.empty(slots if plan.scaled else 0)
    plan.launch(
        "softmax_grads", mild_softmax_grads_kernel, softmax_grads_kernel, q.shape[2], dict(V=V),
        v, s, g, do, hv, found, mild, p, dscores, reads, scale,
    )  # fmt: skip
    last_hk, last_hv = _slot_rows(dfinal_state)
    first_hk, first_hv = (plan.empty(plan.N, plan.H, plan.M, D) for D in (K, V))
    (dhk, dhv), _ = plan.states(
        dscores, q, g, 1.0, last_hk, first_hk, reverse=True, inclusive=True, beside=(p, do, last_hv, first_hv)
    )
    dhk, dhv = plan.unpacked(dhk, K), plan.unpacked(dhv, V)
    ds, dg = torch.empty_like(s), torch.empty_like(g)
    of_memories = plan.empty(s.shape), plan.empty(s.shape)
    memories = (q, k, v, s, g, do, hk, hv, dhk, dhv, p, dscores)
    plan.launch("slot_grads", mild_slot_grads_kernel, None, plan.H, dict(K=K, V=V), *memories, reads, mild, ds, dg)
    plan.launch("memory_grads", None, memory_grads_kernel, plan.H, dict(K=K, V=V), *memories, mild, *of_memories)
    plan.launch(
        "slot_grads", None, slot_grads_kernel, plan.H, dict(K=K, V=V),
        q, k, v, s, g, do, p, dscores, *of_memories, mild, ds, dg,
    )  # fmt: skip
    del reads, of_memories, memories  # whose memory the next gradients then take
    dv = torch.empty_like(v)
    plan.launch(
        "pass_grads", mild_pass_grads_kernel, pass_grads_kernel, plan.H, dict(D=V),
        p, v, do, s, g, hv, dhv, mild, dv, None, FIRST=False, apart=plan.G > 1,
    )  # fmt: skip
    del p, dhv
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    plan.launch(
        "pass_grads", mild_pass_grads_kernel, pass_grads_kernel, plan.H, dict(D=K),
        dscores, k, q, s, g, hk, dhk, mild, dk, dq, FIRST=True, apart=plan.G > 1,
    )  # fmt: skip
    return dq, dk, dv, ds, dg, (first_hk.mT, first_hv)
