"""RWKV7's backward on Hopper GPUs, in Gluon: `fused_chunk_triton.backward_kernel` as two kernels, one for the
recurrence over chunks, one for the gradients of all chunks in parallel. `fused_chunk_triton` explains symbols, parts
and mild chunks.

1. `chain_kernel` (in `chain_gluon`) runs one program per part and head. It walks the chunks from last to first and
   computes only y and D, the gradient of the state leaving each chunk. It stores both.
2. `grads_kernel` runs one program per chunk and head. It reads D and y and computes all gradients. The pairs of tokens
   inside a chunk have two paths: `mild_pairs`, and `dyadic_pairs` for any decay.

**D and y take no memory of their own.** They are stored in the rows of the chunk's gradients, which are written last: D
in dr, dk, dv and da (`pointers_of_D`), y in db, the units of y in the first row of dw, the unit of D in the second. A
chunk of fewer than 16 rows is the last of its sequence: its D is in `tails`, and D's unit in the first row of dr.

**Why Gluon.** Gluon code sets the layout of each tile, in registers and in shared memory. With the layouts that
Triton's compiler chooses, the same two kernels are slower than `backward_kernel` (data/tuning.md). Each warp holds a
band of 16 channels, as in `common.bands_triton`. The compiler inserts barriers at a `wait_group` and between uses of a
buffer.

**Units.** D, y, F, G, k and the scores of k are float16 operands. To cover the range of float32, each is divided by a
power of two, its unit, so that its largest element is in [2^13, 2^14). Elements down to 2^-27 of the largest have
float16's full precision. D has one unit per tile, and so has each of v, v2, do and y as an operand. The stored y has
one per channel; k and its scores have one per key token. The other operands are split into two bfloat16 numbers, as in
`fused_chunk_triton`, and need no unit.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common import bands_gluon as bg
from ..common.bands_triton import CHUNK
from ..common.blocks_triton import exp
from ..common.positions_triton import locate_program
from .chain_gluon import A_SIZE, D_SIZE, UNITS_SIZE, Y_SIZE, C, chain_kernel, inverse, pointers_of_D, unit_of

SMALL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))
"""The result of a product [32, 32], 16 rows and columns per warp; below, its operands."""
SMALL_LEFT = gl.constexpr(gl.DotOperandLayout(0, SMALL.value, 2))
SMALL_RIGHT = gl.constexpr(gl.DotOperandLayout(1, SMALL.value, 2))


# --- operands --------------------------------------------------------------------------------------------------------


@gluon.jit
def halves(x):
    """Split float32 x into high + low, two float16 tiles: 22 bits of mantissa."""
    high = bg.to_half(x)
    return high, bg.to_half(x - high.to(gl.float32))


@gluon.jit
def sides(x):
    """Return the left and the right half of the columns of x, both in layout BAND."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, (N, 2, M)), (0, 2, 1)))
    return gl.convert_layout(left, bg.BAND, assert_trivial=True), gl.convert_layout(right, bg.BAND, assert_trivial=True)


@gluon.jit
def from_operand(x):
    """Convert a left operand to float32 in layout BAND."""
    return gl.convert_layout(x, bg.BAND, assert_trivial=True).to(gl.float32)


@gluon.jit
def beside(x, y):
    """Return x and y [N, M] side by side, [N, 2 M], in layout BAND."""
    both = gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))
    return gl.convert_layout(both, bg.BAND, assert_trivial=True)


# --- pairs of tokens in a chunk --------------------------------------------------------------------------------------


@gluon.jit
def mild_pairs(b_R, b_E, read, key, x_reads, x_keys, s_P):
    """Return the gradients of R and E of a mild chunk, [64, 32] each, and of w without the sum over S D, [64, 16].

    b_R, b_E [64, 32]: the reads r, a and the keys k, b, transposed and side by side, left operands
    read, key [64, 32]: their decay factors about the chunk's middle
    x_reads, x_keys [64, 32]: the terms of S and D in the gradients of R and E, before multiplication by these factors
    s_P: P [32, 32] in shared memory, split
    """
    R_high, R_low = bg.split(from_operand(b_R) * read)
    E_high, E_low = bg.split(from_operand(b_E) * key)
    R_h, R_l = gl.convert_layout(R_high, bg.LEFT), gl.convert_layout(R_low, bg.LEFT)
    P_high, P_low = bg.load_pair(s_P)
    d_keys = bg.full_product(gl.zeros([64, 32], gl.float32, bg.BAND), R_h, R_l, P_high, P_low)
    keys = E_high.to(gl.float32) + E_low.to(gl.float32)
    of_k, of_b = sides(keys * d_keys)
    of_keys = of_k + of_b
    by_k, by_b = sides(keys * x_keys)
    i, t = bg.tile_indices(16, 16, bg.RIGHT)
    b_dw = bg.sums_along(by_k + by_b, bg.mask(i < t), False)
    P_high, P_low = bg.load_pair_transposed(s_P)
    E_h, E_l = gl.convert_layout(E_high, bg.LEFT), gl.convert_layout(E_low, bg.LEFT)
    d_reads = bg.full_product(x_reads, E_h, E_l, P_high, P_low)
    of_r, of_a = sides((R_high.to(gl.float32) + R_low.to(gl.float32)) * d_reads)
    b_dw += bg.sums_along(of_r + of_a - of_keys, bg.mask(i >= t), True)
    return d_reads * read, (d_keys + x_keys) * key, b_dw - of_a  # a excludes its own token's decay


@gluon.jit
def dyadic_pairs(s_R, s_E, b_w, read, key, x_reads, x_keys, s_P):
    """Return the results of `mild_pairs` for any decay: by dyadic levels, without subtractions.

    s_R, s_E [32, 64]: in shared memory, r above a, k above b. b_w [64, 16]: log decays, a left operand
    read, key [64, 32]: the decay factors from the chunk's beginning to each read, and from each key to its end
    s_P: P [32, 32], split, with the scale of r. Others as in `mild_pairs`
    """
    d_r, d_a = sides(x_reads * read)
    d_k, d_b = sides(x_keys * key)
    i, t = bg.tile_indices(16, 16, bg.RIGHT)
    of_reads = bg.columns(s_R, 0) * d_r + bg.columns(s_R, 1) * d_a
    of_keys = bg.columns(s_E, 0) * d_k + bg.columns(s_E, 1) * d_b
    b_dw = bg.sums_along(of_reads, bg.mask(i > t), False) + bg.sums_along(of_keys, bg.mask(i < t), False)
    # r reads after its own token's decay, a before it.
    own = exp(from_operand(b_w))
    reads, keys, b_dw = bg.add_dyadic_pairs((d_r, d_a), (d_k, d_b), b_dw, s_R, s_E, b_w, own, s_P, SMALL)
    d_r, d_a = reads
    d_k, d_b = keys
    b_dw += bg.columns(s_R, 0) * d_r
    # r and its own token's keys.
    b_r = s_R.slice(0, 16).permute([1, 0]).load(bg.LEFT)
    b_k, b_b = s_E.slice(0, 16).permute([1, 0]).load(bg.LEFT), s_E.slice(16, 16).permute([1, 0]).load(bg.LEFT)
    own_token = gl.where(i == t, -1, 0).to(gl.int16)
    d_r = bg.add_product(bg.add_product(d_r, (b_k,), s_P, 0, 0, own_token), (b_b,), s_P, 0, 1, own_token)
    d_k = bg.add_product(d_k, (b_r,), s_P, 0, 0, own_token)
    d_b = bg.add_product(d_b, (b_r,), s_P, 0, 1, own_token)
    return beside(d_r, d_a), beside(d_k, d_b), b_dw


# --- gradients -------------------------------------------------------------------------------------------------------


@gluon.jit
def compute(copied, loaded, grads, o, m, scale, MILD: gl.constexpr):
    """Compute a chunk's gradients and write them to `grads`, at offsets o [16, 64] where the mask m holds.

    copied, loaded: what `grads_kernel` copies to shared memory, and loads into registers.
    MILD: a constant of the kernel, so that mild chunks spill no registers for the dyadic levels.
    """
    s_w, s_R, s_E, s_S, s_D, s_dw = copied
    b_four, is_input, unit4, b_A, b_k, unit_S, unit_D = loaded
    dr, dw, dk, dv, da, db = grads
    BATCH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    BATCH_LEFT: gl.constexpr = gl.DotOperandLayout(0, BATCH, 2)
    BATCH_RIGHT: gl.constexpr = gl.DotOperandLayout(1, BATCH, 2)
    s_FG = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    s_unit = gl.allocate_shared_memory(gl.float32, [4], bg.FLAT)
    s_A_high, s_A_low = bg.allocate_pair(32, 16, bg.SWIZZLED_16, gl.float16)
    s_A_unit = gl.allocate_shared_memory(gl.float32, [32], bg.FLAT)
    s_k_unit = gl.allocate_shared_memory(gl.float32, [16], bg.FLAT)
    unit = unit_of(gl.max(gl.abs(b_A), 1))
    A_high, A_low = halves(b_A * inverse(unit)[:, None])
    s_A_high.store(gl.reshape(A_high, (32, 16)))
    s_A_low.store(gl.reshape(A_low, (32, 16)))
    s_A_unit.store(gl.reshape(unit, (32,)))
    s_k_unit.store(unit_of(gl.max(gl.abs(b_k), 1)))
    by_input = (b_four.to(gl.int32) << 16).to(gl.float32, bitcast=True)
    by_half = b_four.to(gl.float16, bitcast=True).to(gl.float32)
    b_four = gl.where(is_input, by_input, by_half) * unit4
    unit = unit_of(gl.max(gl.max(gl.abs(b_four), 2), 1))
    b_four *= inverse(unit)[:, None, None]
    s_FG.store(gl.reshape(bg.to_half(b_four), (64, 64)))
    s_unit.store(unit)
    async_copy.wait_group(0)  # also a barrier: the copies and the stores above are complete

    unit4, n = s_unit.load(bg.FOUR), gl.arange(0, 4, bg.FOUR)
    unit_v, unit_v2 = gl.sum(gl.where(n == 0, unit4, 0.0), 0), gl.sum(gl.where(n == 1, unit4, 0.0), 0)
    unit_do, unit_y = gl.sum(gl.where(n == 2, unit4, 0.0), 0), gl.sum(gl.where(n == 3, unit4, 0.0), 0)
    s_F, s_G = s_FG.slice(0, 32), s_FG.slice(32, 32)
    b_P = gl.zeros([32, 32], gl.float32, SMALL)
    b_P = mma_v2(s_G.load(SMALL_LEFT), s_F.permute([1, 0]).load(SMALL_RIGHT), b_P)
    p_i, p_j = bg.tile_indices(32, 32, SMALL)
    ahead = p_i % 16 - p_j % 16
    visible = (ahead > 0) | ((ahead == 0) & (p_i < 16))
    of_r = unit_do
    if not MILD:
        of_r *= scale
    b_P *= gl.where(p_i < 16, of_r, unit_y) * gl.where(p_j < 16, unit_v, unit_v2)
    s_P = bg.allocate_pair(32, 32, bg.SWIZZLED_32)
    bg.store_pair(s_P, gl.where(visible, b_P, 0.0))

    # From here on tiles are transposed, [64 channels, *], in bands. Decays are relative to the middle of a mild chunk,
    # and to the ends of any other: mid is 0, rest the whole chunk's decay.
    t, u = bg.tile_indices(16, 32, bg.RIGHT)
    upto = gl.where(u < 16, (t <= u).to(gl.float32), (t < u % 16).to(gl.float32))
    b_w = s_w.permute([1, 0]).load(bg.LEFT)
    zero = gl.zeros([64, 32], gl.float32, bg.BAND)
    zero_16 = gl.zeros([64, 16], gl.float32, bg.BAND)
    if MILD:
        upto -= (t < 8).to(gl.float32)
    else:
        b_w = gl.where(b_w < -128.0, -128.0, b_w).to(b_w.dtype)  # by `clamped_decay`, 6% slower
    read = mma_v2(b_w, upto.to(gl.bfloat16), zero)
    m_j = gl.arange(0, 32, gl.SliceLayout(0, bg.BAND))[None, :]
    m_c = gl.arange(0, 16, gl.SliceLayout(0, bg.BAND))[None, :]
    mid = -gl.sum(gl.where(m_j == 16, read, 0.0), 1)
    rest = gl.sum(gl.where(m_j == 15, read, 0.0), 1)
    from_D, from_S = exp(rest) * unit_D, exp(mid) * unit_S
    if MILD:
        key = -sides(read)[0]
        to_end, of_D, key = exp(key + rest[:, None]), from_D, exp(key)
    else:
        t, u = bg.tile_indices(16, 16, bg.RIGHT)
        key = exp(mma_v2(b_w, bg.mask(t > u), zero_16))
        to_end, of_D = key, gl.zeros_like(rest) + unit_D
    read, key = exp(read) * gl.where(m_j < 16, scale, 1.0), beside(key, key)
    b_R, b_E = s_R.permute([1, 0]).load(bg.LEFT), s_E.permute([1, 0]).load(bg.LEFT)
    unit_k = s_k_unit.load(gl.SliceLayout(0, bg.BAND))[None, :]
    K_high, K_low = halves(sides(from_operand(b_E))[0] * inverse(unit_k) * to_end)
    s_K_high, s_K_low = bg.allocate_pair(64, 16, bg.SWIZZLED_16, gl.float16)
    s_K_high.store(K_high)
    s_K_low.store(K_low)

    # The terms of D in the gradients of keys; then A_k^T G, for dv.
    D_k = s_D.permute([1, 0]).load(bg.LEFT)
    x_keys = mma_v2(D_k, s_F.permute([1, 0]).load(bg.RIGHT), zero)
    x_keys *= gl.where(m_j < 16, (of_D * unit_v)[:, None], (of_D * unit_v2)[:, None])
    G_do = s_FG.slice(32, 16).permute([1, 0]).load(bg.LEFT)
    G_y = s_FG.slice(48, 16).permute([1, 0]).load(bg.LEFT)
    by_do = mma_v2(G_do, s_A_high.slice(0, 16).load(bg.RIGHT), zero_16)
    by_do = mma_v2(G_do, s_A_low.slice(0, 16).load(bg.RIGHT), by_do)
    by_y = mma_v2(G_y, s_A_high.slice(16, 16).load(bg.RIGHT), zero_16)
    by_y = mma_v2(G_y, s_A_low.slice(16, 16).load(bg.RIGHT), by_y)
    by_do *= unit_do * s_A_unit.slice(0, 16).load(gl.SliceLayout(0, bg.BAND))[None, :]
    by_y *= unit_y * s_A_unit.slice(16, 16).load(gl.SliceLayout(0, bg.BAND))[None, :]

    # The loads below come after a barrier, so that P and k* are complete.
    D_v = s_D.load(bg.LEFT)
    b_dv = mma_v2(D_v, s_K_high.load(bg.RIGHT), zero_16)
    b_dv = mma_v2(D_v, s_K_low.load(bg.RIGHT), b_dv)
    b_dv = b_dv * (unit_D * unit_k) + (by_do + by_y)
    s_w.permute([1, 0]).store(bg.to_bfloat16(b_dv))

    S_k = s_S.permute([1, 0]).load(bg.LEFT)
    x_reads = mma_v2(S_k, s_G.permute([1, 0]).load(bg.RIGHT), zero)
    x_reads *= gl.where(m_j < 16, (from_S * unit_do)[:, None], (from_S * unit_y)[:, None])
    if MILD:
        d_reads, d_keys, b_dw = mild_pairs(b_R, b_E, read, key, x_reads, x_keys, s_P)
    else:
        d_reads, d_keys, b_dw = dyadic_pairs(s_R, s_E, b_w, read, key, x_reads, x_keys, s_P)
    # sum_v S D, per channel of k, is the diagonal of S D^T; each band computes its own block [16, 16] of it.
    S_k = s_S.permute([1, 0]).reshape([4, 16, 64]).load(BATCH_LEFT)
    D_k = s_D.permute([1, 0]).reshape([4, 16, 64]).permute([0, 2, 1]).load(BATCH_RIGHT)
    SD = mma_v2(S_k, D_k, gl.zeros([4, 16, 16], gl.float32, BATCH))
    s_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))
    s_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))
    SD = gl.reshape(gl.sum(gl.where(s_i[None, :, None] == s_j[None, None, :], SD, 0.0), 2), (64,))
    SD = gl.convert_layout(SD, gl.SliceLayout(1, bg.BAND)) * (from_D * from_S)
    b_dw += SD[:, None]
    b_dw = gl.where((m_c == 0) & (unit_S < 2.0**-118), 0.0, b_dw)  # as `is_zero`

    s_R.permute([1, 0]).store(bg.to_bfloat16(d_reads))
    s_E.permute([1, 0]).store(bg.to_bfloat16(d_keys))
    s_dw.permute([1, 0]).store(bg.to_bfloat16(b_dw))
    gl.store(dr + o, s_R.slice(0, 16).load(bg.ROWS), mask=m)
    gl.store(da + o, s_R.slice(16, 16).load(bg.ROWS), mask=m)
    gl.store(dk + o, s_E.slice(0, 16).load(bg.ROWS), mask=m)
    gl.store(db + o, s_E.slice(16, 16).load(bg.ROWS), mask=m)
    gl.store(dw + o, s_dw.load(bg.ROWS), mask=m)
    gl.store(dv + o, s_w.load(bg.ROWS), mask=m)


@bg.kernel
def grads_kernel(
    r, w, k, v, a, b, do, states, v2, units, scores, mild, dr, dw, dk, dv, da, db, tails, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of one chunk of a head: chunk program_id(1) of the part of program_id(0).

    r, w, k, a, b, v, do and dr to db [B, T, H, 64] bfloat16, scores [all chunks, H, 2, 16, 16], mild [all chunks, H]
    states [all chunks, H, 64 (v), 64 (k)], v2 [all chunks, H, 16, 64], both float16 in units of `units`
    units [all chunks, H, 65]: of the 64 channels of v2, and of the state
    dr to db, tails: on entry the D, y and units that `chain_kernel` wrote
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; None unless PACKED
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    c = gl.program_id(1)
    if c >= count:
        return
    i = ((first_chunk + c) * H + i_h).to(gl.int64)
    is_mild = gl.load(mild + i)  # arrives with all other loads
    TENSORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    SCORES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 16, 1], [1, 1, 4], [2, 1, 0])

    start = begin + c * C
    rows = (end - start).to(gl.int32)
    base = (start * H + i_h) * 64
    tail = (i_n * H + i_h).to(gl.int64)

    # Copy rows, S and D asynchronously. The buffers of rows hold results later: s_R dr and da, s_E dk and db, s_w dv.
    o_v, o_d = bg.tile_indices(64, 64, bg.ROWS)
    o_t, _ = bg.tile_indices(C, 64, bg.ROWS)
    o, m = base + o_t * (H * 64) + o_d, o_t < rows
    s_w, s_dw = bg.allocate_rows(2, C)
    s_R, s_E = bg.allocate_rows(2, 2 * C)
    s_S = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    s_D = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    async_copy.async_copy_global_to_shared(s_w, w + o, mask=m)
    o_2, _ = bg.tile_indices(2 * C, 64, bg.ROWS)
    o_pair = base + o_2 % C * (H * 64) + o_d
    bg.copy_rows((s_R, s_E), (gl.where(o_2 < C, r, a), gl.where(o_2 < C, k, b)), o_pair, o_2 % C < rows)
    p_D = pointers_of_D(dr, dk, dv, da, tails, base, tail, rows, o_v, o_d, H)
    async_copy.async_copy_global_to_shared(s_D, p_D)
    async_copy.async_copy_global_to_shared(s_S, states + i * D_SIZE + o_v * 64 + o_d)
    async_copy.commit_group()

    # F = [v; v2] and G = [do; y] in float16: each of v, v2, do and y is loaded by one warp and gets one unit. In memory
    # v and do are bfloat16; v2 and y are float16 with a unit per channel.
    n = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TENSORS)))[:, None, None]
    t4 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TENSORS)))[None, :, None]
    d4 = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, TENSORS)))[None, None, :]
    is_input, of_G = n % 2 == 0, n >= 2
    BITS: gl.constexpr = gl.pointer_type(gl.int16)
    p_input = gl.where(of_G, do.to(BITS, bitcast=True), v.to(BITS, bitcast=True)) + base
    p_half = gl.where(of_G, db.to(BITS, bitcast=True) + base, v2.to(BITS, bitcast=True) + i * Y_SIZE)
    p_four = gl.where(is_input, p_input, p_half) + t4 * gl.where(n == 1, 64, H * 64) + d4
    b_four = gl.load(p_four, mask=(t4 < rows) & (d4 >= 0), other=0)
    d4 += 0 * n
    unit4 = gl.load(units + i * UNITS_SIZE + d4, mask=(n == 1) & (d4 >= 0), other=1.0)
    unit4 *= gl.load(dw + base + d4, mask=(n == 3) & (d4 >= 0), other=1.0).to(gl.float32)
    # Scores of the keys k: [2, 16, 16] by read vector (r, a), by reading token and by key token.
    o_r = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None, None]
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))[None, :, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
    p_A = scores + i * A_SIZE + gl.where(o_r == 0, o_j * 16 + o_i, o_i * 16 + o_j)
    b_A = gl.load(p_A, mask=o_i >= o_j + o_r, other=0.0)
    b_k = gl.load(k + o, mask=m, other=0.0).to(gl.float32)  # only for its units
    unit_S = gl.load(units + i * UNITS_SIZE + 64)
    unit_D = gl.load(gl.where(rows >= C, dw + H * 64, dr) + base).to(gl.float32)
    copied, loaded = (s_w, s_R, s_E, s_S, s_D, s_dw), (b_four, is_input, unit4, b_A, b_k, unit_S, unit_D)
    if is_mild > 0:
        compute(copied, loaded, (dr, dw, dk, dv, da, db), o, m, scale, True)
    else:
        compute(copied, loaded, (dr, dw, dk, dv, da, db), o, m, scale, False)


def carry_grads(plan, inputs, do, scores, last, written, scale, where) -> None:
    """Write the gradient of the state entering each part to `written` [parts, H, 64, 64], as `carry_grads_kernel` does.

    It is computed for a zero gradient of the state leaving the part; in a sequence's last part, for `last`
    [N, H, 64, 64], or None. scores: of `saved`. Other arguments as in `gradients`.
    """
    r, w, k, v, a, b = inputs
    args = r, w, a, b, do, scores, last, written, *[None] * 7, scale, *where
    plan.launch("rwkv7.fused.chain", chain_kernel, plan.parts * plan.H, args, HAS_LAST=last, KEEP=False)


def gradients(plan, inputs, do, saved, grads, last, first, scale, where) -> None:
    """Launch the backward: write the gradients of `inputs` to `grads`, and those of the initial states to `first`.

    plan: the `_Plan` of `fused_chunk_triton`; where: its arguments of `locate_program` for parts.
    inputs: r, w, k, v, a, b; grads: dr, dw, dk, dv, da, db; do: the gradient of o. All [B, T, H, 64] bfloat16.
    saved: states, v2, units, scores and mild, as the forward kernels stored them. first [N, H, 64, 64] float32.
    last [parts, H, 64, 64]: the gradients of the states leaving the parts, or None for zeros.
    """
    r, w, k, v, a, b = inputs
    *_, scores, _ = saved
    programs = plan.parts * plan.H
    ragged = plan.packed or plan.T % CHUNK > 0
    tails = r.new_empty(plan.N * plan.H * D_SIZE.value if ragged else 0, dtype=torch.float16)
    args = r, w, a, b, do, scores, last, first, *grads, tails, scale, *where
    plan.launch("rwkv7.fused.chain", chain_kernel, programs, args, HAS_LAST=last, KEEP=True)
    args = *inputs, do, *saved, *grads, tails, scale, *where
    plan.launch("rwkv7.fused.grads", grads_kernel, (programs, plan.L), args)
