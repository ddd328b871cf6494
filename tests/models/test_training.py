"""Training: what is learnt, that a seed repeats it, and that a step that is not finite is counted and not taken."""

import math

import pytest
import torch

import flakit
from flakit.models import (
    MIXERS,
    Copying,
    LanguageModel,
    Permutations,
    accuracy,
    loss,
    mean_loss,
    standard_library,
    train,
)
from flakit.models.training import adamw

TASK = Permutations(items=3)


def trained(mixer="rwkv7", batch=TASK.batch, steps=30, seed=0, model=None, **settings):
    if model is None:
        model = LanguageModel(TASK.vocab, dim=16, layers=1, mixer=mixer, head_size=8, seed=seed)
    how = {"size": 16, "T": 4, "lr": 1e-2, "seed": seed, "progress": False}
    return model, train(model, batch, steps=steps, **how | settings)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_loss_falls(mixer):
    _, run = trained(mixer, steps=60)
    assert run.losses[0] > 1.4  # ln 6 = 1.79, and the first answer of four is easy
    assert sum(run.losses[-5:]) / 5 < 0.6 * run.losses[0]
    assert run.skipped == [] and len(run.grad_norms) == 60


def test_the_loss_of_the_corpus_falls():
    corpus = standard_library(modules=20)
    model = LanguageModel(corpus.vocab, dim=16, layers=1, mixer="rwkv6", head_size=8)
    run = train(model, corpus.batch, steps=30, size=8, T=32, lr=1e-2, progress=False)
    assert run.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert run.losses[-1] < 4


def test_a_seed_repeats_a_run():
    (one, run), (same, again), (_, other) = (trained(steps=5, seed=seed) for seed in (1, 1, 2))
    assert (run.losses, run.grad_norms) == (again.losses, again.grad_norms)
    assert run.losses != other.losses
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))


def test_the_learning_rate_falls_or_is_held():
    falling, held = (trained(steps=20, warmup=0.0, cosine=cosine) for cosine in (True, False))
    start = list(trained(steps=0)[0].parameters())
    moved = [sum((p - q).norm().item() for p, q in zip(m.parameters(), start, strict=True)) for m, _ in (falling, held)]
    assert falling[1].losses[:2] == held[1].losses[:2] and falling[1].losses[-1] != held[1].losses[-1]
    assert moved[0] < moved[1]


def test_the_length_can_follow_the_step():
    lengths = []

    def batch(size, T, generator):
        lengths.append(T)
        return TASK.batch(size, T, generator)

    trained(batch=batch, steps=4, T=lambda step: 3 + step)
    assert lengths == [3, 4, 5, 6]


class Failing(torch.nn.Module):
    """A model whose forward (or only its gradient) is not finite at some of its calls."""

    def __init__(self, at, where, taken=False):
        super().__init__()
        self.inner = LanguageModel(TASK.vocab, dim=16, layers=1, mixer="attention", head_size=8)
        self.at, self.where, self.calls, self.before, self.taken = at, where, 0, None, taken

    def forward(self, tokens):
        logits = self.inner(tokens)
        if self.calls in self.at:
            self.before = [p.clone() for p in self.parameters()]
            if self.where == "loss":
                logits = logits * math.nan
            else:
                logits.register_hook(lambda grad: grad * math.inf)
        elif self.before and not self.taken:
            assert all(torch.equal(a, b) for a, b in zip(self.before, self.parameters(), strict=True))
            self.before = None
        self.calls += 1
        return logits


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_counted_and_not_taken(where):
    model, run = trained(model=Failing({3, 5}, where), steps=8)
    assert run.skipped == [3, 5]
    assert len(run.losses) == 8 and model.calls == 8
    assert all(p.isfinite().all() for p in model.parameters())
    assert math.isfinite(run.losses[3]) == (where == "gradient")


def lose(model, at):
    """At some of the steps what comes into the layers is NaN, and so are the decays that are made of it."""
    step = iter(range(10**6))
    hook = torch.compiler.disable(lambda module, _, output: output * math.nan if next(step) in at else None)
    model.norm_in.register_forward_hook(hook)
    return model


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "compiled"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_step_whose_decays_are_nan_is_counted_too(mixer, compiled):
    model = lose(LanguageModel(TASK.vocab, dim=16, layers=1, mixer=mixer, head_size=8), {0, 3})
    _, run = trained(model=torch.compile(model, backend="eager") if compiled else model, steps=5)
    assert run.skipped == [0, 3] and len(run.losses) == len(run.grad_norms) == 5
    assert all(math.isnan(run.losses[n]) and math.isnan(run.grad_norms[n]) for n in run.skipped)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_without_a_guard_such_a_step_is_taken_too(mixer):
    model = lose(LanguageModel(TASK.vocab, dim=16, layers=1, mixer=mixer, head_size=8), {1})
    _, run = trained(model=model, steps=4, skip=False)
    assert run.skipped == [1, 2, 3] and model.norm_in.weight.isnan().all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_weights_that_are_lost_already_lose_every_step(mixer):
    model = LanguageModel(TASK.vocab, dim=16, layers=1, mixer=mixer, head_size=8)
    with torch.no_grad():
        model.norm_in.weight.fill_(math.nan)
    assert trained(model=model, steps=3)[1].skipped == [0, 1, 2]


def test_who_looks_is_told_where_and_a_wrong_decay_is_no_lost_step():
    def model(**how):
        return LanguageModel(TASK.vocab, dim=16, layers=1, mixer="rwkv6", head_size=8, **how)

    with flakit.checked(), pytest.raises(ValueError, match="w: expected a natural-log decay <= 0, got nan at"):
        trained(model=lose(model(), {1}))
    wrong = model(operator=lambda r, k, v, w, u: flakit.chunk_rwkv6(r, k, v, -w, u))
    with pytest.raises(ValueError, match="w: expected a natural-log decay <= 0, got 0"):
        trained(model=wrong)


def test_a_loop_without_a_guard_takes_it_and_every_weight_is_lost():
    model, run = trained(model=Failing({3}, "gradient", taken=True), steps=6, skip=False)
    assert math.isfinite(run.losses[3]) and run.skipped == [3, 4, 5]
    assert all(p.isnan().any() for p in model.parameters())


def test_an_optimizer_goes_on():
    model, run = trained(steps=8, warmup=0.0, cosine=False)
    parts, generator = trained(steps=0)[0], torch.Generator().manual_seed(0)
    optimizer, losses = adamw(parts), []
    for steps in (5, 3):
        how = {"warmup": 0.0, "cosine": False, "optimizer": optimizer}
        losses += trained(model=parts, batch=lambda n, T, _: TASK.batch(n, T, generator), steps=steps, **how)[1].losses
    assert losses == run.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parts.parameters(), strict=True))


def test_clipping_is_no_cure_for_a_nan():
    runs = [trained(model=Failing({1}, "gradient"), steps=3, clip=clip)[1] for clip in (None, 1.0)]
    assert [run.skipped for run in runs] == [[1], [1]]


def test_accuracy_is_by_position_and_nan_where_nothing_is_asked():
    copying = Copying(symbols=3)
    model = LanguageModel(copying.vocab, dim=16, layers=1, mixer="attention", head_size=8)
    found = accuracy(model, copying.batch, 10, size=200)
    assert found[:5].isnan().all()
    assert ((found[5:] > 0) & (found[5:] < 0.6)).all()


def test_the_mean_loss_is_that_of_all_batches():
    model, asked = LanguageModel(TASK.vocab, dim=16, layers=1, mixer="attention", head_size=8), []

    def batch(size, T, generator):
        asked.append(TASK.batch(size, T, generator))
        return asked[-1]

    found = mean_loss(model, batch, 12, size=4, batches=3, seed=5)
    tokens, targets = (torch.cat(x) for x in zip(*asked, strict=True))
    assert tokens.shape == (12, 12)
    assert found == pytest.approx(loss(model(tokens), targets).item(), rel=1e-5)
    assert found != mean_loss(model, batch, 12, size=4, batches=3, seed=6)


@pytest.mark.parametrize(
    "judge", [lambda model, batch: accuracy(model, batch, 8), lambda model, batch: mean_loss(model, batch, 8)]
)
def test_judging_a_model_leaves_its_mode(judge):
    model = LanguageModel(TASK.vocab, dim=16, layers=1, mixer="attention", head_size=8)
    model.norm_in.eval()  # a part that somebody keeps still
    modes, during = {name: module.training for name, module in model.named_modules()}, []
    model.head.register_forward_hook(lambda module, *_: during.append(module.training))
    judge(model, TASK.batch)
    assert during and not any(during)
    assert {name: module.training for name, module in model.named_modules()} == modes

    def fails(*_):
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        judge(model, fails)
    assert model.training


def test_no_steps_and_no_batches_are_named():
    model = LanguageModel(TASK.vocab, dim=16, layers=1, mixer="attention", head_size=8)
    with pytest.raises(ValueError, match="steps: expected a whole number of at least 0, got -1"):
        trained(model=model, steps=-1)
    with pytest.raises(ValueError, match="batches: expected a whole number of at least 1, got 0"):
        mean_loss(model, TASK.batch, 8, batches=0)


def test_training_stops_by_time():
    _, run = trained(steps=10**6, seconds=0.2)
    assert 1 <= len(run.losses) < 10**4 and 0.2 < run.seconds < 5


def test_progress_is_shown(capsys):
    trained(steps=2, progress=True, label="three items")
    assert "three items" in capsys.readouterr().out
