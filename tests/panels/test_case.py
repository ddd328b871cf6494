"""The panel of any case: knobs as in the registry, every number of `at`, its words, its script, and how fast it is."""

import re

import ipywidgets as widgets
import pytest

from flakit.cases.registry import CASES
from flakit.figures.canvas import Cell
from flakit.numerics.inputs import DECAYS
from flakit.panels import case
from flakit.panels.knobs import NONE, stops_of
from tests.figures.words import assert_legible
from tests.panels.live import NOT_LIVE, least_seconds
from tests.panels.reading import assert_presets_differ, pointed, printed, resize, sizes


@pytest.fixture(scope="module")
def panels():
    return {name: case(name) for name in CASES}


@pytest.fixture(params=CASES)
def panel(request, panels):
    yield panels[request.param]
    panels[request.param].reset()


def same(a, b):
    return a == b or a != a and b != b


def test_a_name_may_have_hyphens():
    assert case("log-space", bias=1.0).setting["bias"] == 1.0


def test_shows_what_the_case_says(panel):
    rows = panel.case.at()
    measured = panel.result.rows
    assert len(rows) == len(measured)
    assert all(same(x, y) for got, row in zip(measured, rows, strict=True) for x, y in zip(got, row, strict=True))
    judged = sum(row.agrees is not None for row in rows)
    line = panel.text.splitlines()[-1]
    assert " measured. The two agree" in line
    assert judged == 1 or re.search(rf", and so they do in the other ({judged - 1} numbers|number)\.$", line)


def test_every_preset_draws_and_says_something_else(panel):
    assert_presets_differ(panel)


@pytest.mark.full
def test_low_enough_to_be_seen_with_its_knobs(panel):
    """At both widths: what a browser adds to this is measured in tests/browser."""
    (narrow, high), (wide, height) = sizes(panel)
    assert (narrow, wide) == (590, 940) and high <= 390 and height <= 430


def test_cells_have_their_arithmetic(panel):
    """Every map that can be pointed at, in its corners and in its middle."""
    for name, (rows, columns) in panel.canvas.maps.items():
        for cell in {(name, 0, 0), (name, rows - 1, columns - 1), (name, rows // 2, columns // 2)}:
            said = pointed(panel, *cell)
            assert said and "Error" not in said and panel.picture.lit, cell


def test_a_widget_for_every_knob(panel):
    for name, knob in panel.case.knobs.items():
        widget = panel.knobs[name]
        if bool in knob.kinds:
            assert isinstance(widget, widgets.Checkbox)
        elif name == "seed":
            assert widget.layout.display != "none"
        elif str in knob.kinds and float in knob.kinds:
            assert panel.knobs["profile"].value == knob.default and set(DECAYS) < set(stops_of(panel.knobs["profile"]))
            assert stops_of(widget)[-1] == knob.range.low
        else:
            assert widget.value == knob.default
            offered = stops_of(widget) if hasattr(widget, "options") else (widget.min, widget.max)
            if type(None) in knob.kinds:
                assert offered[0] == NONE
                offered = offered[1:]
            assert all(knob.fits(value) for value in offered)
            if knob.range:
                assert (min(offered), max(offered)) == (knob.range.low, knob.range.high)
            else:
                assert offered == list(knob.choices)


def test_a_picture_says_what_lights_up_with_a_cell(panels):
    panel = panels["transposed_mask"]
    panel.picture.pick(Cell("state", 25, 97))
    assert [kind for kind, *_ in panel.picture.lit] == ["line", "line", "same", "cell"]
    panels["masking"].picture.pick(Cell("made", 1, 2))
    assert [kind for kind, *_ in panels["masking"].picture.lit] == ["line", "line", "cell"]


@pytest.mark.full
def test_every_knob_can_be_moved(panel):
    """To a value that is not the default; reset brings the first picture back."""
    start = panel.png
    for name, knob in panel.knobs.items():
        if name == "seed" and "seed" not in panel.case.knobs:
            assert knob.layout.display == "none"
            continue
        moved = other(knob)
        panel.set(**{name: moved})
        assert panel.knobs[name].value == moved
        if (panel.case.name, name) == ("future_anchor", "T"):
            assert panel.text.startswith("ValueError: T: expected at most")
        else:
            assert "Error" not in panel.text, (name, moved)
        panel.reset()
    assert panel.png == start


def other(knob):
    if isinstance(knob, widgets.Checkbox):
        return not knob.value
    if hasattr(knob, "options"):
        offered = stops_of(knob)
        return offered[(offered.index(knob.value) + 1) % len(offered)]
    return knob.value - 1 if knob.value == knob.max else knob.value + getattr(knob, "step", 1)


def test_script_prints_what_the_panel_says(panel):
    assert printed(panel).splitlines() == [
        f"{row.what} law {row.law} measured {row.measured} {row.agrees}" for row in panel.result.rows
    ]


def test_a_wrong_law_is_said(panels, monkeypatch):
    panel, law = panels["masking"], panels["masking"].case.module.law
    monkeypatch.setattr(panel.case.module, "law", lambda *args, **how: 1.1 * law(*args, **how))
    panel.redraw()
    assert "dw finite at w = -2.9: yes by the law, no measured. The two differ." in panel.text
    assert "Of the 10 numbers compared at this setting, 8 are as the law says." in panel.text


def test_infinity_is_called_what_it_is(panels):
    """An onset that is infinite never comes; an error that is infinite is not "never"."""
    assert "dw ends at |w|: never by the law" in panels["masking"].set(mask="before").text
    forgotten = panels["decay_gradient"].set(profile="forget").text
    assert "infinite by the law, infinite measured" in forgotten and "never" not in forgotten


def test_a_profile_or_a_number():
    panel = case("decay_gradient", profile="constant", decay=-3.5, rounding="tf32")
    assert panel.result.rows[-1].what.startswith("tf32, -3.5, T = 256") and "decay=-3.5" in panel.as_python()
    assert "decay='gsa'" in panel.set(profile="gsa").as_python()


@pytest.mark.parametrize("name", CASES)
def test_a_redraw_is_quick(panels, name):
    assert least_seconds(panels[name].redraw, [{}] * 4) < NOT_LIVE


def test_play_moves_nothing_that_is_not_on_view():
    assert case("gradient_accumulation", show=("contract",)).player is None
    assert case("gradient_accumulation", show=("accumulation",)).player is not None


def test_the_words_of_the_anchors_picture_are_whole_on_a_small_screen():
    panel = case("anchor", w=-88.8, row=16)
    for room in (600, 1000):
        resize(panel, room)
        assert_legible(panel.canvas, least=8)
