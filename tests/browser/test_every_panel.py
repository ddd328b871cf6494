"""Every panel once in a real JupyterLab: it draws, and draws anew when a knob of it moves. Nothing is timed."""

import pytest

from flakit import panels
from tests.browser.panels import CODE, PANELS, WITHOUT_A_SLIDER

pytestmark = pytest.mark.browser


def test_no_panel_is_forgotten():
    assert {code.split("(")[0] for code in CODE} == set(panels.__all__)


def test_every_panel_redraws(all_panels):
    for name, (_, slider, _) in PANELS.items():
        panel = all_panels.panel(name)
        panel.focus(slider)
        before = panel.picture()
        panel.press("ArrowRight", times=2, pause=100)
        assert panel.picture() != before, name
        assert panel.readout(), name
    for name, (_, knob, option) in WITHOUT_A_SLIDER.items():
        panel = all_panels.panel(name)
        before = panel.picture()
        panel.choose(knob, option)
        assert panel.picture() != before, name
