"""Shared code of kernels in Gluon, Triton's language of explicit layouts: decorator, layouts, split bfloat16 operands.

Tiles lie in bands of 16 channels, one for each warp, as in `bands_triton`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

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
def store_split(s_high, s_low, x):
    """Split float32 x into two bfloat16 tiles and store them in shared memory."""
    high, low = split(x)
    s_high.store(high)
    s_low.store(low)


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
