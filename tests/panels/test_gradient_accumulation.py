"""The accumulation panel: the law at every knob, its words, and the script that remakes it."""

import contextlib
import io
import re

import pytest

from flakit.cases import gradient_accumulation as case
from flakit.panels import gradient_accumulation


@pytest.fixture(scope="module")
def panel():
    return gradient_accumulation()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def test_starts_at_the_story(panel):
    assert "Reported: 16.65" in panel.text and "ln(64) = 4.1589" in panel.text
    assert "Law: loss and gradient 4 times the plain loop's. Measured: 4 and 4." in panel.text


@pytest.mark.parametrize("mixer", ["rwkv7", "attention"])
@pytest.mark.parametrize("contract", case.CONTRACTS)
def test_law_meets_measurement(panel, contract, mixer):
    panel.set(contract=contract, mixer=mixer, accumulation=2)
    law, loss, gradient = map(float, re.search(r"gradient (\S+) times .* (\S+) and (\S+)\.\n", panel.text).groups())
    assert law == loss == gradient
    assert panel.result[0].rest < 1e-4


def test_the_picture_changes_with_the_setting_and_comes_back(panel):
    start = panel.png
    panel.set(accumulation=1)
    assert panel.png != start
    panel.reset()
    assert panel.png == start


def test_the_gradients_shown_are_those_of_the_two_loops(panel):
    plain, ours = panel.result[2]
    assert ours == pytest.approx(4 * plain, rel=1e-2, abs=1e-7) and abs(plain).max() > 1e-4


def test_script_prints_what_the_panel_says(panel):
    panel.set(contract="uses num_items_in_batch", accumulation=2)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    row = panel.result[0]
    assert printed.getvalue() == f"law 0.9375 loss {row.loss_factor} gradient {row.grad_factor}\n"


@pytest.mark.parametrize("wrong", [{"contract": "none"}, {"accumulation": 3}, {"mixer": "gsa"}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        gradient_accumulation(**wrong)
