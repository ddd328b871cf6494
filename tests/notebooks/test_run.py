"""Every notebook runs top to bottom, its prose says what its cells computed, and it runs where one has run already."""

import nbformat
import pytest

from docs.claims import broken, with_probes
from docs.lessons import LESSONS, SOLUTIONS, name, read, run
from tests.browser.lab import CHROMIUM

pytestmark = pytest.mark.notebook


@pytest.mark.in_site
@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_runs_and_says_what_it_computed(path):
    assert broken(run(path, change=with_probes)) == []


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is not None, reason="tests/browser/test_every_notebook.py does it in JupyterLab")
@pytest.mark.parametrize("solutions", SOLUTIONS, ids=name)
def test_solutions_run_and_the_lesson_again_after_them(solutions):
    lesson = solutions.parents[1] / solutions.name

    def with_lesson(notebook):
        move = nbformat.v4.new_code_cell(f"import os\nos.chdir({str(lesson.parent)!r})")
        notebook.cells += [move, *read(lesson).cells]
        return notebook

    run(solutions, change=with_lesson)


@pytest.mark.full
def test_lesson_14_holds_where_there_is_no_triton():
    """Its prose too: the recording says what a run would."""
    lesson = next(path for path in LESSONS if path.stem == "14_write_a_kernel")
    hide = nbformat.v4.new_code_cell("from flakit.ops.common import dispatch\ndispatch._HAS_TRITON = False")

    def without_triton(notebook):
        notebook = with_probes(notebook)
        notebook.cells.insert(0, hide)
        return notebook

    done = run(lesson, change=without_triton)
    assert broken(done) == []
    said = "".join(output.text for cell in done.cells for output in cell.get("outputs", []) if "text" in output)
    assert "there is no Triton on this machine" in said and ": right" not in said
