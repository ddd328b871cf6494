"""The reference recurrence and its hand-written backward, in float64: against autograd, finite differences, itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from flakit.ops.gsa import chunk_torch, reference
from flakit.ops.gsa.reference import BackwardStep, ForwardStep, steps

TENSORS = ("q", "k", "v", "s", "g")
NAMES = (*TENSORS, "hk", "hv")
DECAYS = ["gsa", "rwkv6-wide", "none", -1e-4, -8.0, -50.0, "spikes", "inf-spikes", "forget"]


def arguments(T=7, K=5, V=3, M=4, G=1, decay="rwkv6-wide", seed=0, B=2, dtype=torch.float64):
    made = inputs(
        "gsa", B=B, T=T, H=2, HQ=2 * G, K=K, V=V, M=M, decay=decay, dtype=dtype, initial_state=True, seed=seed
    )
    do, dstate = cotangents("gsa", made, dfinal_state=True)
    return (*(made[name] for name in TENSORS), 0.3, made["initial_state"]), do, dstate


def flat(outputs):
    """(x, …, (hk, hv)) -> (x, …, hk, hv)."""
    return (*outputs[:-1], *outputs[-1])


def by_autograd(args, do, dstate):
    leaves = [x.clone().requires_grad_() for x in (*args[:5], *args[6])]
    outputs = flat(reference.forward(*leaves[:5], args[5], tuple(leaves[5:])))
    return torch.autograd.grad(outputs, leaves, (do, *dstate))


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_backward_is_autograd_of_forward(decay, T, G):
    args, do, dstate = arguments(T=T, G=G, decay=decay)
    found = flat(reference.backward(*args, do, dstate))
    for name, got, expected in zip(NAMES, found, by_autograd(args, do, dstate), strict=True):
        assert got.isfinite().all()
        assert_close(got, expected, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"d{name}: {text}")


def test_backward_without_states():
    (*rows, scale, _), do, dstate = arguments()
    zeros = tuple(torch.zeros_like(x) for x in dstate)
    for got, expected in zip(
        flat(reference.backward(*rows, scale, None, do, None)),
        flat(reference.backward(*rows, scale, zeros, do, zeros)),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_forward_and_backward_against_finite_differences():
    (*rows, scale, state), _, _ = arguments(T=3, K=3, V=2, M=2, G=2, B=1)

    class HandWritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *x):
            ctx.save_for_backward(*x)
            return flat(reference.forward(*x[:5], scale, x[5:]))

        @staticmethod
        def backward(ctx, do, dhk, dhv):
            x = ctx.saved_tensors
            return flat(reference.backward(*x[:5], scale, x[5:], do, (dhk, dhv)))

    leaves = [x.clone().requires_grad_() for x in (*rows, *state)]
    assert torch.autograd.gradcheck(HandWritten.apply, leaves)


def test_a_positive_gate_is_computed_not_refused():
    args, do, dstate = arguments()
    grown = (*args[:4], -args[4], *args[5:])
    for got, expected in zip(flat(reference.backward(*grown, do, dstate)), by_autograd(grown, do, dstate), strict=True):
        assert_close(got, expected)


def test_scale_defaults_to_root_of_k():
    (*rows, _, state), _, _ = arguments()
    assert torch.equal(reference.forward(*rows, None, state)[0], reference.forward(*rows, 5**-0.5, state)[0])


def test_two_tokens_by_hand():
    # One channel of each kind, two slots. Slots fade to a half, the second token writes into the second slot alone.
    half = torch.tensor(0.5).double().log().item()
    q, k, v = (torch.tensor([x]).double()[:, :, None, None] for x in ([1, 1], [2, 3], [5, 7]))
    s = torch.tensor([[[1, 0], [0, 1]]]).double()[:, :, None]
    g = torch.full((1, 2, 1, 2), half).double()
    o, (hk, hv) = reference.forward(q, k, v, s, g, 1.0)
    # hk: (2, 0), then (1, 3); hv: (5, 0), then (2.5, 7)
    first, second = torch.tensor([2.0, 0.0]).double().softmax(0), torch.tensor([1.0, 3.0]).double().softmax(0)
    assert_close(o.flatten(), torch.stack((first[0] * 5, second[0] * 2.5 + second[1] * 7)))
    assert_close(hk.flatten(), torch.tensor([1.0, 3.0]).double())
    assert_close(hv.flatten(), torch.tensor([2.5, 7.0]).double())


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 9),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    M=st.integers(1, 4),
    G=st.integers(1, 3),
    decay=st.sampled_from(DECAYS),
    seed=st.integers(0, 99),
)
def test_steps_tell_the_whole_story(T, K, V, M, G, decay, seed):
    args, do, dstate = arguments(T, K, V, M, G, decay, seed)
    told = list(steps(*args, do=do, dfinal_state=dstate))
    there, back = told[:T], told[T:]
    assert [type(x) for x in told] == [ForwardStep] * T + [BackwardStep] * T
    assert [x.t for x in told] == [*range(T), *reversed(range(T))]

    o, (hk_last, hv_last) = reference.forward(*args)
    assert torch.equal(torch.stack([x.o for x in there], 1), o)
    assert torch.equal(there[-1].hk, hk_last) and torch.equal(there[-1].hv, hv_last)
    hk, hv = args[6]
    for x in there:
        assert torch.equal(x.hk_before, hk) and torch.equal(x.hv_before, hv)
        assert_close(x.hk, torch.einsum("bhm,bhkm->bhkm", x.decay, x.hk_before) + x.ks)
        assert_close(x.hv, torch.einsum("bhm,bhmv->bhmv", x.decay, x.hv_before) + x.sv)
        owner_hk, owner_hv = (h.repeat_interleave(G, 1) for h in (x.hk, x.hv))
        assert_close(x.scores, args[5] * torch.einsum("bhk,bhkm->bhm", x.q, owner_hk))
        assert_close(x.p, x.scores.softmax(-1))
        assert_close(x.o, torch.einsum("bhm,bhmv->bhv", x.p, owner_hv))
        hk, hv = x.hk, x.hv

    grads = dict(zip(NAMES, flat(reference.backward(*args, do, dstate)), strict=True))
    for name in TENSORS:
        assert torch.equal(torch.stack([getattr(x, f"d{name}") for x in reversed(back)], 1), grads[name])
    arriving = dstate
    for x in back:
        f = there[x.t]
        assert_close(x.dhk - arriving[0], args[5] * written_by_queries(f.q, x.dscores, G))
        assert_close(x.dhv - arriving[1], written_by_queries(f.p, x.do, G))
        assert_close(x.dscores.sum(-1), torch.zeros_like(x.dscores[..., 0]), atol=1e-12, rtol=0)
        arriving = x.dhk_before, x.dhv_before
    assert torch.equal(arriving[0], grads["hk"]) and torch.equal(arriving[1], grads["hv"])


def written_by_queries(left, right, G):
    return torch.einsum("bhgx,bhgy->bhxy", left.unflatten(1, (-1, G)), right.unflatten(1, (-1, G)))


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 40),
    G=st.integers(1, 2),
    decay=st.sampled_from(DECAYS),
    C=st.sampled_from([1, 2, 8, 32]),
    seed=st.integers(0, 99),
)
def test_chunked_form_is_the_recurrence(T, G, decay, C, seed):
    args, do, dstate = arguments(T=T, G=G, decay=decay, seed=seed)
    chunked = flat(chunk_torch.forward(*args, C)) + flat(chunk_torch.backward(*args, do, dstate, C))
    walked = flat(reference.forward(*args)) + flat(reference.backward(*args, do, dstate))
    for got, expected in zip(chunked, walked, strict=True):
        assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_half_precision_inputs_are_computed_in_float32():
    args, do, dstate = arguments(dtype=torch.bfloat16)
    assert {x.dtype for x in flat(reference.forward(*args))} == {torch.float32}
    assert {x.dtype for x in flat(reference.backward(*args, do, dstate))} == {torch.float32}
