"""Exercise checks: right and wrong answers told apart, the place named, an empty answer no error."""

import math

import numpy as np
import pytest
import torch

from flakit.numerics.exercises import check

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("yours", "reference"),
    [
        (X.clone().requires_grad_(), X),
        (X.numpy() * (1 + 1e-7), X),
        (X.double().tolist(), X),
        (7, 7.0),
        (-math.inf, -math.inf),
        (torch.tensor([0.0, math.inf]), [0.0, math.inf]),
        (0.1, 0.1),
        (np.float64(0.25), torch.tensor(0.25)),
        (torch.zeros(3), torch.zeros(3)),
        (True, True),
        ("dw", "dw"),
        ({"r", "k"}, {"k", "r"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_right(yours, reference, capsys):
    verdict = check("name", yours, reference, "unused")
    assert verdict and capsys.readouterr().out == "name: right\n" == verdict.text + "\n"


def test_wrong_names_the_worst_place(capsys):
    yours = X.clone()
    yours[0, 1] += 0.1
    yours[1, 2] = 9
    assert not check("scores", yours, X, "look at the mask")
    assert capsys.readouterr().out.splitlines() == [
        "scores: not yet",
        "  at         [1, 2], the worst of 6 values",
        "  yours      9",
        "  reference  5",
        "  hint       look at the mask",
    ]


@pytest.mark.parametrize(
    ("yours", "reference", "says"),
    [
        (None, X, "nothing so far"),
        (..., 1.0, "nothing so far"),
        (..., "dw", "nothing so far"),
        (X.T, X, "shape [3, 2]"),
        (X[0], X, "shape [3]"),
        (X + math.nan, X, "[0, 0]"),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0]), "[1]"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.inf]), "[1]"),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "[0]"),
        (1e-6 * torch.ones(3), torch.zeros(3), "[0]"),
        (8, 7.0, "yours      8"),
        (0.1001, 0.1, "yours      0.1001"),
        ("fast", 7.0, "'fast', a str; expected numbers"),
        (True, 1, "True, a bool; expected numbers"),
        (False, True, "False"),
        ("du", "dw", "'dw'"),
        ({"r"}, {"k", "r"}, "{'r'}"),
    ],
)
def test_wrong(yours, reference, says, capsys):
    verdict = check("name", yours, reference, "the hint")
    said = capsys.readouterr().out
    assert not verdict
    assert said.startswith("name: not yet\n") and says in said and said.endswith("the hint\n")


def test_tolerance_is_relative_to_the_size_of_the_reference():
    assert check("small", 1e-12 * X * (1 + 1e-7), 1e-12 * X)
    assert not check("small", 1e-12 * X * (1 + 1e-3), 1e-12 * X)
    assert check("coarse", X * (1 + 1e-3), X, tolerance=1e-2)


def test_a_reference_with_nan_cannot_be_checked_against():
    with pytest.raises(ValueError, match="reference: expected numbers to compare with, got NaN"):
        check("name", X, X + math.nan)


def test_a_notebook_does_not_show_a_verdict_twice(capsys):
    verdict = check("name", 1, 1)
    capsys.readouterr()
    verdict._ipython_display_()
    assert capsys.readouterr().out == ""
