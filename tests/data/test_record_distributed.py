"""The command that records trainings over ranks, as small as it goes."""

import subprocess
import sys
from pathlib import Path

import pytest

from flakit.numerics import recorded

SCRIPT = Path(__file__).parents[2] / "data" / "record_distributed.py"
RUNS = "1", "2, ddp", "2, ddp, killed"


@pytest.mark.full
def test_the_command_writes_curves_of_one_rank_and_of_two_and_goes_on(tmp_path):
    out = tmp_path / "distributed.json"
    subprocess.run([sys.executable, SCRIPT, "--quick", "--out", out, "--only", *RUNS], check=True, timeout=500)
    made = recorded.read(out)
    assert made.values("run") == list(RUNS)
    one, two, killed = (made.select(run=name) for name in RUNS)
    assert [row["step"] for row in one] == [row["step"] for row in killed] == list(range(24))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=0.05)
    assert [row["loss"] for row in two] == [row["loss"] for row in killed]
    assert "the same bits" in made.meta["run 2, ddp, killed"] and "from those of '1'" in made.meta["run 2, ddp"]
