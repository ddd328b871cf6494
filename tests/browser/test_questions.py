"""Questions and hints as a person at the keyboard meets them: nothing is told before a choice or an attempt."""

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.full]

ASKED = """from flakit.course import check, predict
predict("Which?", [1, 5, 50], answer=lambda: 2 + 3, why="Because it is {answer}.")"""
TRIED = "check('mine', 1.0, 2.0, 'look again')"


def test_a_choice_unfolds_its_answer_and_is_marked_and_a_hint_waits(served, open_notebook, page):
    cells = [nbformat.v4.new_code_cell(code) for code in (ASKED, TRIED)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), served / "questions.ipynb")
    open_notebook("questions.ipynb").run_all()
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
