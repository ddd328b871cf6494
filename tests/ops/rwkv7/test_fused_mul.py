"""`fused_mul_recurrent_rwkv7`: a = -kk, b = kk * a with the product in float32, and a gradient for everything."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flakit.numerics.operators import OPERATORS
from flakit.ops.rwkv7 import fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7
from tests.ops.checking import budget, true_values
from tests.ops.places import PLACES, TORCH
from tests.ops.settings import Setting

EVERYWHERE = pytest.mark.parametrize("place", PLACES)
SETTING = Setting(T=37, K=24, V=40, decay="model", states="both", op="rwkv7")
NAMES = ("r", "w", "k", "v", "kk", "a", "initial_state")


def given(place, dtype):
    """kk of length one and a in (0, 1), both rounded to dtype; the rest as the model has it."""
    made, arriving = place.make(SETTING, dtype=dtype)
    kk = -made.pop("a")
    made.pop("b")
    alpha = torch.rand(kk.shape, generator=torch.Generator().manual_seed(0)).to(kk)
    return made | {"kk": kk, "a": alpha}, arriving


def true_gradients(made, arriving):
    """From the chain rule in float64: b = kk a, so da = kk db, and dkk = a db - da."""
    kk, alpha = made["kk"].double(), made["a"].double()
    exact = {name: x for name, x in made.items() if name not in ("kk", "a")} | {"a": -kk, "b": kk * alpha}
    values = true_values(exact, arriving, op="rwkv7").values
    da, db = values.pop("da"), values.pop("db")
    return values | {"da": kk * db, "dkk": alpha * db - da}


@EVERYWHERE
def test_forward_and_every_gradient(place):
    for dtype in place.dtypes:
        made, (do, dstate) = given(place, str(dtype).removeprefix("torch."))
        leaves = {name: made[name].clone().requires_grad_() for name in NAMES}
        o, state = fused_mul_recurrent_rwkv7(**leaves, output_final_state=True, backend=place.backend)
        grads = torch.autograd.grad((o, state), tuple(leaves.values()), (do, dstate))
        found = {"o": o, "final_state": state} | {f"d{name}": x for name, x in zip(NAMES, grads, strict=True)}
        for name, true in true_gradients(made, (do, dstate)).items():
            error = (found[name].double() - true).norm() / true.norm()
            assert error <= budget(OPERATORS["rwkv7"], dtype, name), (dtype, name, error)
            assert name in ("o", "final_state") or found[name].dtype == made[name[1:]].dtype


def test_a_product_rounded_to_bfloat16_would_cost_digits():
    made, arriving = given(TORCH, "bfloat16")
    true = true_gradients(made, arriving)["final_state"]

    def error(b):
        rest = {name: made[name] for name in ("r", "w", "k", "v", "initial_state")}
        state = fused_recurrent_rwkv7(**rest, a=-made["kk"], b=b, output_final_state=True).final_state
        return ((state.double() - true).norm() / true.norm()).item()

    assert error(made["kk"].float() * made["a"].float()) < 1e-6
    assert error(made["kk"] * made["a"]) > 1e-4


def test_float64():
    made, (do, dstate) = given(TORCH, "float64")
    leaves = {name: made[name].clone().requires_grad_() for name in NAMES}
    out = fused_mul_recurrent_rwkv7(**leaves, output_final_state=True)
    grads = torch.autograd.grad(tuple(out), tuple(leaves.values()), (do, dstate))
    true = true_gradients(made, (do, dstate))
    assert_close(out.o, true["o"])
    for name, grad in zip(NAMES, grads, strict=True):
        assert_close(grad, true[f"d{name}"])


def test_autocast_and_compile():
    made, _ = given(replace(TORCH, T=9), "float32")
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_mul_recurrent_rwkv7(**made).o.dtype == torch.bfloat16
    compiled = torch.compile(fused_mul_recurrent_rwkv7, fullgraph=True, backend="aot_eager")
    assert_close(compiled(**made).o, fused_mul_recurrent_rwkv7(**made).o)
