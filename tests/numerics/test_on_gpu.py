"""GPU numbers with their source: recorded ones where there is no GPU, and plain words where there is nothing."""

import pytest
import torch

from flakit.cases.decay_gradient import running_sums
from flakit.numerics import recorded
from flakit.numerics.gradients import gradient_rows
from flakit.numerics.on_gpu import RECORDINGS, gradients_on_gpu

RECORDING = RECORDINGS["rwkv6"]
META = {"device": "NVIDIA H200", "date": "2026-11-20", "torch": "2.11.0", "triton": "3.6.0", "command": "python record"}

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures instead of reading")
OTHERS = {"running sums": running_sums}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_DATA", str(tmp_path))
    return tmp_path


@no_gpu
def test_recorded_rows_are_chosen_and_labelled(folder):
    how = {"T": 16, "K": 16, "dtype": torch.bfloat16, "others": OTHERS}
    rows = [row for w in (-1.0, -8.0) for row in gradient_rows("rwkv6", decay=w, **how)]
    recorded.write(folder / f"{RECORDING}.json", META, rows)
    label, found = gradients_on_gpu(dtype=["bfloat16"], T=[16], decay=[-8.0], forms=["chunk"])
    assert label == "recorded on NVIDIA H200, 2026-11-20, torch 2.11.0, triton 3.6.0"
    assert {(row["form"], row["decay"], row["T"]) for row in found} == {("chunk", -8.0, 16)}
    assert {row["tensor"] for row in found} == {"o", "final_state", "dr", "dk", "dv", "dw", "du"}
    _, found = gradients_on_gpu(dtype=["bfloat16"], T=[16], decay=[-8.0], others=OTHERS)
    assert {row["form"] for row in found} == {"chunk", "recurrent", "running sums"}
    with pytest.raises(ValueError, match=f"{RECORDING}: holds no dtype float16, T 16, decay -8.0"):
        gradients_on_gpu(dtype=["float16"], T=[16], decay=[-8.0])


@no_gpu
def test_nothing_recorded_is_said(folder):
    label, rows = gradients_on_gpu(decay=[-1.0])
    assert rows == [] and label.startswith(f"No GPU here and no recording data/{RECORDING}.json")


@pytest.mark.gpu
def test_measured_where_there_is_a_gpu():
    label, rows = gradients_on_gpu(dtype=["bfloat16"], T=[128], decay=[-4.0], others=OTHERS)
    assert label.startswith("measured here, on ")
    errors = {row["form"]: row["l2"] for row in rows if row["tensor"] == "dw"}
    assert errors["chunk"] < 2.5e-3 and errors["recurrent"] < 2.5e-3 and errors["running sums"] > 0.1
