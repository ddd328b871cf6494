"""What makes the site's pages, without building it: docstrings, folded cells, notebooks that are run again."""

import inspect
import re

import nbformat
import pytest

import flakit
from docs import docstrings, notebooks
from docs.docstrings import markdown
from docs.tables import documented
from tests.commands import ROOT


def cell(source, *outputs, **metadata):
    made = nbformat.v4.new_code_cell(source, metadata=metadata)
    made.outputs = [nbformat.v4.new_output("display_data", data) for data in outputs]
    return made


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="  # one pixel
PICTURE = {"image/png": PNG, "text/plain": "the state after a token"}


@pytest.mark.parametrize(
    ("made", "folded"),
    [
        (cell("from flakit.panels import sketch\n\nsketch('ends')", PICTURE), True),
        (cell("sketch('ends')", {"text/html": '<div class="flakit-player"></div>'}), True),
        (cell("a = b + c\ncurves(a)", PICTURE), False),
        (cell("print(1)"), False),
        (cell("def scores(r, k):\n    return r @ k"), False),
        (cell("predict('?', [1, 2], answer=1)", {"text/html": "<p>?</p>"}, jupyter={"source_hidden": True}), True),
        (cell("%timeit 1", PICTURE), False),
    ],
    ids=["panel", "player", "computes", "prints", "teaches", "hidden in JupyterLab", "magic"],
)
def test_code_is_folded_where_the_picture_is_what_matters(made, folded):
    assert notebooks.folded(made) == folded


def test_a_page_has_its_pictures_as_files_and_no_claims_of_the_tests(tmp_path):
    words = nbformat.v4.new_markdown_cell(
        "At $-1.36$ all is well<!--= not broken(\n-1.36) -->, see [the code](../flakit/ops/rwkv6/reference.py)."
    )
    notebook = nbformat.v4.new_notebook(cells=[words, cell("a = 1\nsketch(a)", PICTURE, {"text/html": "<pre></pre>"})])
    path = notebooks.SOLUTIONS[0]
    made = notebooks.page(notebook, path, tmp_path)
    assert (
        made.cells[0].source == "At $-1.36$ all is well, see [the code](../../source/flakit/ops/rwkv6/reference.py.md)."
    )
    (output,) = made.cells[1].outputs
    (picture,) = tmp_path.rglob("*.png")
    assert f'src="../../_images/{path.stem}/{picture.name}"' in output.data["text/html"]
    assert 'alt="the state after a token"' in output.data["text/html"]


def test_links_to_the_recordings_lead_to_their_pages(tmp_path):
    words = nbformat.v4.new_markdown_cell("[all](../data/README.md), [the log](../data/tuning.md)")
    made = notebooks.page(nbformat.v4.new_notebook(cells=[words]), notebooks.LESSONS[0], tmp_path)
    assert made.cells[0].source == "[all](../results/index.md), [the log](../results/h200_steps.md)"


def test_docstrings_become_pages_without_losing_a_word():
    doc = """A sum, for every w <= 0 and x_t.

        o = r S, as text

        o_t = scale * r_t^T (S_{t-1} + diag(u) k_t)
        hk_t = hk_{t-1}

    Args:
        r: receptance, [B, T]; float64 or
            float32. It is *not* scaled.
        k, v: `[B, T]` too.

    >>> add(1)
    2
    """
    assert markdown(inspect.cleandoc(doc)) == (
        "A sum, for every w \\<= 0 and x\\_t.\n\n```text\no = r S, as text\n```\n\n$$\n\\begin{aligned}\n"
        "o_t &= \\text{scale} \\cdot r_t^\\top (S_{t-1} + \\operatorname{diag}(u) k_t) \\\\\n"
        "\\mathit{hk}_t &= \\mathit{hk}_{t-1}\n\\end{aligned}\n$$\n\n**Arguments**\n\n"
        "`r`\n: receptance, \\[B, T\\]; float64 or float32. It is \\*not\\* scaled.\n\n"
        "`k`, `v`\n: `[B, T]` too.\n\n```pycon\n>>> add(1)\n2\n```"
    )


def test_an_argument_that_is_explained_behind_another_has_a_line_of_its_own():
    doc = "only: names. full: denser grids.\nseed: of the inputs; a.b: no argument."
    assert markdown(doc, ("only", "full", "seed")) == (
        "`only`\n: names.\n\n`full`\n: denser grids.\n\n`seed`\n: of the inputs; a.b: no argument."
    )


PAGES = [path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
PUBLIC = {name: thing for page in PAGES for name, thing in documented(page).items()}


def test_the_pages_have_all_that_flakit_offers():
    assert {f"flakit.{name}" for name in flakit.__all__ if callable(getattr(flakit, name))} <= PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_docstring_is_whole_on_its_page(name):
    thing = PUBLIC[name]
    page = docstrings.entry(name, thing)

    def words(text):
        return re.findall(r"[\w^=.]+", re.sub(r"\\(.)", r"\1", text))

    blocks = [block for block in inspect.getdoc(thing).split("\n\n")]
    formulas = [made for block in blocks if (made := docstrings.formula(block.splitlines()))]
    assert all(made in page for made in formulas) and bool(formulas) == name.startswith("flakit.chunk_")
    text = "\n\n".join(block for block in blocks if not docstrings.formula(block.splitlines()))
    said = [word for word in words(text) if word not in ("Args", "Returns", "Raises")]
    shown = words(page)
    assert [word for word in said if word not in shown] == []


def test_a_lesson_is_run_again_when_its_code_has_changed_and_not_for_its_words(tmp_path, monkeypatch):
    path = notebooks.LESSONS[0]
    lesson = nbformat.read(path, 4)
    ran = nbformat.from_dict(lesson)
    shown = next(cell for cell in ran.cells if cell.cell_type == "code")
    shown.outputs = [nbformat.v4.new_output("stream", text="as it ran")]
    (tmp_path / "executed").mkdir()
    nbformat.write(ran, tmp_path / "executed" / path.name)

    def key_and_output(notebook):
        changed = tmp_path / path.name
        nbformat.write(notebook, changed)
        monkeypatch.setattr(notebooks, "LESSONS", [changed])
        made = notebooks.executed(tmp_path, prefixes=["none"])[changed]
        (first, *_) = (cell for cell in made.cells if cell.cell_type == "code")
        return notebooks._key("base", changed), first.outputs == shown.outputs

    key = notebooks._key("base", path)
    assert notebooks._key("other", path) != key
    lesson.cells[0].source += " Other words."
    assert key_and_output(lesson) == (key, True)
    next(cell for cell in lesson.cells if cell.cell_type == "code").source += "\n1 + 1"
    other, same = key_and_output(lesson)
    assert other != key and not same
