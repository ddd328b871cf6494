"""One infinite column and the gradient that it costs."""

import numpy as np
import pytest

from flakit.cases.infinity import follow
from flakit.figures.canvas import Cell
from flakit.panels import sketch
from flakit.panels.base import NARROW, WIDE
from tests.figures.words import assert_legible


@pytest.mark.parametrize(
    ("decay", "says"),
    [
        (-1.36, "At a decay of -1.36 the largest factor is e^87.04 = 6.3e+37: every key is finite"),
        (
            -1.39,
            "one key of 64 is infinite, and nobody of this chunk reads it. Lost of dr: 100%. Lost of dk and dw: 1.6%",
        ),
        (
            -1.42,
            "the last 2 keys of 64 are infinite. Lost of dr: 100%. Lost of dk and dw: 3.1% and 100%. The output o is l",
        ),
    ],
)
def test_it_says_what_one_column_costs(decay, says):
    panel = sketch("one_column", decay=decay)
    assert says in panel.text
    assert panel.result.lost == follow(decay, C=64, K=8).lost


def test_the_column_is_wide_enough_to_be_seen():
    panel = sketch("one_column")
    for width in (WIDE, NARROW):
        panel.width = width
        panel.redraw()
        assert_legible(panel.canvas)
        _, _, across, down = panel.canvas.box("keys", column=63)
        pixels = np.multiply(panel.canvas.pixels, (across, down))
        assert pixels[0] >= 7 and pixels[1] >= 80 and panel.canvas.pixels[1] <= 300


def test_its_cells_have_their_arithmetic():
    panel = sketch("one_column")
    key, (k,) = panel._strip(Cell("keys", 2, 63)), panel.result.k[63, 2:3]
    assert key == f"key 63, channel 2: {k:.4g} · e^88.96 = {'-' if k < 0 else ''}inf"
    assert panel._strip(Cell("dr", 2, 5)).startswith("dr of token 5, channel 2: NaN (true: ")
