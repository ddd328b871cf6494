"""The inverse panel: the story's setting, its words, and the script that remakes them."""

import contextlib
import io
import re

import pytest

from flakit.cases import inverse as case
from flakit.panels.inverse import inverse


@pytest.fixture(scope="module")
def panel():
    return inverse()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def numbers(panel):
    return {name: float(x) for name, x in re.findall(r"(law|measured|Blocks:|Substitution:) ([\d.e+-]+\d)", panel.text)}


def test_starts_at_the_story(panel):
    found = numbers(panel)
    assert 1e-5 < found["measured"] < 1e-4 and found["Blocks:"] < 3e-7 and found["Substitution:"] < 3e-7
    assert "Largest power L^7: 3.9e+02 times the inverse, about 2.6 digits cancel" in panel.text
    assert "stays in range for every alpha" in panel.text


@pytest.mark.parametrize("rounding", ["float32", "tf32", "bfloat16"])
def test_law_meets_measurement(panel, rounding):
    for alpha, w, spread in ((0.5, -0.1, 0.3), (0.95, -0.001, 1.0), (1.9, -0.1, 0.3)):
        found = numbers(panel.set(rounding=rounding, alpha=alpha, w=w, spread=spread))
        assert 0.1 < found["measured"] / found["law"] < 3


def test_float16_ends_where_its_law_says(panel):
    panel.set(rounding="float16", alpha=1.9)
    assert "Product: law not finite, measured not finite" in panel.text
    assert "turns non-finite at alpha = 1.45" in panel.text and numbers(panel)["Blocks:"] < 1e-2
    panel.set(alpha=1.4, w=0.0)
    assert "law not" not in panel.text and case.law_of_range() > 1.4


def test_keys_that_differ_leave_nothing_to_cancel(panel):
    panel.set(spread=5.0)
    assert "nothing to cancel" in panel.text


@pytest.mark.parametrize("w", [0.0, float("-inf")])
def test_the_ends_of_the_decay(panel, w):
    panel.set(w=w)
    assert "Error" not in panel.text and numbers(panel)["Blocks:"] < 3e-7


def test_the_picture_changes_with_the_setting_and_comes_back(panel):
    start = panel.png
    seen = {start}
    for change in (
        {"alpha": 1.5},
        {"rounding": "float16"},
        {"form": "blocks"},
        {"C": 32},
        {"spread": 0.3},
        {"w": -0.5},
    ):
        panel.set(**change)
        assert panel.png not in seen
        seen.add(panel.png)
    panel.reset()
    assert panel.png == start


def test_script_prints_what_the_panel_says(panel):
    panel.set(alpha=1.0, rounding="bfloat16")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    L = case.matrix(1.0, -0.001)
    assert f"law of the product {case.law(L, 'bfloat16')}" in printed.getvalue()
    for form, error in case.errors(L, "bfloat16").items():
        assert f"{form} {error}" in printed.getvalue()


@pytest.mark.parametrize("wrong", [{"form": "lu"}, {"alpha": 2.5}, {"w": 1.0}, {"C": 24}, {"rounding": "float64"}])
def test_bad_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        inverse(**wrong)
