"""What code written for flash-linear-attention gives these operators, and gets: its keywords, states, flags, scales."""

import inspect

import numpy as np
import pytest
import torch

import flakit
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.dispatch import CHUNK_SIZES
from tests.ops.checking import check, true_values
from tests.ops.places import INTERPRETED, PLACES, TORCH, everywhere, of
from tests.ops.settings import Setting

OPS = pytest.mark.parametrize("op", OPERATORS)
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
SETTING = Setting(T=18, K=16, V=24, H=1, decay="rwkv6-wide", states="both")
PACKED = Setting(T=18, K=16, V=24, H=1, decay="rwkv6-wide", states="both", packing="ragged")

POSITIONAL = {
    "chunk_rwkv6": "r k v w u scale initial_state output_final_state cu_seqlens cu_seqlens_cpu",
    "fused_recurrent_rwkv6": "r k v w u scale initial_state output_final_state reverse cu_seqlens",
    "chunk_rwkv7": "r w k v a b scale initial_state output_final_state cu_seqlens cu_seqlens_cpu safe_gate chunk_size "
    "disable_recompute cp_context lower_bound",
    "fused_recurrent_rwkv7": "r w k v a b scale initial_state output_final_state cu_seqlens",
    "fused_mul_recurrent_rwkv7": "r w k v kk a scale initial_state output_final_state reverse cu_seqlens",
    "chunk_gsa": "q k v s g scale initial_state output_final_state checkpoint_level cu_seqlens cu_seqlens_cpu",
    "fused_recurrent_gsa": "q k v s g scale initial_state output_final_state reverse cu_seqlens",
}
"""flash-linear-attention 0.6.0's arguments in its order."""


@pytest.mark.parametrize("name", POSITIONAL)
def test_positional_arguments_are_those_of_flash_linear_attention(name):
    parameters = inspect.signature(getattr(flakit, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[name].split()


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_every_form_of_an_operator_takes_the_same_keywords(op):
    forms = [getattr(flakit, name) for name in POSITIONAL if name.endswith(op)]
    assert len(forms) == (3 if op == "rwkv7" else 2)
    keywords = [set(inspect.signature(form).parameters) - {"a", "b", "kk"} for form in forms]
    assert all(x == keywords[0] for x in keywords)


@EVERYWHERE
@OPS
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_every_usual_chunk_size_is_taken(place, op, chunk_size):
    made, arriving = place.make(of(op, SETTING))
    place.check(made, arriving, "chunk", op, chunk_size=chunk_size)


@pytest.mark.full
@pytest.mark.interpret
@OPS
def test_kernels_take_their_nearest_chunk_size(op):
    made, arriving = INTERPRETED.make(of(op, SETTING))
    runs = {C: INTERPRETED.run(made, arriving, "chunk", op, chunk_size=C) for C in CHUNK_SIZES}
    least, most = OPERATORS[op].chunk_sizes[0], OPERATORS[op].chunk_sizes[-1]
    for C, found in runs.items():
        nearest = runs[min(max(C, least), most)]
        assert all(torch.equal(found[name], nearest[name]) for name in found), C


@everywhere("dtype", torch.float16, torch.bfloat16, torch.float64)  # the kernels see float32 whatever it is
@OPS
@FORMS
@pytest.mark.parametrize("setting", [SETTING, PACKED], ids=["batch", "packed"])
def test_initial_states_in_any_dtype(place, op, form, dtype, setting):
    made, (do, dstate) = place.make(of(op, setting))
    described = OPERATORS[op]
    rounded = described.state([x.to(dtype) for x in described.parts(made["initial_state"])])
    leaves = {n: x.clone().requires_grad_() for n, x in described.leaves(made | {"initial_state": rounded}).items()}
    more = {"chunk_size": 16} if form == "chunk" else {}
    given = described.arguments(leaves, made)
    o, final = described.forms[form](**given, output_final_state=True, backend=place.backend, **more)
    final = described.parts(final)
    assert all(x.dtype == torch.float32 for x in final)
    grads = dict(
        zip(
            leaves, torch.autograd.grad((o, *final), list(leaves.values()), (do, *described.parts(dstate))), strict=True
        )
    )
    # The state is computed in float32 from the values given, and its gradient is in the dtype given.
    exact = described.state([x.to(torch.float32) for x in described.parts(rounded)])
    for name in described.states:
        assert grads[name].dtype == dtype
        grads[name] = grads[name].float()
    found = dict(zip(described.outputs, (o.detach(), *(x.detach() for x in final)), strict=True))
    found |= {f"d{name}": x for name, x in grads.items()}
    made = made | {"initial_state": exact}
    expected = true_values(made, (do, dstate), op=op)
    if dtype != torch.float64:  # rounding the gradient itself is all that the dtype may cost
        for name in described.states:
            near, true = found.pop(f"d{name}"), expected.values.pop(f"d{name}")
            torch.testing.assert_close(
                near.double(), true, rtol=2 * torch.finfo(dtype).eps, atol=1e-5 * true.abs().max()
            )
    check(found, expected, made)


@OPS
@FORMS
@pytest.mark.parametrize("flag", [None, False, np.False_], ids=repr)
def test_no_final_state_unless_asked_for(op, form, flag):
    made, _ = TORCH.make(of(op, SETTING))
    final = OPERATORS[op].forms[form](**made, output_final_state=flag).final_state
    assert final == OPERATORS[op].state([None] * len(OPERATORS[op].states))


@OPS
@FORMS
def test_numbers_of_numpy(op, form):
    made, _ = TORCH.make(of(op, SETTING))
    call = OPERATORS[op].forms[form]
    plain = call(**made, scale=0.5, output_final_state=True)
    for scale in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        found = call(**made, scale=scale, output_final_state=np.True_, chunk_size=np.int64(16))
        torch.testing.assert_close(found.o, plain.o)
    assert torch.equal(call(**made, scale=np.int64(2)).o, call(**made, scale=2).o)


@OPS
@FORMS
def test_scale_none_is_the_root_of_the_keys(op, form):
    made, _ = TORCH.make(of(op, SETTING))
    call = OPERATORS[op].forms[form]
    assert torch.equal(call(**made, scale=None).o, call(**made, scale=SETTING.K**-0.5).o)


NOTHING = {
    "rwkv7": dict(safe_gate=True, disable_recompute=True, lower_bound=-5.0, cp_context=None),
    "gsa": dict(checkpoint_level=0),
}
"""Keywords beside those that every operator takes."""


@OPS
@FORMS
def test_keywords_that_change_nothing(op, form):
    made, _ = TORCH.make(of(op, PACKED))
    call = OPERATORS[op].forms[form]
    plain = call(**made, output_final_state=True)
    nothing = dict(head_first=False, reverse=False) | NOTHING.get(op, {})
    for more in (nothing, dict(cu_seqlens_cpu=made["cu_seqlens"].clone())):
        found = call(**made, output_final_state=True, **more)
        assert torch.equal(found.o, plain.o)


@pytest.mark.parametrize("op", ["gsa"])
@FORMS
def test_states_may_come_as_a_list(op, form):
    made, _ = TORCH.make(of(op, SETTING))
    call = OPERATORS[op].forms[form]
    listed = call(**made | {"initial_state": list(made["initial_state"])})
    assert torch.equal(listed.o, call(**made).o)
