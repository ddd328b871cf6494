import json
import sys
import types

import pytest
import torch

from flakit import doctor
from flakit.numerics import recorded
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.launch import TABLE, Chip
from tests.commands import completed

TESTED = {"torch": "2.13.0+cpu", "triton": "3.7.1", "numpy": "2.4.6", "ipywidgets": "8.1.9"}
ON_THE_GPU_OF_RECORD = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.3.5", "ipywidgets": None}


def mismatches(system="linux", **changed):
    return list(doctor.mismatches({**TESTED, **changed}, system))


@pytest.mark.parametrize("versions", [TESTED, ON_THE_GPU_OF_RECORD], ids=["tested set", "GPU of record"])
def test_good_versions_pass(versions):
    assert mismatches(**versions) == []


@pytest.mark.parametrize(
    ("changed", "level", "names", "cure"),
    [
        ({"triton": "3.9.0"}, doctor.WARNING, ["2.13.0", "3.7", "3.9.0"], "triton==3.7.*"),
        ({"torch": "2.11.0+cu130"}, doctor.WARNING, ["2.11.0", "3.6", "3.7.1"], "triton==3.6.*"),
        ({"torch": "2.11.0", "triton": "3.6.0"}, doctor.WARNING, ["3.6.0", "numpy 2.4.6"], "numpy<2.4"),
        ({"triton": None}, doctor.WARNING, ["missing"], "pip install -c constraints.txt triton"),
        ({"ipywidgets": "7.8.5"}, doctor.BROKEN, ["7.8.5"], "ipywidgets>=8.1"),
    ],
    ids=["newer triton", "older torch", "triton 3.6.0 with new numpy", "no triton", "ipywidgets 7"],
)
def test_bad_pair_is_named_with_its_cure(changed, level, names, cure):
    (found,) = mismatches(**changed)
    assert found.level == level
    assert all(name in found.says for name in names)
    assert cure in found.cure


def test_triton_is_not_missed_where_it_does_not_exist():
    assert mismatches(system="darwin", triton=None) == []


def test_old_python_is_broken():
    found, *_ = doctor.python_and_packages({**doctor.installed(), "python": "3.9.18"})
    assert (found.level, "3.10" in found.says) == (doctor.BROKEN, True)


def test_cuda_build_without_a_gpu_is_a_note_with_the_way_to_the_small_one():
    found = doctor.build_of_torch("2.13.0", cuda="13.0", gpu=False)
    assert (found.level, "no GPU" in found.says, "7 to 8 GB" in found.says) == (doctor.NOTE, True, True)
    assert "2 to 3 GB" in found.cure and "PIP_EXTRA_INDEX_URL" in found.cure
    assert doctor.build_of_torch("2.13.0", cuda="13.0", gpu=True) == doctor.Finding("torch", doctor.OK, "2.13.0")
    assert doctor.build_of_torch("2.13.0+cpu", cuda=None, gpu=False).level == doctor.OK


def test_cuda_build_is_told_in_table_and_json(monkeypatch):
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "check_operators", lambda: ())
    diagnosis = doctor.examine()
    (found,) = [finding for finding in json.loads(diagnosis.as_json())["findings"] if finding["topic"] == "torch"]
    assert "CUDA 13.0" in found["says"] and "PIP_EXTRA_INDEX_URL" in found["cure"]
    shown = diagnosis._repr_mimebundle_(include=[], exclude=[])["text/plain"]
    assert "PIP_EXTRA_INDEX_URL" in shown and diagnosis.works


def test_missing_lab_is_a_note_with_the_extra_to_install():
    (found,) = doctor.lab({**doctor.installed(), "ipywidgets": None})
    assert (found.level, "ipywidgets" in found.says, "[lab]" in found.cure) == (doctor.NOTE, True, True)


@pytest.mark.parametrize("package", doctor.LAB_EXTENSIONS)
def test_a_missing_extension_of_jupyterlab_is_found(monkeypatch, package):
    monkeypatch.setattr(doctor, "serving_python", lambda: None)
    assert {found.level for found in doctor.lab(doctor.installed())} <= {doctor.OK, doctor.NOTE}
    monkeypatch.setitem(doctor.LAB_EXTENSIONS, package, "share/nowhere")
    found, *_ = doctor.lab(doctor.installed())
    assert (found.level, package in found.says, package in found.cure) == (doctor.BROKEN, True, True)


def test_lab_of_another_environment_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "serving_python", lambda: tmp_path)
    found, *_ = doctor.lab(doctor.installed())
    assert (found.level, str(tmp_path) in found.says, "model not found" in found.says) == (doctor.BROKEN, True, True)


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
def test_interpreter_set_too_late_is_found(monkeypatch, late):
    decided = type("JITFunction" if late else "InterpretedFunction", (), {})()
    monkeypatch.setitem(sys.modules, "triton.language", types.SimpleNamespace(sum=decided))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = doctor.kernels(TESTED)
    assert (found.level == doctor.BROKEN) == late
    assert ("restart" in found.cure) == late


CHIPS = {
    90: (doctor.OK, "found and run on an NVIDIA H200 (sm_90)"),
    89: (doctor.NOTE, "compiled for sm_89 in flakit's tests, and run on no such GPU"),
    100: (doctor.NOTE, "compiled for sm_100 in flakit's tests, and run on no such GPU"),
    110: (doctor.NOTE, "neither run on a GPU with compute capability 11.0 nor compiled for one"),
    75: (doctor.NOTE, "which may need 99 KB of shared memory a block, and here are 64"),
}


@pytest.mark.parametrize(
    ("capability", "triton", "says"),
    [
        (100, "3.7.1", "here is 3.7.1"),
        (103, "3.6.0", "here is 3.6.0"),
        (103, "3.8.0", "whether 3.8.0 does is not known"),
        (90, "3.6.0", None),
        (120, "3.7.1", None),
        (100, None, None),
    ],
)
def test_a_card_for_which_triton_compiles_chained_products_wrongly_is_warned_of(capability, triton, says):
    found = list(doctor.compiled_wrongly([Chip("a GPU", capability, 232448)], triton))
    assert [x.level for x in found] == [doctor.WARNING] * (says is not None)
    assert all(says in x.says and "triton-lang/triton#10821" in x.says and "backend='torch'" in x.cure for x in found)


def test_the_doctor_looks_at_the_card_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B300")
    monkeypatch.setattr(doctor, "chips", lambda: [Chip("NVIDIA B300", 103, 232448)])
    monkeypatch.setattr(doctor, "check_operators", list)
    assert [x.level for x in doctor.examine().findings if "#10821" in x.says] == [doctor.WARNING]


@pytest.fixture
def own_rows(tmp_path, monkeypatch):
    """A folder of rows that were tuned here, empty so far."""
    monkeypatch.setenv("FLAKIT_ROWS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("capability", CHIPS)
def test_where_the_launch_table_was_run_is_said(capability, own_rows):
    level, says = CHIPS[capability]
    (found,) = doctor.launch_rows([Chip("a GPU", capability, 65536 if capability == 75 else 101376)])
    assert (found.level, says in found.says) == (level, True), found.says
    assert f"all {len(TABLE)} rows are those built in" in found.says
    assert ("flakit tune" in found.cure) == (level == doctor.NOTE)


def test_rows_that_were_tuned_here_are_told(own_rows):
    meta = recorded.provenance("flakit tune", "NVIDIA RTX 4090")
    rows = [{"kernel": name, "width": "16-bit", **TABLE[name, "16-bit"]._asdict()} for name in ("scan", "gsa.stream")]
    recorded.write(own_rows / "sm_89.json", meta, [*rows, rows[0] | {"kernel": "rwkv5.stream"}])
    (found,) = doctor.launch_rows([Chip("NVIDIA RTX 4090", 89, 101376)])
    assert f"2 rows of {own_rows / 'sm_89.json'}, tuned on NVIDIA RTX 4090, {meta['date']}" in found.says
    assert "1 there are of kernels that flakit no longer has" in found.says
    assert f"the other {len(TABLE) - 2} rows" in found.says and found.level == doctor.NOTE


def test_a_broken_file_of_rows_is_told_with_its_cure(own_rows):
    (own_rows / "sm_89.json").write_text("[]")
    (found,) = doctor.launch_rows([Chip("NVIDIA RTX 4090", 89, 101376)])
    assert (found.level, "flakit tune" in found.cure) == (doctor.BROKEN, True)


def test_gpus_of_two_kinds_get_the_rows_built_in(own_rows):
    (own_rows / "sm_89.json").write_text("[]")  # not even looked at
    ada, hopper = doctor.launch_rows([Chip("NVIDIA RTX 4090", 89, 101376), Chip("NVIDIA H200", 90, 232448)])
    assert ada.says.startswith("NVIDIA RTX 4090, beside GPUs of another kind: all") and ada.level == doctor.NOTE
    assert "found and run on an NVIDIA H200" in hopper.says and hopper.level == doctor.OK


def test_without_a_gpu_there_is_no_word_of_rows():
    assert list(doctor.launch_rows([])) == []


def test_wrong_numbers_and_failures_are_broken():
    assert doctor.Check("rwkv6", "chunk", "torch on cpu", 2e-7, "dw").level == doctor.OK
    assert doctor.Check("rwkv6", "chunk", "torch on cpu", 2e-3, "dw").level == doctor.BROKEN
    assert doctor.Check("rwkv6", "chunk", "triton on cuda", 2e-3, "dw", dtype="bfloat16").level == doctor.OK
    assert doctor.Check("rwkv6", "chunk", "triton on cuda", 2e-2, "dw", dtype="bfloat16").level == doctor.BROKEN
    assert doctor.Check("rwkv6", "chunk", "torch on cpu", failure="dw: non-finite").level == doctor.BROKEN
    assert doctor.Check("rwkv6", "chunk", "interpreted", failure="x", essential=False).level == doctor.WARNING


def test_non_finite_operator_is_reported(monkeypatch):
    def poisoned(*args, evaluate=doctor.evaluate, **kwargs):
        found = evaluate(*args, **kwargs)
        found["dk"][0, 3] = float("nan")
        return found

    monkeypatch.setattr(doctor, "evaluate", poisoned)
    check, *_ = doctor.check_on("torch", "cpu")
    assert (check.level, check.error, check.tensor) == (doctor.BROKEN, None, "dk")
    assert "NaN" in check.failure


def test_raising_operator_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "evaluate", lambda *args, **kwargs: 1 / 0)
    check, *_ = doctor.check_on("torch", "cpu")
    assert (check.level, check.failure) == (doctor.BROKEN, "ZeroDivisionError: division by zero")


def test_diagnosis_shows_in_a_notebook_and_as_json():
    finding = doctor.Finding("notebooks", doctor.NOTE, "not installed", "pip install -e '.[lab]'")
    failed = doctor.Check("rwkv6", "chunk", "torch on cpu", failure="ValueError: [1, 2]")
    diagnosis = doctor.Diagnosis((finding,), (failed,), TESTED)
    shown = diagnosis._repr_mimebundle_(include=[], exclude=[])
    assert "[lab]" in shown["text/plain"] and "[1, 2]" in shown["text/plain"] and "text/html" in shown
    assert shown["text/html"].startswith(
        "<details open><summary>The doctor's report: 1 of 2 lines need a look</summary>"
    )
    said = json.loads(diagnosis.as_json())
    assert (said["works"], said["checks"][0]["level"]) == (False, doctor.BROKEN)


def test_a_good_report_is_folded_in_a_notebook():
    fine = doctor.Diagnosis((doctor.Finding("torch", doctor.OK, "2.13.0"),), (), TESTED)
    shown = fine._repr_mimebundle_(include=[], exclude=[])
    assert shown["text/html"].startswith("<details><summary>The doctor's report: all is well</summary>")
    assert "2.13.0" in shown["text/plain"] and "<details" not in shown["text/plain"]


@pytest.mark.full
def test_command_runs_every_operator_on_every_backend():
    done = completed(sys.executable, "-m", "flakit.cli", "doctor", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["works"]) == (0, True), done.stdout
    backends = {check["backend"].split()[0] for check in said["checks"]}
    assert backends == {"reference", "torch"} | ({"triton"} if said["versions"]["triton"] else set())
    for backend in backends:
        ran = {(c["operator"], c["form"]) for c in said["checks"] if c["backend"].startswith(backend)}
        assert ran == {(name, form) for name, op in OPERATORS.items() for form in op.forms}


@pytest.fixture
def chunks_of_gsa(monkeypatch):
    """The tokens of a chunk in each call of GSA's kernels, and the chunks of its sequences."""
    from flakit.ops.gsa.chunk_triton import _Plan

    found, init = [], _Plan.__init__

    def noting(plan, *given):
        init(plan, *given)
        found.append((plan.C, plan.chunks))

    monkeypatch.setattr(_Plan, "__init__", noting)
    return found


@pytest.mark.interpret
def test_kernels_of_float32_heads_of_64_channels_are_looked_at(chunks_of_gsa):
    found = list(doctor.check_on("triton", "cpu"))
    assert [(c.operator, c.form) for c in found if c.channels == 64] == [("rwkv6", "chunk"), ("rwkv7", "chunk")]
    assert [(c.operator, c.form) for c in found if c.slots == 64] == [("gsa", "chunk")] and (64, 2) in chunks_of_gsa
    assert {c.dtype for c in found} == {"float32"} and [c for c in found if c.level != doctor.OK] == []


def all_of_16_bits(device):
    found = list(doctor.check_16_bits(device))
    forms = [(c.operator, c.form, c.channels) for c in found]
    assert ("gsa", "chunk", None) in forms and ("gsa", "recurrent", None) in forms
    assert [channels for *form, channels in forms if form == ["rwkv7", "chunk"]] == [64, 80]
    assert [c.slots for c in found if (c.operator, c.form) == ("gsa", "chunk")] == [None, 64]
    assert [c for c in found if c.level != doctor.OK] == []
    return found


@pytest.mark.interpret
@pytest.mark.full
def test_kernels_of_16_bits_are_looked_at(monkeypatch):
    """And a wrong one is seen: the fused kernels' gradient of a state, which nothing adds to."""
    from flakit.ops.rwkv7 import fused_chunk_triton as fused

    assert {c.dtype for c in all_of_16_bits("cpu")} == {"float16"}
    written = fused.backward

    def nothing_carried(*given):
        *grads, dinitial = written(*given)
        return *grads, dinitial.zero_()

    monkeypatch.setattr(fused, "backward", nothing_carried)
    monkeypatch.setattr(doctor, "OPERATORS", {"rwkv7": OPERATORS["rwkv7"]})
    wrong = [c for c in doctor.check_16_bits("cpu") if c.level != doctor.OK]
    assert [(c.form, c.channels, c.tensor) for c in wrong] == [("chunk", 64, "dinitial_state")]


@pytest.mark.gpu
def test_kernels_of_16_bits_are_looked_at_on_a_gpu():
    assert {c.dtype for c in all_of_16_bits("cuda")} == {"bfloat16"}
