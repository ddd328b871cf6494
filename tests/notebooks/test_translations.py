"""The Chinese lessons: cell by cell those of the English ones as they stand, and they say what they computed."""

import re

import nbformat
import pytest

from docs.claims import broken, claims, with_probes
from docs.lessons import NOTEBOOKS, TRANSLATIONS, name, prose_cells, read, run
from tests.notebooks import translations
from tests.notebooks.prose import not_held
from tests.notebooks.translations import KEY, digest, english, outdated, skeleton

pytestmark = pytest.mark.notebook

each_translation = pytest.mark.parametrize("path", TRANSLATIONS, ids=name)


def test_the_first_lessons_are_translated():
    assert [path.stem[:2] for path in TRANSLATIONS] == ["00", "00", "01", "03", "04", "05", "06"]


@each_translation
def test_it_is_a_translation_of_the_lesson_as_it_stands(path):
    assert outdated(path) == [], f"notebooks/{path.name} has changed: translate these cells of it again"


@each_translation
def test_its_code_is_that_of_the_lesson(path):
    made = {cell.id: cell for cell in read(path).cells}
    for cell in english(path).cells:
        assert cell.cell_type == made[cell.id].cell_type
        if cell.cell_type == "code":
            hidden = [each.metadata.get("jupyter") for each in (cell, made[cell.id])]
            assert (skeleton(cell.source), hidden[0]) == (skeleton(made[cell.id].source), hidden[1]), cell.id


@each_translation
def test_it_says_the_same_numbers(path):
    """What holds them to what the cells compute is the same, too, but for words that a panel says."""
    made = {cell.id: cell for cell in read(path).cells}
    for cell in prose_cells(english(path)):
        first, second = (sorted(map(_plain, claims(each.source))) for each in (cell, made[cell.id]))
        assert first == second, cell.id
        assert not_held(made[cell.id].source) == [], cell.id


def _plain(claim):
    return "" if claim.number is None else f"{claim.number}", re.sub(r'"[^"]*"', '""', claim.expression)


@each_translation
def test_its_links_lead_to_translations_where_there_are_any(path):
    prose = "\n".join(cell.source for cell in prose_cells(read(path)))
    assert [other.name for other in TRANSLATIONS if f"](../{other.name})" in prose] == []


@pytest.mark.full
@each_translation
def test_it_runs_and_says_what_it_computed(path):
    done = run(path, change=with_probes)
    assert broken(done) == []
    said = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", []))
    assert "not yet" not in said


def test_what_changed_in_the_lesson_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(translations, "NOTEBOOKS", tmp_path)
    code, prose = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    cells = [prose("one", id="a"), code("x = 1  # one", id="b"), prose("three", id="c")]
    path = tmp_path / "zh" / "lesson.ipynb"
    path.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lesson.ipynb")
    made = [prose("一", id="a"), code("x = 1  # 一", id="b"), prose("三", id="c")]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    assert outdated(path) == ["a", "b", "c"]
    translations.main("lesson", [])
    assert outdated(path) == [] and read(path).cells[0].metadata[KEY] == digest(cells[0])

    cells[0].source = "another"
    nbformat.write(nbformat.v4.new_notebook(cells=[*cells, prose("four", id="d")]), tmp_path / "lesson.ipynb")
    assert outdated(path) == ["a", "d"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:2]), tmp_path / "lesson.ipynb")
    assert outdated(path) == ["a", "c"]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("x = 1  # one", "x = 1  # 一", True),
        ('print(f"{x:.1f} ms")', 'print(f"{x:.1f} 毫秒")', True),
        ('f(["a"], b="c")', 'f(["甲"], b="丙")', True),
        ("import a\nf(1)", "import a\nfrom flakit.language import use\nuse('zh')\nf(1)", True),
        ("x = 1", "x = 2", False),
        ('f(["a"])', 'f(["甲", "乙"])', False),
        ('print(f"{x:.1f} ms")', 'print(f"{x:.2f} 毫秒")', False),
    ],
)
def test_what_is_the_same_code(first, second, same):
    assert (skeleton(first) == skeleton(second)) == same


def test_every_translation_has_its_lesson():
    assert [path.name for path in TRANSLATIONS if not (NOTEBOOKS / path.name).is_file()] == []
