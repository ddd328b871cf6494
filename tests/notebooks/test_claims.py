"""Numbers in prose: read as they are written, held to their expression, and none without one in the lessons listed."""

import ast
import math
import re

import nbformat.v4
import pytest
import torch

from docs.claims import broken, claims, contradicted, with_probes
from docs.lessons import LESSONS, NOTEBOOKS, code_cells, name, prose_cells, read, run
from flakit.panels import sketch
from tests.notebooks.prose import letters, minutes, not_held

pytestmark = pytest.mark.notebook

GLOSSARY = NOTEBOOKS / "glossary.md"


def top(lesson):
    """What a lesson says before its first heading of a section; the picture that it begins with may stand between."""
    prose = "\n\n".join(cell.source for cell in prose_cells(lesson))
    return prose.partition("\n## ")[0]


HELD = [p for p in LESSONS if p.stem[:2] == "00" or "*What it takes:*" in top(read(p))]
"""The lessons in which every number is held. Those of the others are held where a comment says what they have to be."""


@pytest.mark.parametrize(
    ("prose", "fits", "does_not"),
    [
        ("It is 0.7%<!--= x -->.", 0.0067, 0.0077),
        ("It is 67 %<!--= x -->.", 0.674, 0.676),
        ("At −1.39<!--= x -->", -1.392, -1.3801),
        ("At **88.72**<!--= x -->", 88.7228, 88.73),
        ("1,024<!--= x --> tokens", 1024, 1025),
        ("1.5e-41<!--= x -->", 1.52e-41, 1.6e-41),
        ("$32$ <!--= x -->", 32, 33),
        ("(see 5)<!--= x -->", 5, 6),
        ("more than 5<!--= x > 5 -->", True, False),
        ("nearly all<!--= x -->", True, 0.99),
        ("all of RWKV6<!--= x -->", True, 6),
        ("It is 5<!--= x -->", 5, "NameError: x"),
        ("It is 5<!--= x -->", 5, math.nan),
        ("It is 5<!--= x -->", 5, math.inf),
    ],
)
def test_a_claim_is_read_as_it_is_written(prose, fits, does_not):
    (claim,) = claims(prose)
    assert claim.wrong(fits) == "" and claim.wrong(does_not) != ""


def test_claims_of_one_sentence_are_told_apart():
    first, second = claims("between 0.41<!--= min(x) --> and 0.51<!--= max(x) -->")
    assert (first.number, first.expression, second.number, second.expression) == (0.41, "min(x)", 0.51, "max(x)")


@pytest.mark.parametrize(
    ("prose", "free"),
    [
        ("off by 42 to 45% here", ["42 ", "45%"]),
        ("off by 42<!--= a --> to 45%<!--= b -->", []),
        ("RWKV6, float32, `x[3]`, $w = -5$, notebook 04, [01_rwkv6](01_rwkv6.ipynb), about 20 minutes", []),
        ("1. the first of 3", ["3"]),
        ("notebooks 04 and 05, section 6", ["6"]),
        ("```\nprint(3)\n```\nand −2.5", ["−2.5"]),
    ],
)
def test_numbers_that_are_held_to_nothing(prose, free):
    assert [each.strip() for each in not_held(prose)] == [each.strip() for each in free]


code, prose = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell


@pytest.fixture
def broken_of(tmp_path):
    """broken_of(cells) -> the claims of a lesson that do not hold, once it has run."""

    def broken_of(cells):
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lesson.ipynb")
        return broken(run(tmp_path / "lesson.ipynb", change=with_probes))

    return broken_of


def test_claims_are_held_where_they_stand(broken_of):
    cells = [
        code("x = 2"),
        prose("It is 2<!--= x --> or 3<!--= x -->, or 4<!--= y -->."),
        code("x = 3"),
        prose("3<!--= x -->"),
    ]
    assert broken_of(cells) == [
        "'It is 2 or 3': x is 2",
        "'It is 2 or 3, or 4': y is NameError: name 'y' is not defined",
    ]


@pytest.mark.parametrize(
    ("prose", "panel", "says"),
    [
        ("The state is gone at token 162<!--= x -->", "The state overflows at token 167.", "167"),
        ("of $dk$ 79%<!--= x -->", "dk: 78% finite", "78%"),
        ("$o$ ends at $1.397$<!--= x -->", "o 1.396", "1.396"),
        ("it is 0.0322<!--= x -->", "off by 3.1e-02", "3.1e-02"),
    ],
)
def test_a_panel_contradicts_a_number_that_it_says_differently(prose, panel, says):
    (claim,) = claims(prose)
    assert contradicted(claim, ["beside it 12", panel]).endswith(f"a panel says {says}")


@pytest.mark.parametrize(
    ("prose", "panel"),
    [
        ("off by 40%<!--= x -->", "off by 39.9%"),
        ("1.375<!--= x -->", "measured: 1.3747"),
        ("1.375<!--= x -->", "o 1.396, dr 1.375"),
        ("79%<!--= x -->", "after 78 tokens"),
        ("162<!--= x -->", "182"),
        ("64<!--= x -->", "66.6 ms"),
        ("6<!--= x -->", "5.9"),
        ("162<!--= x  # with the report's sizes -->", "167"),
        ("nearly all of 162 words<!--= x -->", "167"),
        ("162<!--= x -->", "$167$ e^163"),
    ],
)
def test_a_panel_that_says_the_same_or_something_else_contradicts_nothing(prose, panel):
    (claim,) = claims(prose)
    assert contradicted(claim, [panel]) == ""


def test_panels_contradict_what_stands_in_their_section(broken_of):
    panel = 'from flakit.panels import sketch\n\nshown = sketch("two_forms", digits=24)\nshown'
    share = "shown.result.share"
    (said,) = re.findall(r"(\d+)% of the outputs differ", sketch("two_forms", digits=24).text)
    off, near = int(said), int(said) - 2
    cells = [
        prose("# One"),
        code(panel),
        prose(
            f"It is {off}%<!--= {share} -->, not {near}%<!--= {near} / 100 -->.\n\n"
            f"## Two\n\nIt is {near}%<!--= {near} / 100 -->."
        ),
        code("shown.result.share"),
    ]
    assert broken_of(cells) == [
        f"'It is {off}%, not {near}%': a panel says {off}%",
    ]


@pytest.mark.parametrize("path", HELD, ids=name)
def test_every_number_of_the_prose_is_held(path):
    assert [number for cell in prose_cells(read(path)) for number in not_held(cell.source)] == []


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_no_question_has_its_answer_in_its_cell(path):
    nodes = [node for cell in code_cells(read(path)) for node in ast.walk(ast.parse(cell.source))]
    for call in (node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "predict"):
        (answer,) = [keyword.value for keyword in call.keywords if keyword.arg == "answer"]
        body = answer.body if isinstance(answer, ast.Lambda) else answer
        assert any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(body)), "answer: measure it"


@pytest.mark.parametrize("path", HELD, ids=name)
def test_a_lesson_says_at_its_top_what_it_takes_and_is_no_longer_than_sixty_cells(path):
    assert len(read(path).cells) <= 60
    if path.stem[:2] != "00":  # which shows before it tells, and the page for those who come with a fault
        assert abs(int(minutes_said(read(path))[0]) - minutes(path)) <= 5


def minutes_said(lesson):
    """How long a lesson takes to read, and how long its exercises, as its top says."""
    said = (
        r"\*What it takes:\*.*?about\s+(\d+)\s+minutes\s+to\s+read,"
        r"\s+about\s+(\d+)\s+minutes\s+for\s+the\s+exercises"
    )
    ((read_, exercises),) = re.findall(said, top(lesson), re.S)
    return read_, exercises


def test_the_first_lesson_lists_all_others_with_their_minutes():
    prose = "\n".join(cell.source for cell in prose_cells(read(NOTEBOOKS / "00_start_here.ipynb")))
    listed = re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\) \| .+ \| (\d+) \| (\d+) \|$", prose, re.M)
    assert [lesson for lesson, *_ in listed] == [path.stem for path in LESSONS if path.stem[:2] != "00"]
    assert listed == [(lesson, *minutes_said(read(NOTEBOOKS / f"{lesson}.ipynb"))) for lesson, *_ in listed]


def test_the_glossary_has_every_word_once_and_in_order():
    words = [word.lower() for word in re.findall(r"^\*\*(.+?)\*\*", GLOSSARY.read_text(), re.M)]
    assert words == sorted(set(words))


def _rows_of_letters():
    rows = re.findall(r"^\| (\$.+?) \| (.+) \|$", GLOSSARY.read_text(), re.M)
    return [(letters(re.sub(r"_\w", "", first)), what) for first, what in rows]


def test_a_letter_of_the_glossary_means_one_thing_but_for_what_an_operator_calls_its_own():
    meanings = {}
    for found, what in _rows_of_letters():
        for letter in found:
            meanings.setdefault(letter, []).append(what)
    several = {letter: rows for letter, rows in meanings.items() if len(rows) > 1}
    own = re.compile(r"(RWKV6|RWKV7|GSA)\b")
    assert {k: rows for k, rows in several.items() if sum(not own.match(what) for what in rows) > 1} == {}


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_the_letters_of_the_formulas_are_those_of_the_glossary(path):
    known = set().union(*(found for found, _ in _rows_of_letters())) | {"e", "d"}
    used = set().union(*(letters(cell.source) for cell in prose_cells(read(path))))
    unknown = {each for each in used - known if each[1:] not in known or each[0] != "d"}
    assert unknown == set(), "a row in the glossary, or a letter that is there"


def test_the_glossary_ends_float32_where_it_ends():
    (end,) = re.findall(r"exponential of anything above ([\d.]+) is too large for\s+float32", GLOSSARY.read_text())
    largest = math.log(torch.finfo(torch.float32).max)
    assert abs(float(end) - largest) <= 0.005
