import json
import math

import pytest
from typer.testing import CliRunner

import flakit
from flakit import cli, doctor
from flakit.cases import registry
from flakit.cases.laws import Row


def run(*args):
    return CliRunner().invoke(cli.app, args)


def test_version():
    assert run("--version").output.strip() == flakit.__version__


def test_without_arguments_it_shows_the_commands():
    assert "doctor" in run().output


def test_unknown_command_is_refused():
    done = run("docter")
    assert (done.exit_code, "docter" in done.output) == (2, True)


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
@pytest.mark.parametrize("level", [doctor.OK, doctor.WARNING, doctor.BROKEN])
def test_doctor_exits_with_1_only_if_something_is_broken(monkeypatch, level, as_json):
    diagnosis = doctor.Diagnosis((doctor.Finding("torch", level, "as it is"),))
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    done = run("doctor", *["--json"] * as_json)
    assert done.exit_code == (level == doctor.BROKEN)
    assert level in done.output


# --- flakit cases ---------------------------------------------------------------------------------------------------


def test_cases_lists_every_case():
    done = run("cases")
    assert done.exit_code == 0 and all(name in done.output for name in registry.CASES)
    listed = json.loads(run("cases", "--json").output)
    assert [entry["name"] for entry in listed] == list(registry.CASES)
    anchor = next(entry for entry in listed if entry["name"] == "anchor")
    expects = "a number from -1000 to 0, a natural-log decay"
    assert anchor["knobs"]["w"] == {"default": -88.8, "expects": expects} and anchor["title"] and anchor["threads"]


@pytest.mark.parametrize("words", [["--w", "-88.8", "--T", "64"], ["--w=-88.8", "--T=64"]], ids=["apart", "joined"])
def test_cases_runs_one_with_knobs(words):
    done = run("cases", "anchor", *words)
    assert done.exit_code == 0 and "o finite at w = -88.8" in done.output and "88.76" in done.output
    made = json.loads(run("cases", "anchor", *words, "--json").output)
    assert made["knobs"] == {"w": -88.8, "T": 64}
    rows = {row["what"]: row for row in made["cases"]["anchor"]}
    assert rows["o finite at w = -88.8"]["measured"] is False and rows["o finite at w = -88.8"]["agrees"] is True
    assert rows["du ends at |w|"]["law"] == "inf" and rows["du ends at |w|"]["recorded"] is None


def test_cases_without_knobs_tells_the_story():
    done = run("cases", "strides")
    assert done.exit_code == 0 and "told" in done.output and "[2, 100, 4, 64]: misread" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["anchr"], "there is none named 'anchr'; did you mean anchor?"),
        (["anchor", "--ww", "1"], "ww: anchor has no such knob"),
        (["anchor", "--w", "deep"], "w: expected a number from -1000 to 0, a natural-log decay, got 'deep'"),
        (["anchor", "--w", "1"], "w: expected a number from -1000 to 0, a natural-log decay, got 1.0"),
        (["anchor", "--w"], "w: expected a value, got none"),
        (["anchor", "--w", "--T", "64"], "w: expected a value, got none"),
        (["anchor", "deep"], "expected knobs like --w -88.8, got 'deep'"),
        (["all", "--w", "1"], "w: expected the name of one case before its knobs"),
        (["transposed_mask", "--BK", "12"], "BK: expected 16 or 32 or 64 or 128, got 12"),
    ],
    ids=" ".join,
)
def test_cases_says_what_is_wrong(words, says):
    done = run("cases", *words)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_cases_all_fails_where_a_law_fails(monkeypatch):
    """Every story in turn, here with made-up rows: the real ones are the tests of the cases."""
    rows = {name: [Row(f"{name}'s number", math.nan, 2.0, 2.0)] for name in registry.CASES}
    monkeypatch.setattr(registry.Case, "reproduce", lambda case: rows[case.name])
    done = run("cases", "all")
    assert done.exit_code == 0 and all(f"{name}'s number" in done.output for name in rows)
    assert set(json.loads(run("cases", "all", "--json").output)["cases"]) == set(rows)
    rows["anchor"] = [Row("planted", math.nan, 2.0, 2.1)]
    done = run("cases", "all")
    assert done.exit_code == 1 and "1 not as predicted" in done.output and "NO" in done.output


# --- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_sweep_prints_where_it_is_finite_and_writes_its_files(tmp_path):
    files = {name: tmp_path / f"found.{name}" for name in ("csv", "json", "png", "jsonl")}
    options = [f"--csv={files['csv']}", f"--json={files['json']}", f"--store={files['jsonl']}"]
    options += [f"--picture={files['png']}", "--law=flakit.cases.padding:law"]
    result = run("sweep", "rwkv6", "--over", "decay=-0.1..-10:3", "--over", "T=4,8", "--set", "K=4", *options)
    assert result.exit_code == 0, result.output
    assert [line.split()[1:5] for line in result.output.splitlines() if " dw " in line] == [["dw", "│", "6", "of"]]
    assert len(files["csv"].read_text().splitlines()) == 7
    assert json.loads(files["json"].read_text())["axes"]["decay"] == pytest.approx([-0.1, -1.0, -10.0])
    assert files["png"].read_bytes().startswith(b"\x89PNG") and len(files["jsonl"].read_text().splitlines()) == 7


@pytest.mark.parametrize(
    "words, says",
    [
        (["rwkv6", "--over", "T"], "--over: expected name=value,value or name=first..last:count, got 'T'"),
        (["rwkv6", "--over", "T=1..x"], "--over: expected name=first..last:count, got 'T=1..x'"),
        (["rwkv6", "--over", "decay=-1..1:3"], "expected two numbers of one sign"),
        (["rwkv6", "--over", "form=chonk"], "form: expected one of chunk, recurrent, got 'chonk'"),
        (["nowhere.py:f", "--over", "T=4"], "subject: expected a file, nowhere.py does not exist"),
    ],
)
def test_a_sweep_that_cannot_run_says_why(words, says, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the command would set it for the whole process
    result = run("sweep", *words)
    assert result.exit_code == 2 and says in " ".join(result.output.split())
