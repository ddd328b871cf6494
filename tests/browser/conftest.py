"""A chromium and a JupyterLab for each file of tests, a page for each test, or for the tests of a class.

Not for the whole session: while playwright is there its event loop runs, and a panel that finds one redraws through it.
"""

import re
import shutil

import nbformat
import pytest

from docs.lessons import NOTEBOOKS, kernel_environment
from tests.browser import lab


@pytest.fixture(scope="module")
def chromium():
    if lab.CHROMIUM is None:
        pytest.skip("no chromium found: install Debian's chromium, or name one in CHROMIUM")
    with lab.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder that is served: a copy of the notebooks, so that nothing a test does reaches the committed ones."""
    return shutil.copytree(NOTEBOOKS, tmp_path_factory.mktemp("served") / "notebooks")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The home of someone who never started a JupyterLab."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def jupyterlab(chromium, served, home, request):
    """Its address. KERNELS of a module: how its kernels start, `lab.FORKS` or as those of `make lab` do."""
    with lab.jupyterlab(served, home, kernel_environment(), getattr(request.module, "KERNELS", ())) as url:
        yield url


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    page = item.funcargs.get("page")
    if report.when == "call" and report.failed and page is not None:
        picture = item.funcargs["folder_for_screenshots"] / "failed.png"
        page.screenshot(path=picture)
        report.sections.append(("screenshot", str(picture)))
    return report


@pytest.fixture(autouse=True)
def folder_for_screenshots(tmp_path):
    return tmp_path


@pytest.fixture(scope="class")
def page(chromium):
    page = chromium.new_page(viewport={"width": 1400, "height": 1000})
    yield page
    page.close()


@pytest.fixture(scope="class")
def open_notebook(jupyterlab, page, request):
    """open_notebook("05_one_infinity.ipynb") -> Notebook"""
    return lambda name: lab.Notebook(page, jupyterlab, name, workspace=re.sub(r"\W+", "-", request.node.name))


@pytest.fixture(scope="class")
def open_cells(served, open_notebook):
    """open_cells("formulas", cells) -> Notebook of these cells; a text is one of code."""

    def open_cells(name, cells):
        cells = [nbformat.v4.new_code_cell(each) if isinstance(each, str) else each for each in cells]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
        nbformat.write(notebook, served / f"{name}.ipynb")
        return open_notebook(f"{name}.ipynb")

    return open_cells
