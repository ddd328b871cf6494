"""The state-tracking experiment: a short run of it, and what its recording says."""

import pytest

from flakit.models.state_tracking import LENGTHS, MODELS, SIZES, follow, model
from flakit.numerics import recorded

STEPS = 80
GUESS = {"S3": 1 / 6, "S5": 1 / 120}


@pytest.fixture(scope="module")
def recording():
    return recorded.read("state_tracking", needs=("task", "model", "seed", "length", "accuracy", "skipped"))


def at(rows, length):
    (row,) = (row for row in rows if row["length"] == length)
    return row["accuracy"]


@pytest.mark.full
def test_what_can_turn_the_state_round_follows_swaps_and_what_cannot_does_not():
    found = {edit: follow(f"RWKV7, edit {edit}", steps=STEPS, progress=False) for edit in (2, 1)}
    assert at(found[2][2], 16) > 0.9
    assert at(found[1][2], 16) < 0.5
    assert all(len(run.losses) == STEPS and run.skipped == [] for _, run, _ in found.values())


@pytest.mark.parametrize("name", ["GSA", "attention, 4 layers"])
def test_every_model_is_judged_at_every_length(name):
    made, run, rows = follow(name, items=3, steps=1, progress=False)
    assert [row["length"] for row in rows] == list(LENGTHS)
    assert len(made.blocks) == (4 if "4 layers" in name else 1)
    assert {(row["task"], row["model"], row["seed"], row["steps"]) for row in rows} == {("S3", name, 0, 1)}
    assert all(0 <= row["accuracy"] < 0.5 for row in rows)


def test_all_models_see_the_same_width():
    for items, size in SIZES.items():
        assert {model(name, items).embedding.weight.shape[1] for name in MODELS} == {size["dim"]}


def test_the_recording_holds_every_model_with_several_seeds(recording):
    for name in MODELS:
        for task in GUESS if "layers" not in name else ("S3",):
            rows = recording.select(model=name, task=task)
            seeds = {row["seed"] for row in rows}
            assert len(seeds) >= 3
            assert len(rows) == len(seeds) * len(LENGTHS)
    assert {row["skipped"] for row in recording.rows} == {0}


def test_in_the_recording_one_model_generalises_in_length_in_every_run(recording):
    for row in recording.select(model="RWKV7, edit 2"):
        if row["length"] <= 64:
            assert row["accuracy"] > 0.98


@pytest.mark.parametrize("name", [name for name in MODELS if name != "RWKV7, edit 2"])
def test_in_the_recording_no_run_of_another_does(recording, name):
    for row in recording.select(model=name):
        if row["length"] >= 64:
            assert row["accuracy"] < GUESS[row["task"]] + 0.1


@pytest.mark.parametrize(
    ("arguments", "says"), [(("RWKV5",), "name: expected one of"), (("RWKV6", 4), "items: expected one of 3, 5, got 4")]
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        follow(*arguments)
