"""The definition of a sketch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ipywidgets as widgets

from ...figures.drawing import Drawing


@dataclass(frozen=True)
class Sketch:
    """A sketch's knobs, the function that computes its arrays, its picture, and a script with the same numbers."""

    knobs: Mapping[str, Callable[[], widgets.Widget]]  # one or two; "play" moves the first
    compute: Callable
    picture: type[Drawing]
    presets: Mapping[str, Mapping]
    script: str
    random: bool = False  # whether the inputs are random, so that there is a seed
