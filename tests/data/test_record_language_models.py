"""The command that records language models, as small as it goes: what notebook 13 needs is in what it writes."""

import math

import pytest

from flakit.models import MIXERS
from flakit.models.language_model import INITIALISATIONS


@pytest.mark.full
def test_the_command_writes_a_curve_for_every_mixer_and_initialisation(record):
    made = record("record_language_models", "--quick", "--device", "cpu", "--jobs", "2")
    assert made.values("mixer") == list(MIXERS) and made.values("initialisation") == list(INITIALISATIONS)
    for mixer in MIXERS:
        for initialisation in INITIALISATIONS:
            run = made.select(mixer=mixer, initialisation=initialisation)
            assert [row["step"] for row in run] == [0, 20]
            assert run[0]["first_loss"] == pytest.approx(math.log(256), rel=0.1)
            assert run[1]["loss"] < run[0]["loss"] and run[0]["skipped"] == 0
            assert run[0]["held_out"] < run[0]["first_loss"] and run[0]["tokens_per_second"] > 0
    assert "bytes" in made.meta["corpus"] and "bfloat16" in made.meta["experiment"]
