"""Casebook 2c: dw by three formulas against float64, and the law of what the identity loses."""

import math

import pytest
import torch

from flakit.cases import decay_gradient
from flakit.cases.decay_gradient import dw_by_formula, law, reproduce, round_to, running_sums
from flakit.numerics.gradients import gradient_rows
from flakit.ops.rwkv6 import reference


@pytest.fixture(scope="module")
def table():
    return {(row["T"], row["decay"], row["rounding"]): row for row in reproduce(seed=3)}


@pytest.mark.parametrize("T, measured", [(256, 3.5e-2), (1024, 7.7e-2), (4096, 1.6e-1)])
def test_rounded_identity_gets_worse_with_length_and_direct_does_not(table, T, measured):
    row = table[T, "logsigmoid", "bfloat16"]
    assert row["identity-rounded"] == pytest.approx(measured, rel=0.35)  # seeds differ by that much
    assert row["direct"] == pytest.approx(1.7e-3, rel=0.1)  # the rounding of dw itself
    assert row["identity"] < 1.1 * row["direct"]  # unrounded dr and dk would have done, at this decay


@pytest.mark.parametrize("w", [-1.0, -8.0, -20.0, -50.0])
def test_law_predicts_the_noise(table, w):
    row = table[256, w, "tf32"]
    assert row["identity-rounded"] == pytest.approx(row["law"], rel=0.3)
    assert row["identity-rounded"] != pytest.approx(2 * row["law"], rel=0.3)  # one digit off would be seen
    float32 = table[256, w, "float32"]
    assert 1 < float32["identity"] / float32["law"] < 4  # the running sums round too
    assert row["direct"] < 1e-6 and float32["direct"] < 1e-6


@pytest.mark.parametrize("w, T", [(-0.05, 128), (-0.5, 512), (-3.0, 128)])
def test_law_predicts_bfloat16(w, T):
    measured = decay_gradient._errors(T, w, "bfloat16", seed=1)["identity-rounded"]
    assert measured == pytest.approx(math.hypot(law(w, T), 1.7e-3), rel=0.35)


def test_published_kernels_lie_between_float32_and_tf32_noise(table):
    for w in (-8.0, -20.0, -50.0):
        float32, tf32 = table[256, w, "float32"]["identity"], table[256, w, "tf32"]["identity-rounded"]
        assert float32 < decay_gradient.PUBLISHED["chunk"][w] < tf32
        assert decay_gradient.PUBLISHED["fused recurrent"][w] == pytest.approx(float32, rel=0.75)


def test_law_at_the_edges():
    assert law(-math.inf, 64) == math.inf
    assert law(-1e4, 64, "float32") == math.inf
    assert law(-1e-8, 64) < 1e-5
    with pytest.raises(ValueError, match=r"w: expected a natural-log decay < 0, got 0\.0"):
        law(0.0, 64)


@pytest.mark.parametrize("state", [False, True], ids=["no state", "states"])
def test_all_formulas_are_the_same_in_exact_arithmetic(state):
    generator = torch.Generator().manual_seed(0)
    B, T, H, K, V = 2, 37, 2, 8, 5
    r, k, x = (torch.randn(B, T, H, K, generator=generator, dtype=torch.float64) for _ in range(3))
    v, do = (torch.randn(B, T, H, V, generator=generator, dtype=torch.float64) for _ in range(2))
    S0, dS = (torch.randn(B, H, K, V, generator=generator, dtype=torch.float64) if state else None for _ in range(2))
    w = -x.exp()
    got = dw_by_formula(r, k, v, w, do, initial_state=S0, dfinal_state=dS, rounding="float32")
    dw = reference.backward(r, k, v, w, torch.randn(H, K, dtype=torch.float64), None, S0, do, dS)[3]
    torch.testing.assert_close(got["direct"], dw)
    torch.testing.assert_close(got["identity"], dw)
    torch.testing.assert_close(got["identity-rounded"], dw, rtol=1e-3, atol=1e-4)


def test_everything_forgotten_leaves_no_gradient_but_noise():
    r, k, v, do = torch.randn(4, 1, 64, 1, 16, generator=torch.Generator().manual_seed(0))
    got = dw_by_formula(r, k, v, torch.full_like(r, -math.inf), do)
    assert got["direct"].eq(0).all()
    assert got["identity-rounded"].abs().max() > 1e-3


def test_round_to_tf32_keeps_eleven_digits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -3e38, 0.0, math.inf])
    expected = torch.tensor([1 + 2**-10, 1.0, 1 + 2**-9, x[3], 0.0, math.inf])
    expected[3] = round_to(x, "tf32")[3]
    assert round_to(x, "tf32").equal(expected)
    assert abs(round_to(x, "tf32")[3] / x[3] - 1) < 2**-11
    with pytest.raises(ValueError, match="rounding: expected one of bfloat16, float16, tf32, float32, float64, got 'int8'"):
        round_to(x, "int8")


def test_running_sums_beside_the_operators_own_dw():
    rows = gradient_rows(
        "rwkv6", others={"running sums": running_sums}, T=256, H=1, K=32, decay=-4.0, dtype=torch.bfloat16
    )
    errors = {row["form"]: row["l2"] for row in rows if row["tensor"] == "dw"}
    assert errors["chunk"] < 2.5e-3 and errors["recurrent"] < 2.5e-3
    assert errors["running sums"] == pytest.approx(law(-4.0, 256), rel=0.3)
