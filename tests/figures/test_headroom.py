"""The headroom figure: a lane for each kernel says what its exponent and limit say."""

import math

import numpy as np
import pytest

from flakit.cases.headroom import KERNELS
from flakit.figures.headroom import HeadroomFigure, verdict
from tests.figures.words import assert_legible

SETTING = {
    "title": "decays",
    "subtitle": "in float32",
    "edges": np.linspace(-5, 4, 10),
    "counts": [0, 0, 1, 4, 2, 0, 0, 0, 0],
    "limit": 88.72,
    "exponents": [163.0, 12.0, 0.0],
    "limits": [88.72, 88.72, 88.72],
    "uniform": [1.386, 88.72, math.inf],
}


def drawn(figure, **changed):
    figure.update(**{**SETTING, **changed})
    return figure.canvas.rgba().copy()


def test_a_lane_says_what_its_numbers_say():
    assert verdict(163.0, 88.72, 1.386) == "NaN: 163 is 1.84 × too much"
    assert verdict(12.0, 88.72, 88.72) == "holds up to 7.39 × these"
    assert verdict(0.0, 88.72, math.inf) == "never breaks" and verdict(0.0, 88.72, 1.8) == "not at this length"


@pytest.mark.parametrize("width, column", [(9.4, "words"), (5.9, "names")])
def test_all_words_are_inside_and_apart(width, column):
    figure = HeadroomFigure(KERNELS.values() if column == "words" else KERNELS, width)
    n = len(KERNELS)
    for limit in (88.72, 11.09):
        how = {"exponents": [1234.5] * 6 + [0.0] * 3 + [1.23] * (n - 9), "limits": [limit] * n, "uniform": [1.386] * n}
        drawn(figure, title="Decays of RWKV7, every decay times 0.01", subtitle="float32", limit=limit, **how)
        assert_legible(figure.canvas)


def test_draws_every_change_and_comes_back():
    figure = HeadroomFigure(["a", "b", "c"])
    first = drawn(figure)
    for changed in (
        {"exponents": [80.0, 12.0, 0.0]},
        {"limit": 11.09, "limits": [11.09] * 3},
        {"counts": np.arange(9)},
        {"uniform": [1.386, 5.9, math.inf]},
        {"title": "others"},
    ):
        assert not np.array_equal(drawn(figure, **changed), first), changed
        assert np.array_equal(drawn(figure), first)


def test_draws_decays_of_any_size():
    figure = HeadroomFigure(["a", "b", "c"])
    for size in (0.0, 1e-12, 1e12, math.inf):
        drawn(figure, exponents=[size, 1.0, 1.0], counts=np.zeros(9))
