"""The reference recurrences and their hand-written backwards, in float64: against autograd, finite differences, and the
chunked form. What is particular to an operator is tested in its folder."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flakit.numerics.operators import OPERATORS
from tests.ops.recurrences import Recurrence, flat

RECURRENCES = {op: Recurrence(op) for op in OPERATORS}
each_operator = pytest.mark.parametrize("op", OPERATORS)
GROUPS = [(op, G) for op in OPERATORS for G in ((1, 3) if op == "gsa" else (1,))]


@pytest.mark.parametrize("op, G", GROUPS)
@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("decay", range(9))
def test_backward_is_autograd_of_forward(op, G, decay, T):
    of = RECURRENCES[op]
    args, do, dstate = of.arguments(T=T, G=G, decay=of.decays[decay])
    grads, expected = of.backward(*args, do, dstate), of.by_autograd(args, do, dstate)
    for n, (grad, true) in enumerate(zip(grads, expected, strict=True)):
        assert grad.isfinite().all()
        assert_close(grad, true, rtol=1e-12, atol=1e-13, msg=lambda text, n=n: f"gradient {n}: {text}")


@each_operator
def test_backward_without_states(op):
    of = RECURRENCES[op]
    (*rows, scale, state), do, _ = of.arguments()
    zeros = tuple(map(torch.zeros_like, state)) if isinstance(state, tuple) else torch.zeros_like(state)
    without = of.backward(*rows, scale, None, do, None)
    for grad, expected in zip(without, of.backward(*rows, scale, zeros, do, zeros), strict=True):
        assert torch.equal(grad, expected)


@each_operator
def test_forward_and_backward_against_finite_differences(op):
    of = RECURRENCES[op]
    (*rows, scale, state), _, _ = of.arguments(**of.small)

    class HandWritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *leaves):
            ctx.save_for_backward(*leaves)
            rows, state = of.split(leaves)
            return of.forward(*rows, scale, state)

        @staticmethod
        def backward(ctx, do, *dstate):
            rows, state = of.split(ctx.saved_tensors)
            return of.backward(*rows, scale, state, do, dstate if len(dstate) > 1 else dstate[0])

    leaves = [x.clone().requires_grad_() for x in flat((*rows, state))]
    assert torch.autograd.gradcheck(HandWritten.apply, leaves)


@each_operator
def test_a_state_that_grows_is_computed_not_refused(op):
    # Cases and lessons need one: of a positive decay, and in RWKV7 of an eigenvalue 1 + a·b beyond 1.
    of = RECURRENCES[op]
    args, do, dstate = of.arguments()
    name, factor = ("b", -3) if op == "rwkv7" else (OPERATORS[op].decay, -1)
    grown = tuple(factor * x if n == of.tensors.index(name) else x for n, x in enumerate(args))
    for grad, expected in zip(of.backward(*grown, do, dstate), of.by_autograd(grown, do, dstate), strict=True):
        assert_close(grad, expected)


@each_operator
def test_scale_has_a_default(op):
    of = RECURRENCES[op]
    (*rows, _, state), _, _ = of.arguments()
    default = 1.0 if op == "rwkv7" else 5**-0.5
    assert torch.equal(of.forward(*rows, None, state)[0], of.forward(*rows, default, state)[0])


@each_operator
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 40), G=st.integers(1, 2), decay=st.integers(0, 8), C=st.sampled_from([1, 2, 8, 32]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_chunked_form_is_the_recurrence(op, T, G, decay, C, seed):
    of = RECURRENCES[op]
    args, do, dstate = of.arguments(T=T, G=G if op == "gsa" else 1, decay=of.decays[decay], seed=seed)
    chunked = flat(of.chunked.forward(*args, C)) + flat(of.chunked.backward(*args, do, dstate, C))
    for result, expected in zip(chunked, of.forward(*args) + of.backward(*args, do, dstate), strict=True):
        assert_close(result, expected, rtol=1e-10, atol=1e-12)


@each_operator
def test_half_precision_inputs_are_computed_in_float32(op):
    of = RECURRENCES[op]
    args, do, dstate = of.arguments(dtype=torch.bfloat16)
    assert {x.dtype for x in of.forward(*args) + of.backward(*args, do, dstate)} == {torch.float32}
