"""The picture of efficiency against ranks: what is drawn is what was given, and it can be read."""

import pytest

from flakit.bench.simulate import drawn
from flakit.figures.over_ranks import over_ranks
from tests.figures.words import assert_legible

LINES = {"few": [1.0, 0.5], "many": [1.0, 0.9]}


def test_lines_and_measured_points():
    picture = over_ranks("ranks", [1, 2], {"tokens": LINES, "ways": {"many": [1.0, 0.7]}}, {"many": [(2, 0.95)]})
    first, second = picture.figure.axes
    few, many, point = first.get_lines()
    assert (list(few.get_ydata()), list(many.get_ydata())) == (LINES["few"], LINES["many"])
    assert (list(point.get_xdata()), list(point.get_ydata())) == ([2], [0.95])
    assert point.get_color() == many.get_color()
    assert len(second.get_lines()) == 1  # of the first panel alone was anything measured
    assert picture.alt == "ranks: efficiency against ranks. tokens: few, many; ways: many"


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_what_is_simulated_is_legible(op):
    assert_legible(over_ranks(*drawn(op)), least=8.5)
