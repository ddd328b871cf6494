"""The picture of efficiency against ranks: what is drawn is what was given, and it can be read."""

import pytest

from flakit.bench.simulate import drawn
from flakit.figures.over_ranks import over_ranks
from tests.figures.words import assert_legible

LINES = {"few": [1.0, 0.5], "many": [1.0, 0.9]}


def test_lines_and_measured_points():
    panels = {"tokens": LINES, "ways": {"many": [1.0, 0.7]}}
    picture = over_ranks("ranks", [1, 2], panels, {"many": [(2, 0.95, True), (2, 0.9, False)]})
    first, second = picture.figure.axes
    few, many, *points = first.get_lines()
    assert (list(few.get_ydata()), list(many.get_ydata())) == (LINES["few"], LINES["many"])
    assert [(list(x.get_xdata()), list(x.get_ydata())) for x in points] == [([2], [0.95]), ([2], [0.9])]
    assert [x.get_markerfacecolor() for x in points] == [many.get_color(), "white"]
    assert {x.get_markeredgecolor() for x in points} == {many.get_color()}
    assert len(second.get_lines()) == 1  # of the first panel alone was anything measured
    assert picture.alt == "ranks: efficiency against ranks. tokens: few, many; ways: many"


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_what_is_simulated_is_legible(op):
    assert_legible(over_ranks(*drawn(op)), least=8.5)
