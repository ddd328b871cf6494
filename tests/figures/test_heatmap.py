"""Heat maps: no bad cell is lost, none is told by colour alone, and a new shape is shown as a fresh figure would."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from flakit.figures import style
from flakit.figures.canvas import Canvas
from flakit.figures.heatmap import HeatMap, outline


def heatmap(values=None, rows_vary=False, **masks):
    canvas = Canvas(3, 2)
    with style.context():
        ax = canvas.figure.add_axes((0.2, 0.2, 0.6, 0.6))
        shown = HeatMap(canvas, ax, vmin=0, vmax=10, rows_vary=rows_vary)
    if values is not None:
        shown.update(values, **masks)
    return shown


def cell(shown, row, column, shape):
    """The colours of a cell's pixels, its border left out."""
    box = shown.ax.get_window_extent()
    height = shown.canvas.pixels[1]
    x = box.x0 + np.array([column + 0.1, column + 0.9]) * box.width / shape[1]
    y = height - box.y1 + np.array([row + 0.1, row + 0.9]) * box.height / shape[0]
    pixels = shown.canvas.rgba()[int(y[0]) : int(y[1]), int(x[0]) : int(x[1]), :3]
    return np.unique(pixels.reshape(-1, 3), axis=0)


def colour(name):
    return np.round(np.array(to_rgb(name)) * 255)


def test_finite_cells_are_flat_and_non_finite_ones_hatched():
    values = np.array([[1.0, np.nan], [np.inf, -np.inf]])
    shown = heatmap(values)
    assert len(cell(shown, 0, 0, (2, 2))) == 1
    for row, column, look in ((0, 1, style.NAN), (1, 0, style.INF), (1, 1, style.INF)):
        colours = cell(shown, row, column, (2, 2))
        assert len(colours) > 1
        assert (colours == colour(look["facecolor"])).all(1).any()
        assert np.abs(colours - colour(look["edgecolor"])).max(1).min() < 30  # a line is not a whole pixel wide


def test_empty_and_known_finite_cells_have_their_own_colours():
    values = np.full((2, 2), np.nan)
    values[1, 1] = 5
    shown = heatmap(values, empty=np.array([[1, 0], [0, 0]], bool), finite=np.array([[0, 1], [0, 0]], bool))
    assert (cell(shown, 0, 0, (2, 2)) == colour(style.EMPTY)).all()
    assert (cell(shown, 0, 1, (2, 2)) == colour(style.FINITE)).all()
    assert len(cell(shown, 1, 0, (2, 2))) > 1


def test_row_zero_is_on_top():
    shown = heatmap(np.array([[0.0], [10.0]]))
    dark, light = cell(shown, 0, 0, (2, 1)), cell(shown, 1, 0, (2, 1))
    assert light.sum() > dark.sum()


@pytest.mark.parametrize("bad", [0, 517, 1999])
def test_one_bad_row_among_more_rows_than_pixels_is_shown(bad):
    values = np.ones((2000, 3))
    clean = heatmap(values).canvas.rgba().copy()
    values[bad, 1] = np.nan
    changed = (heatmap(values).canvas.rgba() != clean).any(-1)
    assert changed.any()


@pytest.mark.parametrize("kind", [np.nan, np.inf])
@pytest.mark.parametrize(("rows", "columns"), [(100, 2), (2, 150), (2000, 3), (4, 900)])
def test_a_broken_row_or_column_is_four_pixels_wide(kind, rows, columns):
    down, look = rows > columns, style.NAN if np.isnan(kind) else style.INF
    values = np.ones((rows, columns))
    clean = heatmap(values).canvas.rgba()[..., :3].astype(int)
    for bad in (0, 37, max(rows, columns) - 1):
        (values := np.ones((rows, columns)))[(bad, slice(None)) if down else (slice(None), bad)] = kind
        shown = heatmap(values)
        changed = (np.abs(shown.canvas.rgba()[..., :3].astype(int) - clean) > 8).any(-1)
        across = changed.any(1 if down else 0).nonzero()[0]
        assert 3 <= len(across) <= 6 and np.ptp(across) == len(across) - 1, (bad, len(across))
        assert (shown.canvas.rgba()[..., :3] == colour(look["facecolor"])).all(-1).any()


@pytest.mark.parametrize("turned", [False, True])
def test_a_large_area_covers_its_cells_and_no_others(turned):
    mask = np.tri(100, 90, dtype=bool)  # its corner is one cell wide, of about two pixels
    mask[2, 20] = True  # a cell alone is not
    path = outline(mask.T if turned else mask, np.ones(2), np.array([4.0, 4.0]))
    corners = path.vertices.reshape(-1, 5, 2)[:, :4]
    areas = np.ptp(corners, axis=1).prod(1)
    assert areas.sum() == mask.sum() - 1 + 16


@pytest.mark.parametrize("rows_vary", [False, True])
def test_a_new_shape_is_shown_as_a_fresh_figure_would(rows_vary):
    rng = np.random.default_rng(0)
    old, new = rng.random((8, 4)) * 10, rng.random((30, 4)) * 10
    new[3, 2] = np.nan
    shown = heatmap(old, rows_vary)
    shown.canvas.rgba()
    shown.update(new)
    assert (shown.canvas.rgba() == heatmap(new, rows_vary).canvas.rgba()).all()
