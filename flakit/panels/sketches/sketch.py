"""The definition of a sketch, and all that are defined."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from ...figures.drawing import Drawing
from ...language import Words

SKETCHES: dict[str, type["Sketch"]] = {}
"""All sketches by name; each enters itself when its lesson's module is imported."""


class Sketch(Drawing):
    """A small picture with one or two knobs: its words, the numbers at a setting, and how to draw and describe them."""

    words: Words
    """Those of its name, as in `class Broken(Sketch, name="broken", words=WORDS)`; "alt" says what the picture is."""
    knobs: Mapping[str, Callable[[], widgets.Widget]]
    """One or two; "play" moves the first."""
    presets: Mapping[str, Mapping] = {}
    """Settings by the labels of their buttons."""
    script: str
    """Python with the same numbers, with the knobs' names in braces."""
    random = False
    """Whether the inputs are random, so that there is a seed."""
    compute: Callable[..., Any]
    """Return the arrays of a setting, which the methods of `Drawing` take."""

    def __init_subclass__(cls, name: str, words: Words | None = None) -> None:
        super().__init_subclass__()
        SKETCHES[name] = cls
        if words is not None:  # otherwise it speaks as the sketch that it derives from
            cls.words = words[name]
