"""RWKV7's reference by hand, and the steps that it yields; tests/ops/test_reference.py has what all operators share."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.ops.rwkv7 import chunk_torch, reference
from flakit.ops.rwkv7.reference import BackwardStep, ForwardStep, steps
from tests.ops.recurrences import Recurrence

RECURRENCE = Recurrence("rwkv7")


def test_two_tokens_by_hand():
    def row(*x):
        return torch.tensor([x]).double()[:, :, None, None]

    r, k, v, a, b = row(2, 3), row(5, 7), row(11, 13), row(-1, 2), row(0.5, 0.25)
    o, state = reference.forward(r, row(0, math.log(0.5)), k, v, a, b, 1, torch.full((1, 1, 1, 1), 10.0))
    # a finds S_{t-1} before it decays. S_1 = 10 + 0.5 (-10) + 55 = 60; S_2 = 60 / 2 + 0.25 (2 * 60) + 91 = 151
    assert_close(o.flatten(), torch.tensor([2 * 60.0, 3 * 151.0]).double())
    assert_close(state.item(), 151.0)


def test_the_model_erases_what_stands_under_its_key():
    # a = -κ̂, b = κ̂, no decay: what the memory held under κ̂ is gone, and what it held beside it is not.
    kappa = torch.tensor([0.6, 0.8], dtype=torch.float64)
    beside = torch.tensor([-0.8, 0.6], dtype=torch.float64)
    state = kappa[:, None] * torch.tensor([[5.0, 7.0]]) + beside[:, None] * torch.tensor([[2.0, 3.0]])
    zero = torch.zeros(1, 1, 1, 2).double()
    _, after = reference.forward(
        zero, zero, zero, zero, -kappa[None, None, None], kappa[None, None, None], 1, state[None, None]
    )
    assert_close(kappa @ after[0, 0], torch.zeros(2).double())
    assert_close(beside @ after[0, 0], torch.tensor([2.0, 3.0]).double())


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 9),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    decay=st.sampled_from(RECURRENCE.decays),
    seed=st.integers(0, 99),
)
def test_steps_tell_the_whole_story(T, K, V, decay, seed):
    args, do, dstate = RECURRENCE.arguments(T=T, K=K, V=V, decay=decay, seed=seed)
    *_, scale, initial_state = args
    told = list(steps(*args, do=do, dfinal_state=dstate))
    there, back = told[:T], told[T:]
    assert [type(s) for s in told] == [ForwardStep] * T + [BackwardStep] * T
    assert [s.t for s in told] == [*range(T), *reversed(range(T))]

    o, final_state = reference.forward(*args)
    assert torch.equal(torch.stack([s.o for s in there], 1), o)
    assert torch.equal(there[-1].state, final_state)
    state = initial_state
    for s in there:
        assert torch.equal(s.state_before, state)
        assert_close(s.removed, torch.einsum("bhk,bhkv->bhv", s.a, s.state_before))
        assert_close(s.edit, torch.einsum("bhk,bhv->bhkv", s.b, s.removed))
        assert_close(s.kv, torch.einsum("bhk,bhv->bhkv", s.k, s.v))
        assert_close(s.state, s.decay[..., None] * s.state_before + s.edit + s.kv)
        assert_close(s.o, scale * torch.einsum("bhk,bhkv->bhv", s.r, s.state))
        state = s.state

    *grads, dinitial_state = reference.backward(*args, do, dstate)
    for name, grad in zip(RECURRENCE.tensors, grads, strict=True):
        assert torch.equal(torch.stack([getattr(s, f"d{name}") for s in reversed(back)], 1), grad)
    arriving = dstate
    for s, f in zip(back, reversed(there), strict=True):
        assert_close(s.dstate, arriving + scale * torch.einsum("bhk,bhv->bhkv", f.r, s.do))
        arriving = s.dstate_before
    assert torch.equal(arriving, dinitial_state)


@pytest.mark.parametrize("C", [1, 2, 16, 64])
def test_inverse_in_blocks(C):
    A = torch.randn(3, C, C, dtype=torch.float64, generator=torch.Generator().manual_seed(C)).tril(-1) / C**0.5
    assert_close(chunk_torch.inverse(A), torch.linalg.inv(torch.eye(C, dtype=A.dtype) - A))
