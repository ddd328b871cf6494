"""`torch.set_default_device`: what makes its own tensors says where. "meta" stands for every other device: what comes
from it has no numbers, and mixed with what lies on the CPU it raises."""

import pytest
import torch

import flakit
from flakit import panels
from flakit.cases.registry import CASES
from flakit.models import MIXERS, Copying, Delay, LanguageModel, Permutations, Recall, accuracy, mean_loss, train
from flakit.numerics.operators import OPERATORS

PANELS = [name for name in panels.__all__ if name not in ("audit", "case", "compare", "headroom", "sketch")]
QUICK = ("masking", "nan_guard", "clamping", "inverse", "strided_offsets")


@pytest.fixture(autouse=True)
def elsewhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_compute_where_their_inputs_are(op):
    made = flakit.inputs(op, T=40, K=16, V=16, device="cpu")
    for call in OPERATORS[op].forms.values():
        for backend in ("torch", "reference"):
            leaves = {name: x.clone().requires_grad_() for name, x in OPERATORS[op].leaves(made).items()}
            o = call(**OPERATORS[op].arguments(leaves, made), backend=backend).o
            assert all(x.device.type == "cpu" for x in (o, *torch.autograd.grad(o.sum(), list(leaves.values()))))


def test_headroom_of_decays_on_the_cpu():
    w = -torch.rand(1, 40, 2, 8, device="cpu")
    assert flakit.headroom(w).margins and flakit.headroom(w, cu_seqlens=[0, 10, 40]).margins
    assert panels.headroom(w).text


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in CASES])
def test_cases(name):
    assert CASES[name].reproduce()
    panel = panels.case(name)
    assert panel.text and panel.png


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.full) if x in ("kernel_trace", "lost_digits") else x for x in PANELS]
)
def test_panels(name):
    assert getattr(panels, name)().png


def test_kernels_of_ones_own():
    assert panels.compare(flakit.chunk_rwkv6, T=16, K=16).png
    panel = panels.audit(flakit.chunk_rwkv6, only=["truth", "gradients"])
    panel.run.wait(120)
    assert panel.audit.passed and panel.png


@pytest.mark.full
@pytest.mark.parametrize("name", panels.sketches.SKETCHES)
def test_sketches(name):
    assert panels.sketch(name).text


@pytest.mark.parametrize("task", [Copying, Delay, Permutations, Recall])
def test_models_train_where_they_are(task):
    with torch.device("cpu"):
        model = LanguageModel(vocab=64, dim=32, layers=1, mixer=next(iter(MIXERS)), head_size=16)
    run = train(model, task().batch, steps=1, size=2, T=16, progress=False)
    mean_loss(model, task().batch, 16, size=2, batches=1)
    assert not run.skipped and accuracy(model, task().batch, 16, size=2).device.type == "cpu"


def test_a_trace():
    with flakit.trace() as t:
        torch.zeros(3, device="cpu").log().exp().sub(1).log().sum()
    assert "NaN" in str(t)
