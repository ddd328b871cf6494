"""Pieces chained through the state equal the whole; a detached or forgotten state is seen where it should be."""

import pytest
import torch

from flakit import inputs
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.operators import OPERATORS
from flakit.numerics.pieces import in_pieces


def off(op, x, cuts, form="chunk", **how):
    found, exact = (
        evaluate(in_pieces(op, cuts, **how), x, form=form, dfinal_state=True),
        truth(op, x, dfinal_state=True),
    )
    assert set(found) == set(exact)
    return {name: relative_l2(found[name], exact[name]) for name in exact}


@pytest.mark.parametrize("cuts", [[], [1], [20], [7, 8, 30]], ids=str)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", OPERATORS)
def test_pieces_equal_the_whole(op, form, cuts):
    x = inputs(op, T=33, K=8, V=5, initial_state=True)
    assert max(off(op, x, cuts, form).values()) < 2e-6


@pytest.mark.parametrize("op", OPERATORS)
def test_a_detached_state_leaves_the_values_and_costs_the_past_its_gradients(op):
    x = inputs(op, T=33, K=8, initial_state=True)
    found = off(op, x, [20], handed="detached")
    outputs = set(OPERATORS[op].outputs)
    assert max(found[name] for name in outputs) < 2e-6
    assert min(found[name] for name in ("dk", "dv", *(name for name in found if name.startswith("dinitial")))) > 1e-3


@pytest.mark.parametrize("op", OPERATORS)
def test_a_forgotten_state_costs_the_values_too(op):
    found = off(op, inputs(op, T=33, K=8), [20], handed="nothing")
    assert found["o"] > 0.01


def test_in_float64_nothing_differs_but_rounding():
    x = inputs("rwkv6", T=33, K=8, dtype=torch.float64)
    assert max(off("rwkv6", x, [16]).values()) < 1e-14


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: in_pieces("rwkv6", [3], handed="half"),
            "handed: expected one of .*, got 'half'",
        ),
        (lambda: in_pieces("rwkv6", [3, 3]), r"cuts: expected ascending numbers of tokens from 1, got \[3, 3\]"),
        (lambda: in_pieces("rwkv6", [0]), "cuts: expected a whole number of at least 1, got 0"),
        (lambda: evaluate(in_pieces("rwkv6", [64]), inputs("rwkv6")), r"cuts: expected cuts below T = 64, got \[64\]"),
    ],
    ids=["handed", "twice", "zero", "too late"],
)
def test_errors_name_the_argument(call, says):
    with pytest.raises(ValueError, match=says):
        call()
