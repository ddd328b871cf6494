"""The command that records gradient errors: what it writes is what the comparer shows."""

import subprocess
import sys
from pathlib import Path

from flakit.numerics import recorded
from flakit.panels import gradient_comparer

SCRIPT = Path(__file__).parents[2] / "data" / "record_gradients.py"


def test_the_recording_is_shown_by_the_panel(tmp_path, monkeypatch):
    out = tmp_path / "h200_rwkv6_gradients.json"
    command = [sys.executable, SCRIPT, "--quick", "--device", "cpu", "--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    run = recorded.read(out)
    settings = len(run.values("dtype")) * len(run.values("T")) * len(run.values("decay"))
    assert len(run.rows) == settings * 15  # seven tensors of each form, and dw from running sums
    assert {row["backend"] for row in run.rows} == {"torch"}
    assert all(row["l2"] < 1e-5 for row in run.select(dtype="float32") if row["form"] != "running sums")

    monkeypatch.setenv("FLAKIT_DATA", str(tmp_path))
    panel = gradient_comparer(source="recorded", dtype="float32", T=64)
    assert "Recorded on" in panel.text and "All finite" in panel.text
