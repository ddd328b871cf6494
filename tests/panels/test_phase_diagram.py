"""The phase diagram: the law against every measured setting, the fine run and its cancelling, the script."""

import dataclasses
import importlib
import math
import re

import numpy as np
import pytest

from flakit.cases import anchor
from flakit.cases.anchor import OPERATORS
from flakit.panels import phase_diagram
from tests.panels.reading import pointed, printed, sizes

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
    columns = len(shown.decay)
    foretold = rf"All {6 * columns} settings of this map were tried, and \d+% of them break. The law foretold every one"
    assert re.match(foretold, panel.text)
    assert "even where only 2.7% away from its line." in panel.text


EVERYWHERE = [
    pytest.param(op, scheme, against, id=f"{op}-{scheme}-{against}")
    for op in OPERATORS
    for scheme in (anchor.SCHEMES if op == "rwkv6" else ("none", "first-row", "previous-row-across", "dyadic"))
    for against in ("T", "chunk", "at")
    if op == "rwkv6" or against != "chunk"
]


@pytest.mark.full
@pytest.mark.parametrize("op, scheme, against", EVERYWHERE)
def test_the_law_foretells_every_coarse_setting(panel, op, scheme, against):
    """All of them but those within a percent and a half of its line, where many large terms meet in a sum."""
    panel.set(op=op, scheme=scheme, against=against)
    shown = panel.result
    assert (shown.predicted == shown.broken)[shown.distance > 1.015].all()
    assert shown.wrong.sum() <= len(shown.rows)
    assert shown.broken.any() == (shown.law < shown.decay[-1]).any()
    told_is_true(panel)


def told_is_true(panel):
    """The sentence, cell by cell."""
    shown, text = panel.result, panel.text
    known = int(re.match(r"(?:All )?(\d+)", text).group(1))
    assert known == sum(x == x for row in shown.share for x in row)
    wrong, sides = [], []
    for row, law in enumerate(shown.law):
        for column, decay in enumerate(shown.decay):
            share = shown.share[row, column]
            if share == share and (share < 1) != (decay > law):
                wrong.append(max(decay / law, law / decay))
        if shown.decay[0] < law < shown.decay[-1]:
            sides += [min(shown.decay[shown.decay > law]) / law, law / max(shown.decay[shown.decay <= law])]
    if wrong:
        count, far = re.search(
            r"The law foretold all but (\d+) of them, marked, which lies? (?:up to )?(\S+)%", text
        ).groups()
        assert int(count) == len(wrong) and 0 <= float(far) - 100 * (max(wrong) - 1) < 0.1
    elif sides:
        near = re.search(r"The law foretold every one, even where only (\S+)% away from its line", text).group(1)
        assert 0 <= float(near) - 100 * (max(sides) - 1) < 0.1
    else:
        assert "The law foretells that nothing breaks anywhere, and so it is." in text and not shown.broken.any()


@pytest.mark.full
def test_every_law_has_a_column_just_below_and_just_above(panel):
    """What was wrong: a law in the middle of a column that is finite, or is not, as a whole."""
    for tensor in ("any", "dk", "o"):
        for scheme in ("none", "block-start", "previous-row-across"):
            panel.set(scheme=scheme, tensor=tensor)
            shown = panel.result
            for law in shown.law[np.isfinite(shown.law)]:
                assert shown.decay[shown.decay <= law].max() > law / 1.03
                assert shown.decay[shown.decay > law].min() < law * 1.03


def test_a_wrong_law_would_be_told(panel):
    """The readout's agreement is counted, not asserted: a law that is off must show there."""
    off = dataclasses.replace(panel.result, law=panel.result.law * 3)
    said = panel.describe(off, op="rwkv6", against="T")
    wrong, far = re.search(
        r"The law foretold all but (\d+) of them, marked, which lie up to (\S+)% from", said
    ).groups()
    assert int(wrong) == (off.predicted != off.broken).sum() > 3 and float(far) == pytest.approx(200, abs=10)


def test_a_cell_says_setting_measurement_and_law(panel):
    shown = panel.result
    column = int(np.flatnonzero(shown.decay > shown.law[4])[0])  # T = 128, the second row from above
    for at, words in (
        (column, r"measured not finite \(\d+% of one tensor\); by the law finite up to 1.3\d+: as foretold"),
        (column - 1, r"measured finite; by the law finite up to 1.3\d+: as foretold"),
    ):
        said = pointed(panel, "cells", 1, at)
        assert re.fullmatch(rf"T = 128, \|w\| = {shown.decay[at]:.4g} per token: {words}", said)
        assert panel.picture.lit
    panel.set(scheme="previous-row", against="at")
    said = pointed(panel, "cells", 0, 0)
    assert said == "token 64, |w| = 0.05: measured finite; by the law finite up to any decay: as foretold"


def test_presets_play_and_three_knobs(panel):
    assert panel.on_view == ("against", "tensor", "scheme")
    broken = {}
    for label, setting in panel.presets.items():
        panel.set(**setting)
        broken[label] = bool(panel.result.broken.any())
    assert broken == {"start anchor": True, "bug A": True, "bad repair": True, "repaired": False}
    assert panel.player.play.max == len(anchor.SCHEMES) - 1
    panel.set(**panel.presets["start anchor"])
    panel.player.step(1)
    assert panel.setting["scheme"] == "first-row"


def test_low_enough_at_both_widths(panel):
    assert sizes(panel) == [(590, 340), (940, 390)]
    assert panel.canvas.maps["cells"] == panel.result.share.shape


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


@pytest.mark.full
def test_the_fine_run_adds_errors_and_stays_with_its_setting(panel):
    coarse = panel.png
    panel.run.button.click()
    panel.run.wait(60)
    assert panel.run.status.value.startswith("done in")
    rows, columns = panel.result.share.shape
    assert rows == 3 and columns > 9
    assert (panel.run.bar.value, panel.run.bar.max) == (3 * columns, 3 * columns)
    assert panel.png != coarse
    told_is_true(panel)
    assert (
        panel.text.startswith(f"All {3 * columns} settings of this map were tried")
        and "Largest error where all is finite" in panel.text
    )
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
    assert (~np.isnan(panel.result.share)).sum() == 12 < panel.result.share.size
    assert panel.text.startswith(f"12 of the {3 * len(panel.result.decay)} settings of this map were tried")
    said = pointed(panel, "cells", 0, 0)
    assert said.startswith("T = 65, |w| = 0.05 per token: not measured yet; by the law finite up to 1.3")


def test_a_failing_run_is_told(panel, monkeypatch):
    monkeypatch.setattr(anchor, "run", lambda *args, **kwargs: 1 / 0)
    panel.run.start()
    panel.run.wait(60)
    assert panel.run.status.value == "failed"
    assert panel.text.startswith("RuntimeError: sweep at T=8, decay=0.05: ZeroDivisionError: division by zero")


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
    line = r"^\w+ = +(\d+): law \|[wg]\| <= (\S+), first non-finite setting at (\S+)$"
    shown, lines = panel.result, re.findall(line, printed(panel), re.M)
    onsets = [shown.decay[bad.argmax()] if bad.any() else math.nan for bad in shown.broken]
    expected = zip(shown.rows, shown.law, onsets, strict=True)
    assert lines == [(str(row), f"{law:.4g}", f"{onset:.4g}") for row, law, onset in expected]


@pytest.mark.full
def test_an_operator_offers_its_own_tensors():
    panel = phase_diagram("gsa", tensor="dg")
    panel.knobs["op"].value = "rwkv7"
    assert panel.knobs["tensor"].options == ("any", "o", "dr", "dw", "dk", "dv", "da", "db")
    assert panel.setting["tensor"] == "any"
    figure = panel.figure(None)  # the one that is shown: nothing makes another
    assert "of RWKV7 in chunks" in figure._title.get_text()
