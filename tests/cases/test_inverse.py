"""Three inverses equal in algebra: each against float64, and the product's lost digits and range against their laws."""

import math
from itertools import product
from statistics import median

import pytest
import torch

from flakit.cases import inverse as case
from flakit.cases.decay_gradient import ROUNDINGS
from flakit.cases.inverse import FORMS, LARGEST, errors, invert, law, law_of_range, matrix, onset
from flakit.figures.canvas import Cell
from flakit.numerics.errors import compare
from flakit.numerics.evaluate import truth
from flakit.ops.rwkv7.chunk_torch import inverse as operators_own
from tests.cases import drawing

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


@pytest.mark.parametrize("rounding", LARGEST)
def test_the_law_of_digits_knows_the_range(rounding):
    for alpha, spread in product((0.9, 1.4, 1.5, 2.0), (0.0, 0.3, 1.0)):
        L = matrix(alpha, 0.0, spread)
        assert (law(L, rounding) == math.inf) == (errors(L, rounding)["product"] == math.inf), (alpha, spread)


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


# --- the picture ----------------------------------------------------------------------------------------------------

STORY = dict(alpha=0.9, w=-1e-3, spread=0.0, C=16, rounding="float32")


def drawn(**setting):
    return drawing.drawn(case, **STORY | setting)


@pytest.mark.parametrize("setting", [{}, {"alpha": 1.5, "rounding": "float16"}, {"spread": 0.7, "C": 32}], ids=str)
def test_it_shows_what_is_measured(setting):
    _, shown = drawn(**setting)
    product_, blocks, substitution, _ = shown.rows
    said = {"product": product_.measured, "blocks": blocks.measured, "substitution": substitution.measured}
    assert {form: error if error < math.inf else "not finite" for form, error in shown.errors.items()} == said
    assert product_.law == (shown.law if shown.law < math.inf else "not finite")
    for form, made in shown.made.items():
        off = compare(made, shown.exact).l2
        assert off == pytest.approx(shown.errors[form]) or not made.isfinite().all()


def test_equal_tokens_leave_what_the_recurrence_leaves():
    """Each of the tokens between 0 and 15 keeps e^w - alpha of what it finds: no decay is rounded to float32."""
    w, alpha = -1e-3, 0.9
    exact = invert(matrix(alpha, w), "blocks", "float64")[15, 0].item()
    assert exact == pytest.approx(-alpha * (math.exp(w) - alpha) ** 14, rel=0.01, abs=0)


def test_the_terms_sum_to_an_element_of_the_inverse():
    for setting in ({}, {"spread": 0.5, "w": -0.1}, {"C": 64, "alpha": 0.3}):
        _, shown = drawn(**setting)
        i, j = shown.element
        assert shown.terms.sum().item() == pytest.approx(shown.exact[i, j].item(), abs=1e-9)
    _, shown = drawn()
    assert shown.element == (15, 0) and shown.terms[7].item() == pytest.approx(3432 * 0.9**8 * math.exp(-0.007))
    assert (shown.terms[::2] < 0).all() and (shown.terms[1::2] > 0).all()


def test_the_picture_marks_the_power_that_leaves_the_format():
    fine, _ = drawn(rounding="float16")
    assert not fine._bars["infinite"].patch.get_visible() and fine._lines["end"].get_visible()
    assert not drawn()[0]._lines["end"].get_visible()
    broken, shown = drawn(rounding="float16", alpha=1.5, w=0.0)
    assert broken._bars["infinite"].patch.get_visible() and shown.multiplied > 65504
    assert not shown.made["product"].isfinite().all() and shown.made["blocks"].isfinite().all()
    assert broken._lost.get_x() == pytest.approx(1.45) and fine.canvas.png() != broken.canvas.png()


def test_its_sentence_changes_with_the_law():
    def said(**setting):
        made, shown = drawn(**setting)
        return made.say(shown)

    limit = law_of_range()
    assert "cancel" in said(alpha=0.999 * limit, w=0.0, rounding="float16")
    assert "float16 ends at 65504: it is infinite there" in said(alpha=1.001 * limit, w=0.0, rounding="float16")
    assert "390 times" not in said() and "3.9e+02 times the whole inverse: they cancel" in said()
    assert "nothing cancels" in said(spread=5.0)


def test_its_arithmetic():
    made, shown = drawn(rounding="float16", alpha=1.5, w=0.0)
    assert made.arithmetic(shown, Cell("terms", 0, 7)).startswith(f"L^8[15, 0] = {3432 * 1.5**8:.4g}: rounding")
    assert "beyond 65504, where float16 ends" in made.arithmetic(shown, Cell("terms", 0, 7))
    assert "NaN (true: " in made.arithmetic(shown, Cell("product", 12, 0))
    assert "product not finite, by the law not finite" in made.arithmetic(shown, Cell("over alpha", 0, 35))
    assert "0 above it" in made.arithmetic(shown, Cell("blocks", 3, 3))
