"""Offsets that are none, and rows behind the last one, in the fused kernels. Heads in test_packed_triton.py are too
small for these."""

import pytest
import torch

from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS

pytestmark = pytest.mark.interpret
OPS = pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
SIZES = dict(H=1, K=48, V=40)
"""Heads of 33 to 64 channels take the fused kernels."""
T = 29


def results(op, offsets, unread_from=T):
    """Every output and gradient by name; an initial state goes in, a gradient arrives at the final one. unread_from:
    the row from which on all sequences are NaN."""
    x = inputs(op, B=1, T=T, **SIZES)
    for name in OPERATORS[op].sequences:
        x[name][:, unread_from:] = torch.nan
    x["initial_state"] = inputs(op, B=len(offsets) - 1, T=1, initial_state=True, **SIZES)["initial_state"]
    x["cu_seqlens"] = torch.tensor(offsets)
    return evaluate(op, x, form="chunk", backend="triton", dfinal_state=True)


@pytest.fixture
def only_fused(op, monkeypatch):
    """The kernels of other heads cannot be launched."""
    from flakit.ops.rwkv6 import chunk_triton as rwkv6
    from flakit.ops.rwkv7 import chunk_triton as rwkv7

    module = {"rwkv6": rwkv6, "rwkv7": rwkv7}[op]
    for name in ("output_kernel", "key_grads_kernel"):
        monkeypatch.setattr(module, name, None)


@OPS
def test_padding_is_not_read_and_gives_zeros(op, only_fused, poisoned_memory):
    end = 20
    found = results(op, [0, 9, 9, end], unread_from=end)
    for name in ("o", *(f"d{name}" for name in OPERATORS[op].sequences)):
        assert found[name][:, :end].any() and not found[name][:, end:].any(), name
    assert all(y.isfinite().all() for y in found.values())


@OPS
@pytest.mark.parametrize(
    "offsets",
    [[0, 20, 9, T], [3, 9, 20, T], [-5, 9, 20, T], [0, 9, 20, 61], [0, 2**31 + 7, 2**33, 2**34]],
    ids=["decreasing", "not from 0", "negative", "beyond T", "far beyond T"],
)
def test_invalid_offsets_give_nan_everywhere(op, offsets, only_fused, monkeypatch, poisoned_memory):
    monkeypatch.setattr("flakit.ops.common.validation.looks_at_values", lambda x: False)
    found = results(op, offsets)
    assert {"o", "final_state", "dinitial_state", "dk"} <= found.keys()
    for name, y in found.items():
        assert y.isnan().all(), name
