"""The learner's file: what gets into it, what it needs, what is kept of what was there, and where lessons take from."""

import ast
import sys
import textwrap

import pytest
import torch

from flakit.cases.fingerprint import CAUSES
from flakit.course import check, mine, progress, record
from flakit.numerics import carried


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_MINE", str(tmp_path))
    return tmp_path


@pytest.fixture
def cell(monkeypatch):
    """cell(source): run it as a cell of a notebook is run; returns its names."""
    names = {"In": [], "__name__": "__main__"}

    def run(source):
        source = textwrap.dedent(source)
        names["In"].append(source)
        file = f"<cell {len(names['In'])}>"
        lines = source.splitlines(keepends=True)
        monkeypatch.setitem(mine.linecache.cache, file, (len(source), None, lines, file))
        exec(compile(source, file, "exec"), names)
        return names

    return run


STEP = """
def step(S, x):
    return S.exp() + x
"""


def test_a_function_comes_in_when_all_verdicts_are_right(cell, place, capsys):
    step = cell(STEP)["step"]
    right, wrong = check("one", 1.0, 1.0), check("two", 1.0, 2.0)
    mine.add(step, right, wrong)
    assert "comes in when" in capsys.readouterr().out and not (place / "mine.py").exists()
    mine.add(step)
    assert not (place / "mine.py").exists(), "without a verdict nothing is known to be right"
    mine.add(step, right)
    assert (place / "mine.py").read_text() == mine.BEGINS + "\n\n" + STEP.strip() + "\n"
    taken = mine.take("step")
    assert taken(torch.zeros(1), 2.0) == 3 and "step: yours" in capsys.readouterr().out


def test_it_brings_its_imports_and_the_functions_it_calls(cell, place):
    cell("import numpy as np\nfrom math import pi, tau\nimport torch")
    cell("def half(x):\n    return x / 2")
    names = cell("""
    def whole(x):
        inner = lambda y: np.exp(y) * tau
        return torch.tensor(half(inner(x)) + len(str(x)))
    """)
    mine.add(names["whole"], True)
    text = (place / "mine.py").read_text()
    imports = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert sorted(imports) == ["from math import tau", "import numpy as np", "import torch"]
    assert list(mine._functions(text)) == ["half", "whole"]
    assert mine.take("whole")(0.0).item() == pytest.approx(names["whole"](0.0).item())


def test_a_number_of_the_notebook_is_refused_by_name(cell, place):
    names = cell("END = 88.72\ndef limit(n):\n    return END / n")
    with pytest.raises(ValueError, match="limit: expected names that mine.py knows, got 'END'; give it as an argument"):
        mine.add(names["limit"], True)
    assert (place / "mine.py").read_text() == mine.BEGINS


@pytest.mark.parametrize("what", [3, None, torch.exp, "step"])
def test_only_functions_of_a_notebook(what):
    with pytest.raises(TypeError, match="function: expected one written in this notebook"):
        mine.add(what, True)


def test_what_it_replaces_is_kept_and_the_rest_of_the_file_stays(cell, place, capsys):
    mine.add(cell(STEP)["step"], True)
    file = place / "mine.py"
    file.write_text(file.read_text() + "\n\nMINE = 3  # a line of one's own\n\n\ndef other():\n    return MINE\n")
    mine.add(cell(STEP)["step"], True)
    assert "as before" in capsys.readouterr().out and not (place / "mine_old.py").exists()
    mine.add(cell(STEP.replace("+ x", "- x"))["step"], True)
    assert "the one before is in mine_old.py" in capsys.readouterr().out
    assert "S.exp() + x" in (place / "mine_old.py").read_text() and "S.exp() + x" not in file.read_text()
    step, other = mine.take("step", "other")
    assert step(torch.zeros(1), 2.0) == -1 and other() == 3
    mine.add(cell(STEP)["step"], True)
    assert "S.exp() - x" in (place / "mine_old.py").read_text() and "S.exp() + x" in (place / "mine_old.py").read_text()


def test_a_decorator_comes_along(cell, place):
    cell("from functools import lru_cache\n\n\ndef marked(function):\n    return function")
    names = cell("@lru_cache\n@marked\ndef kernel(x):\n    return x")
    mine.add(names["kernel"], True)
    text = (place / "mine.py").read_text()
    assert list(mine._functions(text)) == ["marked", "kernel"] and "from functools import lru_cache" in text
    assert mine.take("kernel")(3) == 3


def test_what_is_missing_comes_from_the_solutions_and_says_so(capsys):
    solved = mine._functions((carried.folder("notebooks") / "solutions" / "mine.py").read_text())
    name = next(iter(solved))
    taken = mine.take(name)
    assert f"{name}: from the solutions" in capsys.readouterr().out and taken.__name__ == name
    with pytest.raises(ValueError, match=r"name: expected a function of mine\.py, got 'nothing_of_this_name'"):
        mine.take("nothing_of_this_name")


def test_a_function_that_calls_one_of_the_solutions_brings_it(cell, place):
    solved = mine._functions((carried.folder("notebooks") / "solutions" / "mine.py").read_text())
    name = next(iter(solved))
    names = cell(f"from flakit.course import mine\n{name} = mine.take('{name}')")
    names = cell(f"def uses(*x):\n    return {name}(*x)")
    mine.add(names["uses"], True)
    assert mine._functions((place / "mine.py").read_text())[name] == solved[name]


def test_an_edit_is_seen_at_once_and_a_broken_one_names_its_line(cell, place):
    mine.add(cell(STEP)["step"], True)
    file = place / "mine.py"
    file.write_text(file.read_text().replace("+ x", "* x"))
    assert mine.take("step")(torch.zeros(1), 5.0) == 5
    file.write_text(file.read_text() + "def broken(:\n")
    for read in (mine.take, mine.show):
        with pytest.raises(ValueError, match=r"mine\.py cannot be read, line 6"):
            read("step")


def test_it_shows_as_python(cell, place):
    assert "empty so far" in mine.show()._repr_markdown_()
    mine.add(cell(STEP)["step"], True)
    assert mine.show()._repr_markdown_() == f"```python\n{(place / 'mine.py').read_text().strip()}\n```"
    assert repr(mine.show("step", "missing")) == STEP.strip()


def test_progress_counts_what_was_right_and_forgets_nothing(place):
    before = progress()
    assert sum(any(lesson.checks.values()) for lesson in before.lessons) == 0 and len(before.lessons) >= 15
    assert all(len(lesson.checks) >= 2 for lesson in before.lessons)
    first = before.lessons[1]
    name = next(iter(first.checks))
    assert check(name, 1.0, 1.0)
    assert not check(name, 1.0, 2.0)
    assert not check(list(first.checks)[1], 1.0, 2.0)
    after = progress()
    assert after.lessons[1].checks == {each: each == name for each in first.checks}
    assert f"1 of {sum(len(lesson.checks) for lesson in after.lessons)} checks" in repr(after)
    assert f"● {name}" in after._repr_html_() and list(record.right()) == [name]


def test_progress_says_what_comes_next_and_which_faults_are_filled_in(place, capsys):
    before = progress()
    first = before.lessons[0]
    assert before.next == (first, next(iter(first.checks))) and before.faults == ()
    assert "comes in when all checks" in repr(before) and before.next[1] in before._repr_html_()
    lesson = before.lessons[2]
    for name in list(lesson.checks)[:-1]:
        assert check(name, 1.0, 1.0)
    after = progress()
    last = list(lesson.checks)[-1]
    assert (after.next[0].name, after.next[1]) == (lesson.name, last), "lessons that were left out do not hold one up"
    assert after.faults == () and f"Next: {last}, in {lesson.name}." in repr(after)
    assert check(last, 1.0, 1.0)
    done = progress()
    assert done.faults == ("state overflows",) and f"1 of {len(CAUSES)} faults" in repr(done)
    assert done.next == (done.lessons[3], next(iter(done.lessons[3].checks)))
    picture = done.fingerprint()
    assert repr(picture).startswith(f"1 of {len(CAUSES)} faults")
    assert progress(place / "elsewhere").next == before.next, "another folder has its own record"


def test_all_right_has_nothing_next():
    for lesson in progress().lessons:
        for name in lesson.checks:
            assert check(name, 1.0, 1.0)
    assert progress().next is None and set(progress().faults) == set(CAUSES)
    assert "Every check was right." in repr(progress())


def test_a_check_is_not_called_as_another_lesson_calls_one():
    names = [name for lesson in progress().lessons for name in lesson.checks]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_record_that_cannot_be_read_is_begun_anew(place):
    (place / "mine.json").write_text("no json")
    assert record.right() == {}
    check("one", 1.0, 1.0)
    assert list(record.right()) == ["one"]


def test_a_script_writes_nothing(place, monkeypatch):
    monkeypatch.delenv("FLAKIT_MINE")
    monkeypatch.chdir(place)
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.delitem(sys.modules, "IPython")
    check("one", 1.0, 1.0)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("here", "there"), [("", ""), ("zh", ""), ("solutions", "solutions")])
def test_it_lies_beside_the_english_notebooks(place, monkeypatch, here, there):
    monkeypatch.delenv("FLAKIT_MINE")
    (place / here).mkdir(exist_ok=True)
    monkeypatch.chdir(place / here)
    assert mine.path() == place / there / "mine.py"
