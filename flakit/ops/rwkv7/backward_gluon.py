"""RWKV7's backward on Hopper GPUs, in Gluon: the part of `fused_chunk_triton.backward_kernel` that is sequential, and
the rest, which is not. `fused_chunk_triton` explains the symbols.

`chain_kernel` walks a part of a sequence from its last chunk to its first and computes only D, the gradient of the
state, and y. It stores both for `grads_kernel`, which computes all gradients of a mild chunk, each chunk by a program
of its own; `steep_grads_kernel` computes those of the other chunks. To bound the memory of D and y, the kernels take
turns on segments of a part, the last segment first.

Gluon places tiles in registers and in shared memory as written here, which Triton's compiler would not: with this
program, split in the same way, it is slower than the one kernel (data/tuning.md). A warp holds a band of 16 channels,
as in `common.bands_triton`. Triton inserts the barriers, at a `wait_group` and wherever warps exchange a buffer.

**Units.** D, y, the rows of F and G, k and its scores are operands in float16, with the range of float32: each is
divided by a power of two, its unit, such that its largest element is about 2^13. Elements 2^27 times smaller still keep
all bits of float16. The unit of D and of F and G is one for a tile; of y it is one for each channel; of k and of its
scores it is one for each token k. What is split in two bfloat16 numbers in `fused_chunk_triton` needs no unit.
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
"""The layouts below are those of four warps."""
MOST_AT_ONCE = 8192
"""Chunks and heads whose D and y are in memory at once: 86 MB."""
SHORTEST_SEGMENT = 8
"""Chunks in the shortest segment of a part."""
VISITED = 16
"""Chunks that a program of `steep_grads_kernel` visits."""


class _Source(Translated, GluonASTSource):
    """What Triton compiles."""


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
"""A product with a band of 16 rows for each warp; LEFT and RIGHT are its operands."""
LEFT = tl.constexpr(gl.DotOperandLayout(0, BAND.value, 2))
RIGHT = tl.constexpr(gl.DotOperandLayout(1, BAND.value, 2))
ROWS = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of 64 channels as memory has them, 16 bytes a thread."""
SWIZZLED = tl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Rows of 64 numbers of 16 bits in shared memory; rows of 32 and of 16 follow."""
SWIZZLED_32 = tl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
SWIZZLED_16 = tl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
PLAIN = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FOUR = tl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""All of four numbers in every thread."""
SQUARE = tl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
"""A matrix [16, 16]."""


# --- operands --------------------------------------------------------------------------------------------------------


@gluon.jit
def truncated(x):
    """Return the first 8 mantissa bits of float32 x as bfloat16, and the rest of x, as in `blocks_triton`."""
    bits = x.to(gl.int32, bitcast=True)
    high = (bits & -65536).to(gl.float32, bitcast=True)
    rest = gl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, high], gl.float32, True, 1)
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [bits], gl.bfloat16, True, 2), rest


@gluon.jit
def to_bfloat16(x):
    """Round float32 x to bfloat16, two numbers an instruction."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)


@gluon.jit
def to_half(x):
    """Round float32 x to float16, two numbers an instruction."""
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
    high, low = split(x)
    s_high.store(high)
    s_low.store(low)


@gluon.jit
def unit_of(largest):
    """Return the power of two of which `largest` has at least 2^13 and less than 2^14; at least 2^-119. Of infinity it
    is NaN: finite numbers beside it would be lost."""
    exponent = largest.to(gl.int32, bitcast=True) & 0x7F800000
    unit = gl.maximum(exponent, 0x0A800000) - 0x06800000
    return gl.where(exponent == 0x7F800000, 0x7FC00000, unit).to(gl.float32, bitcast=True)


@gluon.jit
def inverse(unit):
    """Return 1 / unit of a power of two."""
    return (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def sides(x):
    """Return the left and the right half of the columns of x, each a BAND."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, (N, 2, M)), (0, 2, 1)))
    return gl.convert_layout(left, BAND, assert_trivial=True), gl.convert_layout(right, BAND, assert_trivial=True)


@gluon.jit
def twice(x):
    """Return the columns of x, a BAND, twice, side by side."""
    both = gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))
    return gl.convert_layout(both, BAND, assert_trivial=True)


@gluon.jit
def operand_indices(COLUMNS: gl.constexpr):
    """Return the row and the column of each element of a right operand [16, COLUMNS]."""
    i = gl.arange(0, C, gl.SliceLayout(1, RIGHT))[:, None]
    return i, gl.arange(0, COLUMNS, gl.SliceLayout(0, RIGHT))[None, :]


@gluon.jit
def sums_along(x, ones, ALL_BITS: gl.constexpr):
    """Return x @ ones of two parts of float32 x, or of all three if ALL_BITS, as in `blocks_triton`."""
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
    """Return buffers for a chunk's rows of w, r, a, b and do, and for N and U."""
    s_w = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_r = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_a = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_b = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_do = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SWIZZLED)
    s_A = gl.allocate_shared_memory(gl.float32, [16, 16], PLAIN)
    return s_w, s_r, s_a, s_b, s_do, s_A


@gluon.jit
def allocate_operands():
    """Return buffers for a chunk's operands: r*, a*, b*, N^T and U, split, and e^{total}."""
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
    """Return buffers for D and y, on their way to memory."""
    s_D = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    s_y = gl.allocate_shared_memory(gl.float16, [16, 64], SWIZZLED)
    return s_D, s_y


@gluon.jit
def fetch(buffers, r, w, a, b, do, scores, base, i, rows, H: gl.constexpr):
    """Begin to copy a chunk's rows and scores to shared memory. base: of its first row; rows: the number of its rows,
    beyond which are zeros; zeros alone if it is not positive."""
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
    """Decay a chunk's rows and split them; return do^T as a left operand."""
    # A band of 16 channels for each warp, in columns.
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
    s_total.store(exp(gl.max(total, 0)))  # all rows are the same
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
    """Store the largest absolute value of each band, whose maximum all warps compute after a barrier."""
    s_largest.store(gl.max(gl.max(gl.abs(gl.reshape(b_D, (4, 16, 64))), 2), 1))


@gluon.jit
def write_results(D, y, results, at, there):
    """Copy D and y of a chunk from shared memory to place `at`, if `there`."""
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
    """Walk one chunk: return the gradient of the state entering it, and do^T of the chunk to walk next.

    Prepare that chunk, whose rows are in `buffers`, and fetch the one after it into `refilled`: base, i and rows are
    its own. Copy the results of the chunk walked before to memory: it is at at + 1, if there is one, `not_last`.
    """
    r_high, r_low, a_high, a_low, b_high, b_low, N_high, N_low, U_high, U_low, s_total = operands
    async_copy.wait_group(0)  # and a barrier: rows and operands are there, and all have read what is written next
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
    # What the next chunk does not wait for.
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
    """Walk chunks skipped + chunks - 1 to `skipped` of a part of a head's sequence: replace the gradient of the state
    leaving them, in `carried`, by that of the state entering them, and store D leaving each chunk, and its y, at its
    place in the segment. If nothing is skipped, store the gradient of a sequence's initial state. In registers: D^T.

    r, w, a, b, do [B, T, H, 64], scores [chunks, H, 2, 16, 16], carried [parts, H, 64, 64], first [N, H, 64, 64]
    D [parts, H, chunks, 64 (v), 64 (k)], y [parts, H, chunks, 16, 64] float16, units [parts, H, chunks, 65]
    sequence_of_part [parts], parts_before, cu_seqlens, chunks_before [N + 1]; skipped and chunks are even
    """
    i_p, i_n, i_h, begin, end, first_chunk, count, is_first, is_last = locate_program(
        T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H, C, PACKED
    )
    count = gl.minimum(gl.maximum(count - skipped, 0), chunks)
    # Chunks are walked in pairs. The last chunk of an odd number has no rows and changes nothing.
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
    # Two of each: a chunk is walked while the next is prepared and the one after it fetched.
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
        rows = gl.where(n + 1 < pairs, rows + 2 * C, -C)  # before the segment: none, neither of this chunk nor the next
        b_D, b_do = walk_chunk(
            b_D, b_do, buffers_1, buffers_0, operands_0, operands_1, largest_0, largest_1, results_0, results_1,
            r, w, a, b, do, scores, D, y, units, scale, base, i, rows, at, n > 0, H,
        )  # fmt: skip
        b_D, b_do = walk_chunk(
            b_D, b_do, buffers_0, buffers_1, operands_1, operands_0, largest_1, largest_0, results_1, results_0,
            r, w, a, b, do, scores, D, y, units, scale, base - C * H * 64, i - H, rows + C, at - 1, True, H,
        )  # fmt: skip
        at -= 2
    async_copy.wait_group(0)  # and a barrier: the last results are in shared memory
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
    """Compute all gradients of chunk `skipped` + program_id(1) of a part, if it is mild.

    r, w, k, a, b, v, do and gradients [B, T, H, 64], scores [chunks, H, 2, 16, 16], mild [chunks, H]
    states [chunks, H, 64 (v), 64 (k)], v2 [chunks, H, 16, 64] float16, units [chunks, H, 65]
    D, y, d_units: as `chain_kernel` stored them
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

    # Rows, S and D by asynchronous copies. Buffers of rows later hold results: s_R dr and da, s_E dk and db, s_w dv.
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

    # F = [v; v2] and G = [do; y] as float16: v, v2, do, y, one a warp. v and do are bfloat16, v2 and y float16 with a
    # unit for each channel.
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
    # The scores of keys k by reads r and a, [2 (r, a), 16 (read), 16 (k)].
    o_r = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))
    o_r = gl.expand_dims(gl.expand_dims(o_r, 1), 2)
    o_i = gl.expand_dims(gl.expand_dims(o_i, 0), 2)
    o_j = gl.expand_dims(gl.expand_dims(o_j, 0), 1)
    p_A = scores + i * A_SIZE + gl.where(o_r == 0, o_j * 16 + o_i, o_i * 16 + o_j)
    b_A = gl.load(p_A, mask=o_i >= o_j + o_r, other=0.0)
    b_k = gl.load(k + o, mask=m, other=0.0).to(gl.float32)  # for its unit
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
    async_copy.wait_group(0)  # and a barrier: all that is stored above is there

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

    # From here on all is transposed, in bands of channels: decays about the chunk's middle.
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

    # What D gives to keys; A_k^T G.
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

    # Behind a barrier, after which P and k are there: dv, then keys, then reads.
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
    # The sums over v of S D are diagonals of products, one for each band.
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
    """Compute all gradients of the chunks of a part's segment that are not mild; a program visits VISITED chunks.
    Shapes as in `grads_kernel`."""
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
    """Compute the gradients of `inputs` r, w, k, v, a, b into `grads`, and those of the initial states into `first`.

    saved: states, v2, units, scores, mild. last [parts, H, K, V]: gradients of the states leaving the parts, or None.
    plan: a `fused_chunk_triton` plan; where: its arguments of `locate_program` for parts
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
