"""Notebooks of a few cells in one JupyterLab: panels for people who do not see them or use no mouse, as axe checks it;
formulas, whose letters have the colours of pictures; questions and hints, which tell nothing before a choice."""

import nbformat
import pytest

from flakit.figures import style
from tests.browser import lab
from tests.browser.axe import serious

pytestmark = [pytest.mark.browser, pytest.mark.full]
KERNELS = lab.FORKS


PANELS = {
    "case": "from flakit.panels import case\ncase('masking')",
    "state-stepper": "from flakit.panels import state_stepper\nstate_stepper('rwkv6', T=8)",
    "decay-explorer": "from flakit.panels import decay_explorer\ndecay_explorer()",
    "diagnosis": "from flakit.panels import diagnose\ndiagnose(dr='NaN')",
    "phase-diagram": "from flakit.panels import phase_diagram\nphase_diagram()",
}


def test_axe_finds_nothing_serious_in_panels(open_cells, page):
    notebook = open_cells("access", PANELS.values()).run_all()
    for name in PANELS:
        notebook.panel(name)
    assert serious(page, ".flakit-panel") == {}
    live = page.locator(".flakit-panel .flakit-readout [aria-live=polite]")
    assert live.count() == len(PANELS)
    player = page.locator(".flakit-panel .widget-play").first
    player.get_by_role("button", name="play", exact=True).click()
    player.get_by_role("button", name="pause", exact=True).wait_for()


COLOURS = """() => Array.from(document.querySelectorAll('.jp-RenderedMarkdown mjx-mi')).map(
  letter => getComputedStyle(letter.firstChild).color
)"""


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))})"


def test_letters_of_formulas_have_the_colours_of_pictures(open_cells, page):
    letters = nbformat.v4.new_markdown_cell("$r q k v w g D S K$")
    notebook = open_cells("formulas", [letters, "from flakit.panels import sketch\nsketch('forgetting')"])
    page.wait_for_selector("mjx-mi", timeout=30_000)
    notebook.run_all()
    notebook.panel("sketch-forgetting")
    found = page.evaluate(COLOURS)
    plain = found[-1]  # K is a number of channels
    assert found[:7] == [rgb(style.letter(name)) for name in "rqkvwgD"]
    assert found[7] == plain and len(set(found[:7])) == 5  # q is called r in RWKV6, g is w in GSA


ASKED = """from flakit.course import check, predict
predict("Which?", [1, 5, 50], answer=lambda: 2 + 3, why="Because it is {answer}.")"""
TRIED = "check('mine', 1.0, 2.0, 'look again')"


def test_a_choice_unfolds_its_answer_and_is_marked_and_a_hint_waits(open_cells, page):
    open_cells("questions", [ASKED, TRIED]).run_all()
    shown = page.locator(".jp-OutputArea")
    assert "Because" not in shown.first.inner_text() and "look again" not in shown.last.inner_text()

    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    first = page.locator("details").first
    first.get_by_text("No: 5. Because it is 5.").wait_for(timeout=5_000)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("Right. Because it is 5.").wait_for(timeout=5_000)
    assert first.inner_text() == "1 (your choice)", "the first choice stays marked, and its answer folds away"

    page.locator("summary").last.click()
    page.get_by_text("look again", exact=True).wait_for(timeout=5_000)
