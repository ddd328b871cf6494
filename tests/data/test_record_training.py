"""The commands behind notebook 13's recordings: what they write is what the committed recordings hold."""

import pytest

from flakit.cases import gate_drift
from flakit.cases.gradient_accumulation import transformers_trainer
from flakit.numerics import recorded


@pytest.mark.full
def test_gate_drift(record):
    made, committed = record("record_gate_drift", "--quick"), recorded.read("gate_drift")
    assert made.columns == committed.columns
    assert {"gsa", "rwkv6", "attention"} == set(made.values("op")) == set(committed.values("op"))
    assert {(row["lost"], row["as_predicted"]) for row in made.select(op="gsa", kernel="faulty")} == {(0, 20)}


@pytest.mark.full
def test_slow_gate_drift(record):
    made = record("record_gate_drift", "--quick", "--long", "--device", "cpu", "--seconds", "60")
    assert made.columns == recorded.read("gate_drift").columns
    assert [(row["kernel"], row["lr"], row["step"]) for row in made.rows] == [
        (kernel, 0.002, step) for kernel in ("faulty", "right") for step in (0, 20)
    ]
    assert {row["as_predicted"] for row in made.rows} == {20}
    assert "stopped" in made.meta and made.meta["command"].endswith("--long")


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
    made, committed = (
        record("record_transformers", "--quick", "--here"),
        recorded.read("transformers_accumulation"),
    )
    assert made.columns == committed.columns
    assert made.values("accumulation") == [1, 4] and made.values("contract") == ["takes **kwargs"]
