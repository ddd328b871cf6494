"""Three inverses equal in algebra: each against float64, and the product's lost digits and range against their laws."""

import math
from itertools import product
from statistics import median

import pytest
import torch

from flakit.cases import inverse as case
from flakit.cases.decay_gradient import ROUNDINGS
from flakit.cases.inverse import FORMS, errors, invert, law, law_of_range, matrix, onset
from flakit.numerics.errors import compare
from flakit.numerics.evaluate import truth
from flakit.ops.rwkv7.chunk_torch import inverse as operators_own

SETTINGS = list(product((0.5, 0.9, 1.0, 1.9), (-1e-3, -0.1, -0.6), (0.0, 0.3, 1.0)))  # alpha, w, spread


@pytest.mark.parametrize("C", [2, 4, 16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_inverse_in_float64(form, C):
    L = matrix(0.5, -0.5, 1.0, C=C)
    one = torch.eye(C, dtype=torch.float64)
    assert torch.allclose(invert(L, form, "float64") @ (one - L), one)


def test_a_matrix_is_what_the_operator_has_in_a_chunk():
    L, k = matrix(0.7, -0.3, 1.0, C=8), case.keys(8, 1.0)
    for i in range(8):
        for j in range(8):
            between = -0.3 * (i - j - 1)
            assert L[i, j].item() == pytest.approx(-0.7 * (k[i] @ k[j]).item() * math.exp(between) if j < i else 0.0)
    next_only = torch.diag(torch.full((15,), -0.9, dtype=torch.float64), -1)
    assert torch.allclose(matrix(0.9, -math.inf), next_only)


@pytest.mark.parametrize("form", ["blocks", "substitution"])
@pytest.mark.parametrize("rounding", ["float32", "tf32", "float16", "bfloat16"])
def test_the_right_forms_lose_next_to_nothing(rounding, form):
    for alpha, w, spread in SETTINGS:
        limit = 3 if alpha <= 1 else 40  # beyond 1 the inverse itself grows
        assert errors(matrix(alpha, w, spread), rounding)[form] < limit * 2.0 ** -ROUNDINGS[rounding]


def test_blocks_in_float32_are_the_operators_own():
    L = matrix(0.9, -0.1, 0.3, C=32).float()
    assert torch.equal(invert(L, "blocks"), operators_own(L))


# --- the law of lost digits -----------------------------------------------------------------------------------------


def ratios(predict, C, rounding):
    found = []
    for alpha, w, spread in SETTINGS:
        for seed in range(2):
            L = matrix(alpha, w, spread, C=C, seed=seed)
            error = errors(L, rounding)["product"]
            if error < math.inf:
                found.append(error / predict(L, rounding))
    return found


def agrees(predict) -> bool:
    """Within a factor of two at the median of every size and format, and of a few either way in nearly all settings."""
    for C in (16, 32):
        for rounding in ("float32", "tf32", "bfloat16"):
            found = ratios(predict, C, rounding)
            near = sum(0.1 < ratio < 3 for ratio in found) / len(found)
            if not (0.3 < median(found) < 1.5 and near > 0.9):
                return False
    return True


def test_law_predicts_the_digits_the_product_loses():
    assert agrees(law)


def size(x):
    return x.norm().item()


WRONG_LAWS = {
    "rounding alone": lambda L, rounding: 2.0 ** -ROUNDINGS[rounding],
    "the condition number": lambda L, rounding: 2.0 ** -ROUNDINGS[rounding] * size(invert(L, "blocks", "float64")) ** 2,
    "the last square": lambda L, rounding: 2.0 ** -ROUNDINGS[rounding] * size(case.powers(L)[len(L) // 2 - 1]),
    "one digit more": lambda L, rounding: law(L, rounding) / 8,
}


@pytest.mark.parametrize("planted", WRONG_LAWS)
def test_a_wrong_law_is_rejected(planted):
    assert not agrees(WRONG_LAWS[planted])


# --- the law of range -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("w", [0.0, -0.1])
def test_law_predicts_where_float16_ends(C, w):
    limit = law_of_range(C, w)
    assert onset(C, w) == pytest.approx(limit, rel=3e-3)
    assert limit == min(limit, 2.0)
    for wrong in (law_of_range(C, w - 0.05), limit * (2 ** (1 / C))):
        assert onset(C, w) != pytest.approx(wrong, rel=3e-3)


def test_range_in_numbers():
    assert law_of_range() == pytest.approx((65504 / 3432) ** (1 / 8))
    assert law_of_range(8) > 2 and onset(8) == math.inf
    assert onset(16, 0.0, "bfloat16") == math.inf  # a wide range, and no digits


# --- in the operator, and the numbers of the story ------------------------------------------------------------------


def test_in_the_operator():
    x = case.inputs(0.9)
    exact = truth("rwkv7", x)

    def worst(form, rounding):
        found = case.run(x, form, rounding)
        assert found.keys() == exact.keys()
        return max(compare(found[name], exact[name]).l2 for name in exact)

    assert worst("blocks", "float32") < 2e-6 and worst("substitution", "float32") < 2e-6
    assert worst("product", "float32") > 1e-5 and worst("product", "bfloat16") > 1.0
    assert not case.run(case.inputs(1.9), "product", "float16")["o"].isfinite().all()


def test_the_story():
    for row in case.reproduce():
        if "ends" not in row.what:
            assert row.measured == row.recorded == math.inf or 0.4 < row.measured / row.recorded < 2, row
        assert row.measured == row.law == math.inf or 0.2 < row.measured / row.law < 3, row


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: matrix(2.5), "alpha: expected 0 … 2, got 2.5"),
        (lambda: matrix(w=0.5), "w: expected a natural-log decay <= 0, got 0.5"),
        (lambda: matrix(C=24), "C: expected a power of two from 2, got 24"),
        (lambda: matrix(spread=-1.0), "spread: expected 0 or more, got -1.0"),
        (lambda: invert(matrix(), "lu"), "form: expected one of product, blocks, substitution, got 'lu'"),
        (lambda: invert(matrix(), rounding="float8"), "rounding: expected one of bfloat16, .*, got 'float8'"),
    ],
    ids=["alpha", "w", "C", "spread", "form", "rounding"],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
