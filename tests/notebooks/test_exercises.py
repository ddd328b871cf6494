"""Every exercise of a lesson is open in the lesson and solved, under the same name, in its solutions."""

import ast
import re
from types import SimpleNamespace

import pytest

from docs.lessons import NOTEBOOKS, SOLUTIONS, WITH_EXERCISES, code_cells, name, read

pytestmark = pytest.mark.notebook


def verdicts(path):
    """What the checks of an executed notebook printed: [(exercise, "right" or "not yet"), …]."""
    outputs = [output for cell in code_cells(read(path)) for output in cell.outputs]
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
    cells = code_cells(read(NOTEBOOKS / "solutions" / path.name))
    checks = [line for cell in cells for line in cell.source.splitlines() if "check(" in line]
    assert checks and all(re.match(r"\s*assert check\(", line) for line in checks), "write: assert check(…)"


def binds_and_reads(source):
    """The names that a cell binds, and those that it reads before it binds them; functions see what is there later."""
    tree, binds, reads = ast.parse(source), set(), set()

    def walk(node):
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            if isinstance(node, ast.FunctionDef):
                binds.add(node.name)
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            own = {each.id for each in names if isinstance(each.ctx, ast.Store)}
            own |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
            reads.update({each.id for each in names if isinstance(each.ctx, ast.Load)} - own - binds)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                binds.add(node.id)
            elif node.id not in binds:
                reads.add(node.id)
        else:
            first = ("value", "iter")  # of an assignment and of a loop, before what they bind
            fields = sorted(ast.iter_fields(node), key=lambda field: field[0] not in first)
            for _, value in fields:
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        walk(each)

    walk(tree)
    return binds, reads


def stale(cells):
    """[(check's cell, name)] of names from before an exercise that mean something else once others have run.

    A cell after it binds such a name anew; or an exercise before it does, when it is done again, and the cell that
    gave the name its meaning is not run again.
    """
    found, known = [], {n: binds_and_reads(c.source) for n, c in enumerate(cells) if c.cell_type == "code"}
    first = {n: max((m + 1 for m in range(n) if m not in known), default=0) for n in known}
    asks = {first[n] for n in known if "check(" in cells[n].source}
    for n, (_, reads) in known.items():
        if "check(" not in cells[n].source:
            continue
        of_the_exercise = set().union(*(known[m][0] for m in range(first[n], n)))
        for read_name in sorted(reads - of_the_exercise):
            binders = [m for m in known if read_name in known[m][0] and not first[n] <= m <= n]
            meant = max((m for m in binders if m < n), default=None)
            again = [m for m in binders if m > n or (first[m] in asks and first[m] != first[meant])]
            if meant is not None and again:
                found.append((n, read_name))
    return found


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=name)
def test_an_exercise_can_be_done_after_the_cells_behind_it_have_run(path):
    assert stale(read(path).cells) == [], "a name that its check reads means something else by then"


def test_a_stale_name_is_seen():
    def cell(kind, source):
        return SimpleNamespace(cell_type=kind, source=source)

    text, given = cell("markdown", ""), cell("code", "S = 1")
    asked, checks = (
        cell("code", "def yours():\n    return ..."),
        cell("code", "check('one', yours(), [S for _ in 'x'])"),
    )
    anew = cell("code", "for S in range(3):\n    pass")
    assert stale([given, text, asked, checks, text, anew]) == [(3, "S")]
    assert stale([given, text, asked, checks, text, cell("code", "[S for S in range(3)]")]) == []
    assert stale([text, given, asked, checks, text, anew]) == [], "the exercise's own cells are run again"
    one = cell("code", "S = 2\ncheck('another', yours(), S)")
    assert stale([one, text, given, text, asked, checks]) == [(5, "S")], "the one before is done again"
    assert stale([one, text, asked, given, checks]) == []
    assert stale([cell("code", "S = 2"), text, given, text, asked, checks]) == [], "nobody does these again"


def is_open(node):
    return (
        isinstance(node, ast.Constant)
        and node.value is ...
        or isinstance(node, ast.Tuple)
        and any(map(is_open, node.elts))
    )


def unlooked_at(cells):
    """[(cell, function)] of exercises: what the function returns is used before anybody has looked whether it fits.

    A value alone may go to `check` and to a picture as it is, which say what does not fit; else it takes `returning`.
    """
    code = {n: ast.parse(cell.source) for n, cell in enumerate(cells) if cell.cell_type == "code"}
    asked = {
        node.name
        for tree in code.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, (ast.Return, ast.Assign)) and is_open(each.value) for each in ast.walk(node))
    }
    found = []
    for n, tree in code.items():
        inside = {id(each) for node in tree.body if isinstance(node, ast.FunctionDef) for each in ast.walk(node)}
        parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        right = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for call in ast.walk(tree):
            of = getattr(call.func, "id", "") if isinstance(call, ast.Call) and id(call) not in inside else ""
            if of in asked - right:  # what mine.take fetches has been looked at
                by, binds = parents[id(call)], parents[id(parents[id(call)])]
                fits = (
                    isinstance(by, ast.Call) and getattr(by.func, "id", "") in ("check", "beside")
                    or isinstance(by, ast.Assign) and isinstance(by.targets[0], ast.Name)
                    or isinstance(by, ast.Tuple) and isinstance(binds, ast.Assign)
                    or isinstance(by, ast.Compare)
                )  # fmt: skip
                if not fits:
                    found.append((n, of))
    return found


OWN_WAY = {
    "07_chunk_vs_recurrent": {"cause"},  # a word: what is none of the words is no cause
    "15_audit_your_kernel": {"halved_back", "halved_scores"},  # the audit runs and judges them
}


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=name)
def test_what_a_learner_returns_is_looked_at_before_it_is_used(path):
    found = {function for _, function in unlooked_at(read(path).cells)} - OWN_WAY.get(path.stem, set())
    assert found == set(), "returning(function, …), which says what does not fit"


def test_what_is_used_unlooked_at_is_seen():
    asked = SimpleNamespace(cell_type="code", source="def step(S, r):\n    o = ...\n    return o, S")
    for used, seen in (
        ("o, S = step(S, r)", 1), ("torch.stack([step(S, r)])", 1), ("o, S = returning(step, o=[1], S='S')(S, r)", 0),
        ("yours = step(S, r)", 0), ("check('one', step(S, r), 2)", 0), ("yours, true = step(S, r), 2", 0),
    ):  # fmt: skip
        assert len(unlooked_at([asked, SimpleNamespace(cell_type="code", source=used)])) == seen


def test_the_file_of_the_solutions_is_what_they_add():
    written, added = set(), set()
    for path in SOLUTIONS:
        for cell in code_cells(read(path)):
            body = ast.parse(cell.source).body
            written |= {ast.unparse(node) for node in body if isinstance(node, ast.FunctionDef)}
            added |= set(re.findall(r"mine\.add\((\w+)", cell.source))
    file = ast.parse((NOTEBOOKS / "solutions" / "mine.py").read_text(encoding="utf-8")).body
    kept = {node.name: ast.unparse(node) for node in file if isinstance(node, ast.FunctionDef)}
    assert added and added <= set(kept)
    assert [name for name, text in kept.items() if text not in written] == [], "make notebooks writes it"
