"""Every panel once in a real JupyterLab: it draws, and draws anew when its slider moves. Nothing is timed."""

import pytest

from tests.browser.panels import PANELS

pytestmark = pytest.mark.browser


def test_a_slider_redraws_in_every_panel(all_panels):
    for name, (_, slider, _) in PANELS.items():
        panel = all_panels.panel(name)
        panel.focus(slider)
        before = panel.picture()
        panel.press("ArrowRight", times=2, pause=100)
        assert panel.picture() != before, name
        assert panel.readout(), name
