"""A learner's saved notebook that is opened again, without the kernel that made its panels; a kernel that stops."""

import pytest

from docs.lessons import NOTEBOOKS
from flakit.figures.canvas import DARK
from tests.browser import lab

pytestmark = [pytest.mark.browser, pytest.mark.full]
KERNELS = lab.FORKS

SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()"
SHUT_DOWN = "() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"


@pytest.fixture
def notebook(open_cells):
    notebook = open_cells("reopened", ["from flakit.panels import case\ncase('masking')"]).run_all()
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


DARKER = """image => image.decode().then(() => getComputedStyle(image).filter)"""


def test_in_a_dark_jupyterlab_no_picture_is_a_white_rectangle(page, jupyterlab, served):
    """Pictures of a notebook that has not run, panels' and others': their brightness is turned round."""
    notebook = lab.Notebook(page, jupyterlab, "00_start_here.ipynb", workspace="dark")
    pictures = notebook.page.locator(".jp-RenderedImage img")
    pictures.nth(1).wait_for()
    assert pictures.nth(1).evaluate(DARKER) == "none"
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    for n in range(2):
        pictures.nth(n).scroll_into_view_if_needed()
        assert "invert(0.89)" in pictures.nth(n).evaluate(DARKER)


def test_panels_and_flakit_lab_have_the_same_style_for_the_dark():
    script = NOTEBOOKS / "jupyterlab" / "labextensions" / "flakit" / "static" / "stored_pictures.js"
    assert f"`{DARK}`" in script.read_text()


def test_a_panel_whose_kernel_has_stopped_says_so(notebook, page):
    page.evaluate(RESTART)
    page.wait_for_selector(".flakit-panel.jupyter-widgets-disconnected", timeout=60_000)
    words = "panel => getComputedStyle(panel, '::before').content"
    assert "Run this cell again" in page.locator(".flakit-panel").evaluate(words)
    inside = page.locator(".flakit-panel .jupyter-widgets-disconnected").first
    assert inside.evaluate("part => getComputedStyle(part, '::before').display") == "none"
