"""Every notebook in JupyterLab, as a learner leaves it: after its solutions have run in the same kernel.

The solutions run, the lesson runs again where they have run, and its panels are laid out as layout.py says. That it
runs by itself, and says what it computed, is shown in tests/notebooks. Kernels are forks of a process that has imported
torch; those of test_every_panel.py and test_panels.py start as those of `make lab` do.
"""

import nbformat
import pytest

from docs.lessons import LESSONS, SOLUTIONS, WITH_EXERCISES, code_cells, read
from flakit.lab import FIRST
from tests.browser import lab, layout

pytestmark = [pytest.mark.browser, pytest.mark.full]
KERNELS = lab.FORKS

NEWS = "Would you like to get notified about official Jupyter news?"  # JupyterLab 4 asks so unless told not to


@pytest.fixture
def open_after_solutions(served, open_notebook):
    """open_after_solutions("05_one_infinity.ipynb") -> Notebook"""

    def open_lesson(name):
        solutions = [path for path in SOLUTIONS if path.name == name]
        assert len(solutions) == any(path.name == name for path in WITH_EXERCISES)
        both = read(served / name)
        cells = [cell.source for path in solutions for cell in code_cells(read(path))]
        before = ["%cd -q solutions", *cells, "%cd -q .."]
        both.cells = [*map(nbformat.v4.new_code_cell, before), *both.cells]
        nbformat.write(both, served / f"after_{name}")
        return open_notebook(f"after_{name}")

    return open_lesson


@pytest.mark.parametrize("name", [path.name for path in LESSONS])
def test_a_notebook_and_its_panels_after_its_solutions(name, open_after_solutions, record_property):
    notebook = open_after_solutions(name)
    notebook.run_all()
    layout.check(notebook.page, record_property)
    if name == FIRST:
        the_first_slider_moves(notebook)


def the_first_slider_moves(notebook):
    panel = notebook.panel("panel")
    panel.focus()
    assert not notebook.page.get_by_text(NEWS).count(), "a question lies over the first panel"
    picture, readout = panel.picture(), panel.readout()
    panel.press("ArrowRight", times=3)
    assert panel.picture() != picture
    assert panel.readout() != readout


def test_a_setting_of_ones_own_wins_over_those_of_make_lab(jupyterlab, home, page):
    """JupyterLab's own default, to ask; `make lab` says "false", and the first notebook above sees nothing."""
    own = home / "config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    own.parent.mkdir(parents=True)
    own.write_text('{"fetchNews": "none"}')
    try:
        page.goto(f"{jupyterlab}/lab/workspaces/news?reset")
        page.get_by_text(NEWS).first.wait_for(timeout=30_000)
    finally:
        own.unlink()
