"""GSA without a gate is ABC: every slot a mean over its sequence so far, weighted by e^s. Against that definition."""

import pytest
import torch
from torch.testing import assert_close

from flakit.numerics.inputs import inputs
from flakit.ops.gsa import chunk_gsa, fused_recurrent_gsa
from flakit.ops.gsa.abc import slots_and_gates
from tests.ops.memory import peak
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


@pytest.mark.parametrize("lengths", [[1], [9], [1, 1, 1], [0, 5, 1, 0, 13, 64, 2]], ids=str)
def test_packed_slots_and_gates_are_those_of_each_sequence(lengths):
    s = 20 * torch.randn(1, sum(lengths), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone, together = ([x.requires_grad_() for x in s.clone().split(n, 1)] for n in (lengths, [sum(lengths)]))
    separate = [slots_and_gates(x) for x in alone if x.shape[1]]
    expected = [torch.cat(x, 1) for x in zip(*separate, strict=True)]
    found = slots_and_gates(together[0], torch.tensor([0, *lengths]).cumsum(0))
    arriving = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, [x for x in alone if x.shape[1]], arriving)
    for got, true in zip(
        (*found, *torch.autograd.grad(found, together, arriving)), (*expected, torch.cat(wanted, 1)), strict=True
    ):
        assert_close(got, true, rtol=1e-11, atol=1e-13)


def test_packing_slots_takes_no_more_memory():
    s = torch.randn(1, 350, 4, 16, requires_grad=True)
    offsets = torch.tensor([0, *range(250, 351)])

    def call(*packing):
        outputs = slots_and_gates(s, *packing)
        torch.autograd.grad(outputs, s, outputs)

    call(offsets)  # what the first call alone allocates
    assert peak(lambda: call(offsets)) <= 2 * peak(call)


@pytest.mark.full
def test_packed_slots_compile_to_one_graph():
    s = torch.randn(1, 20, 2, 3, requires_grad=True)
    offsets = torch.tensor([0, 4, 4, 9, 20])
    expected = slots_and_gates(s, offsets)
    found = torch.compile(slots_and_gates, fullgraph=True, backend="aot_eager")(s, offsets)
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted)
        assert_close(*(torch.autograd.grad(x.square().sum(), s, retain_graph=True) for x in (got, wanted)))


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
