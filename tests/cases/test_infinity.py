"""One infinity's way: each station against automatic differentiation of the same faulty forward, and float64."""

import pytest
import torch

from flakit.cases import infinity
from flakit.cases.laws import LN_MAX
from flakit.numerics.evaluate import truth

C, K = 8, 4
END = LN_MAX[torch.float32]
FINE, FIRST, READ, ZERO = -10.5, -11.5, -13.5, -15.5
DECAYS = [0.0, FINE, -11.1, FIRST, -12.68, READ, -14.8, ZERO]

decays = pytest.mark.parametrize("decay", DECAYS)


def faulty(decay, seed=0):
    """Scores as one masked product of factors, written down once more, and its gradients by PyTorch."""
    x = {name: each[0, ..., 0, :] for name, each in infinity.inputs(decay, seed=seed).items() if name != "u"}
    r, k, v, do, w = (x[name].clone().requires_grad_() for name in ("r", "k", "v", "do", "w"))
    gi = w.cumsum(0)
    scores = (r * K**-0.5 * (gi - w).exp()) @ (k * (-gi).exp()).T
    o = torch.where(torch.ones(C, C).tril(-1).bool(), scores, 0.0) @ v
    grads = torch.autograd.grad(o, (r, k, v), do)
    return {"scores": scores, "o": o, **dict(zip(("dr", "dk", "dv"), grads, strict=True))}


def close(made, expected, rtol=1e-4):
    """Equal up to rounding where the exponents are sums of 8 numbers, NaN and inf in the same places."""
    assert torch.equal(made.isnan(), expected.isnan())
    torch.testing.assert_close(made, expected.detach(), rtol=rtol, atol=1e-6, equal_nan=True)


@decays
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_lost_is_what_automatic_differentiation_loses(decay, seed):
    way, found = infinity.follow(decay, seed=seed), faulty(decay, seed)
    low = torch.ones(C, C).tril(-1).bool()  # above, finite scores reach 1e38 and are rounded like it
    close(way.made.scores[low], found["scores"][low])
    close(way.made.o, found["o"])
    close(way.made.dr, found["dr"])
    for name in ("o", "dv", "dk", "dr"):
        assert way.lost[name] == (~found[name].isfinite()).double().mean().item(), name


@decays
def test_the_true_numbers_are_those_of_the_recurrence(decay):
    x = infinity.inputs(decay)
    do = x.pop("do")
    exact, way = truth("rwkv6", x, arriving=(do, None)), infinity.follow(decay)
    for name, made in (("o", way.true.o), ("dr", way.true.dr)):
        torch.testing.assert_close(made, exact[name][0, :, 0], rtol=1e-9, atol=1e-12)
    if not any(way.lost.values()):
        torch.testing.assert_close(way.made.dr.double(), way.true.dr, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(way.made.o.double(), way.true.o, rtol=1e-3, atol=1e-6)


@decays
def test_every_station(decay):
    made = infinity.follow(decay).made
    size = -torch.tensor(decay).double()
    bad = size * torch.arange(1, C + 1) > END
    assert torch.equal(made.key.isinf(), bad)
    for i in range(C):
        for j in range(C):
            pair = made.pairs[i, j]
            if bad[j]:
                assert pair.isnan() if made.read[i] == 0 else pair.isinf()
                assert not made.scores[i, j].isfinite()
            if j >= i:
                assert made.kept[i, j] == 0 and made.dA[i, j] == 0
            else:
                assert made.kept[i, j].isfinite() == made.scores[i, j].isfinite()
    rows = (~made.kept.isfinite()).any(-1)
    assert torch.equal((~made.o.isfinite()).all(-1), rows) and torch.equal((~made.o.isfinite()).any(-1), rows)
    assert made.dA.isfinite().all()
    assert made.dr.isnan().all() if bad[-1] else made.dr.isfinite().all()


def test_a_factor_is_tiny_before_it_is_zero():
    last = {decay: infinity.follow(decay).made.read[-1].item() for decay in (-12.0, READ, ZERO)}
    smallest = torch.finfo(torch.float32).smallest_normal
    assert last[-12.0] > smallest > last[READ] > 0 == last[ZERO]
    assert last[READ] == pytest.approx(9.1e-42, rel=0.01)


@pytest.mark.parametrize(
    ("decay", "cell", "made"),
    [(FINE, (7, 6), "1"), (FIRST, (7, 7), "inf"), (READ, (7, 6), "inf"), (ZERO, (7, 6), "nan")],
)
def test_the_cell_to_follow(decay, cell, made):
    way = infinity.follow(decay)
    assert way.cell == cell
    assert f"{way.made.pairs[cell]:.3g}" == made
    assert way.true.pairs[cell].item() == pytest.approx(1.0 if cell == (7, 6) else torch.tensor(-FIRST).exp().item())


@pytest.mark.parametrize("seed", range(3))
def test_tensors_fail_one_after_another(seed):
    """The last key, that nobody reads, loses dr, dk and dw; the one before, that is read, o and dv."""

    def onset(name, low=9.0, high=16.0):
        while high - low > 1e-3:
            middle = (low + high) / 2
            lost = infinity.follow(-middle, seed=seed).lost[name]
            low, high = (low, middle) if lost else (middle, high)
        return high

    law = {name: END / (C if name in ("dr", "dk", "dw") else C - 1) for name in infinity.TENSORS}
    assert {name: onset(name) for name in infinity.TENSORS} == pytest.approx(law, abs=2e-3)


def test_two_percent_of_the_factors_and_all_of_dr():
    lost = infinity.follow(-1.39, C=64).lost
    assert lost == {"keys": 1 / 64, "o": 0, "dv": 0, "dk": 1 / 64, "dr": 1, "dw": 1}
