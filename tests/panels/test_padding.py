"""The padding panel: the story's lengths, its words, its picture, and the script that remakes it."""

import contextlib
import io

import pytest

from flakit.cases import padding as case
from flakit.panels.padding import padding


@pytest.fixture(scope="module")
def panel():
    return padding()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def test_starts_just_beyond_the_limit_of_the_story(panel):
    assert "Lost: ds, dg; ds at tokens 96 … 111." in panel.text
    assert "Finite: o, dq, dk, dv" in panel.text
    assert "Law: |log gate| <= 1.848. Measured onset: 1.849" in panel.text
    panel.set(gate=-1.84)
    assert panel.text.startswith("Lost: nothing.")


@pytest.mark.parametrize("op", case.KEY_GRADIENT)
@pytest.mark.parametrize("form", case.FORMS)
def test_every_element_is_as_the_law_says(panel, form, op):
    for T, gate, uneven in ((76, -8.0, 1.0), (100, -3.0, 0.5), (128, -50.0, 1.0), (63, -900.0, 0.25)):
        panel.set(op=op, form=form, T=T, gate=gate, uneven=uneven)
        assert "Every element is as the law says" in panel.text, panel.setting


def test_another_geometry(panel):
    panel.set(chunk=32, block=8, T=100, gate=-25.0)
    assert "Law: |log gate| <= 22.18" in panel.text and "ds at tokens 96 … 99" in panel.text


def test_no_gate_at_all_is_refused_in_words(panel):
    panel.set(gate=float("-inf"))
    assert panel.text.startswith("ValueError: gate: expected a finite natural-log decay")
    panel.set(gate=0.0)
    assert panel.text.startswith("Lost: nothing")


def test_multiples_of_the_chunk_have_no_limit(panel):
    panel.set(T=128, gate=-50.0)
    assert "no limit at this length" in panel.text and "Measured onset: none" in panel.text


def test_the_picture_changes_with_the_setting_and_comes_back(panel):
    start = panel.png
    seen = {start}
    for change in ({"gate": -3.0}, {"T": 100}, {"form": "right"}, {"uneven": 0.5}, {"op": "rwkv6"}):
        panel.set(**change)
        assert panel.png not in seen
        seen.add(panel.png)
    panel.reset()
    assert panel.png == start


def test_script_prints_what_the_panel_says(panel):
    panel.set(T=100, gate=-3.0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    assert f"law {case.law(100)} per token" in printed.getvalue()
    assert "lost [range(80, 100)] as predicted: True" in printed.getvalue()


@pytest.mark.parametrize("wrong", [{"form": "zeros"}, {"T": 0}, {"gate": 1.0}, {"uneven": 0.3}, {"block": 12}])
def test_bad_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        padding(**wrong)
