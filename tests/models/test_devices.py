"""The models on a GPU and under autocast: logits and gradients as in float32 on a CPU, and a loss that falls."""

import copy
from functools import cache

import pytest
import torch

from flakit.models import MIXERS, LanguageModel, loss, standard_library, train

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
"""The relative error of one rounding."""
BUDGET = {"logits": 2, "gradient": 6, "mixers": 20}
"""How many of them the L2 error may be: about 2.5 times the worst mixer's in bfloat16 on a CPU, since kernels round
tiles of their own. The logits are rounded last of all, once."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CORPUS = standard_library(20)


@cache
def trained(mixer):
    """A model whose weights have left where they began: the published ones make every layer silent."""
    options = {"slots": 32} if mixer == "gsa" else {}
    model = LanguageModel(CORPUS.vocab, dim=64, layers=2, mixer=mixer, head_size=32, **options)
    train(model, CORPUS.batch, steps=20, size=4, T=64, lr=1e-2, progress=False)
    return model


def computed(mixer, device, dtype):
    """Logits, the gradient of everything and that of the mixers alone: each one vector, in float64 on the CPU."""
    model = copy.deepcopy(trained(mixer)).to(device)
    x, y = CORPUS.batch(2, 100, torch.Generator().manual_seed(5))
    model.zero_grad()
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        logits = model(x.to(device))
    loss(logits, y.to(device)).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(p.dtype == torch.float32 for p in grads.values())
    mixers = [g for name, g in grads.items() if ".time." in name]
    parts = {"logits": [logits], "gradient": grads.values(), "mixers": mixers}
    return {name: torch.cat([x.detach().double().cpu().flatten() for x in every]) for name, every in parts.items()}


def roundings(mixer, device, dtype):
    """The L2 errors against float32 on a CPU, relative, in roundings."""
    found, truth = computed(mixer, device, dtype), computed(mixer, "cpu", torch.float32)
    return {name: ((found[name] - y).norm() / y.norm()).item() / ROUNDING[dtype] for name, y in truth.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_autocast_rounds_and_does_nothing_else(mixer, device, record_property):
    found = roundings(mixer, device, torch.bfloat16)
    record_property("roundings", {name: round(x, 2) for name, x in found.items()})
    assert all(x < BUDGET[name] for name, x in found.items()), found
    assert all(x > 0.1 for x in found.values()), found  # it was on


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_gpu_computes_the_same_in_float32(mixer, record_property):
    found = roundings(mixer, "cuda", torch.float32)
    record_property("roundings", {name: round(x, 1) for name, x in found.items()})
    assert all(x < 500 for x in found.values()), found  # sums in another order, and what follows; TF32 starts at 8192


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_training_under_autocast_lowers_the_loss(mixer, device):
    model = LanguageModel(CORPUS.vocab, dim=32, layers=2, mixer=mixer, head_size=16).to(device)
    how = {"size": 4, "T": 64, "lr": 1e-2, "progress": False}
    run = train(model, CORPUS.batch, steps=20, autocast=torch.bfloat16, **how)
    assert run.skipped == [] and len(run.losses) == 20
    assert run.losses[0] > 5 and sum(run.losses[-3:]) / 3 < 3.8
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
