"""Wrong arguments: each is refused by name, with what was expected and what came. The text is what is tested."""

import re

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

FORMS = pytest.mark.parametrize("op", [chunk_rwkv6, fused_recurrent_rwkv6])


def changed(**changes):
    args = inputs("rwkv6", B=2, T=6, H=3, K=4, V=5, initial_state=True)
    args |= {name: change(args[name]) if callable(change) else change for name, change in changes.items()}
    return {name: x for name, x in args.items() if name != "initial_state" or "initial_state" in changes}


def packed(offsets, **changes):
    """Of one batch and six tokens, with these offsets unless changed."""
    args = inputs("rwkv6", B=1, T=6, H=3, K=4, V=5)
    return {**args, "cu_seqlens": torch.tensor(offsets) if isinstance(offsets, list) else offsets, **changes}


half = lambda x: x.to(torch.bfloat16)  # noqa: E731
double = lambda x: x.double()  # noqa: E731
state = torch.zeros

WRONG = {
    "k with another K": (
        changed(k=lambda x: x[..., :3]),
        ValueError,
        "k: expected [2, 6, 3, 4] like r, got [2, 6, 3, 3]",
    ),
    "k of another length": (
        changed(k=lambda x: x[:, 1:]),
        ValueError,
        "k: expected [2, 6, 3, 4] like r, got [2, 5, 3, 4]",
    ),
    "w of another batch": (changed(w=lambda x: x[:1]), ValueError, "w: expected [2, 6, 3, 4] like r, got [1, 6, 3, 4]"),
    "w missing": (changed(w=None), TypeError, "w: expected a tensor, got NoneType"),
    "u per token": (changed(u=lambda x: x[None]), ValueError, "u: expected [3, 4], got [1, 3, 4]"),
    "u of other heads": (changed(u=lambda x: x[:2]), ValueError, "u: expected [3, 4], got [2, 4]"),
    "w in bfloat16 beside float16": (
        changed(r=lambda x: x.half(), k=lambda x: x.half(), v=lambda x: x.half(), w=half),
        TypeError,
        "w: expected float16 or float32 beside float16 r, got bfloat16",
    ),
    "u in bfloat16 beside float32": (changed(u=half), TypeError, "u: expected float32 beside float32 r, got bfloat16"),
    "u on another device": (changed(u=lambda x: x.to("meta")), ValueError, "u: expected device cpu like r, got meta"),
    "state of another batch": (
        changed(initial_state=state(1, 3, 4, 5)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 like B), got [1, 3, 4, 5]",
    ),
    "state of one sequence too few": (
        packed([0, 2, 6], initial_state=state(1, 3, 4, 5)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 packed sequences), got [1, 3, 4, 5]",
    ),
    "state transposed": (
        changed(initial_state=state(2, 3, 5, 4)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 like B), got [2, 3, 5, 4]",
    ),
    "state of integers": (
        changed(initial_state=state(2, 3, 4, 5).int()),
        TypeError,
        "initial_state: expected float64, float32, bfloat16 or float16, got int32",
    ),
    "state is no tensor": (changed(initial_state=0), TypeError, "initial_state: expected a tensor, got int"),
}


@FORMS
@pytest.mark.parametrize("arguments, error, text", WRONG.values(), ids=WRONG)
def test_wrong_argument(op, arguments, error, text, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: True)  # what is refused is refused before it
    with pytest.raises(error, match=re.escape(text)):
        op(**arguments)


def test_unchanged_arguments_are_right():
    for op in (chunk_rwkv6, fused_recurrent_rwkv6):
        assert op(**changed()).o.isfinite().all()
        assert op(**changed(initial_state=state(2, 3, 4, 5))).o.isfinite().all()
        assert op(**packed([0, 0, 2, 6])).o.isfinite().all()


def test_our_own_keywords_are_not_positional():
    args = changed()
    with pytest.raises(TypeError, match="positional"):
        chunk_rwkv6(*args.values(), None, None, False, None, None, 16)
