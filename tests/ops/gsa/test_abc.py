"""GSA without a gate is ABC: every slot a mean over its sequence so far, weighted by e^s. Against that definition."""

import pytest
import torch
from torch.testing import assert_close

from flakit.numerics.inputs import inputs
from flakit.ops.gsa import chunk_gsa, fused_recurrent_gsa
from tests.ops.places import PLACES

EVERYWHERE = pytest.mark.parametrize("place", PLACES)
FORMS = pytest.mark.parametrize("op", [chunk_gsa, fused_recurrent_gsa])
TENSORS = ("q", "k", "v", "s")


def abc(q, k, v, s):
    """The definition, with every weight at once: slot m at t holds sum_j softmax_{j<=t}(s_jm) k_j, and alike v."""
    T, G = s.shape[1], q.shape[2] // s.shape[2]
    weight = s[:, None].expand(-1, T, -1, -1, -1).clone()  # [B, t, j, H, M]
    later = torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1)[None, :, :, None, None]
    weight = weight.masked_fill(later, -torch.inf).softmax(2)
    hk, hv = (torch.einsum("btjhm,bjhd->bthmd", weight, x).repeat_interleave(G, 2) for x in (k, v))
    p = (q.shape[-1] ** -0.5 * torch.einsum("bthk,bthmk->bthm", q, hk)).softmax(-1)
    return torch.einsum("bthm,bthmv->bthv", p, hv)


def problem(place, T, dtype, spread=1.0, seed=0):
    made = inputs("gsa", B=1, T=T, H=2, HQ=4, K=24, V=16, M=20, dtype=dtype, device=place.device, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    made["s"] = (spread * torch.randn(made["s"].shape, generator=noise)).to(dtype).to(place.device)
    do = torch.randn(1, T, 4, 16, generator=noise).to(dtype).to(place.device)
    return {name: made[name] for name in TENSORS}, do


def run(call, made, do, **more):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in made.items()}
    o = call(**leaves, **more)
    o = getattr(o, "o", o)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)]


def errors(got, expected):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, expected, strict=True)]


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("spread", [1.0, 20.0])
@pytest.mark.parametrize("T", [1, 21, 70])
def test_definition(place, op, T, spread):
    made, do = problem(place, T, torch.float32, spread)
    truth = run(abc, {name: x.double() for name, x in made.items()}, do.double())
    found = run(op, made, do, backend=place.backend)
    if T == 1:  # one token is all that a slot can hold: o is v, and neither q nor k nor s matters
        assert all(x.abs().max() < 1e-5 for i, x in enumerate(found) if i in (1, 2, 4))
        found, truth = ([x[0], x[3]] for x in (found, truth))
    assert max(errors(found, truth)) < 2e-5


@FORMS
def test_definition_in_float64(op):
    made, do = problem(PLACES[0].values[0], 37, torch.float64)
    assert max(errors(run(op, made, do), run(abc, made, do))) < 1e-12


@EVERYWHERE
@FORMS
def test_each_packed_sequence_begins_anew(place, op):
    lengths = [0, 5, 1, 0, 13]
    made, do = problem(place, sum(lengths), torch.float32)
    offsets = torch.tensor([0, *lengths], device=place.device).cumsum(0).to(torch.int32)
    found = run(op, made, do, backend=place.backend, cu_seqlens=offsets)
    pieces, start = [], 0
    for length in filter(None, lengths):
        rows = slice(start, start + length)
        part = {name: x[:, rows].double() for name, x in made.items()}
        pieces.append(run(abc, part, do[:, rows].double()))
        start += length
    expected = [torch.cat(x, 1) for x in zip(*pieces, strict=True)]
    assert max(errors(found, expected)) < 2e-5


@FORMS
def test_a_constant_added_to_a_slot_changes_nothing(op):
    made, do = problem(PLACES[0].values[0], 37, torch.float64)
    shifted = {**made, "s": made["s"] + torch.linspace(-300, 300, made["s"].shape[-1], dtype=torch.float64)}
    for got, expected in zip(run(op, shifted, do), run(op, made, do), strict=True):
        assert_close(got, expected, rtol=1e-9, atol=1e-11)


@FORMS
def test_an_initial_state_is_refused(op):
    made, _ = problem(PLACES[0].values[0], 5, torch.float32)
    state = torch.zeros(1, 2, 24, 20), torch.zeros(1, 2, 20, 16)
    with pytest.raises(ValueError, match="initial_state: expected None with g=None, got a pair"):
        op(**made, initial_state=state)
    assert op(**made, initial_state=(None, None)).o.isfinite().all()  # what a call returns that was asked for no state


@FORMS
def test_the_final_state_is_the_mean(op):
    made, _ = problem(PLACES[0].values[0], 9, torch.float64)
    _, (hk, hv) = op(**made, output_final_state=True)
    weight = made["s"].softmax(1)
    assert_close(hk, torch.einsum("bthm,bthk->bhkm", weight, made["k"]))
    assert_close(hv, torch.einsum("bthm,bthv->bhmv", weight, made["v"]))
