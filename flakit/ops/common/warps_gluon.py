"""Tiles of one warp, for kernels in Gluon that run one for each chunk of 16 tokens: scores of pairs of its tokens.

A product's result is, in the same registers, a left operand, and transposed a right one, so that threads exchange
nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from . import bands_gluon as bg
from .blocks_triton import exp
from .launch import TABLE

WARP = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
"""The result of a product of one warp; below, its operands, and rows of 64 channels in the order of global memory."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, WARP.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, WARP.value, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@gluon.jit
def left(x):
    """Return float32 x as a left operand, split."""
    high, low = bg.split(x)
    return gl.convert_layout(high, LEFT, assert_trivial=True), gl.convert_layout(low, LEFT, assert_trivial=True)


@gluon.jit
def turned(x):
    """Return float32 x, transposed, as a right operand, split."""
    high, low = bg.split(x)
    high, low = gl.permute(high, (1, 0)), gl.permute(low, (1, 0))
    return gl.convert_layout(high, RIGHT, assert_trivial=True), gl.convert_layout(low, RIGHT, assert_trivial=True)


@gluon.jit
def product(a, b):
    """Return a @ b [16, 16] of split operands, by two sums."""
    a_high, a_low = a
    b_high, b_low = b
    zero = gl.zeros([16, 16], gl.float32, WARP)
    return mma_v2(a_high, b_high, zero) + mma_v2(a_low, b_high, mma_v2(a_high, b_low, zero))


@gluon.jit
def sums(ones, b_w):
    """Return ones @ b_w [16, 64]. ones: -1, 0 or 1; b_w: log decays, a right operand."""
    return mma_v2(ones.to(gl.float32).to(gl.bfloat16), b_w, gl.zeros([16, b_w.shape[1]], gl.float32, WARP))


@gluon.jit
def parts(x):
    """Return the upper and the lower half of the rows of x."""
    N: gl.constexpr = x.shape[0] // 2
    return gl.split(gl.permute(gl.reshape(x, (2, N, x.shape[1])), (1, 2, 0)))


@gluon.jit
def above(x, y):
    """Return x [8, 64] above y, in layout WARP, the inverse of `parts`."""
    both = gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), (16, 64))
    return gl.convert_layout(both, WARP, assert_trivial=True)


@gluon.jit
def rows_of_half(s_x, LEVEL: gl.constexpr, READS: gl.constexpr):
    """Load the rows of tokens in a level's right halves (READS) or left ones, in float32. s_x [N, 64]: the rows of one
    or of two tensors; result [N / 2, 64]. All are loaded, but those not used cost nothing."""
    N: gl.constexpr = s_x.shape[0]
    SIZE: gl.constexpr = 1 << LEVEL
    s_x = s_x.reshape([N // (2 * SIZE), 2, SIZE, 64]).permute([1, 0, 2, 3]).reshape([N, 64])
    left_half, right_half = parts(s_x.load(WARP))
    rows = (right_half if READS else left_half).to(gl.float32)
    if N == 32:
        rows = gl.convert_layout(rows, WARP, assert_trivial=True)
    return rows


@gluon.jit
def token_of(row, LEVEL: gl.constexpr, READS: gl.constexpr):
    """Return the token of a row of `rows_of_half`; of two tensors' rows, 8 each."""
    SIZE: gl.constexpr = 1 << LEVEL
    return ((row & 7) >> LEVEL) * (2 * SIZE) + READS * SIZE + (row & (SIZE - 1))


@gluon.jit
def factors_of_halves(b_w, LEVEL: gl.constexpr):
    """Return the decay factors [8, 64] of the tokens in right halves, over the tokens before each in its half; and of
    those in left halves, over the tokens after each. b_w [16, 64]: log decays, a right operand."""
    m, t = bg.tile_indices(16, 16, LEFT)
    middle = token_of(m & -(1 << LEVEL), LEVEL, True)
    reads, keys = token_of(m, LEVEL, True), token_of(m, LEVEL, False)
    between = gl.where(m < 8, (t >= middle) & (t < reads), (t > keys) & (t < middle))
    return parts(exp(sums(between, b_w)))


@gluon.jit
def add_product(acc, a, b):
    """Return acc + a @ b of split operands."""
    a_high, a_low = a
    b_high, b_low = b
    return mma_v2(a_high, b_high, mma_v2(a_low, b_high, mma_v2(a_high, b_low, acc)))


def options(row: str, H: int) -> dict:
    """Return the keyword arguments of a kernel of one warp. row: its row of the launch table."""
    return dict(H=H, num_warps=1, maxnreg=TABLE[row, "16-bit"].maxnreg)
