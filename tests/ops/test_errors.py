"""Wrong arguments, the same of every operator and form: each is refused by name, with what was expected and what came.

The text is what is tested. Arguments that one operator alone has are in its own test_errors.py.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.dispatch import has_triton, interpreted

OPS = pytest.mark.parametrize("op", OPERATORS)
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])


@dataclass(frozen=True)
class Case:
    """What is changed in right arguments: a value by name or, of a tensor, a function of it. The names "first" and
    "decay" stand for the operator's own, in the text too. packed: offsets of a batch of one."""

    error: type[Exception]
    text: str
    changes: dict[str, Any]
    packed: Any = None


def case(error, text, packed=None, **changes) -> Case:
    return Case(error, text, changes, packed)


def sizes(op: str) -> dict[str, int]:
    return {"T": 6, "H": 3, "K": 4, "V": 5} | ({"M": 7} if op == "gsa" else {})


def names(op: str) -> dict[str, str]:
    """An operator's own names, and the axes of its first tensor and of its decay."""
    first, decay = OPERATORS[op].tensors[0], OPERATORS[op].decay
    axes = OPERATORS[op].axes[first].replace(" ", ", ")
    like, width = (f"like {first}", 4) if op != "gsa" else ("like s", 7)
    return {"first": first, "decay": decay, "axes": axes, "decay_axes": f"[2, 6, 3, {width}] {like}"}


def arguments(op: str, case: Case) -> dict:
    own, batch = names(op), 2 if case.packed is None else 1
    args = inputs(op, B=batch, **sizes(op))
    if case.packed is not None:
        args["cu_seqlens"] = torch.tensor(case.packed) if isinstance(case.packed, list) else case.packed
    for name, change in case.changes.items():
        name = own.get(name, name)
        args[name] = change(args[name]) if isinstance(change, Callable) else change
    return args


half, double = (lambda x: x.bfloat16()), (lambda x: x.double())
FLOAT = "expected float64, float32, bfloat16 or float16"
META = torch.tensor([0, 6], device="meta")
WRONG = {
    "three axes": case(ValueError, "{first}: expected [{axes}], got [6, 3, 4]", first=lambda x: x[0]),
    "no tensor": case(TypeError, "{first}: expected a tensor, got list", first=[1.0]),
    "integers": case(TypeError, f"{{first}}: {FLOAT}, got int32", first=lambda x: x.int()),
    "complex": case(TypeError, f"{{first}}: {FLOAT}, got complex64", first=lambda x: x.cfloat()),
    "T = 0": case(
        ValueError,
        "{first}: expected every axis of [{axes}] to be at least 1, got [2, 0, 3, 4]",
        first=lambda x: x[:, :0],
    ),
    "K = 0": case(
        ValueError,
        "{first}: expected every axis of [{axes}] to be at least 1, got [2, 6, 3, 0]",
        first=lambda x: x[..., :0],
    ),
    "V = 0": case(
        ValueError,
        "v: expected every axis of [2, 6, 3, V] to be at least 1, got [2, 6, 3, 0]",
        v=lambda x: x[..., :0],
    ),
    "v with other heads": case(ValueError, "v: expected [2, 6, 3, V], got [2, 6, 2, 5]", v=lambda x: x[:, :, :2]),
    "v with three axes": case(ValueError, "v: expected [2, 6, 3, V], got [2, 6, 5]", v=lambda x: x[:, :, 0]),
    "decay per head": case(ValueError, "{decay}: expected {decay_axes}, got [2, 6, 3]", decay=lambda x: x[..., 0]),
    "k in another dtype": case(TypeError, "k: expected float32 beside float32 {first}, got bfloat16", k=half),
    "v in another dtype": case(TypeError, "v: expected float32 beside float32 {first}, got bfloat16", v=half),
    "float64 v": case(TypeError, "v: expected float32 beside float32 {first}, got float64", v=double),
    "wide decay": case(TypeError, "{decay}: expected float32 beside float32 {first}, got float64", decay=double),
    "narrow decay": case(TypeError, "{decay}: expected float32 beside float32 {first}, got bfloat16", decay=half),
    "k elsewhere": case(ValueError, "k: expected device cpu like {first}, got meta", k=lambda x: x.to("meta")),
    "decay elsewhere": case(
        ValueError, "{decay}: expected device cpu like {first}, got meta", decay=lambda x: x.to("meta")
    ),
    "positive decay": case(
        ValueError,
        "{decay}: expected a natural-log decay <= 0, got 0.25 at [0, 2, 0, 0]. "
        "A factor in (0, 1) has to become its logarithm: logsigmoid(x) or flakit.log_decay(x)",
        decay=lambda x: x.index_fill(1, torch.tensor([2]), 0.25),
    ),
    "infinite positive decay": case(
        ValueError,
        "{decay}: expected a natural-log decay <= 0, got inf at [0, 0, 0, 0]",
        decay=lambda x: x.clone().fill_(torch.inf),
    ),
    "NaN decay": case(
        ValueError,
        "{decay}: expected a natural-log decay <= 0, got nan at [0, 0, 0, 1]. A NaN is no missing logarithm, it comes "
        "from upstream: from the weights or inputs that made {decay}",
        decay=lambda x: x.index_fill(3, torch.tensor([1]), torch.nan),
    ),
    "scale is text": case(TypeError, "scale: expected a number or None, got str", scale="1"),
    "scale is a tensor": case(TypeError, "scale: expected a number or None, got Tensor", scale=torch.ones(1)),
    "scale beyond every float": case(
        ValueError, "scale: expected a finite number, got a whole number of 1329 bits", scale=10**400
    ),
    "scale is a flag": case(TypeError, "scale: expected a number or None, got bool", scale=True),
    "scale is NaN": case(ValueError, "scale: expected a finite number, got nan", scale=float("nan")),
    "output_final_state is a number": case(
        TypeError, "output_final_state: expected True or False, got int", output_final_state=1
    ),
    "offsets are a list": case(TypeError, "cu_seqlens: expected an integer tensor, got list", cu_seqlens=[0, 6]),
    "offsets are floats": case(TypeError, "cu_seqlens: expected int32 or int64, got float32", packed=[0.0, 6.0]),
    "offsets of two axes": case(ValueError, "cu_seqlens: expected [N + 1] with N >= 1, got [1, 2]", packed=[[0, 6]]),
    "one offset": case(ValueError, "cu_seqlens: expected [N + 1] with N >= 1, got [1]", packed=[0]),
    "packed with a batch": case(
        ValueError,
        "cu_seqlens: expected a batch of 1 with packed sequences, got B = 2",
        cu_seqlens=torch.tensor([0, 6]),
    ),
    "offsets that start late": case(ValueError, "cu_seqlens: expected offsets from 0, got 1 at index 0", packed=[1, 6]),
    "offsets beyond the end": case(
        ValueError, "cu_seqlens: expected offsets up to T = 6 at most, got 7 at the end", packed=[0, 7]
    ),
    "offsets that go back": case(
        ValueError, "cu_seqlens: expected non-decreasing offsets, got 4 then 3 at index 2", packed=[0, 4, 3, 6]
    ),
    "offsets elsewhere": case(ValueError, "cu_seqlens: expected device cpu like {first}, got meta", packed=META),
    "offsets on the CPU alone": case(
        ValueError,
        "cu_seqlens_cpu: expected None without cu_seqlens, of which it is a copy on the CPU",
        cu_seqlens_cpu=torch.tensor([0, 6]),
    ),
    "offsets on the CPU of another number": case(
        ValueError,
        "cu_seqlens_cpu: expected [3] like cu_seqlens, got [2]",
        packed=[0, 2, 6],
        cu_seqlens_cpu=torch.tensor([0, 6]),
    ),
    "offsets on the CPU with other values": case(
        ValueError,
        "cu_seqlens_cpu: expected [0, 2, 6] like cu_seqlens, got [0, 3, 6]",
        packed=[0, 2, 6],
        cu_seqlens_cpu=torch.tensor([0, 3, 6]),
    ),
    "offsets on the CPU beyond the end": case(
        ValueError,
        "cu_seqlens_cpu: expected offsets up to T = 6 at most, got 8 at the end",
        packed=[0, 2, 6],
        cu_seqlens_cpu=torch.tensor([0, 2, 8]),
    ),
    "offsets on the CPU that are elsewhere": case(
        ValueError, "cu_seqlens_cpu: expected device cpu like its name, got meta", packed=[0, 6], cu_seqlens_cpu=META
    ),
    "offsets on the CPU as a list": case(
        TypeError, "cu_seqlens_cpu: expected an integer tensor, got list", packed=[0, 2, 6], cu_seqlens_cpu=[0, 2, 6]
    ),
    "heads first": case(ValueError, "head_first: expected False, got True; give [B, T, H, ...]", head_first=True),
    "heads first as text": case(TypeError, "head_first: expected True or False, got str", head_first="no"),
    "backwards in time": case(ValueError, "reverse: expected False, got True; flip the inputs", reverse=True),
    "unknown backend": case(
        ValueError, "backend: expected one of triton, torch, reference or None, got 'cuda'", backend="cuda"
    ),
}


def refuses(op: str, form: str, wrong: Case) -> None:
    with pytest.raises(wrong.error, match=re.escape(wrong.text.format(**names(op)))):
        OPERATORS[op].forms[form](**arguments(op, wrong))


@OPS
@FORMS
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_argument(op, form, wrong, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: True)  # what is refused is refused before it
    refuses(op, form, wrong)


@OPS
@FORMS
def test_the_arguments_are_right_to_begin_with(op, form):
    run = OPERATORS[op].forms[form]
    assert run(**arguments(op, case(None, ""))).o.isfinite().all()
    assert run(**arguments(op, case(None, "", packed=[0, 0, 2, 6]))).o.isfinite().all()


@OPS
@FORMS
def test_triton_computes_no_float64(op, form, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: True)
    changes = dict.fromkeys(OPERATORS[op].tensors, double) | {"backend": "triton"}
    text = "backend: 'triton' computes in float32, got float64 inputs, use 'torch' or 'reference'"
    refuses(op, form, case(TypeError, text, **changes))


@pytest.mark.skipif(interpreted(), reason="the interpreter runs kernels on CPU tensors")
@OPS
@FORMS
def test_triton_on_cpu_tensors(op, form, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: True)
    text = (
        "backend: 'triton' needs CUDA tensors, got a tensor on cpu; on a CPU start the process with TRITON_INTERPRET=1"
    )
    refuses(op, form, case(ValueError, text, backend="triton"))


@pytest.mark.full
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize("form", ["chunk_rwkv6", "fused_recurrent_rwkv6"])
def test_the_interpreter_asked_for_too_late(form):
    # In a process of its own: what counts is what was imported first.
    code = (
        "import os, triton.language, flakit; os.environ['TRITON_INTERPRET'] = '1'; "
        f"flakit.{form}(**flakit.inputs('rwkv6', T=3, K=16, V=16), backend='triton')"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "backend: TRITON_INTERPRET=1 was set after triton had been imported" in done.stderr.splitlines()[-1]


@OPS
def test_triton_not_installed(op, monkeypatch):
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: False)
    refuses(op, "chunk", case(ValueError, "backend: 'triton' is not installed here", backend="triton"))


@OPS
@FORMS
@pytest.mark.parametrize("size", [0, 24, 512, -16, 16.0, True, "16"], ids=repr)
def test_chunk_size(op, form, size):
    text = f"chunk_size: expected one of (1, 2, 4, 8, 16, 32, 64, 128, 256) or None, got {size!r}"
    refuses(op, form, case(ValueError, text, chunk_size=size))


@OPS
@FORMS
def test_unknown_keyword(op, form):
    text = f"{OPERATORS[op].forms[form].__name__}() got an unexpected keyword argument 'chunksize'"
    refuses(op, form, case(TypeError, text, chunksize=16))


@OPS
def test_negative_zero_and_minus_infinity_are_decays(op):
    for x in (-0.0, 0.0, -torch.inf):
        args = arguments(op, case(None, "", decay=lambda w, x=x: w.clone().fill_(x)))
        assert OPERATORS[op].forms["chunk"](**args).o.isfinite().all()
