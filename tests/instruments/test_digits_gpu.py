"""Digits on a GPU: what compiled kernels stored, beside the same launches interpreted on the CPU."""

from pathlib import Path

import pytest
import torch

import flakit
from flakit.instruments.digits import Digits, Kind
from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
from flakit.ops.common.dispatch import has_triton
from tests.instruments import digits_cases as cases
from tests.instruments.digits_cases import lines_with, unwatched
from tests.instruments.test_trace_script import in_a_process

if not has_triton():
    pytest.skip("needs Triton", allow_module_level=True)

from flakit.instruments import digits_compiled_triton as compiled
from flakit.instruments.digits_shadow import Ledger
from flakit.instruments.digits_torch import Memory
from flakit.instruments.trace_record import Trace
from tests.instruments import lossy_triton as lossy

pytestmark = pytest.mark.gpu
T, D = cases.T, cases.D


def cuda(x):
    return {name: y.cuda() if isinstance(y, torch.Tensor) else y for name, y in x.items()}


def scores(precision):
    q, k, o = cases.X.cuda(), cases.A.cuda(), torch.empty(T, T, device="cuda")
    lossy.scores[(1,)](q, k, o, C=T, D=D, PRECISION=precision)
    return o


def test_products_in_tf32_are_named_and_those_in_float32_are_not():
    with flakit.trace(digits=True) as t:
        o = scores("tf32")
    found = t.digits.findings
    assert found, str(t)
    named = {(x.line.place.line, x.line.blamed.kind) if x.line else (x.store.line, Kind.COMPILED) for x in found}
    dot, store = lines_with("# operands in TF32"), lines_with("tl.store(o + i * C + j, b_A)")
    assert named <= {(dot[0], Kind.TF32), (store[0], Kind.COMPILED)}, str(t)
    (stored,) = t.digits.outputs
    assert stored.lanes == T * T and 1e-5 < stored.error < 1e-2 and stored.as_written > 1e-5, str(t)
    exact = cases.X.double() @ cases.A.double().T
    error = ((o.cpu() - exact).abs().max() / exact.square().mean().sqrt()).item()
    assert stored.error == pytest.approx(error, rel=1e-6), str(t)
    with flakit.trace(digits=True) as t:
        scores("ieee")
    assert t.digits.accurate and t.digits.outputs, str(t)
    assert t.digits.outputs[0].error < 1e-5, str(t)


def test_a_kernel_that_computes_in_tf32_where_float32_is_written_loses_it_by_being_compiled():
    found = Trace()
    found.digits = Digits()
    tiles = compiled.StoredDigits(found.digits, Ledger(found.digits))
    comparison = compiled.Comparison(found, tiles, Memory())
    q, k, o = cases.X.cuda(), cases.A.cuda(), torch.empty(T, T, device="cuda")

    def wrong():
        lossy.scores[(1,)](q, k, o, C=T, D=D, PRECISION="tf32")

    comparison.launch(lossy.scores, (q, k, o), {"C": T, "D": D, "PRECISION": "ieee"}, (1,), wrong)
    comparison.say()
    (finding,) = found.digits.findings
    assert finding.compiled and finding.store.line in lines_with("tl.store(o + i * C + j, b_A)"), str(found.digits)
    assert finding.outputs[0].as_written < 1e-5 < finding.outputs[0].error, str(found.digits)


@pytest.mark.parametrize("name", ["running sums", "inverse", "gate", "softmax, high", "absorption", "variance"])
def test_what_is_written_to_lose_digits_loses_them_compiled_too(name, monkeypatch):
    monkeypatch.setattr("flakit.instruments.trace_compiled_triton.watch_compiled", unwatched)
    for tensor in ("A", "B", "L", "SMALL", "X", "HIGH", "COUNTS", "FAR"):
        monkeypatch.setattr(cases, tensor, getattr(cases, tensor).cuda())
    case = cases.CASES[name]
    with torch.device("cuda"), flakit.trace(digits=True) as t:
        case.wrong()
    assert t.digits.first is not None and t.digits.first.place.line == cases.line_of(case), str(t)
    with torch.device("cuda"), flakit.trace(digits=True) as t:
        case.right()
    assert t.digits.accurate and t.digits.outputs, str(t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_our_own_operators_lose_nothing_beyond_their_budgets(op, dtype, monkeypatch):
    monkeypatch.setattr("flakit.instruments.trace_compiled_triton.watch_compiled", unwatched)
    x = cuda(inputs(op, T=20, H=1, K=32, decay=-0.5, dtype=dtype))
    with flakit.trace(digits=True) as t:
        evaluate(op, x, form="chunk", backend="triton")
    assert t.digits.accurate, str(t)
    assert {output.store for output in t.digits.outputs} and "not compared" not in str(t), str(t)
    assert "no line of its source stores to" not in str(t), str(t)
    assert any(output.apart for output in t.digits.outputs), str(t)  # they are two computations


SCRIPT = """
import torch
import triton
import triton.language as tl


@triton.jit
def scores(q, k, o, C: tl.constexpr, D: tl.constexpr):
    i, j, d = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, D)
    b_q, b_k = tl.load(q + i * D + d[None, :]), tl.load(k + i * D + d[None, :])
    tl.store(o + i * C + j, tl.dot(b_q, tl.trans(b_k)))  # TF32 unless it is told otherwise


torch.manual_seed(0)
q, k, o = torch.randn(64, 16, device="cuda"), torch.randn(64, 16, device="cuda"), torch.empty(64, 64, device="cuda")
scores[(1,)](q, k, o, C=64, D=16)
"""


def test_the_command_prints_what_each_line_stored(tmp_path):
    root = str(Path(__file__).parents[2])
    command = "flakit.cli", "trace", "--digits", "mine.py"
    status, said, errors = in_a_process(tmp_path, *command, script=SCRIPT, PYTHONPATH=root, COLUMNS="200")
    said = " ".join(said.split())
    assert status == 1, (status, said, errors[-2000:])
    assert "Digits that are right in what each line stored: compiled, and interpreted as written" in said, said
    assert "4096 lanes of o of scores" in said and "Kernels ran compiled" in said, said
    assert "Digits lost: TF32" in said or "lost by the compiled kernel" in said, said
