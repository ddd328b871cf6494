"""RWKV6 as a citizen of PyTorch: custom operator, torch.compile, autocast, and the modes of autograd it refuses."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flakit.numerics.operators import OPERATORS
from flakit.ops.rwkv6 import RWKV6Output, chunk_rwkv6, fused_recurrent_rwkv6
from tests.ops.checking import check, true_values
from tests.ops.places import PLACES, TORCH
from tests.ops.settings import Setting

FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
SETTING = Setting(T=18, K=16, V=24, H=1, decay="rwkv6-wide", states="both")
VARIANTS = [
    replace(SETTING, states="none"),
    replace(SETTING, layout="strided"),
    replace(SETTING, packing="ragged"),
    replace(SETTING, dtype="bfloat16", decay_dtype="float32"),
]


def operator_arguments(made, place, form):
    """What the registered operator takes, in order."""
    made = {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in made.items()}
    tensors = [made.get(name) for name in ("r", "k", "v", "w", "u", "initial_state", "cu_seqlens")]
    return (*tensors, 0.25, True, form, place.backend, 16 if form == "chunk" else 0, True)


@EVERYWHERE
@FORMS
@pytest.mark.parametrize("setting", VARIANTS, ids=str)
def test_registered_operator(place, form, setting, poisoned_memory):
    # The schema, undeclared mutation, fake tensors with their strides, autograd registration, dynamic shapes.
    if setting.dtype == "bfloat16" and place.T == 21:
        setting = replace(setting, dtype="float16")  # the interpreter has no bfloat16
    made, _ = place.make(setting, T=setting.T, H=setting.H)
    torch.library.opcheck(torch.ops.flakit.rwkv6.default, operator_arguments(made, place, form))


@EVERYWHERE
@FORMS
def test_registered_backward(place, form):
    made, (do, dstate) = place.make(SETTING, T=18)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments(made, place, form)]
    states = torch.ops.flakit.rwkv6(*arguments)[2]
    tests = ("test_schema", "test_faketensor")
    backward = (*arguments[:7], states, do, dstate, 0.25, form, place.backend, arguments[11])
    torch.library.opcheck(torch.ops.flakit.rwkv6_backward.default, backward, test_utils=tests)


@FORMS
@pytest.mark.parametrize("options", [dict(backend="aot_eager"), dict(backend="aot_eager", dynamic=True)], ids=str)
@pytest.mark.parametrize("setting", VARIANTS[:3], ids=str)
def test_compiled_without_graph_break(form, setting, options):
    made, arriving = TORCH.make(setting)
    made["w"] = made["w"].clamp(max=-1e-6).neg().log()
    op = OPERATORS["rwkv6"].forms[form]

    def eager(r, k, v, w, u, **given):
        o, state = op(r, k * 2, v, -torch.exp(w), u, **given)
        return RWKV6Output(o * 3, state)

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, **options)
    expected, found = (
        TORCH.run(made, arriving, form, replace(OPERATORS["rwkv6"], forms={form: call})) for call in (eager, compiled)
    )
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "interpreted"])
def test_compiled_by_inductor(place):
    made, arriving = place.make(SETTING)
    torch._dynamo.reset()
    forms = {"chunk": torch.compile(chunk_rwkv6, fullgraph=True)}
    place.check(made, arriving, "chunk", replace(OPERATORS["rwkv6"], forms=forms))


@EVERYWHERE
@FORMS
def test_autocast(place, form):
    made, arriving = place.make(SETTING)
    dtype = place.dtypes[-1]
    op = OPERATORS["rwkv6"].forms[form]
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    with torch.autocast(place.device, dtype):
        o, state = op(**leaves, output_final_state=True, backend=place.backend)
    assert o.dtype == dtype and state.dtype == torch.float32
    grads = torch.autograd.grad((o, state), list(leaves.values()), (arriving[0].to(dtype), arriving[1]))

    # As if r, k and v had been given in that dtype and w, u in float32; each gradient is its input's.
    rounded = {name: x.to(dtype) if name in ("r", "k", "v") else x for name, x in made.items()}
    expected = true_values(rounded, (arriving[0].to(dtype), arriving[1]))
    found = {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    assert {x.dtype for x in found.values()} == {torch.float32}
    found |= {f"d{name}": found[f"d{name}"].to(dtype) for name in ("r", "k", "v")}
    check({"o": o.detach(), "final_state": state.detach(), **found}, expected, rounded)


@FORMS
def test_autocast_leaves_float64_alone(form):
    made, _ = TORCH.make(SETTING, dtype="float64")
    with torch.autocast("cpu", torch.bfloat16):
        assert OPERATORS["rwkv6"].forms[form](**made).o.dtype == torch.float64


@EVERYWHERE
@FORMS
def test_double_backward_is_refused(place, form):
    made, (do, _) = place.make(SETTING, T=5)
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    o = OPERATORS["rwkv6"].forms[form](**leaves, backend=place.backend).o
    (dr,) = torch.autograd.grad(o, leaves["r"], do, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dr.sum().backward()


@pytest.mark.parametrize("name", ["r", "k", "v", "w", "u", "initial_state"])
@FORMS
def test_forward_mode_is_refused(form, name):
    made, _ = TORCH.make(SETTING, T=5)
    with forward_ad.dual_level():
        made[name] = forward_ad.make_dual(made[name], torch.ones_like(made[name]))
        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode differentiation is not supported"):
            OPERATORS["rwkv6"].forms[form](**made)


def test_jvp_and_hessian_are_refused():
    made, _ = TORCH.make(SETTING, T=5)
    r = made.pop("r")

    def loss(r):
        return chunk_rwkv6(r, **made).o.sum()

    with pytest.raises(NotImplementedError, match="r: forward-mode"):
        torch.func.jvp(loss, (r,), (torch.ones_like(r),))
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.functional.hessian(loss, r)


@EVERYWHERE
@FORMS
def test_activation_checkpointing(place, form):
    def checkpointed(**given):
        names = list(given)
        return checkpoint(lambda *x: op(**dict(zip(names, x, strict=True))), *given.values(), use_reentrant=False)

    op = OPERATORS["rwkv6"].forms[form]
    made, arriving = place.make(SETTING)
    plain = place.run(made, arriving, form)
    found = place.run(made, arriving, form, replace(OPERATORS["rwkv6"], forms={form: checkpointed}))
    for name in plain:
        assert torch.equal(found[name], plain[name]), name


@FORMS
def test_result_is_a_named_pair(form):
    made, _ = TORCH.make(SETTING)
    op = OPERATORS["rwkv6"].forms[form]
    out = op(**made)
    assert isinstance(out, RWKV6Output) and out._fields == ("o", "final_state") and out.final_state is None
    o, state = op(**made, output_final_state=True)
    assert torch.equal(o, out.o) and state.dtype == torch.float32
    assert o.is_contiguous() and state.is_contiguous()


@pytest.mark.parametrize("op", [chunk_rwkv6, fused_recurrent_rwkv6])
def test_arguments_in_the_order_users_know(op):
    made, _ = TORCH.make(SETTING)
    r, k, v, w, u, state = (made[name] for name in ("r", "k", "v", "w", "u", "initial_state"))
    by_name = op(r=r, k=k, v=v, w=w, u=u, scale=0.5, initial_state=state, output_final_state=True)
    by_place = op(r, k, v, w, u, 0.5, state, True)
    assert torch.equal(by_name.o, by_place.o) and torch.equal(by_name.final_state, by_place.final_state)
