"""The picture of a transposed mask: each kind of entry hatched where it is, tiles drawn, nothing where none compile."""

import numpy as np
import pytest

from flakit.cases import transposed_mask as case
from flakit.figures import style
from flakit.figures.transposed_mask import MISSING, OUTSIDE, TileFigure
from tests.figures.test_plots import has_colour


def shown(K, V, BK=32, BV=32, **parts):
    figure = TileFigure(64)
    figure.update(title="t", size=(K, V), tile=(BK, BV), **parts)
    return figure


def area(patch):
    corners = patch.get_path().vertices.reshape(-1, 5, 2)
    return (np.ptp(corners, axis=1).prod(1)).sum() if patch.get_visible() else 0


@pytest.mark.parametrize(("K", "V"), [(100, 120), (40, 64), (64, 64)])
def test_hatched_areas_are_the_law(K, V):
    figure = shown(K, V, loaded=case.tiles(K, V), counts=np.ones((64, 64)))
    assert [area(patch) for patch in figure._kinds] == [case.law(K, V)] * 2
    assert has_colour(figure.canvas, MISSING["facecolor"]) == has_colour(figure.canvas, OUTSIDE["facecolor"])


def test_nothing_is_hatched_under_the_right_mask():
    figure = shown(100, 120, loaded=case.tiles(100, 120, transposed=False), counts=np.zeros((64, 64)))
    assert [area(patch) for patch in figure._kinds] == [0, 0]


def test_refused():
    figure = shown(40, 64, 16, 64, refused="no")
    assert [area(patch) for patch in figure._kinds] == [0, 0]
    assert (figure._refused.get_text(), figure._sizes_refused.get_text()) == ("no", "no size at all")
    assert not figure._here[0].get_visible() and has_colour(figure.canvas, style.EMPTY)


def test_edges_of_tiles():
    x, y = shown(40, 33)._edges.get_data()
    assert np.isfinite(x).sum() == 4 and {31.5} == set(np.array(y)[:2]) == set(np.array(x)[3:5])


def test_a_new_size_is_shown_as_a_fresh_figure_would():
    figure = shown(100, 120, loaded=case.tiles(100, 120), counts=np.eye(64) * 9)
    figure.canvas.rgba()
    new = dict(title="t", size=(40, 20), tile=(16, 16), loaded=case.tiles(40, 20, 16, 16), counts=np.eye(64) * 5)
    figure.update(**new)
    fresh = TileFigure(64)
    fresh.update(**new)
    assert (figure.canvas.rgba() == fresh.canvas.rgba()).all()
