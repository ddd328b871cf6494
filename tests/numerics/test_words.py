"""Numbers in words: what a float, a whole number, a verdict and what is no number are called."""

import math

import numpy as np
import pytest
import torch

from flakit.numerics.words import error, number, percent


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (1 / 3, "0.3333"), (-88.72284, "-88.72"), (1e-7, "1e-07"), (2.0, "2"), (0.0, "0"), (123456.0, "1.235e+05"),
        (np.float32(0.5), "0.5"), (123456, "123456"), (np.int64(-3), "-3"), (True, "yes"), (False, "no"),
        (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf"), ("does not compile", "does not compile"),
        (torch.bfloat16, "bfloat16"), (None, "None"), (torch.tensor(1 / 3), "0.3333"), (torch.tensor([7]), "7"),
        (torch.tensor(math.nan), "NaN"), (np.array(True), "yes"),
    ],
)  # fmt: skip
def test_number(x, words):
    assert number(x) == words


def test_number_says_what_it_is_told_to():
    assert [number(x, 2, nan="", inf="never") for x in (1 / 3, math.nan, math.inf, -math.inf)] == [
        "0.33", "", "never", "-inf",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("x", "words"),
    [(1.26e-7, "1.3e-07"), (12.0, "1.2e+01"), (0.0, "0 (exact)"), (math.inf, "not finite"), (math.nan, "not finite")],
)
def test_error(x, words):
    assert error(x) == words


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0%"), (1e-9, "<1%"), (0.5, "50%"), (1 - 1e-9, ">99%"), (1.0, "100%")]
)
def test_percent_never_rounds_to_nothing_or_everything(share, words):
    assert percent(share) == words
