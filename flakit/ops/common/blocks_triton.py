"""Pieces of kernels for any operator with a decay per channel: which program, TF32 rounding, safe decay weights."""

import triton
import triton.language as tl


@triton.jit
def program(BLOCKS: tl.constexpr):
    """This program's block, of BLOCKS that run beside each other, and which sequence, head or segment they belong to.

    Both come of one grid axis: the others end at 65535, which sequences times heads can pass.
    """
    i = tl.program_id(0)
    return i % BLOCKS, i // BLOCKS


@triton.jit
def to_operand(x, PRECISION: tl.constexpr):
    """x as a tensor core will see it: rounded to nearest TF32, where the hardware alone truncates; else unchanged."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
    return x


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b in float32: TF32 operands for 16-bit inputs, three TF32 products for float32 inputs."""
    return tl.dot(to_operand(a, PRECISION), to_operand(b, PRECISION), input_precision=PRECISION)


@triton.jit
def decay_before(b_w_prev):
    """Log decay over the chunk's rows before each row, [C, BK]; b_w_prev holds w of the row before, 0 at the first.

    A sum of shifted rows, never an inclusive sum minus the row itself: nothing cancels and -inf stays -inf.
    """
    return tl.cumsum(b_w_prev, axis=0)


@triton.jit
def decay_after(b_w_next):
    """Log decay over the chunk's rows after each row, [C, BK]; b_w_next holds w of the row after, 0 at the last."""
    return tl.cumsum(b_w_next, axis=0, reverse=True)


@triton.jit
def level_weights(b_w_prev, b_w_next, s: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Decay between each row and the boundary of its halves at dyadic level s, [C, BK], in [0, 1] for every w <= 0.

    Rows of a right half: over the half's rows before it (a read sees these). Rows of a left half: over those after it.
    """
    o_c = tl.arange(0, C)
    right = (o_c // s) % 2 == 1
    before = tl.where(o_c[:, None] % s == 0, 0.0, b_w_prev)
    before = tl.reshape(tl.cumsum(tl.reshape(before, [C // s, s, BK]), axis=1), [C, BK])
    after = tl.where(o_c[:, None] % s == s - 1, 0.0, b_w_next)
    after = tl.reshape(tl.cumsum(tl.reshape(after, [C // s, s, BK]), axis=1, reverse=True), [C, BK])
    return tl.exp(tl.where(right[:, None], before, after))


@triton.jit
def level_pairs(s: tl.constexpr, C: tl.constexpr):
    """Which (i, j) meet at level s: i in the right, j in the left half of one block of 2s rows, [C, C]."""
    o_c = tl.arange(0, C)
    same = (o_c // (2 * s))[:, None] == (o_c // (2 * s))[None, :]
    right = (o_c // s) % 2 == 1
    return same & right[:, None] & (~right)[None, :]


@triton.jit
def row_at(x, row: tl.constexpr, C: tl.constexpr):
    """Row `row` of x [C, BK], as [BK]."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == row, x, 0.0), axis=0)
