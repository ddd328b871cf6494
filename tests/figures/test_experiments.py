"""The picture of steps: what is drawn is what was given, and no word lies over another."""

import pytest

from flakit.figures import style
from flakit.figures.experiments import experiments, times
from flakit.numerics import recorded
from tests.figures.words import assert_legible

STEP = {
    "op": "rwkv6", "part": "output", "name": "half", "expected": "half of it", "expected_ms": 1.0, "before_ms": 2.0,
    "after_ms": 1.5, "times": None, "kept": True,
}  # fmt: skip
HOPED = STEP | {"name": "hoped", "expected": "faster", "expected_ms": None, "after_ms": [3.0, 5.0], "kept": False}
TIMES = HOPED | {"name": "warps", "before_ms": None, "after_ms": None, "times": [1.5, 3], "expected": None}


def drawn(ax, y):
    """(colour, x) of every mark on one line; the first of all is at 1."""
    return [(line.get_color(), line.get_xdata()[0]) for line in ax.get_lines()[1:] if list(line.get_ydata())[:1] == [y]]


def test_every_step_has_its_expectation_and_its_outcome():
    picture = experiments([STEP, HOPED, TIMES])
    (ax,) = picture.figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["output: half", "output: hoped", "output: warps"]
    assert drawn(ax, 0) == [("white", 0.5), (style.BLUE, 0.75)]
    assert {colour for y in (1, 2) for colour, _ in drawn(ax, y)} == {style.BROKEN}
    assert (drawn(ax, 1)[0][1], drawn(ax, 2)[0][1]) == (1.5, 1.5)
    (shaded,) = ax.patches
    assert shaded.get_y() < 1 < shaded.get_y() + shaded.get_height() and shaded.get_x() + shaded.get_width() == 1
    assert "output: half: 2.00 → 1.50 ms; output: hoped: 2.00 → 3 to 5 ms; output: warps: × 1.5 to 3" in picture.alt


def test_how_many_times_as_long():
    assert [times(row) for row in (STEP, HOPED, TIMES)] == [(0.75, 0.75), (1.5, 2.5), (1.5, 3)]


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa", ""])
def test_the_recorded_steps_are_legible(op):
    table = recorded.read("h200_steps")
    picture = experiments([row for row in table.rows if row["op"] == op or not op], title=table.label)
    assert_legible(picture, least=8.5)
    (ax,) = picture.figure.axes
    low, high = ax.get_xlim()
    assert all(low < x < high for row in table.rows for x in times(row))
