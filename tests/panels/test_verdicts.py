"""A case's rows as lanes: where marks stand, what is hatched, what is said."""

import math

import numpy as np
import pytest

from flakit.cases.laws import Row
from flakit.panels.verdicts import VerdictFigure

NAN, INF = math.nan, math.inf


def row(law, measured, recorded=NAN, within=0.1, what="it"):
    return Row(what, recorded, law, measured, within)


@pytest.fixture
def figure():
    return VerdictFigure(3)


def words(figure, lane):
    return [text.get_text() for text in figure._texts[lane]]


def test_the_lane_of_a_number(figure):
    figure.update("case", [row(1.0, 10.0, what="a: first"), row(100.0, 100.0, 1.0, what="a: second")])
    assert figure._title.get_text() == "case: a"
    assert words(figure, 0) == ["first", "1", "10", "✗ differ"]
    assert words(figure, 1) == ["second", "100", "100", "✓ agree"]
    (low, high), _ = figure._law.get_data()
    (middle, top), lanes = figure._measured.get_data()
    assert middle == pytest.approx((low + high) / 2) and top == high and list(lanes) == [0, 1]
    assert list(zip(*figure._recorded.get_data(), strict=True)) == [(low, 1)]
    spans = figure._within.get_segments()
    assert [np.ptp(span[:, 0]) for span in spans] == pytest.approx([2 * math.log10(1.1) * (middle - low)] * 2)


@pytest.mark.parametrize(
    ("law", "measured", "says", "hatched"),
    [
        (INF, INF, ["inf", "inf", "✓ agree"], (False, True)),
        (2.0, INF, ["2", "inf", "✗ differ"], (False, True)),
        (2.0, NAN, ["2", "NaN", "✗ differ"], (True, False)),
        (NAN, 3.0, ["", "3", "no law"], (False, False)),
        (0.0, 0.0, ["0", "0", "✓ agree"], (False, False)),
        (True, False, ["yes", "no", "✗ differ"], (False, False)),
        ("dr", "dr", ["dr", "dr", "✓ agree"], (False, False)),
        (-2.0, -2.0, ["-2", "-2", "✓ agree"], (False, False)),
    ],
    ids=str,
)
def test_what_is_no_positive_number(figure, law, measured, says, hatched):
    before = figure.canvas.png()
    figure.update("case", [row(law, measured)])
    assert words(figure, 0)[1:] == says
    assert tuple(patch.get_visible() for patch in figure._hatched) == hatched
    assert figure.canvas.png() != before


def test_more_rows_than_room_and_fewer_again(figure):
    figure.update("case", [row(1.0, 1.0, what=f"row {n}") for n in range(5)])
    assert [words(figure, lane)[0] for lane in range(5)] == [f"row {n}" for n in range(5)]
    assert figure._ax.get_ylim() == (4.5, -0.5)
    figure.update("case", [row(1.0, 1.0, what="one"), row(1.0, 1.0, what="two")])
    assert [text.get_visible() for text in (texts[0] for texts in figure._texts)] == [True] * 2 + [False] * 3
    first = figure.canvas.png()
    figure.update("case", [row(1.0, 2.0, what="one"), row(1.0, 1.0, what="two")])
    figure.update("case", [row(1.0, 1.0, what="one"), row(1.0, 1.0, what="two")])
    assert figure.canvas.png() == first
