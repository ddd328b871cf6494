"""Offsets that are none, and rows behind the last one, where heads take the fused kernels: test_packed_triton.py's heads
are too small for these."""

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from tests.ops.places import INTERPRETED
from tests.ops.test_packed_triton import INVALID, PADDED, padding_of, results

pytestmark = pytest.mark.interpret
OPS = pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
SIZES = dict(H=1, K=48, V=40)
"""Heads of 33 to 64 channels take the fused kernels."""


def made(op, offsets):
    x = inputs(op, B=1, T=29, **SIZES)
    state = inputs(op, B=len(offsets) - 1, T=1, initial_state=True, **SIZES)["initial_state"]
    return x | {"initial_state": state, "cu_seqlens": torch.tensor(offsets)}


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
    end = PADDED[-1]
    x = made(op, PADDED)
    for name in OPERATORS[op].sequences:
        x[name][:, end:] = torch.nan
    found = results(INTERPRETED, op, "chunk", x)
    for name, rows in padding_of(op, found, end).items():
        assert not rows.any(), name
    assert all(y.isfinite().all() for y in found.values())


@OPS
@pytest.mark.parametrize("kind", list(INVALID))
def test_invalid_offsets_give_nan_everywhere(op, kind, only_fused, monkeypatch, poisoned_memory):
    monkeypatch.setattr("flakit.ops.common.validation.looks_at_values", lambda x: False)
    for name, y in results(INTERPRETED, op, "chunk", made(op, INVALID[kind])).items():
        assert y.isnan().all(), name
