"""What a committed notebook has to look like: short cells, small, run in order, nothing that breaks when opened."""

import re

import pytest

from docs.lessons import LESSONS, MAX_BYTES, NOTEBOOKS, SOLUTIONS, TRANSLATIONS, WIDGET_VIEW, name, read

pytestmark = pytest.mark.notebook

MAX_LINES = 10


@pytest.fixture(params=LESSONS + SOLUTIONS + TRANSLATIONS, ids=name)
def path(request):
    return request.param


@pytest.fixture
def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def outputs(cells):
    return [output for cell in cells for output in cell.outputs]


def test_code_cells_are_short(code_cells):
    long = {cell.source.splitlines()[0]: len(cell.source.splitlines()) for cell in code_cells if cell.source}
    assert {first: n for first, n in long.items() if n > MAX_LINES} == {}


def test_small(path):
    assert path.stat().st_size < MAX_BYTES


def test_ran_in_order(code_cells):
    counts = [cell.execution_count for cell in code_cells]
    assert counts == list(range(1, len(counts) + 1)), "make notebooks runs it and stores the outputs"


def test_no_error_output(code_cells):
    assert [output.ename for output in outputs(code_cells) if output.output_type == "error"] == []


def test_no_widget_state(path, code_cells):
    assert "widgets" not in read(path).metadata
    views = [output for output in outputs(code_cells) if WIDGET_VIEW in output.get("data", {})]
    assert views == [], "a view without its state shows as 'model not found'"


def test_no_machine_path(path):
    homes = re.findall(r"(?<![\w.])/(?:home|root|Users|tmp|work)/[\w./-]*", path.read_text())
    assert homes == []


def test_lessons_end_with_what_to_remember():
    missing = [
        name(path)
        for path in LESSONS
        if not any(
            cell.cell_type == "markdown" and re.search(r"^#+ .*what to remember", cell.source, re.I | re.M)
            for cell in read(path).cells[-3:]
        )
    ]
    assert missing == []


@pytest.mark.parametrize("start", ["00_start_here", "03", "04", "05"])
def test_a_picture_is_on_the_first_screen(start):
    """Behind a few lines: what is seen in JupyterLab at 1440 x 900, and begins to be at 1024 x 768."""
    for path in LESSONS + TRANSLATIONS:
        if path.stem.startswith(start):
            words, picture = read(path).cells[:2]
            assert len(words.source.split()) <= 80, path
            assert any("image/png" in output.get("data", {}) for output in picture.outputs), path


def test_every_solution_has_its_lesson():
    lessons = {path.stem for path in LESSONS}
    assert [s.stem for s in SOLUTIONS if not any(s.stem.startswith(lesson) for lesson in lessons)] == []


def test_there_are_notebooks():
    assert LESSONS, f"no notebook in {NOTEBOOKS}"
