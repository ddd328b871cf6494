"""The film strip of states."""

import numpy as np

from flakit.figures import style
from flakit.figures.states import filmstrip
from tests.figures.test_plots import has_colour

STATES = [np.eye(3) * n for n in range(4)]


def test_filmstrip_has_one_colour_scale():
    strip = filmstrip(STATES, "abcd", ["0", "1", "2"], title="states")
    first, *_, last, bar = strip.figure.axes
    cells = [next(x.picture for x in ax.get_children() if hasattr(x, "picture")) for ax in (first, last)]
    assert (cells[0] == cells[0][0, 0]).all()  # all zero: one colour
    assert (cells[0][0, 0] == cells[1][0, 1]).all()  # zero is the same colour everywhere
    assert (cells[1][0, 0] != cells[1][0, 1]).any()
    assert [text.get_text() for text in bar.get_yticklabels()] == ["-3", "0", "3"]
    assert repr(strip) == "states: heat maps of the state, a, b, c, d"


def test_filmstrip_hatches_what_is_not_finite():
    assert not has_colour(filmstrip(STATES, "abcd", "012", title=""), style.INF["facecolor"])
    grown = [*STATES[:3], np.where(np.eye(3) > 0, np.inf, 0.0)]
    assert has_colour(filmstrip(grown, "abcd", "012", title=""), style.INF["facecolor"])


def test_filmstrip_of_zeros():
    assert filmstrip([np.zeros((2, 5))], ["a"], "01", title="").png().startswith(b"\x89PNG")
