"""The picture of a trace: lanes and programs hatched, the first outlined, the tree in words, headroom as bars."""

import math

import numpy as np
import pytest

from flakit.figures import style
from flakit.figures.canvas import Cell
from flakit.figures.trace import Branch, Room, TraceFigure
from tests.figures.test_plots import has_colour

ROOMS = [Room("8  tl.exp(-b_gi)", 90.0, -1.28), Room("7  tl.exp(b_ge)", 44.36, 44.36), Room("9  tl.exp(x)", -3.0, 91.7)]
WIDTHS = (9.4, 5.9)


def drawn(programs=True, tree=(), rooms=(), width=9.4):
    tile, grid = np.zeros((16, 8)), np.zeros((4, 8))
    tile[8:, 2], tile[9, 3], grid[2, 1:3] = np.inf, np.nan, np.nan
    figure = TraceFigure(width)
    figure.update(
        title="First non-finite tile", subtitle="k.py:3", tile=tile, lane=(8, 2), tile_name="float32 [16, 8] · first",
        programs=grid if programs else None, program=(2, 1), programs_name="kernel", empty=grid > 0, tree=tree, more=2,
        rooms=rooms,
    )  # fmt: skip
    return figure


def words(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("width", WIDTHS)
def test_lanes_programs_and_tree(width):
    tree = [Branch(0, "3  tl.exp(x)", "inf born", False), Branch(1, "4  tl.dot(a, b)", "NaN", True)]
    figure = drawn(tree=tree, width=width)
    assert words(figure._tree) == ["3  tl.exp(x)", "inf born", "4  tl.dot(a, b)", "NaN", "… and 2 more"]
    for colour in (style.NAN["facecolor"], style.INF["facecolor"], style.FINITE, style.BLUE):
        assert has_colour(figure.canvas, colour)


@pytest.mark.parametrize("width", WIDTHS)
def test_without_a_grid_and_with_a_long_tree(width):
    figure = drawn(programs=False, tree=[Branch(min(i, 4), f"{i}", "inf", False) for i in range(30)], width=width)
    figure.canvas.png()
    _, grid = figure._maps
    assert not grid[1].get_visible() and not grid[2].get_visible() and "programs" not in figure.canvas.maps
    branches = (len(words(figure._tree)) - 1) // 2
    assert words(figure._tree)[-1] == f"… and {32 - branches} more"


@pytest.mark.parametrize("width", WIDTHS)
def test_headroom_is_a_bar_a_line(width):
    figure = drawn(rooms=ROOMS, width=width)
    figure.canvas.png()
    said = words(figure._rooms)
    assert said[::2] == ["1.28 over", "44.36 left", "91.70 left"] and said[1::2] == [room.where for room in ROOMS]
    bars = [patch.get_width() for patch in figure._rooms.patches]
    whole, used = bars[::2], bars[1::2]
    assert len(set(whole)) == 1 and [u / whole[0] for u in used] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("left, share", [(math.inf, 0.0), (-math.inf, 1.0)])
def test_an_infinite_exponent(left, share):
    figure = drawn(rooms=[Room("8  tl.exp(x)", -left, left)])
    figure.canvas.png()
    whole, used = (patch.get_width() for patch in figure._rooms.patches)
    assert used == share * whole


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_can_be_pointed_at_and_read(width):
    tree = [
        Branch(0, "3  " + "tl.exp(x) + " * 12, "inf born of finite numbers: 12 of 4096 lanes, 128 tiles " * 2, False)
    ]
    figure = drawn(tree=tree, rooms=ROOMS, width=width)
    canvas = figure.canvas
    canvas.png()
    assert canvas.pixels[1] <= (430 if width == 9.4 else 390)
    assert canvas.maps == {"tile": (16, 8), "programs": (4, 8), "tree": (1, 1), "rooms": (3, 1)}
    for name, (rows, columns) in canvas.maps.items():
        for cell in (Cell(name, 0, 0), Cell(name, rows - 1, columns - 1)):
            left, top, across, tall = canvas.box(name, cell.row, cell.column)
            assert canvas.cell(left + across / 2, top + tall / 2) == cell
    texts = [text for text in canvas.figure.findobj(lambda x: hasattr(x, "get_fontsize")) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 8.5
    renderer = canvas._agg.get_renderer()
    right = max(text.get_window_extent(renderer).x1 for text in (*figure._tree.texts, *figure._rooms.texts))
    assert right <= canvas.pixels[0]
