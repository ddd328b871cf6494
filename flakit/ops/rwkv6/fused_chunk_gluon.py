"""RWKV6 on Hopper GPUs, in Gluon: the forward and backward of `fused_chunk_triton` for bfloat16 heads of 64 channels.
`fused_chunk_triton` explains the symbols, parts, mild chunks and the two paths.

1. `forward_kernel` walks the chunks of a part, like the Triton kernel, whose arguments it has.
2. `chain_kernel` walks a part from last to first, in groups of four chunks (64 tokens). It computes only D, the
   gradient of the state that leaves a chunk, and stores it for each group.
3. `grads_kernel` runs one program per group and head. From the stored D it walks the group's chunks, from last to
   first, and computes all gradients.

**Memory.** D of a group takes as many bytes in float16 as the group's rows of dv. It is stored there, since the program
that writes these rows is the only one that reads it.

**Why Gluon.** Gluon code sets the layout of each tile, in registers and in shared memory (`common.bands_gluon`). Each
warp holds a band of 16 channels: in the forward, channels v of S^T; in the backward, channels k of D, q*, k* and their
gradients. So products with D and S, and the update of D, stay in a warp's registers. The warps synchronize when a
chunk's rows have arrived, and before one reads what another has computed.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common import bands_gluon as bg
from ..common.bands_triton import CHANNELS, CHUNK, power_of_two
from ..common.blocks_triton import clamped_decay, exp
from ..common.positions_triton import locate_program

C = tl.constexpr(CHUNK)
GROUP = CHANNELS // CHUNK
"""Chunks in a group: together as many tokens as D has rows. Parts consist of whole groups (`bands_triton.LONGEST`)."""
GROUP_TOKENS = tl.constexpr(CHANNELS)
STATE_SIZE = tl.constexpr(CHANNELS * CHANNELS)
STAGES = tl.constexpr(3)
"""Chunks in the software pipeline of `forward_kernel`: their rows are in shared memory or being copied there."""


@gluon.jit
def stage(buffers, n):
    """Return buffer n of each tensor. buffers: as `allocate_rows` with STAGES returns them."""
    return [x.index(n) for x in buffers]


@gluon.jit
def fetch_rows(s_rows, tensors, base, rows, N: gl.constexpr, H: gl.constexpr):
    """Start the asynchronous copy of N rows of each tensor [rows, H, 64] to shared memory. base: offset of the first
    row. rows: number of rows to read; the others become zeros."""
    t, o = bg.row_offsets(N, H * 64)
    bg.copy_rows(s_rows, tensors, base + bg.recomputed(o, 8), t < rows)


@gluon.jit
def fetch(s_rows, s_A, n, tensors, scores, base, i, rows, H: gl.constexpr):
    """Start the asynchronous copy of a chunk's rows and scores to buffers n. i: index of the chunk and head."""
    fetch_rows(stage(s_rows, n), tensors, base, rows, C, H)
    o_i, o_j = bg.tile_indices(16, 16, bg.SQUARE)
    p_A = scores + (i * (C * C) + bg.recomputed(o_i * C + o_j, 2))
    async_copy.async_copy_global_to_shared(s_A.index(n), p_A, mask=(o_i >= 0) & (rows > 0))


# --- forward ---------------------------------------------------------------------------------------------------------


@gluon.jit
def prepare(s_rows, s_A, n, operands, scale):
    """Compute a chunk's operands from its rows and scores in buffers n. Return v^T, [64, 16], as a left operand.

    operands: shared memory of q*, k* [16, 64] and A [16, 16], each split, and of e^{total} [64].
    """
    s_r, s_w, s_k, s_v = stage(s_rows, n)
    o_q, o_k, o_A, s_total = operands
    _, before, after, total = bg.decays_by_token(clamped_decay(s_w.load(bg.COLUMNS_RIGHT)))
    s_total.store(exp(gl.max(total, 0)))
    bg.store_pair(o_q, s_r.load(bg.COLUMNS).to(gl.float32) * (exp(before) * scale))
    bg.store_pair(o_k, s_k.load(bg.COLUMNS).to(gl.float32) * exp(after))
    bg.store_pair(o_A, s_A.index(n).load(bg.SQUARE))
    return s_v.permute([1, 0]).load(bg.LEFT)


@bg.kernel
def forward_kernel(
    r, w, k, v, o, states, units, scores, first, last, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: gl.constexpr, KEEP: gl.constexpr, HAS_FIRST: gl.constexpr, WANTS_LAST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute o of a part of L chunks of a head's sequence; KEEP: store the state entering each chunk, in float16.

    Registers hold S^T, and v^T of a chunk. Each chunk has two barriers. After the first, the chunk is processed; after
    the second, its results are copied from shared to global memory, and the next chunk's operands are computed.

    r, w, k, v, o [B, T, H, 64] bfloat16, scores [chunks, H, 16, 16]
    states [chunks, H, 64 (v), 64 (k)] float16 in units of `units` [chunks, H]
    first [parts, H, 64, 64]: states entering the parts, or None; last [N, H, 64, 64]: final states, or None
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; None unless PACKED
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    STEP: gl.constexpr = C * H * 64
    rows = gl.where(count > 0, end - begin, 0).to(gl.int32)
    base = (begin * H + i_h) * 64
    i = (first_chunk * H + i_h).to(gl.int64)
    s_rows = bg.allocate_rows(4, C, STAGES)
    s_A = gl.allocate_shared_memory(gl.float32, [STAGES, 16, 16], bg.PLAIN)
    s_q, s_k = bg.allocate_pair(16, 64, bg.SWIZZLED), bg.allocate_pair(16, 64, bg.SWIZZLED)
    s_scores, s_total = bg.allocate_pair(16, 16, bg.SWIZZLED_16), gl.allocate_shared_memory(gl.float32, [64], bg.FLAT)
    s_S = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [16, 64], bg.SWIZZLED)
    s_largest = gl.allocate_shared_memory(gl.float32, [4], bg.FLAT)
    operands = s_q, s_k, s_scores, s_total
    o_v, o_k = bg.tile_indices(64, 64, bg.BAND)
    b_S = gl.zeros([64, 64], gl.float32, bg.BAND)
    if HAS_FIRST:
        b_S = gl.load(first + gl.program_id(0).to(gl.int64) * STATE_SIZE + o_k * 64 + o_v)
    zero = gl.zeros([64, 16], gl.float32, bg.BAND)
    for n in gl.static_range(STAGES):
        fetch(s_rows, s_A, n, (r, w, k, v), scores, base + n * STEP, i + n * H, rows - n * C, H)
        async_copy.commit_group()
    async_copy.wait_group(STAGES - 1)
    b_v = prepare(s_rows, s_A, 0, operands, scale)
    bg.store_band_maxima(s_largest, b_S)
    for n in range(0, count):
        # Also a barrier: this chunk's operands are complete, and the next one's rows.
        async_copy.wait_group(STAGES - 2)
        far, behind = base + STAGES * STEP, rows - STAGES * C
        fetch(s_rows, s_A, n % STAGES, (r, w, k, v), scores, far, i + STAGES * H, behind, H)
        async_copy.commit_group()
        if KEEP:
            reciprocal, unit = power_of_two(gl.max(s_largest.load(bg.FOUR), 0))
            s_S.store(bg.to_half(b_S * reciprocal))
            gl.store(units + i, unit)
        S_h, S_l = bg.split_left(b_S)
        q_h, q_l = bg.load_pair_transposed(s_q)
        A_h, A_l = bg.load_pair_transposed(s_scores)
        b_o = mma_v2(S_h, q_h, mma_v2(b_v, A_h, mma_v2(b_v, A_l, zero)))
        b_o += mma_v2(S_h, q_l, mma_v2(S_l, q_h, zero))
        s_o.permute([1, 0]).store(bg.to_bfloat16(b_o))
        k_h, k_l = bg.load_pair(s_k)
        b_S *= s_total.load(gl.SliceLayout(0, bg.BAND))[None, :]
        b_S = mma_v2(b_v, k_h, mma_v2(b_v, k_l, b_S))
        # The compiler inserts a barrier before the first load of what was stored above.
        o_t, o_rows = bg.row_offsets(C, H * 64)
        gl.store(o + (base + o_rows), s_o.load(bg.ROWS), mask=o_t < rows)
        if KEEP:
            o_t, o_S = bg.row_offsets(64, 64)
            gl.store(states + i * STATE_SIZE + o_S, s_S.load(bg.ROWS))
            bg.store_band_maxima(s_largest, b_S)
        b_v = prepare(s_rows, s_A, (n + 1) % STAGES, operands, scale)
        base += STEP
        i += H
        rows -= C
    async_copy.wait_group(0)
    if WANTS_LAST:
        if is_last:
            gl.store(last + (i_n * H + i_h).to(gl.int64) * STATE_SIZE + o_k * 64 + o_v, b_S)


# --- the chain -------------------------------------------------------------------------------------------------------


@bg.kernel
def chain_kernel(
    r, w, do, last, first, D, ends, d_units, scale,
    T, sequence_of_part, parts_before, cu_seqlens, groups_before, L,
    H: gl.constexpr, HAS_LAST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute D, the gradient of the state leaving each of the L groups of a part, from last to first, in registers.

    D of a group is stored in float16 in the group's rows of dv. A sequence's last group may have fewer than 64 rows;
    its D is stored in `ends` instead, or nowhere without `last`: then it is 0.

    r, w, do [B, T, H, 64] bfloat16; D: dv [B, T, H, 64], as float16; ends [N, H, 64 (k), 64 (v)] float16, or None
    d_units [groups, H, 64 (k)]: the units of D
    last [parts, H, 64, 64]: gradients of the states leaving the parts; first [N, H, 64, 64]: of the initial states
    sequence_of_part [parts], parts_before, cu_seqlens, groups_before [N + 1]
    """
    i_p, i_n, i_h, begin, end, first_group, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, groups_before, L, H, GROUP_TOKENS, PACKED
    )
    STEP: gl.constexpr = GROUP_TOKENS * H * 64
    rows = (end - begin).to(gl.int32) - (count - 1) * GROUP_TOKENS
    base = ((begin + (count - 1) * GROUP_TOKENS) * H + i_h) * 64
    s_rows = bg.allocate_rows(3, GROUP_TOKENS, 2)
    s_D = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    for n in gl.static_range(2):
        there = gl.where(n < count, rows + n * GROUP_TOKENS, 0)
        fetch_rows(stage(s_rows, n), (r, w, do), base - n * STEP, there, GROUP_TOKENS, H)
        async_copy.commit_group()
    o_k, o_v = gl.arange(0, 64, gl.SliceLayout(1, bg.BAND)), gl.arange(0, 64, gl.SliceLayout(0, bg.BAND))
    state = o_k[:, None] * 64 + o_v[None, :]
    i_end = (i_n * H + i_h).to(gl.int64) * STATE_SIZE
    t, j = bg.tile_indices(16, 16, bg.RIGHT)
    zero = gl.zeros([64, 16], gl.float32, bg.BAND)
    b_D = gl.zeros([64, 64], gl.float32, bg.BAND)
    if HAS_LAST:
        b_D += gl.load(last + gl.program_id(0).to(gl.int64) * STATE_SIZE + state)
    async_copy.wait_group(1)
    for n in range(0, count):
        reciprocal, unit = power_of_two(gl.max(gl.abs(b_D), 1))
        s_D.store(bg.to_half(b_D * reciprocal[:, None]))
        i = ((first_group + count - 1 - n) * H + i_h).to(gl.int64)
        gl.store(d_units + i * 64 + o_k, unit)
        s_r, s_w, s_do = stage(s_rows, n % 2)
        for m in gl.static_range(GROUP_TOKENS - C, -1, -C):
            b_w = clamped_decay(s_w.slice(m, 16).permute([1, 0]).load(bg.LEFT))
            read = exp(mma_v2(b_w, bg.mask(t < j), zero)) * scale
            total = exp(gl.max(mma_v2(b_w, bg.mask(t + j >= 0), zero), 1))  # all columns are equal
            q_h, q_l = bg.split_left(bg.columns(s_r.slice(m, 16)) * read)
            do_rows = s_do.slice(m, 16).load(bg.RIGHT)
            b_D = mma_v2(q_h, do_rows, mma_v2(q_l, do_rows, b_D * total[:, None]))
        # Also a barrier: D and the next group's rows are complete, and no warp still reads this group's.
        async_copy.wait_group(0)
        if rows >= GROUP_TOKENS:
            _, o = bg.row_offsets(64, H * 64)
            gl.store(D + (base + o), s_D.load(bg.ROWS))
        elif HAS_LAST:
            _, o = bg.row_offsets(64, 64)
            gl.store(ends + i_end + o, s_D.load(bg.ROWS))
        there = gl.where(n + 2 < count, rows + 2 * GROUP_TOKENS, 0)
        fetch_rows(stage(s_rows, n % 2), (r, w, do), base - 2 * STEP, there, GROUP_TOKENS, H)
        async_copy.commit_group()
        base -= STEP
        rows += GROUP_TOKENS
    async_copy.wait_group(0)
    if is_first:
        gl.store(first + (i_end + state), b_D)


# --- gradients -------------------------------------------------------------------------------------------------------


@gluon.jit
def fetch_all(buffers, n, tensors, states, units, scores, mild, base, i, rows, H: gl.constexpr):
    """Start the copy of a chunk's rows, scores and S to buffers n. Return whether the chunk is mild, and S's unit."""
    s_rows, s_S, s_A = buffers
    fetch(s_rows, s_A, n, tensors, scores, base, i, rows, H)
    o_v, o_S = bg.row_offsets(64, 64)
    async_copy.async_copy_global_to_shared(s_S.index(n), states + i * STATE_SIZE + o_S, mask=(o_v >= 0) & (rows > 0))
    async_copy.commit_group()
    return gl.load(mild + i, mask=rows > 0, other=1.0), gl.load(units + i, mask=rows > 0, other=1.0)


@gluon.jit
def walk_chunk(b_D, passing, b_du, unit, b_u, buffers, work, s_results, scale, n, MILD: gl.constexpr):
    """Compute all gradients of the chunk in buffers n; store dr, dw, dk and dv in `s_results`, [16, 64] each.

    b_D e^{passing}: D leaving this chunk; b_D [64 (k), 64 (v)], passing [64 (k)]. unit: the unit of its S. b_u: scale
    times u, [64]. Return b_D and `passing` of the chunk before, and b_du [64], the sum of du / scale.
    """
    s_rows, s_S, s_A = buffers
    s_w, s_r, s_k, s_v, s_do = stage(s_rows, n)
    s_S = s_S.index(n)
    s_D, s_keys, s_P, s_scores, s_own, s_SD = work

    # The scores of pairs are products of do and v.
    bg.store_pair(s_scores, s_A.index(n).load(bg.SQUARE))
    s_own.store(gl.sum(s_do.load(bg.ROWS).to(gl.float32) * s_v.load(bg.ROWS).to(gl.float32), 1))
    b_P = gl.zeros([16, 16], gl.float32, bg.COLUMNS)
    do_rows = s_do.load(bg.COLUMNS_LEFT)
    b_P = mma_v2(do_rows, s_v.permute([1, 0]).load(bg.COLUMNS_RIGHT), b_P)
    p_i, p_j = bg.tile_indices(16, 16, bg.COLUMNS)
    if not MILD:
        b_P *= scale
    bg.store_pair(s_P, gl.where(p_i > p_j, b_P, 0.0))

    # In bands of channels of k: what needs no other warp.
    t, j = bg.tile_indices(16, 16, bg.RIGHT)
    m = gl.arange(0, 16, gl.SliceLayout(0, bg.BAND))[None, :]
    zero = gl.zeros([64, 16], gl.float32, bg.BAND)
    b_w = s_w.permute([1, 0]).load(bg.LEFT)
    if not MILD:
        b_w = clamped_decay(b_w)
    read, key = mma_v2(b_w, bg.mask(t < j), zero), mma_v2(b_w, bg.mask(t > j), zero)
    mid = gl.sum(gl.where((m == C // 2) & MILD, read, 0.0), 1)
    rest = gl.sum(gl.where((m == C // 2 - 1) & MILD, key, 0.0), 1)
    read, key = exp(read - mid[:, None]) * scale, exp(key - rest[:, None])
    b_D *= exp(passing + rest)[:, None]
    of_S = exp(mid) * unit
    b_S = s_S.permute([1, 0]).load(bg.LEFT).to(gl.float32)
    s_SD.store(gl.sum(gl.convert_layout(b_S, bg.BAND) * b_D, 1) * of_S)
    S_high, S_low = bg.split(b_S)
    b_do = s_do.permute([1, 0]).load(bg.RIGHT)
    x = mma_v2(S_high, b_do, mma_v2(S_low, b_do, zero)) * of_S[:, None]
    D_high, D_low = bg.store_pair(s_D, b_D)
    b_v = s_v.permute([1, 0]).load(bg.RIGHT)
    y = mma_v2(gl.convert_layout(D_high, bg.LEFT), b_v, mma_v2(gl.convert_layout(D_low, bg.LEFT), b_v, zero))
    q_high, q_low = bg.split(bg.columns(s_r) * read)
    k_high, k_low = bg.store_pair(s_keys, bg.columns(s_k) * key)
    b_dw = bg.sums_along((k_high.to(gl.float32) + k_low.to(gl.float32)) * y, bg.mask(t < j), False)

    # In bands of channels of v. The loads below come after a barrier, so that D, k* and P are complete.
    s_D_high, s_D_low = s_D
    D_high, D_low = s_D_high.permute([1, 0]).load(bg.LEFT), s_D_low.permute([1, 0]).load(bg.LEFT)
    keys_high, keys_low = bg.load_pair(s_keys)
    b_dv = mma_v2(D_high, keys_low, mma_v2(D_low, keys_high, zero))
    b_dv += mma_v2(D_high, keys_high, zero)
    A_high, A_low = bg.load_pair(s_scores)
    do_columns = s_do.permute([1, 0]).load(bg.LEFT)
    b_dv += mma_v2(do_columns, A_high, mma_v2(do_columns, A_low, zero))
    s_results[3].permute([1, 0]).store(bg.to_bfloat16(b_dv))

    # In bands of channels of k: pairs of tokens inside the chunk.
    q_h, q_l = gl.convert_layout(q_high, bg.LEFT), gl.convert_layout(q_low, bg.LEFT)
    b_SD = s_SD.load(gl.SliceLayout(1, bg.BAND))
    if not MILD:
        total = exp(gl.max(mma_v2(b_w, bg.mask(t + j >= 0), zero), 1))  # all columns are equal
        b_D *= total[:, None]
    do_rows = s_do.load(bg.RIGHT)
    b_D = mma_v2(q_h, do_rows, mma_v2(q_l, do_rows, b_D))
    if MILD:
        k_h, k_l = gl.convert_layout(k_high, bg.LEFT), gl.convert_layout(k_low, bg.LEFT)
        P_high, P_low = bg.load_pair(s_P)
        z = bg.full_product(zero, q_h, q_l, P_high, P_low)
        P_high, P_low = bg.load_pair_transposed(s_P)
        x = bg.full_product(x, k_h, k_l, P_high, P_low)
        of_pairs = (k_high.to(gl.float32) + k_low.to(gl.float32)) * z
        b_dw += bg.sums_along((q_high.to(gl.float32) + q_low.to(gl.float32)) * x - of_pairs, bg.mask(t > j), True)
        b_dw += b_SD[:, None] - of_pairs
        b_dr, b_dk = x * read, (y + z) * key
    else:
        b_dw += bg.sums_along((q_high.to(gl.float32) + q_low.to(gl.float32)) * x, bg.mask(t > j), False)
        b_dw += (b_SD * total)[:, None]
        b_dr, b_dk = x * read, y * key
        reads, keys, b_dw = bg.add_dyadic_pairs((b_dr,), (b_dk,), b_dw, s_r, s_k, b_w, 1.0, s_P, bg.SQUARE)
        b_dr, b_dk = reads[0], keys[0]
    b_dw = gl.where((m == 0) & (unit < 2.0**-118), 0.0, b_dw)  # as `is_zero`
    s_results[1].permute([1, 0]).store(bg.to_bfloat16(b_dw))
    b_r, b_k = bg.columns(s_r), bg.columns(s_k)
    b_own = s_own.load(gl.SliceLayout(0, bg.BAND))[None, :]
    s_results[2].permute([1, 0]).store(bg.to_bfloat16(b_dk + b_own * b_u[:, None] * b_r))
    s_results[0].permute([1, 0]).store(bg.to_bfloat16(b_dr + b_own * b_u[:, None] * b_k))
    return b_D, mid, b_du + gl.sum(b_own * b_r * b_k, 1)


@bg.kernel
def grads_kernel(
    r, w, k, v, u, do, states, units, scores, mild, D, ends, d_units, dr, dw, dk, dv, scale,
    T, sequence_of_group, groups_before, cu_seqlens, chunks_before, L,
    H: gl.constexpr, HAS_LAST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of a group of L chunks of a head, from its last chunk to its first. In registers: D, du.

    r, w, k, v, do and dr to dv [B, T, H, 64] bfloat16, u [H, 64]
    states [chunks, H, 64 (v), 64 (k)] float16 in units of `units` [chunks, H], scores [chunks, H, 16, 16]
    mild [chunks, H]
    D, ends, d_units: as `chain_kernel` stored them; D is overwritten by dv, d_units by the group's du
    sequence_of_group [groups], groups_before, cu_seqlens, chunks_before [N + 1]
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_group, groups_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    if count == 0:
        return
    STEP: gl.constexpr = C * H * 64
    last = count - 1
    rows = (end - begin - last * C).to(gl.int32)
    base = ((begin + last * C) * H + i_h) * 64
    i = ((first_chunk + last) * H + i_h).to(gl.int64)
    s_rows = bg.allocate_rows(5, C, 2)
    s_S = gl.allocate_shared_memory(gl.float16, [2, 64, 64], bg.SWIZZLED)
    s_A = gl.allocate_shared_memory(gl.float32, [2, 16, 16], bg.PLAIN)
    s_D, s_keys = bg.allocate_pair(64, 64, bg.SWIZZLED), bg.allocate_pair(64, 16, bg.SWIZZLED_16)
    s_P, s_scores = bg.allocate_pair(16, 16, bg.SWIZZLED_16), bg.allocate_pair(16, 16, bg.SWIZZLED_16)
    s_own = gl.allocate_shared_memory(gl.float32, [16], bg.FLAT)
    s_SD = gl.allocate_shared_memory(gl.float32, [64], bg.FLAT)
    s_results = bg.allocate_rows(4, C)
    buffers, work = (s_rows, s_S, s_A), (s_D, s_keys, s_P, s_scores, s_own, s_SD)
    tensors, grads = (w, r, k, v, do), (dr, dw, dk, dv)
    is_mild, unit = fetch_all(buffers, 0, tensors, states, units, scores, mild, base, i, rows, H)
    next_mild, next_unit = fetch_all(
        buffers, 1, tensors, states, units, scores, mild, base - STEP, i - H, gl.where(count > 1, rows + C, 0), H
    )
    o_k, o_v = gl.arange(0, 64, gl.SliceLayout(1, bg.BAND)), gl.arange(0, 64, gl.SliceLayout(0, bg.BAND))
    at = gl.program_id(0).to(gl.int64)
    b_u = gl.load(u + i_h * 64 + o_k).to(gl.float32) * scale
    p_D = D + (((begin * H + i_h) * 64) + o_k[:, None] * (H * 64) + o_v[None, :])
    whole = end - begin >= GROUP_TOKENS
    if HAS_LAST:
        p_D = gl.where(
            whole, p_D, ends + ((i_n * H + i_h).to(gl.int64) * STATE_SIZE + o_k[:, None] * 64 + o_v[None, :])
        )
    b_D = gl.load(p_D, mask=(o_k[:, None] >= 0) & (whole | HAS_LAST), other=0.0).to(gl.float32)
    b_D *= gl.load(d_units + at * 64 + o_k)[:, None]
    passing = gl.zeros([64], gl.float32, gl.SliceLayout(1, bg.BAND))
    b_du = gl.zeros([64], gl.float32, gl.SliceLayout(1, bg.BAND))
    async_copy.wait_group(1)
    for n in range(0, count):
        state = b_D, passing, b_du, unit, b_u
        if is_mild > 0:
            b_D, passing, b_du = walk_chunk(*state, buffers, work, s_results, scale, n % 2, True)
        else:
            b_D, passing, b_du = walk_chunk(*state, buffers, work, s_results, scale, n % 2, False)
        # Also a barrier: results and the next chunk's rows are complete, and no warp still reads this chunk's.
        async_copy.wait_group(0)
        t, o = bg.row_offsets(C, H * 64)
        o = base + bg.recomputed(o, 8)
        for m in gl.static_range(4):
            gl.store(grads[m] + o, s_results[m].load(bg.ROWS), mask=t < rows)
        is_mild, unit = next_mild, next_unit
        next_mild, next_unit = fetch_all(
            buffers, n % 2, tensors, states, units, scores, mild, base - 2 * STEP, i - 2 * H,
            gl.where(n + 2 < count, rows + 2 * C, 0), H,
        )  # fmt: skip
        base -= STEP
        i -= H
        rows += C
    async_copy.wait_group(0)
    gl.store(d_units + at * 64 + o_k, b_du * scale)


def gradients(plan, inputs, do, saved, grads, last, first, scale):
    """Launch the backward: write the gradients of `inputs` to `grads`, those of the initial states to `first`. Return
    du [H, 64].

    plan: the `_Plan` of `fused_chunk_triton`. inputs: r, w, k, v [B, T, H, 64] bfloat16, and u [H, 64]. do: the
    gradient of o. saved: states, units, scores and mild, as the forward kernels stored them. grads: dr, dw, dk, dv.
    last: the gradients of the final states, as `ChunkPlan.start_parts` takes them. first [N, H, 64, 64] float32.
    """
    (r, w, *_), (*_, dv) = inputs, grads
    if plan.packed:
        plan.packing.request(CHANNELS)
    T, *parts, offsets, chunks_before, L = where = plan.where(CHUNK * plan.L, plan.L)
    _, groups, groups_before = plan.packing.pieces(CHANNELS) if plan.packed else (None, None, None)
    last = plan.start_parts(r, do, w, scale, last, where, reverse=True)()
    shape = plan.capacity(CHANNELS), plan.H, CHANNELS
    # Groups of a packed batch may have no program: what they add to du is 0.
    d_units = (first.new_zeros if plan.packed else first.new_empty)(shape)
    ends = None if last is None else torch.empty_like(first, dtype=torch.float16)
    stored = dv.view(torch.float16), ends, d_units
    args = r, w, do, last, first, *stored, scale, T, *parts, offsets, groups_before, L // GROUP
    plan.launch("rwkv6.fused.chain", chain_kernel, plan.parts * plan.H, args, HAS_LAST=last)
    args = *inputs, do, *saved, *stored, *grads, scale, T, groups, groups_before, offsets, chunks_before, GROUP
    plan.launch("rwkv6.fused.grads", grads_kernel, shape[0] * plan.H, args, HAS_LAST=last)
    return d_units.sum(0)
