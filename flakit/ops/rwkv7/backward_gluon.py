"""RWKV7's backward on Hopper GPUs, in Gluon: `fused_chunk_triton.backward_kernel` split into the recurrence over chunks
and the gradients of each chunk, which are computed in parallel. `fused_chunk_triton` explains symbols, parts and mild
chunks.

1. `chain_kernel` runs one program per part and head. It walks the chunks from last to first, computes only D, the
   gradient of the state leaving each chunk, and y, and stores both.
2. `grads_kernel` runs one program per chunk and head. It reads D and y, and computes all gradients of a mild chunk.
3. `steep_grads_kernel` reads D, and computes all gradients of the chunks that are not mild.

The three kernels process a part in segments, the last segment first, which bounds the memory for D and y.

**Why Gluon.** Its code sets the layout of each tile in registers and in shared memory. With the layouts that Triton's
compiler chooses, the same split is slower than `backward_kernel` (data/tuning.md). Each warp holds a band of 16
channels, as in `common.bands_triton`. The compiler inserts barriers at a `wait_group` and between uses of a buffer.

**Units.** D, y, F, G, k and the scores of k are float16 operands. To cover the range of float32, each is divided by a
power of two, its unit, such that its largest element is in [2^13, 2^14). Elements down to 2^-27 of the largest have
float16's full precision. D, and each of v, v2, do and y as an operand, have one unit per tile; the stored y has one per
channel; k and its scores have one per key token. The other operands are split into two bfloat16 numbers, as in
`fused_chunk_triton`, and need no unit.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..common.bands_triton import CHANNELS, CHUNK, LEVELS, bands, clamped_decay, launch_options
from ..common.blocks_triton import LENGTHS, exp, kernel
from ..common.kernel_triton import Kernel, Translated
from ..common.launch import TABLE, cdiv
from ..common.positions_triton import locate_program
from .fused_chunk_triton import UNITS, chunk_grads

NUM_WARPS = 4
"""Warps per program, which the layouts below assume."""
MOST_AT_ONCE = 8192
"""Chunks, summed over parts and heads, whose D and y are in memory at once: 86 MB. SHORTEST_SEGMENT may exceed it."""
SHORTEST_SEGMENT = 8
"""Chunks in the shortest segment of a part."""
VISITED = 16
"""Chunks that a program of `steep_grads_kernel` visits."""


class _Source(Translated, GluonASTSource):
    """The source of a Gluon kernel, as `kernel_triton` has Triton compile it."""


class _GluonKernel(Kernel):
    SOURCE = _Source

    def is_gluon(self) -> bool:
        return True


def _gluon_kernel(function) -> _GluonKernel:
    return _GluonKernel(function, LENGTHS)


C = tl.constexpr(CHUNK)
D_SIZE = tl.constexpr(CHANNELS * CHANNELS)
Y_SIZE = tl.constexpr(CHUNK * CHANNELS)
A_SIZE = tl.constexpr(2 * CHUNK * CHUNK)
"""Elements of a chunk's scores: two matrices."""
UNITS_SIZE = tl.constexpr(UNITS)

BAND = tl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""The result of a product [64, *], 16 rows per warp; LEFT and RIGHT are its operands."""
LEFT = tl.constexpr(gl.DotOperandLayout(0, BAND.value, 2))
RIGHT = tl.constexpr(gl.DotOperandLayout(1, BAND.value, 2))
ROWS = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of 64 channels in the order of global memory, 16 bytes of 16-bit numbers per thread."""
SWIZZLED = tl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Swizzled rows of 64 16-bit numbers in shared memory; below, rows of 32 and of 16."""
SWIZZLED_32 = tl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
SWIZZLED_16 = tl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
PLAIN = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FOUR = tl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""A vector of 4, all of it in every thread."""
SQUARE = tl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
"""A matrix [16, 16]."""


# --- operands --------------------------------------------------------------------------------------------------------


@gluon.jit
def truncated(x):
    """Return float32 x truncated to bfloat16, and the remainder in float32, as in `blocks_triton`."""
    bits = x.to(gl.int32, bitcast=True)
    high = (bits & -65536).to(gl.float32, bitcast=True)
    rest = gl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, high], gl.float32, True, 1)
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [bits], gl.bfloat16, True, 2), rest


@gluon.jit
def to_bfloat16(x):
    """Round float32 x to bfloat16, two numbers per instruction."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)


@gluon.jit
def to_half(x):
    """Round float32 x to float16, two numbers per instruction."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, True, 2)


@gluon.jit
def split(x):
    """Split float32 x into high + low, two bfloat16 tiles."""
    high, rest = truncated(x)
    return high, to_bfloat16(rest)


@gluon.jit
def halves(x):
    """Split float32 x into high + low, two float16 tiles."""
    high = to_half(x)
    return high, to_half(x - high.to(gl.float32))


@gluon.jit
def store_split(s_high, s_low, x):
    """Split float32 x into two bfloat16 tiles and store them in shared memory."""
    high, low = split(x)
    s_high.store(high)
    s_low.store(low)


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


@gluon.jit
def sides(x):
    """Return the left and the right half of the columns of x, both in layout BAND."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, (N, 2, M)), (0, 2, 1)))
    return gl.convert_layout(left, BAND, assert_trivial=True), gl.convert_layout(right, BAND, assert_trivial=True)


@gluon.jit
def twice(x):
    """Return x [N, M] twice, side by side, [N, 2 M], in layout BAND."""
    both = gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))
    return gl.convert_layout(both, BAND, assert_trivial=True)


@gluon.jit
def operand_indices(COLUMNS: gl.constexpr):
    """Return the row indices [16, 1] and column indices [1, COLUMNS] of a right operand [16, COLUMNS]."""
    i = gl.arange(0, C, gl.SliceLayout(1, RIGHT))[:, None]
    return i, gl.arange(0, COLUMNS, gl.SliceLayout(0, RIGHT))[None, :]


@gluon.jit
def sums_along(x, ones, ALL_BITS: gl.constexpr):
    """Return x @ ones, with float32 x split into two bfloat16 terms, or three with ALL_BITS, which keeps all bits of x;
    as in `blocks_triton`. ones [16, *]: a mask."""
    ones = ones.to(gl.float32).to(gl.bfloat16)
    high, rest = truncated(x)
    acc = gl.zeros([x.shape[0], ones.shape[1]], gl.float32, BAND)
    acc = mma_v2(gl.convert_layout(high, LEFT), ones, acc)
    if ALL_BITS:
        high, rest = truncated(rest)
        acc = mma_v2(gl.convert_layout(high, LEFT), ones, acc)
    return mma_v2(gl.convert_layout(to_bfloat16(rest), LEFT), ones, acc)


# --- the chain -------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_rows():
    """Return shared-memory buffers for one chunk: rows of w, r, a, b and do, and the matrix that holds N and U."""
    s_w = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_r = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_a = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_b = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_do = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_A = gl.allocate_shared_memory(gl.float32, [16, 16], PLAIN)
    return s_w, s_r, s_a, s_b, s_do, s_A


@gluon.jit
def allocate_operands():
    """Return shared-memory buffers for one chunk's operands: r*, a*, b*, N^T and U, each split, and e^{total}."""
    r_high = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    r_low = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    a_high = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    a_low = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    b_high = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    b_low = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    N_high = gl.allocate_shared_memory(gl.bfloat16, [16, 16], SWIZZLED_16)
    N_low = gl.allocate_shared_memory(gl.bfloat16, [16, 16], SWIZZLED_16)
    U_high = gl.allocate_shared_memory(gl.bfloat16, [16, 16], SWIZZLED_16)
    U_low = gl.allocate_shared_memory(gl.bfloat16, [16, 16], SWIZZLED_16)
    s_total = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    return r_high, r_low, a_high, a_low, b_high, b_low, N_high, N_low, U_high, U_low, s_total


@gluon.jit
def allocate_results():
    """Return shared-memory buffers in which D and y of one chunk wait to be written to global memory."""
    s_D = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    s_y = gl.allocate_shared_memory(gl.float16, [16, 64], SWIZZLED)
    return s_D, s_y


@gluon.jit
def fetch(buffers, r, w, a, b, do, scores, base, i, rows, H: gl.constexpr):
    """Start the asynchronous copy of a chunk's rows, and of its N and U, to shared memory. base: offset of the first
    row in r. i: index of the chunk and head in `scores`. rows: number of rows to read; the others become zeros."""
    s_w, s_r, s_a, s_b, s_do, s_A = buffers
    o_t = gl.arange(0, 16, gl.SliceLayout(1, ROWS))[:, None]
    o_d = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    o, m = base + o_t * (H * 64) + o_d, o_t < rows
    async_copy.async_copy_global_to_shared(s_w, w + o, mask=m)
    async_copy.async_copy_global_to_shared(s_r, r + o, mask=m)
    async_copy.async_copy_global_to_shared(s_a, a + o, mask=m)
    async_copy.async_copy_global_to_shared(s_b, b + o, mask=m)
    async_copy.async_copy_global_to_shared(s_do, do + o, mask=m)
    o_i = gl.arange(0, 16, gl.SliceLayout(1, SQUARE))[:, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, SQUARE))[None, :]
    p_A = scores + i * A_SIZE + A_SIZE // 2 + o_i * 16 + o_j
    async_copy.async_copy_global_to_shared(s_A, p_A, mask=(o_i >= 0) & (rows > 0))
    async_copy.commit_group()


@gluon.jit
def prepare(buffers, operands, scale):
    """Compute a chunk's `operands` from its `buffers`: r*, a*, b*, N^T and U, each split, and e^{total}. Return do^T as
    a left operand."""
    # Tiles [16, 64] are not transposed here: each warp holds 16 channels as columns.
    COLUMNS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    COLUMNS_LEFT: gl.constexpr = gl.DotOperandLayout(0, COLUMNS, 2)
    COLUMNS_RIGHT: gl.constexpr = gl.DotOperandLayout(1, COLUMNS, 2)
    s_w, s_r, s_a, s_b, s_do, s_A = buffers
    r_high, r_low, a_high, a_low, b_high, b_low, N_high, N_low, U_high, U_low, s_total = operands
    t = gl.arange(0, 16, gl.SliceLayout(1, COLUMNS_LEFT))[:, None]
    u = gl.arange(0, 16, gl.SliceLayout(0, COLUMNS_LEFT))[None, :]
    b_w = clamped_decay(s_w.load(COLUMNS_RIGHT))
    zero = gl.zeros([16, 64], gl.float32, COLUMNS)
    upto = mma_v2((u <= t).to(gl.float32).to(gl.bfloat16), b_w, zero)
    before = mma_v2((u < t).to(gl.float32).to(gl.bfloat16), b_w, zero)
    after = mma_v2((u > t).to(gl.float32).to(gl.bfloat16), b_w, zero)
    total = mma_v2((u + t >= 0).to(gl.float32).to(gl.bfloat16), b_w, zero)
    s_total.store(exp(gl.max(total, 0)))  # all rows are equal
    store_split(r_high, r_low, s_r.load(COLUMNS).to(gl.float32) * (exp(upto) * scale))
    store_split(a_high, a_low, s_a.load(COLUMNS).to(gl.float32) * exp(before))
    store_split(b_high, b_low, s_b.load(COLUMNS).to(gl.float32) * exp(after))
    i = gl.arange(0, 16, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, SQUARE))[None, :]
    b_A = s_A.load(SQUARE)
    store_split(N_high, N_low, gl.where(j >= i, b_A, 0.0))
    store_split(U_high, U_low, gl.where(j < i, b_A, gl.where(j == i, 1.0, 0.0)))
    return s_do.permute([1, 0]).load(LEFT)


@gluon.jit
def store_band_maxima(s_largest, b_D):
    """Store max |D| of each warp's band, [4]. After the next barrier every warp takes the maximum of the four."""
    s_largest.store(gl.max(gl.max(gl.abs(gl.reshape(b_D, (4, 16, 64))), 2), 1))


@gluon.jit
def write_results(D, y, results, at, there):
    """Copy D and y of a chunk from shared to global memory, to index `at` of D and y, if `there` is true."""
    s_D, s_y = results
    o_t = gl.arange(0, 16, gl.SliceLayout(1, ROWS))[:, None]
    o_v = gl.arange(0, 64, gl.SliceLayout(1, ROWS))[:, None]
    o_d = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    gl.store(D + at * D_SIZE + o_v * 64 + o_d, s_D.load(ROWS), mask=(o_v >= 0) & there)
    gl.store(y + at * Y_SIZE + o_t * 64 + o_d, s_y.load(ROWS), mask=(o_t >= 0) & there)


@gluon.jit
def walk_chunk(
    b_D, b_do, buffers, refilled, operands, next_operands, s_largest, next_largest, results, results_before,
    r, w, a, b, do, scores, D, y, units, scale, base, i, rows, at, not_last, H: gl.constexpr,
):  # fmt: skip
    """Walk one chunk, as one iteration of a software pipeline. Chunks are walked from last to first.

    previous chunk   write its D and y from `results_before` to global memory, at index at + 1, if not_last
    this chunk       compute y and the D entering it; store y and the D leaving it in `results`, in their units
    next chunk       compute `next_operands` from its rows in `buffers`
    the one after    start to copy its rows into `refilled`; base, i and rows, as in `fetch`, are those of this one

    b_D, b_do: D^T leaving this chunk and its do^T. Return D^T entering this chunk and do^T of the next.
    """
    r_high, r_low, a_high, a_low, b_high, b_low, N_high, N_low, U_high, U_low, s_total = operands
    # Also a barrier: rows and operands are complete, and no warp still reads a buffer that is overwritten below.
    async_copy.wait_group(0)
    fetch(refilled, r, w, a, b, do, scores, base, i, rows, H)
    # x = D b*, y = N^T do + U^T x, all transposed.
    D_high, D_low = split(b_D)
    D_h, D_l = gl.convert_layout(D_high, LEFT), gl.convert_layout(D_low, LEFT)
    zero = gl.zeros([64, 16], gl.float32, BAND)
    b_h, b_l = b_high.permute([1, 0]).load(RIGHT), b_low.permute([1, 0]).load(RIGHT)
    b_x = mma_v2(D_h, b_h, zero) + mma_v2(D_h, b_l, mma_v2(D_l, b_h, zero))
    N_h, N_l = N_high.permute([1, 0]).load(RIGHT), N_low.permute([1, 0]).load(RIGHT)
    of_do = mma_v2(b_do, N_l, mma_v2(b_do, N_h, zero))
    b_D *= s_total.load(gl.SliceLayout(0, BAND))[None, :]
    b_D = mma_v2(b_do, r_high.load(RIGHT), b_D)
    b_D = mma_v2(b_do, r_low.load(RIGHT), b_D)
    x_high, x_low = split(b_x)
    x_h, x_l = gl.convert_layout(x_high, LEFT), gl.convert_layout(x_low, LEFT)
    U_h, U_l = U_high.load(RIGHT), U_low.load(RIGHT)
    b_y = mma_v2(x_h, U_h, of_do) + mma_v2(x_h, U_l, mma_v2(x_l, U_h, zero))
    y_high, y_low = split(b_y)
    y_h, y_l = gl.convert_layout(y_high, LEFT), gl.convert_layout(y_low, LEFT)
    a_h, a_l = a_high.load(RIGHT), a_low.load(RIGHT)
    b_D = mma_v2(y_l, a_h, b_D)
    b_D = mma_v2(y_h, a_l, b_D)
    b_D = mma_v2(y_h, a_h, b_D)
    store_band_maxima(next_largest, b_D)
    # The rest is off the critical path: the next chunk does not depend on it.
    write_results(D, y, results_before, at + 1, not_last)
    s_D, s_y = results
    unit = unit_of(gl.max(s_largest.load(FOUR), 0))
    s_D.store(to_half((D_high.to(gl.float32) + D_low.to(gl.float32)) * inverse(unit)))
    gl.store(units + at * UNITS_SIZE + 64, unit)
    unit = unit_of(gl.max(gl.abs(b_y), 1))
    s_y.permute([1, 0]).store(to_half(b_y * inverse(unit)[:, None]))
    gl.store(units + at * UNITS_SIZE + gl.arange(0, 64, gl.SliceLayout(1, BAND)), unit)
    return b_D, prepare(buffers, next_operands, scale)


@_gluon_kernel
def chain_kernel(
    r, w, a, b, do, scores, carried, first, D, y, units, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, skipped, chunks,
    H: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute D and y of one segment of a part: of its chunks skipped + chunks - 1 down to `skipped`.

    In `carried`, replace the gradient of the state leaving the segment by that of the state entering it. Store D
    leaving each chunk, and y, with their units. The segment with skipped = 0 in a sequence's first part also stores the
    gradient of the initial state in `first`. In registers: D^T.

    r, w, a, b, do [B, T, H, 64] bfloat16, scores [all chunks, H, 2, 16, 16]
    carried [parts, H, 64, 64], first [N, H, 64, 64]
    D [parts, H, chunks, 64 (v), 64 (k)], y [parts, H, chunks, 16, 64], both float16 in units of `units`
    units [parts, H, chunks, 65]: of the 64 channels of y, and of D
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]
    skipped, chunks: the number of chunks of the part before the segment and in it, both even
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    count = gl.minimum(gl.maximum(count - skipped, 0), chunks)
    # Two chunks per iteration. If their number is odd, the first chunk walked has no rows and changes nothing.
    pairs = (count + 1) // 2
    last = skipped + 2 * pairs - 1
    rows = (end - begin - last * C).to(gl.int32)
    base = ((begin + last * C) * H + i_h) * 64
    i = ((first_chunk + last) * H + i_h).to(gl.int64)
    at = gl.program_id(0).to(gl.int64) * chunks + 2 * pairs - 1
    o_v = gl.arange(0, 64, gl.SliceLayout(1, BAND))[:, None]
    o_k = gl.arange(0, 64, gl.SliceLayout(0, BAND))[None, :]
    p_D = carried + gl.program_id(0).to(gl.int64) * D_SIZE + o_k * 64 + o_v
    b_D = gl.load(p_D)
    # Double buffers: while one chunk is processed, the next is prepared and the one after that is copied.
    buffers_0, buffers_1 = allocate_rows(), allocate_rows()
    operands_0, operands_1 = allocate_operands(), allocate_operands()
    results_0, results_1 = allocate_results(), allocate_results()
    largest_0 = gl.allocate_shared_memory(gl.float32, [4], FLAT)
    largest_1 = gl.allocate_shared_memory(gl.float32, [4], FLAT)
    fetch(buffers_0, r, w, a, b, do, scores, base, i, gl.where(count > 0, rows, 0), H)
    fetch(buffers_1, r, w, a, b, do, scores, base - C * H * 64, i - H, gl.where(count > 0, rows + C, 0), H)
    async_copy.wait_group(1)
    b_do = prepare(buffers_0, operands_0, scale)
    store_band_maxima(largest_0, b_D)
    for n in range(0, pairs):
        base -= 2 * C * H * 64
        i -= 2 * H
        rows = gl.where(n + 1 < pairs, rows + 2 * C, -C)  # no chunk is left to fetch after the last pair
        b_D, b_do = walk_chunk(
            b_D, b_do, buffers_1, buffers_0, operands_0, operands_1, largest_0, largest_1, results_0, results_1,
            r, w, a, b, do, scores, D, y, units, scale, base, i, rows, at, n > 0, H,
        )  # fmt: skip
        b_D, b_do = walk_chunk(
            b_D, b_do, buffers_0, buffers_1, operands_1, operands_0, largest_1, largest_0, results_1, results_0,
            r, w, a, b, do, scores, D, y, units, scale, base - C * H * 64, i - H, rows + C, at - 1, True, H,
        )  # fmt: skip
        at -= 2
    async_copy.wait_group(0)  # also a barrier: the last results are in shared memory
    write_results(D, y, results_1, at + 1, pairs > 0)
    gl.store(p_D, b_D)
    if is_first & (skipped == 0):
        gl.store(first + (i_n * H + i_h).to(gl.int64) * D_SIZE + o_k * 64 + o_v, b_D)


# --- gradients -------------------------------------------------------------------------------------------------------


@_gluon_kernel
def grads_kernel(
    r, w, k, v, a, b, do, states, v2, units, scores, mild, D, y, d_units, dr, dw, dk, dv, da, db, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, skipped, chunks,
    H: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of chunk skipped + program_id(1) of a part, if it is mild; otherwise do nothing.

    r, w, k, a, b, v, do and dr to db [B, T, H, 64] bfloat16, scores [all chunks, H, 2, 16, 16], mild [all chunks, H]
    states [all chunks, H, 64 (v), 64 (k)], v2 [all chunks, H, 16, 64], both float16 in units of `units`
    units [all chunks, H, 65]: of the 64 channels of v2, and of the state
    D, y, d_units [parts, H, chunks, ...]: the D, y and units that `chain_kernel` stored
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    c = skipped + gl.program_id(1)
    if c >= count:
        return
    i = ((first_chunk + c) * H + i_h).to(gl.int64)
    if gl.load(mild + i) == 0:
        return
    SMALL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    SMALL_LEFT: gl.constexpr = gl.DotOperandLayout(0, SMALL, 2)
    SMALL_RIGHT: gl.constexpr = gl.DotOperandLayout(1, SMALL, 2)
    BATCH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    BATCH_LEFT: gl.constexpr = gl.DotOperandLayout(0, BATCH, 2)
    BATCH_RIGHT: gl.constexpr = gl.DotOperandLayout(1, BATCH, 2)
    TENSORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    SCORES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 16, 1], [1, 1, 4], [2, 1, 0])

    start = begin + c * C
    rows = (end - start).to(gl.int32)
    base = (start * H + i_h) * 64
    at = gl.program_id(0).to(gl.int64) * chunks + gl.program_id(1)

    # Copy rows, S and D asynchronously. The buffers of rows hold results later: s_R dr and da, s_E dk and db, s_w dv.
    o_t = gl.arange(0, 16, gl.SliceLayout(1, ROWS))[:, None]
    o_v = gl.arange(0, 64, gl.SliceLayout(1, ROWS))[:, None]
    o_d = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    o, m = base + o_t * (H * 64) + o_d, o_t < rows
    s_w = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_R = gl.allocate_shared_memory(gl.bfloat16, [32, 64], SWIZZLED)
    s_E = gl.allocate_shared_memory(gl.bfloat16, [32, 64], SWIZZLED)
    s_S = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    s_D = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    s_dw = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    async_copy.async_copy_global_to_shared(s_w, w + o, mask=m)
    async_copy.async_copy_global_to_shared(s_R.slice(0, 16), r + o, mask=m)
    async_copy.async_copy_global_to_shared(s_R.slice(16, 16), a + o, mask=m)
    async_copy.async_copy_global_to_shared(s_E.slice(0, 16), k + o, mask=m)
    async_copy.async_copy_global_to_shared(s_E.slice(16, 16), b + o, mask=m)
    async_copy.async_copy_global_to_shared(s_D, D + at * D_SIZE + o_v * 64 + o_d)
    async_copy.async_copy_global_to_shared(s_S, states + i * D_SIZE + o_v * 64 + o_d)
    async_copy.commit_group()

    # F = [v; v2] and G = [do; y] in float16: each of v, v2, do and y is loaded by one warp and gets one unit. In memory
    # v and do are bfloat16; v2 and y are float16 with a unit per channel.
    n = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TENSORS)))
    t4 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TENSORS)))
    d4 = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, TENSORS)))
    n = gl.expand_dims(gl.expand_dims(n, 1), 2)
    t4 = gl.expand_dims(gl.expand_dims(t4, 0), 2)
    d4 = gl.expand_dims(gl.expand_dims(d4, 0), 1)
    is_input, of_G = n % 2 == 0, n >= 2
    BITS: gl.constexpr = gl.pointer_type(gl.int16)
    p_input = gl.where(of_G, do.to(BITS, bitcast=True), v.to(BITS, bitcast=True)) + base
    p_half = gl.where(of_G, y.to(BITS, bitcast=True) + at * Y_SIZE, v2.to(BITS, bitcast=True) + i * Y_SIZE)
    p_four = gl.where(is_input, p_input, p_half) + t4 * gl.where(is_input, H * 64, 64) + d4
    p_unit = gl.where(of_G, d_units + at * UNITS_SIZE, units + i * UNITS_SIZE) + d4
    b_four = gl.load(p_four, mask=((t4 < rows) | (is_input == 0)) & (d4 >= 0), other=0)
    unit4 = gl.load(p_unit, mask=(is_input == 0) & (d4 >= 0), other=1.0)
    # Scores of the keys k: [2, 16, 16] by read vector (r, a), by reading token and by key token.
    o_r = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))
    o_r = gl.expand_dims(gl.expand_dims(o_r, 1), 2)
    o_i = gl.expand_dims(gl.expand_dims(o_i, 0), 2)
    o_j = gl.expand_dims(gl.expand_dims(o_j, 0), 1)
    p_A = scores + i * A_SIZE + gl.where(o_r == 0, o_j * 16 + o_i, o_i * 16 + o_j)
    b_A = gl.load(p_A, mask=o_i >= o_j + o_r, other=0.0)
    b_k = gl.load(k + o, mask=m, other=0.0).to(gl.float32)  # only for its units
    unit_S = gl.load(units + i * UNITS_SIZE + 64)
    unit_D = gl.load(d_units + at * UNITS_SIZE + 64)

    s_FG = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    s_unit = gl.allocate_shared_memory(gl.float32, [4], FLAT)
    s_A_high = gl.allocate_shared_memory(gl.float16, [32, 16], SWIZZLED_16)
    s_A_low = gl.allocate_shared_memory(gl.float16, [32, 16], SWIZZLED_16)
    s_A_unit = gl.allocate_shared_memory(gl.float32, [32], FLAT)
    s_k_unit = gl.allocate_shared_memory(gl.float32, [16], FLAT)
    unit = unit_of(gl.max(gl.abs(b_A), 1))
    A_high, A_low = halves(b_A * gl.expand_dims(inverse(unit), 1))
    s_A_high.store(gl.reshape(A_high, (32, 16)))
    s_A_low.store(gl.reshape(A_low, (32, 16)))
    s_A_unit.store(gl.reshape(unit, (32,)))
    s_k_unit.store(unit_of(gl.max(gl.abs(b_k), 1)))
    by_input = (b_four.to(gl.int32) << 16).to(gl.float32, bitcast=True)
    by_half = b_four.to(gl.float16, bitcast=True).to(gl.float32)
    b_four = gl.where(is_input, by_input, by_half) * unit4
    unit = unit_of(gl.max(gl.max(gl.abs(b_four), 2), 1))
    b_four *= gl.expand_dims(gl.expand_dims(inverse(unit), 1), 2)
    s_FG.store(gl.reshape(to_half(b_four), (64, 64)))
    s_unit.store(unit)
    async_copy.wait_group(0)  # also a barrier: the copies and the stores above are complete

    unit4, n = s_unit.load(FOUR), gl.arange(0, 4, FOUR)
    unit_v, unit_v2 = gl.sum(gl.where(n == 0, unit4, 0.0), 0), gl.sum(gl.where(n == 1, unit4, 0.0), 0)
    unit_do, unit_y = gl.sum(gl.where(n == 2, unit4, 0.0), 0), gl.sum(gl.where(n == 3, unit4, 0.0), 0)
    s_F, s_G = s_FG.slice(0, 32), s_FG.slice(32, 32)
    b_P = gl.zeros([32, 32], gl.float32, SMALL)
    b_P = mma_v2(s_G.load(SMALL_LEFT), s_F.permute([1, 0]).load(SMALL_RIGHT), b_P)
    p_i = gl.arange(0, 32, gl.SliceLayout(1, SMALL))
    p_j = gl.arange(0, 32, gl.SliceLayout(0, SMALL))
    ahead = (p_i % 16)[:, None] - (p_j % 16)[None, :]
    visible = (ahead > 0) | ((ahead == 0) & (p_i < 16)[:, None])
    b_P *= gl.where(p_i < 16, unit_do, unit_y)[:, None] * gl.where(p_j < 16, unit_v, unit_v2)[None, :]
    P_high, P_low = split(gl.where(visible, b_P, 0.0))
    s_P_high = gl.allocate_shared_memory(gl.bfloat16, [32, 32], SWIZZLED_32)
    s_P_low = gl.allocate_shared_memory(gl.bfloat16, [32, 32], SWIZZLED_32)
    s_P_high.store(P_high)
    s_P_low.store(P_low)

    # From here on tiles are transposed, [64 channels, *], in bands. Decays are relative to the chunk's middle.
    t, u = operand_indices(32)
    half = (t < 8).to(gl.float32)
    upto = gl.where(u < 16, (t <= u).to(gl.float32), (t < u % 16).to(gl.float32))
    b_w = s_w.permute([1, 0]).load(LEFT)
    zero = gl.zeros([64, 32], gl.float32, BAND)
    zero_16 = gl.zeros([64, 16], gl.float32, BAND)
    read = mma_v2(b_w, (upto - half).to(gl.bfloat16), zero)
    m_j = gl.arange(0, 32, gl.SliceLayout(0, BAND))[None, :]
    m_c = gl.arange(0, 16, gl.SliceLayout(0, BAND))[None, :]
    mid = -gl.sum(gl.where(m_j == 16, read, 0.0), 1)
    rest = gl.sum(gl.where(m_j == 15, read, 0.0), 1)
    of_key = -sides(read)[0]
    to_end = exp(of_key + rest[:, None])
    read = exp(read) * gl.where(m_j < 16, scale, 1.0)
    key = twice(exp(of_key))
    E = gl.convert_layout(s_E.permute([1, 0]).load(LEFT), BAND).to(gl.float32)
    unit_k = s_k_unit.load(gl.SliceLayout(0, BAND))[None, :]
    K_high, K_low = halves(sides(E)[0] * inverse(unit_k) * to_end)
    s_K_high = gl.allocate_shared_memory(gl.float16, [64, 16], SWIZZLED_16)
    s_K_low = gl.allocate_shared_memory(gl.float16, [64, 16], SWIZZLED_16)
    s_K_high.store(K_high)
    s_K_low.store(K_low)
    from_D, from_S = exp(rest) * unit_D, exp(mid) * unit_S

    # The terms of D in the gradients of keys; then A_k^T G, for dv.
    D_k = s_D.permute([1, 0]).load(LEFT)
    x_keys = mma_v2(D_k, s_F.permute([1, 0]).load(RIGHT), zero)
    x_keys *= gl.where(m_j < 16, (from_D * unit_v)[:, None], (from_D * unit_v2)[:, None])
    G_do = s_FG.slice(32, 16).permute([1, 0]).load(LEFT)
    G_y = s_FG.slice(48, 16).permute([1, 0]).load(LEFT)
    by_do = mma_v2(G_do, s_A_high.slice(0, 16).load(RIGHT), zero_16)
    by_do = mma_v2(G_do, s_A_low.slice(0, 16).load(RIGHT), by_do)
    by_y = mma_v2(G_y, s_A_high.slice(16, 16).load(RIGHT), zero_16)
    by_y = mma_v2(G_y, s_A_low.slice(16, 16).load(RIGHT), by_y)
    by_do *= unit_do * s_A_unit.slice(0, 16).load(gl.SliceLayout(0, BAND))[None, :]
    by_y *= unit_y * s_A_unit.slice(16, 16).load(gl.SliceLayout(0, BAND))[None, :]
    R_high, R_low = split(gl.convert_layout(s_R.permute([1, 0]).load(LEFT), BAND).to(gl.float32) * read)
    E_high, E_low = split(E * key)

    # The loads below come after a barrier, so that P and k* are complete: dv first, then keys, then reads.
    D_v = s_D.load(LEFT)
    b_dv = mma_v2(D_v, s_K_high.load(RIGHT), zero_16)
    b_dv = mma_v2(D_v, s_K_low.load(RIGHT), b_dv)
    b_dv = b_dv * (unit_D * unit_k) + (by_do + by_y)
    s_w.permute([1, 0]).store(to_bfloat16(b_dv))

    P_high, P_low = s_P_high.load(RIGHT), s_P_low.load(RIGHT)
    R_h, R_l = gl.convert_layout(R_high, LEFT), gl.convert_layout(R_low, LEFT)
    d_keys = mma_v2(R_l, P_low, zero)
    d_keys = mma_v2(R_h, P_low, d_keys)
    d_keys = mma_v2(R_l, P_high, d_keys)
    d_keys = mma_v2(R_h, P_high, d_keys)
    s_E.permute([1, 0]).store(to_bfloat16((d_keys + x_keys) * key))
    keys = E_high.to(gl.float32) + E_low.to(gl.float32)
    of_k, of_b = sides(keys * d_keys)
    of_keys = of_k + of_b
    by_k, by_b = sides(keys * x_keys)
    t, u = operand_indices(16)
    b_dw = sums_along(by_k + by_b, t < u, False)

    S_k = s_S.permute([1, 0]).load(LEFT)
    d_reads = mma_v2(S_k, s_G.permute([1, 0]).load(RIGHT), zero)
    d_reads *= gl.where(m_j < 16, (from_S * unit_do)[:, None], (from_S * unit_y)[:, None])
    # sum_v S D, per channel of k, is the diagonal of S D^T; each band computes its own block [16, 16] of it.
    S_k = s_S.permute([1, 0]).reshape([4, 16, 64]).load(BATCH_LEFT)
    D_k = s_D.permute([1, 0]).reshape([4, 16, 64]).permute([0, 2, 1]).load(BATCH_RIGHT)
    SD = mma_v2(S_k, D_k, gl.zeros([4, 16, 16], gl.float32, BATCH))
    s_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))
    s_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))
    on_diagonal = gl.expand_dims(gl.expand_dims(s_i, 0), 2) == gl.expand_dims(gl.expand_dims(s_j, 0), 1)
    SD = gl.reshape(gl.sum(gl.where(on_diagonal, SD, 0.0), 2), (64,))
    SD = gl.convert_layout(SD, gl.SliceLayout(1, BAND)) * (from_D * from_S)
    P_high, P_low = s_P_high.permute([1, 0]).load(RIGHT), s_P_low.permute([1, 0]).load(RIGHT)
    E_h, E_l = gl.convert_layout(E_high, LEFT), gl.convert_layout(E_low, LEFT)
    d_reads = mma_v2(E_l, P_low, d_reads)
    d_reads = mma_v2(E_h, P_low, d_reads)
    d_reads = mma_v2(E_l, P_high, d_reads)
    d_reads = mma_v2(E_h, P_high, d_reads)
    of_r, of_a = sides((R_high.to(gl.float32) + R_low.to(gl.float32)) * d_reads)
    b_dw += sums_along(of_r + of_a - of_keys, t >= u, True)
    b_dw += SD[:, None] - of_a  # a excludes its own token's decay
    b_dw = gl.where((m_c == 0) & (unit_S < 2.0**-118), 0.0, b_dw)  # as `is_zero`

    s_R.permute([1, 0]).store(to_bfloat16(d_reads * read))
    s_dw.permute([1, 0]).store(to_bfloat16(b_dw))
    gl.store(dr + o, s_R.slice(0, 16).load(ROWS), mask=m)
    gl.store(da + o, s_R.slice(16, 16).load(ROWS), mask=m)
    gl.store(dk + o, s_E.slice(0, 16).load(ROWS), mask=m)
    gl.store(db + o, s_E.slice(16, 16).load(ROWS), mask=m)
    gl.store(dw + o, s_dw.load(ROWS), mask=m)
    gl.store(dv + o, s_w.load(ROWS), mask=m)


@kernel
def steep_grads_kernel(
    r, w, k, v, a, b, do, states, v2, units, scores, mild, D, d_units, dr, dw, dk, dv, da, db, scale,
    T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, skipped, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, VISITED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of the chunks of a segment that are not mild. A program checks VISITED consecutive chunks.
    Shapes as in `grads_kernel`, with K = V = 64."""
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    place = tl.program_id(1) * VISITED
    left = tl.minimum(count - skipped, chunks) - place
    i = ((first_chunk + skipped + place) * H + i_h).to(tl.int64)
    o = tl.arange(0, VISITED)
    if tl.min(tl.load(mild + i + o * H, mask=o < left, other=1.0), 0) > 0:
        return
    o_k, o_v = tl.arange(0, BK)[None, :], tl.arange(0, BV)[:, None]
    for _ in tl.range(0, tl.minimum(left, VISITED), disable_licm=True):
        if tl.load(mild + i) == 0:
            at = tl.program_id(0).to(tl.int64) * chunks + place
            unit = tl.load(d_units + at * (BV + 1) + BV)
            b_D = tl.load(D + at * (K * V) + o_v * K + o_k).to(tl.float32) * unit
            chunk_grads(
                r, w, k, v, a, b, do, states, v2, units, scores, dr, dw, dk, dv, da, db, bands(b_D),
                tl.zeros([BK], dtype=tl.float32), scale, begin + (skipped + place) * C, end, i_h, i, H, K, V, C, BK,
                BV, LEVELS, False,
            )  # fmt: skip
        place += 1
        i += H


def gradients(plan, inputs, do, saved, grads, last, first, scale, where) -> None:
    """Launch the kernels, segment by segment: write the gradients of `inputs` to `grads`, and those of the initial
    states to `first`.

    plan: the `_Plan` of `fused_chunk_triton`; where: its arguments of `locate_program` for parts.
    inputs: r, w, k, v, a, b; grads: dr, dw, dk, dv, da, db; do: the gradient of o. All [B, T, H, 64] bfloat16.
    saved: states, v2, units, scores and mild, as the forward kernels stored them. first [N, H, 64, 64] float32.
    last [parts, H, 64, 64]: the gradients of the states leaving the parts, or None for zeros.
    """
    r, w, k, v, a, b = inputs
    *_, scores, mild = saved
    programs = plan.parts * plan.H
    segments = cdiv(plan.L, max(SHORTEST_SEGMENT, MOST_AT_ONCE // max(1, programs)))
    chunks = 2 * cdiv(plan.L, 2 * segments)
    places = programs * chunks
    D, y = (r.new_empty(places * size.value, dtype=torch.float16) for size in (D_SIZE, Y_SIZE))
    d_units = first.new_empty(places * UNITS)
    carried = first.new_zeros(programs * D_SIZE.value) if last is None else last.to(torch.float32, copy=True)

    def options(kernel: str) -> dict:
        return dict(
            H=plan.H, PACKED=plan.packed, num_warps=NUM_WARPS, maxnreg=TABLE[f"rwkv7.fused.{kernel}", "16-bit"].maxnreg
        )

    for segment in reversed(range(segments)):
        place = *where, segment * chunks, chunks
        chain_kernel[(programs,)](
            r, w, a, b, do, scores, carried, first, D, y, d_units, scale, *place, **options("chain")
        )  # fmt: skip
        grads_kernel[(programs, chunks)](
            *inputs, do, *saved, D, y, d_units, *grads, scale, *place, **options("grads.mild")
        )  # fmt: skip
        steep_grads_kernel[(programs, cdiv(chunks, VISITED))](
            *inputs, do, *saved, D, d_units, *grads, scale, *place, V=plan.V, BV=CHANNELS, LEVELS=LEVELS,
            VISITED=VISITED, PACKED=plan.packed, **launch_options("rwkv7.fused.grads.dyadic", r),
        )  # fmt: skip
