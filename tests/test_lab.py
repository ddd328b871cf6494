"""`flakit lab`: what it copies, that it keeps what a learner changed, and how JupyterLab is started."""

import json
import os
import posixpath
import re
import sys
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from flakit import cli, doctor, lab
from flakit.course import mine
from flakit.numerics import carried

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def notebook(*cells, outputs=(), count=None):
    """The bytes of a notebook of code cells."""
    code = {"cell_type": "code", "outputs": list(outputs), "execution_count": count}
    made = [{**code, "source": [cell]} for cell in cells]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


@pytest.fixture
def give(monkeypatch):
    """give("0.2.0", {name: content}): that version of flakit, with these files for a folder of one's own."""

    def give(version, files):
        monkeypatch.setattr(lab, "__version__", version)
        monkeypatch.setattr(lab, "contents", lambda: files)

    return give


@pytest.fixture
def copied(give, tmp_path):
    """copied("0.2.0", {name: content}) -> what becomes of one's own folder, `tmp_path`, with that version."""

    def copied(version, files):
        give(version, files)
        return lab.copy(tmp_path)

    return copied


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is copied -------------------------------------------------------------------------------------------------


def test_a_copy_has_every_lesson_solution_and_picture():
    there = [path.relative_to(ROOT / "notebooks") for path in (ROOT / "notebooks").rglob("*") if path.is_file()]
    left = re.compile(r"jupyterlab/|(.*/)?\.|mine(_old)?\.py|mine\.json")  # settings, what others hide, a learner's own
    given = {path.as_posix() for path in there if not left.match(path.as_posix())}
    assert {"00_start_here.ipynb", "solutions/15_audit_your_kernel.ipynb", "glossary.md"} <= given
    assert given <= set(lab.contents())
    assert {name for name in set(lab.contents()) - given if not name.startswith("source/")} == set()


def test_every_link_of_a_copy_leads_into_it():
    given = lab.contents()
    led = 0
    for name, content in given.items():
        if name.endswith(".ipynb"):
            text = "\n".join("".join(c["source"]) for c in json.loads(content)["cells"] if c["cell_type"] == "markdown")
        elif name.endswith(".md"):
            text = content.decode()
        else:
            continue
        links = [posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) for link in LINK.findall(text)]
        assert [link for link in links if link not in given and not any(n.startswith(link + "/") for n in given)] == []
        led += len(links)
    assert led > 100


def test_no_cell_reads_the_checkout():
    code = {
        name: "\n".join("".join(cell["source"]) for cell in json.loads(content)["cells"] if cell["cell_type"] == "code")
        for name, content in lab.contents().items()
        if name.endswith(".ipynb")
    }
    assert len(code) > 20
    assert {name for name, text in code.items() if re.search(r"\.\./|[\"'](?:data|notebooks|tests)/", text)} == set()


def test_links_out_of_a_folder_within_the_notebooks_lead_into_the_source_too():
    text = b"[x](../../flakit/ops/api.py) [y](../01.ipynb) [z](../../data/README.md#a)"
    turned, links = lab._with_links_inside(text, 1)
    assert turned == b"[x](../source/flakit/ops/api.py) [y](../01.ipynb) [z](../source/data/README.md#a)"
    assert links == {"flakit/ops/api.py", "data/README.md"}


# --- what a learner changed stays -----------------------------------------------------------------------------------


def test_a_first_copy_brings_all_and_a_second_nothing(tmp_path, copied):
    given = {"00.ipynb": notebook("1"), "images/a.png": b"\x89"}
    assert copied("0.1.0", given).new == list(given)
    before = files(tmp_path)
    assert before.keys() == {*given, lab.RECORD}
    assert str(lab.copy(tmp_path)) == "up to date"
    assert files(tmp_path) == before


def test_what_was_not_changed_follows_the_new_version(tmp_path, copied):
    copied("0.1.0", {"00.ipynb": notebook("1"), "glossary.md": b"old"})
    copy = copied("0.2.0", {"00.ipynb": notebook("2"), "glossary.md": b"new"})
    assert (copy.updated, copy.beside) == (["00.ipynb", "glossary.md"], {})
    assert (tmp_path / "00.ipynb").read_bytes() == notebook("2")
    assert (tmp_path / "glossary.md").read_bytes() == b"new"


def test_what_was_changed_stays_where_flakit_has_nothing_new(tmp_path, copied):
    copied("0.1.0", {"00.ipynb": notebook("...")})
    mine = notebook("my answer")
    (tmp_path / "00.ipynb").write_bytes(mine)
    copy = copied("0.2.0", {"00.ipynb": notebook("...")})
    assert (copy.kept, copy.beside) == (["00.ipynb"], {})
    assert files(tmp_path).keys() == {"00.ipynb", lab.RECORD}
    assert (tmp_path / "00.ipynb").read_bytes() == mine


def test_what_both_changed_is_put_beside_once_and_told(tmp_path, copied):
    copied("0.1.0", {"solutions/00.ipynb": notebook("...")})
    mine, theirs = notebook("my answer"), notebook("another question")
    (tmp_path / "solutions" / "00.ipynb").write_bytes(mine)
    copy = copied("0.2.0", {"solutions/00.ipynb": theirs})
    beside = "solutions/00 (flakit 0.2.0).ipynb"
    assert copy.beside == {"solutions/00.ipynb": beside}
    assert f"solutions/00.ipynb stays yours; flakit 0.2.0's is {beside}" in str(copy)
    assert files(tmp_path).items() >= {"solutions/00.ipynb": mine, beside: theirs}.items()
    (tmp_path / beside).unlink()
    again = lab.copy(tmp_path)
    assert (again.kept, again.beside) == (["solutions/00.ipynb"], {})
    assert not (tmp_path / beside).exists()


def test_a_new_version_put_beside_takes_nobodys_place(tmp_path, copied):
    mine = {"00.ipynb": notebook("my answer"), "00 (flakit 0.2.0).ipynb": notebook("mine as well")}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    assert copied("0.2.0", {"00.ipynb": notebook("...")}).beside == {"00.ipynb": "00 (flakit 0.2.0) 2.ipynb"}
    assert files(tmp_path).items() >= mine.items()


@pytest.mark.parametrize("record", [None, b"", b"[]", b'{"files": 3}'], ids=["none", "empty", "a list", "no files"])
def test_without_a_record_every_file_is_the_learners(tmp_path, copied, record):
    copied("0.1.0", {"00.ipynb": notebook("..."), "01.ipynb": notebook("...")})
    (tmp_path / "00.ipynb").write_bytes(notebook("my answer"))
    (tmp_path / lab.RECORD).unlink()
    if record is not None:
        (tmp_path / lab.RECORD).write_bytes(record)
    copy = lab.copy(tmp_path)
    assert (copy.beside.keys(), copy.new, copy.updated) == ({"00.ipynb"}, [], [])
    assert (tmp_path / "00.ipynb").read_bytes() == notebook("my answer")


def test_to_run_a_notebook_is_no_change(tmp_path, copied):
    copied("0.1.0", {"00.ipynb": notebook("1")})
    ran = notebook("1", outputs=[{"output_type": "stream", "name": "stdout", "text": ["1"]}], count=7)
    (tmp_path / "00.ipynb").write_bytes(ran)
    assert str(lab.copy(tmp_path)) == "up to date"
    assert (tmp_path / "00.ipynb").read_bytes() == ran
    assert copied("0.2.0", {"00.ipynb": notebook("2")}).updated == ["00.ipynb"]


@pytest.mark.parametrize("name", ["00_start_here.ipynb", "solutions/03_chunking.ipynb"])
def test_to_save_a_notebook_as_jupyter_writes_it_is_no_change(name):
    content = lab.contents()[name]
    read = nbformat.reads(content.decode(), 4)
    read.metadata["kernelspec"] = {"name": "another", "display_name": "Another"}
    saved = nbformat.writes(read, indent=2).encode()
    assert saved != content
    assert lab.fingerprint(name, saved) == lab.fingerprint(name, content)
    read.cells[0].source += " mine"
    assert lab.fingerprint(name, nbformat.writes(read).encode()) != lab.fingerprint(name, content)


def test_a_file_that_is_no_notebook_any_more_is_a_change(tmp_path, copied):
    copied("0.1.0", {"00.ipynb": notebook("1")})
    (tmp_path / "00.ipynb").write_bytes(b"<<<<<<< mine")
    assert copied("0.2.0", {"00.ipynb": notebook("2")}).beside.keys() == {"00.ipynb"}
    assert (tmp_path / "00.ipynb").read_bytes() == b"<<<<<<< mine"


def test_a_deleted_file_comes_back_and_one_that_flakit_dropped_stays(tmp_path, copied):
    copied("0.1.0", {"00.ipynb": notebook("1"), "01.ipynb": notebook("1")})
    (tmp_path / "00.ipynb").unlink()
    copy = copied("0.2.0", {"00.ipynb": notebook("1")})
    assert (copy.new, copy.gone) == (["00.ipynb"], ["01.ipynb"])
    assert "01.ipynb is no longer part of flakit" in str(copy)
    assert (tmp_path / "01.ipynb").exists()


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Run `flakit lab`, and get what it printed and how it would have started JupyterLab."""
    calls = []
    diagnosis = doctor.Diagnosis((doctor.Finding("torch", doctor.OK, "as it is"),))
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    monkeypatch.setattr(os, "execv", lambda program, command: calls.append((command, dict(os.environ))))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("TRITON_INTERPRET", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def started(*words):
        calls.clear()
        done = CliRunner().invoke(cli.app, ["lab", *words])
        return done, *(calls[0] if calls else ((), {}))

    return started


def option(command, name):
    (found,) = [word.partition("=")[2] for word in command if word.startswith(f"{name}=")]
    return found


def test_jupyterlab_opens_the_copys_first_notebook(tmp_path, monkeypatch, started, give):
    give("0.1.0", {"00_start_here.ipynb": notebook("1")})
    monkeypatch.chdir(tmp_path)
    done, command, environment = started("--no-browser", "--port", "8899")
    assert "1 new" in done.output and "as it is" in done.output
    folder = tmp_path / "flakit-notebooks"
    assert folder.joinpath("00_start_here.ipynb").exists()
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert option(command, "--ip") == "127.0.0.1"
    assert option(command, "--ServerApp.root_dir") == str(folder)
    assert option(command, "--LabApp.default_url") == "/lab/tree/00_start_here.ipynb"
    assert Path(option(command, "--LabApp.app_settings_dir"), "overrides.json").is_file()
    extension = Path(option(command, "--LabApp.extra_labextensions_path"), "flakit")
    assert (extension / json.loads((extension / "package.json").read_text())["jupyterlab"]["_build"]["load"]).is_file()
    assert command[-3:] == ["--no-browser", "--port", "8899"]
    import torch

    assert environment["TRITON_INTERPRET"] == str(int(not torch.cuda.is_available()))
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_is_set_already_stays(monkeypatch, tmp_path, started, give):
    give("0.1.0", {"00_start_here.ipynb": notebook("1")})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    _, _, environment = started(str(tmp_path / "mine"))
    assert (environment["TRITON_INTERPRET"], environment["OMP_WAIT_POLICY"]) == ("0", "ACTIVE")


def test_a_checkouts_own_notebooks_are_opened_in_place(monkeypatch, started):
    monkeypatch.setattr(lab, "copy", lambda folder: pytest.fail("nothing is to be copied"))
    monkeypatch.chdir(ROOT)
    _, command, _ = started("notebooks")
    assert option(command, "--ServerApp.root_dir") == str(ROOT)
    assert option(command, "--LabApp.default_url") == "/lab/tree/notebooks/00_start_here.ipynb"


def test_the_learners_own_file_is_made_once(tmp_path, monkeypatch, started, give):
    monkeypatch.delenv("FLAKIT_MINE")
    give("0.1.0", {"00_start_here.ipynb": notebook("1")})
    file = tmp_path / "own" / "mine.py"
    done, _, _ = started(str(file.parent), "--no-open")
    assert f"your kernel: {file}" in done.output.replace("\n", "") and file.read_text() == mine.BEGINS
    file.write_text("x = 1\n")
    give("0.2.0", {"00_start_here.ipynb": notebook("2")})
    started(str(file.parent), "--no-open")
    assert file.read_text() == "x = 1\n"


def test_copying_needs_no_jupyterlab_and_opening_says_how_to_get_it(monkeypatch, tmp_path, started, give):
    give("0.1.0", {"00_start_here.ipynb": notebook("1")})
    monkeypatch.setattr(lab, "has_jupyterlab", lambda: False)
    done, command, _ = started(str(tmp_path / "mine"))
    assert (done.exit_code, command, (tmp_path / "mine").exists()) == (1, (), False)
    assert 'pip install "flakit[lab]"' in done.stderr
    done, command, _ = started(str(tmp_path / "mine"), "--no-open")
    assert (done.exit_code, command, (tmp_path / "mine").exists()) == (0, (), True)


def test_a_broken_installation_is_told_and_not_opened(monkeypatch, tmp_path, started, give):
    give("0.1.0", {"00_start_here.ipynb": notebook("1")})
    diagnosis = doctor.Diagnosis((doctor.Finding("torch", doctor.BROKEN, "not as it should be"),))
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    done, command, _ = started(str(tmp_path))
    assert (done.exit_code, command, "not as it should be" in done.output) == (1, (), True)


def test_a_file_in_the_folders_place_is_told(tmp_path, started, give):
    give("0.1.0", {"00_start_here.ipynb": notebook("1")})
    (tmp_path / "mine").write_text("a list of things to buy")
    done, _, _ = started(str(tmp_path / "mine"))
    assert (done.exit_code, str(tmp_path / "mine") in done.stderr) == (1, True)


def test_an_installation_without_its_notebooks_is_told(tmp_path, monkeypatch, started):
    monkeypatch.setattr(carried, "folder", lambda name: tmp_path / name)
    done, _, _ = started(str(tmp_path / "mine"), "--no-open")
    assert done.exit_code == 1
    assert str(tmp_path / "notebooks") in done.stderr.replace("\n", "")  # lines end where the terminal does
