"""What GSA's kernels inside chunks share: sums of log decays, products with stored memories (hk or hv, slots as rows),
and the softmax over slots."""

import triton
import triton.language as tl

from ..common.bands_triton import turned
from ..common.blocks_triton import INTERPRETED, add_products, exp, sums, terms
from ..common.tiles_triton import is_zero, load_decays, load_tile, row_units, scaled, state_pointers

TO_START, TO_END, TO_BOUNDARY = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Indices into `chunk_triton.sums_of_rows` of one block size: to the chunk's start, its end, (+ level) a boundary."""


@triton.jit
def load_exponents(g, start, end, i_h, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                   MILD: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Load the log decays of a chunk, [C, BM]; unless it is MILD, none is below -128 (`tiles_triton.load_decays`).

    SCALED, for 16-bit inputs: natural logarithms; else binary ones. Sums of these need no product before `factor`,
    whose rounding errors would not cancel between two rows as their decays do.
    """
    if MILD:
        b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM)
    else:
        b_g = load_decays(g, start, end, i_h, 0, H, M, C, BM)
    if not SCALED:
        b_g *= 1.4426950408889634
    return b_g


@triton.jit
def load_reads(x, units, start, end, i_hq, HQ: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """Load the reads of a chunk's slots in one pass, p or dscores, of one query, [C, BM]: x [rows, HQ, M] as stored or,
    with units (`row_units`), in float32."""
    b_x = load_tile(x, start, end, i_hq, 0, 0, HQ, M, C, BM)
    if units is not None:
        b_x = b_x.to(tl.float32) * row_units(units, start, end, i_hq, HQ, C)[:, None]
    return b_x


@triton.jit
def factor(x, SCALED: tl.constexpr):
    """Return the decay factor of x, a sum of `load_exponents`. Not SCALED: with subnormal results."""
    if SCALED:
        x = exp(x)
    elif INTERPRETED:
        x = tl.exp2(x)
    else:
        x = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return x


@triton.jit
def matrix(ones, n, C: tl.constexpr):
    """Load matrix n, [C, C], of ones [matrices, C, C] (`chunk_triton.sums_of_rows`)."""
    o_c = tl.arange(0, C)
    return tl.load(ones + n * C * C + o_c[:, None] * C + o_c[None, :])


@triton.jit
def decays(ones, n, b_g, C: tl.constexpr):
    """Return the sums [C, BM] of log decays b_g [C, BM] over the rows that matrix n of ones selects for each row."""
    return sums(matrix(ones, n, C), b_g)


@triton.jit
def chosen(mask, product):
    """Return 1 where the mask [C, C] holds, else 0, in float32 and in the registers of `product`, any [C, C], whence it
    reaches the tensor core. Without one (None) it does so through shared memory, number by number."""
    zero = 0.0
    if product is not None and not INTERPRETED:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [product], tl.float32, True, 1)
    return tl.where(mask, 1.0, zero)


@triton.jit
def in_terms(x, SCALED: tl.constexpr):
    """Return float32 x in `terms`: two for 16-bit inputs, SCALED, three for float32 inputs."""
    return terms(x, 2 if SCALED else 3)


@triton.jit
def add_input_product(acc, x, y):
    """Return acc + x @ y^T of two tiles of inputs."""
    if x.dtype == tl.float32:
        acc = add_products(acc, terms(x, 3), turned(terms(y, 3)))
    else:
        acc = tl.dot(x, tl.trans(y), acc)
    return acc


@triton.jit
def memory(states, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Load block i_d of columns of memory i of states [memories, M, D], [BM, BD], as stored; zeros unless `there`."""
    p, m = state_pointers(states, i, 0, i_d, M, D, BM, BD)
    return tl.load(p, mask=m & there, other=0.0)


@triton.jit
def units(scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
          BS: tl.constexpr):  # fmt: skip
    """Load the row scales [BM] of the block that `memory` loads, from scales [memories, D / BS, M]."""
    o_m = tl.arange(0, BM)
    BLOCKS = (D + BS - 1) // BS
    return tl.load(scales + (i.to(tl.int64) * BLOCKS + i_d * BD // BS) * M + o_m, mask=(o_m < M) & there, other=0.0)


@triton.jit
def read_memory(b_x, states, scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
                BD: tl.constexpr, BS: tl.constexpr, SCALED: tl.constexpr, remainders=None):  # fmt: skip
    """Return x S^T [C, BM] over one block of columns, b_x [C, BD] and those of memory i (`memory`, `units`). remainders
    [memories, M, D] float16: S's rounding errors, or None; SCALED: memories are float16 with scales."""
    b_S = memory(states, i, there, i_d, M, D, BM, BD)
    if SCALED:
        unit = units(scales, i, there, i_d, M, D, BM, BD, BS)
        x_16, x_unit = scaled(b_x)
        reads = tl.dot(x_16, tl.trans(b_S))
        if remainders is not None:
            reads += tl.dot(x_16, tl.trans(memory(remainders, i, there, i_d, M, D, BM, BD)))
        reads *= x_unit[:, None] * unit[None, :]
    else:
        reads = add_input_product(tl.zeros([b_x.shape[0], BM], dtype=tl.float32), b_x, b_S)
    return reads


@triton.jit
def weighed_memory(b_x, states, scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
                   BD: tl.constexpr, BS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Return x S [C, BD], the sum of memory i's rows (slots) weighted by b_x [C, BM], in block i_d of columns."""
    b_S = memory(states, i, there, i_d, M, D, BM, BD)
    if SCALED:
        x_16, x_unit = scaled(b_x * units(scales, i, there, i_d, M, D, BM, BD, BS)[None, :])
        rows = tl.dot(x_16, b_S) * x_unit[:, None]
    else:
        rows = add_products(tl.zeros([b_x.shape[0], BD], dtype=tl.float32), terms(b_x, 3), terms(b_S, 3))
    return rows


@triton.jit
def add_written(b_ds, b_SD, y, states, scales, dstates, dscales, start, end, i_h, i_s, H: tl.constexpr, M: tl.constexpr,
                D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
                SCALED: tl.constexpr):  # fmt: skip
    """Return b_ds + y D_S^T [C, BM] and b_SD + sum_d S D_S [BM] of one pass; S, D_S: memory i_s of states, dstates.

    SCALED: the sums are the diagonal of a product, whose 16-bit operands reach the tensor core unchanged. In registers
    both tiles would be converted to float32, and others spilled.
    """
    there = start < end
    o_m = tl.arange(0, BM)
    for i_d in range(0, (D + BD - 1) // BD):
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_S = memory(states, i_s, there, i_d, M, D, BM, BD)
        b_D = memory(dstates, i_s, there, i_d, M, D, BM, BD)
        b_ds += read_memory(b_y, dstates, dscales, i_s, there, i_d, M, D, BM, BD, BS, SCALED)
        if SCALED:
            unit = units(dscales, i_s, there, i_d, M, D, BM, BD, BS)
            unit *= units(scales, i_s, there, i_d, M, D, BM, BD, BS)
            b_SD += tl.sum(tl.where(o_m[:, None] == o_m[None, :], tl.dot(b_S, tl.trans(b_D)), 0.0), 1) * unit
        else:
            b_SD += tl.sum(b_S * b_D, 1)
    return b_ds, b_SD


@triton.jit
def is_empty(states, scales, i, there, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
             BS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Return the mask [BM] of the rows of memory i that are 0 (`tiles_triton.is_zero`)."""
    if SCALED:
        empty = is_zero(scales, i, there, 0, M, D, BM, BS)
    else:
        filled = tl.zeros([BM], dtype=tl.int32)
        for i_d in range(0, (D + BD - 1) // BD):  # a maximum would pass over NaN
            filled |= tl.max((memory(states, i, there, i_d, M, D, BM, BD) != 0.0).to(tl.int32), 1)
        empty = filled == 0
    return empty


@triton.jit
def softmax(b_scores, M: tl.constexpr, BM: tl.constexpr):
    b_scores = tl.where((tl.arange(0, BM) < M)[None, :], b_scores, -float("inf"))
    b_p = tl.exp(b_scores - tl.max(b_scores, 1)[:, None])
    return b_p / tl.sum(b_p, 1)[:, None]


@triton.jit
def softmax_grads(b_p, b_dp, SCALED: tl.constexpr):
    """Return p (dp - <p, dp>) [C, BM], as `chunk_torch.softmax_grads`; SCALED, for 16-bit inputs: without its shift."""
    if not SCALED:
        largest = tl.max(b_p, 1)[:, None]
        b_dp -= tl.max(tl.where(b_p == largest, b_dp, -float("inf")), 1)[:, None]
    return b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
