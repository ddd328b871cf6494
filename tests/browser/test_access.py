"""Panels in JupyterLab for people who do not see them or use no mouse, as axe checks it."""

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.full]

PANELS = {
    "case": "from flakit.panels import case\ncase('masking')",
    "state-stepper": "from flakit.panels import state_stepper\nstate_stepper('rwkv6', T=8)",
    "decay-explorer": "from flakit.panels import decay_explorer\ndecay_explorer()",
    "diagnosis": "from flakit.panels import diagnose\ndiagnose(dr='NaN')",
    "phase-diagram": "from flakit.panels import phase_diagram\nphase_diagram()",
}


def test_axe_finds_nothing_serious_in_panels(served, open_notebook, page):
    from axe_playwright_python.sync_playwright import Axe

    cells = [nbformat.v4.new_code_cell(source) for source in PANELS.values()]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), served / "access.ipynb")
    notebook = open_notebook("access.ipynb")
    notebook.run_all()
    for name in PANELS:
        notebook.panel(name)
    found = {}
    for violation in Axe().run(page, context=".flakit-panel").response["violations"]:
        if violation["impact"] in ("serious", "critical"):
            found[violation["id"]] = [node["html"][:300] for node in violation["nodes"][:3]]
    assert found == {}
    live = page.locator(".flakit-panel .flakit-readout [aria-live=polite]")
    assert live.count() == len(PANELS)
    player = page.locator(".flakit-panel .widget-play").first
    player.get_by_role("button", name="play", exact=True).click()
    player.get_by_role("button", name="pause", exact=True).wait_for()
