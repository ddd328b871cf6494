"""A chain of transitions whose factors are rounded: its law, in every way, and what rounding is."""

import math

import pytest
import torch

from flakit.cases import rounded_chain as case


@pytest.mark.parametrize("way", case.WAYS)
@pytest.mark.parametrize("seed", [0, 5])
def test_law_says_how_far_off_a_chain_is(way, seed):
    shown = case.show(chunks=64, way=way, seed=seed)
    assert shown.chunks == (2, 4, 8, 16, 32, 64)
    for found, law in zip(shown.errors, shown.law, strict=True):
        assert found == pytest.approx(law, rel=0.08)


WRONG_LAWS = {
    "as long as the chain": lambda n: (n - 1) * math.sqrt(2) * case.ROUNDED * 2.0**-11,
    "of one product": lambda n: case.law(2),
    "ten digits": lambda n: 2 * case.law(n),
    "of one factor": lambda n: case.law(n) / math.sqrt(2),
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    (row,) = case.show(chunks=64).rows
    assert row.agrees and not row._replace(law=WRONG_LAWS[wrong](64)).agrees


def test_numbers_keep_their_digits():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(case.rounded(x, 8), x.bfloat16().double(), rtol=0, atol=0)
    torch.testing.assert_close(case.rounded(x, 24), x.float().double(), rtol=0, atol=0)
    many = torch.randn(10**6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    off = (case.rounded(many, 11) - many).norm() / many.norm()
    assert off.item() == pytest.approx(case.ROUNDED * 2.0**-11, rel=5e-3)


def test_chunks_turn_what_they_are_given():
    M = case.transitions(3)
    torch.testing.assert_close(M.mT @ M, torch.eye(case.K, dtype=torch.float64).expand_as(M), rtol=0, atol=1e-12)


def test_a_tree_of_products_is_as_far_off_as_a_chain():
    M = true = case.transitions(64)
    while len(M) > 1:
        M = torch.stack([case.product(late, early, "TF32") for early, late in zip(M[::2], M[1::2], strict=True)])
        true = true[1::2] @ true[::2]
    off = (M - true).norm() / true.norm()
    assert off.item() == pytest.approx(case.law(64), rel=0.08)
