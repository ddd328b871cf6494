"""Blocks of values that store one place: the law of what remains, which tensors are right, and the cure."""

import math

import pytest
import torch

from flakit.cases import shared_store as case
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import cotangents, truth
from flakit.numerics.inputs import inputs


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("V", case.SIZES)
def test_law_predicts_what_remains_of_each_gradient(V, block):
    for tensor in ("dr", "dk", "dw"):
        for seed in range(3):
            (row,) = case.show(V=V, block=block, tensor=tensor, seed=seed).rows
            assert row.agrees, row


WRONG_LAWS = {
    "the share that is lost": lambda n: 1 - 1 / n,
    "the share that remains": lambda n: math.sqrt(1 / n) if n > 1 else 0.0,
    "nothing": lambda n: 0.0,
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    rows = {n: case.show(V=16 * n, block=16).rows[0] for n in (1, 2, 4, 8)}
    assert not all(row._replace(law=WRONG_LAWS[wrong](n)).agrees for n, row in rows.items())


def test_the_shares_of_all_blocks_are_the_gradients_and_columns_are_right_alone():
    x = inputs("rwkv6", T=case.T, H=1, K=case.K, V=64, decay=-0.3)
    true = truth("rwkv6", x, arriving=cotangents("rwkv6", x, grad_seed=0))
    parts = case.shares(64, 16)
    for name in case.SHARED:
        assert relative_l2(sum(part[name] for part in parts), true[name]) < 1e-6, name
    for name in ("o", "dv", "final_state"):
        assert relative_l2(torch.cat([part[name] for part in parts], -1), true[name]) < 1e-6, name


def test_shares_that_are_added_are_right():
    (row,) = case.show(V=128, block=16, summed=True).rows
    assert row.law == row.measured == 0
