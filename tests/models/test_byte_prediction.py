"""The byte-level experiment: what is held out is not trained on, a seed repeats a run, and the model learns."""

import math
from dataclasses import replace

import pytest
import torch

from flakit.models import MIXERS, check_initial_loss, standard_library
from flakit.models import byte_prediction as experiment
from flakit.models.language_model import INITIALISATIONS
from flakit.numerics import recorded

TINY = replace(experiment.SMALL, dim=32, T=32, size=4, steps=40, modules=10)


def test_the_text_held_out_is_the_last_tenth():
    text, held_out = experiment.corpora(TINY)
    whole = standard_library(TINY.modules).text
    assert torch.equal(torch.cat((text.text, held_out.text)), whole)
    assert len(held_out.text) == pytest.approx(len(whole) / 10, abs=1)


@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_a_model_learns_to_say_the_next_byte(initialisation):
    _, run, held_out = experiment.learn("rwkv7", initialisation, TINY, progress=False)
    check_initial_loss(run.losses[0], vocab=256)
    assert len(run.losses) == TINY.steps and run.skipped == []
    assert sum(run.losses[-5:]) / 5 < 0.6 * math.log(256)
    assert 1 < held_out < 0.7 * math.log(256)


def test_a_seed_repeats_a_run():
    short = replace(TINY, steps=3)
    first, same, other = (experiment.learn("gsa", "normal", short, seed=n, progress=False)[1:] for n in (1, 1, 2))
    assert (first[0].losses, first[1]) == (same[0].losses, same[1])
    assert first[0].losses != other[0].losses


def test_the_large_models_are_of_like_size():
    sizes = {
        mixer: sum(p.numel() for p in experiment.model(mixer, "published", experiment.LARGE).parameters())
        for mixer in MIXERS
    }
    assert max(sizes.values()) < 1.15 * min(sizes.values()), sizes


def test_recorded_models_begin_at_a_guess_lose_no_step_and_learn():
    table = recorded.read("h200_language_models")
    runs = {(row["mixer"], row["initialisation"], row["seed"]): row for row in table.rows}  # the last row of each
    assert runs.keys() == {(mixer, start, seed) for mixer in MIXERS for start in INITIALISATIONS for seed in (0, 1)}
    for row in runs.values():
        assert row["first_loss"] == pytest.approx(math.log(256), rel=0.05)
        assert row["skipped"] == 0 and row["step"] == 980
        assert row["loss"] < row["held_out"] < 1.3
