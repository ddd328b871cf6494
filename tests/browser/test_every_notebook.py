"""Every panel of every notebook is laid out as layout.py says."""

import pytest

from tests.browser import layout
from tests.notebooks.running import NOTEBOOKS

pytestmark = [pytest.mark.browser, pytest.mark.full]


def with_panels():
    """Every notebook that calls for a panel in some cell."""
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    return [path.name for path in paths if "flakit.panels" in path.read_text() or "import panels" in path.read_text()]


@pytest.mark.parametrize("name", with_panels())
def test_every_panel_of_a_notebook(name, open_notebook, record_property):
    notebook = open_notebook(name)
    notebook.run_all()
    layout.check(notebook.page, record_property)
