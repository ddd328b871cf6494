"""Where a picture is cut for a narrow screen: between its maps, never through what is drawn."""

import io

import numpy as np
import pytest
from matplotlib.patches import ConnectionPatch
from PIL import Image

from docs import pieces
from flakit import panels
from flakit.figures import style
from flakit.figures.canvas import Canvas
from flakit.panels.base import NARROW


def ink_of(png):
    return (np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) != 255).any(-1)


def row_of_maps(count, *, joined=False, bars=True):
    """Maps in a row under a heading, each with a title, and a colour bar; and an arrow from the first to the second."""
    canvas = Canvas(5.9, 2.6)
    with style.context():
        wide, maps = 4.6 / count, []
        for n in range(count):
            ax = canvas.axes(0.5 + n * (wide + 0.7 / count), 0.7, wide - 0.6, 1.4)
            ax.set_title(f"map {n}")
            shown = ax.imshow(np.arange(12.0).reshape(3, 4), aspect="auto")
            if bars:
                canvas.figure.colorbar(
                    shown, cax=canvas.axes(0.5 + n * (wide + 0.7 / count) + wide - 0.5, 0.7, 0.1, 1.4)
                )
            maps.append(ax)
        canvas.figure.text(
            0.02, 0.93, "a heading that is as long as all of the maps, and belongs to none of them alone"
        )
        if joined:
            arrow = {"coordsA": "axes fraction", "coordsB": "axes fraction", "axesA": maps[0], "axesB": maps[1]}
            canvas.figure.add_artist(ConnectionPatch((0.5, 0.5), (0.5, 0.5), **arrow))
    return canvas, maps


def cut(canvas):
    """Pieces of what a canvas shows; its ink lies in them, and none of it on more than one side of a cut."""
    cuts, png = pieces.Cuts(), canvas.png()
    assert cuts.add(canvas.figure, png) == 0
    (found,) = cuts.pieces()
    return found, holding(found, ink_of(png))


def holding(found, ink):
    """The ink as often as pieces have it; fails where they lack some, or where two have the same."""
    times = np.zeros(ink.shape, int)
    for left, top, width, height, room in found:
        times[top : top + height, left : left + width] += 1
        assert (
            left >= 0 and top >= 0 and left + width <= ink.shape[1] and top + height <= ink.shape[0] and room >= width
        )
    assert (times[ink] == 1).all() and times.max() == 1
    return times


def piece_of(found, canvas, ax):
    """The piece that all of some axes, with their own colour bar and title, lie in."""
    height = canvas.figure.bbox.height
    box = ax.get_tightbbox(canvas.figure.canvas.get_renderer())
    (own,) = (
        piece
        for piece in found
        if piece[0] <= box.x0 and box.x1 <= piece[0] + piece[2]
        and piece[1] <= height - box.y1 and height - box.y0 <= piece[1] + piece[3]
    )  # fmt: skip
    return own


def test_maps_side_by_side_are_cut_apart_each_with_its_colour_bar_and_the_heading_alone():
    canvas, maps = row_of_maps(2)
    found, _ = cut(canvas)
    assert len(found) == 3 and found[0][1] + found[0][3] <= min(piece[1] for piece in found[1:])
    own = [piece_of(found, canvas, ax) for ax in canvas.figure.axes]
    assert own[0] == own[1] != own[2] == own[3] and [own[0], own[2]] == found[1:]
    assert found[1][4] == found[2][4] <= pieces.FITS  # letters as large in both, and no smaller than in the picture


def test_small_maps_stay_together_in_as_even_rows_as_may_be():
    canvas, maps = row_of_maps(4, bars=False)
    found, _ = cut(canvas)
    own = [piece_of(found, canvas, ax) for ax in maps]
    assert own[0] == own[1] != own[2] == own[3]


def test_maps_that_an_arrow_joins_are_one_piece():
    canvas, maps = row_of_maps(2, joined=True)
    found, _ = cut(canvas)
    assert piece_of(found, canvas, maps[0]) == piece_of(found, canvas, maps[1])


def test_a_small_picture_is_whole():
    canvas = Canvas(3, 2)
    with style.context():
        canvas.axes(0.4, 0.3, 1.0, 1.2), canvas.axes(1.8, 0.3, 1.0, 1.2)
    assert cut(canvas)[0] == [(0, 0, 300, 200, 300)]


def test_frames_are_cut_alike_until_one_draws_where_they_are_cut():
    canvas, _ = row_of_maps(2)
    cuts, middle = pieces.Cuts(), []
    with style.context():
        text = canvas.figure.text(0.7, 0.02, "")
    for words in ("", "words under a map", "other words"):
        text.set_text(words)
        canvas.stale()
        png = canvas.png()
        middle.append(cuts.add(canvas.figure, png))
        holding(cuts.pieces()[middle[-1]], ink_of(png))
    text.set_position((0.3, 0.5))
    text.set_text("words across both maps, over every line between the two")
    canvas.stale()
    png = canvas.png()
    last = cuts.add(canvas.figure, png)
    assert middle == [0, 0, 0] and last == 1
    assert len(cuts.pieces()[0]) > len(cuts.pieces()[1])
    holding(cuts.pieces()[1], ink_of(png))


@pytest.mark.parametrize(
    "code",
    [
        'decay_explorer(decay=-1.5, scheme="none")',
        'case("anchor", w=-88.8, row=16)',
        'case("masking", w=-3.5)',
        "diagnose()",
    ],
)
def test_every_pixel_of_a_panel_is_in_one_piece(code):
    panel = eval(f"panels.{code}", {"panels": panels})
    panel.width = NARROW
    panel.redraw()
    found, _ = cut(panel.canvas)
    assert len(found) > 2
