"""The log-space panel: law against measurement over its knobs, its words, and the script that remakes it."""

import contextlib
import io
import re

import pytest

from flakit.panels import log_space


@pytest.fixture(scope="module")
def panel():
    return log_space()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def test_starts_at_the_story(panel):
    assert panel.setting["fed"] == "sigmoid"
    assert "every row of the state grows" in panel.text
    assert re.search(r"overflows at t = 16\d. Measured: at t = 16\d", panel.text)
    assert panel.text.endswith("Finite: du.")


@pytest.mark.parametrize("bias", [-0.5, 0.5, 1.0, 2.0, 4.0])
def test_law_meets_measurement(panel, bias):
    panel.set(bias=bias)
    growth, law, _ = panel.result
    assert law is not None and abs(growth.onset - law) <= 4


@pytest.mark.parametrize("fed", ["logsigmoid", "-exp"])
@pytest.mark.parametrize("bias", [-4.0, 4.0])
def test_cures_never_overflow(panel, fed, bias):
    panel.set(fed=fed, bias=bias, T=64)
    assert panel.result[0].onset is None and panel.result[1] is None
    assert "fades" in panel.text and "Not finite: nothing" in panel.text


def test_float64_outlives_float32(panel):
    panel.set(T=192)
    single = panel.png
    assert panel.result[0].onset is not None
    panel.set(dtype="float64")
    assert panel.result[0].onset is None and panel.png != single


def test_the_picture_changes_with_the_setting_and_comes_back(panel):
    start = panel.png
    panel.set(bias=1.0)
    assert panel.png != start
    panel.reset()
    assert panel.png == start


def test_script_prints_what_the_panel_says(panel):
    panel.set(bias=2.0, T=128)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    growth, law, _ = panel.result
    assert f"law {law} measured {growth.onset}" in printed.getvalue()
    assert re.findall(r"^(\w+) finite (\S+)$", printed.getvalue(), re.M) == [
        (name, str(share)) for name, share in growth.finite.items()
    ]


@pytest.mark.parametrize("wrong", [{"fed": "relu"}, {"T": 100000}, {"bias": 0.1}, {"dtype": "float8"}])
def test_bad_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        log_space(**wrong)
