"""The picture of a trace: lanes and programs hatched, the first outlined, the tree in words."""

import numpy as np

from flakit.figures import style
from flakit.figures.trace import Branch, TraceFigure
from tests.figures.test_plots import has_colour


def drawn(programs=True, tree=()):
    tile, grid = np.zeros((16, 8)), np.zeros((4, 8))
    tile[8:, 2], tile[9, 3], grid[2, 1:3] = np.inf, np.nan, np.nan
    figure = TraceFigure()
    figure.update(
        title="First non-finite tile", subtitle="k.py:3", tile=tile, lane=(8, 2), tile_name="float32 [16, 8]",
        programs=grid if programs else None, program=(2, 1), programs_name="kernel", empty=grid > 0, tree=tree, more=2,
    )  # fmt: skip
    return figure


def words(figure):
    return [text.get_text() for text in figure._tree.texts]


def test_lanes_programs_and_tree():
    tree = [Branch(0, "3  tl.exp(x)", "inf born", False), Branch(1, "4  tl.dot(a, b)", "NaN", True)]
    figure = drawn(tree=tree)
    assert figure.canvas.png().startswith(b"\x89PNG")
    assert words(figure) == ["3  tl.exp(x)", "inf born", "4  tl.dot(a, b)", "NaN", "… and 2 more"]
    for colour in (style.NAN["facecolor"], style.INF["facecolor"], style.FINITE, style.BLUE):
        assert has_colour(figure.canvas, colour)


def test_without_a_grid_and_with_a_long_tree():
    figure = drawn(programs=False, tree=[Branch(min(i, 4), f"{i}", "inf", False) for i in range(30)])
    figure.canvas.png()
    _, grid = figure._maps
    assert not grid[1].get_visible() and not grid[2].get_visible()
    assert words(figure)[-1] == "… and 23 more"
