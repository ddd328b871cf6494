"""The command that records flash-linear-attention's models: what it compares, tiny and on a CPU."""

import sys
from dataclasses import replace

import pytest
import record_fla_models as command
import torch

from flakit.numerics import recorded
from tests import fla_on_cpu
from tests.commands import ROOT, completed

TINY = replace(command.QUICK, hidden=64, vocabulary=64, T=96, rounds=1, steps=2)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_ours_stand_beside_the_originals(tmp_path):
    for part in ("transformers", "fla.models"):
        pytest.importorskip(part, reason="needs flash-linear-attention: pip install --editable '.[fla]'")
    rows = []
    with fla_on_cpu.helper_kernels_in_torch(), fla_on_cpu.recurrences_in_place():
        for name in command.MODELS:
            rows += command.compare(name, TINY, "cpu", torch.float32)
    meta = recorded.provenance("python data/record_fla_models.py", "CPU", fla="0.6.0")
    table = recorded.read(recorded.write(tmp_path / "models.json", meta, rows))
    assert [(row["op"], row["who"]) for row in table.rows] == [
        (op, who) for op in command.MODELS for who in command.WHO
    ]
    for op in command.MODELS:
        (theirs,), (ours,) = (table.select(op=op, who=who) for who in command.WHO)
        for name in ("fresh_loss", "fresh_grad_norm", "loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
        assert theirs["gradient_difference"] == theirs["logit_difference"] == 0  # run twice: the same bits
        assert 0 < ours["gradient_difference"] < 1e-5 and ours["logit_difference"] < 1e-5  # other arithmetic
        assert ours["tokens"] == ours["same_tokens"] == TINY.B * TINY.new
        assert min(row[name] for row in (theirs, ours) for name in ("step_ms", "host_ms", "generate_ms")) > 0


def test_the_recording_is_what_the_reference_says():
    table = recorded.read("h200_fla_models")
    assert table.meta["fla"] == "0.6.0" and set(table.values("op")) == set(command.MODELS)
    reference = (ROOT / "docs/operators.md").read_text()
    for op in command.MODELS:
        (theirs,), (ours,) = (table.select(op=op, who=who) for who in command.WHO)
        for name in ("fresh_loss", "fresh_grad_norm", "loss", "grad_norm"):  # 8 bits each, thousands of terms
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3)
        assert theirs["gradient_difference"] == theirs["logit_difference"] == 0
        assert ours["gradient_difference"] < 0.1 and ours["logit_difference"] < 0.02
        listed = next(line for line in reference.splitlines() if line.startswith(f"| {op.upper()} |") and "/" in line)
        cells = listed.split("|")[2:-1]
        for name, cell in zip(
            ("loss", "grad_norm", "step_ms", "host_ms", "peak_gib", "generate_ms"), cells, strict=True
        ):
            for row, value in zip((theirs, ours), cell.split("/"), strict=True):
                assert float(value) == pytest.approx(row[name], rel=5e-3), (op, name)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_command_says_so():
    done = completed(sys.executable, command.__file__, timeout=300)
    assert done.returncode == 2 and "needs a GPU" in done.stderr
