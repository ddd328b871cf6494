"""The recurrence's backward pass holds about 4 sqrt(T) states, not every one, and gives the very same numbers."""

from math import isqrt

import pytest
import torch

from flakit.numerics.evaluate import cotangents, evaluate
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from tests.ops.memory import peak

OPS = pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPERATORS.items()])


def arguments(op, T, B=1, H=1, size=32, states=False):
    """What `reference.forward` takes, in float64, and the gradients arriving at its outputs."""
    made = inputs(op, B=B, T=T, H=H, K=size, V=size, dtype=torch.float64, initial_state=states)
    do, dstate = cotangents(op, made, dfinal_state=states)
    return (*(made[name] for name in op.tensors), op.scale(made), made.get("initial_state")), (do, dstate)


def state_bytes(op):
    _, final = op.reference.forward(*arguments(op, 1)[0])
    return sum(x.nbytes for x in op.parts(final))


@OPS
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("T", [1, 2, 3, 8, 37])
def test_segments_change_no_bit(op, T, states):
    given, arriving = arguments(op, T, B=2, H=2, size=5, states=states)
    *found, dinitial = op.reference.backward(*given, *arriving)

    back = list(op.reference.steps(*given, *arriving))[T:]
    assert [x.t for x in back] == [*reversed(range(T))]
    for name, got in zip(op.tensors, found, strict=True):
        whole = torch.stack([getattr(x, f"d{name}") for x in reversed(back)], 1)
        assert torch.equal(got, whole if name in op.sequences else whole.sum((0, 1)))
    before = (back[-1].dhk_before, back[-1].dhv_before) if op.name == "gsa" else back[-1].dstate_before
    for got, whole in zip(op.parts(dinitial), op.parts(before), strict=True):
        assert torch.equal(got, whole)


@OPS
def test_backward_holds_about_four_root_T_states(op, record_property):
    T = 300
    given, arriving = arguments(op, T)
    state = state_bytes(op)
    op.reference.backward(*given, *arriving)  # what the first call alone allocates
    rows = sum(x.nbytes for x in given[: len(op.tensors)])
    most = peak(lambda: op.reference.backward(*given, *arriving))
    record_property("states held", f"{(most - 2 * rows) / state:.1f}, 4 sqrt(T) = {4 * isqrt(T)}")
    # Gradients as they are found and, all together, once more; two states' worth of temporaries besides.
    assert most <= 2 * rows + (4 * isqrt(T) + 8) * state


@OPS
def test_forward_holds_no_state_but_the_last(op):
    T = 300
    given, _ = arguments(op, T)
    o, _ = op.reference.forward(*given)
    assert peak(lambda: op.reference.forward(*given)) <= 2 * o.nbytes + 8 * state_bytes(op)


@pytest.mark.full
@OPS
def test_a_training_step_is_held_to_it_too(op):
    """By way of the operator itself, whose inputs are float32 and computed with in float64."""
    T = 300
    made = inputs(op, B=1, T=T, H=1, K=32, V=32)
    evaluate(op, made, form="recurrent")
    rows = 2 * sum(x.nbytes for x in op.leaves(made).values())
    assert peak(lambda: evaluate(op, made, form="recurrent")) <= 4 * rows + (4 * isqrt(T) + 8) * state_bytes(op)
