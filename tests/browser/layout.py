"""Slider and effect on one screen: what of a panel is measured where people see it.

A JupyterLab with its file browser open, on a laptop's screen and on a small one.
"""

import contextlib
import json

from playwright.sync_api import TimeoutError

from tests.browser import lab

SCREENS = {(1440, 900): 700, (1024, 768): 640}
"""How high a panel may be, in pixels, with "more" folded."""

ALL_THERE = """() => {
  const cells = Array.from(window.jupyterapp.shell.currentWidget.content.model.cells);
  const outputs = cells.flatMap(cell => cell.type === 'code' ? cell.toJSON().outputs : []);
  const widgets = outputs.filter(each => 'application/vnd.jupyter.widget-view+json' in (each.data || {}));
  return widgets.length && document.querySelectorAll('.jp-OutputArea .flakit-panel').length >= widgets.length;
}"""

LAID_OUT = """panel => {
  const image = panel.querySelector('img.flakit-picture');
  const handles = [...panel.querySelectorAll('.noUi-handle')].filter(each => each.checkVisibility());
  return image?.complete && image.clientWidth > 0.95 * image.naturalWidth
    && handles.every(each => each.getAttribute('aria-label'))
    && panel.querySelector('.flakit-readout')?.textContent.trim();
}"""
"""A kernel may be done long before a busy browser has drawn what it sent.

Of texts, textContent is asked: JupyterLab has the browser skip cells that are out of view, and what is skipped has no
innerText, although it is laid out. A panel is skipped for a moment where the cell above it grows while it is measured.
"""

MEASURE = """panel => {
  const image = panel.querySelector('img.flakit-picture');
  const output = panel.closest('.jp-OutputArea-output');
  const seen = each => each.checkVisibility();
  return {
    name: panel.className.match(/flakit-(?!panel)\\S+/g).join(' '),
    height: panel.getBoundingClientRect().height,
    sideways: Math.max(output.scrollWidth - output.clientWidth, panel.scrollWidth - panel.clientWidth),
    shrunk: image.clientWidth / image.naturalWidth,
    alt: image.alt,
    readout: panel.querySelector('.flakit-readout').textContent,
    cut: [...panel.querySelectorAll('.widget-label, .widget-readout, button')].filter(seen).filter(
      each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent.trim()),
    sliders: [...panel.querySelectorAll('.noUi-handle')].filter(seen).map(each => each.getAttribute('aria-label')),
    order: ['flakit-knobs', 'flakit-readout', 'flakit-pictures', 'flakit-buttons'].map(
      name => panel.querySelector('.' + name).getBoundingClientRect().top),
  };
}"""


def measured(page, size):
    """Every panel on the page, at a size of the window."""
    page.set_viewport_size({"width": size[0], "height": size[1]})
    measurements = []
    for panel in page.locator(".jp-OutputArea .flakit-panel").all():
        panel.scroll_into_view_if_needed()
        with contextlib.suppress(TimeoutError):  # what is wrong then is said with the rest
            page.wait_for_function(LAID_OUT, arg=panel.element_handle(), timeout=60_000, polling=50)
        lab.Panel(page, panel).settle(quiet=300)
        measurements.append(panel.evaluate(MEASURE))
    return measurements


def faults(panel, size):
    """What is wrong with a panel as a person sees it; the readout may stand beside the picture."""
    knobs, readout, picture, buttons = panel["order"]
    wrong = {
        f"{panel['height']:.0f} pixels high": panel["height"] > SCREENS[size],
        "scrolls sideways": panel["sideways"] > 0,
        f"picture shrunk to {panel['shrunk']:.0%}": panel["shrunk"] < 0.95,
        "picture without words": len(panel["alt"]) < 40,
        f"words cut off: {', '.join(panel['cut'])}": panel["cut"],
        "a slider without a name": not all(panel["sliders"]),
        "not knobs, readout, picture, buttons": not (knobs < readout <= picture < buttons or knobs < picture < buttons),
        "no readout": not panel["readout"].strip(),
    }
    return [fault for fault, there in wrong.items() if there]


def check(page, record_property):
    """No panel on the page has a fault, at no size."""
    wrong, heights = {}, {}
    page.wait_for_function(ALL_THERE, timeout=180_000, polling=200)  # a busy browser shows later what lies further down
    for size in SCREENS:
        panels = measured(page, size)
        assert panels, "the notebook shows no panel"
        for n, panel in enumerate(panels):
            where = f"{panel['name']} ({n}), {size[0]} x {size[1]}"
            heights[where] = round(panel["height"])
            if faults(panel, size):
                wrong[where] = faults(panel, size)
    record_property("heights", json.dumps(heights))
    assert not wrong, wrong
