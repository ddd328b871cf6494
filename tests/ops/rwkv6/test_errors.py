"""Wrong arguments: each is refused by name, with what was expected and what came. The text is what is tested."""

import os
import re
import subprocess
import sys

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

FORMS = pytest.mark.parametrize("op", [chunk_rwkv6, fused_recurrent_rwkv6])


def given(**changed):
    made = inputs("rwkv6", B=2, T=6, H=3, K=4, V=5, initial_state=True)
    made |= {name: change(made[name]) if callable(change) else change for name, change in changed.items()}
    return {name: x for name, x in made.items() if name != "initial_state" or "initial_state" in changed}


def packed(offsets, **changed):
    """B = 1, T = 6 and, unless changed, these offsets."""
    made = inputs("rwkv6", B=1, T=6, H=3, K=4, V=5)
    return {**made, "cu_seqlens": torch.tensor(offsets) if isinstance(offsets, list) else offsets, **changed}


half = lambda x: x.to(torch.bfloat16)  # noqa: E731
double = lambda x: x.double()  # noqa: E731
state = torch.zeros

WRONG = {
    "r with three axes": (
        given(r=lambda x: x[0]),
        ValueError,
        "r: expected [B, T, H, K], got [6, 3, 4]",
    ),
    "r is no tensor": (given(r=[1.0]), TypeError, "r: expected a tensor, got list"),
    "r of integers": (
        given(r=lambda x: x.int()),
        TypeError,
        "r: expected float64, float32, bfloat16 or float16, got int32",
    ),
    "complex r": (
        given(r=lambda x: x.cfloat()),
        TypeError,
        "r: expected float64, float32, bfloat16 or float16, got complex64",
    ),
    "T = 0": (
        {name: x[:, :0] if x.ndim == 4 else x for name, x in given().items()},
        ValueError,
        "r: expected every axis of [B, T, H, K] to be at least 1, got [2, 0, 3, 4]",
    ),
    "K = 0": (
        {name: x[..., :0] for name, x in given().items()},
        ValueError,
        "r: expected every axis of [B, T, H, K] to be at least 1, got [2, 6, 3, 0]",
    ),
    "V = 0": (
        given(v=lambda x: x[..., :0]),
        ValueError,
        "v: expected every axis of [2, 6, 3, V] to be at least 1, got [2, 6, 3, 0]",
    ),
    "k with another K": (
        given(k=lambda x: x[..., :3]),
        ValueError,
        "k: expected [2, 6, 3, 4] like r, got [2, 6, 3, 3]",
    ),
    "k of another length": (
        given(k=lambda x: x[:, 1:]),
        ValueError,
        "k: expected [2, 6, 3, 4] like r, got [2, 5, 3, 4]",
    ),
    "v with other heads": (given(v=lambda x: x[:, :, :2]), ValueError, "v: expected [2, 6, 3, V], got [2, 6, 2, 5]"),
    "v with three axes": (given(v=lambda x: x[:, :, 0]), ValueError, "v: expected [2, 6, 3, V], got [2, 6, 5]"),
    "w per head": (given(w=lambda x: x[..., 0]), ValueError, "w: expected [2, 6, 3, 4] like r, got [2, 6, 3]"),
    "w of another batch": (given(w=lambda x: x[:1]), ValueError, "w: expected [2, 6, 3, 4] like r, got [1, 6, 3, 4]"),
    "w missing": (given(w=None), TypeError, "w: expected a tensor, got NoneType"),
    "u per token": (given(u=lambda x: x[None]), ValueError, "u: expected [3, 4], got [1, 3, 4]"),
    "u of other heads": (given(u=lambda x: x[:2]), ValueError, "u: expected [3, 4], got [2, 4]"),
    "k in another dtype": (given(k=half), TypeError, "k: expected float32 beside float32 r, got bfloat16"),
    "v in another dtype": (given(v=half), TypeError, "v: expected float32 beside float32 r, got bfloat16"),
    "float64 v": (given(v=double), TypeError, "v: expected float32 beside float32 r, got float64"),
    "w wider than float32": (given(w=double), TypeError, "w: expected float32 beside float32 r, got float64"),
    "w in bfloat16 beside float32": (given(w=half), TypeError, "w: expected float32 beside float32 r, got bfloat16"),
    "w in bfloat16 beside float16": (
        given(r=lambda x: x.half(), k=lambda x: x.half(), v=lambda x: x.half(), w=half),
        TypeError,
        "w: expected float16 or float32 beside float16 r, got bfloat16",
    ),
    "u in bfloat16 beside float32": (given(u=half), TypeError, "u: expected float32 beside float32 r, got bfloat16"),
    "u on another device": (given(u=lambda x: x.to("meta")), ValueError, "u: expected device cpu like r, got meta"),
    "positive decay": (
        given(w=lambda x: x.index_fill(1, torch.tensor([2]), 0.25)),
        ValueError,
        "w: expected a natural-log decay <= 0, got 0.25 at [0, 2, 0, 0]. "
        "A factor in (0, 1) has to become its logarithm: logsigmoid(x) or flakit.log_decay(x)",
    ),
    "infinite positive decay": (
        given(w=lambda x: x.clone().fill_(torch.inf)),
        ValueError,
        "w: expected a natural-log decay <= 0, got inf at [0, 0, 0, 0]",
    ),
    "NaN decay": (
        given(w=lambda x: x.index_fill(3, torch.tensor([1]), torch.nan)),
        ValueError,
        "w: expected a natural-log decay <= 0, got nan at [0, 0, 0, 1]. A NaN is no missing logarithm, it comes from "
        "upstream: from the weights or inputs that made w",
    ),
    "state of another batch": (
        given(initial_state=state(1, 3, 4, 5)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 like B), got [1, 3, 4, 5]",
    ),
    "state of one sequence too few": (
        packed([0, 2, 6], initial_state=state(1, 3, 4, 5)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 packed sequences), got [1, 3, 4, 5]",
    ),
    "state transposed": (
        given(initial_state=state(2, 3, 5, 4)),
        ValueError,
        "initial_state: expected [2, 3, 4, 5] (N = 2 like B), got [2, 3, 5, 4]",
    ),
    "state of integers": (
        given(initial_state=state(2, 3, 4, 5).int()),
        TypeError,
        "initial_state: expected float64, float32, bfloat16 or float16, got int32",
    ),
    "state is no tensor": (given(initial_state=0), TypeError, "initial_state: expected a tensor, got int"),
    "scale is text": (given(scale="1"), TypeError, "scale: expected a number or None, got str"),
    "scale is a tensor": (given(scale=torch.ones(1)), TypeError, "scale: expected a number or None, got Tensor"),
    "scale beyond every float": (
        given(scale=10**400),
        ValueError,
        "scale: expected a finite number, got a whole number of 1329 bits",
    ),
    "scale is a flag": (given(scale=True), TypeError, "scale: expected a number or None, got bool"),
    "scale is NaN": (given(scale=float("nan")), ValueError, "scale: expected a finite number, got nan"),
    "output_final_state is a number": (
        given(output_final_state=1),
        TypeError,
        "output_final_state: expected True or False, got int",
    ),
    "offsets are a list": (given(cu_seqlens=[0, 6]), TypeError, "cu_seqlens: expected an integer tensor, got list"),
    "offsets are floats": (packed([0.0, 6.0]), TypeError, "cu_seqlens: expected int32 or int64, got float32"),
    "offsets of two axes": (packed([[0, 6]]), ValueError, "cu_seqlens: expected [N + 1] with N >= 1, got [1, 2]"),
    "one offset": (packed([0]), ValueError, "cu_seqlens: expected [N + 1] with N >= 1, got [1]"),
    "packed with a batch": (
        given(cu_seqlens=torch.tensor([0, 6])),
        ValueError,
        "cu_seqlens: expected a batch of 1 with packed sequences, got B = 2",
    ),
    "offsets that start late": (
        packed([1, 6]),
        ValueError,
        "cu_seqlens: expected offsets from 0, got 1 at index 0",
    ),
    "offsets beyond the end": (
        packed([0, 7]),
        ValueError,
        "cu_seqlens: expected offsets up to T = 6 at most, got 7 at the end",
    ),
    "offsets that go back": (
        packed([0, 4, 3, 6]),
        ValueError,
        "cu_seqlens: expected non-decreasing offsets, got 4 then 3 at index 2",
    ),
    "offsets on another device": (
        packed(torch.tensor([0, 6], device="meta")),
        ValueError,
        "cu_seqlens: expected device cpu like r, got meta",
    ),
    "offsets on the CPU alone": (
        packed(None, cu_seqlens_cpu=torch.tensor([0, 6])),
        ValueError,
        "cu_seqlens_cpu: expected None without cu_seqlens, of which it is a copy on the CPU",
    ),
    "offsets on the CPU of another number": (
        packed([0, 2, 6], cu_seqlens_cpu=torch.tensor([0, 6])),
        ValueError,
        "cu_seqlens_cpu: expected [3] like cu_seqlens, got [2]",
    ),
    "offsets on the CPU with other values": (
        packed([0, 2, 6], cu_seqlens_cpu=torch.tensor([0, 3, 6])),
        ValueError,
        "cu_seqlens_cpu: expected [0, 2, 6] like cu_seqlens, got [0, 3, 6]",
    ),
    "offsets on the CPU beyond the end": (
        packed([0, 2, 6], cu_seqlens_cpu=torch.tensor([0, 2, 8])),
        ValueError,
        "cu_seqlens_cpu: expected offsets up to T = 6 at most, got 8 at the end",
    ),
    "offsets on the CPU that are elsewhere": (
        packed([0, 2, 6], cu_seqlens_cpu=torch.tensor([0, 2, 6], device="meta")),
        ValueError,
        "cu_seqlens_cpu: expected device cpu like its name, got meta",
    ),
    "offsets on the CPU as a list": (
        packed([0, 2, 6], cu_seqlens_cpu=[0, 2, 6]),
        TypeError,
        "cu_seqlens_cpu: expected an integer tensor, got list",
    ),
    "heads first": (given(head_first=True), ValueError, "head_first: expected False, got True; give [B, T, H, ...]"),
    "heads first as text": (given(head_first="no"), TypeError, "head_first: expected True or False, got str"),
    "backwards in time": (given(reverse=True), ValueError, "reverse: expected False, got True; flip the inputs"),
    "unknown backend": (
        given(backend="cuda"),
        ValueError,
        "backend: expected one of triton, torch, reference or None, got 'cuda'",
    ),
    "float64 on triton": (
        {name: x.double() for name, x in given().items()} | {"backend": "triton"},
        TypeError,
        "backend: 'triton' computes in float32, got float64 inputs, use 'torch' or 'reference'",
    ),
}


@FORMS
@pytest.mark.parametrize("arguments, error, text", WRONG.values(), ids=WRONG)
def test_wrong_argument(op, arguments, error, text, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: True)  # what is refused is refused before it
    with pytest.raises(error, match=re.escape(text)):
        op(**arguments)


def test_given_arguments_are_right_to_begin_with():
    for op in (chunk_rwkv6, fused_recurrent_rwkv6):
        assert op(**given()).o.isfinite().all()
        assert op(**given(initial_state=state(2, 3, 4, 5))).o.isfinite().all()
        assert op(**packed([0, 0, 2, 6])).o.isfinite().all()


@pytest.mark.skipif(interpreted(), reason="the interpreter runs kernels on CPU tensors")
@FORMS
def test_triton_on_cpu_tensors(op, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: True)
    text = (
        "backend: 'triton' needs CUDA tensors, got a tensor on cpu; on a CPU start the process with TRITON_INTERPRET=1"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        op(**given(), backend="triton")


@pytest.mark.full
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@FORMS
def test_the_interpreter_asked_for_too_late(op):
    # In a process of its own: what counts is what was imported first.
    code = (
        "import os, triton.language, flakit; os.environ['TRITON_INTERPRET'] = '1'; "
        f"flakit.{op.__name__}(**flakit.inputs('rwkv6', T=3, K=16, V=16), backend='triton')"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "backend: TRITON_INTERPRET=1 was set after triton had been imported" in done.stderr.splitlines()[-1]


def test_triton_not_installed(monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: False)
    with pytest.raises(ValueError, match="backend: 'triton' is not installed here"):
        chunk_rwkv6(**given(), backend="triton")


@FORMS
@pytest.mark.parametrize("size", [0, 24, 512, -16, 16.0, True, "16"], ids=repr)
def test_chunk_size(op, size):
    text = f"chunk_size: expected one of (1, 2, 4, 8, 16, 32, 64, 128, 256) or None, got {size!r}"
    with pytest.raises(ValueError, match=re.escape(text)):
        op(**given(), chunk_size=size)


@FORMS
def test_unknown_keyword(op):
    with pytest.raises(TypeError, match=rf"{op.__name__}\(\) got an unexpected keyword argument 'chunksize'"):
        op(**given(), chunksize=16)


def test_our_own_keywords_are_not_positional():
    made = given()
    with pytest.raises(TypeError, match="positional"):
        chunk_rwkv6(*made.values(), None, None, False, None, None, 16)


def test_negative_zero_and_minus_infinity_are_decays():
    for w in (-0.0, 0.0, -torch.inf):
        assert chunk_rwkv6(**given(w=lambda x, w=w: x.clone().fill_(w))).o.isfinite().all()
