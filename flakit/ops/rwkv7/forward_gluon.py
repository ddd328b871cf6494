"""RWKV7's forward on Hopper GPUs, in Gluon: what `fused_chunk_triton.forward_kernel` computes, with the layouts and the
software pipeline of `backward_gluon.chain_kernel`. `fused_chunk_triton` explains symbols and parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common.bands_gluon import (
    BAND,
    FLAT,
    FOUR,
    LEFT,
    PLAIN,
    ROWS,
    SQUARE,
    SWIZZLED,
    SWIZZLED_16,
    allocate_pair,
    gluon_kernel,
    load_pair,
    load_pair_transposed,
    split_left,
    store_band_maxima,
    store_pair,
    to_bfloat16,
    to_half,
)
from ..common.bands_triton import power_of_two
from ..common.blocks_triton import exp
from ..common.positions_triton import locate_program
from .chain_gluon import A_SIZE, D_SIZE, UNITS_SIZE, Y_SIZE, C, options

LOWEST_DECAY = gl.constexpr(-128.0)


@gluon.jit
def allocate_rows():
    """Return shared-memory buffers for one chunk: rows of r, w, k, v, a and b, and both matrices of its scores."""
    s_r = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_w = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_a = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_b = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_A = gl.allocate_shared_memory(gl.float32, [32, 16], PLAIN)
    return s_r, s_w, s_k, s_v, s_a, s_b, s_A


@gluon.jit
def allocate_operands():
    """Return shared-memory buffers for one chunk's operands: r*, a*, k*, b*, A_rk^T, A_ak, N^T and U, each split, and
    e^{total}."""
    s_r, s_a = allocate_pair(16, 64, SWIZZLED), allocate_pair(16, 64, SWIZZLED)
    s_k, s_b = allocate_pair(16, 64, SWIZZLED), allocate_pair(16, 64, SWIZZLED)
    s_rk, s_ak = allocate_pair(16, 16, SWIZZLED_16), allocate_pair(16, 16, SWIZZLED_16)
    s_N, s_U = allocate_pair(16, 16, SWIZZLED_16), allocate_pair(16, 16, SWIZZLED_16)
    return s_r, s_a, s_k, s_b, s_rk, s_ak, s_N, s_U, gl.allocate_shared_memory(gl.float32, [64], FLAT)


@gluon.jit
def allocate_results():
    """Return shared-memory buffers in which S, v2 and o of one chunk wait to be written to global memory."""
    s_S = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    s_v2 = gl.allocate_shared_memory(gl.float16, [16, 64], SWIZZLED)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    return s_S, s_v2, s_o


@gluon.jit
def fetch(buffers, r, w, k, v, a, b, scores, base, i, rows, H: gl.constexpr):
    """Start the asynchronous copy of a chunk's rows and scores to shared memory. base: offset of the first row in r.
    i: index of the chunk and head in `scores`. rows: number of rows to read; the others become zeros."""
    s_r, s_w, s_k, s_v, s_a, s_b, s_A = buffers
    o_t = gl.arange(0, 16, gl.SliceLayout(1, ROWS))[:, None]
    o_d = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    o, m = base + o_t * (H * 64) + o_d, o_t < rows
    async_copy.async_copy_global_to_shared(s_r, r + o, mask=m)
    async_copy.async_copy_global_to_shared(s_w, w + o, mask=m)
    async_copy.async_copy_global_to_shared(s_k, k + o, mask=m)
    async_copy.async_copy_global_to_shared(s_v, v + o, mask=m)
    async_copy.async_copy_global_to_shared(s_a, a + o, mask=m)
    async_copy.async_copy_global_to_shared(s_b, b + o, mask=m)
    o_i = gl.arange(0, 32, gl.SliceLayout(1, SQUARE))[:, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, SQUARE))[None, :]
    p_A = scores + i * A_SIZE + o_i * 16 + o_j
    async_copy.async_copy_global_to_shared(s_A, p_A, mask=(o_i >= 0) & (rows > 0))
    async_copy.commit_group()


@gluon.jit
def prepare(buffers, operands, scale):
    """Compute a chunk's `operands` from its `buffers`. Return v^T as a left operand."""
    # Tiles [16, 64] are not transposed here: each warp holds 16 channels as columns.
    COLUMNS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    COLUMNS_LEFT: gl.constexpr = gl.DotOperandLayout(0, COLUMNS, 2)
    COLUMNS_RIGHT: gl.constexpr = gl.DotOperandLayout(1, COLUMNS, 2)
    s_r, s_w, s_k, s_v, s_a, s_b, s_A = buffers
    o_r, o_a, o_k, o_b, o_rk, o_ak, o_N, o_U, s_total = operands
    t = gl.arange(0, 16, gl.SliceLayout(1, COLUMNS_LEFT))[:, None]
    u = gl.arange(0, 16, gl.SliceLayout(0, COLUMNS_LEFT))[None, :]
    b_w = s_w.load(COLUMNS_RIGHT)
    b_w = gl.maximum(b_w, LOWEST_DECAY).to(gl.bfloat16)
    zero = gl.zeros([16, 64], gl.float32, COLUMNS)
    upto = mma_v2((u <= t).to(gl.float32).to(gl.bfloat16), b_w, zero)
    before = mma_v2((u < t).to(gl.float32).to(gl.bfloat16), b_w, zero)
    after = mma_v2((u > t).to(gl.float32).to(gl.bfloat16), b_w, zero)
    total = mma_v2((u + t >= 0).to(gl.float32).to(gl.bfloat16), b_w, zero)
    s_total.store(exp(gl.max(total, 0)))  # all rows are equal
    key = exp(after)
    store_pair(o_r, s_r.load(COLUMNS).to(gl.float32) * (exp(upto) * scale))
    store_pair(o_a, s_a.load(COLUMNS).to(gl.float32) * exp(before))
    store_pair(o_k, s_k.load(COLUMNS).to(gl.float32) * key)
    store_pair(o_b, s_b.load(COLUMNS).to(gl.float32) * key)
    i = gl.arange(0, 16, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, SQUARE))[None, :]
    of_k, of_b = s_A.slice(0, 16).load(SQUARE), s_A.slice(16, 16).load(SQUARE)
    store_pair(o_rk, gl.where(j >= i, of_k, 0.0))
    store_pair(o_ak, gl.where(j < i, of_k, 0.0))
    store_pair(o_N, gl.where(j >= i, of_b, 0.0))
    store_pair(o_U, gl.where(j < i, of_b, gl.where(j == i, 1.0, 0.0)))
    return s_v.permute([1, 0]).load(LEFT)


@gluon.jit
def write_results(o, states, v2, results, base, i, rows, H: gl.constexpr, KEEP: gl.constexpr):
    """Copy o and, if KEEP, S and v2 of a chunk from shared to global memory, unless it has no rows."""
    s_S, s_v2, s_o = results
    o_t = gl.arange(0, 16, gl.SliceLayout(1, ROWS))[:, None]
    o_v = gl.arange(0, 64, gl.SliceLayout(1, ROWS))[:, None]
    o_d = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    gl.store(o + base + o_t * (H * 64) + o_d, s_o.load(ROWS), mask=o_t < rows)
    if KEEP:
        gl.store(states + i * D_SIZE + o_v * 64 + o_d, s_S.load(ROWS), mask=(o_v >= 0) & (rows > 0))
        gl.store(v2 + i * Y_SIZE + o_t * 64 + o_d, s_v2.load(ROWS), mask=(o_t >= 0) & (rows > 0))


@gluon.jit
def walk_chunk(
    b_S, b_v, buffers, refilled, operands, next_operands, s_largest, next_largest, results, results_before,
    r, w, k, v, a, b, o, states, v2, units, scores, scale, base, i, rows, before, more,
    H: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Walk one chunk, as one iteration of a software pipeline.

    previous chunk   write its results from `results_before` to global memory, unless it has no rows: before <= 0
    this chunk       compute o, v2 and the S leaving it; store o, v2 and the S entering it in `results`
    next chunk       compute `next_operands` from its rows in `buffers`
    the one after    start to copy its rows into `refilled`, if there are more

    base, i, rows: of this chunk, as in `fetch`. b_S, b_v: S^T entering this chunk and its v^T. Return S^T leaving this
    chunk and v^T of the next.
    """
    STEP: gl.constexpr = C * H * 64
    o_r, o_a, o_k, o_b, o_rk, o_ak, o_N, o_U, s_total = operands
    # Also a barrier: rows and operands are complete, and no warp still reads a buffer that is overwritten below.
    async_copy.wait_group(0)
    fetch(refilled, r, w, k, v, a, b, scores, base + 2 * STEP, i + 2 * H, gl.where(more, rows - 2 * C, 0), H)
    s_S, s_v2, s_o = results
    if KEEP:
        reciprocal, unit = power_of_two(gl.max(s_largest.load(FOUR), 0))
        s_S.store(to_half(b_S * reciprocal))
        gl.store(units + i * UNITS_SIZE + 64, unit, mask=rows > 0)
    # x = A_ak v + a* S, v2 = U x, all transposed.
    S_h, S_l = split_left(b_S)
    zero = gl.zeros([64, 16], gl.float32, BAND)
    A_h, A_l = load_pair_transposed(o_ak)
    a_h, a_l = load_pair_transposed(o_a)
    b_x = mma_v2(b_v, A_l, mma_v2(b_v, A_h, zero))
    b_x = mma_v2(S_h, a_h, b_x) + mma_v2(S_h, a_l, mma_v2(S_l, a_h, zero))
    b_S *= s_total.load(gl.SliceLayout(0, BAND))[None, :]
    k_h, k_l = load_pair(o_k)
    b_S = mma_v2(b_v, k_l, mma_v2(b_v, k_h, b_S))
    x_h, x_l = split_left(b_x)
    U_h, U_l = load_pair_transposed(o_U)
    b_f = mma_v2(x_h, U_h, zero) + mma_v2(x_h, U_l, mma_v2(x_l, U_h, zero))
    f_h, f_l = split_left(b_f)
    b_h, b_l = load_pair(o_b)
    b_S = mma_v2(f_h, b_h, mma_v2(f_h, b_l, mma_v2(f_l, b_h, b_S)))
    if KEEP:
        store_band_maxima(next_largest, b_S)
    # The rest is off the critical path: the next chunk does not depend on it.
    write_results(o, states, v2, results_before, base - STEP, i - H, before, H, KEEP)
    A_h, A_l = load_pair(o_rk)
    r_h, r_l = load_pair_transposed(o_r)
    N_h, N_l = load_pair(o_N)
    b_o = mma_v2(S_h, r_h, mma_v2(b_v, A_l, mma_v2(b_v, A_h, zero)))
    b_o += mma_v2(S_h, r_l, mma_v2(S_l, r_h, mma_v2(x_h, N_h, mma_v2(x_h, N_l, mma_v2(x_l, N_h, zero)))))
    s_o.permute([1, 0]).store(to_bfloat16(b_o))
    if KEEP:
        reciprocal, unit = power_of_two(gl.max(gl.abs(b_f), 1))
        s_v2.permute([1, 0]).store(to_half(b_f * reciprocal[:, None]))
        o_v = gl.arange(0, 64, gl.SliceLayout(1, BAND))
        gl.store(units + i * UNITS_SIZE + o_v, unit, mask=(o_v >= 0) & (rows > 0))
    return b_S, prepare(buffers, next_operands, scale)


@gluon_kernel
def forward_kernel(
    r, w, k, v, a, b, o, states, v2, units, scores, first, last, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: gl.constexpr, KEEP: gl.constexpr, HAS_FIRST: gl.constexpr, WANTS_LAST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute o of a part of a sequence, chunk by chunk; KEEP: store S and v2. In registers: S^T.

    r, w, k, v, a, b, o [B, T, H, 64] bfloat16, scores [chunks, H, 2, 16, 16]
    states [chunks, H, 64 (v), 64 (k)], v2 [chunks, H, 16, 64] float16, units [chunks, H, 65]: scales of v2^T and S
    first [parts, H, 64, 64]: entering each part; last [N, H, 64, 64]: final states
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]
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
    o_v = gl.arange(0, 64, gl.SliceLayout(1, BAND))[:, None]
    o_k = gl.arange(0, 64, gl.SliceLayout(0, BAND))[None, :]
    b_S = gl.zeros([64, 64], gl.float32, BAND)
    if HAS_FIRST:
        b_S = gl.load(first + gl.program_id(0).to(gl.int64) * D_SIZE + o_k * 64 + o_v)
    # Double buffers: while one chunk is processed, the next is prepared and the one after that is copied.
    buffers_0, buffers_1 = allocate_rows(), allocate_rows()
    operands_0, operands_1 = allocate_operands(), allocate_operands()
    results_0, results_1 = allocate_results(), allocate_results()
    largest_0 = gl.allocate_shared_memory(gl.float32, [4], FLAT)
    largest_1 = gl.allocate_shared_memory(gl.float32, [4], FLAT)
    fetch(buffers_0, r, w, k, v, a, b, scores, base, i, rows, H)
    fetch(buffers_1, r, w, k, v, a, b, scores, base + STEP, i + H, rows - C, H)
    async_copy.wait_group(1)
    b_v = prepare(buffers_0, operands_0, scale)
    if KEEP:
        store_band_maxima(largest_0, b_S)
    for n in range(0, pairs):
        before, more = gl.where(n > 0, C, 0), n + 1 < pairs
        b_S, b_v = walk_chunk(
            b_S, b_v, buffers_1, buffers_0, operands_0, operands_1, largest_0, largest_1, results_0, results_1,
            r, w, k, v, a, b, o, states, v2, units, scores, scale, base, i, rows, before, more, H, KEEP,
        )  # fmt: skip
        b_S, b_v = walk_chunk(
            b_S, b_v, buffers_0, buffers_1, operands_1, operands_0, largest_1, largest_0, results_1, results_0,
            r, w, k, v, a, b, o, states, v2, units, scores, scale, base + STEP, i + H, rows - C, rows, more, H, KEEP,
        )  # fmt: skip
        base += 2 * STEP
        i += 2 * H
        rows -= 2 * C
    async_copy.wait_group(0)  # also a barrier: the last results are in shared memory
    write_results(o, states, v2, results_1, base - STEP, i - H, gl.where(count > 0, rows + C, 0), H, KEEP)
    if WANTS_LAST:
        if is_last:
            gl.store(last + (i_n * H + i_h).to(gl.int64) * D_SIZE + o_k * 64 + o_v, b_S)


def outputs(plan, tensors, first, last, scale, where, keep: bool) -> None:
    """Launch the kernel: write o and, if `keep`, S, v2 and their units, and the final states to `last` unless None.

    plan: the `_Plan` of `fused_chunk_triton`; where: its arguments of `locate_program` for parts.
    tensors: r, w, k, v, a, b, o, states, v2, units and scores. first: the states entering the parts, or None for zeros.
    """
    forward_kernel[(plan.parts * plan.H,)](
        *tensors, first, last, scale, *where, KEEP=keep, HAS_FIRST=first is not None, WANTS_LAST=last is not None,
        PACKED=plan.packed, **options("forward", plan.H),
    )  # fmt: skip
