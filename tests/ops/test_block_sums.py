"""Sums of the recurrent backward: inside a block of a state, and of partial gradients over blocks."""

import pytest
import torch

pytestmark = pytest.mark.interpret
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from flakit.ops.common.kernel_triton import Memory  # noqa: E402
from flakit.ops.common.recurrence_triton import column_sums, new_shares, row_sums, sum_blocks  # noqa: E402


@triton.jit
def both_kernel(x, columns, rows, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    o_r, o_d = tl.arange(0, R), tl.arange(0, D)
    b_x = tl.load(x + o_r[:, None] * D + o_d[None, :])
    tl.store(columns + o_d, column_sums(b_x, ROWS))
    tl.store(rows + o_r, row_sums(b_x, ROWS))


@pytest.mark.parametrize("R, D, rows", [(16, 64, 4), (32, 32, 4), (64, 16, 2), (16, 16, 4), (16, 16, 1), (128, 16, 4)])
def test_sums_in_a_block_are_in_their_places(R, D, rows):
    x = torch.randint(-9, 9, (R, D)).float()  # whose sums are exact in any order
    columns, sums = torch.empty(D), torch.empty(R)
    both_kernel[(1,)](x, columns, sums, R=R, D=D, ROWS=rows)
    assert torch.equal(columns, x.sum(0)) and torch.equal(sums, x.sum(1))


def test_a_value_reaches_no_other_sum():
    x = torch.ones(64, 16)
    x[3, 5], x[40, 9] = torch.nan, torch.inf
    columns, sums = torch.empty(16), torch.empty(64)
    both_kernel[(1,)](x, columns, sums, R=64, D=16, ROWS=2)
    assert columns.isfinite().logical_not().nonzero().flatten().tolist() == [5, 9]
    assert sums.isfinite().logical_not().nonzero().flatten().tolist() == [3, 40]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16, torch.float32, torch.float16)], ids=str)
def test_partial_gradients_are_added_in_order_and_rounded_once(dtypes):
    inputs = [torch.zeros(3, 7, 1, 61, dtype=dtype) for dtype in dtypes]
    shares = new_shares(5, *inputs)
    for share in shares:
        share.normal_()
    for share, total, x in zip(shares, sum_blocks(Memory(), 5, shares, *inputs), inputs, strict=True):
        expected = share[0].clone()
        for block in share[1:]:
            expected += block
        assert total.dtype == x.dtype and torch.equal(total, expected.to(x.dtype))


def test_one_block_is_the_gradient_itself():
    x = torch.zeros(2, 3, dtype=torch.float16)
    (share,) = new_shares(1, x)
    assert share.dtype == x.dtype and sum_blocks(Memory(), 1, (share,), x)[0] is share
