"""Every instrument on every member of the family, and the audit on kernels of it, right and wrong."""

import inspect
from pathlib import Path

import pytest
import torch

import flakit
from flakit.figures.phase import phase
from flakit.instruments.digits import Kind
from flakit.instruments.subject import Subject
from flakit.instruments.testing import audited
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.family import FAMILY
from flakit.numerics.gradients import gradient_rows
from flakit.numerics.pieces import in_pieces
from flakit.numerics.sweep import sweep
from flakit.panels import compare
from tests.instruments.family_kernels import RIGHT, WRONG

OPS = pytest.mark.parametrize("op", FAMILY)
ON_DECAYS = {"decay-onset", "decay-accuracy", "spike", "zero-decay", "inf-decay", "anchor-shift", "mixed-dtypes"}


def naive(op):
    return FAMILY[op].reference.function


def words(found):
    return [(v.probe.name, v.words) for v in found.failed]


def test_a_kernel_with_a_factor_from_the_chunks_start_is_found():
    op, kernel, probe = WRONG["kda, e^(+) from the chunk's start"]
    (v,) = flakit.audit(kernel, op, only=[probe], shrink=False, seconds=None).verdicts
    assert v.verdict == "fail" and v.case == "anchor" and "are not finite" in v.words
    assert "def naive(q, k, v, g, beta" in v.repro and "import flakit" not in v.repro


@pytest.mark.full
def test_a_kernel_with_a_factor_from_the_chunks_start_is_found_shrunk_and_shown():
    op, kernel, probe = WRONG["kda, e^(+) from the chunk's start"]
    (v,) = flakit.audit(kernel, op, only=[probe], seconds=None).verdicts
    assert v.setting["T"] <= 16 and v.setting["K"] == v.setting["V"] == 1
    with pytest.raises(AssertionError, match="is off by nan"):
        exec(v.repro, {})


def test_a_right_kernel_in_chunks_passes_what_finds_that():
    found = flakit.audit(
        RIGHT["kda in chunks"][1], "kda", only=["truth", "decay-onset", "scale"], shrink=False, seconds=4
    )
    assert found.passed, words(found)


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name):
    op, kernel = RIGHT[name]
    found = flakit.audit(kernel, op, shrink=False, seconds=None)
    assert found.passed, words(found)


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_found_by_their_probe(name):
    op, kernel, probe = WRONG[name]
    found = flakit.audit(kernel, op, only=[probe], seconds=None)
    assert found[probe].verdict == "fail", found
    assert found[probe].repro is not None
    with pytest.raises(AssertionError):
        exec(found[probe].repro, {})


@pytest.mark.full
@OPS
def test_every_probe_passes_the_references(op):
    found = flakit.audit(naive(op), op, shrink=False, seconds=None)
    assert found.passed, words(found)
    unsupported = {v.probe.name for v in found.verdicts if v.verdict == "not supported"}
    expected = (set() if FAMILY[op].decay else ON_DECAYS) | (set() if FAMILY[op].heads_alike else {"head-order"})
    assert unsupported - {"other-device", "ranks"} == expected


def test_where_nothing_decays_no_probe_asks_how():
    found = flakit.audit(naive("retention"), "retention", only=sorted(ON_DECAYS), shrink=False)
    assert {v.words for v in found.verdicts} == {"retention has no decay among its arguments"}


@pytest.mark.parametrize(
    "name, like",
    [
        ("chunk_gated_delta_rule", "gated_delta_rule"), ("fused_recurrent_delta_rule", "delta_rule"),
        ("my_simple_gla", "simple_gla"), ("chunk_gla", "gla"), ("chunk_dplr_delta_rule", "dplr_delta_rule"),
    ],
)  # fmt: skip
def test_the_longest_name_in_a_functions_says_which_operator_it_is(name, like):
    def kernel(*given):
        return given

    assert Subject(kernel, name=name).op.name == like


def test_arguments_that_the_formula_leaves_open_are_given_where_they_are_named():
    seen = {}

    def kernel(q, k, v, scale=None, normalize=True):
        seen["normalize"] = normalize
        return naive("linear_attn")(q, k, v, scale)[0]

    Subject(kernel, "linear_attn")(flakit.inputs("linear_attn", T=3))
    assert seen == {"normalize": False}


def test_values_in_groups_of_heads_are_asked_for():
    def first_of_each_group(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        n = v.shape[2] // q.shape[2]
        if n > 1:  # heads of q and k laid out the other way round
            q, k = (x.repeat(1, 1, n, 1) for x in (q, k))
        return naive("kda")(q, k, v, g, beta, scale, initial_state, output_final_state)

    found = flakit.audit(first_of_each_group, "kda", only=["truth"], shrink=False)
    assert found["truth"].verdict == "fail" and found["truth"].setting["groups"] == 2
    assert "2 * H" in found["truth"].repro
    with pytest.raises(AssertionError):
        exec(found["truth"].repro, {"function": first_of_each_group})


# --- every instrument on every member --------------------------------------------------------------------------------

SMALL = {"K": 4, "V": 3}


def halved(op):
    """A kernel that is wrong by a factor, with the arguments of the operator."""
    right = naive(op)

    def kernel(*given, **named):
        o, state = right(*given, **named)
        return o / 2, state

    kernel.__signature__ = inspect.signature(right)
    return kernel


def writes_scripts(op):
    (v,) = flakit.audit(halved(op), op, only=["truth"], shrink=False, seconds=None).verdicts
    assert v.verdict == "fail" and "def naive(" in v.repro
    with pytest.raises(AssertionError, match="is off by"):
        exec(v.repro, {"function": halved(op)})


def shrinks(op):
    (v,) = flakit.audit(halved(op), op, only=["truth"], seconds=None).verdicts
    assert v.setting["T"] == v.setting["K"] == v.setting["V"] == 1, v.setting


def is_a_test(op):
    test = audited(naive(op), like=op, only=["truth"], seconds=None)
    test(probe="truth")


def sweeps(op):
    over = {"T": [3, 9], **({"decay": [-0.1, -30.0]} if FAMILY[op].decay else {"seed": [0, 1]})}
    found = sweep(naive(op), over, like=op, **SMALL)
    assert found.complete and max(found[f"{name}.l2"].max() for name in found.tensors) < 1e-5
    assert {"o", "dq", "dk", "dv"} <= set(found.tensors)
    return found


def draws_a_phase_diagram(op):
    assert len(phase(sweeps(op), across="decay" if FAMILY[op].decay else "T").canvas.png()) > 1000


def compares_forms(op):
    rows = gradient_rows(op, T=9, **SMALL, dfinal_state=True, over_time=True)
    assert {row["form"] for row in rows} == {"naive"} and max(row["l2"] for row in rows) < 1e-5
    assert {row["tensor"] for row in rows} == {*FAMILY[op].outputs, *(f"d{name}" for name in FAMILY[op].tensors)}


def goes_in_pieces(op):
    x = flakit.inputs(op, T=9, **SMALL, dtype=torch.float64)
    true, found = truth(op, x), evaluate(in_pieces(op, [4]), x, form="naive")
    assert all(torch.allclose(y, true[name], rtol=1e-10) for name, y in found.items())


def traces(op):
    x = flakit.inputs(op, T=5, **SMALL)
    with flakit.trace() as clean:
        naive(op)(**x, **constants(op))
    assert clean.first is None
    x["k"][0, 3, 0, 1] = float("inf")
    with flakit.trace() as t:
        naive(op)(**x, **constants(op))
    assert t.first is not None and "family.py" in str(t)


def names_lost_digits(op):
    """Where v is rounded to bfloat16 on its way in; nothing is lost by the reference itself."""
    x = flakit.inputs(op, T=5, **SMALL)
    with flakit.trace(digits=True) as clean:
        kept = naive(op)(**x, **constants(op))
    assert clean.digits.accurate and clean.digits.lines
    with flakit.trace(digits=True) as t:
        short = {"v": x["v"].to(torch.bfloat16).float()}
        kept = naive(op)(**x | short, **constants(op))
    assert kept[0].isfinite().all()  # what nobody holds when the trace ends is no result
    assert (
        t.digits.first.place.expression == 'x["v"].to(torch.bfloat16)' and t.digits.first.blamed.kind == Kind.ROUNDING
    )


def compares_in_a_panel(op):
    panel = compare(halved(op), like=op, T=16, K=16)
    mine, naive = (row["l2"] for row in panel.result if row["tensor"] == "o")
    assert naive < 1e-6 and abs(mine - 0.5) < 1e-6 and "Error" not in panel.text


def has_headroom(op):
    if not FAMILY[op].decay:
        with pytest.raises(ValueError, match="expected an operator with a decay among its arguments"):
            flakit.headroom(torch.zeros(1, 4, 2), op)
        return
    w = flakit.inputs(op, T=70, **SMALL, decay=-3.0)[FAMILY[op].decay]
    found = flakit.headroom(w, op)
    assert found.margin("none").breaks and not found.margin("dyadic").breaks and found.op == op


def constants(op):
    return {name: x for name, x in FAMILY[op].constants.items() if name in FAMILY[op].reference.named}


INSTRUMENTS = {  # beside the audit, of which every probe is asked above
    "shrinking": shrinks,
    "scripts": writes_scripts,
    "audited": is_a_test,
    "sweep": sweeps,
    "phase diagram": draws_a_phase_diagram,
    "comparer": compares_forms,
    "its panel": compares_in_a_panel,
    "pieces": goes_in_pieces,
    "trace": traces,
    "digits": names_lost_digits,
    "headroom": has_headroom,
}


@pytest.mark.full
@OPS
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_every_instrument_takes_every_member(op, instrument):
    INSTRUMENTS[instrument](op)


def table() -> str:
    """What docs/instruments.md says: a row for each member; where an instrument has nothing to ask, what it says."""
    columns = ["audit", *INSTRUMENTS]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, op in FAMILY.items():
        without = {} if op.decay else {"headroom": "no decay", "phase diagram": "over T"}
        lines.append(f"| `{name}` | " + " | ".join(without.get(each, "✓") for each in columns) + " |")
    return "\n".join(lines)


def test_the_table_of_the_reference_has_every_cell_that_is_run():
    """`test_every_instrument_takes_every_member` runs each, `test_every_probe_passes_the_references` the audit's."""
    assert table() in (Path(__file__).parents[2] / "docs" / "instruments.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_kernel_and_its_reference_in_a_file_are_audited_on_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from flakit.cli import app
    from tests.numerics.test_described import FILE, SAID

    file = tmp_path / "audited_by_its_reference.py"
    text = FILE.replace("{said}", f"[flakit]\n    {SAID}")
    file.write_text(text + "\n\ndef half(*x, **given):\n    o, S = naive(*x, **given)\n    return o / 2, S\n")
    for name, status in (("naive", 0), ("half", 1)):
        spec = [f"{file}:{name}", "--reference", f"{file}:naive", "--only", "truth", "--repros", str(tmp_path)]
        done = CliRunner().invoke(app, ["audit", *spec, "--no-shrink"])
        assert done.exit_code == status, done.output
    script = (tmp_path / "truth.py").read_text()
    assert script.count("import sys\n") == script.count("import naive as naive") == 1
    assert "flakit" not in script.replace(str(tmp_path), "")
    done = CliRunner().invoke(app, ["audit", f"{file}:naive", "--reference", f"{file}:half"])
    assert done.exit_code == 2 and "expected a description of half" in " ".join(done.stderr.split())
