"""The package as it is given away: what the wheel carries, and that it runs where there is no checkout."""

import hashlib
import json
import os
import re
import shlex
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import flakit
from flakit.cli import app
from flakit.numerics import carried, recorded
from tests.commands import ROOT, TARGETS, completed
from tests.serving import check_first_page, serving

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


# --- one version, told in three places ------------------------------------------------------------------------------


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["title"], citation["version"]) == ("1.2.0", "flakit", flakit.__version__)
    assert citation["license"] == "MIT" and citation["authors"] and citation["message"]


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, state = re.search(r"^## (\S+), (.+)$", text, re.M).groups()
    assert version == flakit.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d{2}-\d{2}", state)
    released = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8")).get("date-released")
    assert (str(released) == state) if released else (state == "unreleased")


# --- the workflows of the code host, which have never run there -----------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow):
    """(job, step) of all of them."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [(job, step) for job in jobs.values() for step in job["steps"]]


def test_there_are_workflows_for_the_tests_and_the_site():
    assert [workflow.name for workflow in WORKFLOWS] == ["site.yml", "tests.yml"]
    assert {job["runs-on"] for job, _ in steps(WORKFLOWS[1])} >= {"ubuntu-latest", "macos-latest", "windows-latest"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole_and_says_that_it_is_untested(workflow):
    text = workflow.read_text(encoding="utf-8")
    said = yaml.safe_load(text)
    assert "UNTESTED" in text.partition("\nname:")[0]
    assert {"name", True, "permissions", "jobs"} <= said.keys()  # YAML reads `on` as true
    assert said["permissions"] == {"contents": "read"}
    for name, job in said["jobs"].items():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys(), name
        assert job.get("needs", name) in said["jobs"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/any@v1")), step


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(workflow):
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    ran = [step["run"] for _, step in steps(workflow) if "run" in step]
    assert ran
    for line in ran:
        first, *words = shlex.split(line)
        if first == "make":
            assert words and set(words) <= set(TARGETS), line
        elif first == "flakit":
            assert words[0] in commands, line
        elif first.startswith("."):
            assert os.access(ROOT / first, os.X_OK), line
        elif first == "python":
            assert words[0] == "-m" or (ROOT / words[0]).is_file(), line
        else:
            assert first == "rm", line
        paths = [words[n + 1] for n, word in enumerate(words) if word == "--constraint"]
        assert [path for path in paths if not (ROOT / path).is_file()] == []
        extras = [extra for found in re.findall(r"\[([\w,]+)\]", line) for extra in found.split(",")]
        assert set(extras) <= set(EXTRAS), line


def test_the_site_that_is_published_is_the_one_that_make_builds():
    (path,) = [step["with"]["path"] for _, step in steps(WORKFLOWS[0]) if "upload-pages" in step.get("uses", "")]
    assert path in re.search(r"^site:.*$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[0]


# --- notebooks and recordings, found from a checkout and from a wheel -------------------------------------------------


def test_a_checkout_reads_its_own_folders():
    assert carried.IN_CHECKOUT
    assert [carried.folder(name) for name in ("notebooks", "data")] == [ROOT / "notebooks", ROOT / "data"]
    assert recorded.data_folder() == ROOT / "data"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist and the wheel of this checkout, as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "hatchling", "build", "-d", folder)
    return folder


def ran(*command, cwd=ROOT, env=None):
    done = completed(*command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def hashes(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.mark.full
def test_the_wheel_carries_notebooks_and_recordings_and_the_sdist_builds_the_same(built, tmp_path):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    given = hashes(wheel)
    tracked = ran("git", "ls-files", "notebooks", "data", "flakit").splitlines()
    wanted = {name for name in tracked if not re.fullmatch(r"data/.*\.py", name)}
    inside = {name if name.startswith("flakit/") else f"flakit/_carried/{name}": name for name in wanted}
    there = {name for name in given if name.startswith("flakit/")}
    assert inside.keys() - there == set() and "flakit/py.typed" in inside
    assert [name for name in there if re.search(r"/\.|__pycache__|_carried/data/.*\.py$", name)] == []
    changed = {
        name
        for name, source in inside.items()
        if given[name] != hashlib.sha256((ROOT / source).read_bytes()).hexdigest()
    }
    assert changed == set()

    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.glob("flakit-*")
    ran(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    (again,) = tmp_path.glob("*.whl")
    assert hashes(again) == given


# --- out of an environment that has the wheel and no checkout --------------------------------------------------------


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """run(program, ...) in an environment of its own that has the wheel, from a folder that is no checkout.

    Everything but flakit is seen from the environment of the tests, by a path in a .pth file; such a folder's own .pth
    files are not read, so that an editable flakit there is not seen.
    """
    folder = tmp_path_factory.mktemp("installed")
    ran(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    (wheel,) = built.glob("*.whl")
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index")
    ran(*pip, wheel, cwd=folder)
    packages = Path(
        ran(programs / "python", "-c", "import site; print(site.getsitepackages()[-1])", cwd=folder).strip()
    )
    outer = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "outer.pth").write_text("\n".join(outer) + "\n")
    (folder / "venv" / "share").symlink_to(Path(sys.prefix) / "share")  # JupyterLab's extensions
    ours = ("PYTHONPATH", "TRITON_INTERPRET", "FLAKIT_DATA", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PYTEST")}
    work = folder / "work"
    work.mkdir()

    def run(program, *arguments):
        return ran(programs / program, *arguments, cwd=work, env=env)

    run.programs, run.packages, run.work, run.env = programs, packages, work, env
    return run


@pytest.mark.full
def test_it_is_the_wheel_that_runs_and_reads_its_own_recordings(installed):
    code = (
        "import json, sys, flakit\n"
        "from flakit.numerics import carried, recorded\n"
        "names = sorted(path.stem for path in recorded.data_folder().glob('*.json'))\n"
        "rows = {name: len(recorded.read(name).rows) for name in names}\n"
        "print(json.dumps([flakit.__file__, flakit.__version__, carried.IN_CHECKOUT, rows, sys.path]))"
    )
    file, version, in_checkout, rows, path = json.loads(installed("python", "-c", code))
    assert Path(file).parents[1].samefile(installed.packages)
    assert (version, in_checkout) == (flakit.__version__, False)
    assert str(ROOT) not in path
    names = [path.stem for path in (ROOT / "data").glob("*.json")]
    assert rows == {name: len(recorded.read(name).rows) for name in names} and len(rows) > 10


@pytest.mark.full
def test_its_commands_run(installed):
    diagnosis = json.loads(installed("flakit", "doctor", "--json"))
    assert diagnosis["works"] and diagnosis["versions"]["flakit"] == flakit.__version__
    assert {check["backend"].partition(" ")[0] for check in diagnosis["checks"]} >= {"reference", "torch"}
    assert "anchor" in installed("flakit", "cases")
    assert "1 passed, 0 failed" in installed("flakit", "audit", "chunk_rwkv6", "--only", "gradients", "--no-shrink")


@pytest.mark.full
def test_its_notebooks_are_copied_opened_and_run(installed, tmp_path):
    command = [installed.programs / "flakit", "lab", "mine", "--no-browser", "--port=0"]
    with serving(command, cwd=installed.work, env=installed.env, home=tmp_path) as (server, page, token):
        assert page == "/lab/tree/00_start_here.ipynb"
        check_first_page(server, page, token)
    mine = installed.work / "mine"
    lessons = [path.name for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(path.name for path in mine.glob("*.ipynb")) == sorted(lessons)
    code = (
        "import sys, nbformat, nbclient\n"
        "read = nbformat.read(sys.argv[1], 4)\n"
        "read.cells.append(nbformat.v4.new_code_cell('import flakit; print(flakit.__file__)'))\n"
        "nbclient.NotebookClient(read, timeout=300, resources={'metadata': {'path': 'mine'}}).execute()\n"
        "print(read.cells[-1].outputs[0].text)"
    )
    file = installed("python", "-c", code, mine / "10_state_tracking.ipynb").strip()  # it shows a recording
    assert Path(file).parents[1].samefile(installed.packages)
