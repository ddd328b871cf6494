"""Tokens that repeat: the case in which the inverse by powers of A_ab loses every digit, and every other form may not.

With κ̂ the same in many tokens the powers of A_ab are huge and cancel; the inverse itself is harmless. da and db are
then small differences of what is written and what is erased: when every input moves by one part, they move by about ten
of their own instead of the usual two. All the same they are held to the ordinary budget, but in float16, whose budget
counts roundings of operands to TF32, 2^-12 each: there, to that times what they move, divided by two.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from flakit.ops.rwkv7 import chunk_torch
from tests.ops.checking import budget, true_values
from tests.ops.places import everywhere
from tests.ops.settings import Setting

FORMS = pytest.mark.parametrize(
    "form, more",
    [*(("chunk", {"chunk_size": size}) for size in (16, 32, 64)), ("recurrent", {})],
    ids=str,
)
SETTING = Setting(T=70, K=40, V=48, decay="model", states="both", op="rwkv7")
MOVES = 2.0
"""What values usually move when every input moves by one part of itself."""

KINDS = {
    "equal": dict(spread=0.0, alpha=0.9, decay="-1e-3"),
    "equal, all erased, no decay": dict(spread=0.0, alpha=1.0, decay="none"),
    "equal, turned round, no decay": dict(spread=0.0, alpha=1.9, decay="none"),
    "nearly equal": dict(spread=0.05, alpha=0.9, decay="-1e-3"),
    "nearly equal, all erased, no decay": dict(spread=0.05, alpha=1.0, decay="none"),
    "nearly equal, turned round, slow decay": dict(spread=0.05, alpha=1.9, decay="-1e-5"),
    "two in turn": dict(spread=0.0, alpha=1.0, decay="-1e-4", period=2),
}


def repeated(place, dtype, spread, alpha, decay, period=1):
    """The setting's tensors with κ̂ drawn about `period` directions."""
    dtype_name = str(dtype).removeprefix("torch.")
    made, arriving = place.make(SETTING, T=70 if place.device == "cuda" else 35, decay=decay, dtype=dtype_name)
    T = made["r"].shape[1]
    kappa = -made["a"].double().cpu()
    one_of = kappa[:, torch.arange(T) % period]
    kappa = F.normalize(one_of + spread * kappa, dim=-1)
    made |= {"a": (-kappa).to(made["a"]), "b": (alpha * kappa).to(made["b"])}
    return made, arriving


@everywhere("kind", *KINDS, interpreted=("equal", "equal, turned round, no decay", "two in turn"))
@FORMS
def test_repeated_tokens(place, form, more, kind):
    for dtype in place.dtypes:
        made, arriving = repeated(place, dtype, **KINDS[kind])
        found = place.run(made, arriving, form, "rwkv7", **more)
        expected = true_values(made, arriving, op="rwkv7")
        for name, true in expected.values.items():
            error = (found[name].double() - true).norm() / true.norm()
            most = budget(expected.op, dtype, name)
            if dtype == torch.float16:
                most *= max(1.0, expected.units[name].norm() / true.norm() / MOVES)
            assert error <= most, (dtype, name, error, most)


@pytest.mark.parametrize("alpha", [0.9, 1.0, 1.9])
@pytest.mark.parametrize("C", [16, 64])
def test_inverse_keeps_the_digits_that_the_product_form_loses(C, alpha):
    """The same A_ab in float32: recursive blocks keep all but the last digit, (I + A)(I + A^2)(I + A^4)… keeps none."""
    lower = torch.ones(C, C, dtype=torch.float64).tril(-1)
    A = (-alpha * lower * torch.exp(-1e-3 * lower.cumsum(0).tril(-1))).float()
    true = torch.linalg.solve_triangular(torch.eye(C) - A.double(), torch.eye(C).double(), upper=False)

    product, power = torch.eye(C) + A, A
    for _ in range(int(math.log2(C)) - 1):
        power = power @ power
        product = product @ (torch.eye(C) + power)

    def error(x):
        return ((x - true).norm() / true.norm()).item()

    assert error(chunk_torch.inverse(A)) < 3e-6
    assert error(product) > (10 if C == 64 else 1e-6)
