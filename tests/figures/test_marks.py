"""What pictures mark with: rings only where cells are few, words within the axes, bars, and cells over other scales."""

import numpy as np
import pytest

from flakit.figures import style
from flakit.figures.canvas import Canvas, Cell
from flakit.figures.heatmap import HeatMap
from flakit.figures.marks import Bars, CellGrid, LabelledBars, Marked, NonFiniteRings, Ring, Strip, whole_ticks


def pixels(canvas):
    return canvas.rgba()[..., :3].astype(int).copy()


def coloured(picture, colour):
    """How many pixels are of a colour."""
    wanted = [int(colour[n : n + 2], 16) for n in (1, 3, 5)]
    return int((np.abs(picture - wanted).sum(-1) < 8).sum())


def on_a_map(kind, **look):
    """A map of zeros, [64, 64], and what marks it."""
    canvas = Canvas(3, 3)
    with style.context():
        ax = whole_ticks(canvas.axes(0.5, 0.5, 2, 2))
        heat = HeatMap(canvas, ax, name="map")
        heat.update(np.zeros((64, 64)))
        return canvas, kind(canvas, ax, **look)


def one(row, column, size=64):
    mask = np.zeros((size, size), bool)
    mask[row, column] = True
    return mask


@pytest.mark.parametrize(("row", "column"), [(0, 63), (63, 0), (30, 30), (0, 0)])
def test_a_ring_lies_around_its_cell_and_its_word_within_the_axes(row, column):
    canvas, ring = on_a_map(Ring)
    before = pixels(canvas)
    ring.update(one(row, column), "here")
    changed = np.argwhere((pixels(canvas) != before).any(-1))
    top, left = changed.min(0)
    bottom, right = changed.max(0)
    x, y, width, height = canvas.box("map", row, column)
    at = 300 * (y + height / 2), 300 * (x + width / 2)
    assert top <= at[0] <= bottom and left <= at[1] <= right
    assert bottom - top < 40 and right - left < 75
    # The ring itself reaches a few pixels over the frame, which is 50 pixels from the edge.
    assert min(top, left) > 38 and max(bottom, right) < 262


def test_no_ring_where_there_is_nothing_or_enough_to_be_seen():
    canvas, ring = on_a_map(Ring)
    before = pixels(canvas)
    ring.update(np.zeros((64, 64), bool), "none")
    assert (pixels(canvas) == before).all()
    many = np.zeros((64, 64), bool)
    many[:, 40:] = True
    ring.update(many, "many")
    assert (pixels(canvas) == before).all()
    ring.update(one(3, 3), "one")
    assert coloured(pixels(canvas), style.BROKEN) > 40


def test_rings_of_what_is_not_finite_have_their_colours():
    canvas, rings = on_a_map(NonFiniteRings)
    values = np.zeros((64, 64))
    values[2, 60] = np.nan
    rings.update(values)
    found = pixels(canvas)
    assert coloured(found, style.NAN["edgecolor"]) > 40 and coloured(found, style.INF["edgecolor"]) == 0
    values[50, 5] = -np.inf
    rings.update(values)
    found = pixels(canvas)
    assert coloured(found, style.NAN["edgecolor"]) > 40 and coloured(found, style.INF["edgecolor"]) > 40


def test_marked_cells_are_filled():
    canvas, marked = on_a_map(Marked, facecolor=style.GREEN)
    marked.update(one(10, 20) | one(10, 21))
    area = (200 / 64) ** 2
    assert coloured(pixels(canvas), style.GREEN) == pytest.approx(2 * area, abs=12)
    marked.update(np.zeros((64, 64), bool))
    assert coloured(pixels(canvas), style.GREEN) == 0


@pytest.mark.parametrize("horizontal", [False, True])
def test_bars_end_where_they_are_told(horizontal):
    canvas = Canvas(2, 2)
    with style.context():
        ax = canvas.axes(0, 0, 2, 2)
        ax.set_axis_off()
        ax.set(xlim=(-0.5, 3.5), ylim=(0, 1)) if not horizontal else ax.set(xlim=(0, 1), ylim=(-0.5, 3.5))
        bars = Bars(canvas, ax, horizontal=horizontal, thick=1.0, facecolor=style.BLUE)
    for ends, begin, share in (([1, 0.5, np.nan, 0], 0.0, 1.5), ([1, 0.5, 0.5, 0], 0.5, 1.0)):
        bars.update(ends, begin)
        assert coloured(pixels(canvas), style.BLUE) / 200**2 == pytest.approx(share / 4, abs=0.02)


def test_cells_over_a_logarithmic_scale_can_be_pointed_at():
    canvas = Canvas(2, 2)
    with style.context():
        ax = canvas.axes(0.5, 0.5, 1, 1)
        ax.set(yscale="log", ylim=(1e-9, 10), xlim=(-0.5, 3.5))
        over = CellGrid(canvas, ax, "bars")
    over.update(1, 4)
    assert canvas.maps == {"bars": (1, 4)}
    assert canvas.cell(0.30, 0.7) == Cell("bars", 0, 0) and canvas.cell(0.70, 0.3) == Cell("bars", 0, 3)
    assert canvas.cell(0.1, 0.5) is None
    assert canvas.box("bars", 0, 1) == pytest.approx((0.375, 0.25, 0.125, 0.5))


def test_labelled_bars_end_where_their_labels_begin():
    canvas = Canvas(2, 2)
    with style.context():
        ax = canvas.axes(0.25, 0.25, 1.5, 1.5)
        bars = LabelledBars(canvas, ax, "bars", [style.BLUE, style.BLUE], gap=0.05)
    for lengths, labels in (((0.5, 0.25), ("half", "quarter")), ((0.0, 1.0), ("none", "all"))):
        bars.update(lengths, labels)
        share = coloured(pixels(canvas), style.BLUE) / 150**2
        assert share == pytest.approx(0.3 * sum(lengths), abs=0.01)
        assert [(text.get_text(), text.get_position()[0]) for text in ax.texts] == [
            (label, pytest.approx(length + 0.05)) for label, length in zip(labels, lengths, strict=True)
        ]
    assert canvas.maps == {"bars": (2, 1)}
    with pytest.raises(ValueError):
        bars.update((0.1,), ("one",))


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
