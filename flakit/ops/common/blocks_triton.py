"""Pieces of kernels for any operator with a decay per channel: which program, operands of products, decay weights."""

import triton
import triton.language as tl

from .dispatch import interpreted
from .kernel_triton import launched

INTERPRETED = tl.constexpr(interpreted())

kernel = launched("T", "L", "N", "tokens", "chunks", "parts")
"""Decorates what is launched, where helpers have `triton.jit`: one compiled kernel serves every length.

Triton compiles once more for an integer of 1 and for a multiple of 16, from which it learns how addresses are aligned.
Here that follows from the sizes of heads, which are constants.
"""


@triton.jit
def program(BLOCKS: tl.constexpr):
    """This program's block, of BLOCKS that run beside each other, and which sequence, head or segment they belong to.

    Both come of one grid axis: the others end at 65535, which sequences times heads can pass.
    """
    i = tl.program_id(0)
    return i % BLOCKS, i // BLOCKS


@triton.jit
def exp(x):
    """e^x; 0 where float32 has only its smallest numbers left, whose care is three instructions a call."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def fading(x, QUICK: tl.constexpr):
    """e^x, by `exp` where it is to be QUICK, as beside 16-bit inputs; float32 ones keep its smallest numbers."""
    if QUICK:
        x = exp(x)
    else:
        x = tl.exp(x)
    return x


@triton.jit
def expect(p, there, N: tl.constexpr):
    """Have memory send N elements from each of the pointers p on that are `there` to the cache of all multiprocessors.

    No register waits for them. A load that comes later, from behind a barrier that it cannot pass, then waits a third
    as long.
    """
    if not INTERPRETED:
        LINE: tl.constexpr = 1024 // p.dtype.element_ty.primitive_bitwidth
        for n in tl.static_range(0, N, LINE):
            tl.inline_asm_elementwise(
                "{ .reg .pred there; setp.ne.s32 there, $2, 0; @there prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
                "=r,l,r",
                [(p + n).to(tl.int64), there.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def arrived(x):
    """x, a 16-bit or float32 tile that was loaded, for use from here on.

    Triton puts a change of layout right behind the load of what it changes, and with it a wait. Behind `arrived` it
    stays: loads that are written before it are under way together.
    """
    if not INTERPRETED:
        if x.dtype == tl.float32:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=False, pack=1)
        else:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


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
def to_bfloat16(x):
    """x rounded to the nearest bfloat16; left in float32 by Triton's interpreter, which can do nothing with them."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _cut(x):
    """The first 8 bits of float32 x's mantissa as bfloat16, and the rest of x. Cut, not rounded: that is one
    instruction, and so exact that a third part is all that can be left after two."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    if INTERPRETED:
        rest = x - high
    else:
        # Of this and of the product that x is, a compiler would make one instruction, for which it first turns a sign.
        rest = tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, high], tl.float32, True, 1)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, rest


@triton.jit
def split(x):
    """x as high + low, two bfloat16 tiles: 16 bits of mantissa, with all of float32's range."""
    high, rest = _cut(x.to(tl.float32))
    return high, to_bfloat16(rest)


@triton.jit
def add_product(acc, a_high, a_low, b_high, b_low):
    """acc + a b of split operands; the product of the low parts, 2^-18 of the whole, is left out."""
    acc = tl.dot(a_high, b_high, acc)
    acc = tl.dot(a_high, b_low, acc)
    return tl.dot(a_low, b_high, acc)


@triton.jit
def add_whole_product(acc, a_high, a_low, b_high, b_low):
    """acc + a b of split operands, nothing left out: the same products as of b and a turned."""
    return tl.dot(a_low, b_low, add_product(acc, a_high, a_low, b_high, b_low))


@triton.jit
def operand(x, SPLIT: tl.constexpr):
    """x as a product of `add_operands` takes it: `split` beside 16-bit inputs, beside float32 ones as it is."""
    high, low = x, x
    if SPLIT:
        high, low = split(x)
    return high, low


@triton.jit
def add_operands(acc, a_high, a_low, b_high, b_low, SPLIT: tl.constexpr):
    """acc + a b of two that `operand` made."""
    if SPLIT:
        acc = add_product(acc, a_high, a_low, b_high, b_low)
    else:
        acc = tl.dot(a_high, b_high, acc, input_precision="tf32x3")
    return acc


@triton.jit
def add_split_by_given(acc, a_high, a_low, b):
    """acc + a b of an `operand` and a tile as it was given."""
    if b.dtype == tl.float32:
        acc = tl.dot(a_high, b, acc, input_precision="tf32x3")
    elif b.dtype == tl.bfloat16:
        acc = tl.dot(a_high, b, acc)
        acc = tl.dot(a_low, b, acc)
    else:
        b_high, b_low = split(b)
        acc = add_product(acc, a_high, a_low, b_high, b_low)
    return acc


@triton.jit
def add_given_by_split(acc, a, b_high, b_low):
    """acc + a b of a tile as it was given and an `operand`."""
    if a.dtype == tl.float32:
        acc = tl.dot(a, b_high, acc, input_precision="tf32x3")
    elif a.dtype == tl.bfloat16:
        acc = tl.dot(a, b_high, acc)
        acc = tl.dot(a, b_low, acc)
    else:
        a_high, a_low = split(a)
        acc = add_product(acc, a_high, a_low, b_high, b_low)
    return acc


@triton.jit
def sums(which, b_w):
    """Sums of rows of b_w, a tile as it was given: which b_w, in float32. which: -1, 0 and 1, [C, C].

    One product for bfloat16, three for float32; nothing of b_w is lost, and its result lies where products need it.
    """
    which = to_bfloat16(which.to(tl.float32))
    if b_w.dtype == tl.bfloat16:
        total = tl.dot(which, b_w)
    else:
        high, rest = _cut(b_w.to(tl.float32))
        total = tl.dot(which, high)
        if b_w.dtype == tl.float32:
            high, rest = _cut(rest)
            total = tl.dot(which, high, total)
        total = tl.dot(which, to_bfloat16(rest), total)
    return total


@triton.jit
def sums_of_columns(b_w, which):
    """As `sums` of a 16-bit tile, turned: b_w^T which."""
    which = to_bfloat16(which.to(tl.float32))
    if b_w.dtype == tl.bfloat16:
        total = tl.dot(tl.trans(b_w), which)
    else:
        high, rest = _cut(b_w.to(tl.float32))
        total = tl.dot(tl.trans(high), which)
        total = tl.dot(tl.trans(to_bfloat16(rest)), which, total)
    return total


@triton.jit
def sums_along(b_w, which, WHOLE: tl.constexpr = True):
    """As `sums` of the columns of b_w: b_w which. Of float32 two parts are taken, or WHOLE all three."""
    which = to_bfloat16(which.to(tl.float32))
    if b_w.dtype == tl.bfloat16:
        total = tl.dot(b_w, which)
    else:
        high, rest = _cut(b_w.to(tl.float32))
        total = tl.dot(high, which)
        if WHOLE and b_w.dtype == tl.float32:
            high, rest = _cut(rest)
            total = tl.dot(high, which, total)
        total = tl.dot(to_bfloat16(rest), which, total)
    return total


@triton.jit
def add_sums(acc, which, x, WHOLE: tl.constexpr):
    """acc + which x of float32 x, of which two parts are taken, or WHOLE all three. which: 0 and 1, [C, C]."""
    which = to_bfloat16(which.to(tl.float32))
    high, rest = _cut(x)
    acc = tl.dot(which, high, acc)
    if WHOLE:
        high, rest = _cut(rest)
        acc = tl.dot(which, high, acc)
    return tl.dot(which, to_bfloat16(rest), acc)


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
def below(b_A, C: tl.constexpr):
    """What of [C, C] lies below the diagonal, else 0."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] > o_c[None, :], b_A, 0.0)


@triton.jit
def above(b_A, C: tl.constexpr):
    """What of [C, C] lies above the diagonal, else 0."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] < o_c[None, :], b_A, 0.0)


@triton.jit
def diagonal(b_A, C: tl.constexpr):
    """The diagonal of [C, C] as a column, [C, 1]."""
    o_c = tl.arange(0, C)
    return tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_A, 0.0), 1)[:, None]


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
