"""The persistent canvas: a blitted redraw shows what a fresh figure would."""

import io
import threading

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from flakit.figures import style
from flakit.figures.canvas import Canvas, Cell
from flakit.figures.marks import CellGrid


def line(y, title=""):
    canvas = Canvas(3, 2)
    with style.context():
        ax = canvas.figure.add_axes((0.2, 0.2, 0.7, 0.6))
        ax.set(xlim=(0, 2), ylim=(0, 10))
        (artist,) = ax.plot([0, 1, 2], y)
        name = ax.set_title(title)
    canvas.moving(artist, name)
    return canvas, artist, name


def opened(png):
    return Image.open(io.BytesIO(png))


def test_a_blitted_redraw_equals_a_fresh_figure():
    canvas, artist, name = line([1, 2, 3], "before")
    before = canvas.rgba().copy()
    artist.set_ydata([9, 5, 1])
    name.set_text("after")
    fresh = line([9, 5, 1], "after")[0].rgba()
    assert (canvas.rgba() == fresh).all()
    assert (before != fresh).any()


def test_what_does_not_move_is_drawn_anew_only_when_stale():
    canvas, artist, _ = line([1, 2, 3])
    before = canvas.rgba().copy()
    artist.axes.set_ylabel("size")
    assert (canvas.rgba() == before).all()
    canvas.stale()
    assert (canvas.rgba() != before).any()


def test_png_holds_the_pixels():
    canvas, *_ = line([1, 2, 3])
    picture = opened(canvas.png())
    assert picture.size == canvas.pixels == (300, 200)
    assert (np.asarray(picture) == canvas.rgba()[..., :3]).all()


def test_a_denser_png_shows_the_same_and_leaves_redraws_as_they_were():
    def labelled(y, words):
        canvas, artist, _ = line(y)
        with style.context():
            label = canvas.figure.text(0.5, 0.9, words)
        canvas.labels(label)
        return canvas, artist, label

    def blocks(png):
        return np.asarray(opened(png).resize((30, 20), Image.Resampling.BOX), float)

    canvas, artist, label = labelled([1, 2, 3], "before")
    plain, dense = canvas.png(), canvas.png(2)
    assert opened(dense).size == (600, 400) and canvas.pixels == opened(plain).size == (300, 200)
    assert np.abs(blocks(dense) - blocks(plain)).max() < 30  # of 255
    assert np.abs(blocks(dense) - blocks(labelled([9, 5, 1], "before")[0].png())).max() > 60
    assert canvas.png() == plain
    artist.set_ydata([9, 5, 1])
    label.set_text("after")
    assert opened(canvas.png(2)).size == (600, 400)  # before a plain one of the same
    assert canvas.png() == labelled([9, 5, 1], "after")[0].png()


def test_axes_of_any_scale_can_be_divided_into_cells():
    canvas, artist, _ = line([1, 2, 3])
    over = CellGrid(canvas, artist.axes, "all")
    for rows, columns in ((1, 3), (4, 2)):
        over.update(rows, columns)
        assert canvas.maps == {"all": (rows, columns)}
        left, top, width, height = canvas.box("all", 0, 0)
        assert (left, top) == pytest.approx((0.2, 0.2))
        assert (width, height) == pytest.approx((0.7 / columns, 0.6 / rows))
        assert canvas.cell(0.89, 0.79) == Cell("all", rows - 1, columns - 1)
    plain = line([1, 2, 3])[0]
    assert (canvas.rgba() == plain.rgba()).all()


def test_ticks_made_while_drawing_share_the_style():
    canvas, artist, _ = line([1, 2, 3])
    artist.axes.set_xlim(0, 1000)
    canvas.stale()
    canvas.rgba()
    sizes = {label.get_fontsize() for label in artist.axes.get_xticklabels()}
    assert sizes == {8.5}


def test_two_threads_that_draw_at_once_leave_matplotlib_as_it_was():
    """The first would leave with the second inside, and the second then restore what it found: the first one's look."""
    before, sizes = dict(mpl.rcParams), []
    inside, left = threading.Event(), threading.Event()

    def first():
        with style.context():
            inside.set()
            left.wait(0.2)  # in vain where the second has to wait for this one to leave

    def second():
        inside.wait()
        with style.context():
            left.set()
            leaving.join(0.2)
            sizes.append(mpl.rcParams["axes.labelsize"])

    leaving, staying = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (leaving, staying):
        thread.start()
    for thread in (leaving, staying):
        thread.join()
    assert sizes == [9] and dict(mpl.rcParams) == before


def test_a_canvas_says_what_it_shows():
    canvas = Canvas(4, 3)
    assert repr(canvas) == "picture"
    ax = canvas.axes(0.5, 0.5, 3, 2)
    ax.plot([0, 1], [0, 1], label="measured")
    ax.set(xlabel="tokens", ylabel="log decay")
    ax.set_title("where it breaks", loc="left")
    ax.legend()
    assert repr(canvas) == "picture of where it breaks: log decay against tokens: measured"


def test_axes_in_inches():
    canvas = Canvas(4, 2)
    box = canvas.axes(1, 0.5, 2, 1).get_window_extent()
    assert np.allclose(box.extents, (100, 50, 300, 150))
