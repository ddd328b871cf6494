"""The decay figure: where things are drawn, and what a redraw changes."""

import numpy as np
import pytest

from flakit.figures.decay import DecayFigure, Onset

TENSORS = {"o": "column of v", "dr": "channel", "dk": "channel", "dv": "column of v", "dw": "channel", "du": "channel"}


def arguments(bad=False, C=16, T=40, **changed):
    rng = np.random.default_rng(0)
    exponents = -rng.random((2, C, C)) * 50
    tensors = {name: rng.random((1 if name == "du" else T, 8)) for name in TENSORS}
    A = np.tril(rng.random((C, C)))
    onsets = {name: Onset(1.0, 1.1) for name in TENSORS} | {"du": Onset(None, None)}
    if bad:
        exponents[0, 3, :2], A[3, :2], tensors["dw"][:4] = np.inf, np.nan, np.inf
    return {
        "title": "title", "subtitle": "subtitle", "factors": ("read", "key"), "exponents": exponents, "limit": 88.7,
        "A": A, "tensors": tensors, "onsets": onsets, "knob": "|log decay|", "now": 2.0, **changed,
    }  # fmt: skip


def fresh(**kwargs):
    figure = DecayFigure(TENSORS)
    figure.update(**arguments(**kwargs))
    return figure.canvas.rgba().copy()


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
    figure = DecayFigure(TENSORS)
    figure.update(**arguments())
    before = figure.canvas.rgba().copy()
    figure.update(**arguments(**changed))
    after = figure.canvas.rgba().copy()
    assert (after != before).any()
    assert (after == fresh(**changed)).all()


def test_titles_say_how_much_is_not_finite():
    figure = DecayFigure(TENSORS)
    figure.update(**arguments(bad=True))
    said = {name: title.get_text() for name, title in figure._titles.items()}
    assert said["dw"] == "dw\n10% non-finite"
    assert said["o"] == "o\nfinite"


def test_law_and_measurement_are_drawn_where_they_are():
    figure = DecayFigure(TENSORS)
    figure.update(**arguments(now=2.5))
    assert list(figure._law.get_xdata()) == [1.0] * 5
    assert list(figure._measured.get_xdata()) == [1.1] * 5
    assert list(figure._now.get_xdata()) == [2.5, 2.5]
    assert [text.get_text() for text in figure._numbers[0]] == ["1", "1.1"]
    assert [text.get_text() for text in figure._numbers[-1]] == ["never", "never"]
    assert [bar.get_visible() for bar in figure._broken] == [True] * 5 + [False]
