"""Every exercise of a lesson is open in the lesson and solved, under the same name, in its solutions."""

import ast
import re

import pytest

from tests.notebooks.running import NOTEBOOKS, SOLUTIONS, WITH_EXERCISES, name, read

pytestmark = pytest.mark.notebook


def verdicts(path):
    """What the checks of an executed notebook printed: [(exercise, "right" or "not yet"), …]."""
    outputs = [output for cell in read(path).cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return re.findall(r"^(\S.*): (right|not yet)$", text, re.M)


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=name)
def test_exercises_are_open_in_the_lesson_and_solved_in_its_solutions(path):
    open_ones, solved = verdicts(path), verdicts(NOTEBOOKS / "solutions" / path.name)
    assert len(open_ones) >= 2
    assert {verdict for _, verdict in open_ones} == {"not yet"}
    assert {verdict for _, verdict in solved} == {"right"}
    assert {exercise for exercise, _ in open_ones} <= {exercise for exercise, _ in solved}


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=name)
def test_a_wrong_solution_would_fail_its_cell(path):
    cells = read(NOTEBOOKS / "solutions" / path.name).cells
    checks = [
        line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines() if "check(" in line
    ]
    assert checks and all(re.match(r"\s*assert check\(", line) for line in checks), "write: assert check(…)"


def test_the_file_of_the_solutions_is_what_they_add():
    written, added = set(), set()
    for path in SOLUTIONS:
        for cell in read(path).cells:
            if cell.cell_type == "code":
                body = ast.parse(cell.source).body
                written |= {ast.unparse(node) for node in body if isinstance(node, ast.FunctionDef)}
                added |= set(re.findall(r"mine\.add\((\w+)", cell.source))
    file = ast.parse((NOTEBOOKS / "solutions" / "mine.py").read_text(encoding="utf-8")).body
    kept = {node.name: ast.unparse(node) for node in file if isinstance(node, ast.FunctionDef)}
    assert added and added <= set(kept)
    assert [name for name, text in kept.items() if text not in written] == [], "make notebooks writes it"
