"""The reference recurrence and its hand-written backward, in float64: against autograd, finite differences, itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from flakit.ops.rwkv7 import chunk_torch, reference
from flakit.ops.rwkv7.reference import BackwardStep, ForwardStep, steps

TENSORS = ("r", "w", "k", "v", "a", "b", "initial_state")
DECAYS = ["rwkv7", "rwkv6-wide", "none", -1e-4, -8.0, -50.0, "spikes", "inf-spikes", "forget"]


def arguments(T=7, K=5, V=3, decay="rwkv7", seed=0, B=2, dtype=torch.float64):
    made = inputs("rwkv7", B=B, T=T, H=2, K=K, V=V, decay=decay, dtype=dtype, initial_state=True, seed=seed)
    do, dstate = cotangents("rwkv7", made, dfinal_state=True)
    *rows, state = (made[name] for name in TENSORS)
    return (*rows, 0.3, state), do, dstate


def by_autograd(args, do, dstate):
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]
    outputs = reference.forward(*leaves)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return torch.autograd.grad(outputs, tensors, (do, dstate))


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_backward_is_autograd_of_forward(decay, T):
    args, do, dstate = arguments(T=T, decay=decay)
    for name, got, expected in zip(
        TENSORS, reference.backward(*args, do, dstate), by_autograd(args, do, dstate), strict=True
    ):
        assert got.isfinite().all()
        assert_close(got, expected, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"d{name}: {text}")


def test_backward_without_states():
    (*rows, scale, _), do, dstate = arguments()
    zero = torch.zeros_like(dstate)
    for got, expected in zip(
        reference.backward(*rows, scale, None, do, None),
        reference.backward(*rows, scale, zero, do, zero),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_forward_and_backward_against_finite_differences():
    (*rows, scale, state), _, _ = arguments(T=3, K=3, V=2, B=1)

    class HandWritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *x):
            ctx.save_for_backward(*x)
            return reference.forward(*x[:6], scale, x[6])

        @staticmethod
        def backward(ctx, do, dstate):
            x = ctx.saved_tensors
            return reference.backward(*x[:6], scale, x[6], do, dstate)

    leaves = [x.clone().requires_grad_() for x in (*rows, state)]
    assert torch.autograd.gradcheck(HandWritten.apply, leaves)


def test_a_growing_state_is_computed_not_refused():
    # |1 + a·b| > 1: a lesson about eigenvalues needs it.
    (*rows, b, scale, state), do, dstate = arguments()
    grown = (*rows, -3 * b, scale, state)
    for got, expected in zip(reference.backward(*grown, do, dstate), by_autograd(grown, do, dstate), strict=True):
        assert_close(got, expected)


def test_scale_defaults_to_one():
    (*rows, _, state), _, _ = arguments()
    assert torch.equal(reference.forward(*rows, None, state)[0], reference.forward(*rows, 1.0, state)[0])


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
    decay=st.sampled_from(DECAYS),
    seed=st.integers(0, 99),
)
def test_steps_tell_the_whole_story(T, K, V, decay, seed):
    args, do, dstate = arguments(T, K, V, decay, seed)
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
    for name, grad in zip(TENSORS, grads, strict=False):
        assert torch.equal(torch.stack([getattr(s, f"d{name}") for s in reversed(back)], 1), grad)
    arriving = dstate
    for s, f in zip(back, reversed(there), strict=True):
        assert_close(s.dstate, arriving + scale * torch.einsum("bhk,bhv->bhkv", f.r, s.do))
        arriving = s.dstate_before
    assert torch.equal(arriving, dinitial_state)


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 40), decay=st.sampled_from(DECAYS), C=st.sampled_from([1, 2, 8, 32]), seed=st.integers(0, 99))
def test_chunked_form_is_the_recurrence(T, decay, C, seed):
    args, do, dstate = arguments(T=T, decay=decay, seed=seed)
    chunked = chunk_torch.forward(*args, C) + chunk_torch.backward(*args, do, dstate, C)
    for got, expected in zip(chunked, reference.forward(*args) + reference.backward(*args, do, dstate), strict=True):
        assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("C", [1, 2, 16, 64])
def test_inverse_in_blocks(C):
    A = torch.randn(3, C, C, dtype=torch.float64, generator=torch.Generator().manual_seed(C)).tril(-1) / C**0.5
    assert_close(chunk_torch.inverse(A), torch.linalg.inv(torch.eye(C, dtype=A.dtype) - A))


def test_half_precision_inputs_are_computed_in_float32():
    args, do, dstate = arguments(dtype=torch.bfloat16)
    assert {x.dtype for x in reference.forward(*args)} == {torch.float32}
    assert {x.dtype for x in reference.backward(*args, do, dstate)} == {torch.float32}
