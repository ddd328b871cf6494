"""A short key that is brought to length one: the law of its gradient, in both ways, against finite differences."""

import pytest
import torch

from flakit.cases import zero_key as case
from flakit.numerics.inputs import inputs
from flakit.ops.rwkv7 import chunk_rwkv7


@pytest.mark.parametrize("way", case.WAYS)
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2])
def test_law_says_by_how_much_the_gradient_grows(way, eps):
    for length in (1e-14, 1e-9, 1e-4, 1.0, 10.0):
        (row,) = case.show(length=length, way=way, eps=eps).rows
        assert row.agrees, row


WRONG_LAWS = {
    "only a division by zero": lambda length, eps: 1 / length,
    "one": lambda length, eps: 1.0,
    "the square": lambda length, eps: 1 / max(length, eps) ** 2,
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    rows = {x: case.show(length=x, eps=1e-6).rows[0] for x in (1e-9, 1e-4, 1e-1)}
    assert not all(row._replace(law=WRONG_LAWS[wrong](x, 1e-6)).agrees for x, row in rows.items())


@pytest.mark.parametrize("way", case.WAYS)
def test_it_is_the_derivative_of_the_normalisation(way):
    direction = torch.nn.functional.normalize(torch.arange(1.0, 5.0, dtype=torch.float64), dim=0)
    k, step = 1e-3 * direction, 1e-9 * torch.tensor([4.0, 3.0, -2.0, -1.0], dtype=torch.float64)
    step = step - (step @ direction) * direction
    unit = [x / case.lengths(x, way, 1e-6) for x in (k - step, k + step)]
    assert ((unit[1] - unit[0]).norm() / (2 * step).norm()).item() == pytest.approx(case.law(1e-3, way, 1e-6), rel=1e-5)


def test_one_way_is_pytorchs_own():
    k = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([0, 1e-9, 1e-3, 1, 10.0])[:, None]
    for eps in (1e-12, 1e-2):
        assert torch.equal(k / case.lengths(k, case.WAYS[0], eps), torch.nn.functional.normalize(k, dim=-1, eps=eps))


def test_a_larger_epsilon_gives_the_step_back_to_the_other_tokens():
    shares = [case.show(length=1e-14, way=case.WAYS[0], eps=eps, seed=0).share for eps in (1e-12, 1e-6, 1e-1)]
    assert shares[0] < 1e-11 and shares[1] < 1e-5 and shares[2] > 0.05
    assert case.show(length=4.0, way=case.WAYS[0], eps=1e-12, seed=0).share > 0.9


def test_rwkv7_is_spared_for_what_it_looks_up_is_not_what_it_writes():
    x = inputs("rwkv7", T=8, H=1, K=4, dtype=torch.float64)
    arrives = []
    for length in (1.0, 1e-6, 0.0):
        unit = (-x["a"]).clone()
        unit[0, 5] *= length
        unit.requires_grad_()
        o = chunk_rwkv7(**x | {"a": -unit, "b": 0.5 * unit}).o
        arrives.append(torch.autograd.grad(o.sum(), unit)[0][0, 5].norm().item())
    assert arrives[0] > 0.01 and arrives[1] < 1e-5 and arrives[2] == 0
