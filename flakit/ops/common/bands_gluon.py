"""Shared code of kernels in Gluon, Triton's language of explicit layouts: decorator, layouts, split bfloat16 operands.

Tiles lie in bands of 16 channels, one for each warp, as in `bands_triton`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .blocks_triton import LENGTHS
from .kernel_triton import Kernel, Translated

NUM_WARPS = 4
"""Warps per program, which the layouts below assume."""


class _Source(Translated, GluonASTSource):
    """The source of a Gluon kernel as Triton compiles it; a thread releases `TURN` once it is translated."""


class _GluonKernel(Kernel):
    SOURCE = _Source

    def is_gluon(self) -> bool:
        return True


def gluon_kernel(function) -> _GluonKernel:
    return _GluonKernel(function, LENGTHS)


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
    """Split float32 x into high + low, two bfloat16 tiles: 16 bits of mantissa."""
    high, rest = truncated(x)
    return high, to_bfloat16(rest)


@gluon.jit
def split_left(x):
    """Split float32 x [64, *] into the two parts of a left operand."""
    high, low = split(x)
    return gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)


@gluon.jit
def allocate_pair(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return shared-memory buffers for the two parts of a split operand."""
    high = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], LAYOUT)
    return high, gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def load_pair(pair):
    """Load both parts of a right operand."""
    high, low = pair
    return high.load(RIGHT), low.load(RIGHT)


@gluon.jit
def load_pair_transposed(pair):
    """Load both parts of a right operand, transposed."""
    high, low = pair
    return high.permute([1, 0]).load(RIGHT), low.permute([1, 0]).load(RIGHT)


@gluon.jit
def store_pair(pair, x):
    """Split float32 x into the two parts of an operand, store them and return them."""
    s_high, s_low = pair
    high, low = split(x)
    s_high.store(high)
    s_low.store(low)
    return high, low


@gluon.jit
def store_band_maxima(s_largest, b_D):
    """Store max |D| of each warp's band, [4]. After the next barrier every warp takes the maximum of the four."""
    s_largest.store(gl.max(gl.max(gl.abs(gl.reshape(b_D, (4, 16, 64))), 2), 1))


@gluon.jit
def not_kept(x, CONTIGUOUS: gl.constexpr):
    """Return int32 x. Without this, the compiler keeps in registers what follows from it through a whole loop, such as
    an address for each tensor. CONTIGUOUS: so many columns of x are, and begin at a multiple of that."""
    x = gl.inline_asm_elementwise("", "=r,0", [x], gl.int32, False, 1)
    return gl.max_contiguous(gl.multiple_of(x, [1, CONTIGUOUS]), [1, CONTIGUOUS])


@gluon.jit
def indices(N: gl.constexpr, STRIDE: gl.constexpr):
    """Return the row indices [N, 1] of a tile of 64 columns, and the offsets of its elements, [N, 64], in rows that are
    STRIDE elements apart."""
    o = gl.arange(0, N, gl.SliceLayout(1, ROWS))[:, None]
    return o, o * STRIDE + gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]


@gluon.jit
def allocate_rows(BUFFERS: gl.constexpr, N: gl.constexpr):
    """Return this number of shared-memory buffers for N rows each. Tensors need separate ones: between accesses to one
    allocation the compiler inserts barriers, whatever the indices."""
    return gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, N, 64], SWIZZLED)


@gluon.jit
def fetch_rows(buffers, n, tensors, base, rows, N: gl.constexpr, H: gl.constexpr):
    """Start the asynchronous copy of N rows of each tensor [rows, H, 64] to its buffer n in shared memory. base: offset
    of the first row. rows: number of rows to read; the others become zeros."""
    t, o = indices(N, H * 64)
    o = base + not_kept(o, 8)
    for m in gl.static_range(len(tensors)):
        async_copy.async_copy_global_to_shared(buffers[m].index(n), tensors[m] + o, mask=t < rows)


@gluon.jit
def operand_indices(COLUMNS: gl.constexpr):
    """Return the row indices [16, 1] and column indices [1, COLUMNS] of a right operand [16, COLUMNS]."""
    i = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))[:, None]
    return i, gl.arange(0, COLUMNS, gl.SliceLayout(0, RIGHT))[None, :]


@gluon.jit
def sums_along(x, ones, ALL_BITS: gl.constexpr):
    """Return x @ ones in float32, a sum of columns of x, as in `blocks_triton`. x: float32. ones [16, *]: a mask. x is
    split into two bfloat16 terms, or three with ALL_BITS, which keeps all of its bits."""
    ones = ones.to(gl.float32).to(gl.bfloat16)
    high, rest = truncated(x)
    acc = gl.zeros([x.shape[0], ones.shape[1]], gl.float32, BAND)
    acc = mma_v2(gl.convert_layout(high, LEFT), ones, acc)
    if ALL_BITS:
        high, rest = truncated(rest)
        acc = mma_v2(gl.convert_layout(high, LEFT), ones, acc)
    return mma_v2(gl.convert_layout(to_bfloat16(rest), LEFT), ones, acc)
