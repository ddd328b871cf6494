"""The audit from outside: the command line, and a test-suite of somebody's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flakit import cli
from flakit.instruments.testing import audited
from tests.instruments import kernels

FILE = """
import torch


def naive(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, right=True):
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    S = torch.zeros(r.shape[0], *r.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for t in range(r.shape[1]):
        kv = k[:, t, ..., None] * v[:, t, :, None]
        o.append(torch.einsum("bhk,bhkv->bhv", scale * r[:, t].float(), S + u[..., None] * kv))
        kept = w[:, t] if right or t != 20 else w[:, t] * 2
        S = kept.exp()[..., None] * S + kv
    return torch.stack(o, 1).to(r.dtype), S


def wrong(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return naive(r, k, v, w, u, scale, initial_state, output_final_state, right=False)


def only_o(r, k, v, w, u, scale=None):
    return naive(r, k, v, w, u, scale)[0]


def forward_only(*args, **given):
    with torch.no_grad():
        return naive(*args, **given)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "their_kernel.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("their_kernel", None)
    sys.path[:] = [x for x in sys.path if x != str(tmp_path)]


def run(*args):
    return CliRunner().invoke(cli.app, ["audit", *map(str, args)])


def test_a_wrong_kernel_in_a_file_is_found_shrunk_and_shown_by_a_script_of_its_own(file, tmp_path):
    done = run(f"{file}:wrong", "--like", "rwkv6", "--only", "truth", "--repros", tmp_path / "repros")
    assert done.exit_code == 1 and "T = 2" in done.output, done.output
    (script,) = (tmp_path / "repros").iterdir()
    text = script.read_text()
    assert "flakit" not in text
    # Two say where the kernel is, six draw its inputs, six are the formula: what is left is a dozen.
    assert len([line for line in text.splitlines() if line]) <= 22, text
    blocked = "import sys, runpy; sys.modules['flakit'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    for wrong in (True, False):
        if not wrong:  # repaired, it has nothing to say
            file.write_text(FILE.replace("w[:, t] * 2", "w[:, t]"))
        shown = subprocess.run([sys.executable, "-c", blocked, script], capture_output=True, text=True, cwd="/")
        assert (shown.returncode, "is off by" in shown.stderr) == (int(wrong), wrong), shown.stderr


@pytest.mark.parametrize("name, status", [("only_o", 0), ("forward_only", 0), ("nothing", 2)])
def test_exit_status(file, name, status):
    done = run(f"{file}:{name}", "--like", "rwkv6", "--only", "gradients", "--only", "initial-state", "--no-shrink")
    assert done.exit_code == status, done.output


def test_json_has_every_probe_with_versions_and_device(file, tmp_path):
    out = tmp_path / "found.json"
    run(f"{file}:wrong", "--like", "rwkv6", "--only", "truth", "--only", "repeat", "--json", out)
    found = json.loads(out.read_text())
    assert found["device"] and found["versions"]["torch"] == torch.__version__
    truth, repeat = found["probes"]
    assert {"probe", "verdict", "worst", "budget", "setting", "meaning", "case"} <= set(truth)
    assert (truth["verdict"], repeat["verdict"]) == ("fail", "pass") and truth["worst"] > truth["budget"] > 0
    assert truth["setting"]["T"] in range(21, 30)


def test_what_cannot_run_exits_2_and_says_why(tmp_path):
    path = tmp_path / "tuned.py"
    path.write_text("def op_rwkv6(*args, **given):\n    raise RuntimeError('no autotuner here')\n")
    done = run(f"{path}:op_rwkv6", "--no-shrink")
    assert done.exit_code == 2


@pytest.mark.parametrize("written", [False, True])
def test_open_shows_the_page_in_a_browser(file, tmp_path, monkeypatch, written):
    asked = []
    monkeypatch.setattr("webbrowser.open", lambda url: asked.append(url) or True)
    page = tmp_path / "report.html"
    where = ("--html", page) if written else ()
    done = run(f"{file}:wrong", "--like", "rwkv6", "--only", "repeat", "--no-shrink", "--open", *where)
    assert done.exit_code == 0, done.output
    (url,) = asked
    assert url.startswith("file://") and "<!doctype html>" in Path(url.removeprefix("file://")).read_text()
    assert (url == page.as_uri()) == written


@pytest.mark.parametrize("option", ["--json", "--html", "--repros"])
def test_a_place_that_cannot_be_written_exits_2_before_the_work(file, tmp_path, option):
    wrong = {"--json": tmp_path, "--html": tmp_path / "none" / "page.html", "--repros": file}[option]
    done = run(f"{file}:wrong", "--like", "rwkv6", "--only", "gradients", "--no-shrink", option, wrong)
    assert done.exit_code == 2 and "probe" not in done.output, done.output
    assert option in done.output


def test_a_file_that_leaves_python_when_it_is_imported_exits_2(tmp_path):
    path = tmp_path / "a_script.py"
    path.write_text("import sys\n\ndef op_rwkv6(r, k, v, w, u):\n    pass\n\nsys.exit(0)\n")
    done = run(f"{path}:op_rwkv6")
    assert done.exit_code == 2 and "sys.exit(0)" in done.output, done.output


def test_a_file_without_a_name_lists_its_functions(file, tmp_path):
    done = run(file, "--like", "rwkv6")
    assert done.exit_code == 2 and "naive, wrong, only_o, forward_only" in done.output.replace("\n", " "), done.output
    done = run(tmp_path / "none.py")
    assert done.exit_code == 2 and "does not exist" in " ".join(done.output.split()), done.output


@pytest.mark.full
def test_one_line_makes_every_probe_a_test(file, tmp_path):
    suite = tmp_path / "test_theirs.py"
    suite.write_text(
        "from flakit.instruments.testing import audited\nfrom their_kernel import only_o, wrong\n\n"
        'chosen = {"like": "rwkv6", "only": ["truth", "repeat", "packed"]}\n'
        "test_right = audited(only_o, **chosen)\ntest_wrong = audited(wrong, **chosen)\n"
    )
    options = "-m pytest -q -rA -p no:cacheprovider -n0 --rootdir".split()
    done = subprocess.run([sys.executable, *options, tmp_path, suite], capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed, 3 passed, 2 skipped" in done.stdout, done.stdout
    assert "import torch" in done.stdout and "cu_seqlens" in done.stdout


@pytest.mark.parametrize(
    "how, says", [({"like": "rwkv5"}, "like: expected one of rwkv6"), ({"like": "rwkv6", "only": ["truht"]}, "only: ")]
)
def test_a_wrong_argument_of_audited_is_one_error_where_it_stands(how, says):
    with pytest.raises(ValueError, match=says):
        audited(kernels.naive, **how)
