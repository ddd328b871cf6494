"""`flakit trace script.py`: a process of its own, its words, its files and its exit status.

A process of its own takes as long as importing PyTorch twice: one shows the whole way, one is of what pytest runs, and
the others call what such a process runs.
"""

import json
import linecache
import os
import subprocess
import sys

import pytest

from flakit.instruments import trace_script
from flakit.ops.common.dispatch import has_triton

SCRIPT = """
import sys
import torch
import triton
import triton.language as tl


@triton.jit
def growth(x, o, D: tl.constexpr):
    o_d = tl.arange(0, D)
    tl.store(o + o_d, tl.exp(tl.load(x + o_d)))


o = torch.zeros(16)
growth[(1,)](torch.full((16,), float(sys.argv[1])), o, D=16)
print("finite", bool(o.isfinite().all()), *sys.argv[2:])
if "oops" in sys.argv:
    raise ZeroDivisionError("oops")
"""


def in_a_process(tmp_path, *command, script=SCRIPT, **more):
    (tmp_path / "mine.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run("mine.py", "90") -> status, output, errors: what the process runs, in this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flakit trace"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def traced(*words, script=SCRIPT):
        (tmp_path / "mine.py").write_text(script)
        linecache.clearcache()  # of the test before, whose script has the same name
        return trace_script.main(words), *capsys.readouterr()

    return traced


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_it_finds_the_line_and_writes_its_files(tmp_path):
    files = "--json", str(tmp_path / "found.json"), "--picture", str(tmp_path / "found.png")
    code, said, _ = in_a_process(tmp_path, "flakit.cli", "trace", *files, "mine.py", "90", "--own", "option")
    assert code == 1 and "finite False --own option" in said
    assert "kernel growth, program (0, 0, 0), mine.py:11" in " ".join(said.split())
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["sites"][0]["line"], found["sites"][0]["inf"]) == (11, 16)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.interpret
@pytest.mark.parametrize("words, status, says", [
    (["80"], 0, "Every value was finite"), (["90", "oops"], 2, "did not come to its end: ZeroDivisionError"),
    (["80", "oops"], 2, "did not come to its end: ZeroDivisionError"),
])  # fmt: skip
def test_its_exit_status(run, words, status, says):
    code, said, errors = run("mine.py", *words)
    assert code == status and says in said + errors
    assert "Headroom" in said and ("8.72" in said or "-1.28" in said)  # what was found until then
    assert "runpy" not in errors  # the traceback begins in the script


@pytest.mark.full
def test_a_script_that_is_not_there(tmp_path):
    code, _, errors = in_a_process(tmp_path, "flakit.cli", "trace", "other.py")
    assert code == 2 and "other.py" in errors


@pytest.mark.full
def test_a_script_of_pytorch_alone(run):
    script = "import torch\nx = torch.tensor([1.0, 0.0])\ny = (1 / x).log()\nz = y - y\n"
    code, said, _ = run("mine.py", script=script)
    assert code == 1 and "mine.py:3" in said and "NaN made of infinities" in said


TESTS = """
import torch


def test_it():
    assert (torch.ones(3) / 0).isinf().all()


def test_other():
    assert torch.ones(3).sum() == 3
"""


@pytest.mark.parametrize(
    "script, says",
    [
        pytest.param(TESTS, "", id="tests that nobody calls"),
        pytest.param("def f(:\n    pass\n", "SyntaxError", id="a syntax error", marks=pytest.mark.full),
        pytest.param("print(1 + 1)\n", "", id="no numbers", marks=pytest.mark.full),
    ],
)
def test_a_script_in_which_nothing_ran_is_not_called_finite(run, script, says):
    code, said, errors = run("mine.py", script=script)
    assert code == 2 and "Nothing ran" in said and "finite" not in said, said + errors
    assert says in errors and "runpy" not in errors


@pytest.mark.full
def test_the_tests_of_a_file_are_traced_by_pytest(tmp_path):
    command = "flakit.instruments.trace_script --module -- pytest -p no:cacheprovider mine.py -k it"
    code, said, errors = in_a_process(tmp_path, *command.split(), script=TESTS, TRITON_INTERPRET="1")
    assert code == 1 and "mine.py:6" in said and "1 passed, 1 deselected" in said, said + errors


SUMS = """
import torch
import triton
import triton.language as tl


@triton.jit
def difference(a, b, o, T: tl.constexpr):
    at = tl.arange(0, T)
    b_a, b_b = tl.cumsum(tl.load(a + at), 0), tl.cumsum(tl.load(b + at), 0)
    tl.store(o + at, b_a - b_b)


{seed}
a = 1000 * (1 + torch.randn(64).abs())
b = a + 0.1 * torch.randn(64)
difference[(1,)](a, b, torch.empty(64), T=64)
"""


@pytest.mark.full
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize("seed", ["torch.manual_seed(0)", ""], ids=["seeded", "another time other inputs"])
def test_digits_and_random_rounding_name_the_line(tmp_path, seed):
    """What the script computes before its kernel is rounded at random, too: the kernel may be given other numbers."""
    script = SUMS.replace("{seed}", seed)
    options = "--digits", "--rounds", "3", "--json", str(tmp_path / "found.json")
    code, said, _ = in_a_process(tmp_path, "flakit.cli", "trace", *options, "mine.py", script=script)
    assert code == 1 and "Digits lost: cancellation" in said and "Random rounding, 3 runs" in said
    digits = json.loads((tmp_path / "found.json").read_text())["digits"]
    line = 1 + script.splitlines().index("    tl.store(o + at, b_a - b_b)")
    assert digits["lines"][digits["findings"][0]["line"]]["place"]["line"] == line
    assert digits["rounds"]["repeatable"] == bool(seed) and ("set a seed" in said) == (not seed)
    assert not seed or digits["rounds"]["spreads"][0]["line"] == line


@pytest.mark.full
def test_rounds_alone_are_refused(tmp_path):
    code, said, errors = in_a_process(tmp_path, "flakit.cli", "trace", "--rounds", "3", "mine.py")
    assert code == 2 and "--rounds: expected beside --digits, got 3 alone" in said + errors
