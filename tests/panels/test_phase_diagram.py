"""The phase diagram: the law against every measured setting, the fine run and its cancelling, the script."""

import contextlib
import importlib
import io
import math
import re

import numpy as np
import pytest

from flakit.cases import anchor
from flakit.numerics.operators import OPERATORS
from flakit.panels import phase_diagram

module = importlib.import_module("flakit.panels.phase_diagram")


@pytest.fixture(scope="module")
def shared():
    return phase_diagram()


@pytest.fixture
def panel(shared, monkeypatch):
    """Fine maps small enough for a test."""
    monkeypatch.setitem(module._ROWS, "fine", {"T": (8, 64, 65), "chunk": (16, 64), "at": (15, 16, 17)})
    monkeypatch.setitem(module._DECAYS, "fine", 9)
    shared._fine.clear()
    shared.reset()
    return shared


def test_the_border_of_no_anchor_against_length(panel):
    shown = panel.result
    assert list(shown.rows) == [16, 32, 48, 64, 128, 256]
    assert shown.law == pytest.approx([88.7 / min(T - 1, 64) if T < 64 else 88.7 / 64 for T in shown.rows], rel=0.08)
    assert (shown.predicted == shown.broken).all()
    assert 0.3 < shown.broken.mean() < 0.8
    foretold = r"66 of 6 x 11 settings measured: \d+% not finite. The law foretells every one of them."
    assert re.match(foretold, panel.text)


EVERYWHERE = [
    pytest.param(op, scheme, against, id=f"{op}-{scheme}-{against}")
    for op in OPERATORS
    for scheme in (anchor.SCHEMES if op == "rwkv6" else ("none", "first-row", "previous-row-across", "dyadic"))
    for against in ("T", "chunk", "at")
    if op == "rwkv6" or against != "chunk"
]


@pytest.mark.parametrize("op, scheme, against", EVERYWHERE)
def test_the_law_foretells_every_coarse_setting(panel, op, scheme, against):
    panel.set(op=op, scheme=scheme, against=against)
    shown = panel.result
    assert (shown.predicted == shown.broken).all()
    assert shown.broken.any() == (shown.law < shown.decay[-1]).any()


def test_a_wrong_law_would_be_told(panel):
    """The readout's agreement is counted, not asserted: a law that is off must show there."""
    off = panel.result._replace(law=panel.result.law * 3)
    said = panel.describe(off, op="rwkv6", against="T")
    agree = int(re.search(r"The law foretells (\d+) of them; the others are up to (\S+) columns", said).group(1))
    assert agree == (off.predicted == off.broken).sum() < 66


def test_one_token_breaks_a_block_only_at_its_first_row(panel):
    panel.set(scheme="first-row", against="at")
    broken = dict(zip(panel.result.rows, panel.result.broken.any(1), strict=True))
    assert [at for at, bad in broken.items() if bad] == [16, 32]
    assert [at for at, law in zip(panel.result.rows, panel.result.law, strict=True) if law < math.inf] == [16, 32]
    panel.set(tensor="dk")
    assert not panel.result.broken.any()


def test_the_varying_axis_has_no_knob(panel):
    for against, disabled in (("T", (True, False)), ("chunk", (False, True)), ("at", (False, False))):
        panel.set(against=against)
        assert (panel.knobs["T"].disabled, panel.knobs["chunk"].disabled) == disabled


def test_the_fine_run_adds_errors_and_stays_with_its_setting(panel):
    coarse = panel.png
    panel.run.button.click()
    panel.run.wait(60)
    assert panel.run.status.value.startswith("done in")
    assert (panel.run.bar.value, panel.run.bar.max) == (27, 27)
    assert panel.png != coarse
    assert panel.text.startswith("27 of 3 x 9 settings measured") and "Largest error where all is finite" in panel.text
    assert np.isfinite(panel.result.error[~panel.result.broken]).all()
    assert (panel.result.predicted == panel.result.broken).all()

    panel.set(chunk=32)
    assert panel.result.error is None
    panel.set(chunk=64, tensor="o")  # every tensor was measured at once
    assert panel.result.error is not None
    assert "largest error" in panel.text.lower()


def test_few_fine_maps_are_kept(panel):
    panel.run.start()
    panel.run.wait(60)
    ((key, measured),) = panel._fine.items()
    for n in range(40):
        panel._keep(((*key, n), measured))
    assert len(panel._fine) < 20 and next(reversed(panel._fine)) == (*key, 39)
    assert panel.result.error is None  # its own map was the oldest


def test_a_cancelled_run_keeps_what_it_has(panel, monkeypatch):
    real, seen = anchor.run, []

    def run(*args, **kwargs):
        seen.append(1)
        if len(seen) == 12:
            panel.run.cancel()
        return real(*args, **kwargs)

    monkeypatch.setattr(anchor, "run", run)
    panel.run.start()
    panel.run.wait(60)
    assert panel.run.status.value == "cancelled"
    assert np.isnan(panel.result.share).sum() == 27 - 12
    assert panel.text.startswith("12 of 3 x 9 settings measured")


def test_a_failing_run_is_told(panel, monkeypatch):
    monkeypatch.setattr(anchor, "run", lambda *args, **kwargs: 1 / 0)
    panel.run.start()
    panel.run.wait(60)
    assert panel.run.status.value == "failed"
    assert panel.text.startswith("RuntimeError: sweep at T=8, decay=0.05: division by zero")


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "fine"),
    [
        ({}, False),
        ({"against": "at", "scheme": "first-row", "tensor": "o", "seed": 2}, True),
        ({"against": "chunk", "scheme": "pairwise", "mask": "where", "dtype": "bfloat16", "T": 64}, True),
        ({"op": "rwkv7", "against": "at", "scheme": "first-row", "tensor": "da"}, False),
        ({"op": "gsa", "tensor": "dg"}, True),
    ],
    ids=str,
)
def test_the_script_runs_and_gives_the_same_numbers(panel, setting, fine):
    panel.set(**setting)
    if fine:
        panel.run.start()
        panel.run.wait(60)
    shown, printed = panel.result, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    lines = re.findall(
        r"^\w+ = +(\d+): law \|[wg]\| <= (\S+), first non-finite setting at (\S+)$", printed.getvalue(), re.M
    )
    onsets = [shown.decay[bad.argmax()] if bad.any() else math.nan for bad in shown.broken]
    expected = zip(shown.rows, shown.law, onsets, strict=True)
    assert lines == [(str(row), f"{law:.4g}", f"{onset:.4g}") for row, law, onset in expected]


def test_an_operator_offers_its_own_tensors():
    panel = phase_diagram("gsa", tensor="dg")
    panel.knobs["op"].value = "rwkv7"
    assert panel.knobs["tensor"].options == ("any", "o", "dr", "dw", "dk", "dv", "da", "db")
    assert panel.setting["tensor"] == "any"
    assert "of RWKV7 in chunks" in panel._figure._title.get_text()
