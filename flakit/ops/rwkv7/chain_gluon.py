"""RWKV7's backward on Hopper GPUs, in Gluon, first half: the recurrence over chunks. `backward_gluon` explains D, y and
their units. `forward_gluon` shares the code that loads and prepares a chunk.

**The software pipeline.** A program walks the chunks of a part. In one iteration it processes a chunk, computes the
next chunk's operands, starts to copy the rows of the chunk after that to shared memory, and copies the previous chunk's
results from there. Every buffer is double, and the warps synchronize once per chunk.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common import bands_gluon as bg
from ..common.bands_triton import CHANNELS, CHUNK
from ..common.blocks_triton import clamped_decay, exp
from ..common.positions_triton import locate_program
from .fused_chunk_triton import UNITS

C = tl.constexpr(CHUNK)
D_SIZE = tl.constexpr(CHANNELS * CHANNELS)
Y_SIZE = tl.constexpr(CHUNK * CHANNELS)
A_SIZE = tl.constexpr(2 * CHUNK * CHUNK)
"""Elements of a chunk's scores: two matrices."""
UNITS_SIZE = tl.constexpr(UNITS)


@gluon.jit
def unit_of(largest):
    """Return the power of two for which largest / unit is in [2^13, 2^14), but at least 2^-119. For infinity or NaN
    return NaN, which makes the whole tile NaN: an infinite unit would turn its finite numbers into zeros."""
    exponent = largest.to(gl.int32, bitcast=True) & 0x7F800000
    unit = gl.maximum(exponent, 0x0A800000) - 0x06800000
    return gl.where(exponent == 0x7F800000, 0x7FC00000, unit).to(gl.float32, bitcast=True)


@gluon.jit
def inverse(unit):
    """Return 1 / unit, exactly: unit is a power of two."""
    return (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@triton.jit
def pointers_of_D(dr, dk, dv, da, tails, base, tail, rows, v, k, H: tl.constexpr):
    """Return pointers to the elements of a chunk's D, [64 (v), 64 (k)], at indices v [64, 1] and k [1, 64].

    D of a full chunk takes the chunk's rows of dr, dk, dv and da, 16 rows of D each; D of a shorter one is in `tails`.
    base: offset of the chunk's first row in dr. tail: index of its sequence and head. rows: its number of rows.
    """
    x = tl.where(v < 32, tl.where(v < 16, dr, dk), tl.where(v < 48, dv, da)) + (base + v % C * (H * 64))
    x = x.to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.where(rows >= C, x, tails + tail * D_SIZE + v * 64) + k


@gluon.jit
def allocate():
    """Allocate the shared memory of one chunk. Return four groups of buffers:

    buffers    rows of w, r, a, b and do [16, 64], and the matrix that holds N and U [16, 16]
    operands   r*, a*, b* [16, 64], N^T and U [16, 16], each split, and e^{total} [64]
    largest    max |D| of each band [4]
    results    D [64, 64] and y [16, 64], before they are written to global memory
    """
    buffers = bg.allocate_rows(5, C), gl.allocate_shared_memory(gl.float32, [16, 16], bg.PLAIN)
    s_r, s_a = bg.allocate_pair(16, 64, bg.SWIZZLED), bg.allocate_pair(16, 64, bg.SWIZZLED)
    s_b = bg.allocate_pair(16, 64, bg.SWIZZLED)
    s_N, s_U = bg.allocate_pair(16, 16, bg.SWIZZLED_16), bg.allocate_pair(16, 16, bg.SWIZZLED_16)
    operands = s_r, s_a, s_b, s_N, s_U, gl.allocate_shared_memory(gl.float32, [64], bg.FLAT)
    s_D = gl.allocate_shared_memory(gl.float16, [64, 64], bg.SWIZZLED)
    s_y = gl.allocate_shared_memory(gl.float16, [16, 64], bg.SWIZZLED)
    return buffers, operands, gl.allocate_shared_memory(gl.float32, [4], bg.FLAT), (s_D, s_y)


@gluon.jit
def fetch(buffers, tensors, p_A, base, rows, H: gl.constexpr):
    """Start the asynchronous copy of a chunk's rows of the tensors [rows, H, 64], and of its scores at p_A.

    base: offset of the first row. rows: number of rows to read; the others become zeros.
    """
    s_rows, s_A = buffers
    t, o = bg.row_offsets(C, H * 64)
    bg.copy_rows(s_rows, tensors, base + o, t < rows)
    i, j = bg.tile_indices(s_A.shape[0], 16, bg.SQUARE)
    async_copy.async_copy_global_to_shared(s_A, p_A + (i * 16 + j), mask=(i >= 0) & (rows > 0))
    async_copy.commit_group()


@gluon.jit
def store_scores(s_N, s_U, b_A):
    """Split and store N^T and U. b_A [16, 16] holds both: N^T on and above its diagonal, U, with a diagonal of ones,
    below."""
    i, j = bg.tile_indices(16, 16, bg.SQUARE)
    bg.store_pair(s_N, gl.where(j >= i, b_A, 0.0))
    bg.store_pair(s_U, gl.where(j < i, b_A, gl.where(j == i, 1.0, 0.0)))


@gluon.jit
def prepare(buffers, operands, scale):
    """Compute a chunk's `operands` from its rows and scores, `buffers`. Return do^T, [64, 16], as a left operand."""
    s_rows, s_A = buffers
    s_w, s_r, s_a, s_b, s_do = s_rows
    o_r, o_a, o_b, o_N, o_U, s_total = operands
    upto, before, after, total = bg.decays_by_token(clamped_decay(s_w.load(bg.COLUMNS_RIGHT)))
    s_total.store(exp(gl.max(total, 0)))
    bg.store_pair(o_r, s_r.load(bg.COLUMNS).to(gl.float32) * (exp(upto) * scale))
    bg.store_pair(o_a, s_a.load(bg.COLUMNS).to(gl.float32) * exp(before))
    bg.store_pair(o_b, s_b.load(bg.COLUMNS).to(gl.float32) * exp(after))
    store_scores(o_N, o_U, s_A.load(bg.SQUARE))
    return s_do.permute([1, 0]).load(bg.LEFT)


@gluon.jit
def write_results(grads, tails, results, base, tail, rows, H: gl.constexpr):
    """Copy a chunk's D and y from shared to global memory. base, tail, rows: as in `pointers_of_D`; rows <= 0: none."""
    dr, dw, dk, dv, da, db = grads
    s_D, s_y = results
    o_v, o_d = bg.tile_indices(64, 64, bg.ROWS)
    o_t, o = bg.row_offsets(C, H * 64)
    p_D = pointers_of_D(dr, dk, dv, da, tails, base, tail, rows, o_v, o_d, H)
    gl.store(p_D, s_D.load(bg.ROWS), mask=(o_v >= 0) & (rows > 0))
    p_y = db.to(gl.pointer_type(gl.float16), bitcast=True) + base + o
    gl.store(p_y, s_y.load(bg.ROWS), mask=o_t < rows)


@gluon.jit
def walk_chunk(
    b_D, b_do, own, other, tensors, p_A, grads, tails, scale, base, tail, rows, before, more,
    H: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Walk one chunk, as one iteration of a software pipeline. Chunks are walked from last to first.

    previous chunk   write its D and y to global memory, unless it has no rows: before <= 0
    this chunk       compute y and the D entering it; store y and the D leaving it, in their units
    next chunk       compute its operands from its rows
    the one after    start to copy its rows, if there are more

    own, other: two chunks' memory, as `allocate` returns it. `own` holds this chunk's operands and takes the rows that
    are copied; `other` holds the previous chunk's results and the next chunk's rows.
    p_A, base, tail, rows: of this chunk, as in `fetch` and `pointers_of_D`. before: rows of the previous chunk.
    KEEP: compute results and write them. b_D [64 (v), 64 (k)]: D^T leaving this chunk; b_do: its do^T. Return D^T
    entering this chunk and do^T of the next.
    """
    STEP: gl.constexpr = C * H * 64
    refilled, operands, s_largest, results = own
    buffers, next_operands, next_largest, results_before = other
    o_r, o_a, o_b, o_N, o_U, s_total = operands
    s_D, s_y = results
    # Also a barrier: rows and operands are complete, and no warp still reads a buffer that is overwritten below.
    async_copy.wait_group(0)
    fetch(refilled, tensors, p_A - 2 * H * A_SIZE, base - 2 * STEP, gl.where(more, rows + 2 * C, 0), H)
    dr, dw, dk, dv, da, db = grads
    if KEEP:
        unit = unit_of(gl.max(s_largest.load(bg.FOUR), 0))
        s_D.store(bg.to_half(b_D * inverse(unit)))
        gl.store(gl.where(rows >= C, dw + H * 64, dr) + base, unit.to(gl.bfloat16), mask=rows > 0)
    # x = D b*, y = N^T do + U^T x, all transposed.
    D_h, D_l = bg.split_left(b_D)
    zero = gl.zeros([64, 16], gl.float32, bg.BAND)
    b_h, b_l = bg.load_pair_transposed(o_b)
    b_x = mma_v2(D_h, b_h, zero) + mma_v2(D_h, b_l, mma_v2(D_l, b_h, zero))
    N_h, N_l = bg.load_pair_transposed(o_N)
    of_do = mma_v2(b_do, N_l, mma_v2(b_do, N_h, zero))
    b_D *= s_total.load(gl.SliceLayout(0, bg.BAND))[None, :]
    r_h, r_l = bg.load_pair(o_r)
    b_D = mma_v2(b_do, r_l, mma_v2(b_do, r_h, b_D))
    x_h, x_l = bg.split_left(b_x)
    U_h, U_l = bg.load_pair(o_U)
    b_y = mma_v2(x_h, U_h, of_do) + mma_v2(x_h, U_l, mma_v2(x_l, U_h, zero))
    y_h, y_l = bg.split_left(b_y)
    a_h, a_l = bg.load_pair(o_a)
    b_D = mma_v2(y_h, a_h, mma_v2(y_h, a_l, mma_v2(y_l, a_h, b_D)))
    # The rest is off the critical path: the next chunk does not depend on it.
    if KEEP:
        bg.store_band_maxima(next_largest, b_D)
        write_results(grads, tails, results_before, base + STEP, tail, before, H)
        unit = unit_of(gl.max(gl.abs(b_y), 1))
        s_y.permute([1, 0]).store(bg.to_half(b_y * inverse(unit)[:, None]))
        o_v = gl.arange(0, 64, gl.SliceLayout(1, bg.BAND))
        gl.store(dw + base + o_v, unit.to(gl.bfloat16), mask=(o_v >= 0) & (rows > 0))
    return b_D, prepare(buffers, next_operands, scale)


@bg.kernel
def chain_kernel(
    r, w, a, b, do, scores, last, first, dr, dw, dk, dv, da, db, tails, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L,
    H: gl.constexpr, HAS_LAST: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Walk a part of L chunks of a head's sequence, from last to first. Registers hold D^T.

    KEEP: write y and the D leaving each chunk to where that chunk's gradients will be, and the gradient of the initial
    state to `first`. Otherwise do as `carry_grads_kernel`: write the gradient of the state entering the part to
    `first`, computed as if that of the state leaving it were zero, or in the last part that of the final state.

    r, w, a, b, do, dr to db [B, T, H, 64] bfloat16, scores [all chunks, H, 2, 16, 16]
    KEEP: last [parts, H, 64, 64], first [N, H, 64, 64]; otherwise last [N, H, 64, 64], first [parts, H, 64, 64]
    tails [N, H, 64 (v), 64 (k)] float16; dr to db and tails: as `backward_gluon` describes
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; None unless PACKED
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    # Two chunks per iteration. If their number is odd, the first chunk walked has no rows and changes nothing.
    pairs = (count + 1) // 2
    STEP: gl.constexpr = C * H * 64
    start = begin + (2 * pairs - 1) * C
    rows = gl.where(count > 0, end - start, 0).to(gl.int32)
    base = (start * H + i_h) * 64
    p_A = scores + ((first_chunk + 2 * pairs - 1) * H + i_h).to(gl.int64) * A_SIZE + A_SIZE // 2
    of_part, of_sequence = gl.program_id(0).to(gl.int64), (i_n * H + i_h).to(gl.int64)
    o_v, o_k = bg.tile_indices(64, 64, bg.BAND)
    b_D = gl.zeros([64, 64], gl.float32, bg.BAND)
    if HAS_LAST:
        p_last = last + (of_part if KEEP else of_sequence) * D_SIZE + o_k * 64 + o_v
        b_D = gl.load(p_last, mask=(o_v >= 0) & (is_last | KEEP), other=0.0)
    # Double buffers: while one chunk is processed, the next is prepared and the one after that is copied.
    memory = allocate(), allocate()
    buffers_0, operands_0, largest_0, _ = memory[0]
    buffers_1, _, _, results_1 = memory[1]
    tensors, grads = (w, r, a, b, do), (dr, dw, dk, dv, da, db)
    fetch(buffers_0, tensors, p_A, base, rows, H)
    fetch(buffers_1, tensors, p_A - H * A_SIZE, base - STEP, gl.where(count > 0, rows + C, 0), H)
    async_copy.wait_group(1)
    b_do = prepare(buffers_0, operands_0, scale)
    bg.store_band_maxima(largest_0, b_D)
    for n in range(0, pairs):
        for m in gl.static_range(2):
            before = gl.where((n > 0) | (m > 0), rows - C, 0)
            b_D, b_do = walk_chunk(
                b_D, b_do, memory[m], memory[1 - m], tensors, p_A, grads, tails, scale, base, of_sequence,
                rows, before, n + 1 < pairs, H, KEEP,
            )  # fmt: skip
            base -= STEP
            p_A -= H * A_SIZE
            rows += C
    async_copy.wait_group(0)  # also a barrier: the last results are in shared memory
    if KEEP:
        write_results(grads, tails, results_1, base + STEP, of_sequence, gl.where(count > 0, rows - C, 0), H)
    if is_first | (not KEEP):
        gl.store(first + (of_sequence if KEEP else of_part) * D_SIZE + o_k * 64 + o_v, b_D)
