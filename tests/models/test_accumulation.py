"""Gradient accumulation: the plain loop keeps the invariant, and the checks find and name what does not."""

import math

import pytest
import torch

from flakit.models import IGNORED, LanguageModel, loss
from flakit.models.accumulation import accumulate, check_gradient_accumulation, check_initial_loss, micro_batches

VOCAB = 7


def data(uneven=False):
    tokens = torch.randint(VOCAB, (8, 12), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    if uneven:
        targets[:3, 2:] = IGNORED
    return tokens, targets


def loop(make, uneven=False, seed=0):
    """step(accumulation) of a small model; make(loss of a part, parts) is what a part adds to loss and gradient."""
    model = LanguageModel(VOCAB, dim=16, layers=1, mixer="attention", head_size=8, seed=seed, initialisation="normal")

    def step(accumulation):
        model.zero_grad()
        reported = 0.0
        for x, y in micro_batches(*data(uneven), accumulation):
            part = make(loss(model(x), y), accumulation)
            part.backward()
            reported += part.item()
        return reported, [p.grad for p in model.parameters()]

    return step


def plain(uneven=False, seed=0):
    model = LanguageModel(VOCAB, dim=16, layers=1, mixer="attention", head_size=8, seed=seed, initialisation="normal")

    def step(accumulation):
        model.zero_grad()
        return accumulate(model, *data(uneven), accumulation), [p.grad for p in model.parameters()]

    return step


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_the_plain_loop_gives_the_mean_loss_and_its_gradient_at_any_accumulation(uneven):
    whole = loop(lambda part, n: part, uneven)(1)
    rows = check_gradient_accumulation(plain(uneven), reference=whole, tolerance=1e-5)
    assert [row.accumulation for row in rows] == [1, 2, 4, 8]
    assert max(row.rest for row in rows) < 1e-5


@pytest.mark.parametrize(
    ("make", "uneven", "says"),
    [
        (lambda part, n: part, False, "accumulation 4: loss 4 times, gradient 4 times (nobody divides"),
        (lambda part, n: part / n**2, False, "accumulation 8: loss 0.125 times, gradient 0.125 times (two divide"),
        (lambda part, n: part / n * (0.5 if n > 1 else 1), False, "accumulation 2: loss 0.5 times, gradient 0.5"),
        (lambda part, n: part * math.nan if n == 4 else part / n, False, "accumulation 4: loss nan, gradient norm nan"),
        (lambda part, n: part / n, True, "off any multiple (parts of different sizes weighed alike"),
    ],
    ids=["not divided", "divided twice", "a constant", "nan", "mean of means"],
)
def test_a_wrong_loop_is_found_and_its_factor_named(make, uneven, says):
    with pytest.raises(AssertionError) as found:
        check_gradient_accumulation(loop(make, uneven))
    assert says in str(found.value)
    assert "\n  accumulation 1:" not in str(found.value)


def test_a_loop_that_is_wrong_at_every_accumulation_needs_a_reference():
    wrong = loop(lambda part, n: 15 / 16 * part / n)
    check_gradient_accumulation(wrong)
    with pytest.raises(AssertionError, match="as the reference:\n  accumulation 1: loss 0.9375 times, gradient 0.9375"):
        check_gradient_accumulation(wrong, reference=plain()(1))


def test_only_the_report_is_not_divided():
    def step(accumulation):
        reported, grads = plain()(accumulation)
        return reported * accumulation, grads

    with pytest.raises(AssertionError, match=r"accumulation 2: loss 2 times \(only what is reported"):
        check_gradient_accumulation(step)


def test_other_data_is_no_multiple():
    with pytest.raises(AssertionError, match="off any multiple"):
        check_gradient_accumulation(lambda n: plain(seed=n)(1))


def test_norms_alone_are_enough_for_a_factor():
    rows = check_gradient_accumulation(lambda n: (4.0, 0.25), [1, 4])
    assert [row.grad_factor for row in rows] == [1, 1] and all(math.isnan(row.rest) for row in rows)
    with pytest.raises(AssertionError, match="gradient 4 times"):
        check_gradient_accumulation(lambda n: (4.0 * n, torch.tensor(0.25 * n)), [1, 4])


@pytest.mark.parametrize(
    ("step", "accumulations", "says"),
    [
        (lambda n: 1.0, (1, 2), r"step\(1\): expected a pair \(loss, gradients\), got float"),
        (lambda n: (1.0, [None]), (1, 2), r"step\(1\): expected the gradient of at least one parameter, got none"),
        (lambda n: (1.0, [torch.zeros(2)]), (1, 2), r"step\(1\): expected gradients, got zeros alone"),
        (lambda n: (1.0, [torch.ones(n)]), (1, 2), r"step\(2\): expected gradients like the reference's, got others"),
        (plain(), (1,), r"accumulations: expected at least two, or one and a reference, got \[1\]"),
        (plain(), (1, 3), "accumulation: expected a divisor of the 8 sequences, got 3"),
    ],
    ids=["no pair", "no gradient", "zeros", "other parameters", "one accumulation", "no divisor"],
)
def test_bad_loops_are_named(step, accumulations, says):
    with pytest.raises(ValueError, match=says):
        check_gradient_accumulation(step, accumulations)


@pytest.mark.parametrize("vocab", [16, 65536])
def test_an_initial_loss_is_about_ln_of_the_vocabulary(vocab):
    assert check_initial_loss(torch.tensor(math.log(vocab) * 1.02), vocab) == pytest.approx(1.02)
    for wrong, says in [
        (4.05 * math.log(vocab), "got 4 times that"),
        (0.2 * math.log(vocab), "divided twice"),
        (1.3 * math.log(vocab), "expected about ln"),
        (math.nan, "initial loss nan"),
    ]:
        with pytest.raises(AssertionError, match=says):
            check_initial_loss(wrong, vocab)
    with pytest.raises(ValueError, match="vocab: expected a whole number of at least 2, got 1"):
        check_initial_loss(1.0, 1)


def test_a_step_that_asks_nothing_is_named():
    model = LanguageModel(6, dim=16, layers=1, mixer="attention", head_size=8)
    with pytest.raises(
        ValueError, match="targets: expected at least one that is not -100, which asks nothing, got none"
    ):
        accumulate(model, torch.zeros(2, 4, dtype=int), torch.full((2, 4), IGNORED))
