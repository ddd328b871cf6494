"""A term of the loss that ignores what arrives: its law, in every way, and where it cannot be seen."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from flakit.cases import unscaled_term as case

SCALES = (2.0**-6, 1 / 8, 0.1, 1.0, 3.0, 2.0**16)


@pytest.mark.parametrize("way", case.WAYS)
def test_law_says_how_much_of_the_term_is_left(way):
    for scale in SCALES:
        (row,) = case.show(scale=scale, way=way).rows
        assert row.agrees, row


WRONG_LAWS = {
    "too small, as reported": lambda scale: min(1.0, 1 / scale),
    "all of it": lambda scale: 1.0,
    "the scale": lambda scale: scale,
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    rows = {scale: case.show(scale=scale).rows[0] for scale in SCALES}
    assert not all(row._replace(law=WRONG_LAWS[wrong](scale)).agrees for scale, row in rows.items())


def logits(*shape):
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def loss_of(x, way):
    targets = torch.arange(x[..., 0].numel()) % 32
    return case.with_term(cross_entropy(x.flatten(0, -2), targets), x, way)


def gradient(x, way, arrives=1.0):
    loss = loss_of(x, way)
    return torch.autograd.grad(loss, x, torch.full_like(loss, arrives))[0]


def test_at_one_all_ways_are_the_same_and_the_derivative_of_the_term():
    x = logits(2, 5)
    first, *others = (gradient(x, way) for way in case.WAYS)
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-12, atol=1e-18)
    assert torch.autograd.gradcheck(lambda y: loss_of(y, case.WAYS[2]), x)


def test_a_backward_pass_that_is_linear_gives_zero_for_zero():
    x = logits(2, 5)
    assert torch.equal(gradient(x, case.WAYS[0], 0.0), case.pull(x))
    for way in case.WAYS[1:]:
        assert not gradient(x, way, 0.0).any()
        assert torch.equal(gradient(x, way, -1.0), -gradient(x, way))


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_parts_that_are_accumulated_have_the_term_so_many_times(parts):
    x = logits(8, 5)
    targets = (torch.arange(40) % 32).view(8, 5)

    def accumulated(way):
        total = torch.zeros_like(x)
        for part in range(parts):
            rows = slice(part * 8 // parts, (part + 1) * 8 // parts)
            own = x.detach()[rows].requires_grad_()
            loss = case.with_term(cross_entropy(own.flatten(0, 1), targets[rows].flatten()), own, way) / parts
            total[rows] = torch.autograd.grad(loss, own)[0]
        return total

    (alone,) = torch.autograd.grad(cross_entropy(x.flatten(0, 1), targets.flatten()), x)
    torch.testing.assert_close(accumulated(case.WAYS[0]) - alone, parts * case.pull(x).detach(), rtol=1e-6, atol=1e-12)
    for way in case.WAYS[1:]:
        torch.testing.assert_close(accumulated(way) - alone, case.pull(x).detach(), rtol=1e-6, atol=1e-12)
