"""The matrix of fingerprints, and the panel that works from what was seen."""

import pytest

from flakit.cases.fingerprint import CAUSES, TENSORS
from flakit.figures import style
from flakit.figures.canvas import Cell
from flakit.panels import diagnose, fingerprint
from flakit.panels.fingerprint import NAMES
from tests.figures.words import assert_legible
from tests.panels.reading import printed


@pytest.fixture(scope="module")
def panel():
    return diagnose()


def test_the_matrix_fills_lesson_by_lesson():
    empty, some, whole = fingerprint("00"), fingerprint(upto="05"), fingerprint()
    assert [str(x).split(" faults")[0] for x in (empty, some, whole)] == ["0 of 19", "5 of 19", "19 of 19"]
    assert empty.pixels == some.pixels == whole.pixels and len({x.png() for x in (empty, some, whole)}) == 3
    assert fingerprint(causes=["scale"]).png() == fingerprint("01").png()
    for picture in (empty, whole):
        assert_legible(picture)
        shown = {text.get_text() for text in picture.figure.axes[0].get_yticklabels()}
        assert shown == {cause.name for cause in CAUSES.values()}
    assert picture.figure.axes[0].get_xticklabels()[1].get_color() == style.letter("dr") == style.R


def test_the_causes_come_in_the_order_in_which_they_fit(panel):
    panel.set(**dict.fromkeys(NAMES, "?"))
    assert panel.text == "What became of each tensor? Set those that you have looked at."
    panel.set(o="ok", dr="NaN", dk="NaN", dv="ok")
    assert panel.text.startswith("2 faults of the casebook do that.\nstart anchor (lesson 05): factors from")
    found = panel._strip(Cell("causes", 0, 1))
    assert found == "start anchor, dr: NaN; relative L2 error not finite"
    assert panel._strip(Cell("causes", 1, 1)) == "end anchor, dr: NaN, at some tokens; relative L2 error not finite"
    assert panel._strip(Cell("seen", 0, 1)) == "dr NaN: what you see"
    panel.set(**dict.fromkeys(NAMES, "ok") | {"du": "inf"})
    assert panel.text.startswith("No fault of the casebook does that.")


def test_it_is_low_and_legible_and_speaks_for_itself(panel):
    for setting in ({}, *panel.presets.values()):
        panel.set(**setting)
        assert_legible(panel.canvas)
    assert panel.canvas.pixels[1] <= 400
    lines = printed(panel.set(**{name: "?" for name in NAMES} | {"dr": "NaN"})).splitlines()
    assert "1 of 1  start anchor, lesson 05" in lines and len(lines) == len(CAUSES)


def test_a_knob_for_each_tensor(panel):
    assert list(panel.named_on_view) == list(NAMES) and len(NAMES) == len(TENSORS)
    with pytest.raises(ValueError, match=r"dr: expected one of \?, ok, wrong, inf, NaN, got 'bad'"):
        panel.set(dr="bad")
