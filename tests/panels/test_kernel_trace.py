"""The trace panel: it names the line that leaves float32 first, and what comes of it changes sides with the law."""

import math
import re

import pytest
import torch

from flakit.figures.canvas import Canvas, Cell
from flakit.instruments import workbench
from flakit.instruments.workbench import tl
from flakit.ops.common.dispatch import has_triton
from flakit.panels import kernel_trace
from flakit.panels.base import NARROW
from flakit.panels.kernel_trace import STOPS
from tests.panels.live import NOT_LIVE, least_seconds
from tests.panels.reading import pointed, printed, resize

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs Triton")

LN_MAX = math.log(torch.finfo(torch.float32).max)


@pytest.fixture(scope="module")
def panel():
    return kernel_trace()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


@pytest.mark.full
@pytest.mark.parametrize("way", workbench.WAYS)
def test_the_sentence_changes_sides_where_the_kernel_does(panel, way, monkeypatch):
    monkeypatch.setattr(Canvas, "png", lambda canvas: b"")  # words alone: most of a redraw is its picture
    found = workbench.onset(way=way)
    for decay in STOPS:
        panel.set(way=way, decay=decay)
        assert ("every value in every tile is finite" in panel.text) == (-decay < found["tile"]), (way, decay)
        assert ("It gets into o." in panel.text) == (-decay >= found["output"]), (way, decay)
        dropped = found["tile"] <= -decay < found["output"]
        assert ("A mask drops it before anything is stored" in panel.text) == dropped, (way, decay)
        assert panel.alt_text(panel.result).endswith(panel.text)


def test_it_names_line_lane_and_program(panel):
    panel.set(decay=-1.39)
    site = panel.result.first
    line = workbench.listing().splitlines()[site.place.line - 1]
    assert f"line {site.place.line} is the first to leave float32, “tl.exp(-b_gi)”" in panel.text
    assert "tl.exp(-b_gi)" in line and "inf in 16 of 1024 lanes, the first at token 63, in program 3" in panel.text
    panel.set(decay=-1.3)
    assert "its largest exponent is 83.2, and float32 ends at 88.72" in panel.text
    panel.set(way="halves", decay=-100.0)
    assert "No exponent of any line is above 0" in panel.text


def test_what_is_pointed_at_says_its_numbers(panel):
    panel.set(decay=-1.39)
    assert pointed(panel, "tile", 63, 0) == "token 63, channel 0: e^88.96 = inf (float32 ends at e^88.72)"
    assert pointed(panel, "tile", 63, 5) == "token 63, channel 5: inf"
    assert pointed(panel, "tile", 62, 5) == "token 62, channel 5: finite"
    assert pointed(panel, "programs", 0, 3) == "program 3, head 3, of decay -1.39: not finite"
    assert pointed(panel, "programs", 0, 1) == "program 1, head 1, of decay -0.695: finite"
    assert re.fullmatch(r"kernel.py:\d+  b_keys = .*inf born of finite numbers.*", pointed(panel, "tree", 0, 0))
    assert "at most e^88.96, in program 3; float32 ends at e^88.72" in pointed(panel, "rooms", 0, 0)
    panel.set(decay=-1.3)
    assert pointed(panel, "tile", 63, 0) == "token 63, channel 0: e^83.2 = finite (float32 ends at e^88.72)"
    panel.set(way="middle", decay=-2.0)
    assert pointed(panel, "tile", 0, 63) == "row 0, column 63: inf"


def test_every_cell_of_every_map_says_something(panel):
    for setting in panel.presets.values():
        panel.set(**setting)
        for name, (rows, columns) in panel.canvas.maps.items():
            for row, column in ((0, 0), (rows - 1, columns - 1)):
                assert panel.arithmetic(panel.result, Cell(name, row, column), **panel.setting)


def test_a_redraw_is_quick_here_and_at_both_widths(panel):
    # Of this process: the kernel runs in another.
    assert least_seconds(panel.set, ({"decay": decay} for decay in (-1.0, -1.5, -5.0))) < NOT_LIVE
    wide = panel.png
    resize(panel, round(100 * NARROW))
    assert panel.png != wide and panel.canvas.pixels[0] == round(100 * NARROW)
    resize(panel, 940)


def test_the_script_runs(panel):
    panel.set(decay=-1.39)
    lines = printed(panel)
    assert "decay -1.39: the output is finite" in lines and "tl.exp(-b_gi)" in lines


def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
    return tl.dot(b_r, tl.trans(b_k))


def test_lines_of_ones_own_are_a_choice_once_they_are_answered():
    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        b_keys = tl.trans(b_k * tl.exp(-2.0 * b_gi))
        return tl.dot(b_r * tl.exp(2.0 * b_ge), b_keys, input_precision="ieee")

    mine = kernel_trace(scores, decay=-0.7)
    assert mine.setting["way"] == "yours" and "tl.exp(-2.0 * b_gi)" in mine.text
    assert mine.set(way="start").text.startswith("At a decay of -0.7 every value in every tile is finite")

    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        return ...

    assert "yours" not in dict(kernel_trace(scores).knobs["way"].options).values()


@pytest.mark.full
def test_without_triton_it_shows_the_recording(monkeypatch):
    live = kernel_trace(decay=-1.39)
    monkeypatch.setattr(workbench, "has_triton", lambda: False)
    monkeypatch.setattr(workbench, "tl", None)
    recorded = kernel_trace(scores, decay=-1.39)
    assert recorded.text == f"{live.text} There is no Triton here: this is a recording."
    assert "yours" not in dict(recorded.knobs["way"].options).values()
    for way in workbench.WAYS:
        for stop in (0.0, -1.5, -1000.0):
            recorded.set(way=way, decay=stop)
            assert "ValueError" not in recorded.text
