"""Kernels with one fault each, at the line whose comment names it."""

import triton
import triton.language as tl


@triton.jit
def anchored_at_the_start(r, k, g, A, T: tl.constexpr, D: tl.constexpr):
    i = tl.program_id(0)
    o_t, o_d = tl.arange(0, T), tl.arange(0, D)
    p = i * T * D + o_t[:, None] * D + o_d[None, :]
    b_g = tl.cumsum(tl.load(g + p), axis=0)
    b_r = tl.load(r + p) * tl.exp(b_g)
    b_k = tl.load(k + p) * tl.exp(-b_g)  # born
    b_A = tl.dot(b_r, tl.trans(b_k), input_precision="ieee")  # turns NaN
    b_A = tl.where(o_t[:, None] >= o_t[None, :], b_A, 0.0)  # drops some
    tl.store(A + i * T * T + o_t[:, None] * T + o_t[None, :], b_A)  # stored


@triton.jit
def growth(x):
    return tl.exp(x)  # in a helper


@triton.jit
def in_a_loop_with_a_helper(x, o, T, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_S = tl.zeros([D], dtype=tl.float32)
    for t in range(0, T):
        b_S = b_S * 2.0 + growth(tl.load(x + t * D + o_d).to(tl.float32))  # called here
    tl.store(o + tl.program_id(0) * D + o_d, b_S)


@triton.jit
def masked_after_exp(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d)
    b_e = tl.exp(b_x)  # born, and masked
    tl.store(o + o_d, tl.where(b_x > 0, 0.0, b_e))  # masked away


@triton.jit
def masked_by_the_store(x, o, n, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_e = tl.exp(tl.load(x + o_d).to(tl.float32))
    tl.store(o + o_d, b_e, mask=o_d < n)  # the mask of a store


@triton.jit
def softmax_with_infinite_masks(x, o, n, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d, mask=o_d < n, other=float("-inf"))
    b_x = tl.where(o_d == 0, float("-inf"), b_x)
    b_e = tl.exp(b_x - tl.max(b_x, 0))  # NaN where all is masked
    tl.store(o + o_d, b_e / tl.sum(b_e, 0), mask=o_d < n)


@triton.jit
def without_a_mask(x, o, n, D: tl.constexpr):
    o_d = tl.program_id(0) * D + tl.arange(0, D)
    b_x = tl.load(x + o_d)  # reads beyond
    tl.store(o + o_d, b_x * 2.0)  # writes beyond


@triton.jit
def halve(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    tl.store(o + o_d, tl.load(x + o_d) * 0.5)


@triton.jit
def in_bfloat16(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_x = tl.load(x + o_d)
    tl.store(o + o_d, b_x * b_x)


@triton.jit
def through_blocks(x, o, T, D: tl.constexpr, C: tl.constexpr, DESCRIPTOR: tl.constexpr):
    i = tl.program_id(0)
    if DESCRIPTOR:
        p_x = tl.make_tensor_descriptor(x, (T, D), (D, 1), (C, D))
        p_o = tl.make_tensor_descriptor(o, (T, D), (D, 1), (C, D))
        p_o.store([i * C, 0], tl.exp(p_x.load([i * C, 0])))  # by descriptor
    else:
        p_x = tl.make_block_ptr(x, (T, D), (D, 1), (i * C, 0), (C, D), (1, 0))
        p_o = tl.make_block_ptr(o, (T, D), (D, 1), (i * C, 0), (C, D), (1, 0))
        b_e = tl.exp(tl.load(p_x, boundary_check=(0, 1)))  # by block
        tl.store(p_o, b_e, boundary_check=(0, 1))


@triton.jit
def summed(x, o, n, D: tl.constexpr):
    o_d = tl.arange(0, D)
    b_e = tl.exp(tl.load(x + o_d))
    tl.atomic_add(o + o_d, b_e, mask=o_d < n)  # added


@triton.jit
def one_of_two(x, y, o, p, D: tl.constexpr, FURTHER: tl.constexpr):
    first, o_d = tl.arange(0, 2 * D) < D, tl.arange(0, 2 * D) % D
    b_x = tl.load(tl.where(first, x, y) + o_d + tl.where(first, 0, FURTHER))  # reads one of two
    tl.store(tl.where(first, o, p) + o_d, 2.0 * b_x)  # writes one of two


@triton.jit
def taken_from(x, i, D: tl.constexpr):
    o = i * D + tl.arange(0, D)  # not the kernel's o
    return tl.load(x + o)


@triton.jit
def where_a_flag_says_so(flag, n, y, o, D: tl.constexpr):
    i = tl.program_id(0)
    if tl.load(flag + i) != 0:
        for j in range(tl.load(n + i)):
            if tl.load(flag + i) > j:
                tl.store(o + i * D + tl.arange(0, D), tl.exp(taken_from(y, i, D)))
