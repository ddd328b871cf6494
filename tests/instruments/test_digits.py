"""The lines that lose digits are named, and what happened there; right forms and flakit's own operators are not."""

import json
import math

import numpy as np
import pytest
import torch

import flakit
from flakit.instruments.digits_rounding import Rounds
from flakit.instruments.digits_shadow import distance, relative
from flakit.instruments.digits_triton import to_bfloat16, to_tf32
from flakit.instruments.trace import Trace
from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
from tests.instruments.digits_cases import CASES, line_of


def measured(run):
    with flakit.trace(digits=True) as t:
        kept = run()  # what is alive at the end is a result
    del kept
    return t.digits


def named(case):
    """The line that is named first, and the word for it; it is to be the only one."""
    found = measured(case.wrong).findings
    assert len(found) == 1 and found[0].line is not None
    return found[0].line.place.line, found[0].line.blamed.kind


@pytest.mark.parametrize(
    "case", [pytest.param(x, id=name, marks=[pytest.mark.interpret] * x.kernel) for name, x in CASES.items()]
)
def test_the_line_and_its_word(case):
    assert named(case) == (line_of(case), case.kind)
    digits = measured(case.right)
    assert digits.accurate and digits.outputs and not digits.unmeasured


# --- shadows ----------------------------------------------------------------------------------------------------------


def test_rounding_to_bfloat16_and_tf32_is_to_the_nearest():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    x = torch.cat(
        [bits.view(torch.float32), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, 1 - 1e-4])]
    )
    ours = torch.from_numpy(to_bfloat16(x.numpy()).astype(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(ours, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    finite = x[x.isfinite() & (x.abs() > 1e-30) & (x.abs() < 1e37)].double()
    near = torch.from_numpy(to_tf32(finite.float().numpy())).double()
    assert ((near - finite).abs() <= 2.0**-11 * finite.abs()).all() and (near != finite).any()
    scaled = torch.frexp(near)[0] * 2**11
    assert (scaled == scaled.round()).all()  # eleven bits are left


def test_distance_of_what_is_not_finite():
    x, exact = np.array([1.0, np.inf, np.nan, np.inf, np.nan]), np.array([1.5, np.inf, np.nan, 1.0, 2.0])
    assert distance(x, exact).tolist() == [0.5, 0.0, 0.0, math.inf, math.inf]
    assert relative(np.array([0.5, 0.0]), np.array([3.0, 4.0])) == pytest.approx(0.5 / math.sqrt(12.5))


def test_error_of_pytorch_code_is_that_of_an_independent_float64():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(6, 9, generator=generator, requires_grad=True) for _ in range(2))

    def run(x, w):
        y = (x.cumsum(1) @ w.exp().T).sigmoid().clone()
        y[:, 1] *= 3
        y = torch.cat([y, y.flip(0)])[2:].square().mean(1)
        return torch.autograd.grad(y.log().sum(), (x, w))

    with flakit.trace(digits=True) as t:
        got = run(x, w)
    truth = run(x.detach().double().requires_grad_(), w.detach().double().requires_grad_())
    found = {output.shape: output for output in t.digits.outputs}
    assert t.digits.accurate and not t.digits.unmeasured
    for each, true in zip(got, truth, strict=True):
        expected = ((each - true).abs().max() / true.square().mean().sqrt()).item()
        errors = [o.error for o in t.digits.outputs if o.shape == (6, 9)]
        assert any(error == pytest.approx(expected, rel=1e-6) for error in errors), (errors, expected, found)


@pytest.mark.interpret
def test_error_of_a_kernel_is_that_of_an_independent_float64(kernels):
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    o, count = torch.empty(16, 16), torch.zeros(16)
    with flakit.trace(digits=True) as t:
        kernels.everything[(3,)](x, o, count, D=16)
    y = x.double()
    rows = torch.where(y[:, None] > 0, y[:, None].exp() * y, torch.sigmoid(y[:, None] + y))
    true = (rows @ rows.T).cumsum(1).abs().log2()
    added = 3 * torch.sqrt(y.abs()).sum() + torch.zeros(16).double()
    errors = {output.name: output.error for output in t.digits.outputs}
    for name, got, exact in (("o", o, true), ("count", count, added)):
        expected = ((got - exact).abs().max() / exact.square().mean().sqrt()).item()
        assert errors[name] == pytest.approx(expected, rel=1e-6) and expected > 0
    assert not t.digits.unmeasured and t.digits.accurate


@pytest.mark.interpret
def test_integer_tricks_are_not_measured_and_never_called_accurate(kernels):
    x = torch.rand(16, generator=torch.Generator().manual_seed(0))
    o = torch.empty(16)
    with flakit.trace(digits=True) as t:
        kernels.by_its_bits[(1,)](x, o, D=16)
    (line,) = t.digits.unmeasured
    assert line.operation == "bitcast" and "bits" in line.unmeasured and not line.measured
    (output,) = t.digits.outputs
    assert output.anew and "shadow began anew" in str(t.digits) and "Not measured" in str(t.digits)


@pytest.mark.interpret
def test_a_comparison_that_rounding_decides_is_said(kernels):
    x = torch.full((16,), 1e8)
    with flakit.trace(digits=True) as t:
        kernels.decided_by_rounding[(1,)](x, torch.empty(16), D=16)
    (line,) = [line for line in t.digits.lines if line.otherwise]
    assert line.otherwise == 16 and "x > " not in line.words and "Decided otherwise" in str(t.digits)


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("tests.instruments.lossy_triton")


def test_pytorch_code_that_no_shadow_follows_is_not_measured():
    x = torch.rand(4, 4)
    with flakit.trace(digits=True) as t:
        y = torch.nn.functional.dropout(x * 1.1, 0.5)
        z = x.to(torch.complex64) * 1j
        wide = x.double() / 3
    assert {line.operation for line in t.digits.unmeasured} >= {"native_dropout", "divide"} or t.digits.unmeasured
    assert all(line.unmeasured for line in t.digits.lines if line.dtype == "float64")
    del y, z, wide


# --- what is said -----------------------------------------------------------------------------------------------------


def test_words_json_and_picture():
    case = CASES["gate, torch"]
    with flakit.trace(digits=True) as t:
        kept = case.wrong()
    del kept
    said = " ".join(str(t).split())
    assert "Every value was finite" in said and "Digits lost: rounding" in said
    assert f"digits_cases.py:{line_of(case)}" in said and "exactly 1" in said
    stored = json.loads(json.dumps(t.to_dict()))
    assert stored["digits"]["findings"][0]["what"].startswith("rounding")
    again = Trace.from_dict(stored)
    assert again.digits.first.place == t.digits.first.place and again.digits.first.words == t.digits.first.words
    assert json.loads(json.dumps(again.to_dict()))["digits"] == stored["digits"]
    assert str(again.digits) == str(t.digits)
    assert t.digits.picture().png().startswith(b"\x89PNG")


def test_without_the_option_nothing_is_measured():
    with flakit.trace() as t:
        torch.ones(3) / 3
    assert t.digits is None and "digits" not in t.to_dict()


# --- flakit's own -----------------------------------------------------------------------------------------------------

OWN = [(op, form) for op in ("rwkv6", "rwkv7", "gsa") for form in ("chunk", "recurrent")]


@pytest.mark.full
@pytest.mark.parametrize("op, form", [case for case in OWN if case[1] == "chunk"])
def test_the_pytorch_forms_lose_nothing(op, form):
    silent(op, form, "torch", T=33)


@pytest.mark.full
@pytest.mark.interpret
@pytest.mark.parametrize("op, form", OWN)
def test_the_kernels_lose_nothing(op, form):
    silent(op, form, "triton", T=33)


def silent(op, form, backend, T):
    x = inputs(op, T=T, H=1, K=16, V=24, decay=-0.5)
    with flakit.trace(digits=True) as t:
        evaluate(op, x, form=form, backend=backend)
    assert t.digits.accurate and t.digits.outputs, str(t.digits)


@pytest.mark.interpret
@pytest.mark.full
def test_random_rounding_agrees_without_a_shadow():
    case = CASES["running sums"]
    rounds = Rounds.of(case.wrong, 3)
    assert rounds.repeatable and rounds.runs == 3
    lost = next(x for x in rounds.spreads if x.operation == "subtract")
    assert rounds.spreads[0].place.line == lost.place.line == line_of(case) and 1e-5 < lost.spread < 1
    right = Rounds.of(case.right, 3)
    assert max(x.spread for x in right.spreads) < 2.0**-16


def test_random_rounding_survives_json():
    x = torch.linspace(0, 1, 8)
    with flakit.trace(digits=True) as t:
        x.exp()
    t.digits.rounds = Rounds.of(lambda: x.exp() * 2, 2)
    stored = json.loads(json.dumps(t.to_dict()))
    again = Trace.from_dict(stored)
    assert json.loads(json.dumps(again.to_dict()))["digits"] == stored["digits"]
    assert str(again.digits) == str(t.digits) and "Random rounding, 2 runs" in str(again.digits)


def test_random_rounding_needs_a_script_that_can_be_repeated():
    def run():
        return torch.rand(8).exp() * 2

    with pytest.raises(ValueError, match="runs: expected two or more"):
        Rounds.of(run, 1)
    torch.manual_seed(0)
    assert "set a seed" in said(Rounds.of(run, 2))

    def again():
        torch.manual_seed(0)
        return run()

    assert "set a seed" not in said(Rounds.of(again, 2))


def said(renderable):
    from rich.console import Console

    console = Console(width=120, no_color=True)
    with console.capture() as found:
        console.print(renderable)
    return found.get()


@pytest.mark.parametrize("name", ["mul", "div"])
def test_a_script_goes_on_where_its_shadow_fails(monkeypatch, name):
    def fail(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("flakit.instruments.digits_shadow.Ledger.computed", fail)
    with flakit.trace(digits=True) as t:
        y = getattr(torch, name)(torch.full((3,), 7.0), 3.0)
    assert y.tolist() == getattr(torch.tensor([7.0] * 3), name)(3.0).tolist()
    assert [line.unmeasured for line in t.digits.unmeasured] == ["its shadow failed (ValueError)"]
