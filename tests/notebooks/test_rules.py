"""What a committed notebook has to look like: short cells, small, run in order, nothing that breaks when opened."""

import re

import pytest

from docs.lessons import (
    LESSONS,
    MAX_BYTES,
    SOLUTIONS,
    TRANSLATIONS,
    WIDGET_VIEW,
    code_cells,
    name,
    prose_cells,
    read,
)

pytestmark = pytest.mark.notebook

MAX_LINES = 10
MAX_WORDS_OF_SPEED = 4453  # in cells of prose, comments of claims included: two thirds of its longest version


@pytest.fixture(params=LESSONS + SOLUTIONS + TRANSLATIONS, ids=name)
def path(request):
    return request.param


@pytest.fixture
def outputs(path):
    return [output for cell in code_cells(read(path)) for output in cell.outputs]


def test_code_cells_are_short(path):
    cells = [cell.source for cell in code_cells(read(path))]
    assert [source for source in cells if len(source.splitlines()) > MAX_LINES] == []


def test_the_longest_lesson_gets_no_longer():
    (speed,) = (path for path in LESSONS if path.stem == "16_speed")
    assert sum(len(cell.source.split()) for cell in prose_cells(read(speed))) <= MAX_WORDS_OF_SPEED


def test_small(path):
    assert path.stat().st_size < MAX_BYTES


def test_ran_in_order(path):
    counts = [cell.execution_count for cell in code_cells(read(path))]
    assert counts == list(range(1, len(counts) + 1)), "make notebooks runs it and stores the outputs"


def test_no_error_output(outputs):
    assert [output.ename for output in outputs if output.output_type == "error"] == []


def test_no_widget_state(path, outputs):
    assert "widgets" not in read(path).metadata
    views = [output for output in outputs if WIDGET_VIEW in output.get("data", {})]
    assert views == [], "a view without its state shows as 'model not found'"


def test_no_machine_path(path):
    homes = re.findall(r"(?<![\w.])/(?:home|root|Users|tmp|work)/[\w./-]*", path.read_text())
    assert homes == []


def test_a_gate_whose_gradient_can_be_nan_is_named_with_its_cure(path):
    """Automatic differentiation of -exp(x) gives 0 * inf where e^x overflows; `flakit.log_decay` does not."""
    named = [cell.source for cell in prose_cells(read(path)) if re.search(r"`-(torch\.)?exp\(x\)`", cell.source)]
    assert [source for source in named if "log_decay" not in source] == []


def test_links_lead_somewhere(path):
    prose = "\n".join(cell.source for cell in prose_cells(read(path)))
    headings = {heading.strip().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose, re.M)}
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", prose):  # a folder is none: JupyterLab opens it with an error
        assert link[1:] in headings if link.startswith("#") else (path.parent / link).is_file(), link


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_a_lesson_ends_with_what_to_remember(path):
    last = [cell.source for cell in read(path).cells[-3:] if cell.cell_type == "markdown"]
    assert re.search(r"^#+ .*what to remember", "\n".join(last), re.I | re.M)


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
