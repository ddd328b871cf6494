"""The base class of sketches, small pictures with one or two knobs, a table of all of them, and what several share to
format numbers and lists."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes

from ...figures import Canvas, Drawing
from ...language import Words, say
from ...numerics.words import number

SKETCHES: dict[str, type["Sketch"]] = {}
"""All sketches by name; each is entered here when its lesson's module is imported."""


class Sketch(Drawing):
    """A small picture with one or two knobs: its texts, the numbers at a setting, and how to draw and describe them."""

    words: Words
    """Its texts: `class Broken(Sketch, name="broken", words=WORDS)` takes WORDS["broken"]; "alt" describes the
    picture."""
    knobs: Mapping[str, Callable[[], widgets.Widget]]
    """Functions that make its knobs, one or two, by name; "play" moves the first."""
    presets: Mapping[str, Mapping] = {}
    """Settings by the labels of their buttons."""
    script: str
    """A template of Python code that recomputes the numbers, with the knobs' names in braces."""
    random = False
    """Whether the inputs are random, so that the panel has a knob for the seed."""
    compute: Callable[..., Any]
    """A static method that returns the arrays of a setting, which the methods of `Drawing` take."""

    def plot(self, width: float, height: float, left: float, right: float, top: float, bottom: float) -> Axes:
        """Make a canvas of this size, and return axes that leave these margins, all in inches."""
        self.canvas = Canvas(width, height)
        return self.canvas.axes(left, top, width - (left + right), height - (top + bottom))

    def __init_subclass__(cls, name: str, words: Words | None = None) -> None:
        super().__init_subclass__()
        SKETCHES[name] = cls
        if words is not None:  # otherwise it speaks as the sketch that it derives from
            cls.words = words[name]


def short(x: float) -> str:
    return number(round(float(x), 2) + 0.0, 3)


def percent(share: float) -> str:
    if 0 < share < 0.1:
        return f"{100 * share:.2g}%"
    return f"{share:.0%}" if share != 0 else say("nothing")


def verb(names: list[str]) -> str:
    return say("is") if len(names) == 1 else say("are")


def listed(names: list[str]) -> str:
    return say(" and ").join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def size(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as "1.5 MB"; below 1000 as a plain number."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{number(count / unit, 3)} {name}"
    return f"{count:.0f}"
