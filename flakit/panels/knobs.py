"""The knobs panels share. A knob is a widget whose `value` is the setting itself: a log decay, a length, a name."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real

import ipywidgets as widgets
from traitlets import TraitError

from ..numerics.operators import OPERATORS

NONE = "none"

_ROW = {"width": "400px"}  # two of them beside each other in a notebook on a small laptop
_STYLE = {"description_width": "76px"}

_STOPS_PER_DECADE = 40
_WEAKEST, _STRONGEST = -3, 3  # powers of ten of |w|


class DecayKnob(widgets.SelectionSlider):
    """A slider over natural-log decays from 0 to -inf, logarithmic in |w| between, both ends exact.

    Any decay <= 0 can be assigned with `accept`; one between two stops becomes a stop.
    stops: others than the even ones; optional: begin with a stop "none", whose value is that word.
    """

    def __init__(
        self,
        value: float | str,
        description: str = "decay",
        *,
        stops: Iterable[float] | None = None,
        optional: bool = False,
    ):
        if stops is None:
            steps = range(_WEAKEST * _STOPS_PER_DECADE, _STRONGEST * _STOPS_PER_DECADE + 1)
            stops = {-float(f"{10 ** (i / _STOPS_PER_DECADE):.3g}") for i in steps}
        self._first = [(NONE, NONE)] if optional else []
        options = self._labelled({*stops, 0.0, -math.inf})
        super().__init__(options=options, value=options[0][1], description=description, style=_STYLE, layout=_ROW)
        self.accept(value)

    def accept(self, value: float | str) -> None:
        stops = {stop for _, stop in self.options}
        if value not in stops:
            if not isinstance(value, Real) or not value <= 0:
                also = f" or {NONE!r}" if self._first else ""
                raise ValueError(f"expected a natural-log decay <= 0{also}, got {value!r}")
            value = float(value)
            self.options = self._labelled({*stops, value} - {NONE})
        self.value = value

    def _labelled(self, stops: Iterable[float]) -> list[tuple[str, float | str]]:
        return self._first + [(f"{stop:.5g}", stop) for stop in sorted(stops, reverse=True)]


def choice(value, options: Mapping | Iterable, description: str) -> widgets.Dropdown:
    """One of a few named options (a mapping gives label: value). A value None would show as a blank."""
    options = list(options.items()) if isinstance(options, Mapping) else list(options)
    return widgets.Dropdown(options=options, value=value, description=description, style=_STYLE, layout=_ROW)


def steps(value, options: Iterable, description: str) -> widgets.SelectionSlider:
    """A slider over a few values, such as powers of two."""
    return widgets.SelectionSlider(
        options=list(options), value=value, description=description, style=_STYLE, layout=_ROW
    )


def integer(value: int, low: int, high: int, description: str, step: int = 1) -> widgets.IntSlider:
    """A slider over whole numbers from low to high."""
    return widgets.IntSlider(
        value=value, min=low, max=high, step=step, description=description, style=_STYLE, layout=_ROW
    )


def operator_choice(value: str, names: Iterable[str] = tuple(OPERATORS)) -> widgets.Dropdown:
    """Which operator; `names` where a panel knows fewer than all."""
    return choice(value, {OPERATORS[name].label: name for name in names}, "operator")


def assign(knob: widgets.Widget, name: str, value) -> None:
    """Set a knob from code, with an error that names it, what was expected and what came."""
    try:
        if hasattr(knob, "accept"):
            knob.accept(value)
        elif isinstance(knob, (widgets.IntSlider, widgets.BoundedIntText)):
            if isinstance(value, bool) or int(value) != value or not knob.min <= value <= knob.max:
                raise ValueError(f"expected a whole number from {knob.min} to {knob.max}, got {value!r}")
            knob.value = int(value)
        elif hasattr(knob, "options"):
            values = [option[1] if isinstance(option, tuple) else option for option in knob.options]
            if value not in values:
                raise ValueError(f"expected one of {', '.join(map(str, values))}, got {value!r}")
            knob.value = value
        else:
            knob.value = value
    except (TypeError, ValueError, TraitError) as error:
        raise ValueError(f"{name}: {error}") from None
