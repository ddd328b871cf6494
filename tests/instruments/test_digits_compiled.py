"""Digits that compiled kernels lose: what they stored beside the same launch interpreted. The compiled launch is a
stand-in here, so that no GPU is needed."""

import json

import pytest
import torch

import flakit
from flakit.instruments.digits import WORDS, Kind
from flakit.instruments.trace import Trace
from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.common.launch import SHARED_MEMORY, Chip
from tests.instruments import digits_cases as cases
from tests.instruments.digits_cases import lines_with, unwatched

if not has_triton() or interpreted():
    pytest.skip("needs Triton, and a process in which it compiles", allow_module_level=True)

import triton.language as tl
from triton.runtime.jit import JITFunction

from flakit.instruments import digits_compiled_triton as compiled
from tests.instruments import lossy_triton as lossy
from tests.instruments.compiled_elsewhere import as_written, compiled_by, in_tf32


def measured(run, stand_in=as_written):
    with compiled_by(stand_in), flakit.trace(digits=True) as t:
        run()
    return t


def test_what_compiling_loses_is_named_at_the_line_of_its_store():
    t = measured(lambda: cases.products("ieee"), in_tf32("q", "k"))
    (finding,) = t.digits.findings
    assert finding.compiled and finding.line is None and finding.words.startswith("lost by the compiled kernel, not by")
    assert finding.store.line in lines_with("tl.store(o + i * C + j, b_A)")
    (o,) = finding.outputs
    assert o.error > 2**-12 > 2**-19 > o.as_written and o.apart == pytest.approx(o.error, rel=1e-2) and o.lanes == 4096
    assert abs(o.interpreted - o.true) < abs(o.computed - o.true)
    said = " ".join(str(t).split())
    assert "lost by the compiled kernel, not by its arithmetic as written" in said
    assert f"kernel scores, lossy_triton.py:{finding.store.line}" in said and not t.digits.accurate


@pytest.mark.parametrize("name", [name for name, case in cases.CASES.items() if case.kernel])
def test_an_exact_compiler_loses_what_is_written_and_nothing_else(name):
    case = cases.CASES[name]
    found = measured(case.wrong).digits.findings
    assert [(x.line.place.line, x.line.blamed.kind, x.compiled) for x in found] == [
        (cases.line_of(case), case.kind, False)
    ]
    t = measured(case.right)
    assert t.digits.accurate, str(t)
    assert all(x.store and x.apart == 0 and x.as_written == x.error for x in t.digits.outputs) and t.digits.outputs


def test_every_line_of_store_is_measured_by_itself():
    """Helpers, a store and an addition by atoms, of three programs."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    o, count = torch.empty(16, 16), torch.zeros(16)

    def miscompiled(kernel, arguments, grid):
        as_written(kernel, arguments, grid)
        arguments["count"][5] *= 1.001

    t = measured(lambda: lossy.everything[(3,)](x, o, count, D=16), miscompiled)
    (finding,) = t.digits.findings
    assert finding.compiled and finding.store.line in lines_with("tl.atomic_add(count")
    assert [output.name for output in finding.outputs] == ["count"] and finding.outputs[0].index == (5,)
    (right,) = [output for output in t.digits.outputs if output.name == "o"]
    assert right.accurate and right.lanes == 256 and right.store.line in lines_with("tl.store(o + o_d[:, None]")


def test_elements_that_no_line_stores_to_are_named():
    o = torch.zeros(2, 64)

    def beyond(kernel, arguments, grid):
        as_written(kernel, arguments, grid)
        o[1, 3] = 7.0

    t = measured(lambda: lossy.softmax[(1,)](torch.ones(64), o, D=64, SAFE=True), beyond)
    assert "changed 1 elements that no line of its source stores to" in " ".join(str(t).split())


def test_a_large_grid_is_sampled_and_says_so(monkeypatch):
    monkeypatch.setattr(compiled, "PROGRAMS", 4)
    x, o, count = torch.ones(16), torch.empty(16, 16), torch.zeros(16)
    t = measured(lambda: lossy.everything[(9,)](x, o, count, D=16))
    said = " ".join(str(t).split())
    assert "everything: compared are 1 of 1 launches, 4 of 9 programs; the others are not measured" in said
    assert "count is not measured at lossy_triton.py" in said
    assert [output.name for output in t.digits.outputs] == ["o"]


def test_a_kernel_that_takes_too_long_is_left_alone(monkeypatch):
    monkeypatch.setattr(compiled, "SECONDS", 0.0)
    t = measured(lambda: cases.products("ieee"), in_tf32("q", "k"))
    assert not t.digits.outputs and t.digits.partial and "0 of 1 launches, 0 of 1 programs" in str(t)
    assert "Every result" not in str(t) and "No digits were measured" in str(t)


def test_what_cannot_be_interpreted_is_not_called_accurate():
    t = measured(lambda: lossy.assembled[(1,)](torch.ones(16), torch.empty(16), D=16), lambda *_: None)
    said = " ".join(str(t).split())
    assert "assembled: a launch was not compared, the interpreter raises NotImplementedError: inline assembly" in said
    assert not t.digits.outputs and "Every result" not in said


def test_assembly_for_pairs_of_16_bit_numbers_is_interpreted():
    x = torch.arange(-4, 4, 0.5) * 1.2345  # which bfloat16 does not hold: of 16 numbers it rounds some up, some down
    x[5] = torch.nan
    assert (x.bfloat16() > x).any() and (x.bfloat16() < x).any()
    bounded, powers = torch.empty(16, dtype=torch.bfloat16), torch.empty(16)
    arguments = {"x": x, "bounded": bounded, "powers": powers, "D": 16}
    compiled.interpret(lossy.assembled_pairs, arguments, (1,))
    torch.testing.assert_close(bounded, x.bfloat16().clamp(min=0), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(powers, x.exp2(), equal_nan=True)


def test_launches_that_overlap_are_interpreted_one_by_one():
    x, o = torch.arange(16.0), torch.empty(16)
    compiled.interpret(lossy.overlapping, {"x": x, "o": o, "D": 16}, (1,))
    assert torch.equal(o, 2 * x)


def test_kernels_as_a_hopper_gpu_launches_them_are_compared(monkeypatch):
    """GSA's, whose launches overlap there."""
    from flakit.ops.gsa import api, chunk_triton

    monkeypatch.setattr(chunk_triton, "chip_of", lambda _: Chip("H200", 90, SHARED_MEMORY[90]))
    monkeypatch.setattr(api, "choose_backend", lambda *_: "triton")
    monkeypatch.setattr("flakit.instruments.trace_compiled_triton.watch_compiled", unwatched)
    x = inputs("gsa", T=20, H=1, K=32, decay=-0.5, dtype=torch.bfloat16)
    with compiled_by(as_written) as launched, flakit.trace(digits=True) as t:
        evaluate("gsa", x, form="chunk", backend="triton")
    assert {"output_kernel", "softmax_grads_kernel", "slot_grads_kernel", "pass_grads_kernel"} <= set(launched)
    assert t.digits.accurate and t.digits.outputs and "not compared" not in str(t), str(t)
    assert "no line of its source stores to" not in str(t), str(t)


def test_nothing_is_left_replaced_and_the_script_gets_what_its_kernel_stored():
    before = JITFunction.__call__, tl.sum, tl.core.where, tl.tensor.__add__, dict(lossy.__dict__)
    o = torch.zeros(64)
    t = measured(
        lambda: lossy.softmax[(1,)](torch.ones(64), o, D=64, SAFE=True),
        lambda kernel, arguments, grid: arguments["o"].fill_(0.5),
    )
    assert (o == 0.5).all() and t.digits.findings[0].compiled
    assert before == (JITFunction.__call__, tl.sum, tl.core.where, tl.tensor.__add__, dict(lossy.__dict__))
    assert not hasattr(JITFunction, "__get__")


def test_what_is_copied_is_on_the_cpu_whatever_the_default():
    x, o = torch.ones(64), torch.zeros(64)

    def run():
        with torch.device("meta"):
            lossy.softmax[(1,)](x, o, D=64, SAFE=True)

    t = measured(run)
    assert t.digits.accurate and t.digits.outputs, str(t)


def test_noise_that_is_written_is_not_the_compilers():
    """The square of the mean in another order of sums: another number, as wrong."""

    def otherwise(kernel, arguments, grid):
        as_written(kernel, arguments, grid)
        arguments["o"] += 0.02

    found = measured(lambda: cases.variance(False), otherwise).digits.findings
    assert [(x.compiled, x.line.blamed.kind) for x in found] == [(False, Kind.CANCELLATION)]


def test_pytorch_goes_on_from_what_was_stored():
    def run():
        o = torch.zeros(64)
        lossy.softmax[(1,)](torch.ones(64), o, D=64, SAFE=True)
        return (o * 64).sum()

    with compiled_by(as_written), flakit.trace(digits=True) as t:
        total = run()
    assert total.item() == pytest.approx(64.0) and t.digits.accurate, str(t)


def test_words_json_and_picture():
    t = measured(lambda: cases.products("ieee"), in_tf32("q", "k"))
    stored = json.loads(json.dumps(t.to_dict()))
    again = Trace.from_dict(stored)
    assert stored["digits"]["findings"][0]["what"] == WORDS["kinds"][Kind.COMPILED]
    assert str(again.digits) == str(t.digits) and json.loads(json.dumps(again.to_dict()))["digits"] == stored["digits"]
    assert t.digits.drawn()["title"] == "Digits lost: by the compiled kernel"
    assert t.digits.picture().png().startswith(b"\x89PNG")


# --- flakit's own -----------------------------------------------------------------------------------------------------


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@DTYPES
@pytest.mark.full
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_the_kernels_lose_nothing_beyond_their_budgets(op, dtype, monkeypatch):
    import importlib

    api = importlib.import_module(f"flakit.ops.{op}.api")
    monkeypatch.setattr(api, "choose_backend", lambda backend, x: "triton")
    monkeypatch.setattr("flakit.instruments.trace_compiled_triton.watch_compiled", unwatched)
    x = inputs(op, T=20, H=1, K=32, decay=-0.5, dtype=dtype)
    with compiled_by(as_written) as launched, flakit.trace(digits=True) as t:
        evaluate(op, x, form="chunk", backend="triton")
    assert t.digits.accurate, str(t)
    assert {output.kernel for output in t.digits.outputs} and "not compared" not in str(t)
    assert launched
