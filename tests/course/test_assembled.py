"""The operator made of a chunk's two functions: those of the solutions, held to the reference, and where they end."""

from functools import partial

import pytest
import torch

import flakit
from flakit.course import mine
from flakit.course.assembled import assembled
from flakit.numerics.evaluate import cotangents


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_MINE", str(tmp_path))
    return assembled(*mine.take("chunk_forward", "chunk_backward"))


@pytest.mark.parametrize("T", [1, 64, 150])
def test_it_is_the_operator(theirs, T):
    x = flakit.inputs("rwkv6", B=2, T=T, H=2, K=5, V=3, decay="gla", initial_state=True)
    do, dfinal = cotangents("rwkv6", x, dfinal_state=True)
    found = []
    for operator in (theirs, partial(flakit.chunk_rwkv6, backend="torch")):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
        o, state = operator(**leaves, scale=0.3, output_final_state=True)
        found.append([o, state, *torch.autograd.grad((o, state), tuple(leaves.values()), (do, dfinal))])
    for yours, right in zip(*found, strict=True):
        torch.testing.assert_close(yours, right, rtol=1e-4, atol=1e-5)


def test_formats_and_what_is_left_out(theirs):
    x = flakit.inputs("rwkv6", T=8, H=1, K=4, V=4, dtype=torch.bfloat16)
    o, state = theirs(**x)
    assert o.dtype == torch.bfloat16 and state is None
    _, state = theirs(**x, output_final_state=True)
    assert state.dtype == torch.float32 and state.shape == (1, 1, 4, 4)


@pytest.mark.full
def test_the_kernel_of_the_solutions_passes_every_probe_and_the_one_before_it_does_not(theirs, tmp_path):
    whole = mine.take("chunk_rwkv6")
    others = {v.probe.name: v.words for v in flakit.audit(whole, like="rwkv6").verdicts if v.verdict != "pass"}
    for probe in ("other-device", "ranks"):  # for two GPUs, and for functions that take `group`
        others.pop(probe, None)
    assert set(others.values()) == {"its signature does not name cu_seqlens"}, others
    broken = flakit.audit(theirs, like="rwkv6", only=["decay-onset", "spike", "inf-decay"], shrink=False)
    assert len(broken.failed) == 3
