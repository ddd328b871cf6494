"""What tests ask of a panel, as a reader does: a cell, the knobs on view, the presets, the script, a smaller screen."""

import contextlib
import io

from flakit.figures.canvas import Cell


def pointed(panel, *cell):
    """The line under the picture for a cell: its map, row and column."""
    panel.picture.pick(Cell(*cell))
    return panel.picture.strip


def on_view(panel):
    """The labels of the knobs that are not folded away."""
    (row,) = [box for box in panel.children if "flakit-knobs" in box._dom_classes]
    return [knob.description for knob in row.children]


def printed(panel, **names):
    """What the panel's script prints, where these names stand for what it expects to be there."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(panel.as_python(), names)
    return out.getvalue()


def resize(panel, room):
    """Show the panel in a room of so many pixels."""
    panel.picture._received({"kind": "room", "x": room, "y": 1})


def sizes(panel):
    """Width and height of the picture on a small screen and on a laptop's, which is the last one."""
    pixels = []
    for room in (600, 1000):
        resize(panel, room)
        pixels.append(panel.canvas.pixels)
    return pixels


def assert_presets_differ(panel):
    """Every preset draws something else, and says it to those who do not see the picture as well; returns the texts."""
    seen = []
    for setting in panel.presets.values():
        panel.set(**setting)
        assert "Error" not in panel.text and panel.text in panel.picture.alt
        seen.append((panel.text, panel.png, panel.picture.alt))
    assert all(len(set(kind)) == len(panel.presets) >= 2 for kind in zip(*seen, strict=True))
    return [text for text, *_ in seen]
