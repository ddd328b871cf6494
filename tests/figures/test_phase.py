"""The phase diagram's figure: cells where they belong, the law's border between them."""

import numpy as np
import pytest
import torch

from flakit.figures.canvas import Cell
from flakit.figures.phase import Map, PhaseFigure, phase
from flakit.numerics.sweep import sweep
from tests.figures.words import assert_legible

DECAY = np.geomspace(0.01, 100, 5)  # 0.01, 0.1, 1, 10, 100


def measured(**changed):
    share = np.ones((3, 5))
    share[0, 3:] = share[1, 2:] = 0.5
    error = np.full((3, 5), 1e-6)
    law = np.array([5.0, 0.5, np.inf])
    return Map(**{"rows": (16, 64, 256), "decay": DECAY, "share": share, "error": error, "law": law, **changed})


def draw(figure, **changed):
    figure.update(title="t", subtitle="s", across="|w|", up="T", measured=measured(**changed))
    return figure


def test_predicted_and_broken_cells():
    assert (measured().predicted == measured().broken).all()
    assert measured().broken.sum() == 5
    late = measured(law=np.array([50.0, 0.5, np.inf]))
    assert (late.predicted != late.broken).sum() == 1


def decay_at(figure, places):
    """|log decay| at places on the map's horizontal axis: five decades wide, from 10^-2.5 on."""
    return 10 ** (-2.5 + 5 * (np.asarray(places) + 0.5) / figure._columns)


def test_the_border_runs_between_the_cells_it_parts():
    figure = draw(PhaseFigure())
    x, y = figure._law.get_data()
    # The first row is at the bottom: image row 2. Each row's border spans that row.
    assert list(y) == [2.5, 1.5, 1.5, 0.5, 0.5, -0.5]
    assert np.allclose(decay_at(figure, x[:4]), [5, 5, 0.5, 0.5])
    assert (x[4:] == figure._columns).all()  # no limit: beyond the last column


def test_a_cell_reaches_half_the_way_to_its_neighbours():
    """By logarithms, so that a pair of columns around a law has its edge there, wherever the others are."""
    decay = np.array([0.1, 1.0, 1.37, 1.4, 10.0])
    edges = measured(decay=decay).edges
    assert edges[3] == pytest.approx((1.37 * 1.4) ** 0.5) and len(edges) == 6
    figure = draw(PhaseFigure(), decay=decay, law=np.array([1.385, np.inf, np.inf]))
    assert figure.canvas.maps == {"cells": (3, 5)}
    left, _, width, _ = figure.canvas.box("cells", 2, 2)
    right = left + width
    x, _ = figure._law.get_data()
    across, down = figure.canvas.pixels
    law = figure.ax.transData.transform((x[0], 2))
    assert abs(law[0] / across - right) < 0.002  # the law lies where the third column ends
    assert figure.canvas.cell(right - 0.002, 1 - law[1] / down) == Cell("cells", 2, 2)
    assert figure.canvas.cell(right + 0.002, 1 - law[1] / down) == Cell("cells", 2, 3)


def test_a_cell_that_contradicts_the_law_is_marked():
    figure = draw(PhaseFigure(), law=np.array([50.0, 0.5, np.inf]))
    x, y = figure._wrong.get_data()
    assert decay_at(figure, x) == pytest.approx([10]) and list(y) == [2]
    assert not len(draw(PhaseFigure())._wrong.get_xdata())


def test_ticks_name_decays_and_rows():
    figure = draw(PhaseFigure())
    ax = figure.ax
    assert [text.get_text() for text in ax.get_xticklabels()] == ["$10^{-2}$", "$10^{-1}$", "1", "10", "$10^{2}$"]
    assert np.allclose(decay_at(figure, ax.get_xticks()), DECAY)
    assert np.allclose(decay_at(figure, ax.xaxis.get_minor_locator().locs), DECAY)  # a tick for every one measured
    assert dict(zip([text.get_text() for text in ax.get_yticklabels()], ax.get_yticks(), strict=True)) == {
        "16": 2, "64": 1, "256": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("width", "size"), [(9.4, (940, 390)), (5.9, (590, 340))])
def test_every_word_can_be_read(width, size):
    figure = draw(PhaseFigure(width=width))
    assert figure.canvas.pixels == size
    assert_legible(figure.canvas)


def test_a_redraw_equals_a_fresh_figure():
    share = np.ones((3, 5))
    share[2, 4] = np.nan
    for changed in ({"error": None}, {"share": share}, {"rows": (1, 2, 3)}, {"law": np.array([1.0, 2.0, 3.0])}):
        figure = draw(PhaseFigure())
        before = figure.canvas.rgba().copy()
        after = draw(figure, **changed).canvas.rgba()
        assert (after != before).any(), changed
        assert (after == draw(PhaseFigure(), **changed).canvas.rgba()).all(), changed


# --- a sweep, drawn --------------------------------------------------------------------------------------------------


OVER = {"T": [8, 44, 64], "decay": [-0.5, -1.0, -2.0, -4.0, -8.0, -16.0]}


def overflow(decay, T):
    return {"x": (torch.full((T,), -decay * T).exp(), torch.ones(T))}


def law(T):
    return 88.72 / T


def legend_of(figure):
    (legend,) = figure.canvas.figure.legends
    return {text.get_text() for text in legend.get_texts()}


@pytest.mark.parametrize("turned", [False, True])
def test_a_sweep_is_drawn_with_its_law(turned):
    found = sweep(overflow, dict(reversed(OVER.items())) if turned else OVER)
    figure = phase(found, law=law)
    assert figure.ax.get_xlabel() == "|decay|" and figure.ax.get_ylabel() == "T"
    assert figure.canvas.png().startswith(b"\x89PNG")
    x, y = figure._law.get_data()
    # a sixth of the axis is ln 2; the law's line lies where its decay does
    step = figure._columns / 6
    for i, T in enumerate(OVER["T"]):
        at = step * (np.log2(law(T) / 0.5) + 0.5) - 0.5
        assert x[2 * i] == x[2 * i + 1] == pytest.approx(np.clip(at, -1, figure._columns))
        assert (y[2 * i], y[2 * i + 1]) == (2.5 - i, 1.5 - i)
    broken = found["x.finite"] < 1
    broken = broken.T if turned else broken
    for row, T in enumerate(OVER["T"]):
        assert broken[row].tolist() == [decay * T < -88.72 for decay in OVER["decay"]]


@pytest.mark.parametrize("with_error", [True, False])
@pytest.mark.parametrize("with_law", [True, False])
def test_only_what_is_there_is_spoken_of(with_law, with_error):
    """Without a law no cell contradicts one, and without a truth nothing says how wrong a cell is."""

    def measure(decay, T):
        made, true = overflow(decay, T)["x"]
        return {"x": (made, true) if with_error else made}

    found = sweep(measure, OVER)
    figure = phase(found, law=(lambda T: 100.0) if with_law else None)
    words = legend_of(figure)
    assert (found["x.finite"] < 1).any()
    assert len(figure._wrong.get_xdata()) == ((found["x.finite"] < 1).sum() if with_law else 0)
    assert ("law" in words) == ("law is wrong" in words) == with_law and "not finite" in words
    assert ("how wrong" in figure._title.get_text()) == with_error


def test_what_was_raised_is_a_mark_with_its_name():
    def measure(decay, T):
        if T == 44 and decay < -3:
            raise ZeroDivisionError
        return overflow(decay, T)

    figure = phase(sweep(measure, OVER), law=law)
    x, y = figure._raised.get_data()
    step = figure._columns / 6
    assert x.tolist() == pytest.approx([step * (n + 0.5) - 0.5 for n in (3, 4, 5)]) and set(y) == {1}
    assert "raised an error" in legend_of(figure)
    assert "raised an error" not in legend_of(phase(sweep(overflow, OVER)))
