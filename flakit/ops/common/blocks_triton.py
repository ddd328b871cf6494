"""Building blocks of kernels for operators with a decay per channel: program indices, product operands, decay sums.

Operands of products of 16-bit inputs are often split: x is stored as high + low, two bfloat16 tiles that together have
16 bits of mantissa, and products of parts add up in float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .dispatch import interpreted
from .kernel_triton import launched

INTERPRETED = tl.constexpr(interpreted())

LENGTHS = "T", "L", "N", "tokens", "chunks", "parts", "skipped"
"""Parameters of kernels for whose values Triton compiles no kernels of their own, as it would for 1 and multiples of 16
to learn the alignment of addresses. Here the alignment follows from the head sizes, which are constants."""
kernel = launched(*LENGTHS)
"""Decorator of launched kernels (helpers have `triton.jit`): one compiled kernel serves every length."""


@triton.jit
def program(BLOCKS: tl.constexpr):
    """Return the index of this program's block, below BLOCKS, and the index of its sequence, head or part.

    Both share one grid axis: the other axes end at 65535, which sequences times heads can exceed.
    """
    i = tl.program_id(0)
    return i % BLOCKS, i // BLOCKS


@triton.jit
def end_after_last(OVERLAPS: tl.constexpr):
    """Of a launch that OVERLAPS with the one before it and needs none of its results: let one program wait for that
    one. Then the end of this launch means that both have ended, and what follows may use the results of both."""
    if OVERLAPS:  # `gdc_wait` of program 0, without a branch
        tl.inline_asm_elementwise(
            "{ .reg .pred first; setp.eq.s32 first, $1, 0; @first griddepcontrol.wait; mov.b32 $0, 0; }",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let a next launch that OVERLAPS with this one begin when every program of this one is here or has no work."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def exp(x):
    """Return e^x, with subnormal results flushed to 0: handling them costs three instructions a call."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def prefetch(p, there, N: tl.constexpr):
    """Prefetch N elements from each of the pointers p into the L2 cache, where the mask `there` holds.

    This occupies no registers. A later load, held back by a barrier, then waits a third as long.
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
    """Return x, a loaded 16-bit or float32 tile, unchanged: a barrier to the compiler, where the load is awaited.

    Without it, Triton moves a layout conversion of x right behind the load, and waits there. It cannot move one across
    `arrived`, so loads issued before it overlap.
    """
    if not INTERPRETED:
        if x.dtype == tl.float32:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=False, pack=1)
        else:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def clamped_decay(b_w):
    """Return log decays of at least -128: e^-128 is 0 in float32, and `sums` needs finite terms. NaN stays NaN."""
    if INTERPRETED or b_w.dtype == tl.float32:
        b_w = tl.where(b_w < -128.0, -128.0, b_w).to(b_w.dtype)
    else:  # two numbers an instruction
        NAME: tl.constexpr = "bf16" if b_w.dtype == tl.bfloat16 else "f16"
        asm: tl.constexpr = "max.NaN." + NAME + "x2 $0, $1, $2;"
        least = tl.cast(-128.0, b_w.dtype)
        b_w = tl.inline_asm_elementwise(asm, "=r,r,r", [b_w, least], dtype=b_w.dtype, is_pure=True, pack=2)
    return b_w


@triton.jit
def to_operand(x, PRECISION: tl.constexpr):
    """Round x to the nearest TF32 if PRECISION is "tf32", where the hardware would truncate; else return it as is."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
    return x


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return a @ b in float32: one TF32 product if PRECISION is "tf32", for 16-bit inputs; three if it is "tf32x3"."""
    return tl.dot(to_operand(a, PRECISION), to_operand(b, PRECISION), input_precision=PRECISION)


@triton.jit
def to_bfloat16(x):
    """Round x to the nearest bfloat16; Triton's interpreter, which lacks bfloat16 products, keeps it in float32."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _truncated(x):
    """Return the first 8 mantissa bits of float32 x as bfloat16, and the rest of x in float32. Truncating takes one
    instruction and is exact: three parts hold all of x."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    if INTERPRETED:
        rest = x - high
    else:
        # The compiler would fuse this with the product that computes x into an FMA, and first negate an operand.
        rest = tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, high], tl.float32, True, 1)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, rest


@triton.jit
def split(x):
    """Split x into high + low, two bfloat16 tiles: 16 bits of mantissa with the range of float32."""
    high, rest = _truncated(x.to(tl.float32))
    if INTERPRETED:
        low = to_bfloat16(rest)
    else:  # two numbers an instruction
        low = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [rest], tl.bfloat16, True, 2)
    return high, low


@triton.jit
def terms(x, N: tl.constexpr):
    """Return x as a sum of N bfloat16 tiles: two, as `split` does, or three, which hold all of a float32 number."""
    high, rest = _truncated(x.to(tl.float32))
    if N == 2:
        result = (high, to_bfloat16(rest))
    else:
        middle, rest = _truncated(rest)
        result = (high, middle, to_bfloat16(rest))
    return result


@triton.jit
def input_terms(x):
    """Return a tile of an input as a sum of bfloat16 tiles: itself, two of a float16 tile, three of a float32 tile."""
    if x.dtype == tl.bfloat16:
        result = (x,)
    elif x.dtype == tl.float16:
        result = terms(x, 2)
    else:
        result = terms(x, 3)
    return result


@triton.jit
def whole(x):
    """Return the sum of the terms of x, a tuple of bfloat16 tiles (`terms`), in float32."""
    total = x[0].to(tl.float32)
    for i in tl.static_range(1, len(x)):
        total += x[i].to(tl.float32)
    return total


@triton.jit
def add_products(acc, a, b, FULL: tl.constexpr = False):
    """Return acc + a @ b of operands in terms, each a tuple of bfloat16 tiles that add up to it, without the
    products below the precision of the longer one. FULL: with all products: the same that b^T @ a^T has. Of operands
    of three terms, the smallest products come first: tensor cores truncate each sum."""
    N: tl.constexpr = len(a) + len(b) if FULL else max(len(a), len(b))
    if N == 3:
        total = tl.zeros_like(acc)
        for n in tl.static_range(N):
            for i in tl.static_range(N - n):
                total = tl.dot(a[i], b[N - 1 - n - i], total)
        acc += total
    else:
        for i in tl.static_range(len(a)):
            for j in tl.static_range(len(b)):
                if i + j < N:
                    acc = tl.dot(a[i], b[j], acc)
    return acc


@triton.jit
def add_product_by_input(acc, a, b):
    """Return acc + a @ b in float32, of float32 a and a tile b of an input: in 16-bit terms if b has 16 bits."""
    if b.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = add_products(acc, split(a), input_terms(b))
    return acc


@triton.jit
def sums(ones, b_w):
    """Return the sums of rows `ones @ b_w` in float32. ones: -1, 0 or 1, [C, C]; b_w [C, D] in the input's dtype.

    It takes one product for bfloat16 and three for float32, uses every bit of b_w, and yields the layout of a product.
    """
    ones = to_bfloat16(ones.to(tl.float32))
    if b_w.dtype == tl.bfloat16:
        total = tl.dot(ones, b_w)
    else:
        high, rest = _truncated(b_w.to(tl.float32))
        total = tl.dot(ones, high)
        if b_w.dtype == tl.float32:
            high, rest = _truncated(rest)
            total = tl.dot(ones, high, total)
        total = tl.dot(ones, to_bfloat16(rest), total)
    return total


@triton.jit
def sums_along(b_w, ones, ALL_BITS: tl.constexpr = True):
    """Return b_w [*, C] @ ones, 0 or 1, [C, N], in float32; of a float32 b_w all bits or, without ALL_BITS, 16."""
    ones = to_bfloat16(ones.to(tl.float32))
    x = input_terms(b_w) if ALL_BITS or b_w.dtype != tl.float32 else terms(b_w, 2)
    total = tl.dot(x[0], ones)
    for n in tl.static_range(1, len(x)):
        total = tl.dot(x[n], ones, total)
    return total


@triton.jit
def sums_of_columns(b_w, ones):
    """Return b_w^T @ ones in float32, of a 16-bit tile b_w [C, D] and ones, 0 or 1, [C, N]; exact as `sums`."""
    return sums_along(tl.trans(b_w), ones)


@triton.jit
def columns(x):
    """Return x^T in float32, of a 16-bit tile x [C, D]: a product with ones on the diagonal, which takes x from shared
    memory as it is. To transpose it into the layout of a product, Triton needs ten barriers."""
    if INTERPRETED:
        return tl.trans(x).to(tl.float32)
    o_c = tl.arange(0, x.shape[0])
    return tl.dot(tl.trans(x), (o_c[:, None] == o_c[None, :]).to(x.dtype))


@triton.jit
def add_sums(acc, ones, x, ALL_BITS: tl.constexpr):
    """Return acc + ones @ x of float32 x [C, D], its first 16 bits, or all if ALL_BITS. ones: 0 or 1, [C, C]."""
    ones = to_bfloat16(ones.to(tl.float32))
    high, rest = _truncated(x)
    acc = tl.dot(ones, high, acc)
    if ALL_BITS:
        high, rest = _truncated(rest)
        acc = tl.dot(ones, high, acc)
    return tl.dot(ones, to_bfloat16(rest), acc)


@triton.jit
def below(b_A, C: tl.constexpr):
    """Return the strictly lower triangle of b_A [C, C], zero elsewhere."""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] > o_c[None, :], b_A, 0.0)


@triton.jit
def diagonal(b_A, C: tl.constexpr):
    """Return the diagonal of b_A [C, C] as a column, [C, 1]."""
    o_c = tl.arange(0, C)
    return tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_A, 0.0), 1)[:, None]


@triton.jit
def level_pairs(s: tl.constexpr, C: tl.constexpr):
    """Return the mask [C, C] of pairs (i, j) at level s: i in the right, j in the left half of a block of 2s rows."""
    o_c = tl.arange(0, C)
    same = (o_c // (2 * s))[:, None] == (o_c // (2 * s))[None, :]
    right = (o_c // s) % 2 == 1
    return same & right[:, None] & (~right)[None, :]


@triton.jit
def row_at(x, row: tl.constexpr, C: tl.constexpr):
    """Return row `row` of x [C, BK] as [BK]."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == row, x, 0.0), axis=0)
