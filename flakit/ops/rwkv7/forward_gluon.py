"""RWKV7's forward on Hopper GPUs, in Gluon: the forward of `fused_chunk_triton` for bfloat16 heads of 64 channels, with
the layouts and the software pipeline of `chain_gluon`. `fused_chunk_triton` explains symbols and parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common import bands_gluon as bg
from ..common.bands_triton import power_of_two
from ..common.blocks_triton import clamped_decay, exp
from ..common.positions_triton import locate_program
from .chain_gluon import A_SIZE, D_SIZE, UNITS_SIZE, Y_SIZE, C, fetch, store_scores


@gluon.jit
def allocate():
    """Allocate the shared memory of one chunk. Return four groups of buffers:

    buffers    rows of w, r, a, k, b and v [16, 64], and both matrices of its scores [32, 16]
    operands   r*, a*, k*, b* [16, 64], A_rk^T, A_ak, N^T and U [16, 16], each split, and e^{total} [64]
    largest    max |S| of each band [4]
    results    S [64, 64], v2 and o [16, 64], before they are written to global memory
    """
    buffers = bg.allocate_rows(6, C), gl.allocate_shared_memory(gl.float32, [32, 16], bg.PLAIN)
    s_r, s_a = bg.allocate_pair(16, 64, bg.SWIZZLED), bg.allocate_pair(16, 64, bg.SWIZZLED)
    s_k, s_b = bg.allocate_pair(16, 64, bg.SWIZZLED), bg.allocate_pair(16, 64, bg.SWIZZLED)
    s_rk, s_ak = bg.allocate_pair(16, 16, bg.SWIZZLED_16), bg.allocate_pair(16, 16, bg.SWIZZLED_16)
    s_N, s_U = bg.allocate_pair(16, 16, bg.SWIZZLED_16), bg.allocate_pair(16, 16, bg.SWIZZLED_16)
    operands = s_r, s_a, s_k, s_b, s_rk, s_ak, s_N, s_U, gl.allocate_shared_memory(gl.float32, [64], bg.FLAT)
    s_S = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    s_v2 = gl.allocate_shared_memory(gl.float16, [16, 64], bg.SWIZZLED)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [16, 64], bg.SWIZZLED)
    return buffers, operands, gl.allocate_shared_memory(gl.float32, [4], bg.FLAT), (s_S, s_v2, s_o)


@gluon.jit
def prepare(buffers, operands, scale):
    """Compute a chunk's `operands` from its rows and scores, `buffers`. Return v^T, [64, 16], as a left operand."""
    s_rows, s_A = buffers
    s_w, s_r, s_a, s_k, s_b, s_v = s_rows
    o_r, o_a, o_k, o_b, o_rk, o_ak, o_N, o_U, s_total = operands
    upto, before, after, total = bg.decays_by_token(clamped_decay(s_w.load(bg.COLUMNS_RIGHT)))
    s_total.store(exp(gl.max(total, 0)))
    key = exp(after)
    bg.store_pair(o_r, s_r.load(bg.COLUMNS).to(gl.float32) * (exp(upto) * scale))
    bg.store_pair(o_a, s_a.load(bg.COLUMNS).to(gl.float32) * exp(before))
    bg.store_pair(o_k, s_k.load(bg.COLUMNS).to(gl.float32) * key)
    bg.store_pair(o_b, s_b.load(bg.COLUMNS).to(gl.float32) * key)
    i, j = bg.tile_indices(16, 16, bg.SQUARE)
    of_k, of_b = s_A.slice(0, 16).load(bg.SQUARE), s_A.slice(16, 16).load(bg.SQUARE)
    bg.store_pair(o_rk, gl.where(j >= i, of_k, 0.0))
    bg.store_pair(o_ak, gl.where(j < i, of_k, 0.0))
    store_scores(o_N, o_U, of_b)
    return s_v.permute([1, 0]).load(bg.LEFT)


@gluon.jit
def write_results(o, states, v2, results, base, i, rows, H: gl.constexpr, KEEP: gl.constexpr):
    """Copy a chunk's o and, if KEEP, its S and v2 from shared to global memory. rows: its rows, <= 0 for no chunk."""
    s_S, s_v2, s_o = results
    o_t, o_rows = bg.row_offsets(C, H * 64)
    gl.store(o + base + o_rows, s_o.load(bg.ROWS), mask=o_t < rows)
    if KEEP:
        o_v, o_S = bg.row_offsets(64, 64)
        gl.store(states + i * D_SIZE + o_S, s_S.load(bg.ROWS), mask=(o_v >= 0) & (rows > 0))
        o_t, o_v2 = bg.row_offsets(C, 64)
        gl.store(v2 + i * Y_SIZE + o_v2, s_v2.load(bg.ROWS), mask=(o_t >= 0) & (rows > 0))


@gluon.jit
def walk_chunk(
    b_S, b_v, own, other, tensors, o, states, v2, units, scores, scale, base, i, rows, before, more,
    H: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Walk one chunk, as one iteration of a software pipeline.

    previous chunk   write its results to global memory, unless it has no rows: before <= 0
    this chunk       compute o, v2 and the S leaving it; store o, v2 and the S entering it
    next chunk       compute its operands from its rows
    the one after    start to copy its rows, if there are more

    own, other: two chunks' memory, as `allocate` returns it. `own` holds this chunk's operands and takes the rows that
    are copied; `other` holds the previous chunk's results and the next chunk's rows.
    base, rows: of this chunk, as in `fetch`; i: index of the chunk and head. before: rows of the previous chunk.
    b_S [64 (v), 64 (k)]: S^T entering this chunk; b_v: its v^T. Return S^T leaving this chunk and v^T of the next.
    """
    STEP: gl.constexpr = C * H * 64
    refilled, operands, s_largest, results = own
    buffers, next_operands, next_largest, results_before = other
    o_r, o_a, o_k, o_b, o_rk, o_ak, o_N, o_U, s_total = operands
    s_S, s_v2, s_o = results
    # Also a barrier: rows and operands are complete, and no warp still reads a buffer that is overwritten below.
    async_copy.wait_group(0)
    p_A = scores + (i + 2 * H) * A_SIZE
    fetch(refilled, tensors, p_A, base + 2 * STEP, gl.where(more, rows - 2 * C, 0), H)
    if KEEP:
        reciprocal, unit = power_of_two(gl.max(s_largest.load(bg.FOUR), 0))
        s_S.store(bg.to_half(b_S * reciprocal))
        gl.store(units + i * UNITS_SIZE + 64, unit, mask=rows > 0)
    # x = A_ak v + a* S, v2 = U x, all transposed.
    S_h, S_l = bg.split_left(b_S)
    zero = gl.zeros([64, 16], gl.float32, bg.BAND)
    A_h, A_l = bg.load_pair_transposed(o_ak)
    a_h, a_l = bg.load_pair_transposed(o_a)
    b_x = mma_v2(b_v, A_l, mma_v2(b_v, A_h, zero))
    b_x = mma_v2(S_h, a_h, b_x) + mma_v2(S_h, a_l, mma_v2(S_l, a_h, zero))
    b_S *= s_total.load(gl.SliceLayout(0, bg.BAND))[None, :]
    k_h, k_l = bg.load_pair(o_k)
    b_S = mma_v2(b_v, k_l, mma_v2(b_v, k_h, b_S))
    x_h, x_l = bg.split_left(b_x)
    U_h, U_l = bg.load_pair_transposed(o_U)
    b_f = mma_v2(x_h, U_h, zero) + mma_v2(x_h, U_l, mma_v2(x_l, U_h, zero))
    f_h, f_l = bg.split_left(b_f)
    b_h, b_l = bg.load_pair(o_b)
    b_S = mma_v2(f_h, b_h, mma_v2(f_h, b_l, mma_v2(f_l, b_h, b_S)))
    if KEEP:
        bg.store_band_maxima(next_largest, b_S)
    # The rest is off the critical path: the next chunk does not depend on it.
    write_results(o, states, v2, results_before, base - STEP, i - H, before, H, KEEP)
    A_h, A_l = bg.load_pair(o_rk)
    r_h, r_l = bg.load_pair_transposed(o_r)
    N_h, N_l = bg.load_pair(o_N)
    b_o = mma_v2(S_h, r_h, mma_v2(b_v, A_l, mma_v2(b_v, A_h, zero)))
    b_o += mma_v2(S_h, r_l, mma_v2(S_l, r_h, mma_v2(x_h, N_h, mma_v2(x_h, N_l, mma_v2(x_l, N_h, zero)))))
    s_o.permute([1, 0]).store(bg.to_bfloat16(b_o))
    if KEEP:
        reciprocal, unit = power_of_two(gl.max(gl.abs(b_f), 1))
        s_v2.permute([1, 0]).store(bg.to_half(b_f * reciprocal[:, None]))
        o_v = gl.arange(0, 64, gl.SliceLayout(1, bg.BAND))
        gl.store(units + i * UNITS_SIZE + o_v, unit, mask=(o_v >= 0) & (rows > 0))
    return b_S, prepare(buffers, next_operands, scale)


@bg.kernel
def forward_kernel(
    r, w, k, v, a, b, o, states, v2, units, scores, first, last, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: gl.constexpr, KEEP: gl.constexpr, HAS_FIRST: gl.constexpr, WANTS_LAST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute o of a part of L chunks of a head's sequence; KEEP: store S and v2 of each chunk. Registers hold S^T.

    r, w, k, v, a, b, o [B, T, H, 64] bfloat16, scores [chunks, H, 2, 16, 16]
    states [chunks, H, 64 (v), 64 (k)], v2 [chunks, H, 16, 64] float16, units [chunks, H, 65]: scales of v2^T and S
    first [parts, H, 64, 64]: states entering the parts, or None; last [N, H, 64, 64]: final states, or None
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; None unless PACKED
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    # Two chunks per iteration. If their number is odd, the last chunk walked has no rows and changes nothing.
    pairs = (count + 1) // 2
    STEP: gl.constexpr = C * H * 64
    rows = gl.where(count > 0, end - begin, 0).to(gl.int32)
    base = (begin * H + i_h) * 64
    i = (first_chunk * H + i_h).to(gl.int64)
    o_v, o_k = bg.tile_indices(64, 64, bg.BAND)
    b_S = gl.zeros([64, 64], gl.float32, bg.BAND)
    if HAS_FIRST:
        b_S = gl.load(first + gl.program_id(0).to(gl.int64) * D_SIZE + o_k * 64 + o_v)
    # Double buffers: while one chunk is processed, the next is prepared and the one after that is copied.
    memory = allocate(), allocate()
    buffers_0, operands_0, largest_0, _ = memory[0]
    buffers_1, _, _, results_1 = memory[1]
    tensors = w, r, a, k, b, v
    fetch(buffers_0, tensors, scores + i * A_SIZE, base, rows, H)
    fetch(buffers_1, tensors, scores + (i + H) * A_SIZE, base + STEP, rows - C, H)
    async_copy.wait_group(1)
    b_v = prepare(buffers_0, operands_0, scale)
    if KEEP:
        bg.store_band_maxima(largest_0, b_S)
    for n in range(0, pairs):
        for m in gl.static_range(2):
            before = gl.where((n > 0) | (m > 0), rows + C, 0)
            b_S, b_v = walk_chunk(
                b_S, b_v, memory[m], memory[1 - m], tensors, o, states, v2, units, scores, scale, base, i,
                rows, before, n + 1 < pairs, H, KEEP,
            )  # fmt: skip
            base += STEP
            i += H
            rows -= C
    async_copy.wait_group(0)  # also a barrier: the last results are in shared memory
    write_results(o, states, v2, results_1, base - STEP, i - H, gl.where(count > 0, rows + C, 0), H, KEEP)
    if WANTS_LAST:
        if is_last:
            gl.store(last + (i_n * H + i_h).to(gl.int64) * D_SIZE + o_k * 64 + o_v, b_S)
