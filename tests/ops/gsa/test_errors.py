"""Wrong arguments: each is refused by name, with what was expected and what came. The text is what is tested."""

import re

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.ops.gsa import chunk_gsa, fused_recurrent_gsa

FORMS = pytest.mark.parametrize("op", [chunk_gsa, fused_recurrent_gsa])


def changed(**changes):
    args = inputs("gsa", B=2, T=6, H=3, HQ=6, K=4, V=5, M=7)
    return args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


def packed(offsets, **changes):
    return {**inputs("gsa", B=1, T=6, H=3, K=4, V=5, M=7), "cu_seqlens": torch.tensor(offsets), **changes}


half = lambda x: x.to(torch.bfloat16)  # noqa: E731
hk, hv = torch.zeros(2, 3, 4, 7), torch.zeros(2, 3, 7, 5)

WRONG = {
    "five query heads for three": (
        changed(q=lambda x: x[:, :, :5]),
        ValueError,
        "q: expected HQ to be a multiple of k's H = 3, got HQ = 5",
    ),
    "k with another K": (changed(k=lambda x: x[..., :3]), ValueError, "k: expected [2, 6, H, 4], got [2, 6, 3, 3]"),
    "v of query heads": (
        changed(v=lambda x: x.repeat(1, 1, 2, 1)),
        ValueError,
        "v: expected [2, 6, 3, V], got [2, 6, 6, 5]",
    ),
    "s of another length": (changed(s=lambda x: x[:, 1:]), ValueError, "s: expected [2, 6, 3, M], got [2, 5, 3, 7]"),
    "s missing": (changed(s=None), TypeError, "s: expected a tensor, got NoneType"),
    "g with other slots": (
        changed(g=lambda x: x[..., :6]),
        ValueError,
        "g: expected [2, 6, 3, 7] like s, got [2, 6, 3, 6]",
    ),
    "s in another dtype": (changed(s=half), TypeError, "s: expected float32 beside float32 q, got bfloat16"),
    "state is one tensor": (
        changed(initial_state=hk),
        TypeError,
        "initial_state: expected a pair (hk, hv), got Tensor",
    ),
    "state of three": (
        changed(initial_state=(hk, hv, hv)),
        TypeError,
        "initial_state: expected a pair (hk, hv), got 3 of them",
    ),
    "half a state": (
        changed(initial_state=(hk, None)),
        TypeError,
        "initial_state: expected both hk and hv or neither, got one of them",
    ),
    "hk with the slots as rows": (
        changed(initial_state=(hk.mT, hv)),
        ValueError,
        "initial_state[0]: expected [2, 3, 4, 7] (N = 2 like B), got [2, 3, 7, 4]",
    ),
    "hv of one sequence too few": (
        packed([0, 2, 6], initial_state=(hk, hv[:1])),
        ValueError,
        "initial_state[1]: expected [2, 3, 7, 5] (N = 2 packed sequences), got [1, 3, 7, 5]",
    ),
    "state without a gate": (
        changed(g=None, initial_state=(hk, hv)),
        ValueError,
        "initial_state: expected None with g=None, got a pair; ABC's normaliser begins anew in every call",
    ),
    "offsets that go back, without a gate": (
        packed([0, 4, 3, 6], g=None),
        ValueError,
        "cu_seqlens: expected non-decreasing offsets, got 4 then 3 at index 2",
    ),
    "checkpoint level is text": (
        changed(checkpoint_level="2"),
        TypeError,
        "checkpoint_level: expected a whole number, got str",
    ),
}


@FORMS
@pytest.mark.parametrize("arguments, error, text", WRONG.values(), ids=WRONG)
def test_wrong_argument(op, arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        op(**arguments)


@FORMS
def test_unchanged_arguments_are_right(op):
    assert op(**changed()).o.isfinite().all()
    assert op(**changed(initial_state=(hk, hv))).o.isfinite().all()
    assert op(**changed(initial_state=(None, None))).o.isfinite().all()
    assert op(**changed(g=None)).o.isfinite().all()
    assert op(**packed([0, 0, 2, 6])).o.isfinite().all()


@pytest.mark.interpret
@FORMS
@pytest.mark.parametrize("name, axis, most", [("q", "K", 512), ("v", "V", 512), ("s", "M", 128)])
def test_larger_than_the_kernels_hold(op, name, axis, most):
    args = inputs("gsa", T=1, H=1, **{"K": 16, "V": 16, "M": 16, axis: most + 1})
    text = f"{name}: expected {axis} <= {most} for backend 'triton', got {axis} = {most + 1}; use backend='torch'"
    with pytest.raises(ValueError, match=re.escape(text)):
        op(**args, backend="triton")
    assert op(**args, backend="torch").o.isfinite().all()


def test_arguments_in_the_order_users_know():
    args = changed()
    rows = [args[name] for name in ("q", "k", "v", "s", "g")]
    by_name = chunk_gsa(**args, scale=0.5, initial_state=(hk, hv), output_final_state=True)
    for op, more in ((chunk_gsa, (2, None, None)), (fused_recurrent_gsa, (False, None))):
        by_place = op(*rows, 0.5, (hk, hv), True, *more)
        assert torch.allclose(by_name.o, by_place.o, atol=1e-6)
        assert torch.allclose(by_name.final_state[0], by_place.final_state[0], atol=1e-6)
