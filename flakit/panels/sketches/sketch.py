"""The definition of a sketch."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from ...figures.drawing import Drawing
from ...language import Words


class Sketch(Drawing):
    """A small picture with one or two knobs: its words, the numbers at a setting, and how to draw and describe them."""

    words: Words
    """As in `class Broken(Sketch, words=WORDS["broken"])`; "alt" says what the picture is."""
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

    def __init_subclass__(cls, words: Words) -> None:
        super().__init_subclass__()
        cls.words = words
