"""A learner's saved notebook that is opened again, without the kernel that made its panels; a kernel that stops."""

import nbformat
import pytest

from tests.browser import lab

pytestmark = [pytest.mark.browser, pytest.mark.full]

SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()"
SHUT_DOWN = "() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"


@pytest.fixture
def notebook(served, open_notebook):
    cells = [nbformat.v4.new_code_cell("from flakit.panels import case\ncase('masking')")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), served / "reopened.ipynb")
    notebook = open_notebook("reopened.ipynb")
    notebook.run_all()
    notebook.panel("case")
    return notebook


def test_a_saved_panel_is_a_picture_when_it_is_opened_again(notebook, page, jupyterlab, served):
    page.evaluate(SAVE)
    page.evaluate(SHUT_DOWN)
    assert "widget-view+json" in (served / "reopened.ipynb").read_text()
    again = lab.Notebook(page, jupyterlab, "reopened.ipynb", workspace="reopened")
    stored = page.locator(".flakit-stored")
    stored.wait_for(timeout=60_000)
    page.wait_for_selector("text=Loading widget", state="detached")
    assert stored.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 500
    page.set_viewport_size({"width": 1024, "height": 768})
    assert stored.locator("img").evaluate("image => image.naturalWidth > image.width")
    assert stored.evaluate("all => all.scrollWidth <= all.clientWidth"), "cut off in a narrow window"
    assert (
        "Run this cell" in stored.inner_text()
        and "Error displaying widget" not in page.locator(".jp-Notebook").inner_text()
    )
    again.run_all()
    again.panel("case")
    assert page.locator(".flakit-stored").count() == 0


def test_a_panel_whose_kernel_has_stopped_says_so(notebook, page):
    page.evaluate(RESTART)
    page.wait_for_selector(".flakit-panel.jupyter-widgets-disconnected", timeout=60_000)
    words = "panel => getComputedStyle(panel, '::before').content"
    assert "Run this cell again" in page.locator(".flakit-panel").evaluate(words)
    inside = page.locator(".flakit-panel .jupyter-widgets-disconnected").first
    assert inside.evaluate("part => getComputedStyle(part, '::before').display") == "none"
