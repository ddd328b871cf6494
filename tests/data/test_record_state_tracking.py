"""The command that records state tracking writes what notebook 10 reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from flakit.models.state_tracking import LENGTHS
from flakit.numerics import recorded

SCRIPT = Path(__file__).parents[2] / "data" / "record_state_tracking.py"


@pytest.mark.full
def test_the_command_remakes_the_recording(tmp_path):
    out = tmp_path / "state_tracking.json"
    subprocess.run([sys.executable, SCRIPT, "--quick", "--out", out], check=True, capture_output=True, timeout=300)
    made, kept = recorded.read(out), recorded.read("state_tracking")
    assert made.columns == kept.columns
    assert set(made.meta) == set(kept.meta)
    assert made.meta["command"] == kept.meta["command"] == "python data/record_state_tracking.py"
    assert made.values("length") == list(LENGTHS)
    assert set(made.values("model")) < set(kept.values("model"))
