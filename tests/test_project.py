"""What holds the project together: what is installed, who imports whom, and what a bare import needs."""

import ast
import functools
import importlib
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import typer
import yaml
from packaging.requirements import Requirement

from flakit import train
from flakit.cli import app
from tests.commands import ROOT, TARGETS, completed
from tests.imports import names_imported
from tests.serving import check_first_page, serving

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def direct_requirements():
    lines = PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra]
    return {r.name: r for r in map(Requirement, lines) if r.name != PROJECT["name"]}


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {r.name: r for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}


def pinned(requirement):
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


def test_pyproject_keeps_lower_bounds_only():
    assert {name: str(r.specifier) for name, r in direct_requirements().items() if "<" in str(r.specifier)} == {}
    assert {name for name, r in direct_requirements().items() if [s.operator for s in r.specifier] != [">="]} == set()


def test_constraints_pin_every_direct_dependency_and_nothing_else():
    needed = {
        name for name, r in direct_requirements().items() if r.marker is None or "python_version" not in str(r.marker)
    }
    assert set(constraints()) == needed


@pytest.mark.parametrize("name", sorted(constraints()))
def test_constraint_meets_its_lower_bound(name):
    assert direct_requirements()[name].specifier.contains(pinned(constraints()[name]))


def test_test_extra_brings_the_lab():
    assert "flakit[lab]" in EXTRAS["test"]


def test_conda_environment_installs_what_make_lab_does():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert environment["name"] == PROJECT["name"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[lab]"]}
    assert "pip" in conda
    (python,) = [line for line in conda if line.startswith("python=")]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.removeprefix("python="))
    assert "--constraint constraints.txt" in (ROOT / "Makefile").read_text()


def test_conda_and_make_open_the_notebooks_by_the_same_command():
    assert "$(PY) -m flakit.cli lab notebooks $(LAB_FLAGS)" in (ROOT / "Makefile").read_text()
    assert re.search(r"^flakit lab notebooks$", (ROOT / "README.md").read_text(), re.M)


# --- who imports whom ---------------------------------------------------------------------------------------------

LAYERS = ["language", "ops", "numerics", "figures", "cases", "instruments", "panels", "course"]
BESIDE = {"models": ["ops"], "bench": ["ops", "numerics"], "fla.py": ["ops"]}
MAY_TRAIN = {"cases": ["models"], "panels": ["models"]}  # stories told by models in training, and one's own task
ONLY_IN = {
    "triton": r"(ops|cases)/.*_(triton|gluon)\.py|instruments/.*\.py|bench/.*\.py",
    "ipywidgets": r"panels/.*\.py",
    "anywidget": r"panels/.*\.py",
    "matplotlib": r"(figures|instruments|panels)/.*\.py|cases/\w+/picture\.py",
}
MODULES = {p.relative_to(ROOT / "flakit").as_posix(): p for p in sorted((ROOT / "flakit").rglob("*.py"))}


@functools.cache
def imported(path):
    return names_imported(ROOT, path)


def rooms(path):
    """The rooms of flakit that a module enters: "ops", "numerics", …, or a module at the top such as "doctor"."""
    entered = {name.split(".")[1] for name in imported(path) if name.startswith("flakit.")}
    return entered - {"__version__"}  # a word, no room


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    room = module.split("/")[0]
    if room in LAYERS:
        allowed = LAYERS[: LAYERS.index(room) + 1] + MAY_TRAIN.get(room, [])
    elif room in BESIDE:
        allowed = [*BESIDE[room], room]
    else:
        return  # flakit/__init__, cli and doctor stand above the rooms
    assert rooms(MODULES[module]) - set(allowed) == set()


def test_no_implementation_imports_another():
    entered = {
        module: {name.split(".")[2] for name in imported(path) if re.match(r"flakit\.ops\.\w+", name)} - {"common"}
        for module, path in MODULES.items()
        if module.startswith("ops/")
    }
    assert {module: seen for module, seen in entered.items() if seen - {module.split("/")[1]}} == {}


def test_nothing_imports_the_tests():
    files = [path for folder in ("flakit", "docs", "data") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert {path.name for path in files if any(name.startswith("tests") for name in imported(path))} == set()


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_is_imported_only_where_it_belongs(library):
    users = {m for m, path in MODULES.items() if any(name.split(".")[0] == library for name in imported(path))}
    assert {m for m in users if not re.fullmatch(ONLY_IN[library], m)} == set()


def test_no_module_is_longer_than_a_reader_takes_at_once():
    files = [path for folder in ("flakit", "tests", "docs", "data") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {path: n for path, n in lines.items() if n > 700} == {}


@pytest.mark.full
def test_whatever_is_a_picture_in_a_notebook_says_that_it_was_drawn_for_a_light_page():
    """Else it stays a white rectangle where JupyterLab is dark."""
    methods = {
        f"{path.relative_to(ROOT)}:{node.name}": {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
        for path in (ROOT / "flakit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    pictures = {name for name, own in methods.items() if "_repr_png_" in own}
    assert len(pictures) > 1
    assert {name for name in pictures if "_repr_mimebundle_" not in methods[name]} == set()


def test_import_needs_none_of_the_optional_parts():
    code = (
        "import sys\n"
        "for name in ('triton', 'ipywidgets', 'matplotlib', 'PIL', 'IPython', 'jupyterlab'): sys.modules[name] = None\n"
        "import flakit, flakit.numerics, flakit.cli, flakit.doctor, torch\n"
        "r, k, v, w = (-torch.rand(1, 5, 1, 4, requires_grad=True) for _ in range(4))\n"
        "for operator in (flakit.chunk_rwkv6, flakit.fused_recurrent_rwkv6):\n"
        "    operator(r, k, v, w, torch.ones(1, 4)).o.sum().backward()\n"
        "print(flakit.__version__)"
    )
    done = completed(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+", done.stdout.strip())


# --- the commands of the README -----------------------------------------------------------------------------------


def make(*arguments, folder=ROOT):
    if sys.platform == "win32":
        pytest.skip("the Makefile is for Linux and macOS")
    done = completed("make", *arguments, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_a_file_run_alone_gets_the_threads_it_gets_in_the_suite():
    assert torch.get_num_threads() == int(os.environ.get("OMP_NUM_THREADS", 0))


def test_make_alone_lists_every_target():
    code, said = make()
    assert (code, [target for target in TARGETS if not re.search(rf"^  make {target}\s+\S", said, re.M)]) == (0, [])


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (None, "was not found: install Python 3.10 or newer"),
        ('case "$*" in *version_info*) exit 1;; -V) echo Python 3.8.1;; esac', "is Python 3.8.1: name a newer one"),
        ('case "$*" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv"),
    ],
    ids=["no python", "old python", "no venv"],
)
def test_make_lab_says_what_is_missing(tmp_path, python, says):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    script = tmp_path / "python3"
    if python is not None:
        script.write_text(f"#!/bin/sh\n{python}\n")
        script.chmod(0o755)
    code, said = make("lab", f"PYTHON={script}", folder=tmp_path)
    assert code != 0
    assert says in said


@pytest.mark.parametrize("passed", [True, False])
def test_a_release_waits_for_the_gpu_tests_and_all_tests_warn(tmp_path, passed):
    script = tmp_path / "python"  # tests of the CPU pass
    script.write_text(f'#!/bin/sh\ncase "$*" in *"tests.gpu.summary --check"*) exit {int(not passed)};; esac\n')
    script.chmod(0o755)
    there = [f"--old-file=.venv/.{name}" for name in ("test", "rest")]
    code, _ = make(*there, f"PY={script}", "release-check")
    assert (code == 0) == passed
    code, said = make(*there, f"PY={script}", "test-all")
    assert code == 0 and ("release-check fails" in said) != passed


@pytest.mark.parametrize("lines", [[], ["NVIDIA H200: tests/ops/test_gate.py: not run"]])
def test_the_check_of_the_gpu_tests_ends_with_what_it_found(lines, monkeypatch, capsys):
    summary = importlib.import_module("tests.gpu.summary")
    monkeypatch.setattr(summary, "complaints", lambda rows: lines)
    monkeypatch.setattr(sys, "argv", ["summary", "--check"])
    assert summary.main() == len(lines)
    assert capsys.readouterr().out == "".join(f"GPU tests: {line}\n" for line in lines)


@pytest.mark.full
@pytest.mark.skipif(not (Path(sys.prefix) / ".lab").exists(), reason="this environment was not made by make")
def test_make_lab_serves_the_first_notebook_on_this_machine_with_a_token(tmp_path):
    # However old it is: a test does not install anything into the environment that it runs in.
    installed = f"--old-file={sys.prefix}/.lab"
    command = ["make", installed, "lab", f"VENV={sys.prefix}", "LAB_FLAGS=--no-browser --port=0"]
    with serving(command, cwd=ROOT, env=os.environ, home=tmp_path) as (server, page, token):
        assert page == "/lab/tree/notebooks/00_start_here.ipynb"
        check_first_page(server, page, token)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{server}/api/contents", timeout=20)


# --- the written pages: what they point to is there ---------------------------------------------------------------

PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "data").glob("*.md"),
        *(ROOT / "flakit").rglob("*.md"),
        ROOT / "notebooks" / "glossary.md",
    ]
}
ON_THE_SITE = {"results/": ("data/", ".json"), "notebooks/solutions/index": ("notebooks/solutions", "")}
"""Of links that exist on the site alone: the file that a page is built from."""
GENERATED = {"times.png", "ranks.png"}  # pictures that `make site` draws
OF_THE_READER = {
    "my_kda.py",
    "my_kda.toml",
    "step-00000100/",
    "tensorboard/",
    "mine.json",
    "ops/common/rows/sm_89.json",
}
"""Files in examples, and those that commands write."""
EXAMPLE_COMMANDS = re.compile(r"```bash\n(.*?)```", re.S)


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def headings(page):
    """Anchors of a page's headings, as GitHub makes them; compared in lower case, for the site keeps capitals."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def target(page, link):
    """The file that a relative link leads to."""
    if page.parent != ROOT / "docs" or (page.parent / link).exists() and not link.startswith("../"):
        return page.parent / link
    for start, (folder, ending) in ON_THE_SITE.items():
        if link.startswith(start):
            return ROOT / f"{folder}{link.removeprefix(start).removesuffix('.md')}{ending}"
    return ROOT / link  # docs/ and the folders beside it stand in one folder of the site


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_of_a_page_lead_somewhere(name):
    page = PAGES[name]
    text = without_code(page)
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text) + re.findall(r'src="(?!https?:)([^"]+)"', text)
    dead = []
    for link in links:
        path, _, anchor = link.partition("#")
        file = target(page, path) if path else page
        if path not in GENERATED and not file.exists():
            dead.append(link)
        if anchor and file.suffix == ".md" and anchor.lower() not in headings(file):
            dead.append(link)
    assert dead == []


@functools.cache
def words_of_the_code():
    files = [path for folder in ("flakit", "tests", "docs", "data") for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "docs" / "_static").glob("*.js"), *(ROOT / "data").glob("*.json"), ROOT / "pyproject.toml"]
    return set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))


@functools.cache
def paths_of_the_project():
    folders = ("flakit", "tests", "docs", "data", "notebooks", ".github", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in [*found, *ROOT.iterdir()]]


def attribute(dotted):
    """The object of a dotted name; None where there is none."""
    module, *rest = dotted.split(".")
    found = importlib.import_module(module)
    for n, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([module, *rest[: n + 1]]))
            except ModuleNotFoundError:
                return None
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_files_and_names_that_a_page_mentions_exist(name):
    page = PAGES[name]
    text = without_code(page)
    if name == "CONTRIBUTING.md":
        text = re.sub(r"^\|.*\n", "", text, flags=re.M)  # its pairs of words name what was renamed
    missing = []
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]+\.(py|md|json|js|ipynb|npz|toml|yml|txt)|[\w.-]+(/[\w.-]+)*/", code):
            there = any(path.endswith(f"/{code}".rstrip("/")) for path in paths_of_the_project())
            missing += [] if there or code.removeprefix("flakit/") in OF_THE_READER else [code]
        elif dotted := re.fullmatch(r"(flakit(?:\.\w+)+)(?:\(.*\))?", code):
            missing += [] if attribute(dotted[1]) is not None else [code]
        elif re.fullmatch(r"\w+_\w+(\(.*\))?", code) and name not in ("data/tuning.md", "flakit/ops/README.md"):
            # The log may name what is gone; tests/ops/test_glossary.py has the glossary. Kernels of
            # flash-linear-attention are those of data/record_audits.py.
            own = code.partition("(")[0]
            theirs = name == "docs/instruments.md" and own.startswith(("chunk_", "fused_recurrent_"))
            missing += [] if theirs or own in words_of_the_code() else [code]
    assert missing == []


def commands(page):
    """Every command line of a page's examples and of its sentences, without comments."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in EXAMPLE_COMMANDS.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`((?:flakit|make|python|torchrun) [^`\n]+)`", without_code(page))
    return [line.split(" #")[0].strip().removeprefix(".venv/bin/") for line in lines if line.strip()]


def options_of(command):
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def unknown(line):
    """What a command line names that is not there: a subcommand, a target, a module, a script, an option."""
    first, *words = line.split()
    options = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
    if first == "make":
        return {word for word in words if re.fullmatch(r"[a-z-]+", word)} - set(TARGETS)
    if first == "flakit":
        name, own = words[0], typer.main.get_command(app).commands
        if name == "COMMAND":
            return set()
        if name not in own:
            return {name}
        # A script that is traced has options of its own, and so has each case: its knobs.
        return set() if name == "cases" or "-m" in words else options - options_of(own[name])
    script = re.match(r"(?:python|torchrun .*?) *(?:-m ((?:flakit|tests|docs)[\w.]*)|(data/\w+\.py))(.*)", line)
    if script is None:
        return set()
    module, file, rest = script.groups()
    file = ROOT / (file or module.replace(".", "/"))
    file = next((path for path in (file, file.with_suffix(".py"), file / "__main__.py") if path.is_file()), None)
    if file is None:
        return {module}
    options = set(re.findall(r"(?<!\S)--\w[\w-]*", rest))
    if module == "flakit.train":
        return options - options_of(typer.main.get_command(train.app))
    return {option for option in options if f'"{option}"' not in file.read_text(encoding="utf-8")}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if commands(page)])
def test_commands_of_a_page_exist_with_these_options(name):
    wrong = {line: unknown(line) for line in commands(PAGES[name])}
    assert {line: what for line, what in wrong.items() if what} == {}


def test_a_command_that_does_not_exist_is_noticed():
    assert unknown("make everything") == {"everything"} and unknown("flakit fly --high") == {"fly"}
    assert (
        unknown("flakit audit a.py:b --liken kda") == {"--liken"} and unknown("flakit audit a.py:b --like kda") == set()
    )
    assert unknown("python -m flakit.bench.nothing") == {"flakit.bench.nothing"}
    assert unknown("torchrun --nproc-per-node 2 -m flakit.train --out x --sizes 3") == {"--sizes"}
    assert unknown("python data/record_audits.py --two") == {"--two"}


def test_the_readme_is_short_and_leads_to_the_site():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) < 150
    assert readme.index("decay_slider.webp") < readme.index("make lab") < readme.index("make site")
    for name, address in PROJECT.get("urls", {}).items():
        assert address in readme, f"project.urls has {name}"
    for name in ("decay_slider", "decay_slider_dark"):  # a page has the one of its colours
        assert f'"notebooks/images/{name}.webp"' in readme
        assert (ROOT / "notebooks/images" / f"{name}.webp").stat().st_size < 1.5e6


@pytest.mark.full
@pytest.mark.parametrize(
    "text", ["README.md", "README.zh.md", "docs/operators.md", "docs/models.md", "docs/instruments.md"]
)
def test_scripts_of_the_readme_and_the_reference_run(text):
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / text).read_text(), re.S)
    assert scripts
    for script in scripts:
        done = completed(sys.executable, "-c", script)
        assert done.returncode == 0, f"{script}\n{done.stderr}"
