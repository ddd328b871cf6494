"""The pictures of notebook 09: what is drawn is what was given."""

import numpy as np
import pytest

from flakit.figures.accumulation import AccumulationFigure
from flakit.figures.gate_drift import lost_steps

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


def test_lost_steps_wants_gates_for_every_column():
    with pytest.raises(ValueError, match="gates: expected the names a, got b"):
        lost_steps({"a": {"faulty": [0.0]}}, {"b": QUANTILES}, window=20, limit=1.0)


def test_accumulation_shows_both_losses_and_the_law():
    figure = AccumulationFigure()
    shown = {"title": "t", "gradients": (np.array([1e-3, -1e-2]), np.array([4e-3, 4e-2])), "law": 4, "known": 4.16}
    figure.update(losses=(4.2, 16.8), **shown)
    first = figure.canvas.png()
    assert [bar.get_width() for bar in figure._bars] == [4.2, 16.8]
    assert figure._points.get_xdata().tolist() == [1e-3, 1e-2]
    assert figure._law.get_ydata()[0] == pytest.approx(4e-7)
    figure.update(losses=(4.2, 4.2), **shown)
    assert figure.canvas.png() != first
