"""What must hold of every operator in both forms wherever it runs: the probes of the casebook, each stated once.

Several properties are a *form* built from the operator, which must give what the operator gives (two halves chained
through the state, packed sequences called one by one, …); it runs forward and backward like any other.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import flakit
from flakit.numerics.operators import OPERATORS
from tests.ops.checking import check, true_values
from tests.ops.places import GPU, PLACES, SLOW_INTERPRETED, TORCH, Output, everywhere, of
from tests.ops.settings import Setting

FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
COMPILED = pytest.mark.parametrize("place", [p for p in PLACES if p.id != "interpreted"])
OPS = pytest.mark.parametrize("op", OPERATORS)


SETTING = Setting(T=37, K=24, V=40, decay="rwkv6-wide", states="both")  # T and H are each place's own
PACKED = replace(SETTING, packing="ragged", decay="uniform")
EXTREME = replace(SETTING, decay="inf-spikes")


def built(op, how):
    """The operator with each form replaced by `how(form)`."""
    op = OPERATORS[op]
    return replace(op, forms={name: how(form) for name, form in op.forms.items()})


def apart(op, given):
    """An operator's arguments: its sequences, its initial state's parts, and the rest."""
    op, given = OPERATORS[op], dict(given)
    state = op.parts(given.pop("initial_state", None))
    rows = {name: given.pop(name) for name in op.sequences}
    return rows, state, given


def tensors(op, made, arriving):
    op = OPERATORS[op]
    more = [made["cu_seqlens"]] if "cu_seqlens" in made else []
    return [*op.leaves(made).values(), *more, arriving[0], *op.parts(arriving[1])]


def each(how, op, made, arriving):
    """Every float tensor replaced by `how` of it."""
    op = OPERATORS[op]
    leaves = {name: how(x) for name, x in op.leaves(made).items()}
    return op.arguments(leaves, made), (how(arriving[0]), op.state([how(x) for x in op.parts(arriving[1])]))


def each_dtype(place, setting):
    return [place.make(setting, dtype=str(dtype).removeprefix("torch.")) for dtype in place.dtypes]


@everywhere("T", 1, 37, 70)
@OPS
@pytest.mark.parametrize("decay", ["rwkv6-init", "inf-spikes"])
def test_every_chunk_size_gives_the_same(place, op, T, decay):
    made, arriving = place.make(of(op, SETTING), T=T, decay=decay)
    expected = true_values(made, arriving, op=op)
    for chunk_size in place.chunk_sizes:
        if place.backend == "triton" and chunk_size not in OPERATORS[op].chunk_sizes:
            continue
        check(place.run(made, arriving, "chunk", op, chunk_size=chunk_size), expected, made)


@everywhere("P", 1, 16, 20)
@OPS
@FORMS
def test_two_halves_chained_through_the_state(place, op, form, P):
    def halves(form):
        def call(output_final_state, **given):
            rows, state, rest = apart(op, given)
            outputs, state = [], OPERATORS[op].state(state)
            for part in (slice(P), slice(P, None)):
                half = {name: x[:, part] for name, x in rows.items()}
                o, state = form(**half, **rest, initial_state=state, output_final_state=True)
                outputs.append(o)
            return Output(torch.cat(outputs, 1), state)

        return call

    place.check(*place.make(of(op, SETTING)), form, built(op, halves))


@EVERYWHERE
@OPS
@FORMS
def test_packed_sequences_are_separate_calls(place, op, form):
    def separately(form):
        def call(cu_seqlens, output_final_state, **given):
            rows, state, rest = apart(op, given)
            outputs, states = [], list(zip(*(x.split(1) for x in state), strict=True))
            for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
                if start < end:
                    sequence = {name: x[:, start:end] for name, x in rows.items()}
                    first = OPERATORS[op].state(states[n])
                    o, last = form(**sequence, **rest, initial_state=first, output_final_state=True)
                    states[n] = OPERATORS[op].parts(last)
                    outputs.append(o)
            padding = torch.zeros_like(outputs[0][:, :1]).expand(-1, rows["v"].shape[1] - end, -1, -1)
            return Output(
                torch.cat((*outputs, padding), 1),
                OPERATORS[op].state([torch.cat(x) for x in zip(*states, strict=True)]),
            )

        return call

    made, arriving = place.make(of(op, PACKED))
    expected = true_values(made, arriving, op=op)
    check(place.run(made, arriving, form, op), expected, made)
    check(place.run(made, arriving, form, built(op, separately)), expected, made)


@everywhere("cu_dtype", torch.int32, torch.int64)  # interpreted, int32 is the covering set's
@OPS
@FORMS
def test_an_empty_sequence_hands_its_state_on(place, op, form, cu_dtype):
    made, (do, dstate) = place.make(of(op, PACKED))
    made["cu_seqlens"] = made["cu_seqlens"].to(cu_dtype)
    found = place.run(made, (do, dstate), form, op)
    empty = (made["cu_seqlens"].diff() == 0).nonzero().flatten()
    assert len(empty) == 4
    described = OPERATORS[op]
    for name, final, arrived in zip(described.states, described.outputs[1:], described.parts(dstate), strict=True):
        assert torch.equal(found[final][empty], described.leaves(made)[name][empty])
        assert torch.equal(found[f"d{name}"][empty], arrived[empty])


@everywhere("cu_dtype", torch.int32, torch.int64)  # interpreted, int32 is the covering set's
@OPS
@FORMS
def test_offsets_may_be_a_column_of_a_table(place, op, form, cu_dtype):
    made, arriving = place.make(of(op, PACKED))
    offsets = made["cu_seqlens"].to(cu_dtype)
    expected = place.run(made | {"cu_seqlens": offsets}, arriving, form, op)
    column = torch.stack((offsets, offsets.flip(0) // 2), 1)[:, 0]
    assert column.stride() == (2,)
    found = place.run(made | {"cu_seqlens": column}, arriving, form, op)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@everywhere("P", 1, 15, 16)
@OPS
@FORMS
def test_a_shift_against_the_chunks_changes_nothing(place, op, form, P):
    def shifted(form):
        # Tokens in front that neither write nor decay.
        def call(**given):
            for name in OPERATORS[op].sequences:
                x = given[name]
                given[name] = torch.cat((x.new_zeros(x.shape[0], P, *x.shape[2:]), x), 1)
            o, state = form(**given)
            return Output(o[:, P:], state)

        return call

    place.check(*place.make(of(op, SETTING)), form, built(op, shifted))


@everywhere("P", 1, 16, 19)
@OPS
@FORMS
def test_the_future_changes_nothing_before_it(place, op, form, P):
    # Bitwise in float32. In 16 bits a kernel may choose its way through a chunk by the decay of the whole chunk: the
    # rounding of earlier rows can then differ, their accuracy may not.
    for made, (do, dstate) in each_dtype(place, of(op, SETTING)):
        other = dict(made)
        for name in OPERATORS[op].sequences:
            other[name] = torch.cat((made[name][:, :P], made[name][:, P:].flip(1)), 1)
        other[OPERATORS[op].decay][:, P:] *= 40
        now, then = (place.run(x, (do, dstate), form, op)["o"][:, :P] for x in (made, other))
        if do.dtype == torch.float32:
            assert torch.equal(now, then)
        else:
            place.check(other, (do, dstate), form, op)


@everywhere("P", 1, 16, 19)
@OPS
@FORMS
def test_gradients_of_the_past_change_nothing_after_it(place, op, form, P):
    for made, (do, dstate) in each_dtype(place, of(op, SETTING)):
        other = do.clone()
        other[:, :P] *= -100
        now, then = (place.run(made, (x, dstate), form, op) for x in (do, other))
        for name in OPERATORS[op].sequences:
            if name != OPERATORS[op].decay:  # its gradient at a token is made of the tokens on both sides
                assert torch.equal(now[f"d{name}"][:, P:], then[f"d{name}"][:, P:]), name


@COMPILED
@OPS
@FORMS
def test_twice_the_same_bits(place, op, form):
    for made, arriving in each_dtype(place, of(op, SETTING, B=9)):
        once, again = (place.run(made, arriving, form, op) for _ in range(2))
        for name in once:
            assert torch.equal(once[name], again[name]), name


@EVERYWHERE
@OPS
@FORMS
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("packing", ["none", "ragged"])
@pytest.mark.parametrize("T", [1, 17])
def test_inputs_are_not_written_and_outputs_are_new(place, op, form, T, packing, layout):
    made, arriving = place.make(of(op, EXTREME), T=T, packing=packing, layout=layout)
    given = tensors(op, made, arriving)
    before = [x.clone() for x in given]
    found = place.run(made, arriving, form, op)
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
    storages = [x.untyped_storage().data_ptr() for x in (*given, *found.values())]
    assert len(set(storages)) == len(storages)


# Shapes in which what is sliced, joined or turned comes out contiguous, so that no copy makes it an own tensor.
VIEWS = [
    dict(T=32, H=1),
    dict(T=1, H=1),
    dict(T=1, H=2, B=2),
    dict(T=18, H=2, packing="ragged"),
    dict(T=18, H=2, K=1),
    dict(T=18, H=2, V=1, layout="strided"),
]


@pytest.mark.parametrize("place", SLOW_INTERPRETED)
@pytest.mark.parametrize("sizes", VIEWS, ids=str)
@OPS
@FORMS
def test_outputs_own_their_memory_and_are_changed_in_place(place, op, form, sizes):
    sizes = {"M": 1, **sizes} if op == "gsa" and "K" in sizes else sizes
    made, arriving = place.make(of(op, replace(SETTING, decay="rwkv6-init")), **sizes)
    described = OPERATORS[op]
    for backend in (place.backend, "reference"):
        results = []
        for grad in (True, False):
            leaves = {name: x.clone().requires_grad_(grad) for name, x in described.leaves(made).items()}
            given = described.arguments(leaves, made)
            with torch.set_grad_enabled(grad):
                o, state = described.forms[form](**given, output_final_state=True, backend=backend)
                parts = described.parts(state)
                results.append([x.detach().clone() for x in (o, *parts)])
                o.add_(1)
                for part in parts:
                    part.mul_(2)
            own = [o, *parts]
            if grad:
                arrives = [arriving[0], *described.parts(arriving[1])]
                own += torch.autograd.grad(own.copy(), list(leaves.values()), arrives)
                for x in own[-len(leaves) :]:
                    x.mul_(2)
            assert not any(x._is_view() for x in own)
            memory = [x.untyped_storage() for x in (*own, *leaves.values())]
            assert len({x.data_ptr() for x in memory}) == len(memory)
            for x, y in zip(results[-1], (o, *parts), strict=True):
                assert torch.equal(y, x + 1 if y is o else x * 2)


@EVERYWHERE
@OPS
@FORMS
def test_neighbours_in_memory_are_not_read(place, op, form):
    # Each tensor sits in the middle of a buffer of NaN, still contiguous.
    made, arriving = place.make(of(op, EXTREME))
    plain = place.run(made, arriving, form, op)

    def fenced(x):
        buffer = x.new_full((x.numel() + 2048,), torch.nan)
        buffer[1024:-1024] = x.flatten()
        return buffer[1024:-1024].view(x.shape)

    among_nan = place.run(*each(fenced, op, made, arriving), form, op)
    for name in plain:
        assert torch.equal(plain[name], among_nan[name]), name


@EVERYWHERE
@OPS
@FORMS
def test_loss_on_the_final_state_alone(place, op, form):
    made, (do, dstate) = place.make(of(op, SETTING))
    described = OPERATORS[op]
    leaves = {name: x.clone().requires_grad_() for name, x in described.leaves(made).items()}
    given = described.arguments(leaves, made)
    o, state = described.forms[form](**given, output_final_state=True, backend=place.backend)
    arrives, states = described.parts(dstate), described.parts(state)
    grads = dict(zip(leaves, torch.autograd.grad(states, list(leaves.values()), arrives), strict=True))
    outputs = {name: x.detach() for name, x in zip(described.outputs, (o, *states), strict=True)}
    found = outputs | {f"d{name}": x for name, x in grads.items()}
    check(found, true_values(made, (torch.zeros_like(do), dstate), op=op), made)
    for name, grad in grads.items():
        assert grad.any() == (name not in ("r", "q", "u")), name  # what only reads


@EVERYWHERE
@OPS
@FORMS
def test_loss_on_the_output_alone_without_a_final_state(place, op, form):
    made, _ = place.make(of(op, SETTING))
    described = OPERATORS[op]
    leaves = {name: x.clone().requires_grad_() for name, x in described.leaves(made).items()}
    out = described.forms[form](**described.arguments(leaves, made), backend=place.backend)
    assert described.state([None] * len(described.states)) == out.final_state
    out.o.sum().backward()  # a gradient whose strides are all 0
    expected = true_values(made, (torch.ones_like(out.o), None), op=op)
    states = {name: expected.values[name].float() for name in described.outputs[1:]}
    check({"o": out.o.detach(), **states, **{f"d{name}": x.grad for name, x in leaves.items()}}, expected, made)


@EVERYWHERE
@OPS
@FORMS
def test_a_gradient_asked_for_alone_is_the_same(place, op, form):
    # Once for every input: where kernels are interpreted, slowly, one chunk is enough.
    made, (do, dstate) = place.make(of(op, SETTING), T=place.T if place.T > 30 else 9)
    described = OPERATORS[op]
    together = place.run(made, (do, dstate), form, op)
    for name in described.leaves(made):
        leaves = {n: x.clone().requires_grad_(n == name) for n, x in described.leaves(made).items()}
        more = {"chunk_size": place.chunk_sizes[0]} if form == "chunk" else {}
        given = described.arguments(leaves, made)
        o, state = described.forms[form](**given, output_final_state=True, backend=place.backend, **more)
        outputs, arrives = (o, *described.parts(state)), (do, *described.parts(dstate))
        (alone,) = torch.autograd.grad(outputs, [leaves[name]], arrives)
        assert torch.equal(alone, together[f"d{name}"]), name


@everywhere("mode", torch.no_grad, torch.inference_mode, named=lambda mode: mode.__name__)
@OPS
@FORMS
def test_without_gradients_the_same_values(place, op, form, mode):
    made, arriving = place.make(of(op, SETTING))
    described = OPERATORS[op]
    more = {"chunk_size": place.chunk_sizes[0]} if form == "chunk" else {}
    with mode():
        o, state = described.forms[form](**made, output_final_state=True, backend=place.backend, **more)
    found = place.run(made, arriving, form, op)
    for name, x in zip(described.outputs, (o, *described.parts(state)), strict=True):
        assert not x.requires_grad and torch.equal(x, found[name]), name


@everywhere("decay", "rwkv6-wide", "inf-spikes", "-20")
@OPS
def test_decode_token_by_token(place, op, decay):
    described = OPERATORS[op]
    for made, arriving in each_dtype(place, of(op, replace(SETTING, decay=decay))):
        rows, state, rest = apart(op, made)
        state, outputs = described.state(state), []
        with torch.no_grad():
            for t in range(made["v"].shape[1]):
                token = {name: x[:, t : t + 1] for name, x in rows.items()}
                o, state = described.forms["recurrent"](
                    **token, **rest, initial_state=state, output_final_state=True, backend=place.backend
                )
                outputs.append(o)
        decoded = dict(zip(described.outputs, (torch.cat(outputs, 1), *described.parts(state)), strict=True))
        whole = place.run(made, arriving, "recurrent", op)
        check(whole | decoded, true_values(made, arriving, op=op), made)


@pytest.mark.parametrize("place", SLOW_INTERPRETED)
@OPS
@FORMS
def test_one_token_spike_at_every_row(place, op, form):
    # Row p of batch element p; four sizes of spike side by side, among channels that keep nearly everything.
    rows = 130 if place.T > 30 else 17
    made, arriving = place.make(of(op, SETTING), T=rows, K=16, V=16, H=1, B=rows, decay="-1e-2")
    spikes = torch.tensor([-88.8, -500.0, -1e4, -torch.inf], device=place.device)
    every, decay = torch.arange(rows, device=place.device), made[OPERATORS[op].decay]
    decay[every, every, :, :4] = spikes
    decay[every, every, :, 8:12] = spikes
    place.check(made, arriving, form, op)


CONSTANTS = [-8.0, -20.0, -50.0, -80.0]


@everywhere("w", *CONSTANTS)
@OPS
@FORMS
def test_dw_at_strong_constant_decay(place, op, form, w):
    for dtype in place.dtypes:
        for decay_dtype in dict.fromkeys((dtype, torch.float32)):
            if torch.tensor(w).double().exp() < torch.finfo(decay_dtype).smallest_normal:
                continue  # e^w, and so dw, lies below the range of float16
            names = {"dtype": dtype, "decay_dtype": decay_dtype}
            names = {name: str(x).removeprefix("torch.") for name, x in names.items()}
            made, arriving = place.make(of(op, SETTING), decay=str(w), **names)
            expected, found = true_values(made, arriving, op=op), place.run(made, arriving, form, op)
            name = f"d{OPERATORS[op].decay}"
            assert check(found, expected, made)[name].l2 <= 1e-2
            with pytest.raises(AssertionError, match=f"{name}: L2"):
                check({**found, name: torch.zeros_like(found[name])}, expected, made)


@EVERYWHERE
@OPS
@FORMS
def test_dw_is_exactly_zero_where_everything_is_forgotten(place, op, form):
    for made, arriving in each_dtype(place, of(op, SETTING, decay="forget")):
        found = place.check(made, arriving, form, op)
        assert not found[f"d{OPERATORS[op].decay}"].any()


SLOW = [
    pytest.param(*place.values, w, id=f"{w}-{place.id}", marks=place.marks)
    for place, decays in zip(PLACES[::2], ([-1e-5, -1e-2], [-1e-5, -1e-4, -1e-3, -1e-2]), strict=True)
    for w in decays
]
"""Both ends on a CPU, where all have one way, and the oracle takes its time."""


@pytest.mark.full
@pytest.mark.parametrize(("place", "w"), SLOW)
@OPS
def test_slow_decay_does_not_drift(place, op, w):
    # The same factor just below 1 thousands of times: its rounding must not add up.
    made, arriving = place.make(of(op, SETTING), T=4096, K=32, V=16, H=1, decay=str(w))
    expected = true_values(made, arriving, op=op)
    check(place.run(made, arriving, "chunk", op, chunk_size=32), expected, made)
    check(place.run(made, arriving, "recurrent", op), expected, made)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@OPS
@FORMS
@pytest.mark.parametrize("setting", [SETTING, PACKED, EXTREME, replace(SETTING, layout="strided")], ids=str)
def test_float64(setting, op, form, backend):
    made, arriving = TORCH.make(of(op, setting), dtype="float64")
    replace(TORCH, backend=backend, chunk_sizes=(64,)).check(made, arriving, form, op)


@pytest.mark.gpu
@OPS
@FORMS
def test_float64_on_a_gpu_goes_to_torch(op, form):
    made, arriving = GPU.make(of(op, SETTING), dtype="float64")
    replace(GPU, backend=None, chunk_sizes=(64,)).check(made, arriving, form, op)


@pytest.mark.gpu
@OPS
@FORMS
def test_a_positive_decay_on_a_gpu_is_seen_when_asked(op, form):
    made, _ = GPU.make(of(op, SETTING))
    name, call = OPERATORS[op].decay, OPERATORS[op].forms[form]
    made[name][0, 3, 0, 1] = 0.5
    call(**made)
    with (
        flakit.checked(),
        pytest.raises(ValueError, match=rf"{name}: expected a natural-log decay <= 0, got 0\.5 at \[0, 3"),
    ):
        call(**made)
