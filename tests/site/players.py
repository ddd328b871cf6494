"""Pages with panels that play recorded frames."""

import json
import re
from pathlib import Path

import pytest

from docs import frames
from flakit import panels
from flakit.panels.base import NARROW
from tests.browser.axe import serious

STATIC = Path(frames.__file__).with_name("_static")
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"  # what a resize led to
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Players</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="stylesheet" href="_static/player.css"><style>body {{background: Canvas; color: CanvasText}}</style></head>
<body><main><h1>Players</h1>{players}</main>{scripts}</body></html>"""


def live(code):
    """The panel itself, laid out as players are."""
    panel = eval(f"panels.{code}", {"panels": panels})
    panel.width = NARROW
    panel.redraw()
    return panel


def recorded(panel, folder, name="lesson-1", **limits):
    """The HTML of a panel's player and the data that the player reads; limits: constants of `docs.frames` meanwhile."""
    with pytest.MonkeyPatch.context() as fewer:
        for limit, count in limits.items():
            fewer.setattr(frames, limit, count)
        html = frames.record(panel, folder, name, "lesson.ipynb")
    text = (folder / f"{name}.js").read_text(encoding="utf-8")
    return html, json.loads(re.fullmatch(rf'flakitFrames\("{name}", (.*)\);\n', text)[1])


def write_page(path, players, scripts):
    """A page with these players. scripts: of `docs/_static`, which lies beside the page."""
    scripts = "".join(f'<script src="_static/{script}.js"></script>' for script in scripts)
    path.write_text(PAGE.format(players="".join(players), scripts=scripts), encoding="utf-8")


def faults(page, pictures):
    """{width of the window: what is wrong}: what scrolls sideways, and what axe finds.

    A player is laid out by styles alone. pictures: a path without its ending, for a screenshot at each width.
    """
    wrong = {}
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(PAINTED)
        if not page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"):
            wrong[width, "layout"] = "it scrolls sideways"
        wrong |= {(width, rule): places for rule, places in serious(page, preload=False).items()}
        page.screenshot(path=f"{pictures}-{width}.png", full_page=True)
    return wrong
