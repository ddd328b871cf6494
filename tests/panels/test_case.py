"""The panel of any case: knobs as in the registry, every number of `at`, its words, its script, and how fast it is."""

import contextlib
import io
import math
import time

import ipywidgets as widgets
import pytest

from flakit.cases.laws import Row
from flakit.cases.registry import CASES
from flakit.numerics.inputs import DECAYS
from flakit.panels import case
from flakit.panels.case import OWN
from tests.panels.live import NOT_LIVE

GENERIC = [name for name in CASES if name not in OWN]


@pytest.fixture(scope="module")
def panels():
    return {name: case(name) for name in GENERIC}


@pytest.fixture(params=GENERIC)
def panel(request, panels):
    yield panels[request.param]
    panels[request.param].reset()


def same(a, b):
    return a == b or a != a and b != b


def test_every_case_has_a_panel():
    assert GENERIC and set(OWN) <= set(CASES)
    assert case("log-space", bias=1.0).setting["bias"] == 1.0  # its own


def test_shows_what_the_case_says(panel):
    rows = panel.case.at()
    assert len(rows) == len(panel.result)
    assert all(same(x, y) for got, row in zip(panel.result, rows, strict=True) for x, y in zip(got, row, strict=True))
    judged = sum(row.agrees is not None for row in rows)
    assert f"{judged} of {judged} numbers are as the law says." in panel.text
    assert f"Told: {panel.case.told}.\nMeasured: {panel.case.measured}." in panel.text


def test_a_widget_for_every_knob(panel):
    for name, knob in panel.case.knobs.items():
        widget = panel.knobs[name]
        if bool in knob.kinds:
            assert isinstance(widget, widgets.Checkbox)
        elif name == "seed":
            assert widget.layout.display != "none"
        elif str in knob.kinds and float in knob.kinds:
            assert panel.knobs["profile"].value == knob.default and set(DECAYS) < set(values(panel.knobs["profile"]))
            assert values(widget)[-1] == knob.range.low
        else:
            assert widget.value == knob.default
            offered = values(widget) if hasattr(widget, "options") else (widget.min, widget.max)
            assert all(knob.fits(value) for value in offered)
            if knob.range:
                assert (min(offered), max(offered)) == (knob.range.low, knob.range.high)
            else:
                assert offered == list(knob.choices)


def values(widget):
    return [option[1] if isinstance(option, tuple) else option for option in widget.options]


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
        too_long = panel.case.name == "future_anchor" and name == "T"
        assert panel.text.startswith("ValueError: T: expected at most" if too_long else "Told: "), (name, moved)
        panel.reset()
    assert panel.png == start


def other(knob):
    if isinstance(knob, widgets.Checkbox):
        return not knob.value
    if hasattr(knob, "options"):
        offered = values(knob)
        return offered[(offered.index(knob.value) + 1) % len(offered)]
    return knob.value - 1 if knob.value == knob.max else knob.value + getattr(knob, "step", 1)


def test_script_prints_what_the_panel_says(panel):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    lines = printed.getvalue().splitlines()
    assert lines == [f"{row.what} law {row.law} measured {row.measured} {row.agrees}" for row in panel.result]


def test_a_wrong_law_is_said(panels, monkeypatch):
    panel, law = panels["masking"], panels["masking"].case.law
    monkeypatch.setattr(panel.case.module, "law", lambda *args, **how: 1.1 * law(*args, **how))
    panel.redraw()
    assert "8 of 10 numbers are as the law says. Not so: dw finite at w = -2.9; dw ends at |w|." in panel.text


def test_a_profile_or_a_number():
    panel = case("decay_gradient", profile="constant", decay=-3.5, rounding="tf32")
    assert panel.result[-1].what.startswith("tf32, -3.5, T = 256") and "decay=-3.5" in panel.as_python()
    assert "decay='gsa'" in panel.set(profile="gsa").as_python()


def test_non_finite_numbers_are_drawn(panels, monkeypatch):
    panel = panels["strides"]
    rows = [[Row("a", math.nan, law, measured)] for law, measured in ((1.0, 1.0), (1.0, math.nan), (1.0, math.inf))]
    pictures = []
    for made in [*rows, [Row("a", math.nan, 1.0, "word")]]:
        monkeypatch.setattr(panel.case.module, "at", lambda made=made, **_: made)
        panel.redraw()
        pictures.append(panel.png)
    assert len(set(pictures)) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"w": 1.0}, "^w: expected a natural-log decay <= 0, got 1.0"),
        ({"chunk": 1}, "^chunk: expected a whole number from 2 to 128, got 1"),
        ({"mask": "after"}, "^mask: expected one of none, multiply"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        case("masking", **wrong)
    with pytest.raises(ValueError, match="did you mean masking"):
        case("maskin")


@pytest.mark.parametrize("name", GENERIC)
def test_a_redraw_is_quick(panels, name):
    times = []
    for _ in range(4):
        start = time.process_time()
        panels[name].redraw()
        times.append(time.process_time() - start)
    assert min(times) < NOT_LIVE, times
