"""The comparer's picture: every error has its place, exact and infinite ones too."""

import math

import numpy as np
import pytest

from flakit.figures.gradients import Curves, GradientFigure

MEASURES = {"l2": "L2", "worst_row": "worst row"}
NOTHING = Curves("", "", [], {}, note="nothing")


@pytest.fixture(scope="module")
def figure():
    return GradientFigure({"chunk": "chunk", "recurrent": "step by step"}, ("o", "dw"), MEASURES)


def show(figure, errors=None, curves=(NOTHING, NOTHING)):
    figure.update(title="title", where="here", errors=errors or {}, rounding=1e-3, curves=curves)
    return figure.canvas.png()


def test_dots_stand_in_the_order_of_their_errors(figure):
    places = []
    for error in (0.0, 1e-12, 1e-9, 1e-3, 1.0, 1e3, 1e9, math.inf):
        show(figure, {("l2", "chunk", "dw"): error})
        x, y = figure._dots["l2", "chunk"].get_data()
        assert len(x) == 1 and round(y[0]) == 1
        places.append(x[0])
    assert places == sorted(places) and len(set(places)) == 7  # what is below the scale stands at its end
    assert places[3] == -3 and places[4] == 0


def test_series_and_tensors_without_an_error_are_left_out(figure):
    show(figure, {("l2", "chunk", "o"): 1e-3, ("worst_row", "recurrent", "dw"): 1e-2})
    counts = {key: len(dots.get_xdata()) for key, dots in figure._dots.items()}
    assert counts == {
        ("l2", "chunk"): 1,
        ("l2", "recurrent"): 0,
        ("worst_row", "chunk"): 0,
        ("worst_row", "recurrent"): 1,
    }


def test_rows_do_not_overlap(figure):
    show(figure, {("l2", name, tensor): 1e-3 for name in ("chunk", "recurrent") for tensor in ("o", "dw")})
    chunk, recurrent = (figure._dots["l2", name].get_ydata() for name in ("chunk", "recurrent"))
    assert [round(y) for y in chunk] == [round(y) for y in recurrent] == [0, 1]
    assert all(b - a > 0.3 for a, b in zip(chunk, recurrent, strict=True))


def test_curves_show_exact_and_infinite_errors(figure):
    errors = {"chunk": [1e-3, 0.0, 1e-2, math.inf, math.nan], "recurrent": [0.0] * 5}
    png = show(figure, curves=(Curves("steps", "t", range(5), errors), NOTHING))
    plot = figure._plots[0]
    low, high = plot.ax.get_ylim()
    line = plot._lines["chunk"].get_ydata()
    assert np.isnan(line[[1, 3, 4]]).all() and (line[[0, 2]] == [-3, -2]).all()
    assert list(plot._marks["chunk"].get_xdata()) == [3, 4]
    assert all(-2 < y < high for y in plot._marks["chunk"].get_ydata())
    assert (plot._lines["recurrent"].get_ydata() == -3).all() and low < -3
    assert plot._bad.get_visible()
    assert png != show(figure)
    assert not plot._bad.get_visible() and not len(plot._lines["chunk"].get_xdata())


@pytest.mark.parametrize(
    "x, log, ticks",
    [
        ([64, 256, 1024], True, ["64", "256", "1024"]),
        ([0.01, 1, 50], True, ["0.01", "1", "50"]),
        (["float32", "bfloat16"], False, ["float32", "bfloat16"]),
    ],
    ids=["length", "decay", "dtype"],
)
def test_axes_follow_what_is_run_through(figure, x, log, ticks):
    show(figure, curves=(NOTHING, Curves("along", "x", x, {"chunk": [1e-3] * len(x)}, log=log, now=None)))
    ax = figure._plots[1].ax
    assert ax.get_xscale() == ("log" if log else "linear")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ticks


def test_too_many_series_are_refused():
    with pytest.raises(ValueError, match="series: expected at most 3, got 4"):
        GradientFigure(dict.fromkeys("abcd", ""), ("o",), MEASURES)
