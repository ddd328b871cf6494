"""Every panel once in a real JupyterLab. How soon the picture follows a key: test_panels.py, timed."""

import pytest
from PIL import Image

from flakit import panels
from flakit.numerics.operators import OPERATORS
from tests.browser import lab, layout
from tests.browser.panels import CODE, PANELS, PICTURES, WITHOUT_A_SLIDER, cells

pytestmark = pytest.mark.browser


def test_no_panel_is_forgotten():
    assert {code.split("(")[0] for code in CODE} == set(panels.__all__) - PICTURES


@pytest.fixture(scope="class")
def all_panels(open_cells):
    return open_cells("panels", cells(CODE)).run_all()


@pytest.mark.full
class TestEveryPanel:
    """One notebook shows them all, and runs once."""

    def test_laid_out_for_both_screens(self, all_panels, record_property):
        assert all_panels.page.locator(".jp-OutputArea .flakit-panel").count() == len(CODE)
        layout.check(all_panels.page, record_property)

    def test_a_slider_draws_in_every_panel_and_operator(self, all_panels):
        for name, (_, slider, operators) in PANELS.items():
            panel = all_panels.panel(name)
            for op in operators or [None]:
                if op is not None:
                    panel.choose("operator", OPERATORS[op].label)
                panel.focus(slider)
                before = panel.picture()
                panel.forget()
                panel.press("ArrowRight", times=2, pause=0)
                panel.redrawn()
                assert panel.picture() != before and panel.readout(), (name, op)
                panel.press("ArrowLeft", times=2, pause=0)

    def test_a_list_draws_where_there_is_no_slider(self, all_panels):
        for name, (_, knob, option) in WITHOUT_A_SLIDER.items():
            panel = all_panels.panel(name)
            before = panel.picture()
            panel.choose(knob, option)
            assert panel.picture() != before and panel.readout(), name

    def test_a_cell_pointed_at_shows_its_arithmetic(self, all_panels):
        """By mouse, by click and by arrow keys; the picture itself is not drawn anew."""
        panel = all_panels.panel("masking")
        image, strip = panel.root.locator("img.flakit-picture"), panel.root.locator(".flakit-strip")
        image.evaluate("image => image.scrollIntoView({block: 'center'})")
        box = image.bounding_box()
        nowhere, picture = strip.inner_text(), panel.picture()
        all_panels.page.mouse.move(box["x"] + 0.35 * box["width"], box["y"] + 0.4 * box["height"])
        panel.settle(quiet=300)
        pointed = strip.inner_text()
        assert "output" in pointed and "e^" in pointed and pointed != nowhere
        all_panels.page.mouse.click(box["x"] + 0.35 * box["width"], box["y"] + 0.4 * box["height"])
        all_panels.page.mouse.move(box["x"] + 2, box["y"] + 2)
        panel.settle(quiet=300)
        assert strip.inner_text() == pointed and panel.root.locator(".flakit-lit-cell").count() == 1
        seen = {pointed}
        for key in ("ArrowRight", "ArrowDown"):
            panel.press(key, pause=200)
            seen.add(strip.inner_text())
        assert len(seen) == 3 and panel.picture() == picture
        panel.press("Escape", pause=200)
        assert strip.inner_text() == nowhere and panel.root.locator(".flakit-lit").count() == 0

    def test_a_pinned_picture_stays_beside_the_next(self, all_panels):
        panel = all_panels.panel("masking")
        panel.root.get_by_role("button", name="pin").click()
        panel.settle()
        pinned = panel.root.locator("img.flakit-picture").nth(1)
        before, words = pinned.evaluate(lab.BLOB), panel.root.locator(".flakit-pinned").inner_text()
        panel.root.get_by_role("button", name="repaired").click()
        panel.settle()
        assert panel.root.locator("img.flakit-picture").first.evaluate(lab.BLOB) != before == pinned.evaluate(lab.BLOB)
        assert words.startswith("Pinned: ") and panel.readout() not in words
        panel.root.get_by_role("button", name="unpin").click()
        panel.settle()
        assert panel.root.locator("img.flakit-picture").count() == 1

    def test_save_picture_downloads_the_picture_as_it_stands(self, all_panels):
        panel = all_panels.panel("masking")
        with all_panels.page.expect_download() as download:
            panel.root.get_by_role("button", name="save picture").click()
        assert download.value.suggested_filename == "flakit-masking.png"
        size = panel.root.locator("img.flakit-picture").evaluate("image => [image.naturalWidth, image.naturalHeight]")
        assert list(Image.open(download.value.path()).size) == size
