"""Packed sequences in the kernels' view: where pieces lie, padding behind the last offset, invalid offsets."""

from itertools import accumulate

import pytest
import torch

from flakit import checked
from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS, operator

PLACES = [
    pytest.param(("cpu", "torch"), id="torch"),
    pytest.param(("cpu", "reference"), id="reference"),
    pytest.param(("cpu", "triton"), id="interpreted", marks=pytest.mark.interpret),
    pytest.param(("cuda", "triton"), id="gpu", marks=pytest.mark.gpu),
]
KERNELS = [x for x in PLACES if x.id in ("interpreted", "gpu")]
OPS = pytest.mark.parametrize("op", list(OPERATORS))
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
INVALID = {
    "decreasing": [0, 30, 20, 45],
    "not from 0": [3, 20, 30, 45],
    "negative": [0, -5, 20, 45],
    "beyond T": [0, 20, 30, 90],
    "far beyond T": [0, 2**31 + 7, 2**33, 2**34],
}


def results(op, form, x, device, backend, state=True):
    """Every output and gradient of a call with an initial state and gradients arriving everywhere."""
    op = operator(op)
    x = {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    leaves = {name: y.detach().clone().requires_grad_() for name, y in op.leaves(x | {"cu_seqlens": None}).items()}
    run = getattr(op, form)
    o, final = run(**op.arguments(leaves, x), backend=backend, output_final_state=state)
    parts = op.parts(final) if state else ()
    outputs = (o, *parts)
    grads = torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(y) for y in outputs])
    return dict(zip((*op.outputs[: len(outputs)], *(f"d{name}" for name in leaves)), (*outputs, *grads), strict=True))


def padded(op, offsets, T=45, dtype=torch.float32, group=1, **more):
    sizes = dict(M=16, HQ=2 * group) if op == "gsa" else {}
    x = inputs(op, B=1, T=T, H=2, K=16, V=24, dtype=dtype, **sizes, **more)
    state = inputs(op, B=len(offsets) - 1, T=1, H=2, K=16, V=24, dtype=dtype, initial_state=True, **sizes)
    return x | {"initial_state": state["initial_state"], "cu_seqlens": torch.tensor(offsets)}
