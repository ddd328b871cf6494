"""Kernels that lose digits at the line whose comment says so, and beside each the form that does not."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flakit.ops.common.blocks_triton import end_after_last


@triton.jit
def decay_gradient(a, b, dw, T: tl.constexpr, D: tl.constexpr, APART: tl.constexpr):
    p = tl.arange(0, T)[:, None] * D + tl.arange(0, D)[None, :]
    b_a, b_b = tl.load(a + p), tl.load(b + p)
    if APART:
        b_dw = tl.cumsum(b_a, 0) - tl.cumsum(b_b, 0)  # two running sums
    else:
        b_dw = tl.cumsum(b_a - b_b, 0)
    tl.store(dw + p, b_dw)


@triton.jit
def inverse(L, o, C: tl.constexpr, LEVELS: tl.constexpr):
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_P = tl.load(L + i * C + j)
    b_M = tl.where(i == j, 1.0, 0.0) + b_P
    for _ in range(LEVELS):
        b_P = tl.dot(b_P, b_P, input_precision="ieee")
        b_M += tl.dot(b_M, b_P, input_precision="ieee")  # the product form
    tl.store(o + i * C + j, b_M)


@triton.jit
def substitution(L, o, C: tl.constexpr):
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_L = tl.load(L + i * C + j)
    b_M = tl.where(i == j, 1.0, 0.0)
    for n in range(1, C):
        b_row = tl.sum(tl.where(i == n, b_L, 0.0), 0)
        b_M += tl.where(i == n, tl.sum(b_row[:, None] * b_M, 0)[None, :], 0.0)
    tl.store(o + i * C + j, b_M)


@triton.jit
def gate(w, x, o, T: tl.constexpr, D: tl.constexpr, ROUNDED: tl.constexpr):
    o_d = tl.arange(0, D)
    b_S = tl.zeros([D], dtype=tl.float32)
    for t in range(0, T):
        b_g = tl.exp(tl.load(w + t * D + o_d))
        if ROUNDED:
            b_g = b_g.to(tl.bfloat16)  # the gate becomes 1
        b_S = b_S * b_g.to(tl.float32) + tl.load(x + t * D + o_d)
        tl.store(o + t * D + o_d, b_S)


@triton.jit
def softmax(x, o, D: tl.constexpr, SAFE: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d)
    if SAFE:
        b_x -= tl.max(b_x, 0)
    b_e = tl.exp(b_x)  # without the maximum
    tl.store(o + o_d, b_e / tl.sum(b_e, 0))


@triton.jit
def scores(q, k, o, C: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    i, j, d = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, D)
    b_q, b_k = tl.load(q + i * D + d[None, :]), tl.load(k + i * D + d[None, :])
    b_A = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # operands in TF32
    tl.store(o + i * C + j, b_A)


@triton.jit
def counted(x, o, T: tl.constexpr, D: tl.constexpr, APART: tl.constexpr):
    o_d = tl.arange(0, D)
    b_large = tl.load(x + o_d)
    b_S, b_small = b_large, tl.zeros([D], dtype=tl.float32)
    for t in range(1, T):
        if APART:
            b_small += tl.load(x + t * D + o_d)
        else:
            b_S += tl.load(x + t * D + o_d)  # the addend vanishes
    tl.store(o + o_d, b_S - b_large + b_small)


@triton.jit
def variance(x, o, D: tl.constexpr, SHIFTED: tl.constexpr):
    b_x = tl.load(x + tl.arange(0, D))
    b_mean = tl.sum(b_x, 0) / D
    if SHIFTED:
        b_v = tl.sum((b_x - b_mean) * (b_x - b_mean), 0) / D
    else:
        b_v = tl.sum(b_x * b_x, 0) / D - b_mean * b_mean  # mean of squares less square of the mean
    tl.store(o, b_v)


@triton.jit
def everything(x, o, count, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d, mask=o_d < D, other=0.0)
    b_rows = tl.where(b_x[:, None] > 0, tl.exp(b_x)[:, None] * b_x[None, :], tl.sigmoid(b_x[:, None] + b_x[None, :]))
    b_A = tl.dot(b_rows, b_rows.T, input_precision="ieee")
    tl.store(o + o_d[:, None] * D + o_d[None, :], tl.log2(tl.abs(tl.cumsum(b_A, 1))))
    tl.atomic_add(count + o_d, tl.sum(tl.sqrt(tl.abs(b_x)), 0) + tl.zeros([D], dtype=tl.float32))


@triton.jit
def by_its_bits(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d) * 1.1
    b_bits = b_x.to(tl.int32, bitcast=True) & 0x7FFFFF00
    tl.store(o + o_d, b_bits.to(tl.float32, bitcast=True) * 2.0)


@triton.jit
def decided_by_rounding(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d)
    b_y = b_x + 1.0
    tl.store(o + o_d, tl.where(b_y > b_x, 2.0, 1.0))


@triton.jit
def assembled(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [tl.load(x + o_d)], tl.float32, True, 1)
    tl.store(o + o_d, b_x)


@triton.jit
def overlapping(x, o, D: tl.constexpr):
    """Store 2 x; the launch after this one may begin before this one ends. x, o [D]."""
    gdc_launch_dependents()
    end_after_last(True)
    o_d = tl.arange(0, D)
    tl.store(o + o_d, 2 * tl.load(x + o_d))


@triton.jit
def assembled_pairs(x, bounded, powers, D: tl.constexpr):
    """Store max(x, 0) rounded to bfloat16, NaN kept, and 2^x, by inline assembly. x, powers [D] float32."""
    i = tl.arange(0, D)
    b_x = tl.load(x + i)
    b_half = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b_x], tl.bfloat16, True, 2)
    zero = tl.cast(0.0, tl.bfloat16)
    b_half = tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [b_half, zero], tl.bfloat16, True, 2)
    tl.store(bounded + i, b_half)
    tl.store(powers + i, tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1))
