"""The command that records trainings over ranks, as small as it goes."""

import re
import statistics
import sys

import pytest
from record_distributed import WARM

from flakit.numerics import recorded
from tests.commands import ROOT, completed

RUNS = "1", "2, ddp", "2, ddp, killed"


@pytest.mark.full
def test_the_command_writes_curves_of_one_rank_and_of_two_and_goes_on(tmp_path):
    out = tmp_path / "distributed.json"
    script = ROOT / "data/record_distributed.py"
    completed(sys.executable, script, "--quick", "--out", out, "--only", *RUNS, check=True, timeout=500)
    table = recorded.read(out)
    assert table.values("run") == list(RUNS)
    one, two, killed = (table.select(run=name) for name in RUNS)
    assert [row["step"] for row in one] == [row["step"] for row in killed] == list(range(24))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=0.05)
    assert [row["loss"] for row in two] == [row["loss"] for row in killed]
    assert "the same bits" in table.meta["run 2, ddp, killed"] and "from those of '1'" in table.meta["run 2, ddp"]


def test_the_page_says_what_was_recorded_on_gpus():
    table = recorded.read("h200_distributed")
    one, two = (table.select(run=name) for name in RUNS[:2])
    speed = [statistics.median(row["tokens_per_second"] for row in run[WARM:]) for run in (one, two)]
    (apart,) = re.findall(r"losses at most (\S+) from those of '1'", table.meta["run 2, ddp"])  # rows are rounded
    page = " ".join((ROOT / "docs" / "training.md").read_text().split())
    sentence = r"(\d+) steps of .*? \*\*([\d,]+)\*\* tokens a second became \*\*([\d,]+)\*\* by DDP, ([\d.]+) times "
    sentence += r".*? ([\d.]+)% of"
    ((steps, first, second, times, share),) = re.findall(sentence, page)
    assert int(steps) == len(one) == len(two)
    assert [float(x.replace(",", "")) for x in (first, second)] == pytest.approx(speed, rel=1e-3)
    assert float(times) == pytest.approx(speed[1] / speed[0], abs=0.005)
    for run in (one, two):
        matrix = statistics.median(row["matrix_share"] for row in run[WARM:])
        assert float(share) == pytest.approx(100 * matrix, abs=0.1)
    assert float(apart) == float(re.findall(r"at most ([\d.e-]+) apart", page)[0])
    for name in ("2, ddp", "2, fsdp2"):
        assert [row["loss"] for row in table.select(run=f"{name}, killed")] == [
            row["loss"] for row in table.select(run=name)
        ]
    compiled = statistics.median(row["tokens_per_second"] for row in table.select(run="1, compiled")[WARM:])
    assert f"{compiled:,.0f} tokens a second on one GPU" in page
    assert f"{compiled / speed[0]:.1f} times the speed" in page
