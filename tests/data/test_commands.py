"""The commands of data/ as small as they go: what they write is what lessons and panels read."""

import math

import pytest

from flakit.cases import gate_drift
from flakit.cases.gradient_accumulation import transformers_trainer
from flakit.models import MIXERS
from flakit.models.language_model import INITIALISATIONS
from flakit.models.state_tracking import LENGTHS
from flakit.numerics import recorded
from flakit.numerics.operators import OPERATORS
from flakit.panels import gradient_comparer


@pytest.mark.full
@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_errors_of_gradients_are_shown_by_the_panel(op, record, tmp_path, monkeypatch):
    out = tmp_path / f"h200_{op.name}_gradients.json"
    run = record("record_gradients", op.name, "--quick", "--device", "cpu", out=out)
    settings = len(run.values("dtype")) * len(run.values("T")) * len(run.values("decay"))
    tensors = len(op.outputs) + len(op.tensors)
    assert len(run.rows) == settings * (2 * tensors + (op.name == "rwkv6"))  # each form, and dw from running sums
    assert {row["backend"] for row in run.rows} == {"torch"}
    assert all(row["l2"] < 1e-5 for row in run.select(dtype="float32") if row["form"] != "running sums")

    monkeypatch.setenv("FLAKIT_DATA", str(tmp_path))
    panel = gradient_comparer(op=op.name, source="recorded", dtype="float32", T=64)
    assert "Recorded on" in panel.text and "All finite" in panel.text


@pytest.mark.full
def test_accuracy_of_one_process_and_of_two(record):
    table = record("record_ranks_accuracy", "--quick")
    assert table.values("ranks") == [1, 2] and len(table.rows) == 2 * 3 * 2 * 3
    bounds = {"float32": 1e-6, "bfloat16": 3e-3}
    for row in table.rows:
        assert 0 < row["o"] < bounds[row["dtype"]] and 0 < row["gradients"] < bounds[row["dtype"]], row


@pytest.mark.full
def test_state_tracking(record):
    table, committed = record("record_state_tracking", "--quick"), recorded.read("state_tracking")
    assert table.columns == committed.columns
    assert set(table.meta) == set(committed.meta)
    assert table.meta["command"] == committed.meta["command"] == "python data/record_state_tracking.py"
    assert table.values("length") == list(LENGTHS)
    assert set(table.values("model")) < set(committed.values("model"))


@pytest.mark.full
def test_language_models_have_a_curve_for_every_mixer_and_initialisation(record):
    table = record("record_language_models", "--quick", "--device", "cpu", "--jobs", "2")
    assert table.values("mixer") == list(MIXERS) and table.values("initialisation") == list(INITIALISATIONS)
    for mixer in MIXERS:
        for initialisation in INITIALISATIONS:
            run = table.select(mixer=mixer, initialisation=initialisation)
            assert [row["step"] for row in run] == [0, 20]
            assert run[0]["first_loss"] == pytest.approx(math.log(256), rel=0.1)
            assert run[1]["loss"] < run[0]["loss"] and run[0]["skipped"] == 0
            assert run[0]["held_out"] < run[0]["first_loss"] and run[0]["tokens_per_second"] > 0
    assert "bytes" in table.meta["corpus"] and "bfloat16" in table.meta["experiment"]


@pytest.mark.full
def test_gate_drift(record):
    table, committed = record("record_gate_drift", "--quick"), recorded.read("gate_drift")
    assert table.columns == committed.columns
    assert {"gsa", "rwkv6", "attention"} == set(table.values("op")) == set(committed.values("op"))
    assert {(row["lost"], row["as_predicted"]) for row in table.select(op="gsa", kernel="faulty")} == {(0, 20)}


@pytest.mark.full
def test_slow_gate_drift(record):
    table = record("record_gate_drift", "--quick", "--long", "--device", "cpu", "--seconds", "60")
    assert table.columns == recorded.read("gate_drift").columns
    assert [(row["kernel"], row["lr"], row["step"]) for row in table.rows] == [
        (kernel, 0.002, step) for kernel in ("faulty", "right") for step in (0, 20)
    ]
    assert {row["as_predicted"] for row in table.rows} == {20}
    assert "stopped" in table.meta and table.meta["command"].endswith("--long")


def test_the_committed_drift_says_what_the_notebook_says():
    committed = recorded.read("gate_drift")
    for row in committed.rows:
        if row["kernel"] == "right" or row["op"] == "attention":
            assert row["lost"] == 0
        if row["kernel"] != "right":
            assert row["as_predicted"] >= 19
    fast = gate_drift.LEARNING_RATE["gsa"]
    for seed in committed.values("seed"):
        run = committed.select(op="gsa", kernel="faulty", lr=fast, seed=seed, reinitialised=False)
        share = [row["lost"] for row in run]
        assert share[:8] == [0] * 8 and sum(share[-10:]) > 5
        again = committed.select(op="gsa", kernel="faulty", lr=fast, seed=seed, reinitialised=True)
        assert [row["lost"] for row in again[:5]] == [0] * 5 and any(row["lost"] for row in again)


@pytest.mark.full
@pytest.mark.skipif(
    transformers_trainer.installed() is None, reason='transformers is not installed: pip install "flakit[trainer]"'
)
def test_transformers(record):
    table, committed = (
        record("record_transformers", "--quick", "--here"),
        recorded.read("transformers_accumulation"),
    )
    assert table.columns == committed.columns
    assert table.values("accumulation") == [1, 4] and table.values("contract") == ["takes **kwargs"]
