"""Wrong arguments: each is refused by name, with what was expected and what came. The text is what is tested."""

import re

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7

FORMS = pytest.mark.parametrize("op", [chunk_rwkv7, fused_recurrent_rwkv7])


def changed(**changes):
    args = inputs("rwkv7", B=2, T=6, H=3, K=4, V=5)
    return args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


def packed(offsets, **changes):
    args = inputs("rwkv7", B=1, T=6, H=3, K=4, V=5)
    return {**args, "cu_seqlens": torch.tensor(offsets), **changes}


def fused_mul(**changes):
    args = changed()
    args |= {"kk": -args["a"], "a": args["a"].sigmoid()}
    args.pop("b")
    return args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


half = lambda x: x.to(torch.bfloat16)  # noqa: E731
state = torch.zeros

WRONG = {
    "k with another K": (
        changed(k=lambda x: x[..., :3]),
        ValueError,
        "k: expected [2, 6, 3, 4] like r, got [2, 6, 3, 3]",
    ),
    "a with V columns": (
        changed(a=lambda x: x.repeat(1, 1, 1, 2)),
        ValueError,
        "a: expected [2, 6, 3, 4] like r, got [2, 6, 3, 8]",
    ),
    "b of another length": (
        changed(b=lambda x: x[:, 1:]),
        ValueError,
        "b: expected [2, 6, 3, 4] like r, got [2, 5, 3, 4]",
    ),
    "b missing": (changed(b=None), TypeError, "b: expected a tensor, got NoneType"),
    "a in bfloat16 beside float32": (changed(a=half), TypeError, "a: expected float32 beside float32 r, got bfloat16"),
    "a wider than float32": (
        changed(a=lambda x: x.double()),
        TypeError,
        "a: expected float32 beside float32 r, got float64",
    ),
    "a in float16 beside bfloat16": (
        changed(r=half, k=half, v=half, a=lambda x: x.half()),
        TypeError,
        "a: expected bfloat16 or float32 beside bfloat16 r, got float16",
    ),
    "b on another device": (changed(b=lambda x: x.to("meta")), ValueError, "b: expected device cpu like r, got meta"),
    "state transposed": (
        changed(initial_state=state(2, 3, 5, 4)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 like B), got [2, 3, 5, 4]",
    ),
    "state of one sequence too few": (
        packed([0, 2, 6], initial_state=state(1, 3, 4, 5)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 packed sequences), got [1, 3, 4, 5]",
    ),
    "safe_gate is text": (changed(safe_gate="yes"), TypeError, "safe_gate: expected True or False, got str"),
    "disable_recompute is text": (
        changed(disable_recompute="no"),
        TypeError,
        "disable_recompute: expected True or False, got str",
    ),
    "a lower bound that is none": (
        changed(lower_bound=0.5),
        ValueError,
        "lower_bound: expected a natural-log decay below 0 or None, got 0.5",
    ),
    "lower bound is text": (changed(lower_bound="-5"), TypeError, "lower_bound: expected a number or None, got str"),
    "a sequence split over devices": (
        changed(cp_context=object()),
        TypeError,
        "cp_context: expected one of flash-linear-attention's, got object",
    ),
}


@FORMS
@pytest.mark.parametrize("arguments, error, text", WRONG.values(), ids=WRONG)
def test_wrong_argument(op, arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        op(**arguments)


WRONG_PRODUCT = {
    "kk per head": (fused_mul(kk=lambda x: x[..., 0]), ValueError, "kk: expected [2, 6, 3, 4] like r, got [2, 6, 3]"),
    "a missing": (fused_mul(a=None), TypeError, "a: expected a tensor, got NoneType"),
    "kk in bfloat16": (fused_mul(kk=half), TypeError, "kk: expected float32 beside float32 r, got bfloat16"),
    "reverse": (fused_mul(reverse=True), ValueError, "reverse: expected False, got True; flip the inputs"),
}


@pytest.mark.parametrize("arguments, error, text", WRONG_PRODUCT.values(), ids=WRONG_PRODUCT)
def test_wrong_argument_of_the_product_form(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        fused_mul_recurrent_rwkv7(**arguments)


def test_unchanged_arguments_are_right():
    for op in (chunk_rwkv7, fused_recurrent_rwkv7):
        assert op(**changed()).o.isfinite().all()
        assert op(**changed(initial_state=state(2, 3, 4, 5))).o.isfinite().all()
        assert op(**packed([0, 0, 2, 6])).o.isfinite().all()
    assert fused_mul_recurrent_rwkv7(**fused_mul()).o.isfinite().all()


@pytest.mark.parametrize("op", [chunk_rwkv7, fused_recurrent_rwkv7, fused_mul_recurrent_rwkv7])
def test_unknown_keyword(op):
    arguments = fused_mul() if op is fused_mul_recurrent_rwkv7 else changed()
    with pytest.raises(TypeError, match=rf"{op.__name__}\(\) got an unexpected keyword argument 'chunksize'"):
        op(**arguments, chunksize=16)


def test_scale_is_one_unless_said_otherwise_and_none_asks_for_the_usual_one():
    for op, args in (
        (chunk_rwkv7, changed()),
        (fused_recurrent_rwkv7, changed()),
        (fused_mul_recurrent_rwkv7, fused_mul()),
    ):
        assert torch.equal(op(**args).o, op(**args, scale=1.0).o)
        assert torch.equal(op(**args, scale=None).o, op(**args, scale=args["r"].shape[-1] ** -0.5).o)


def test_arguments_in_the_order_users_know():
    r, w, k, v, a, b = changed().values()
    for op in (chunk_rwkv7, fused_recurrent_rwkv7):
        by_name = op(r=r, w=w, k=k, v=v, a=a, b=b, scale=0.5, initial_state=state(2, 3, 4, 5), output_final_state=True)
        by_place = op(r, w, k, v, a, b, 0.5, state(2, 3, 4, 5), True)
        assert torch.equal(by_name.o, by_place.o) and torch.equal(by_name.final_state, by_place.final_state)
