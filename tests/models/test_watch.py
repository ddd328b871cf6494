"""Watching decays: what hooks record, of these models and of others; the warning before a fault, in a real drift."""

import copy
import io
import math
import pickle
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flakit
from flakit.cases import gate_drift
from flakit.models import Alarm, Delay, HeadroomWarning, LanguageModel, WatchWarning, recorded, train
from flakit.models.gsa import GSA
from flakit.models.watch import OWN, watch

FULL = pytest.mark.full
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
    assert first.line([79, 80, ends])[1:] == pytest.approx([first.exponent, first.limit])
    assert math.isnan(first.line([79])[0])
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


def test_it_warns_as_python_does_and_where_the_model_is_called():
    with pytest.warns(HeadroomWarning, match="at this pace its headroom is used up at step 174") as told:
        watched(Drifting(0.5), steps=90)
    assert {warning.filename for warning in told} == {__file__}
    made = model()
    with pytest.warns(WatchWarning) as told, flakit.watch(made, decays=lambda *_: None):
        train(made, Delay(4).batch, steps=1, size=2, T=20, progress=False)  # flakit's own loop
    assert {warning.filename for warning in told} == {__file__}


def test_decays_of_minus_infinity_are_told_once():
    """From the first step on or later, in whichever layer, also where another layer is lost."""
    says = r"step {}, {}: decays are -inf\. A gate w = -exp\(x\) has no gradient there.* unless it is flakit\.log_decay"
    made = nn.Sequential(nn.Identity(), nn.Identity())

    def watched_at(*x, every=1):
        def decays(name, module, output):
            return -output.exp().view(1, 4, 1, 1) if name else None

        with flakit.watch(made, every=every, decays=decays, only=["dyadic"]) as watching:
            for value in x:
                made(torch.tensor([0.0, 1.0, 2.0, value]))
        return watching

    with pytest.warns(HeadroomWarning, match=says.format(2, 0)) as told:
        watching = watched_at(3.0, 88.7, 88.8, 90.0, 3.0, 90.0)
    assert len(told) == 1 and told[0].filename == __file__
    assert [h.gate.infinite for h in watching.headrooms.values()] == [0, 0, 2, 2, 0, 2]
    with pytest.warns(HeadroomWarning, match=says.format(0, 0)):
        watched_at(math.inf)
    with pytest.warns(WatchWarning, match="NaN"), warnings.catch_warnings():
        warnings.simplefilter("error", HeadroomWarning)
        watched_at(1.0, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched_at(3.0, 88.7)


def test_lost_weights_are_not_measured():
    with pytest.warns(WatchWarning, match="nothing was measured at step 0: the decays of the model are NaN"):
        assert list(watched(Drifting(0.5), steps=3, slower=math.nan, every=1).headrooms) == []
    assert list(watched(Drifting(0.5), steps=3, every=1).headrooms) == [0, 1, 2]


# --- a watch that sees nothing says so --------------------------------------------------------------------------------


class Output(NamedTuple):
    o: torch.Tensor


def quick(q, k, v, s, g):
    """In the operator's place: compiled in no time."""
    return Output(q + v * g.exp().mean(-1, keepdim=True))


class Small(nn.Module):
    """A model of one mixer that is compiled in a second."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 16)
        self.blocks = nn.ModuleList([GSA(16, 0, 1, head_size=8, slots=4, operator=quick)])

    def forward(self, tokens):
        return self.blocks[0](self.embedding(tokens), None)[0]


class Inside(nn.Module):
    """A model inside another."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(16, 6)

    def forward(self, tokens):
        return self.last(self.inner(tokens))


def compiled(made, how):
    """What to call in the model's place. What stands in a graph is the same however it is called: one goes further."""
    if how == "in place":
        made.compile(backend="eager")
    elif how == "its blocks":
        for block in made.blocks:
            block.compile(backend="eager")
    elif how == "a function":
        return torch.compile(lambda x: made(x), backend="eager", fullgraph=True)
    elif how == "the model":
        return torch.compile(made, backend="aot_eager", fullgraph=True)
    return made


@pytest.fixture
def nothing_compiled():
    """Compiled code stays no longer than its test."""
    yield
    torch.compiler.reset()


COMPILES = pytest.mark.usefixtures("nothing_compiled")


def steps(call, n=3):
    return [call(TOKENS).sum().backward() for _ in range(n)]


@COMPILES
@pytest.mark.parametrize(
    "how", ["the model", "a function", pytest.param("in place", marks=FULL), pytest.param("its blocks", marks=FULL)]
)
@pytest.mark.parametrize("ran", [True, False], ids=["ran before", "watched first"])
def test_a_compiled_model_is_watched(how, ran):
    made = Small()
    plain = copy.deepcopy(made)
    call = compiled(made, how)
    if ran:
        call(TOKENS)
    with flakit.watch(plain, every=2, only=["none"]) as expected:
        steps(plain)
    with flakit.watch(made, every=2, only=["none"]) as watching:
        steps(call)
    assert watching.step == 2 and list(watching.headrooms) == [0, 2]
    assert list(watching.recording) == list(expected.recording)
    for name, w in watching.recording.items():
        torch.testing.assert_close(w, expected.recording[name])
    steps(call)
    assert watching.step == 2  # closed


@COMPILES
def test_a_compiled_model_can_be_what_is_given_and_a_part_of_what_is_compiled():
    call = torch.compile(Small(), backend="eager")
    with flakit.watch(call, every=2, only=["none"]) as watching:
        steps(call)
    assert list(watching.headrooms) == [0, 2] and list(watching.recording) == ["blocks.0"]
    made = Inside(Small())
    call = torch.compile(made, backend="eager", fullgraph=True)
    steps(call)
    with flakit.watch(made.inner, every=2, only=["none"]) as watching:
        steps(call)
    assert list(watching.headrooms) == [0, 2]


@COMPILES
def test_a_compiled_model_is_recorded():
    made = Small()
    call = torch.compile(made, backend="aot_eager", fullgraph=True)
    call(TOKENS)
    with recorded(made) as w:
        call(TOKENS)
    assert list(w) == ["blocks.0"]


@FULL
@COMPILES
def test_the_compiler_keeps_what_looks():
    """inductor with all its passes, but for PyTorch's own kernels in place of C++ that takes a minute to compile."""
    made = Small()
    call = torch.compile(made, fullgraph=True, options={"fallback_by_default": True})
    with flakit.watch(made, every=2, only=["none"]) as watching:
        steps(call)
    assert list(watching.headrooms) == [0, 2]


@COMPILES
def test_a_function_compiled_with_somebodys_model_is_named():
    made, x = nn.Sequential(Foreign(), Foreign()), torch.randn(1, 30, 8)
    call = torch.compile(lambda x: made(x), backend="eager")
    call(x)
    with pytest.warns(WatchWarning, match=r"no forward pass in training mode went through .* torch.compiler.reset"):
        with flakit.watch(made, decays=decays):
            call(x)
    call = torch.compile(made, backend="eager")
    call(x)
    with pytest.warns(WatchWarning, match=r"torch.compiler.reset"):
        with flakit.watch(made, decays=decays):
            call(x)
    with flakit.watch(made, decays=decays, every=2) as watching:
        torch.compiler.reset()
        for _ in range(3):
            call(x)
    assert list(watching.headrooms) == [0, 2]


def test_decays_that_match_nothing_are_told_once():
    made, x = nn.Sequential(Foreign(), Foreign()), torch.randn(1, 30, 8)
    with pytest.warns(WatchWarning, match=r"at step 0: decays\(name, module, output\) returned None for every") as told:
        with flakit.watch(made, every=1, decays=lambda *_: None):
            made(x), made(x)
    assert len(told) == 1
    with pytest.warns(WatchWarning, match="nothing was recorded: no forward pass ran in the block, or decays"):
        with recorded(made, lambda *_: None):
            made(x)
    with pytest.raises(TypeError, match="decays: expected a tensor or None for '0.w_proj', got list"):
        with recorded(made, lambda name, module, output: [1.0] if name == "0.w_proj" else None):
            made(x)


def test_a_model_left_in_evaluation_mode_is_told():
    made = model().eval()
    with pytest.warns(WatchWarning, match="3 forward passes with gradients ran in evaluation mode") as told:
        with flakit.watch(made, every=3):
            with torch.no_grad():
                steps_without = [made(TOKENS) for _ in range(9)]
            assert len(steps_without) == 9 and not told
            steps(made, 9)
    assert len(told) == 1


def test_a_watch_of_no_step_is_told_when_it_ends():
    with pytest.warns(WatchWarning, match="no forward pass in training mode went through the model"):
        flakit.watch(model()).close()
    with warnings.catch_warnings(), pytest.raises(KeyError):
        warnings.simplefilter("error")
        with flakit.watch(model()):
            raise KeyError("said enough")


def test_an_operator_exchanged_on_the_way_is_seen():
    made, calls = model(layers=1), []
    operator = made.blocks[0].time.operator

    def other(*x):
        calls.append(x)
        return operator(*x)

    with flakit.watch(made, every=1, only=["none"]) as watching:
        steps(made, 1)
        made.blocks[0].time.operator = other
        steps(made, 2)
    assert len(calls) == 2 and list(watching.headrooms)[-1] == 2 and made.blocks[0].time.operator is other


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing_makes_no_steps(reentrant):
    made, first = Inside(Small()), nn.Parameter(torch.ones(()))
    run = partial(checkpoint, use_reentrant=reentrant)
    with flakit.watch(made.inner, every=1, only=["none"]) as watching:
        for _ in range(3):
            run(lambda x: made(TOKENS) * x, first).sum().backward()
    assert watching.step == 2 and list(watching.headrooms) == [0, 1, 2]


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing_of_layers_is_recorded_once(reentrant):
    made, seen = model(layers=1), []
    made.blocks[0].forward = partial(checkpoint, made.blocks[0].forward, use_reentrant=reentrant)

    def measure(recording, **_):
        seen.append(dict(recording))
        return flakit.headroom(recording)

    with watch(made, every=2, measure=measure) as watching:
        steps(made, 4)
    assert watching.step == 3 and len(seen) == 2 and not watching._recorder.recording


def through_pickle(made):
    return pickle.loads(pickle.dumps(made))


def through_a_file(made):
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "somebody's"])
def test_a_copy_of_a_watched_model_is_not_watched(copied, foreign):
    made = nn.Sequential(Foreign()) if foreign else model()
    x = torch.randn(1, 30, 8) if foreign else TOKENS
    with flakit.watch(made, every=1, decays=decays if foreign else None) as watching:
        made(x)
        other = copied(made)
        torch.testing.assert_close(other(x), made(x))
        assert watching.step == 1
        if not foreign:
            assert other.blocks[0].time.operator is model().blocks[0].time.operator
    with flakit.watch(other, every=1, decays=decays if foreign else None) as watching:
        other(x)
    assert list(watching.headrooms) == [0]


def test_watches_of_one_model_end_in_any_order():
    made = model()
    operator = made.blocks[0].time.operator
    one, two = (flakit.watch(made, every=1, only=["none"]) for _ in range(2))
    steps(made, 1)
    one.close()
    steps(made, 1)
    two.close()
    assert (one.step, two.step) == (0, 1) and set(one.recording) == set(two.recording)
    assert all(block.time.operator is operator for block in made.blocks) and not made._forward_hooks


def test_layers_of_two_operators_need_a_choice():
    made = nn.ModuleList([model("rwkv6"), model("gsa")])
    with pytest.raises(ValueError, match="model: expected layers of one operator, got gsa and rwkv6"):
        flakit.watch(made)


# --- arguments --------------------------------------------------------------------------------------------------------


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
                lr=gate_drift.LEARNING_RATE["gsa"], warmup=gate_drift.delay.WARMUP / steps, cosine=False, seed=seed,
                progress=False,
            )  # fmt: skip
    return watching, run


@pytest.mark.full
def test_the_casebooks_drift_is_warned_of_long_before_its_first_lost_step(record_property):
    watching, run = drifted(seed=0, steps=220)
    first, lost = watching.warned[0], run.skipped[0]
    record_property("GSA that drifts: warned at step", f"{first.step}, first lost step {lost}")
    assert lost - first.step >= 100 and first.step < first.used_up < math.inf
    steps, exponents = watching.pace("blocks.0.time", "padding, chunk")
    assert steps == list(range(0, 220, 10))
    for n, exponent in zip(steps, exponents, strict=True):  # the measurement is the law of the lost steps
        assert (n in run.skipped) == (exponent > gate_drift.LIMIT)


def test_an_alarm_hears_from_a_log_what_a_watch_hears_from_a_model():
    """A line that passes 88.72 between steps 17 and 18: told six steps ahead, and when it has happened."""
    alarm = Alarm(88.72, ahead=6, over=3, layer="a", kernel="b", dtype=torch.bfloat16)
    told = [x for step in range(30) if (x := alarm.hear(step, 5.0 * step)) is not None]
    assert [x.step for x in told] == [12, 18] and told[0].used_up == pytest.approx(88.72 / 5) and told[0].pace == 5
    assert told[1].used_up == 18 and (told[0].layer, told[0].kernel, told[0].dtype) == ("a", "b", torch.bfloat16)
    with pytest.raises(ValueError, match="step: expected one after 29, got 29"):
        alarm.hear(29, 1.0)
    with pytest.raises(ValueError, match="over: expected a whole number of at least 2, got 1"):
        Alarm(88.72, ahead=6, over=1)
