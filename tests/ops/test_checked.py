"""What is looked at under `flakit.checked()` alone, and how far a value that is not finite reaches without it."""

import re

import pytest
import torch

import flakit
from flakit.numerics.operators import OPERATORS
from tests.ops.places import PLACES, SLOW_INTERPRETED, TORCH, of
from tests.ops.settings import Setting

OPS = pytest.mark.parametrize("op", OPERATORS)
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
SETTING = Setting(T=37, K=16, V=24, H=1, decay="rwkv6-init", states="both")
SPOILS = pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)


def spoil(x, value):
    """x with a value from its middle on, and where that is."""
    middle = x.numel() // 2
    at = [int(i) for i in torch.unravel_index(torch.tensor(middle), x.shape)]
    return torch.cat((x.flatten()[:middle], x.new_full((x.numel() - middle,), value))).view(x.shape), at


@EVERYWHERE
@OPS
@FORMS
@SPOILS
def test_an_input_that_is_not_finite_is_named_with_its_first_place(place, op, form, value):
    made, _ = place.make(of(op, SETTING))
    described = OPERATORS[op]
    call, leaves = described.forms[form], described.leaves(made)
    with flakit.checked():
        call(**made, backend=place.backend)
    for name in leaves:
        wrong, at = spoil(leaves[name], value)
        called = f"initial_state[{described.states.index(name)}]" if op == "gsa" and name in described.states else name
        given = described.arguments({**leaves, name: wrong}, made)
        said = f"{called}: expected finite values under flakit.checked(), got {value} at {at}"
        if name == described.decay:
            if value == -torch.inf:
                continue  # forgets everything
            said = f"{called}: expected a natural-log decay <= 0, got {value} at {at}. "
        with flakit.checked(), pytest.raises(ValueError, match=re.escape(said)):
            call(**given, backend=place.backend)


@pytest.mark.parametrize("place", SLOW_INTERPRETED)
@OPS
@FORMS
def test_how_far_a_nan_reaches(place, op, form):
    # As padding that nobody filled: nothing before it in the recurrence, nothing before its chunk in chunks.
    made, _ = place.make(of(op, SETTING), T=80)
    described, garbage = OPERATORS[op], 70
    for name in described.sequences:
        if name == described.decay:
            continue
        spoiled = made[name].clone()
        spoiled[:, garbage:] = torch.nan
        known = garbage if form == "recurrent" else 64
        right, wrong = (
            described.forms[form](**{**made, name: x}, backend=place.backend, chunk_size=64).o
            for x in (made[name], spoiled)
        )
        assert torch.equal(right[:, :known], wrong[:, :known]), name
        assert wrong[:, garbage:].isnan().flatten(2).any(-1).all(), name
        if form == "chunk" and place is TORCH and name == "v":
            assert wrong[:, known:garbage].isnan().all()


@OPS
def test_compiled_it_is_looked_at_too(op):
    made, _ = TORCH.make(of(op, SETTING))
    first = OPERATORS[op].tensors[0]
    made[first], at = spoil(made[first], torch.nan)
    torch._dynamo.reset()
    compiled = torch.compile(OPERATORS[op].forms["chunk"], fullgraph=True, backend="aot_eager")
    assert compiled(**made).o.isnan().any()
    with flakit.checked(), pytest.raises(ValueError, match=rf"{first}: expected finite .* nan at {re.escape(str(at))}"):
        compiled(**made)


@FORMS
def test_abc_names_the_argument_that_was_given(form):
    made, _ = TORCH.make(of("gsa", SETTING), states="none")
    made["s"], at = spoil(made["s"], torch.nan)
    made["g"] = None
    with pytest.raises(ValueError, match=re.escape(f"s: expected finite values with g=None, got nan at {at}")):
        OPERATORS["gsa"].forms[form](**made)


@pytest.mark.parametrize("name", ["kk", "a"])
def test_fused_mul_names_the_argument_that_was_given(name):
    made, _ = TORCH.make(of("rwkv7", SETTING), states="none")
    given = {x: made[x] for x in "rwkv"} | {"kk": -made["a"], "a": made["b"]}
    given[name], at = spoil(given[name], torch.nan)
    with flakit.checked(), pytest.raises(ValueError, match=re.escape(f"{name}: expected finite values under")):
        flakit.fused_mul_recurrent_rwkv7(**given)
    torch._dynamo.reset()
    torch.compile(flakit.fused_mul_recurrent_rwkv7, fullgraph=True, backend="aot_eager")(**given)
