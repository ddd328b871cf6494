"""The decay figure: where things are drawn, and what a redraw changes."""

import numpy as np
import pytest

from flakit.figures.decay import DecayFigure, Onset, zoomed
from tests.figures.words import assert_legible

TENSORS = {"o": "column of v", "dr": "channel", "dk": "channel", "dv": "column of v", "dw": "channel", "du": "channel"}


def make(width=9.4):
    return DecayFigure(TENSORS, still=["du"], width=width)


def arguments(bad=False, C=16, T=40, **changed):
    rng = np.random.default_rng(0)
    exponents = -rng.random((2, C, C)) * 50
    tensors = {name: rng.random((T, 8)) for name in TENSORS if name != "du"}
    onsets = {name: Onset(1.0, 1.1) for name in TENSORS} | {"du": Onset(None, None)}
    if bad:
        exponents[0, 3, :2], tensors["dw"][:4] = np.inf, np.inf
    return {
        "title": ("about", "now"), "factors": ("read", "key"), "exponents": exponents, "limit": 88.7,
        "formed": np.ones((C, C), bool),
        "infinite": (np.isinf(exponents[0]).any(1), np.isinf(exponents[1]).any(0)),
        "tensors": tensors, "onsets": onsets, "knob": "|log decay|", "now": 2.0, **changed,
    }  # fmt: skip


def drawn(width=9.4, **changed):
    figure = make(width)
    figure.update(**arguments(**changed))
    return figure


@pytest.mark.full
@pytest.mark.parametrize(
    "changed",
    [
        {"bad": True},
        {"now": 0.0},
        {"now": np.inf},
        {"limit": 11.09},
        {"C": 32},
        {"T": 13},
        {"factors": ("one exponent", "none")},
        {"knob": "|log decay| of token 3"},
        {"onsets": {name: Onset(300.0, 301.0) for name in TENSORS}},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_a_redraw_equals_a_fresh_figure(changed):
    figure = drawn()
    before = figure.canvas.rgba().copy()
    figure.update(**arguments(**changed))
    after = figure.canvas.rgba().copy()
    assert (after != before).any()
    assert (after == drawn(**changed).canvas.rgba()).all()


def test_titles_say_how_much_is_not_finite():
    said = {name: title.get_text() for name, title in drawn(bad=True)._titles.items()}
    assert said["dw"] == "dw: 10% lost"
    assert said["o"] == "o: fine"


def test_law_and_measurement_are_drawn_where_they_are():
    figure = drawn(now=1.05)
    assert list(figure._law.get_xdata()) == [1.0] * 5
    assert list(figure._measured.get_xdata()) == [1.1] * 5
    assert list(figure._now.get_xdata()) == [1.05, 1.05]
    assert [text.get_text() for text in figure._numbers[0]] == ["1", "1.1"]
    assert [text.get_text() for text in figure._numbers[-1]] == ["never", "never"]
    assert [bar.get_visible() for bar in figure._broken] == [True] * 5 + [False]


@pytest.mark.parametrize("width", [9.4, 5.9])
def test_every_word_can_be_read(width):
    assert_legible(drawn(width, bad=True, knob="|log decay| of token 255").canvas)


def test_a_tensor_without_a_time_axis_has_an_onset_and_no_map():
    maps = drawn(T=40).canvas.maps
    assert list(maps) == ["onset", "read", "key", "o", "dr", "dk", "dv", "dw"]
    assert maps["dw"] == (40, 8) and maps["onset"] == (6, 1)


@pytest.mark.parametrize("width", [9.4, 5.9])
def test_the_zoom_tells_neighbouring_onsets_apart(width):
    law = dict(zip(TENSORS, (1.396, 1.375, 1.386, 1.396, 1.375, None), strict=True))
    figure = drawn(width, onsets={name: Onset(x, x) for name, x in law.items()}, now=1.0)
    at = np.unique(figure._zoom.transData.transform([(x, 0) for x in law.values() if x])[:, 0].round(3))
    assert len(at) == 3 and np.diff(at).min() > 25  # pixels
    over = figure._overview.transData.transform([(x, 0) for x in (1.375, 1.396)])[:, 0]
    assert np.diff(over) < 1  # which the scale over all decades does not


def test_the_zoom_goes_to_the_onsets_nearest_to_now():
    onsets = [0.1616, 0.163, 1.386]
    low, high = zoomed(onsets, 0.2)
    assert 0.15 < low < 0.1616 and 0.163 < high < 0.18
    low, high = zoomed(onsets, 1.5)
    assert 1.3 < low < 1.386 < high < 1.5
    assert zoomed([], 1.0) == (0.0, 100.0)
    figure = drawn(now=0.01)
    assert figure._aside.get_visible() and figure._aside.get_marker() == "<" and not figure._now.get_visible()


def test_a_few_lost_rows_and_columns_are_pointed_at():
    figure = make()
    x = arguments(T=128)
    x["tensors"]["dk"][[63, 64, 127]] = np.nan
    x["tensors"]["dv"][:] = np.nan
    x["infinite"] = np.zeros(16, bool), np.arange(16) == 15
    figure.update(**x)
    marks = {name: line for name, (line, _) in figure._flags.items()}
    assert list(marks["dk"].get_ydata()) == [63.5, 127] and marks["dk"].get_visible()
    assert not marks["dv"].get_visible() and not marks["o"].get_visible()
    assert list(marks["key"].get_xdata()) == [15] and marks["key"].get_visible()
