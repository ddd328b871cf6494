"""The list of the cases: complete, uniform and clear about knobs; and when a law and a measurement agree."""

import ast
import importlib
import json
import math
import re
from pathlib import Path

import pytest

from flakit.cases import registry
from flakit.cases.laws import Row
from flakit.cases.registry import CASES, find

FOLDER = Path(registry.__file__).parent
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def defined(path):
    """The functions of a module, or of all modules in a folder."""
    if path.is_dir():
        return set().union(*map(defined, path.glob("*.py")))
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_case_is_listed_and_nothing_else():
    cases = [path for path in FOLDER.iterdir() if path.is_dir() or path.suffix == ".py"]
    assert set(CASES) == {path.stem for path in cases if {"law", "reproduce"} <= defined(path)}


@pytest.mark.parametrize("name", CASES)
def test_an_entry_is_complete(name):
    case = CASES[name]
    assert case.name == name and case.module.law and case.reproduce and case.knobs
    for line in (case.title, case.reported, case.measured):
        assert 10 < len(line) < 160 and "\n" not in line and not line.endswith("."), line
    assert all(thread.count("/") == 1 and thread.rpartition("#")[2].isdigit() for thread in case.threads)
    for knob in case.knobs.values():
        assert knob.fits(knob.default)
        assert knob.parse(str(knob.default).lower() if knob.default is None else str(knob.default)) == knob.default


@pytest.mark.parametrize("name", CASES)
def test_its_notebook_has_a_panel_for_it(name):
    """`panels.case(name)`; code of notebooks only, no prose."""
    notebook = json.loads((NOTEBOOKS / f"{CASES[name].notebook}.ipynb").read_text())
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert re.search(rf"^(\w+ = )?(panels\.)?case\(\"{name}\"", code, re.M)


# --- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_setting_agrees_with_its_law(name):
    rows = CASES[name].at()
    assert rows and all(isinstance(row, Row) and row.agrees is not False for row in rows)
    assert any(row.agrees for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_law_holds_at_every_choice_and_both_ends_of_every_range(name):
    """Or the setting is refused, with the knob's name: most often because two knobs do not go together."""
    case, failed = CASES[name], {}
    for knob, said in case.knobs.items():
        ends = (said.range.low, said.range.high) if said.range else ()
        for value in (*said.choices, *ends, *((True, False) if bool in said.kinds else ())):
            if isinstance(value, float) and float not in said.kinds or (name, value) in SLOW:
                continue
            try:
                wrong = [row for row in case.at(**{knob: value}) if row.agrees is False]
            except ValueError as error:
                assert re.match(rf"({knob}|row|P|T|anchor): expected", str(error)), error
                continue
            if wrong:
                failed[knob, value] = wrong
    assert failed == {}


SLOW = {("log_space", 2048), ("decay_gradient", 2048)}  # seconds each

# What a law's numbers are multiplied with, beyond every tolerance of the case's rows.
WRONG = dict.fromkeys(CASES, 1.1) | {
    "blind_measure": 2.0,
    "clamping": 1.15,
    "decay_gradient": 1.5,
    "final_state_gradient": 1.4,
    "inverse": 11.0,
    "shared_store": 1.3,
    "unwritten_rows": 1.5,
    "weak_test": 2.0,
}
# Where `at` has its law from, if not from the module's `law`.
FROM = {"anchor": "anchor.story.limits", "anomaly": "padding.law", "decay_gradient": "decay_gradient.law_for"}


def multiplied(law, factor):
    if isinstance(law, bool):
        return not law
    if isinstance(law, dict):
        return {name: multiplied(x, factor) for name, x in law.items()}
    if isinstance(law, tuple):
        return type(law)(*(multiplied(x, factor) for x in law)) if hasattr(law, "_fields") else law
    return law if law is None else law * factor


@pytest.mark.parametrize("name", CASES)
def test_a_law_with_a_wrong_constant_is_rejected(name, monkeypatch):
    module, function = FROM.get(name, f"{name}.law").rsplit(".", 1)
    right = getattr(importlib.import_module(f"flakit.cases.{module}"), function)

    def wrong(*args, **how):
        if name == "aliasing":  # its numbers are ratios: a factor would cancel
            inputs, calls = args
            return right(inputs, calls + 1, **how)
        return multiplied(right(*args, **how), WRONG[name])

    monkeypatch.setattr(f"flakit.cases.{module}.{function}", wrong)
    assert any(row.agrees is False for row in CASES[name].at())


# --- knobs ----------------------------------------------------------------------------------------------------------


def test_knobs_are_read_from_words():
    texts = {"w": "-88.7", "row": "none", "scheme": "middle", "T": "128"}
    assert find("anchor").parse(texts) == {"w": -88.7, "row": None, "scheme": "middle", "T": 128}
    assert find("log-space").name == "log_space"
    assert find("chunk_vs_recurrent").parse({"scale": "no", "aliasing": "TRUE"}) == {"scale": False, "aliasing": True}
    assert find("final_state_gradient").parse({"decay": "-0.5"}) == {"decay": -0.5}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: find("ancor"), "case: there is none named 'ancor'; did you mean anchor"),
        (lambda: find("zzz"), "case: there is none named 'zzz'; expected one of log_space, "),
        (lambda: find("anchor").at(shceme="none"), "shceme: anchor has no such knob; did you mean scheme"),
        (
            lambda: find("anchor").parse({"w": "deep"}),
            "w: expected a number from -1000 to 0, a natural-log decay, got 'deep'",
        ),
        (
            lambda: find("anchor").parse({"row": "1.5"}),
            "row: expected a whole number from 0 to 127 or none, got '1.5'",
        ),
        (lambda: find("anchor").at(T=1.5), "T: expected a whole number from 1 to 256, got 1.5"),
        (lambda: find("anchor").at(T=0), "T: expected a whole number from 1 to 256, got 0"),
        (lambda: find("anchor").at(chunk=48), "chunk: expected 16 or 32 or 64 or 128, got 48"),
        (lambda: find("masking").at(w=0.5), "w: expected a number from -inf to 0, a natural-log decay, got 0.5"),
        (lambda: find("masking").at(w=math.nan), "w: expected a number from -inf to 0, a natural-log decay, got nan"),
        (lambda: find("masking").at(chunk=True), "chunk: expected a whole number from 2 to 128, got True"),
        (lambda: find("anchor").at(scheme="last"), "scheme: expected none or first-row or .*, got 'last'"),
        (lambda: find("aliasing").parse({"in_place": "maybe"}), "in_place: expected true or false, got 'maybe'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_name_the_knob(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# --- agreement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "measured", "within", "agrees"),
    [
        (1.0, 1.001, 2e-3, True),
        (1.0, 1.003, 2e-3, False),
        (1.0, 0.2, 4.0, True),
        (1.0, 0.19, 4.0, False),
        (math.inf, math.inf, 2e-3, True),
        (math.inf, 1e9, 2e-3, False),
        (3.0, math.inf, 2e-3, False),
        (3.0, math.nan, 2e-3, False),
        (0.0, 1e-7, 2e-3, True),
        (0.0, 1e-5, 2e-3, False),
        (1e-8, 3e-8, 1.0, False),
        (math.nan, 1.0, 2e-3, None),
        (math.nan, "rows", 2e-3, None),
        (True, True, 2e-3, True),
        (True, False, 2e-3, False),
        (False, True, 2e-3, False),
        ("rows 3 … 4", "rows 3 … 4", 2e-3, True),
        ("rows 3 … 4", "rows 3 … 5", 2e-3, False),
        ("refused", 4, 2e-3, False),
    ],
)
def test_agreement(law, measured, within, agrees):
    assert Row("", math.nan, law, measured, within).agrees is agrees
