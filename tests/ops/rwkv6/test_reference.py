"""The reference recurrence and its hand-written backward, in float64: against autograd, finite differences, itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from flakit.ops.rwkv6 import chunk_torch, reference
from flakit.ops.rwkv6.reference import BackwardStep, ForwardStep, steps

TENSORS = ("r", "k", "v", "w", "u", "initial_state")
DECAYS = ["rwkv6-init", "rwkv6-wide", "none", -1e-4, -8.0, -50.0, "spikes", "inf-spikes", "forget"]


def arguments(T=7, K=5, V=3, decay="rwkv6-wide", seed=0, B=2, dtype=torch.float64):
    made = inputs(B=B, T=T, H=2, K=K, V=V, decay=decay, dtype=dtype, initial_state=True, seed=seed)
    do, dstate = cotangents("rwkv6", made, dfinal_state=True)
    r, k, v, w, u, state = (made[name] for name in TENSORS)
    return (r, k, v, w, u, 0.3, state), do, dstate


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
    (r, k, v, w, u, scale, _), do, dstate = arguments()
    zero = torch.zeros_like(dstate)
    for got, expected in zip(
        reference.backward(r, k, v, w, u, scale, None, do, None),
        reference.backward(r, k, v, w, u, scale, zero, do, zero),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_forward_and_backward_against_finite_differences():
    (r, k, v, w, u, scale, state), _, _ = arguments(T=3, K=3, V=2, B=1)

    class HandWritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *x):
            ctx.save_for_backward(*x)
            return reference.forward(*x[:5], scale, x[5])

        @staticmethod
        def backward(ctx, do, dstate):
            x = ctx.saved_tensors
            return reference.backward(*x[:5], scale, x[5], do, dstate)

    leaves = [x.clone().requires_grad_() for x in (r, k, v, w, u, state)]
    assert torch.autograd.gradcheck(HandWritten.apply, leaves)


def test_a_positive_decay_is_computed_not_refused():
    # The case `anchor` needs a state that grows.
    args, do, dstate = arguments()
    grown = (*args[:3], -args[3], *args[4:])
    for got, expected in zip(reference.backward(*grown, do, dstate), by_autograd(grown, do, dstate), strict=True):
        assert_close(got, expected)


def test_scale_defaults_to_root_of_k():
    (r, k, v, w, u, _, state), do, dstate = arguments()
    assert torch.equal(
        reference.forward(r, k, v, w, u, None, state)[0], reference.forward(r, k, v, w, u, 5**-0.5, state)[0]
    )


def test_two_tokens_by_hand():
    r, k, v = (torch.tensor([x]).double()[:, :, None, None] for x in ([2, 3], [5, 7], [11, 13]))
    w, u = torch.tensor([[0, math.log(0.5)]]).double()[:, :, None, None], torch.tensor([[4]]).double()
    o, state = reference.forward(r, k, v, w, u, 1, torch.full((1, 1, 1, 1), 10.0))
    # S_0 = 10; o_1 = 2 (10 + 4 * 55), S_1 = 10 + 55; o_2 = 3 (65 + 4 * 91), S_2 = 65 / 2 + 91
    assert_close(o.flatten(), torch.tensor([460.0, 1287.0]).double())
    assert_close(state.item(), 123.5)


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
    r, k, v, w, u, scale, initial_state = args
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
        assert_close(s.state, s.decay[..., None] * s.state_before + s.kv)
        assert_close(s.o, scale * torch.einsum("bhk,bhkv->bhv", s.r, s.read))
        state = s.state

    grads = dict(zip(("dr", "dk", "dv", "dw", "du", "dstate"), reference.backward(*args, do, dstate), strict=True))
    for name in ("dr", "dk", "dv", "dw"):
        assert torch.equal(torch.stack([getattr(s, name) for s in reversed(back)], 1), grads[name])
    assert_close(sum(s.du for s in back).sum(0), grads["du"])
    arriving = dstate
    for s in back:
        assert torch.equal(s.dstate, arriving)
        arriving = s.dstate_before
    assert torch.equal(arriving, grads["dstate"])


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 40), decay=st.sampled_from(DECAYS), C=st.sampled_from([1, 2, 8, 32]), seed=st.integers(0, 99))
def test_chunked_form_is_the_recurrence(T, decay, C, seed):
    args, do, dstate = arguments(T=T, decay=decay, seed=seed)
    chunked = chunk_torch.forward(*args, C) + chunk_torch.backward(*args, do, dstate, C)
    for got, expected in zip(chunked, reference.forward(*args) + reference.backward(*args, do, dstate), strict=True):
        assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_half_precision_inputs_are_computed_in_float32():
    args, do, dstate = arguments(dtype=torch.bfloat16)
    assert {x.dtype for x in reference.forward(*args)} == {torch.float32}
    assert {x.dtype for x in reference.backward(*args, do, dstate)} == {torch.float32}
