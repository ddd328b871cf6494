"""The comparer's picture: every error has its place, exact and infinite ones too."""

import math

import numpy as np
import pytest

from flakit.figures.canvas import Cell
from flakit.figures.gradients import ERRORS, PLOTS, Curves, GradientFigure
from tests.figures.words import assert_legible

NOTHING = Curves("", "", [], {}, note="nothing")


@pytest.fixture(scope="module")
def figure():
    return GradientFigure({"chunk": "chunk", "recurrent": "step by step"}, ("o", "dw"))


def show(figure, errors=None, curves=(NOTHING, NOTHING)):
    figure.update(title="title", where="here", measure="L2", errors=errors or {}, rounding=1e-3, curves=curves)
    return figure.canvas.png()


def test_dots_stand_in_the_order_of_their_errors(figure):
    places = []
    for error in (0.0, 1e-12, 1e-9, 1e-3, 1.0, 1e3, 1e9, math.inf):
        show(figure, {("chunk", "dw"): error})
        x, y = figure._dots["chunk"].get_data()
        assert len(x) == 1 and round(y[0]) == 1
        places.append(x[0])
    assert places == sorted(places) and len(set(places)) == 7  # what is below the scale stands at its end
    assert places[3] == -3 and places[4] == 0


def test_series_and_tensors_without_an_error_are_left_out(figure):
    show(figure, {("chunk", "o"): 1e-3})
    counts = {name: len(dots.get_xdata()) for name, dots in figure._dots.items()}
    assert counts == {"chunk": 1, "recurrent": 0}


def test_rows_do_not_overlap(figure):
    show(figure, {(name, tensor): 1e-3 for name in ("chunk", "recurrent") for tensor in ("o", "dw")})
    chunk, recurrent = (figure._dots[name].get_ydata() for name in ("chunk", "recurrent"))
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


@pytest.mark.parametrize("width", [9.4, 5.9])
def test_all_words_are_inside_and_apart(width):
    tensors = ("o", "final_state", "dr", "dw", "dk", "dv", "da", "db")
    words = {"chunk": "chunk", "recurrent": "recurrent", "sums": "dw from running sums, as widely done"}
    wide = GradientFigure(words, tensors, width)
    steps = Curves("dw: error of each time step / RMS", "time t", range(64), {"chunk": [1e-3] * 60 + [math.inf] * 4})
    along = Curves(
        "dw along constant decay", "|log decay| of every token", [0.01, 0.1, 1, 2, 4, 8, 20, 35, 50],
        {"sums": [10.0**n for n in range(-4, 30, 4)]},
        log=True, now=8, setting="bfloat16, T = 1024", where="recorded, NVIDIA H200",
    )  # fmt: skip
    for curves in ((steps, along), (along, steps)):
        wide.update(
            title="RWKV7 against float64: bfloat16, T = 1024, decay rwkv6-wide",
            where="recorded on NVIDIA H200, 2026-11-20, torch 2.11.0+cu130, triton 3.6.0",
            measure="worst row, relative L2",
            errors={(name, tensor): 1e-3 for name in words for tensor in tensors},
            rounding=1e-3,
            curves=curves,
        )
        assert_legible(wide.canvas)


def test_a_dot_and_a_step_can_be_pointed_at(figure):
    steps = Curves("steps", "t", range(5), {"chunk": [1e-3] * 5})
    show(figure, {("recurrent", "dw"): 1e-3}, (steps, NOTHING))
    assert dict(figure.canvas.maps) == {ERRORS: (4, 1), PLOTS[0]: (1, 5)}
    assert [figure.lane(row) for row in range(4)] == [
        ("o", "chunk"), ("o", "recurrent"), ("dw", "chunk"), ("dw", "recurrent"),
    ]  # fmt: skip
    (x,), (y,) = figure._dots["recurrent"].get_data()
    ax = figure._dots["recurrent"].axes
    width, height = figure.canvas.pixels
    right, up = ax.transData.transform((x, y))
    assert figure.canvas.cell(right / width, 1 - up / height) == Cell(ERRORS, 3, 0)
    right, up = figure._plots[0].ax.transData.transform((3, -3))
    assert figure.canvas.cell(right / width, 1 - up / height) == Cell(PLOTS[0], 0, 3)
