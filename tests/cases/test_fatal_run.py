"""The run that dies: its fatal step replayed, what the operator was given in it, and the run resumed before it."""

import math

import pytest
import torch

import flakit
from flakit.cases import gate_drift as case
from flakit.cases.gate_drift import text
from flakit.numerics.carried import folder
from flakit.numerics.recorded import read
from flakit.ops.rwkv6 import fused_recurrent_rwkv6

CLOSE = 0.01
"""Of a loss in nats, over the steps that are computed again: what other machines round otherwise grows in training.
The recurrence, which rounds in another order at every token, stays within a tenth of it."""


def test_the_recording_tells_the_story():
    none, bug, right = (case.recorded(kernel) for kernel in text.KERNELS)
    for died, of in ((none, "none"), (bug, "first-row")):
        fatal = case.fatal_step(of)
        assert died.run.skipped[0] == fatal and len(died.run.losses) == fatal + 2
        assert all(math.isnan(x) for x in died.run.losses[fatal + 1 :])
        assert died.predicted[: fatal + 1] == [False] * fatal + [True]  # the law names the step, and no earlier one
        assert died.run.losses[fatal - 10] < 0.5 * died.run.losses[0]
    assert math.isfinite(none.run.losses[case.fatal_step()])  # the output is fine: the gradient alone is lost
    assert case.fatal_step("first-row") > 1000 and not any(right.lost) and len(right.run.losses) >= 1200
    assert sum(right.run.losses[-50:]) < 0.85 * sum(right.run.losses[50:100])
    # The forms differ in rounding alone, so that they train alike until one of them dies.
    assert right.run.losses[: case.fatal_step()] == pytest.approx(none.run.losses[:-2], abs=0.1)


def test_what_is_stored_is_small_and_needs_no_pickle():
    assert sum(p.numel() for p in text.initial().parameters()) <= 150_000
    assert sum((folder("data") / f"fatal_run.{kind}").stat().st_size for kind in ("npz", "json")) < 2e6


@pytest.mark.parametrize("of", text.FATAL)
def test_the_fatal_step_loses_the_same_tensors_and_the_right_kernel_none(of):
    faulty, right = case.replay(of, of=of), case.replay("right", of=of)
    assert faulty.lost == tuple(read(text.NAME).meta[f"lost, {of}"].split()) and right.lost == ()
    recorded = case.recorded(of).run.losses[case.fatal_step(of)]
    assert faulty.loss == pytest.approx(recorded, abs=CLOSE, nan_ok=True)
    assert right.loss == pytest.approx(case.recorded("right", of=of).run.losses[0], abs=CLOSE)


def test_bug_a_survives_what_the_start_anchor_dies_of():
    assert case.replay("first-row", of="none").lost == () and "o" in case.replay("none", of="first-row").lost
    lost = case.replay("none").lost
    assert lost[:3] == ("dr", "dk", "dw") and "blocks.0.time.value.weight" not in lost and "head.weight" not in lost


@pytest.mark.parametrize("kernel", ["right", fused_recurrent_rwkv6], ids=["right", "recurrence"])
def test_the_run_goes_on_as_recorded(kernel):
    steps = 20 if kernel == "right" else 8
    found, recorded = case.resume(kernel, steps=steps), case.recorded("right", of="none")
    assert found.first == recorded.first == case.fatal_step() and not any(found.lost)
    close = CLOSE if kernel == "right" else 0.1 * CLOSE
    assert found.run.losses == pytest.approx(recorded.run.losses[:steps], abs=close)
    assert found.predicted[0] and not case.recorded("none").predicted[case.fatal_step() - 1]


def test_with_the_faulty_kernel_it_dies_again():
    found = case.resume("none", steps=3)
    assert found.lost == [True] * 3 and math.isfinite(found.run.losses[0]) and math.isnan(found.run.losses[1])


def test_the_first_steps_are_those_recorded():
    found, recorded = case.start("none", steps=12), case.recorded("none")
    assert found.run.losses == pytest.approx(recorded.run.losses[:12], abs=CLOSE)


@pytest.mark.parametrize("of", text.FATAL)
def test_the_whole_run_dies_when_it_did(of):
    found, recorded, fatal = case.relive(of), case.recorded(of), case.fatal_step(of)
    assert found.run.skipped == [fatal, fatal + 1, fatal + 2] and found.first == 0
    assert found.run.losses[:fatal] == recorded.run.losses[:fatal]
    assert found.run.losses[fatal : fatal + 2] == pytest.approx(recorded.run.losses[fatal:], abs=CLOSE, nan_ok=True)
    assert found.quantiles[fatal][-1] == pytest.approx(recorded.quantiles[fatal][-1], abs=0.1)
    assert [each > text.LIMIT for (each,) in found.quantiles[: fatal + 1]] == [False] * fatal + [True]


@pytest.mark.full
def test_wherever_rounding_leads_the_law_names_the_lost_step():
    """Processors part after some twenty steps, and each has a fatal step of its own, if any."""
    found = case.start("none", steps=text.Text(0).steps)
    first = next((n for n, lost in enumerate(found.lost) if lost), len(found.lost))
    assert first >= 60 and found.predicted[:first] == [False] * first
    assert first == len(found.lost) or found.predicted[first] and all(found.lost[first:])
    assert all(math.isfinite(x) for x in found.run.losses[:first])


def lost(of, inputs, do):
    """Of the faulty kernel alone, with a finite gradient of o: which of o and the gradients are not finite."""
    tensors = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o = text._operator(of)(*tensors.values()).o
    o.backward(do)
    made = {"o": o} | {f"d{name}": x.grad for name, x in tensors.items()}
    return {name for name, x in made.items() if not x.isfinite().all()}


@pytest.mark.parametrize("of", text.FATAL)
def test_the_fatal_step_does_not_hang_on_rounding(of):
    """Inputs that are off by far more than any rounding lose the same tensors."""
    x, generator = dict(case.fatal_batch(of).whole), torch.Generator().manual_seed(0)
    do = x.pop("do")
    moved = {name: y * (1 + 1e-4 * torch.randn(y.shape, generator=generator)) for name, y in x.items()}
    assert {"dr", "dw"} <= lost(of, moved, do) == lost(of, x, do)


@pytest.mark.parametrize("of", text.FATAL)
def test_the_fatal_batch_is_where_the_exponent_is(of):
    x = case.fatal_batch(of)
    w = x.whole["w"]
    assert x.exponent == case.exponents("rwkv6", w, of).max() > case.LIMIT
    exponents = -x.decays.cumsum(0) if of == "none" else -x.decays
    assert exponents[x.token] > case.LIMIT
    assert (exponents[: x.token] < case.LIMIT).all()
    at = slice(64 * x.chunk, 64 * x.chunk + 64)
    assert torch.equal(x.decays, w[x.sequence, at, x.head, x.channel])
    assert len(x.text) == 64 and all(x.text[place] == word for word, place in x.words)
    assert x.inputs["r"].shape == x.do.shape == (1, 64, 1, 16) and x.inputs["u"].shape == (1, 16)
    whole = flakit.chunk_rwkv6(**{name: y for name, y in x.whole.items() if name != "do"}).o
    part = flakit.chunk_rwkv6(**x.inputs, initial_state=x.state).o
    assert part[0, :, 0] == pytest.approx(whole[x.sequence, at, x.head], abs=1e-5)
    assert x.state.abs().max() > 0  # both are a sequence's second chunk
    x.inputs["w"].zero_()
    assert case.fatal_batch(of).decays.any()


def test_the_token_at_fault():
    x = case.fatal_batch()
    assert x.text.split() == ["return", "ans", "if", "context", "is", "None:"]
    assert x.token == 63  # the last key, which no token of its chunk reads
    assert case.fatal_batch("first-row").token % 16 == 0
