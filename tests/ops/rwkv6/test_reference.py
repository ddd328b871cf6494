"""RWKV6's reference by hand, and the steps that it yields; tests/ops/test_reference.py has what all operators share."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.ops.rwkv6 import reference
from flakit.ops.rwkv6.reference import BackwardStep, ForwardStep, steps
from tests.ops.recurrences import Recurrence

RECURRENCE = Recurrence("rwkv6")


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
    decay=st.sampled_from(RECURRENCE.decays),
    seed=st.integers(0, 99),
)
def test_steps_tell_the_whole_story(T, K, V, decay, seed):
    args, do, dstate = RECURRENCE.arguments(T=T, K=K, V=V, decay=decay, seed=seed)
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
