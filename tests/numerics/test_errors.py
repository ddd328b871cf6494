"""The error measures: each must see what it is there for, and nothing may hide behind a NaN."""

import math

import numpy as np
import pytest
import torch

from flakit.numerics.errors import compare, out_of_range, relative_l2

TRUTH = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 50, 8)))


def test_equal_is_zero():
    errors = compare(TRUTH, TRUTH)
    assert (errors.l2, errors.worst, errors.worst_row, errors.worst_index, errors.non_finite) == (0, 0, 0, None, 0)


def test_scaled_truth_is_off_by_its_factor_in_l2_and_rows():
    errors = compare(1.25 * TRUTH, TRUTH)
    assert errors.l2 == pytest.approx(0.25) and errors.worst_row == pytest.approx(0.25)
    assert errors.worst == pytest.approx(0.25 * TRUTH.abs().max() / TRUTH.square().mean().sqrt())


def test_one_wrong_element_is_seen_where_a_global_measure_is_blind():
    truth = torch.ones(1000, 1000)
    got = truth.clone()
    got[123, 456] = -1.0
    errors = compare(got, truth)
    assert errors.l2 < 0.0021
    assert errors.worst == pytest.approx(2.0) and errors.worst_index == (123, 456)
    assert errors.worst_row == pytest.approx(2 / math.sqrt(1000))


def test_a_small_row_that_is_all_wrong_is_seen():
    truth = torch.ones(100, 8)
    truth[7] = 1e-6
    got = truth.clone()
    got[7] = 2e-6
    errors = compare(got, truth)
    assert errors.l2 < 1e-6 and errors.worst < 2e-6
    assert errors.worst_row == pytest.approx(1.0)


def test_a_row_of_zeros_is_measured_by_the_tensor():
    truth = torch.ones(4, 8)
    truth[2] = 0
    got = truth.clone()
    got[2] = 1e-3
    assert compare(got, truth).worst_row == pytest.approx(1e-3 / math.sqrt(3 / 4))


@pytest.mark.parametrize("bad, kind", [(math.nan, "nan"), (math.inf, "pos_inf"), (-math.inf, "neg_inf")])
def test_non_finite_values_are_counted_by_kind_and_make_every_error_infinite(bad, kind):
    got = TRUTH.clone()
    got[1, 2, 3] = got[2, 0, 0] = bad
    errors = compare(got, TRUTH)
    assert (errors.l2, errors.worst, errors.worst_row) == (math.inf,) * 3
    assert errors.non_finite == getattr(errors, kind) == 2 == errors.nan + errors.pos_inf + errors.neg_inf
    assert errors.share == pytest.approx(2 / TRUTH.numel()) and errors.worst_index == (1, 2, 3)
    assert not errors.finite and "first at [1, 2, 3]" in str(errors)


def test_zero_truth_is_compared_exactly():
    zeros = torch.zeros(3, 4)
    assert compare(zeros, zeros).l2 == 0
    tiny = zeros.clone()
    tiny[1, 1] = 1e-30
    errors = compare(tiny, zeros)
    assert (errors.l2, errors.worst, errors.worst_row, errors.worst_index) == (math.inf, math.inf, math.inf, (1, 1))


def test_zeros_for_a_tiny_truth_are_totally_wrong():
    assert relative_l2(torch.zeros(3, 4), torch.full((3, 4), 1e-35)) == pytest.approx(1.0)


def test_infinite_truth_wants_the_same_infinity():
    truth = torch.tensor([[1.0, math.inf], [2.0, math.nan]])
    assert compare(truth, truth).l2 == 0
    for wrong in (5.0, -math.inf, math.nan):
        got = truth.clone()
        got[0, 1] = wrong
        assert compare(got, truth).l2 == math.inf


def test_huge_and_tiny_values_do_not_overflow_the_measure():
    for size in (1e200, 1e-200):
        truth = torch.full((2, 3), size, dtype=torch.float64)
        assert compare(truth * 1.5, truth).l2 == pytest.approx(0.5)


def test_bfloat16_is_measured_in_float64():
    assert 1e-3 < relative_l2(TRUTH.bfloat16(), TRUTH) < 2.5e-3


@pytest.mark.parametrize("shape", [(), (5,), (0, 3)], ids=str)
def test_any_shape(shape):
    x = torch.ones(shape)
    assert compare(x, x).l2 == 0
    assert compare(x + 1, x).l2 == (1.0 if x.numel() else 0.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"got: expected \[2, 3\] like truth, got \[3, 2\]"):
        compare(torch.ones(3, 2), torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_infinity_is_right_beyond_the_largest_number_alone(dtype):
    largest = torch.finfo(dtype).max
    truth = largest * torch.tensor([2.0, -2.0, 1.0, 0.9, 2.0, 2.0, 2.0], dtype=torch.float64)
    got = torch.tensor([torch.inf, -torch.inf, torch.inf, torch.inf, -torch.inf, torch.nan, largest], dtype=dtype)
    assert out_of_range(got, truth).tolist() == [True, True, True, False, False, False, False]
    assert out_of_range(truth.to(dtype), truth)[:2].all()
