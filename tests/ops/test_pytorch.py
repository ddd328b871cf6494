"""Every operator as a citizen of PyTorch: registration, torch.compile, autocast, modes of autograd it refuses."""

import io
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flakit.numerics.operators import OPERATORS
from tests.ops.checking import check, true_values
from tests.ops.places import PLACES, TORCH, Output, everywhere, of
from tests.ops.settings import Setting

OPS = pytest.mark.parametrize("op", OPERATORS)
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
SETTING = Setting(T=18, K=16, V=24, H=1, decay="rwkv6-wide", states="both")  # of GSA: M and groups by `of`
VARIANTS = [
    replace(SETTING, states="none"),
    replace(SETTING, packing="ragged"),
    replace(SETTING, layout="strided"),
    replace(SETTING, dtype="bfloat16", decay_dtype="float32"),
    replace(SETTING, dtype="bfloat16", K=40, V=48, packing="ragged"),  # chunks of 64, or fused ones
]


def with_form(op, form, call):
    return replace(OPERATORS[op], forms={form: call})


def registered_arguments(op, made, place, form):
    """What the registered operator takes, in order."""
    op = OPERATORS[op]
    leaves = {name: x.clone().requires_grad_() for name, x in op.leaves(made).items()}
    tensors = [leaves.get(name) for name in (*op.tensors, *op.states)] + [made.get("cu_seqlens"), None]
    size = 64 if tensors[0].shape[-1] == 40 else 16
    return (*tensors, 0.25, form, place.backend, size if form == "chunk" else 0, True, True)


@everywhere("setting", *VARIANTS, interpreted=(VARIANTS[1], VARIANTS[-1]))
@OPS
@FORMS
def test_registered_operator(place, op, form, setting, poisoned_memory):
    # The schema, undeclared mutation, fake tensors with their strides, autograd registration, dynamic shapes.
    if setting.dtype == "bfloat16" and place.T == 21:
        setting = replace(setting, dtype="float16")  # the interpreter has no bfloat16
    made, _ = place.make(of(op, setting), T=setting.T, H=setting.H)
    registered = getattr(torch.ops.flakit, op).default
    torch.library.opcheck(registered, registered_arguments(op, made, place, form))


@pytest.mark.parametrize("place", [place for place in PLACES if place.id != "torch"])
@pytest.mark.parametrize(("K", "V", "size"), [(16, 24, 16), (33, 35, 16), (35, 37, 64)])
@OPS
def test_nothing_kept_is_left_to_chance(place, op, K, V, size, poisoned_memory):
    dtype = str(place.dtypes[1]).removeprefix("torch.")
    made, _ = place.make(of(op, SETTING), T=17, B=1, H=1, K=K, V=V, dtype=dtype)
    given = registered_arguments(op, made, place, "chunk")
    kept = getattr(torch.ops.flakit, op)(*given[:-3], size, True, True)[1 + len(OPERATORS[op].states) :]
    assert kept and all(x.numel() and x.isfinite().all() for x in kept if x.shape != (0,))


@EVERYWHERE
@OPS
@FORMS
def test_registered_backward(place, op, form):
    made, (do, dstate) = place.make(of(op, SETTING), T=18)
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in registered_arguments(op, made, place, form)]
    forward, backward = (getattr(torch.ops.flakit, name) for name in (op, f"{op}_backward"))
    states = OPERATORS[op].states
    *tensors, _, scale, form, backend, size, _, _ = given
    kept = forward(*given)[1 + len(states) :]
    given = (*tensors, *kept, do, *OPERATORS[op].parts(dstate), scale, form, backend, size)
    torch.library.opcheck(backward.default, given, test_utils=("test_schema", "test_faketensor"))


@OPS
@FORMS
@pytest.mark.parametrize("options", [dict(backend="aot_eager"), dict(backend="aot_eager", dynamic=True)], ids=str)
@pytest.mark.parametrize("setting", VARIANTS[:3], ids=str)
def test_compiled_without_graph_break(op, form, setting, options):
    made, arriving = TORCH.make(of(op, setting))
    call, decay, first = OPERATORS[op].forms[form], OPERATORS[op].decay, OPERATORS[op].tensors[0]
    made[decay] = made[decay].clamp(max=-1e-6).neg().log()

    def eager(**given):
        o, state = call(**{**given, first: given[first] * 2, decay: -torch.exp(given[decay])})
        return Output(o * 3, state)

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, **options)
    expected, found = (TORCH.run(made, arriving, form, with_form(op, form, way)) for way in (eager, compiled))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@OPS
@FORMS
def test_compiled_where_one_input_has_symbolic_sizes(op, form):
    """As when one graph is called with another operator or model: sizes that changed are symbols beside known ones."""
    made, _ = TORCH.make(of(op, SETTING))
    call, decay = OPERATORS[op].forms[form], made[OPERATORS[op].decay]
    torch._dynamo.reset()
    for axis in range(decay.ndim):
        torch._dynamo.maybe_mark_dynamic(decay, axis)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(**made)
    torch.testing.assert_close(found.o, call(**made).o)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "interpreted"])
@OPS
def test_compiled_by_inductor(place, op, monkeypatch, tmp_path):
    # What an earlier version of flakit left in the machine's own cache calls operators as they were then.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made, arriving = place.make(of(op, SETTING))
    torch._dynamo.reset()
    compiled = torch.compile(OPERATORS[op].forms["chunk"], fullgraph=True)
    place.check(made, arriving, "chunk", with_form(op, "chunk", compiled))


@EVERYWHERE
@OPS
@FORMS
def test_autocast(place, op, form):
    made, (do, dstate) = place.make(of(op, SETTING))
    dtype, described = place.dtypes[-1], OPERATORS[op]
    leaves = {name: x.clone().requires_grad_() for name, x in described.leaves(made).items()}
    given = described.arguments(leaves, made)
    with torch.autocast(place.device, dtype):
        o, state = described.forms[form](**given, output_final_state=True, backend=place.backend)
    states = described.parts(state)
    assert o.dtype == dtype and {x.dtype for x in states} == {torch.float32}
    arrives = (do.to(dtype), *described.parts(dstate))
    grads = torch.autograd.grad((o, *states), list(leaves.values()), arrives)

    # As if all sequences but the decay had been given in that dtype; each gradient is its input's.
    cast = [name for name in described.sequences if name != described.decay]
    rounded = {name: x.to(dtype) if name in cast else x for name, x in made.items()}
    expected = true_values(rounded, (do.to(dtype), dstate), op=op)
    found = {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    assert {x.dtype for x in found.values()} == {torch.float32}
    found |= {f"d{name}": found[f"d{name}"].to(dtype) for name in cast}
    outputs = {name: x.detach() for name, x in zip(described.outputs, (o, *states), strict=True)}
    check(outputs | found, expected, rounded)


@OPS
@FORMS
def test_autocast_leaves_float64_alone(op, form):
    made, _ = TORCH.make(of(op, SETTING), dtype="float64")
    with torch.autocast("cpu", torch.bfloat16):
        assert OPERATORS[op].forms[form](**made).o.dtype == torch.float64


@EVERYWHERE
@OPS
@FORMS
def test_double_backward_is_refused(place, op, form):
    made, (do, _) = place.make(of(op, SETTING), T=5)
    leaves = {name: x.clone().requires_grad_() for name, x in OPERATORS[op].leaves(made).items()}
    o = OPERATORS[op].forms[form](**OPERATORS[op].arguments(leaves, made), backend=place.backend).o
    (dv,) = torch.autograd.grad(o, leaves["v"], do, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dv.sum().backward()


@OPS
@FORMS
def test_forward_mode_is_refused(op, form):
    made, _ = TORCH.make(of(op, SETTING), T=5)
    described = OPERATORS[op]
    for name, x in described.leaves(made).items():
        with forward_ad.dual_level():
            leaves = described.leaves(made) | {name: forward_ad.make_dual(x, torch.ones_like(x))}
            shown = "initial_state" if name in described.states else name
            with pytest.raises(NotImplementedError, match=f"{shown}.*: forward-mode differentiation is not supported"):
                described.forms[form](**described.arguments(leaves, made))


@OPS
def test_jvp_and_hessian_are_refused(op):
    made, _ = TORCH.make(of(op, SETTING), T=5)
    v = made.pop("v")

    def loss(v):
        return OPERATORS[op].forms["chunk"](v=v, **made).o.sum()

    with pytest.raises(NotImplementedError, match="v: forward-mode"):
        torch.func.jvp(loss, (v,), (torch.ones_like(v),))
    for twice in (torch.autograd.functional.hessian, lambda f, x: torch.func.jacrev(torch.func.grad(f))(x)):
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            twice(loss, v)


@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "graph"])
@pytest.mark.parametrize("where", ["before", "inside", "within"])
def test_forward_mode_is_refused_when_compiled(fullgraph, where):
    # Compiled before there is a dual level, inside one, or with torch.func.jvp within what is compiled.
    made, _ = TORCH.make(SETTING, T=5)
    v = made.pop("v")

    def call(v):
        return OPERATORS["rwkv6"].forms["chunk"](v=2 * v, **made).o

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
    refused = pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match="forward-mode differentiation")
    if where == "within":
        jvp = torch.compile(lambda v: torch.func.jvp(call, (v,), (v,)), backend="aot_eager", fullgraph=fullgraph)
        with refused:
            jvp(v)
        return
    plain = compiled(v) if where == "before" else call(v)
    with forward_ad.dual_level(), refused:
        compiled(forward_ad.make_dual(v, torch.ones_like(v)))
    torch.testing.assert_close(compiled(v), plain)


def leaf_gradients(op, form, made, do):
    """autograd's gradients of sum(o do), and that sum as a function of the leaves."""
    described = OPERATORS[op]
    leaves = {name: x.clone().requires_grad_() for name, x in described.leaves(made).items()}

    def loss(leaves):
        return (described.forms[form](**described.arguments(leaves, made)).o * do).sum()

    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True)), loss, {name: x.detach() for name, x in leaves.items()}


@OPS
@FORMS
@pytest.mark.parametrize("packing", ["none", "ragged"])
def test_torch_func_grad(op, form, packing):
    made, (do, _) = TORCH.make(of(op, SETTING), T=7, packing=packing)
    expected, loss, leaves = leaf_gradients(op, form, made, do)
    for name, grad in torch.func.grad(loss)(leaves).items():
        assert torch.equal(grad, expected[name]), name


@OPS
@FORMS
def test_torch_func_vmap_and_jacrev(op, form):
    made, (do, _) = TORCH.make(of(op, SETTING), T=3)
    expected, loss, leaves = leaf_gradients(op, form, made, do)
    several = torch.func.vmap(torch.func.grad(loss))({name: torch.stack((x, x)) for name, x in leaves.items()})
    for name, grad in several.items():
        torch.testing.assert_close(grad, torch.stack((expected[name],) * 2), msg=lambda t, n=name: f"{n}: {t}")

    def output(v):
        described = OPERATORS[op]
        return described.forms[form](**described.arguments(leaves | {"v": v}, made)).o

    mapped = torch.func.vmap(output)(torch.stack((leaves["v"], 2 * leaves["v"])))
    torch.testing.assert_close(mapped[0], output(leaves["v"]))
    torch.testing.assert_close(mapped[1], output(2 * leaves["v"]))
    jacobian = torch.func.jacrev(output)(leaves["v"])
    torch.testing.assert_close(torch.tensordot(do, jacobian, do.ndim), expected["v"])


@OPS
@FORMS
@pytest.mark.parametrize("packing", ["none", "ragged"])
def test_meta_tensors_have_shapes_and_dtypes(op, form, packing):
    made, _ = TORCH.make(of(op, SETTING), packing=packing)
    described = OPERATORS[op]

    def away(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    given = described.arguments({name: away(x) for name, x in described.leaves(made).items()}, made)
    given = {name: away(x) for name, x in given.items()}
    here, there = (described.forms[form](**x, output_final_state=True) for x in (made, given))
    pairs = zip(
        (here.o, *described.parts(here.final_state)), (there.o, *described.parts(there.final_state)), strict=True
    )
    for x, y in pairs:
        assert y.is_meta and (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@OPS
@FORMS
def test_compiled_with_offsets_on_the_cpu_too(op, form):
    made, _ = TORCH.make(of(op, SETTING), packing="ragged")
    made["cu_seqlens_cpu"] = made["cu_seqlens"].clone()
    torch._dynamo.reset()
    call = OPERATORS[op].forms[form]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**made).o, call(**made).o)
    made["cu_seqlens_cpu"][1] += 1
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected .* like cu_seqlens, got"):
        compiled(**made)


@FORMS
@pytest.mark.parametrize("packing", ["none", "ragged"])
def test_abc_compiled(form, packing):
    made, (do, _) = TORCH.make(of("gsa", SETTING), packing=packing, states="none")
    made["g"] = None
    torch._dynamo.reset()
    call = OPERATORS["gsa"].forms[form]
    found = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        s = made["s"].clone().requires_grad_()
        o = run(**made | {"s": s}).o
        found.append((o, *torch.autograd.grad(o, s, do)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@OPS
def test_a_result_is_saved_and_loaded(op):
    made, _ = TORCH.make(of(op, SETTING))
    out = OPERATORS[op].forms["chunk"](**made, output_final_state=True)
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert type(back) is type(out) and torch.equal(back.o, out.o)


@OPS
def test_an_exported_program_is_saved_and_loaded(op):
    # PyTorch has no public way to name a NamedTuple in a saved program: what is exported returns a plain tuple.
    made, _ = TORCH.make(of(op, SETTING), states="none")
    names = OPERATORS[op].tensors

    class Module(torch.nn.Module):
        def forward(self, *given):
            return tuple(OPERATORS[op].forms["chunk"](**dict(zip(names, given, strict=True)), output_final_state=True))

    given = tuple(made[name] for name in names)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(), given), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(*given)[0], Module()(*given)[0])


@EVERYWHERE
@OPS
@FORMS
def test_activation_checkpointing(place, op, form):
    def checkpointed(**given):
        names = list(given)
        return checkpoint(lambda *x: call(**dict(zip(names, x, strict=True))), *given.values(), use_reentrant=False)

    call = OPERATORS[op].forms[form]
    made, arriving = place.make(of(op, SETTING))
    plain = place.run(made, arriving, form, op)
    found = place.run(made, arriving, form, with_form(op, form, checkpointed))
    for name in plain:
        assert torch.equal(found[name], plain[name]), name


class Seen(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@OPS
@FORMS
def test_who_follows_what_is_called_sees_an_operator(op, form):
    """A call that nobody follows goes past PyTorch's dispatcher, and gives the same; its backward likewise."""
    op = OPERATORS[op]
    made, _ = TORCH.make(of(op.name, SETTING))
    leaves = [x.detach() for x in op.leaves(made).values()][: len(op.tensors)]
    call = partial(op.forms[form], scale=0.25)
    alone = call(*leaves).o
    with Seen() as seen:
        assert torch.equal(call(*leaves).o, alone)
    assert f"flakit::{op.name}" in seen.names
    inputs = [x.clone().requires_grad_() for x in leaves]
    o = call(*inputs).o
    grads = torch.autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
    with Seen() as seen:
        again = torch.autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
    assert f"flakit::{op.name}_backward" in seen.names and all(map(torch.equal, grads, again))
    batched = torch.autograd.grad(o, inputs, torch.ones_like(o).expand(2, *o.shape), is_grads_batched=True)
    for once, twice in zip(grads, batched, strict=True):
        torch.testing.assert_close(twice, once.expand_as(twice))
    traced = torch.jit.trace(lambda *given: call(*given).o, leaves, check_trace=False)
    assert f"flakit::{op.name}" in str(traced.graph) and torch.equal(traced(*leaves), alone)


@OPS
def test_a_first_backward_imports_no_compiler(op):
    """To be an operator takes PyTorch's compiler, whose import takes longer than a first lesson's first panel."""
    code = f"""
import sys
import flakit
from flakit.numerics.operators import operator
form = operator("{op}").forms["chunk"]
x = flakit.inputs("{op}", T=20, K=16, V=16, requires_grad=True)
form(**x).o.sum().backward()
assert all(each.grad is not None for each in x.values())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stdout + done.stderr


@OPS
@FORMS
def test_result_is_a_named_pair(op, form):
    made, _ = TORCH.make(of(op, SETTING))
    described, call = OPERATORS[op], OPERATORS[op].forms[form]
    out = call(**made)
    assert isinstance(out, tuple) and out._fields == ("o", "final_state")
    assert out.final_state == described.state([None] * len(described.states))
    o, state = call(**made, output_final_state=True)
    assert torch.equal(o, out.o) and o.is_contiguous()
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in described.parts(state))


@OPS
@FORMS
def test_arguments_in_the_order_users_know(op, form):
    made, _ = TORCH.make(of(op, SETTING))
    described, call = OPERATORS[op], OPERATORS[op].forms[form]
    by_name = call(**made, scale=0.5, output_final_state=True)
    by_place = call(*(made[name] for name in described.tensors), 0.5, made["initial_state"], True)
    for one, other in zip(described.parts(by_name.final_state), described.parts(by_place.final_state), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(by_name.o, by_place.o)
