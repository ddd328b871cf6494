"""Sweeps: every setting once, what it measured in its place, and onsets read off the grid."""

import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from flakit.numerics.errors import compare
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.inputs import inputs
from flakit.numerics.sweep import sweep


def overflow(decay, T):
    """exp overflows float32 from decay * T = 88.72 on, in its last element first."""
    return {"x": torch.arange(1, T + 1).mul(decay).float().exp(), "product": decay * T}


def test_a_function_over_a_grid():
    found = sweep(overflow, over={"decay": [1.0, 2.0, 10.0], "T": [8, 44, 45]})
    assert found.axes == {"decay": (1.0, 2.0, 10.0), "T": (8, 44, 45)} and found.complete
    assert found["product"].tolist() == [[8, 44, 45], [16, 88, 90], [80, 440, 450]]
    assert found["x.finite"].tolist() == [[1, 1, 1], [1, 1, 44 / 45], [1, 8 / 44, 8 / 45]]
    assert found.first["x"].tolist() == [[None, None, None], [None, None, (44,)], [None, (8,), (8,)]]
    np.testing.assert_equal(found.onset("decay"), [np.nan, 10.0, 2.0])
    np.testing.assert_equal(found.onset("T", "x"), [np.nan, 45.0, 44.0])


def test_an_operator_is_compared_with_its_truth():
    found = sweep("rwkv6", over={"decay": ["none", -50.0], "form": ["chunk", "recurrent"]}, T=20, K=8, seed=3)
    x = inputs("rwkv6", T=20, K=8, decay=-50.0, seed=3)
    got, exact = evaluate("rwkv6", x, form="recurrent"), truth("rwkv6", x)
    for name in ("o", "final_state", "dr", "dk", "dv", "dw", "du"):
        errors = compare(got[name], exact[name])
        assert found[f"{name}.l2"][1, 1] == errors.l2 and found[f"{name}.worst_row"][1, 1] == errors.worst_row
        assert (found[f"{name}.finite"] == 1).all() and (found[f"{name}.l2"] < 1e-6).all()
    assert found.onset("decay").tolist() == [None, None]


def test_non_finite_values_of_a_pair_are_placed():
    def half_bad(at):
        got = torch.ones(2, 10)
        got[1, at:] = math.nan
        return {"y": (got, torch.ones(2, 10))}

    found = sweep(half_bad, over={"at": [10, 5]})
    assert found["y.finite"].tolist() == [1.0, 0.75] and found["y.l2"].tolist() == [0.0, math.inf]
    assert found.first["y"].tolist() == [None, (1, 5)] and found.onset("at").item() == 5


def test_progress_is_told_and_a_cancelled_sweep_keeps_what_it_has():
    told = []
    found = sweep(
        overflow,
        over={"decay": [1.0, 100.0], "T": [4, 8]},
        progress=lambda done, total: told.append((done, total)),
        cancelled=lambda: len(told) == 3,
    )
    assert told == [(1, 4), (2, 4), (3, 4)] and not found.complete
    assert np.isnan(found["x.finite"]).tolist() == [[False, False], [False, True]]
    np.testing.assert_equal(found.onset("T"), [np.nan, 4])


def test_rows_and_dict_are_plain():
    found = sweep(overflow, over={"decay": np.linspace(1, 2, 2), "T": [8]})
    assert found.rows() == [
        {"decay": 1.0, "T": 8, "x.finite": 1.0, "product": 8.0},
        {"decay": 2.0, "T": 8, "x.finite": 1.0, "product": 16.0},
    ]
    assert json.loads(json.dumps(found.to_dict()))["grids"]["product"] == [[8.0], [16.0]]
    by_dtype = sweep(lambda dtype: {"bytes": dtype.itemsize}, over={"dtype": [torch.float32, torch.bfloat16]})
    assert [row["dtype"] for row in by_dtype.rows()] == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    "subject, over, kind, message",
    [
        ("rwkv6", {"decy": [-1.0]}, ValueError, "over: expected settings among B, T, .*, got decy"),
        ("rwkv9", {"T": [1]}, ValueError, "op: expected one of rwkv6, rwkv7, gsa, .*, got 'rwkv9'"),
        (overflow, {"T": [1], "decoy": [2]}, ValueError, "over: expected settings among decay, T, got decoy"),
        (overflow, {}, ValueError, "over: expected a dict of axis names"),
        (overflow, {"T": []}, ValueError, r"over\['T'\]: expected a list of at least one value, got \[\]"),
        (7, {"T": [1]}, TypeError, "subject: expected an operator's name or a function, got int"),
        (overflow, {"T": {1, 2}}, ValueError, r"over\['T'\]: expected a list of at least one value, got \{1, 2\}"),
        (overflow, {1: [2]}, ValueError, r"over: expected a dict of axis names and their values, got \{1: \[2\]\}"),
        (overflow, [1, 2], ValueError, r"over: expected a dict of axis names and their values, got \[1, 2\]"),
    ],
    ids=[
        "unknown knob",
        "unknown operator",
        "unknown argument",
        "nothing",
        "no values",
        "not callable",
        "a set",
        "no name",
        "a list",
    ],
)
def test_wrong_arguments_are_named(subject, over, kind, message):
    with pytest.raises(kind, match=message):
        sweep(subject, over)


def test_a_failing_setting_is_named():
    with pytest.raises(RuntimeError, match=r"sweep at decay=0\.5, T=4: decay: expected natural-log decays <= 0"):
        sweep("rwkv6", over={"decay": [0.5], "T": [4]}, K=4)
    with pytest.raises(RuntimeError, match=r"sweep at B=True: B: expected a whole number of at least 1, got True"):
        sweep("rwkv6", over={"B": [True]}, K=4)
    for found, kind in ((3, "3 from it"), ({"x": None}, "as x, got None"), ({"x": (torch.ones(1), 1)}, "truth: ")):
        with pytest.raises(RuntimeError, match=rf"sweep at T=4: .*{kind}"):
            sweep(lambda T, found=found: found, over={"T": [4]})


def test_a_single_value_is_an_axis_of_one():
    for decay in (-1.0, np.float64(-1.0), torch.tensor(-1.0), np.array(-1.0), (-1.0,), iter([-1.0])):
        found = sweep("rwkv6", over={"decay": decay, "form": "chunk"}, T=4, K=2, H=1)
        assert found.axes == {"decay": (-1.0,), "form": ("chunk",)} and found.complete
        assert found["o.l2"].shape == (1, 1) and found["o.l2"].item() < 1e-6


def test_values_that_are_made_one_by_one_are_all_measured():
    found = sweep(overflow, over={"decay": (x for x in (1.0, 2.0)), "T": range(8, 10)})
    assert found.axes == {"decay": (1.0, 2.0), "T": (8, 9)} and found["product"].tolist() == [[8, 9], [16, 18]]


def test_a_setting_cannot_stay_and_vary():
    with pytest.raises(ValueError, match="T: expected it in `over` or as a setting that stays, got both"):
        sweep("rwkv6", over={"T": [4]}, T=8)


def test_truth_has_the_gradients_that_arrive():
    x = inputs("rwkv6", T=4, K=2, H=1)
    arriving = torch.ones_like(x["v"]), torch.ones(1, 1, 2, 2)
    found = sweep("rwkv6", over={"form": ["chunk", "recurrent"]}, T=4, K=2, H=1, arriving=arriving)
    assert (found["dv.l2"] < 1e-6).all()


def test_packed_sequences_can_vary():
    found = sweep("rwkv6", over={"cu_seqlens": [[0, 4], [0, 1, 4], [0, 0, 3, 7]]}, K=2, dfinal_state=True)
    assert (found["dv.l2"] < 1e-6).all() and found.rows()[1]["cu_seqlens"] == "[0, 1, 4]"


def test_unknown_names_of_a_sweep():
    found = sweep(overflow, over={"decay": [1.0], "T": [4]})
    with pytest.raises(ValueError, match="axis: expected one of decay, T, got 'K'"):
        found.onset("K")
    with pytest.raises(ValueError, match="tensor: expected one of x, got 'o'"):
        found.onset("T", "o")
    with pytest.raises(KeyError, match="expected one of x.finite, product, got 'o'"):
        found["o"]


# --- workers, and a store that outlives them ------------------------------------------------------------------------

SUBJECT = """
import os
import signal
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent


def overflow(decay, T):
    with (HERE / "log").open("a") as log:
        log.write(f"{decay} {T}\\n")
    time.sleep(0.02)
    return {"x": torch.arange(1, T + 1).mul(decay).float().exp(), "product": decay * T}


def dies_once(decay, T):
    if (decay, T) == (2.0, 44) and not (HERE / "died").exists():
        (HERE / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return overflow(decay, T)


def fails_at_44(decay, T):
    if T == 44:
        raise ZeroDivisionError(f"at {T}")
    return overflow(decay, T)


def always_dies(decay, T):
    if T == 44:
        os.kill(os.getpid(), signal.SIGKILL)
    return overflow(decay, T)


def fails(decay, T):
    raise ZeroDivisionError(f"at {T}")


def linear_attention(r, k, v, w, u, scale=None, times=1.0):
    g = w.cumsum(1)
    A = torch.einsum("bthk,bshk->bhts", r * scale * (g - w).exp(), k * (-g).exp()).tril(-1)
    d = torch.einsum("bthk,hk,bthk->bht", r * scale, u, k)
    return (torch.einsum("bhts,bshv->bthv", A, v) + d.transpose(1, 2)[..., None] * v) * times


def forward_only(r, k, v, w, u, scale=None):
    with torch.no_grad():
        return (linear_attention(r, k, v, w, u, scale), None)
"""
OVER = {"decay": [1.0, 2.0, 10.0], "T": [8, 44, 45]}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "subject.py").write_text(SUBJECT)
    return tmp_path / "subject.py"


def measured(file):
    return (file.parent / "log").read_text().splitlines()


def assert_whole(found):
    expected = sweep(overflow, OVER)
    assert found.complete and found.to_dict() == expected.to_dict()


def test_a_store_is_gone_on_with_and_may_grow(file, tmp_path):
    name, store = f"{file}:overflow", tmp_path / "kept" / "found.jsonl"
    part = sweep(name, {"decay": [1.0, 2.0], "T": [8, 44]}, store=store)
    assert part.complete and len(measured(file)) == 4
    told = []
    whole = sweep(name, OVER, store=store, progress=lambda done, total: told.append((done, total)))
    assert_whole(whole)
    assert len(measured(file)) == 9 and told[0] == (4, 9) and told[-1] == (9, 9)
    assert_whole(sweep(name, OVER, store=store))
    assert len(measured(file)) == 9


def test_a_line_cut_short_is_measured_again(file, tmp_path):
    name, store = f"{file}:overflow", tmp_path / "found.jsonl"
    sweep(name, OVER, store=store)
    text = store.read_bytes()
    for cut in (text[:-7], text[: text.index(b"\n") + 30], b'{"subj'):
        store.write_bytes(cut)
        assert_whole(sweep(name, OVER, store=store))
        assert_whole(sweep(name, OVER, store=store))


def test_a_killed_sweep_loses_nothing(file, tmp_path):
    store, code = tmp_path / "found.jsonl", "from flakit import sweep; sweep({!r}, {!r}, store={!r})"
    over = {"decay": [float(x) for x in range(1, 11)], "T": list(range(10, 20))}
    run = [sys.executable, "-c", code.format(f"{file}:overflow", over, str(store))]
    process = subprocess.Popen(run)
    end = time.monotonic() + 120
    while not (store.exists() and store.read_bytes().count(b"\n") > 5):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = store.read_bytes().count(b"\n") - 1
    before = len(measured(file))
    assert 5 <= kept < 100 and before - kept <= 1
    found = sweep(f"{file}:overflow", over, store=store)
    assert found.complete and len(measured(file)) == before + 100 - kept
    assert found.to_dict() == sweep(overflow, over).to_dict()


def test_a_store_of_something_else_is_refused(file, tmp_path):
    store = tmp_path / "folder"
    sweep(f"{file}:overflow", OVER, store=store)
    assert (store / "sweep.jsonl").exists()
    with pytest.raises(ValueError, match=r"store: .*sweep\.jsonl holds a sweep with subject 'overflow'.*got 'fails'"):
        sweep(f"{file}:fails", OVER, store=store)
    with pytest.raises(ValueError, match=r"store: .* holds a sweep with source"):
        sweep(overflow, OVER, store=store)
    sweep("rwkv6", {"T": [4]}, K=4, store=tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"store: .* with fixed \{'K': 4\}, got \{'K': 8\}"):
        sweep("rwkv6", {"T": [4]}, K=8, store=tmp_path / "a.jsonl")


@pytest.mark.full
def test_workers_measure_what_one_process_does_and_a_dead_one_is_replaced(file):
    for name in ("overflow", "dies_once"):
        assert_whole(sweep(f"{file}:{name}", OVER, workers=2))
    assert (file.parent / "died").exists()
    with pytest.raises(RuntimeError, match=r"sweep at decay=1\.0, T=44: its process died, 3 times"):
        sweep(f"{file}:always_dies", {"decay": [1.0], "T": [44]}, workers=2)
    with pytest.raises(RuntimeError, match=r"sweep at decay=1\.0, T=4: ZeroDivisionError: at 4"):
        sweep(f"{file}:fails", {"decay": [1.0], "T": [4]}, workers=2)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_sweep_goes_on_where_a_setting_raises(file, tmp_path, workers):
    store = tmp_path / "a.jsonl"
    found = sweep(f"{file}:fails_at_44", OVER, workers=workers, store=store)
    assert found.complete and found.raised.tolist() == [[None, "ZeroDivisionError: at 44", None]] * 3
    assert np.isnan(found["x.finite"]).tolist() == [[False, True, False]] * 3
    assert [row["raised"] for row in found.rows()] == ["", "ZeroDivisionError: at 44", ""] * 3
    assert len(store.read_text().splitlines()) == 1 + 6  # what raised is measured again
    expected = sweep(overflow, OVER)
    assert (found["product"][:, ::2] == expected["product"][:, ::2]).all()
    np.testing.assert_equal(found.onset("T"), [math.nan, 45.0, 8.0 if expected["x.finite"][2, 0] < 1 else 45.0])


@pytest.mark.full
def test_a_setting_that_kills_its_process_is_one_cell(file):
    found = sweep(f"{file}:always_dies", {"decay": [1.0], "T": [8, 44]}, workers=2)
    assert found.raised[0, 0] is None and "its process died, 3 times" in found.raised[0, 1]


@pytest.mark.full
def test_workers_end_when_their_parent_is_killed(file):
    code = "from flakit import sweep; sweep({!r}, {{'decay': [0.01] * 2000, 'T': [4]}}, workers=2)"
    parent = subprocess.Popen([sys.executable, "-c", code.format(f"{file}:overflow")], stdout=subprocess.PIPE)
    end = time.monotonic() + 120
    while not (file.parent / "log").exists():
        assert parent.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    parent.kill()
    assert parent.stdout.read() == b""  # at its end when nobody holds it open, and workers do
    assert parent.wait() != 0
    count = len(measured(file))
    time.sleep(0.5)
    assert len(measured(file)) == count


@pytest.mark.full
def test_workers_know_operators_and_stores(tmp_path):
    over = {"decay": [-0.1, -1.0], "T": [4, 8]}
    found = sweep("rwkv6", over, K=4, H=1, workers=2, store=tmp_path / "a.jsonl")
    assert found.to_dict() == sweep("rwkv6", over, K=4, H=1).to_dict()


@pytest.mark.full
def test_ray_measures_what_one_process_does_and_a_killed_worker_is_replaced(file, tmp_path, monkeypatch):
    """On a Ray of its own, which it ends; then on one that is there, which it leaves: each takes long to start."""
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # on a machine that has other work

    def whole(name):
        assert_whole(sweep(f"{file}:{name}", OVER, workers=2, engine="ray", store=tmp_path / f"{name}.jsonl"))

    whole("overflow")
    assert not ray.is_initialized()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        whole("dies_once")
        assert (file.parent / "died").exists() and len(measured(file)) == 2 * 9
        with pytest.raises(RuntimeError, match=r"sweep at decay=1\.0, T=4: ZeroDivisionError: at 4"):
            sweep(f"{file}:fails", {"decay": [1.0], "T": [4]}, engine="ray")
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_without_ray_its_engine_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"engine: 'ray' needs Ray \(pip install 'flakit\[ray\]'\)"):
        sweep("rwkv6", {"T": [4]}, engine="ray")
    with pytest.raises(ValueError, match="engine: expected one of processes, ray, got 'dusk'"):
        sweep("rwkv6", {"T": [4]}, engine="dusk")


def test_a_function_that_another_process_cannot_import_is_refused():
    with pytest.raises(ValueError, match=r"subject: expected a function that another process can import.* workers=2"):
        sweep(lambda T: {"x": torch.ones(T)}, {"T": [1, 2]}, workers=2)


def test_a_kernel_of_ones_own_is_compared_with_its_operator(file):
    found = sweep(f"{file}:linear_attention", {"decay": [-1.0, -40.0], "T": [4, 16]}, like="rwkv6", K=8, V=12)
    assert found.tensors == ("o", "dr", "dk", "dv", "dw", "du")
    assert (found["o.finite"] < 1).tolist() == [[False, False], [True, True]]
    assert (found["o.l2"][0] < 1e-6).all() and (found["dw.l2"][0] < 1e-5).all()
    found = sweep(f"{file}:linear_attention", {"times": [1.0, 1.5]}, like="rwkv6", T=8, decay=-0.1)
    assert found["o.l2"][0] < 1e-6 and found["o.l2"][1] == pytest.approx(0.5)
    assert sweep(f"{file}:forward_only", {"T": [4]}, like="rwkv6").tensors == ("o",)
    for form in ("chunk_rwkv6", "fused_recurrent_rwkv6"):
        assert "final_state" in sweep(f"flakit:{form}", {"T": [4]}, like="rwkv6", K=4).tensors


@pytest.mark.parametrize(
    "subject, how, message",
    [
        ("nowhere.py:f", {}, "subject: expected a file, nowhere.py does not exist"),
        ("flakit:nothing", {}, "subject: expected a function nothing in flakit: .*no attribute .nothing."),
        ("flakit:chunk_rwkv6", {"like": "rwkv9"}, "op: expected one of rwkv6, rwkv7, gsa, .*, got 'rwkv9'"),
        ("rwkv6", {"workers": 0}, "workers: expected a whole number of at least 1, got 0"),
    ],
)
def test_wrong_subjects_are_named(subject, how, message):
    with pytest.raises(ValueError, match=message):
        sweep(subject, {"T": [4]}, **how)


def test_tables(tmp_path):
    found = sweep(overflow, OVER)
    lines = found.to_csv(tmp_path / "found.csv").read_text().splitlines()
    assert lines[0] == "decay,T,x.finite,product" and lines[1] == "1.0,8,1.0,8.0" and len(lines) == 10
    try:
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(ImportError, match=r"to_parquet: it needs pyarrow \(pip install pyarrow\)"):
            found.to_parquet(tmp_path / "found.parquet")
    else:
        assert parquet.read_table(found.to_parquet(tmp_path / "found.parquet")).to_pylist() == found.rows()


def test_a_bar_shows_progress(capsys):
    sweep(overflow, OVER, progress=True)
    assert "9/9" in capsys.readouterr().err
