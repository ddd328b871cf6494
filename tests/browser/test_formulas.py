"""Formulas around a panel have the letters' colours of its pictures, in JupyterLab as it is."""

import nbformat
import pytest

from flakit.figures import style

pytestmark = [pytest.mark.browser, pytest.mark.full]

COLOURS = """() => Array.from(document.querySelectorAll('.jp-RenderedMarkdown mjx-mi')).map(
  letter => getComputedStyle(letter.firstChild).color
)"""


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))})"


def test_letters_of_formulas_have_the_colours_of_pictures(served, open_notebook, page):
    cells = [
        nbformat.v4.new_markdown_cell("$r q k v w g D S K$"),
        nbformat.v4.new_code_cell("from flakit.panels import sketch\nsketch('forgetting')"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), served / "formulas.ipynb")
    notebook = open_notebook("formulas.ipynb")
    page.wait_for_selector("mjx-mi", timeout=30_000)
    notebook.run_all()
    notebook.panel("sketch-forgetting")
    found = page.evaluate(COLOURS)
    plain = found[-1]  # K is a number of channels
    assert found[:7] == [rgb(style.letter(name)) for name in "rqkvwgD"]
    assert found[7] == plain and len(set(found[:7])) == 5  # q is called r in RWKV6, g is w in GSA
