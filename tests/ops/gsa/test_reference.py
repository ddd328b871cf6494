"""GSA's reference by hand, and the steps that it yields; tests/ops/test_reference.py has what all operators share."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.ops.gsa import reference
from flakit.ops.gsa.reference import BackwardStep, ForwardStep, steps
from tests.ops.recurrences import Recurrence, flat

RECURRENCE = Recurrence("gsa")


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
    decay=st.sampled_from(RECURRENCE.decays),
    seed=st.integers(0, 99),
)
def test_steps_tell_the_whole_story(T, K, V, M, G, decay, seed):
    args, do, dstate = RECURRENCE.arguments(T=T, K=K, V=V, M=M, G=G, decay=decay, seed=seed)
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

    grads = dict(zip((*RECURRENCE.tensors, "hk", "hv"), flat(reference.backward(*args, do, dstate)), strict=True))
    for name in RECURRENCE.tensors:
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
