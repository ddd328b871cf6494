"""The pictures of lost digits: orange for the line that lost them alone, grey where nothing was measured, a matrix."""

import pytest

from flakit.figures import style
from flakit.figures.digits import DigitsFigure, Row
from tests.figures.test_plots import has_colour
from tests.instruments.matrices import Cell, digits_matrix

FINE = [Row("3  b_x = tl.load(x)", float("inf"), 7.2), Row("4  b_e = tl.exp(b_x)", 7.2, 6.1)]


@pytest.mark.parametrize("width", [9.4, 5.9])
def test_orange_is_the_line_that_lost_digits_and_nothing_else(width):
    figure = DigitsFigure(width)
    said = dict(title="Digits lost", subtitle="k.py:5", budget=4.8)
    figure.update(rows=FINE, **said)
    figure.canvas.png()
    assert not has_colour(figure.canvas, style.BROKEN) and has_colour(figure.canvas, style.BLUE)
    figure.update(rows=[*FINE, Row("5  b_e - b_y", 6.1, 1.2, True), Row("6  bits", None, None)], more=2, **said)
    figure.canvas.png()
    assert has_colour(figure.canvas, style.BROKEN) and has_colour(figure.canvas, style.EMPTY)
    words = [text.get_text() for text in figure._code.texts]
    assert words[2].startswith("5  b_e") and words[-1] == "… and 2 lines that lost less"


def test_the_matrix_counts_the_lines_that_were_named_rightly():
    right, wrong = ([Cell(0.0, False), Cell(4.0, True)], 1), ([Cell(float("inf"), True), Cell(0.0, False)], 1)
    assert digits_matrix({"a": right}).alt.endswith("in 1 the planted line is the one named.")
    picture = digits_matrix({"a": right, "b": wrong})
    assert picture.alt.startswith("2 planted losses") and "in 1 " in picture.alt
    picture.png()
    assert has_colour(picture, style.BROKEN) and has_colour(picture, style.GREEN)
