"""The phase diagram's figure: cells where they belong, the law's border between them."""

import numpy as np

from flakit.figures.phase import Map, PhaseFigure

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


def test_the_border_runs_between_the_cells_it_parts():
    x, y = draw(PhaseFigure())._law.get_data()
    # The first row is at the bottom: image row 2. Each row's border spans that row.
    assert list(y) == [2.5, 1.5, 1.5, 0.5, 0.5, -0.5]
    assert np.allclose(x[:2], 2 + np.log10(5)) and np.allclose(x[2:4], 2 + np.log10(0.5))
    assert (x[4:] == 5).all()  # no limit: beyond the last column


def test_ticks_name_decays_and_rows():
    ax = draw(PhaseFigure()).ax
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.01", "0.1", "1", "10", "100"]
    assert dict(zip([text.get_text() for text in ax.get_yticklabels()], ax.get_yticks(), strict=True)) == {
        "16": 2, "64": 1, "256": 0,
    }  # fmt: skip


def test_a_redraw_equals_a_fresh_figure():
    share = np.ones((3, 5))
    share[2, 4] = np.nan
    for changed in ({"error": None}, {"share": share}, {"rows": (1, 2, 3)}, {"law": np.array([1.0, 2.0, 3.0])}):
        figure = draw(PhaseFigure())
        before = figure.canvas.rgba().copy()
        after = draw(figure, **changed).canvas.rgba()
        assert (after != before).any(), changed
        assert (after == draw(PhaseFigure(), **changed).canvas.rgba()).all(), changed
