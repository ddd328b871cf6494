"""Sketches: one knob each, and the numbers are those of the operators and of the casebook."""

import contextlib
import dataclasses
import io
import math
import time

import numpy as np
import pytest
import torch

from flakit.cases import anchor
from flakit.cases.laws import LN_MAX
from flakit.panels import sketch
from flakit.panels.knobs import stops_of
from flakit.panels.sketches import SKETCHES
from flakit.panels.sketches.decay_blowup import ANCHORS
from flakit.panels.sketches.rwkv6_forward import KEYS, VALUES
from tests.panels.live import NOT_LIVE


@pytest.mark.parametrize("name", SKETCHES)
def test_one_knob_moves_picture_and_sentence(name):
    panel = sketch(name)
    assert panel.on_view == (panel.main,)
    stops = stops_of(panel.knobs[panel.main])
    seen = set()
    for stop in (stops[1], stops[-1]):
        start = time.process_time()
        panel.set(**{panel.main: stop})
        assert time.process_time() - start < NOT_LIVE
        seen.add((panel.png, panel.text))
    assert len({png for png, _ in seen}) == len({text for _, text in seen}) == 2
    for preset in panel.presets.values():
        panel.set(**preset)
    assert panel.alt_text(panel.result).endswith(panel.text)


@pytest.mark.parametrize("name", SKETCHES)
def test_the_script_runs(name):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(sketch(name).as_python(), {})
    assert out.getvalue().strip()


def test_broken_breaks_where_the_law_says():
    panel = sketch("broken")
    law = min(anchor.limits("none", {"w": torch.full((1, 64, 1, 32), -1.0)}, op="rwkv6").values())
    for decay in stops_of(panel.knobs["decay"]):
        panel.set(decay=decay)
        assert ("everything is fine" in panel.text) == (-decay <= law), decay
        assert np.isfinite(panel.result.true).all()
        fine = panel.result.shares["dr"] == 0
        assert not fine or np.allclose(panel.result.computed, panel.result.true, atol=1e-4)


def test_reading_by_pairs_is_reading_the_state():
    state = (KEYS[:, :, None] * VALUES[:, None, :]).sum(0)
    for direction in (0, 90, 210):
        shown = sketch("reading", direction=direction).result
        assert np.allclose(shown.output, torch.as_tensor(shown.query) @ state, atol=1e-6)
        assert np.abs(shown.scores).max() < 2.6 and np.abs(shown.output).max() < 7.0, "the axes end there"


def test_forgetting_is_what_the_operator_does():
    for w in (0.0, -0.07, -5.0, -math.inf):
        left = sketch("forgetting", w=w).result.left
        assert np.allclose(left, [1.0 if w == 0 else math.exp(n * w) for n in range(1, len(left) + 1)], rtol=1e-12)


def test_a_format_ends_where_its_law_says():
    panel = sketch("ends")
    for exponent in stops_of(panel.knobs["exponent"]):
        shown = panel.set(exponent=exponent).result
        for dtype, end in LN_MAX.items():
            held, most = shown.values[str(dtype).removeprefix("torch.")], torch.finfo(dtype)
            assert math.isinf(held) == (exponent > end + 2e-3)  # what is nearest to the largest is rounded to it
            assert (held == 0) == (exponent < math.log(most.smallest_normal * most.eps / 2))


@pytest.mark.parametrize("scheme", ANCHORS.values())
def test_the_tokens_to_be_counted_are_those_of_the_largest_exponent(scheme):
    shown = sketch("counting", scheme=scheme).result
    (worst,) = anchor.worst(-torch.ones(1, 64, 1, 1), scheme)
    assert shown.tokens.sum() == worst.exponent == round(anchor.law(scheme, tensor="dr") ** -1 * LN_MAX[torch.float32])
    run = np.flatnonzero(shown.tokens)
    assert len(run) == run[-1] - run[0] + 1 and shown.token in (run[0], run[-1]) and shown.token == worst.token
    assert shown.anchor in (run[0] - 1, run[-1])


@pytest.mark.parametrize("row", [0, -1, 3])
def test_one_token_is_fatal_where_a_run_of_its_own_is(row):
    shown = sketch("fatal", row=row).result
    scheme = dataclasses.replace(anchor.SCHEMES["first-row"], left=row)
    for token in (0, 15, 16, 17, 19, 63, 64, 80, 127):
        alone = anchor.run(anchor.spike(token, shown.w, T=128, K=2), scheme).finite
        assert {name: not lost[token] for name, lost in shown.lost.items()} == {
            name: alone[name] for name in shown.lost
        }


def test_only_with_the_row_before_the_block_no_token_is_fatal():
    panel = sketch("fatal")
    safe = [row for row in stops_of(panel.knobs["row"]) if not panel.set(row=row).result.fatal.any()]
    assert safe == [-1]
    assert list(np.flatnonzero(panel.set(row=0).result.fatal)) == [16, 32, 48, 80, 96, 112]


def test_an_unknown_name():
    with pytest.raises(ValueError, match="name: expected one of broken, .*, got 'writing'"):
        sketch("writing")
