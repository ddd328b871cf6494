"""Sweeps: every setting once, what it measured in its place, and onsets read off the grid."""

import json
import math

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
        ("rwkv9", {"T": [1]}, ValueError, "op: expected one of rwkv6, rwkv7, gsa, got 'rwkv9'"),
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
