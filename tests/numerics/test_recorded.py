"""Recorded tables: what is written is what is read, and what is wrong with a file is said."""

import json
import math

import pytest
import torch

from flakit.numerics import recorded
from flakit.numerics.gradients import gradient_rows

META = {"device": "NVIDIA H200", "date": "2026-11-20", "torch": "2.11.0", "triton": "3.6.0", "command": "remake"}
ROWS = [
    {"form": "chunk", "T": 64, "decay": "logsigmoid", "tensor": "dw", "l2": 1.6612345e-3, "non_finite": 0},
    {"form": "chunk", "T": 64, "decay": -20.0, "tensor": "dw", "l2": math.inf, "non_finite": 3},
    {"form": "recurrent", "T": 64, "decay": -20.0, "tensor": "dw", "l2": 2e-7, "non_finite": 0},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_DATA", str(tmp_path))
    return tmp_path


def test_written_rows_come_back(folder):
    recorded.write(folder / "run.json", META | {"commit": "abc"}, ROWS)
    run = recorded.read("run", needs=("form", "l2"))
    assert run.columns == tuple(ROWS[0])
    assert list(run.rows) == [ROWS[0] | {"l2": 1.661e-3}, *ROWS[1:]]  # four digits are kept
    assert run.meta["commit"] == "abc"
    assert run.label == "recorded on NVIDIA H200, 2026-11-20, torch 2.11.0, triton 3.6.0"


def test_a_file_written_by_hand(folder):
    (folder / "run.json").write_text(
        f'{{"meta": {json.dumps(META)}, "columns": ["tensor", "l2"], "rows": [["dw", "nan"], ["o", "-inf"], ["u", 1]]}}'
    )
    first, second, third = recorded.read(folder / "run.json").rows
    assert math.isnan(first["l2"]) and second["l2"] == -math.inf and third == {"tensor": "u", "l2": 1}


def test_lists_within_a_row_come_back(folder):
    rows = gradient_rows("rwkv6", forms=["chunk"], T=8, H=1, K=4, over_time=True)
    rows[0]["along_time"][1:3] = [math.inf, -math.inf]
    read = recorded.read(recorded.write(folder / "run.json", META, rows)).rows
    assert [row["along_time"] for row in read] == [
        row["along_time"] and pytest.approx(row["along_time"], rel=1e-3) for row in rows
    ]
    recorded.write(folder / "run.json", META, [{"along_time": [math.nan, 1.0]}])
    assert math.isnan(recorded.read("run").rows[0]["along_time"][0])


def test_the_file_is_strict_json_with_one_row_a_line(folder):
    text = recorded.write(folder / "run.json", META, ROWS).read_text()
    content = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert content["rows"][1][4] == "inf"
    assert sum(line.startswith('["') and "chunk" in line for line in text.splitlines()) == 2


def test_select_and_values(folder):
    run = recorded.read(recorded.write(folder / "run.json", META, ROWS))
    assert run.values("decay") == ["logsigmoid", -20.0]
    assert [row["form"] for row in run.select(decay=-20.0)] == ["chunk", "recurrent"]
    assert run.select(form="chunk", decay=-20) == [ROWS[1]]
    with pytest.raises(ValueError, match="column: expected one of form, T, decay, tensor, l2, non_finite, got 'dtype'"):
        run.select(dtype="bfloat16")


def test_what_is_missing_is_named(folder):
    with pytest.raises(FileNotFoundError, match=r"no recording h100\.json in .* \(there: none\)"):
        recorded.read("h100")
    recorded.write(folder / "run.json", META, ROWS)
    with pytest.raises(FileNotFoundError, match=r"\(there: run\)"):
        recorded.read("h100")
    with pytest.raises(ValueError, match=r"run\.json: expected columns to hold worst_row, got form, T"):
        recorded.read("run", needs=("worst_row",))


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "expected an object with meta, columns and rows"),
        ("{", "expected an object with meta, columns and rows"),
        ('{"meta": {}, "columns": [], "rows": []}', "expected meta to hold device, date, torch, triton, command"),
        (json.dumps({"meta": META, "columns": ["a"], "rows": [[1, 2]]}), "expected 1 values in row 0, got 2"),
    ],
    ids=["list", "broken", "no provenance", "ragged"],
)
def test_a_wrong_file_is_refused(folder, text, message):
    (folder / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        recorded.read("run")


def test_a_recording_without_provenance_is_not_written(folder):
    with pytest.raises(ValueError, match="meta: expected .* got none for device, command"):
        recorded.write(folder / "run.json", META | {"device": "", "command": ""}, ROWS)
    with pytest.raises(ValueError, match="rows: expected at least one"):
        recorded.write(folder / "run.json", META, [])
    with pytest.raises(ValueError, match="rows: expected columns .* in row 1"):
        recorded.write(folder / "run.json", META, [ROWS[0], {"form": "chunk"}])
    assert not list(folder.iterdir())


def test_provenance_is_all_that_a_recording_must_say(folder):
    meta = recorded.provenance("remake", "some CPU", sizes="B 1")
    path = recorded.write(folder / "run.json", meta, ROWS)
    assert recorded.read(path).meta == meta and recorded.read(path).label.startswith("recorded on some CPU, 20")
    assert meta["torch"] == torch.__version__ and meta["sizes"] == "B 1"
