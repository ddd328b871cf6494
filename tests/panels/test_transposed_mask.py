"""The panel of the transposed mask: law against measurement over its knobs, its words, its button, its script."""

import contextlib
import io

import pytest

from flakit.cases import transposed_mask as case
from flakit.panels import transposed_mask


@pytest.fixture(scope="module")
def panel():
    return transposed_mask()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def test_starts_at_the_story(panel):
    assert panel.text.startswith("Law: 992 of 12000 entries of the state are wrong. Measured: 992.")
    assert "finite, plausible, wrong" in panel.text


@pytest.mark.parametrize(("K", "V", "B"), [(40, 64, 32), (64, 64, 32), (33, 47, 16), (1, 128, 64), (128, 128, 64)])
def test_law_meets_measurement(panel, K, V, B):
    panel.set(K=K, V=V, BK=B, BV=B)
    count, off = panel.result
    assert count == case.law(K, V, B, B)
    assert (off < 1e-6) == (count == 0)
    assert ("Hidden" in panel.text) == (count == 0)


@pytest.mark.parametrize(
    ("K", "V", "why"), [(64, 96, "multiples of the tile"), (20, 20, "fits into one tile")], ids=["multiples", "small"]
)
def test_says_why_it_is_hidden(panel, K, V, why):
    panel.set(K=K, V=V)
    assert why in panel.text


def test_a_rectangular_tile_does_not_compile(panel):
    start = panel.png
    panel.set(BK=16, BV=64)
    assert panel.result is None and "does not fit a tile [64, 16]" in panel.text and panel.png != start
    panel.set(mask="right")
    assert panel.result[0] == 0 and panel.result[1] < 1e-6


def test_the_picture_comes_back(panel):
    start = panel.png
    panel.set(K=40, V=64)
    assert panel.png != start
    panel.reset()
    assert panel.png == start


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"K": 40, "V": 64}, "The kernel: 384 wrong entries."),
        ({"BK": 16, "BV": 64}, "incompatible dimensions at index 0: 64 and 16"),
        ({"BK": 16, "BV": 64, "mask": "right"}, "The kernel: 0 wrong entries."),
    ],
    ids=["square", "rectangular", "right"],
)
def test_the_button_runs_the_kernel(panel, setting, says):
    panel.set(**setting)
    panel.run.start()
    panel.run.wait(60)
    assert says in panel.text
    panel.set(K=41)
    assert "The kernel" not in panel.text


def test_another_error_of_the_kernel_is_not_the_compilers(panel, monkeypatch):
    def fails(*_, **__):
        raise MemoryError("no room for the state")

    panel.set(BK=16, BV=64)
    monkeypatch.setattr(case, "run", fails)
    panel.run.start()
    panel.run.wait(60)
    assert panel.text == "MemoryError: no room for the state"


def test_script_prints_what_the_panel_says(panel):
    panel.set(K=33, V=47)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    assert printed.getvalue() == f"law {case.law(33, 47)} measured {panel.result[0]}\n"


@pytest.mark.parametrize("wrong", [{"BK": 8}, {"K": 0}, {"V": 129}, {"mask": "none"}])
def test_bad_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        transposed_mask(**wrong)
