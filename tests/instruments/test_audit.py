"""The audit finds every fault of the casebook and small ones that are not in it, and calls no right kernel wrong."""

import functools
import importlib
import math
import sys
from dataclasses import replace

import pytest
import torch

import flakit
from flakit.cases import registry
from flakit.instruments import budget, truth
from flakit.instruments.examiner import Examiner
from flakit.instruments.finding import Finding
from flakit.instruments.probes import PROBES
from flakit.instruments.shrink import shrink
from flakit.instruments.subject import Broken, Refused, Subject, load
from flakit.numerics.operators import OPERATORS
from tests.instruments import kernels
from tests.instruments.kernels import RIGHT, WRONG
from tests.instruments.planted import PLANTED
from tests.passing import passing, tf32

OURS = [form.__name__ for op in OPERATORS.values() for form in op.forms.values()]


def one_quick(names, quick):
    """The cases of a test, all but some left to `make test-all`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in names]


def words(found):
    return "\n".join(f"{v.probe.name}: {v.words} at {v.setting}" for v in found.failed)


# --- no false alarm, no fault missed -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_quick(OURS, ["chunk_rwkv6"]))
def test_our_operators_pass(name):
    found = flakit.audit(name, shrink=False, seconds=None)
    assert found.passed, words(found)
    assert {v.verdict for v in found.verdicts if v.probe.name != "other-device"} == {"pass"}
    assert found.left_out == 0 and all(v.tried == v.settings for v in found.verdicts)


OTHER_FORMS = ("naive float64", "named tuple", "dict, other order")
"""Right kernels whose arithmetic is another's here: how they return o and states is what is left to ask."""
WITH_STATES = ("truth", "16-bit", "scale", "halves", "final-state", "initial-state", "state-layout", "aliasing")
SEEDS = {"naive float32": 1, "naive rwkv7": 2, "naive gsa": 3, "chunks of 16 gsa": 1}


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "recurrent rwkv6"])  # which is one of ours
def test_right_kernels_pass(name):
    op, kernel = RIGHT[name]
    how = {"only": WITH_STATES} if name in OTHER_FORMS else {"seconds": 5} if name == "slow loops" else {}
    found = flakit.audit(kernel, op, shrink=False, seed=SEEDS.get(name, 0), **how)
    assert found.passed, words(found)


WHOLE = ("final state detached", "last channels lost", "dw a token late, rwkv7", "dg of one pass, gsa")
"""Wrong kernels of which all probes are asked, as much as a few seconds allow, of each operator one at least. Of the
others probe after probe is asked until one fails: with that the audit fails, whatever the rest of them would say."""


@pytest.mark.parametrize("name", one_quick(WRONG, ["one element of dv lost"]))
def test_wrong_kernels_fail(name):
    op, kernel = WRONG[name]
    if name in WHOLE:
        found = flakit.audit(kernel, op, shrink=False, seconds=5)
        assert found.failed and "left out" not in {v.verdict for v in found.verdicts}, found
    elif all(flakit.audit(kernel, op, only=probe, shrink=False, seconds=None).passed for probe in PROBES):
        pytest.fail("no probe fails")


SHRUNK = (
    "anchor: first row",
    "padding: rwkv6",
    "future anchor",
    "wrong head's anchor",
    "inverse by powers",
    "transposed mask, 32 x 32",
    "final state without gradient, rwkv7",
    "strided offsets",
)
"""Planted faults that are shrunk too, which takes five times as long: a few of each kind."""


WITHOUT_SCRIPT = ("groups of queries, gsa", "no decay, gsa")
"""Faults that a script of two dozen lines does not show."""


@pytest.mark.parametrize("name", one_quick(PLANTED, ["masking: where", "states as [V, K]"]))
def test_planted_faults_are_found_by_their_probe(name):
    op, kernel, probe, case = PLANTED[name]
    found = flakit.audit(kernel, op, only=[probe], seconds=None, shrink=name in SHRUNK)
    assert [v.probe.name for v in found.failed] == [probe]
    assert (found[probe].repro is not None) == (name not in WITHOUT_SCRIPT), found[probe].words
    if case is not None:
        assert found[probe].case == case, (found[probe].case, found[probe].law)


def coarse(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """Right, with the ten mantissa bits of TensorFloat-32 in its operands, and gradients too."""
    r, k, v = (passing(x.float(), tf32, tf32) for x in (r, k, v))
    return kernels.naive(r, k, v, w, u, scale, initial_state, output_final_state)


def coarse_and_clamped(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return coarse(r, k, v, w.clamp(min=-2.0), u, scale, initial_state, output_final_state)


def quite_wrong(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return coarse(r.flip(-1), k, v + r, w.roll(1, 1), u, scale, initial_state, output_final_state)


@pytest.mark.full
def test_a_kernel_that_is_less_precise_than_its_dtype_is_told_so_once():
    found = flakit.audit(coarse, "rwkv6", shrink=False)
    assert [v.probe.name for v in found.failed] == ["truth"], words(found)
    assert "times its error at the plainest call" in found["decay-accuracy"].words


def test_a_kernel_that_is_less_precise_hides_no_other_fault_behind_that():
    found = flakit.audit(coarse_and_clamped, "rwkv6", shrink=False, only=["truth", "decay-accuracy", "spike"])
    assert {"truth", "decay-accuracy"} <= {v.probe.name for v in found.failed}, words(found)


@pytest.mark.full
def test_what_has_nothing_left_to_compare_is_not_called_right():
    found = flakit.audit(quite_wrong, "rwkv6", shrink=False, only=["truth", "packed", "spike", "halves"])
    assert found["truth"].verdict == "fail"
    assert "pass" not in {v.verdict for v in found.verdicts if v.finding is None or not v.finding.tensor}


# --- the subject ---------------------------------------------------------------------------------------------------


def inputs(op="rwkv6", **sizes):
    return flakit.inputs(op, T=5, H=1, K=4, **sizes)


@pytest.mark.parametrize("kernel", [kernels.naive, kernels.only_o, kernels.named, kernels.in_a_dict])
def test_a_subject_is_called_by_name_or_in_order_and_returns_o_in_any_form(kernel):
    x = inputs()
    o, _ = Subject(kernel, "rwkv6")(x)
    torch.testing.assert_close(o, flakit.chunk_rwkv6(**x).o)


def test_gsa_states_come_as_a_pair_or_behind_each_other():
    def flat(q, k, v, s, g, output_final_state=False):
        o, states = kernels.naive_gsa(q, k, v, s, g, output_final_state=True)
        return o, *states

    x = inputs("gsa") | {"output_final_state": True}
    for kernel in (kernels.naive_gsa, flat):
        _, (hk, hv) = Subject(kernel, "gsa")(x)
        torch.testing.assert_close(hv, flakit.chunk_gsa(**x).final_state[1])


def test_what_a_signature_does_not_name_or_an_error_refuses_is_refused_with_the_reason():
    with pytest.raises(Refused, match="does not name initial_state"):
        Subject(kernels.only_o, "rwkv6")(inputs(initial_state=True))
    with pytest.raises(Refused, match="AssertionError"):
        Subject(kernels.picky, "rwkv6")(inputs())


def test_a_result_that_is_no_output_is_broken():
    with pytest.raises(Broken, match="expected a tensor o"):
        Subject(lambda r, k, v, w, u: "o", "rwkv6")(inputs())


def test_the_name_says_which_operator_it_is_or_an_error_asks():
    assert Subject(flakit.chunk_gsa).op.name == "gsa"
    with pytest.raises(ValueError, match="like: expected one of rwkv6, rwkv7, gsa"):
        Subject(kernels.naive)


def test_an_adapter_translates():
    def theirs(q, decay, bonus, key, value):
        return kernels.naive(q, key, value, decay.log(), bonus)[0]

    def adapter(fn, r, k, v, w, u):
        return fn(r, w.exp(), u, k, v)

    found = flakit.audit(theirs, "rwkv6", adapter=adapter, only=["truth", "scale"], shrink=False)
    assert found.passed, words(found)


ADAPTED = """
import flakit


def theirs(receptance, decay, bonus, key, value):
    return flakit.chunk_rwkv6(receptance, key, value, decay.log(), bonus, scale=1.0).o


def adapter(fn, r, k, v, w, u):
    return fn(r, w.exp(), u, k, v)
"""


@pytest.mark.parametrize("named", [("adapter",), ("theirs",)], ids=lambda x: f"{x[0]} by name")
def test_a_subject_and_its_adapter_may_each_be_a_function_or_a_name(tmp_path, monkeypatch, named):
    path = tmp_path / "adapted.py"
    path.write_text(ADAPTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "adapted", raising=False)
    module = importlib.import_module("adapted")
    theirs, adapter = (f"{path}:{x}" if x in named else getattr(module, x) for x in ("theirs", "adapter"))
    subject = load(theirs, "rwkv6", adapter)
    assert any(line.endswith("import adapter as adapter") for line in subject.source), subject.source
    found = flakit.audit(theirs, "rwkv6", adapter=adapter, only=["truth"], shrink=False, seconds=5)
    assert found.passed, words(found)
    monkeypatch.delitem(sys.modules, "adapted")


def test_a_spec_that_names_nothing_is_a_value_error(tmp_path):
    for spec in ("chunk_rwkv9", "no.such.module:f", f"{tmp_path}/none.py:f", "math:pi"):
        with pytest.raises(ValueError, match=spec.rpartition(":")[2] if ":" in spec else spec):
            load(spec, "rwkv6")


# --- verdicts ------------------------------------------------------------------------------------------------------


def test_not_supported_is_no_failure_and_says_why():
    found = flakit.audit(kernels.forward_only, "rwkv6", only=["gradients", "final-state", "packed"], shrink=False)
    assert found.passed and {v.verdict for v in found.verdicts} == {"not supported"}
    assert "cu_seqlens" in found["packed"].words and "no input gets a gradient" in found["gradients"].words


def test_an_input_that_gets_no_gradient_is_a_failure_and_a_state_that_is_cut_off_too():
    found = flakit.audit(kernels.no_bonus_gradient, "rwkv6", only=["gradients", "tails"], shrink=False)
    assert [v.probe.name for v in found.failed] == ["gradients"] and "u" in found["gradients"].words
    found = flakit.audit(kernels.detached_state, "rwkv6", only=["final-state", "tails"], shrink=False)
    assert [v.probe.name for v in found.failed] == ["final-state"] and "cut off" in found["final-state"].words


def test_a_subject_that_takes_nothing_could_not_run():
    def broken(r, k, v, w, u):
        raise RuntimeError("0 active drivers")

    with pytest.raises(ValueError, match="0 active drivers"):
        flakit.audit(broken, "rwkv6", shrink=False)


def index_error_at_100(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    if r.shape[1] == 100:
        raise IndexError("block 100 out of range")
    return kernels.naive(r, k, v, w, u, scale, initial_state, output_final_state)


def no_packing(r, k, v, w, u, scale=None, cu_seqlens=None):
    if cu_seqlens is not None:
        raise KeyError("lengths")
    return kernels.only_o(r, k, v, w, u, scale)


def leaves_python(r, k, v, w, u, scale=None):
    if r.shape[1] == 17:
        sys.exit(0)
    return kernels.only_o(r, k, v, w, u, scale)


@pytest.mark.parametrize(
    "kernel, probe, says",
    [
        (index_error_at_100, "truth", "it raised IndexError: block 100 out of range"),
        (index_error_at_100, "suffix", ""),
        (no_packing, "packed", "it raised KeyError: 'lengths'"),
        (leaves_python, "truth", "it raised SystemExit: 0"),
    ],
)
def test_a_crash_is_a_failure_and_no_refusal(kernel, probe, says):
    found = flakit.audit(kernel, "rwkv6", only=probe, shrink=False)
    assert found[probe].verdict == ("fail" if says else "pass") and says in found[probe].words, found


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_what_is_raised_now_and_then_is_a_failure_and_says_so(error):
    calls = []

    def now_and_then(r, k, v, w, u, scale=None):
        calls.append(1)
        if len(calls) % 25 == 0:
            raise error("busy")
        return kernels.only_o(r, k, v, w, u, scale)

    found = flakit.audit(now_and_then, "rwkv6", only=["suffix", "tails"], shrink=False)
    assert found.failed and all("busy; a second call does not repeat it" in v.words for v in found.failed), found


def test_a_wrong_result_that_does_not_come_again_says_so():
    calls = []

    def now_and_then(r, k, v, w, u, scale=None):
        calls.append(r.shape[1] == 81)
        return kernels.only_o(r, k, v, w, u, scale) * (2.0 if sum(calls) == 1 and calls[-1] else 1.0)

    found = flakit.audit(now_and_then, "rwkv6", only="tails", shrink=False, seconds=None)
    assert "a second call does not repeat it" in found.failed[0].words, found


def test_a_backward_that_always_crashes_is_a_failure():
    def crash(do):
        raise IndexError("saved tensors")

    def kernel(r, k, v, w, u, scale=None):
        return passing(kernels.only_o(r, k, v, w, u, scale), back=crash)

    found = flakit.audit(kernel, "rwkv6", only=["truth", "gradients", "tails"], shrink=False)
    assert [v.probe.name for v in found.failed] == ["truth", "gradients"], found
    assert "backward pass raised IndexError" in found["gradients"].words
    found = flakit.audit(kernel, "rwkv6", only=["16-bit", "gradients"], shrink=False)  # whatever was asked before
    assert [v.probe.name for v in found.failed] == ["gradients"], found


def reads_uninitialised(r, k, v, w, u, scale=None):
    o = kernels.only_o(r, k, v, w, u, scale)
    return o + 0 * torch.empty(o.shape)


def reads_beyond(r, k, v, w, u, scale=None):
    o, end = kernels.only_o(r, k, v, w, u, scale), v.storage_offset() + v.numel()
    # What is not the test's own memory is not touched.
    return o + 0 * v.as_strided((1,), (1,), end) if end * 4 < v.untyped_storage().nbytes() else o


def writes_beyond(r, k, v, w, u, scale=None):
    out = torch.empty(v.shape)
    if out.storage_offset():  # in memory of the test's own, where it does no harm
        out.as_strided((1,), (1,), out.storage_offset() + out.numel())[0] = 1.0
    return kernels.only_o(r, k, v, w, u, scale)


def random_bits(r, k, v, w, u, scale=None):
    o = kernels.only_o(r, k, v, w, u, scale)
    return o * (1 + 1e-6 * torch.rand_like(o))  # a number each: a single one may be drawn twice


def mixes_heads(r, k, v, w, u, scale=None):
    return kernels.only_o(r, k, v, w, u, scale) + 0 * v.sum()


BUFFER = {}


@torch.no_grad()
def one_buffer(r, k, v, w, u, scale=None):
    return BUFFER.setdefault(v.shape, torch.empty(v.shape)).copy_(kernels.only_o(r, k, v, w, u, scale))


MEMORY = {
    reads_uninitialised: "poison",
    reads_beyond: "canaries",
    writes_beyond: "canaries",
    random_bits: "repeat",
    mixes_heads: "non-finite",
    one_buffer: "aliasing",
}


@pytest.mark.parametrize("kernel", MEMORY, ids=lambda kernel: kernel.__name__)
def test_memory_and_bits(kernel):
    probe = MEMORY[kernel]
    found = flakit.audit(kernel, "rwkv6", only=[probe], shrink=False)
    assert [v.probe.name for v in found.failed] == [probe]
    right = flakit.audit(kernels.only_o, "rwkv6", only=[probe], shrink=False)
    assert right.passed, words(right)


def test_a_budget_is_twice_what_rounding_does():
    exact = torch.randn(50, 200, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        allowed = budget.budget(dtype, 1, 0.0)
        rounded = exact.to(dtype)
        assert budget.judge(rounded, exact, allowed).share < 1
        assert budget.judge(rounded * (1 + 40 * torch.finfo(dtype).eps), exact, allowed).share > 1
    assert budget.budget(torch.float32, 1000, 0.0) > 100 * budget.budget(torch.float32, 1, 0.0) / 10


@pytest.mark.parametrize("lost", [(0, 0), (3, 7)])
def test_one_element_of_many_is_seen(lost):
    exact = torch.randn(1000, 100, dtype=torch.float64)
    got = exact.clone()
    got[lost] = 0
    found = budget.judge(got.float(), exact, 1e-5)
    assert found.share > 1 and found.errors.worst_index == lost


def test_a_value_beyond_float16_is_infinite_and_not_wrong():
    exact = 3e4 * torch.randn(50, 200, dtype=torch.float64)
    got = exact.half()
    assert got.isinf().any() and budget.judge(got, exact, 1e-3).errors is None
    assert budget.judge(-got, exact, 1e-3).errors is not None
    assert budget.judge(torch.where(exact.abs() > 2e4, torch.inf, got), exact, 1e-3).measure == "non-finite"


def test_every_probe_says_what_it_means_and_resembles_a_case():
    for probe in PROBES.values():
        assert probe.meaning.endswith(".") and probe.budget
        assert {probe.case, *probe.kinds.values()} <= {"", *registry.CASES}


# --- shrinking, laws, scripts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_row():
    """Bug A, audited with two probes."""
    op, kernel, *_ = PLANTED["anchor: first row"]
    return flakit.audit(kernel, op, only=["spike", "decay-onset"])


@pytest.mark.full
def test_bug_a_shrinks_to_one_channel_and_the_row_after_a_block(first_row):
    setting = first_row["spike"].setting
    assert setting["T"] <= 20 and (setting["B"], setting["H"], setting["K"], setting["V"]) == (1, 1, 1, 1)
    token, value = setting["spike"]
    assert token == 16 and value == -100.0


def test_the_law_stands_beside_the_onset(first_row):
    for name in ("spike", "decay-onset"):
        begins = float(first_row[name].law.split(" of -")[1].split(" =")[0])
        assert math.isclose(begins, 88.7, rel_tol=2e-3)
        assert first_row[name].case == "anchor"


def test_a_failure_shrinks_to_the_smallest_setting_there_is():
    op, kernel = WRONG["dv off by 0.1%"]
    found = flakit.audit(kernel, op, only="truth")
    assert {found["truth"].setting[name] for name in "TBHKV"} == {1}, found


KEPT = {
    "initial-state": lambda s: s.initial_state,
    "inf-decay": lambda s: s.make(OPERATORS["rwkv6"])[0]["w"].min() == -math.inf,
    "zero-decay": lambda s: s.make(OPERATORS["rwkv6"])[0]["w"].max() == 0,
    "rectangles": lambda s: s.K != s.V,
    "anchor-shift": lambda s: s.H > 1,
    "repeated-tokens": lambda s: s.T > 1 and s.repeated,
    "padded-rows": lambda s: s.padding > 0,
    "strides": lambda s: s.H > 1 or s.T > 1,
    "final-state": lambda s: s.loss == "state",
}
"""What a probe asks about, and a setting keeps while it shrinks."""


@pytest.mark.parametrize("probe", one_quick(KEPT, ["initial-state", "inf-decay"]))
def test_shrinking_keeps_what_the_probe_asks_about(probe):
    x = Examiner(Subject(flakit.chunk_rwkv6), seed=0)
    always = lambda _, setting: Finding(setting, "wrong", "o", 1.0, 0.1, "")  # noqa: E731
    asked = replace(PROBES[probe], check=always, controls=())  # which would fail too
    first = asked.check(x, x.resolved(asked.settings(x)[0]))
    found = shrink(x, asked, first).setting
    assert KEPT[probe](found) and (found.tokens, found.B) < (first.setting.tokens, 2), found


@pytest.mark.full
@pytest.mark.parametrize("kernel", [reads_beyond, reads_uninitialised], ids=lambda kernel: kernel.__name__)
def test_scripts_that_are_tried_leave_pytorch_as_it_was(kernel):
    """They put fences around memory and fill it with NaN, for themselves alone."""
    before = torch.empty, torch.zeros_like, torch.Tensor.new_empty, torch.get_rng_state()
    found = flakit.audit(kernel, "rwkv6", only=[MEMORY[kernel]])
    assert found.failed[0].repro is not None
    assert (torch.empty, torch.zeros_like, torch.Tensor.new_empty) == before[:3]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_hypothesis_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"flakit\[audit\].*shrink=False"):
        flakit.audit("chunk_rwkv6")
    assert flakit.audit("chunk_rwkv6", only="gradients", shrink=False).passed


# --- interpreted, and where others draw -----------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.full
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_our_kernels_pass_interpreted(op):
    """Every probe, at as many settings as a quarter of the usual time allows: tests/ops holds them to more of them."""
    kernel = functools.partial(getattr(flakit, f"chunk_{op}"), backend="triton")
    found = flakit.audit(kernel, op, shrink=False, seconds=15)
    assert found.passed, words(found)


@pytest.mark.interpret
def test_interpreted_kernels_are_asked_for_float16_and_not_for_bfloat16():
    found = flakit.audit(
        functools.partial(flakit.chunk_rwkv6, backend="triton"), "rwkv6", only=["16-bit"], shrink=False
    )
    assert found["16-bit"].verdict == "pass" and found["16-bit"].finding.setting.dtype == "float16", words(found)


def one_product(r, k, v, w, u, scale=None):
    """A sequence as one product, every token's factor from the start: right until a factor overflows."""
    r, k, v, w = (x.transpose(1, 2) for x in (r, k, v, w))
    gi = w.cumsum(-2)
    A = ((r * (gi - w).exp()) @ (k * (-gi).exp()).mT).tril(-1) + (r * u[:, None] * k).sum(-1).diag_embed()
    return (r.shape[-1] ** -0.5 if scale is None else scale) * (A @ v).transpose(1, 2)


def test_what_overflows_is_neither_misread_nor_unseen():
    found = flakit.audit(one_product, "rwkv6", only=["decay-onset", "suffix", "strides"], shrink=False)
    assert [v.probe.name for v in found.failed] == ["decay-onset"]
    assert found["suffix"].worst == 0.0 and "nan" not in found["suffix"].words


def test_an_audit_in_a_notebook_says_what_its_table_says():
    found = flakit.audit(one_product, "rwkv6", only=["decay-onset", "gradients"], shrink=False)
    said = found._repr_html_()
    for word in ("decay-onset", "✗ fail", "✓ pass", "88.72", "<code>anchor</code>", found["decay-onset"].words):
        assert word in said
    assert found.picture().png() and "2 probes, 1 of them failed" in found.picture().alt


def test_only_rwkv7_has_an_inverse_to_form_of_powers():
    found = flakit.audit(kernels.bfloat16_state, "rwkv6", only="repeated-tokens", shrink=False)
    assert found.failed[0].case is None, found


def test_an_audit_is_the_same_text_where_rich_would_draw(monkeypatch):
    found = flakit.audit(kernels.only_o, "rwkv6", only="gradients", shrink=False)
    plain = str(found)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == plain and "gradients" in plain


def test_a_default_device_of_somebody_changes_nothing():
    """Meta tensors have no numbers: what is made on the default device instead of the one asked for, fails here."""
    ends = torch.tensor([0, 30, 70])
    expected = flakit.inputs("gsa", T=70, cu_seqlens=ends, decay=-0.5)
    with torch.device("meta"):
        packed = flakit.inputs("gsa", T=70, cu_seqlens=ends, decay=-0.5)
        found = flakit.audit("chunk_rwkv6", only=["truth", "packed"], shrink=False, seconds=None)
    assert all(torch.equal(x, packed[name]) for name, x in expected.items())
    assert found.passed, words(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bonus dropped on one token", "dr without scale", "state in bfloat16"])
def test_a_script_for_a_gpu_runs_and_leaves_the_default_device_alone(name):
    op, kernel = WRONG[name]
    found = flakit.audit(kernel, op, only=["truth", "final-state"], seconds=None)
    for failed in found.failed:
        assert '"cuda"' in failed.repro
        with pytest.raises(AssertionError, match="is off by"):
            exec(failed.repro.replace("# function = ...", "pass #"), {"function": kernel})
        assert torch.get_default_device() == torch.device("cpu")


def test_threads_that_would_wait_for_each_other_are_not_started(monkeypatch):
    used, computed = [], truth.truth
    monkeypatch.setattr(truth, "truth", lambda *a, **k: used.append(torch.get_num_threads()) or computed(*a, **k))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        flakit.audit(kernels.naive, "rwkv6", only="truth", shrink=False, seed=12)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(used) == {1}
