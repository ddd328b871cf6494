"""What panels on decays of every kind share: a profile, or one natural-log decay for every token."""

import math
from collections.abc import Mapping

import ipywidgets as widgets

from ..numerics.inputs import DECAYS
from . import knobs
from .base import Panel

CONSTANT = "constant"


def decay_knobs(
    panel: Panel, profile: str, decay: float, others: Mapping[str, str] | None = None, *, low: float = -math.inf
) -> dict[str, widgets.Widget]:
    """Knobs "profile" and "decay". The slider, from 0 to `low`, says the decay of "constant", and of `others`
    (label: value).

    A person who moves it while a profile of `flakit.inputs` is chosen means "constant": a slider that changes nothing
    would only puzzle.
    """
    options = {CONSTANT: CONSTANT, **{name: name for name in DECAYS}, **(others or {})}
    made = {"profile": knobs.choice(profile, options, "decays"), "decay": knobs.DecayKnob(decay, low=low)}

    def mean_it(_) -> None:
        if not panel._held and made["profile"].value in DECAYS:
            panel._held = True  # the slider itself redraws
            made["profile"].value = CONSTANT
            panel._held = False

    made["decay"].observe(mean_it, "value")
    return made


def chosen(profile: str, decay: float) -> str | float:
    """What `flakit.inputs` takes as its decay."""
    return profile if profile in DECAYS else decay
