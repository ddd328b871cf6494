"""Strides a kernel does not ask for: the share misread against its law, and what our operators make of the layouts."""

import math

import pytest
import torch

from flakit import inputs
from flakit.cases import strides as case
from flakit.cases.strides.picture import Picture
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.operators import OPERATORS

SHAPES = [(2, 100, 4, 8), (1, 7, 3, 5), (3, 9, 5, 2), (1, 1, 4, 3), (2, 6, 1, 3), (1, 16, 16, 2)]


def misread(name, *shape):
    return case.show(layout=name, **dict(zip("BTHD", shape, strict=True))).misread


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", case.LAYOUTS)
def test_law_predicts_the_misread_share(name, shape):
    assert misread(name, *shape) == pytest.approx(case.law(name, shape), abs=1e-12)


def test_a_wrong_law_is_rejected():
    name = "heads first, transposed"
    agree = [1 - 2 / (T * H) == pytest.approx(misread(name, B, T, H, D)) for B, T, H, D in SHAPES]
    assert not all(agree)  # the first and the last row alone
    agree = [1 - 1 / (T * H) == pytest.approx(misread(name, B, T, H, D)) for B, T, H, D in SHAPES]
    assert not any(agree)


def test_layouts_hold_the_same_values():
    x = torch.randn(2, 5, 3, 4)
    for name in case.LAYOUTS:
        y = case.layout(x, name)
        assert y.shape == x.shape and y.is_contiguous() == (name == "contiguous")
        assert name.startswith("expanded") or torch.equal(x, y)


def test_beyond_the_memory_is_nan():
    seen = case.blind(torch.ones(1, 1, 1, 1).expand(1, 2, 2, 2))
    assert seen.flatten()[0] == 1 and seen.isnan().sum() == 7


@pytest.mark.parametrize("name", list(case.LAYOUTS)[1:3])
def test_a_blind_kernel_is_wrong_and_ours_are_not(name):
    x = inputs("rwkv6", T=20, H=3, K=8)
    exact = truth("rwkv6", x)
    laid_out = {**x, "k": case.layout(x["k"], name)}
    assert relative_l2(evaluate("rwkv6", laid_out)["o"], exact["o"]) < 1e-6
    misread = evaluate("rwkv6", case.read_blindly(x, {"k": name}))
    assert relative_l2(misread["o"], exact["o"]) > 0.1 and misread["o"].isfinite().all()


@pytest.mark.parametrize("op", OPERATORS)
def test_an_expanded_gradient(op):
    x = inputs(op, T=20, K=8)
    do = case.layout(torch.ones_like(evaluate(op, x)["o"]), "expanded, stride 0")
    found, exact = (compute(op, x, arriving=(do, None)) for compute in (evaluate, truth))
    assert max(relative_l2(found[name], exact[name]) for name in exact) < 2e-6
    assert case.blind(do).isnan().any()


@pytest.mark.parametrize("name", case.LAYOUTS)
def test_shows_what_is_measured(name):
    (row,) = case.show(layout=name, T=9, H=5, D=2).rows
    shown = case.show(layout=name, B=2, T=9, H=5, D=2)
    assert shown.misread == row.measured
    right = (shown.read == shown.meant) & ~shown.neighbour
    share = case.law(name, (1, 9, 5, 2))
    assert right.double().mean() == pytest.approx(0 if name.startswith("expanded") else 1 - share)
    assert shown.neighbour.any() == name.startswith("slice") and shown.read.isnan().any() == name.startswith("exp")


def test_the_sentence_follows_the_law():
    picture = Picture(6.0)
    for name, T in (("contiguous", 9), ("heads first, transposed", 9), ("heads first, transposed", 1)):
        said = picture.say(case.show(layout=name, B=2, T=T, H=5, D=2))
        assert ("what the kernel takes for a row is that row" in said) == (case.law(name, (2, T, 5, 2)) == 0)
    said = picture.say(case.show(layout="heads first, transposed", B=2, T=100, H=4, D=64))
    assert said.endswith("Right rows: 4 of 400.")


def test_reproduce():
    rows = case.reproduce()
    assert len(rows) == 4 and all(row.law == pytest.approx(row.measured) for row in rows)
    assert rows[1].law == 1 - (math.gcd(99, 3) + 1) / 400
