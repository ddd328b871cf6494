"""The pictures of notebook 13: what is drawn is what was given."""

import math

import numpy as np

from flakit.cases.gate_drift import Drift
from flakit.cases.gate_drift.picture import curve
from flakit.figures import style
from flakit.figures.training import loss_curves, lost_steps
from flakit.models import Run

QUANTILES = np.linspace(0.5, 1.5, 40)[:, None] * np.array([10, 30, 50, 70, 90.0])


def test_lost_steps_marks_the_steps_beyond_the_limit():
    picture = lost_steps({"a": {"faulty": [0.0, 1.0], "right": [0.0, 0.0]}}, {"a": QUANTILES}, window=20, limit=100.0)
    above, below = picture.figure.axes
    faulty, right = above.get_lines()
    assert (faulty.get_xdata().tolist(), faulty.get_ydata().tolist()) == ([10, 30], [0, 1])
    assert right.get_linestyle() != faulty.get_linestyle()
    marks = next(line for line in below.get_lines() if line.get_marker() == "x")
    assert marks.get_xdata().tolist() == np.flatnonzero(QUANTILES[:, -1] > 100).tolist()
    assert below.get_ylim()[1] > 135 and "100.00" in picture.alt
    assert picture.png().startswith(b"\x89PNG")


def test_loss_curves_draw_every_seed_and_name_a_model_once():
    models = {"one": {0: [5.0, 2.0], 1: [5.0, 3.0]}, "other": {0: [6.0, 4.0], 1: [6.0, 5.0]}}
    picture = loss_curves([10, 30], {"left": models, "right": models}, ylabel="nats", levels={"guess": 5.5})
    left, right = picture.figure.axes
    drawn = [line.get_ydata() for line in left.get_lines()]
    assert [list(y) for y in drawn] == [[5, 2], [5, 3], [6, 4], [6, 5], [5.5, 5.5]]
    looks = [line.get_linestyle() for line in left.get_lines()]
    assert looks[0] == looks[1] != looks[2] == looks[3]
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == ["one", "other"]
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] < 2 and left.get_ylim()[1] > 6
    assert picture.png().startswith(b"\x89PNG") and "one, other" in picture.alt


def drift(*losses: float, first: int = 0) -> Drift:
    return Drift("rwkv6", "none", Run(list(losses)), first=first)


def test_a_run_that_dies_ends_in_a_cross_and_says_when():
    runs = {"dies": drift(5.0, 4.0, 3.0, math.nan, math.nan), "lives": drift(5.0, 4.0, 3.0, 2.0, 1.0)}
    picture = curve(runs | {"later": drift(2.5, 1.5, first=3)})
    (ax,) = picture.figure.axes
    dies, cross, lives, later = ax.get_lines()
    assert list(dies.get_ydata()) == [5, 4, 3] and list(later.get_xdata()) == [3, 4] and len(lives.get_xdata()) == 5
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([2], [3]) and cross.get_color() == style.BROKEN
    said = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert said == ["dies: NaN from step 3", "lives", "later"] and "dies: NaN from step 3" in picture.alt


def test_a_run_that_dies_in_means():
    runs = {"dies": drift(4.0, 2.0, 3.0, 1.0, math.nan)}
    (ax,) = curve(runs, window=2).figure.axes
    line, cross = ax.get_lines()
    assert list(line.get_xdata()) == [0.5, 2.5] and list(line.get_ydata()) == [3, 2] and list(cross.get_ydata()) == [2]
    (ax,) = curve(runs, end=3).figure.axes
    assert len(ax.get_lines()) == 1  # what comes after is not shown
