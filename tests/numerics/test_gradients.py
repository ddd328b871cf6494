"""Rows of errors per tensor, and where along t an error sits."""

import dataclasses
import math

import pytest
import torch

from flakit.cases.final_state_gradient import ignoring
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.gradients import MEASURES, along_time, gradient_rows, measures
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS, operator


def test_rows_hold_every_form_and_tensor_at_rounding_level():
    rows = gradient_rows("rwkv6", T=33, H=1, K=8, V=5, decay=-8.0, initial_state=True)
    assert {(row["form"], row["tensor"]) for row in rows} == {
        (form, tensor)
        for form in ("chunk", "recurrent")
        for tensor in ("o", "final_state", "dr", "dk", "dv", "dw", "du", "dinitial_state")
    }
    for row in rows:
        assert (row["op"], row["dtype"], row["T"], row["decay"], row["non_finite"]) == ("rwkv6", "float32", 33, -8.0, 0)
        assert all(row[measure] < 1e-5 for measure in MEASURES), row


def test_rows_are_those_of_evaluate_against_truth():
    setting = dict(T=40, H=1, K=4, decay="logsigmoid", dtype=torch.bfloat16, seed=5)
    (row,) = [row for row in gradient_rows("rwkv6", forms=["chunk"], **setting) if row["tensor"] == "dw"]
    made = inputs("rwkv6", **setting)
    assert row == row | measures(evaluate("rwkv6", made)["dw"], truth("rwkv6", made)["dw"])
    assert 1e-4 < row["l2"] < 5e-3


def test_the_decay_not_given_is_named():
    assert gradient_rows("rwkv6", forms=["chunk"], T=2, H=1, K=2)[0]["decay"] == "rwkv6-init"


def test_along_time_shows_the_step_that_is_wrong():
    truth = torch.full((1, 6, 2, 3), 2.0)
    got = truth.clone()
    got[0, 2, 1, 0] += 6.0
    got[0, 4, 0, 0] = math.nan
    per_step = along_time(got, truth)
    assert per_step.tolist() == pytest.approx([0, 0, 6 / 2 / math.sqrt(6), 0, math.inf, 0])


def test_along_time_of_zeros_and_of_a_tensor_without_time():
    zeros = torch.zeros(1, 3, 1, 2)
    assert along_time(zeros, zeros).eq(0).all()
    assert along_time(zeros + 1, zeros).isinf().all()
    with pytest.raises(ValueError, match=r"got: expected \[B, T, H, D\], a tensor with a time axis, got \[2, 3\]"):
        along_time(torch.zeros(2, 3), torch.zeros(2, 3))


def test_other_makers_of_a_tensor_have_rows_of_their_own():
    def zeros(made, do):
        assert do.shape == made["v"].shape and do.dtype == made["v"].dtype
        return {"dw": torch.zeros_like(made["w"])}

    rows = gradient_rows("rwkv6", forms=["chunk"], others={"zeros": zeros}, T=8, H=1, K=4, over_time=True)
    (row,) = [row for row in rows if row["form"] == "zeros"]
    assert (row["tensor"], row["l2"], len(row["along_time"])) == ("dw", 1.0, 8)
    timeless = {row["tensor"] for row in rows if row["along_time"] is None}
    assert timeless == {"final_state", "du"}


def with_forms(op, change):
    """The operator with each of its forms changed."""
    op = operator(op)
    return dataclasses.replace(op, forms={name: change(form) for name, form in op.forms.items()})


@pytest.mark.parametrize("op", OPERATORS)
def test_a_kernel_that_drops_the_final_states_gradient_is_seen(op):
    setting = dict(T=12, H=1, K=8, V=5, initial_state=True)
    right = gradient_rows(op, dfinal_state=True, **setting)
    assert all(row["l2"] < 1e-5 for row in right), right
    faulty = with_forms(op, ignoring)
    assert all(row["l2"] < 1e-5 for row in gradient_rows(faulty, **setting))  # on o alone nothing is to be seen
    states = {f"d{name}" for name in operator(op).states}
    for form in faulty.forms:
        rows = gradient_rows(faulty, forms=form, dfinal_state=True, **setting)
        seen = {row["tensor"] for row in rows if row["l2"] > 0.01}
        assert seen >= {"dk", "dv", f"d{operator(op).decay}", *states}, form


@pytest.mark.parametrize("op", OPERATORS)
def test_a_kernel_that_ignores_where_sequences_begin_is_seen(op):
    def over_the_edges(form):
        def faulty(*, cu_seqlens, initial_state, **given):
            first = operator(op).state([part[:1] for part in operator(op).parts(initial_state)])
            out = form(initial_state=first, **given)
            last = [part.expand(len(cu_seqlens) - 1, *part.shape[1:]) for part in operator(op).parts(out.final_state)]
            return out._replace(final_state=operator(op).state(last))

        return faulty

    setting = dict(cu_seqlens=[0, 1, 30, 30, 94], H=1, K=8, V=5, initial_state=True, dfinal_state=True)
    right = gradient_rows(op, **setting)
    assert all(row["l2"] < 1e-5 and row["T"] == 94 for row in right), right
    wrong = gradient_rows(with_forms(op, over_the_edges), **setting)
    assert {row["tensor"] for row in wrong if row["l2"] > 0.01} >= {"o", "dk", "dv", *operator(op).outputs}


def test_other_makers_are_given_the_final_states_gradient_where_one_arrives():
    def zeros(made, do, dstate):
        assert dstate.shape == (1, 1, 4, 4) and dstate.dtype == torch.float32
        return {"dw": torch.zeros_like(made["w"])}

    rows = gradient_rows("rwkv6", others={"zeros": zeros}, T=8, H=1, K=4, dfinal_state=True)
    assert [row["l2"] for row in rows if row["form"] == "zeros"] == [1.0]
