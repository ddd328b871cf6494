"""The command that records gradient errors: what it writes is what the comparer shows."""

import pytest

from flakit.numerics.operators import OPERATORS
from flakit.panels import gradient_comparer


@pytest.mark.full
@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_the_recording_is_shown_by_the_panel(op, record, tmp_path, monkeypatch):
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
