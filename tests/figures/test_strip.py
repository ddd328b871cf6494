"""Cells with words: there where there is a cell, readable on their colour."""

import numpy as np

from flakit.figures import style
from flakit.figures.canvas import Canvas
from flakit.figures.strip import Strip


def test_words_stand_in_their_cells_and_leave_with_them():
    canvas = Canvas(4, 1)
    strip = Strip(canvas, canvas.axes(0.2, 0.2, 3.6, 0.6), 1, 3, name="memory")
    strip.update([[0.0, 1.0, 0.0]], [["a", "b", "c"]], empty=np.array([[False, False, True]]))
    (words,) = strip._words
    assert canvas.maps == {"memory": (1, 3)}
    assert [text.get_text() for text in words] == ["a", "b", "c"]
    assert [text.get_color() for text in words] == ["white", style.BLACK, style.BLACK]
    three = canvas.png()
    strip.update([[0.0, 1.0]], [["a", "b"]])
    assert [text.get_visible() for text in words] == [True, True, False] and canvas.png() != three


def test_axes_in_inches():
    canvas = Canvas(4, 2)
    box = canvas.axes(1, 0.5, 2, 1).get_window_extent()
    assert np.allclose(box.extents, (100, 50, 300, 150))
