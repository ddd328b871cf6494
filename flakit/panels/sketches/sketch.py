"""The description of a sketch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ipywidgets as widgets

from ...figures.drawing import Drawing


@dataclass(frozen=True)
class Sketch:
    """What its knobs are, how its arrays are computed, what draws them, and a script that remakes the numbers."""

    knobs: Mapping[str, Callable[[], widgets.Widget]]  # one or two; the first is the main one and gets play
    compute: Callable
    picture: type[Drawing]
    alt: str
    presets: Mapping[str, Mapping]
    script: str
    random: bool = False  # computed from random inputs: there is a seed
