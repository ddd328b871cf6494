"""What must hold of both forms wherever they run: the probes of the casebook, each stated once.

Several properties are a *form* built from the operator, which must give what the operator gives (two halves chained
through the state, packed sequences called one by one, …); it runs forward and backward like any other.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import flakit
from flakit.numerics.operators import OPERATORS
from flakit.ops.rwkv6 import RWKV6Output
from tests.ops.checking import check, true_values
from tests.ops.places import GPU, PLACES, TORCH
from tests.ops.settings import Setting

FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
COMPILED = pytest.mark.parametrize("place", [p for p in PLACES if p.id != "interpreted"])
SEQUENCES = ("r", "k", "v", "w")

SETTING = Setting(T=37, K=24, V=40, decay="rwkv6-wide", states="both")  # T and H are each place's own
PACKED = replace(SETTING, packing="ragged", decay="uniform")
EXTREME = replace(SETTING, decay="inf-spikes")


def built(how):
    """The operator with each form replaced by `how(form)`."""
    op = OPERATORS["rwkv6"]
    return replace(op, forms={name: how(form) for name, form in op.forms.items()})


def tensors(made, arriving):
    return [x for x in (*made.values(), *arriving) if isinstance(x, torch.Tensor)]


def each_dtype(place, setting=SETTING):
    return [place.make(setting, dtype=str(dtype).removeprefix("torch.")) for dtype in place.dtypes]


@EVERYWHERE
@pytest.mark.parametrize("decay", ["rwkv6-init", "inf-spikes"])
@pytest.mark.parametrize("T", [1, 37, 70])
def test_every_chunk_size_gives_the_same(place, T, decay):
    made, arriving = place.make(SETTING, T=T, decay=decay)
    expected = true_values(made, arriving)
    for chunk_size in place.chunk_sizes:
        check(place.run(made, arriving, "chunk", chunk_size=chunk_size), expected, made)


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("P", [1, 16, 20])
def test_two_halves_chained_through_the_state(place, form, P):
    def halves(op):
        def call(initial_state, output_final_state, u, **given):
            options = {name: x for name, x in given.items() if name not in SEQUENCES}
            first, second = ({n: x[:, part] for n, x in given.items() if n in SEQUENCES} for part in PARTS)
            o, state = op(**first, u=u, initial_state=initial_state, output_final_state=True, **options)
            o2, state = op(**second, u=u, initial_state=state, output_final_state=True, **options)
            return RWKV6Output(torch.cat((o, o2), 1), state)

        return call

    PARTS = slice(P), slice(P, None)
    place.check(*place.make(SETTING), form, built(halves))


@EVERYWHERE
@FORMS
def test_packed_sequences_are_separate_calls(place, form):
    def separately(op):
        def call(cu_seqlens, initial_state, output_final_state, u, **given):
            options = {name: x for name, x in given.items() if name not in SEQUENCES}
            outputs, states = [], list(initial_state.split(1))
            for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
                if start < end:
                    rows = {name: given[name][:, start:end] for name in SEQUENCES}
                    o, states[n] = op(**rows, u=u, initial_state=states[n], output_final_state=True, **options)
                    outputs.append(o)
            return RWKV6Output(torch.cat(outputs, 1), torch.cat(states))

        return call

    made, arriving = place.make(PACKED)
    expected = true_values(made, arriving)
    check(place.run(made, arriving, form), expected, made)
    check(place.run(made, arriving, form, built(separately)), expected, made)


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_an_empty_sequence_hands_its_state_on(place, form, cu_dtype):
    made, (do, dstate) = place.make(PACKED)
    made["cu_seqlens"] = made["cu_seqlens"].to(cu_dtype)
    found = place.run(made, (do, dstate), form)
    empty = (made["cu_seqlens"].diff() == 0).nonzero().flatten()
    assert len(empty) == 4
    assert torch.equal(found["final_state"][empty], made["initial_state"][empty])
    assert torch.equal(found["dinitial_state"][empty], dstate[empty])


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("P", [1, 15, 16])
def test_a_shift_against_the_chunks_changes_nothing(place, form, P):
    def shifted(op):
        # Tokens in front that neither write nor decay.
        def call(**given):
            for name in SEQUENCES:
                x = given[name]
                given[name] = torch.cat((x.new_zeros(x.shape[0], P, *x.shape[2:]), x), 1)
            o, state = op(**given)
            return RWKV6Output(o[:, P:], state)

        return call

    place.check(*place.make(SETTING), form, built(shifted))


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("P", [1, 16, 19])
def test_the_future_changes_nothing_before_it(place, form, P):
    # Bitwise in float32. In 16 bits a kernel may choose its way through a chunk by the decay of the whole chunk: the
    # rounding of earlier rows can then differ, their accuracy may not.
    for made, (do, dstate) in each_dtype(place):
        other = {name: x.clone() for name, x in made.items()}
        for name, factor in (("r", 3), ("k", -3), ("v", 3), ("w", 40)):
            other[name][:, P:] *= factor
        now, then = (place.run(x, (do, dstate), form)["o"][:, :P] for x in (made, other))
        if do.dtype == torch.float32:
            assert torch.equal(now, then)
        else:
            place.check(other, (do, dstate), form)


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("P", [1, 16, 19])
def test_gradients_of_the_past_change_nothing_after_it(place, form, P):
    for made, (do, dstate) in each_dtype(place):
        other = do.clone()
        other[:, :P] *= -100
        now, then = (place.run(made, (x, dstate), form) for x in (do, other))
        for name in ("dr", "dk", "dv"):
            assert torch.equal(now[name][:, P:], then[name][:, P:]), name


@COMPILED
@FORMS
def test_twice_the_same_bits(place, form):
    for made, arriving in each_dtype(place, replace(SETTING, B=9)):
        once, again = (place.run(made, arriving, form) for _ in range(2))
        for name in once:
            assert torch.equal(once[name], again[name]), name


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("packing", ["none", "ragged"])
@pytest.mark.parametrize("T", [1, 17])
def test_inputs_are_not_written_and_outputs_are_new(place, form, T, packing, layout):
    made, arriving = place.make(EXTREME, T=T, packing=packing, layout=layout)
    given = tensors(made, arriving)
    before = [x.clone() for x in given]
    found = place.run(made, arriving, form)
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
    storages = [x.untyped_storage().data_ptr() for x in (*given, *found.values())]
    assert len(set(storages)) == len(storages)


@EVERYWHERE
@FORMS
def test_neighbours_in_memory_are_not_read(place, form):
    # Each tensor sits in the middle of a buffer of NaN, still contiguous.
    made, arriving = place.make(EXTREME)
    plain = place.run(made, arriving, form)

    def fenced(x):
        buffer = x.new_full((x.numel() + 2048,), torch.nan)
        buffer[1024:-1024] = x.flatten()
        return buffer[1024:-1024].view(x.shape)

    among_nan = place.run({name: fenced(x) for name, x in made.items()}, tuple(map(fenced, arriving)), form)
    for name in plain:
        assert torch.equal(plain[name], among_nan[name]), name


@EVERYWHERE
@FORMS
def test_loss_on_the_final_state_alone(place, form):
    made, (do, dstate) = place.make(SETTING)
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    o, state = OPERATORS["rwkv6"].forms[form](**leaves, output_final_state=True, backend=place.backend)
    grads = dict(zip(leaves, torch.autograd.grad(state, list(leaves.values()), dstate), strict=True))
    found = {"o": o.detach(), "final_state": state.detach()} | {f"d{name}": x for name, x in grads.items()}
    check(found, true_values(made, (torch.zeros_like(do), dstate)), made)
    assert not grads["r"].any() and not grads["u"].any()
    assert all(grads[name].abs().max() > 0 for name in ("k", "v", "w", "initial_state"))


@EVERYWHERE
@FORMS
def test_loss_on_the_output_alone_without_a_final_state(place, form):
    made, _ = place.make(SETTING)
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    out = OPERATORS["rwkv6"].forms[form](**leaves, backend=place.backend)
    assert out.final_state is None
    out.o.sum().backward()  # a gradient whose strides are all 0
    expected = true_values(made, (torch.ones_like(out.o), None))
    state = {"final_state": expected.values["final_state"].float()}
    check({"o": out.o.detach(), **state, **{f"d{name}": x.grad for name, x in leaves.items()}}, expected, made)


@EVERYWHERE
@FORMS
def test_a_gradient_asked_for_alone_is_the_same(place, form):
    made, arriving = place.make(SETTING)
    together = place.run(made, arriving, form)
    for name in made:
        leaves = {n: x.clone().requires_grad_(n == name) for n, x in made.items()}
        more = {"chunk_size": place.chunk_sizes[0]} if form == "chunk" else {}
        out = OPERATORS["rwkv6"].forms[form](**leaves, output_final_state=True, backend=place.backend, **more)
        (alone,) = torch.autograd.grad(out, [leaves[name]], arriving)
        assert torch.equal(alone, together[f"d{name}"]), name


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_same_values(place, form, mode):
    made, arriving = place.make(SETTING)
    more = {"chunk_size": place.chunk_sizes[0]} if form == "chunk" else {}
    with mode():
        o, state = OPERATORS["rwkv6"].forms[form](**made, output_final_state=True, backend=place.backend, **more)
    assert not o.requires_grad and not state.requires_grad
    found = place.run(made, arriving, form)
    assert torch.equal(o, found["o"]) and torch.equal(state, found["final_state"])


@EVERYWHERE
@FORMS
def test_one_token_spike_at_every_row(place, form):
    # Row p of batch element p; four sizes of spike side by side, among channels that keep nearly everything.
    rows = 130 if place.T > 30 else 17
    made, arriving = place.make(SETTING, T=rows, K=16, V=16, H=1, B=rows, decay="-1e-2")
    spikes = torch.tensor([-88.8, -500.0, -1e4, -torch.inf], device=place.device)
    each = torch.arange(rows, device=place.device)
    made["w"][each, each, :, :4] = spikes
    made["w"][each, each, :, 8:12] = spikes
    place.check(made, arriving, form)


CONSTANTS = [-8.0, -20.0, -50.0, -80.0]


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("w", CONSTANTS)
def test_dw_at_strong_constant_decay(place, form, w):
    for dtype in place.dtypes:
        for decay_dtype in dict.fromkeys((dtype, torch.float32)):
            if torch.tensor(w).double().exp() < torch.finfo(decay_dtype).smallest_normal:
                continue  # e^w, and so dw, lies below the range of float16
            names = {"dtype": dtype, "decay_dtype": decay_dtype}
            names = {name: str(x).removeprefix("torch.") for name, x in names.items()}
            made, arriving = place.make(SETTING, decay=str(w), states="none", **names)
            expected, found = true_values(made, arriving), place.run(made, arriving, form)
            assert check(found, expected, made)["dw"].l2 <= 1e-2
            with pytest.raises(AssertionError, match="dw: L2"):
                check({**found, "dw": torch.zeros_like(made["w"])}, expected, made)


@EVERYWHERE
@FORMS
def test_dw_is_exactly_zero_where_everything_is_forgotten(place, form):
    for made, arriving in each_dtype(place, replace(SETTING, decay="forget")):
        found = place.check(made, arriving, form)
        assert not found["dw"].any()


@COMPILED
@FORMS
@pytest.mark.parametrize("w", [-1e-5, -1e-4, -1e-3, -1e-2])
def test_slow_decay_does_not_drift(place, form, w):
    # The same factor just below 1 thousands of times: its rounding must not add up.
    made, arriving = place.make(SETTING, T=4096, K=32, V=16, H=1, decay=str(w))
    place.check(made, arriving, form, **({"chunk_size": 64} if form == "chunk" else {}))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@FORMS
@pytest.mark.parametrize("setting", [SETTING, PACKED, EXTREME, replace(SETTING, layout="strided")], ids=str)
def test_float64(setting, form, backend):
    made, arriving = TORCH.make(setting, dtype="float64")
    replace(TORCH, backend=backend, chunk_sizes=(64,)).check(made, arriving, form)


@pytest.mark.gpu
@FORMS
def test_float64_on_a_gpu_goes_to_torch(form):
    made, arriving = GPU.make(SETTING, dtype="float64")
    replace(GPU, backend=None, chunk_sizes=(64,)).check(made, arriving, form)


@pytest.mark.gpu
@FORMS
def test_a_positive_decay_on_a_gpu_is_seen_when_asked(form):
    made, _ = GPU.make(SETTING)
    made["w"][0, 3, 0, 1] = 0.5
    op = OPERATORS["rwkv6"].forms[form]
    op(**made)
    with flakit.checked(), pytest.raises(ValueError, match=r"w: expected a natural-log decay <= 0, got 0\.5 at \[0, 3"):
        op(**made)
