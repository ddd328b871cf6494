"""flakit/ops/README.md: every word of ours stands in the code it points at, every one of theirs in their package."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "flakit" / "ops"
GLOSSARY = (OPS / "README.md").read_text()
TABLES = [re.split(r" *\| *", line.strip("| ")) for line in GLOSSARY.splitlines() if line.startswith("|")]
ROWS = [pytest.param(*cells, id=cells[0]) for cells in TABLES if cells[0] not in ("here", "---")]
NAME, PLACE = re.compile(r"`(\w+)`"), re.compile(r"\[[\w/]+\.py\]\(([\w/]+\.py)\)((?: `\w+`)+)")
ASIDES = ("in reverse", "as prepared", "after the stream")  # what tells two uses of a word apart
SPACED = {"own pairs": "own_pairs", "first pass": "first pass", "second pass": "second"}


@cache
def their_code():
    folders = ("common", "generalized_delta_rule", "gla", "gsa", "rwkv6", "rwkv7", "utils")
    ops = Path(find_spec("fla").origin).parent / "ops"
    return "\n".join(path.read_text() for folder in folders for path in (ops / folder).rglob("*.py"))


@pytest.mark.parametrize(("here", "there", "formula", "where"), ROWS)
def test_our_words_stand_where_it_says(here, there, formula, where):
    assert PLACE.sub("", where).strip(", ") == ""
    texts = []
    for path, names in PLACE.findall(where):
        texts.append((OPS / path).read_text())
        for name in NAME.findall(names):
            assert re.search(rf"\b{name}\b", texts[-1]), f"{name} in {path}"
    for word in re.split(r"[,;] ", here):
        found = SPACED.get(word, word)
        assert word in ASIDES or any(re.search(rf"(\b|_){found}", text) for text in texts), word


@pytest.mark.full
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention: pip install --editable '.[fla]'")
@pytest.mark.parametrize(("here", "there", "formula", "where"), ROWS)
def test_their_words_are_theirs(here, there, formula, where):
    assert there == "–" or NAME.findall(there)
    for name in NAME.findall(there):
        assert re.search(rf"\b{name}\b", their_code()), name


@pytest.mark.parametrize(
    ("path", "name", "said"),
    [
        ("common/launch.py", "CHECKPOINT", "a state stored every {} tokens"),
        ("common/tiles_triton.py", "MILD_HALF", "no half's total is below {}"),
        ("common/tiles_triton.py", "MILD_TOKEN", "no w below {}"),
        ("common/tiles_triton.py", "BLOCK_TOKEN", "no w is below {}"),
    ],
)
def test_its_numbers_are_those_of_the_code(path, name, said):
    (value,) = re.findall(rf"^{name} = \D*?(-?\d+)", (OPS / path).read_text(), re.MULTILINE)
    assert re.search(said.format(value) + r"\b", GLOSSARY)
