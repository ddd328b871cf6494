"""The gradient of w = -exp(x) where w is -inf: its law, what is lost and what is not, the cure, and the picture."""

import math

import pytest
import torch

from flakit.cases import gate_gradient as case
from flakit.cases.laws import Row
from flakit.models import LanguageModel, loss, rwkv6

LARGEST = {"float32": 89.0, "bfloat16": 89.0, "float16": 11.2}
"""An x just beyond the law."""


def shown(x=89.0, dtype="float32", gate="-exp", seed=0):
    return case.show(x=x, dtype=dtype, gate=gate, seed=seed)


@pytest.mark.parametrize("dtype", case.DTYPES)
@pytest.mark.parametrize("gate", case.GATES)
def test_law_says_where_the_gradient_is_lost(dtype, gate):
    for x in (-10.0, 5.0, LARGEST[dtype] - 1, LARGEST[dtype], 100.0):
        assert all(row.agrees for row in case.show(x=x, dtype=dtype, gate=gate).rows)
    assert (case.onset(dtype, gate) < math.inf) == (gate == "-exp")


WRONG_LAWS = {
    "where e^w is 0": lambda dtype: math.log(-math.log(2.0**-149)),
    "one limit for all dtypes": lambda dtype: case.law("float32"),
    "the square root of the largest": lambda dtype: case.law(dtype) / 2,
    "never": lambda dtype: math.inf,
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    rows = [Row("", math.nan, WRONG_LAWS[wrong](dtype), case.onset(dtype, "-exp")) for dtype in case.DTYPES]
    assert not all(row.agrees for row in rows)


@pytest.mark.parametrize("dtype", case.DTYPES)
def test_one_gradient_is_lost_behind_the_gate_and_none_before_it(dtype):
    found = shown(LARGEST[dtype], dtype)
    lost = torch.zeros(case.T, case.K, dtype=torch.bool)
    lost[case.TOKEN, case.CHANNEL] = True
    assert torch.equal(found.w.isinf(), lost) and torch.equal(found.dx.isnan(), lost)
    assert found.o.isfinite().all() and found.dw.isfinite().all()
    assert found.dw[lost].item() == found.true[lost].item() == 0
    budget = 50 * torch.finfo(case.DTYPES[dtype]).eps  # of sums of 24 tokens, some of which cancel
    assert (found.dx - found.true)[~lost].abs().max() <= budget * found.true.abs().max()


@pytest.mark.parametrize("dtype", case.DTYPES)
def test_log_decay_is_the_same_gate_with_the_limit_of_its_gradient(dtype):
    found, faulty = shown(LARGEST[dtype], dtype, "log_decay"), shown(LARGEST[dtype], dtype)
    assert torch.equal(found.w, faulty.w) and torch.equal(found.o, faulty.o) and torch.equal(found.dw, faulty.dw)
    assert torch.equal(found.dx, faulty.dx.nan_to_num(0.0))


def test_a_model_loses_most_of_its_gradients_and_not_its_loss(monkeypatch):
    """What the one NaN comes to: every weight below that gate, in a model of two layers."""
    tokens = torch.arange(22).view(2, 11) % 11

    def lost():
        model = LanguageModel(vocab=11, dim=32, layers=2, mixer="rwkv6", head_size=16)
        with torch.no_grad():
            model.blocks[1].time.w.bias[0] = 89.0
        made = loss(model(tokens), tokens.roll(-1, 1))
        made.backward()
        assert made.isfinite()
        return [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]

    assert lost() == []
    monkeypatch.setattr(rwkv6, "log_decay", case.GATES["-exp"])
    names = lost()
    assert "embedding.weight" in names and "blocks.1.time.w.bias" in names
    assert not any(name.startswith(("blocks.1.time.output", "head")) for name in names)
