"""The case `gradient_accumulation` in the real Trainer: recorded with two releases, and run if it is installed."""

from importlib.metadata import PackageNotFoundError

import pytest

from flakit.cases import gradient_accumulation as case
from flakit.cases.gradient_accumulation import transformers_trainer as trainer
from flakit.numerics import recorded

RECORDING = recorded.read("transformers_accumulation")


def law(contract, accumulation, release):
    if contract == trainer.NAMES_THE_LOSS:
        return 15 / 16 if release.startswith("4.") else 1
    return case.law(accumulation, contract)


def close(got, expected):
    return abs(got / expected - 1) < 1e-3  # a recording has four digits


def test_the_recording_holds_two_releases_and_every_run():
    assert RECORDING.values("transformers") == ["4.48.2", "5.23.0"]
    runs = {(row["transformers"], row["contract"], row["model"], row["accumulation"]) for row in RECORDING.rows}
    assert len(runs) == 2 * len(trainer.RUNS) * len(trainer.ACCUMULATIONS)
    assert len(RECORDING.rows) == len(runs) * trainer.STEPS


@pytest.mark.parametrize("release", RECORDING.values("transformers"))
@pytest.mark.parametrize("mixer", ["rwkv7", "attention"])
def test_the_recorded_first_step_is_the_plain_loops_times_the_law(mixer, release):
    loss, gradients = case.step(mixer=mixer, loop="plain")(1)
    norm = sum(g.square().sum() for g in gradients if g is not None).sqrt().item()
    rows = RECORDING.select(transformers=release, model=mixer, step=0)
    assert len(rows) >= 8
    for row in rows:
        factor = law(row["contract"], row["accumulation"], release)
        assert close(row["loss"], loss * factor) and close(row["grad_norm"], norm * factor), row


def test_a_wrong_law_would_be_rejected():
    (row,) = RECORDING.select(transformers="5.23.0", model="rwkv7", contract="takes **kwargs", accumulation=4, step=0)
    loss = case.step(loop="plain")(1)[0]
    assert close(row["loss"], 4 * loss)
    assert not any(close(row["loss"], factor * loss) for factor in (1, 16, 4 * 15 / 16))


@pytest.mark.skipif(trainer.installed() is None, reason='transformers is not installed: pip install "flakit[trainer]"')
@pytest.mark.parametrize("contract", trainer.CONTRACTS)
def test_the_trainer_here_does_what_the_law_says(contract):
    loss, _ = case.step(loop="plain")(1)
    (row,) = trainer.run(contract, accumulation=4, steps=1)
    assert close(row["loss"], loss * law(contract, 4, trainer.installed()["transformers"]))


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_where_one_is_missing_the_error_says_how_to_get_it(missing, monkeypatch):
    def version(name):
        if name == missing:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(trainer, "version", version)
    with pytest.raises(ImportError, match=r"pip install \"flakit\[trainer\]\""):
        trainer.run()
