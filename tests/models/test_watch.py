"""Watching decays: what hooks record, of these models and of others; the warning before a fault, in a real drift."""

import math
import warnings

import pytest
import torch
from torch import nn

import flakit
from flakit.cases import gate_drift
from flakit.models import Delay, HeadroomWarning, LanguageModel, recorded, train
from flakit.models.watch import OWN

TOKENS = torch.randint(6, (2, 20), generator=torch.Generator().manual_seed(0))


def model(mixer="rwkv6", layers=2, **how):
    return LanguageModel(6, dim=32, layers=layers, mixer=mixer, head_size=16, **how)


# --- recorded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["rwkv6", "rwkv7", "gsa"])
def test_records_what_the_operator_is_given(mixer):
    made, given = model(mixer), []
    for block in made.blocks:
        compute = block.time.operator

        def seen(*x, compute=compute):
            given.append(x)
            return compute(*x)

        block.time.operator = seen
    before = [block.time.operator for block in made.blocks]
    with recorded(made) as w:
        made(TOKENS)
    assert list(w) == ["blocks.0.time", "blocks.1.time"] and w.op == mixer
    _, at = OWN[type(made.blocks[0].time)]
    assert all(torch.equal(x, args[at]) and not x.requires_grad for x, args in zip(w.values(), given, strict=True))
    assert [block.time.operator for block in made.blocks] == before
    assert flakit.headroom(w).op == mixer and set(flakit.headroom(w).layers) == set(w)


def test_an_error_in_the_forward_pass_puts_the_operator_back():
    made = model()

    def fails(*_):
        raise RuntimeError("no")

    made.blocks[0].time.operator = fails
    with recorded(made), pytest.raises(RuntimeError, match="no"):
        made(TOKENS)
    assert made.blocks[0].time.operator is fails
    with recorded(made) as w, pytest.raises(RuntimeError, match="no"):
        made(TOKENS)
    assert made.blocks[0].time.operator is fails and len(w) == 1


class Foreign(nn.Module):
    """Somebody's layer: a projection that makes x of w = -exp(x)."""

    def __init__(self):
        super().__init__()
        self.w_proj = nn.Linear(8, 8)

    def forward(self, x):
        return x * self.w_proj(x).exp()


def decays(name, module, output):
    return -output.exp().unflatten(-1, (2, 4)) if name.endswith("w_proj") else None


def test_any_model_with_a_function():
    made, x = nn.Sequential(Foreign(), Foreign()), torch.randn(1, 30, 8)
    with recorded(made, decays) as w:
        made(x)
    assert list(w) == ["0.w_proj", "1.w_proj"] and w["0.w_proj"].shape == (1, 30, 2, 4)
    assert torch.equal(w["0.w_proj"], decays("w_proj", made, made[0].w_proj(x)).detach())
    assert not any(module._forward_hooks for module in made.modules())
    with flakit.watch(made, every=2, decays=decays, op="gsa") as watching:
        for _ in range(5):
            made(x)
    assert list(watching.headrooms) == [0, 2, 4] and watching.headrooms[0].op == "gsa"


def test_a_model_without_decays_needs_one():
    with pytest.raises(
        ValueError, match="decays: expected a function, since LanguageModel has no layer of flakit.models"
    ):
        flakit.watch(model("attention"))
    made = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="decays: expected a function of name, module and output, got str"):
        flakit.watch(made, decays="w_proj")
    assert not made._forward_pre_hooks


# --- watch ------------------------------------------------------------------------------------------------------------


def test_steps_are_training_passes_and_results_stay_the_same():
    made, other = model(), model()
    with flakit.watch(made, every=3, only=["none"]) as watching:
        runs = [train(x, Delay(4).batch, steps=8, size=2, T=20, progress=False) for x in (made, other)]
        made.eval()
        made(TOKENS % 4)
    assert runs[0].losses == runs[1].losses
    assert list(watching.headrooms) == [0, 3, 6] and watching.step == 7
    assert set(watching.headrooms[6].layers) == set(watching.recording) == {"blocks.0.time", "blocks.1.time"}
    assert "Headroom at step 6" in str(watching) and "blocks.1.time: none: " in str(watching)
    made.train()
    made(TOKENS % 4)
    assert watching.step == 7  # closed


class Drifting(nn.Module):
    """Decays that grow by `pace` a step, from 1."""

    def __init__(self, pace, start=1.0):
        super().__init__()
        self.pace, self.w = pace, start

    def forward(self, x):
        self.w += self.pace
        return torch.full((1, 20, 1, 2), -self.w)


def watched(made, steps=100, slower=1.0, **how):
    how = {"every": 10, "only": ["first-row"], **how}
    with flakit.watch(made, decays=lambda name, module, w: w if module is made else None, **how) as watching:
        for _ in range(steps):
            made.pace *= slower
            made(None)
    return watching


def told(made, **how):
    found = []
    assert watched(made, tell=found.append, **how).warned == found
    return found


def test_a_steady_drift_is_foretold_to_the_step():
    """1 + 0.5 (n + 1) passes 88.72 at step 175; 100 steps ahead of it is step 80."""
    ends = (88.7228 - 1) / 0.5 - 1
    first, last = told(Drifting(0.5), steps=200)
    assert first.step == 80 and first.used_up == pytest.approx(ends, abs=0.01) and first.pace == pytest.approx(0.5)
    assert last.step == last.used_up == 180 and last.exponent > last.limit
    assert "of 88.72 and grows by 0.5 a step: at this pace its headroom is used up at step 174" in str(first)
    assert "its headroom is used up, it makes NaN" in str(last)


def test_what_stands_still_falls_or_never_held_is_no_warning():
    assert told(Drifting(0.0, start=80.0)) == [] == told(Drifting(-0.1, start=80.0))
    assert told(Drifting(1.0, start=90.0)) == []
    assert told(Drifting(1.0), only=["dyadic"], steps=150) == []


def test_a_forecast_that_did_not_come_true_is_renewed():
    found = told(Drifting(0.5), steps=400, slower=0.995)
    dates = [f.used_up for f in found]
    assert len(found) >= 2 and dates == sorted(dates)
    assert all(b.step >= a.used_up for a, b in zip(found, found[1:], strict=False))


def test_it_warns_as_python_does():
    with pytest.warns(HeadroomWarning, match="at this pace its headroom is used up at step 174"):
        watched(Drifting(0.5), steps=90)


def test_lost_weights_are_not_measured():
    assert list(watched(Drifting(0.5), steps=3, slower=math.nan, every=1).headrooms) == []
    assert list(watched(Drifting(0.5), steps=3, every=1).headrooms) == [0, 1, 2]


@pytest.mark.parametrize(("name", "least"), [("every", 1), ("over", 2), ("ahead", 0)])
def test_bad_arguments_are_named(name, least):
    with pytest.raises(ValueError, match=f"{name}: expected a whole number of at least {least}, got {least - 1}"):
        flakit.watch(model(), **{name: least - 1})


def drifted(seed, steps):
    made = gate_drift.model("gsa", seed=seed)
    made.blocks[0].time.operator = gate_drift.faulty("gsa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadroomWarning)
        with flakit.watch(made, every=10, only=["padding, chunk"]) as watching:
            run = train(
                made, Delay().batch, steps=steps, size=gate_drift.SIZE, T=gate_drift.T,
                lr=gate_drift.LEARNING_RATE["gsa"], warmup=gate_drift.WARMUP / steps, cosine=False, seed=seed,
                progress=False,
            )  # fmt: skip
    return watching, run


def test_the_casebooks_drift_is_warned_of_long_before_its_first_lost_step(record_property):
    watching, run = drifted(seed=0, steps=220)
    first, lost = watching.warned[0], run.skipped[0]
    record_property("GSA that drifts: warned at step", f"{first.step}, first lost step {lost}")
    assert lost - first.step >= 100 and first.step < first.used_up < math.inf
    steps, exponents = watching.pace("blocks.0.time", "padding, chunk")
    assert steps == list(range(0, 220, 10))
    for n, exponent in zip(steps, exponents, strict=True):  # the measurement is the law of the lost steps
        assert (n in run.skipped) == (exponent > gate_drift.LIMIT)
