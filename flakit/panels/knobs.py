"""Knobs for panels. A knob is an ipywidget whose `value` is the setting itself: a log decay, a length, a name."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real

import ipywidgets as widgets
from traitlets import TraitError

from ..language import label
from ..numerics.operators import OPERATORS

NONE = "none"

# Panels lay knobs out, two in a row on a small laptop's screen.
_LOOK = {"layout": {"width": "auto"}, "style": {"description_width": "76px"}}

_STOPS_PER_DECADE = 40
_WEAKEST, _STRONGEST = -3, 3  # powers of ten of |w|


class NumberKnob(widgets.SelectionSlider):
    """A slider over a few numbers, the stops. `accept`, also used at the start, sets any value from `low` to `high`."""

    def __init__(self, value: float, description: str, *, stops: Iterable[float], low: float, high: float):
        self.low, self.high, self._stops, self._dense = low, high, frozenset(stops), frozenset()
        options = self._labelled(self._stops)
        super().__init__(options=options, value=options[0][1], description=description, **_LOOK)
        self.accept(value)

    def accept(self, value: float) -> None:
        """Set the value; if no stop, it becomes one until the next such call. Raise ValueError outside low … high."""
        if value not in {stop for _, stop in self.options}:
            if not isinstance(value, Real) or isinstance(value, bool) or not self.low <= value <= self.high:
                raise ValueError(f"expected {self._expected()}, got {value!r}")
            self.options = self._labelled({*self._stops, *self._dense, float(value)})
        self.value = value

    def dense(self, stops: Iterable[float]) -> None:
        """Replace the stops added by the last call, which mark places of interest; the value does not change."""
        self._dense = frozenset(stops)
        value, options = self.value, self._labelled({*self._stops, *self._dense, self.value})
        if options != list(self.options):
            with self.hold_sync():
                self.options, self.value = options, value

    def _expected(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def _labelled(self, stops: Iterable[float]) -> list[tuple[str, float]]:
        return [(f"{stop:.5g}", stop) for stop in sorted(stops)]


class DecayKnob(NumberKnob):
    """A slider over natural-log decays from 0 to `low`, logarithmic in |w|, with both ends exact.

    stops: replaces the evenly spaced ones. optional: whether there is also a stop "none", whose value is that string.
    """

    def __init__(
        self,
        value: float | str,
        description: str = "decay",
        *,
        stops: Iterable[float] | None = None,
        optional: bool = False,
        low: float = -math.inf,
    ):
        if stops is None:
            steps = range(_WEAKEST * _STOPS_PER_DECADE, _STRONGEST * _STOPS_PER_DECADE + 1)
            stops = {-float(f"{10 ** (i / _STOPS_PER_DECADE):.3g}") for i in steps}
        self._first = [(label(NONE), NONE)] if optional else []
        stops = {stop for stop in stops if stop >= low} | {0.0, low}
        super().__init__(value, description, stops=stops, low=low, high=0.0)

    def _expected(self) -> str:
        least = "" if self.low == -math.inf else f" and >= {self.low:g}"
        return f"a natural-log decay <= 0{least}{f' or {NONE!r}' if self._first else ''}"

    def _labelled(self, stops: Iterable[float | str]) -> list[tuple[str, float | str]]:
        return self._first + super()._labelled({*stops} - {NONE})[::-1]


def labelled(options: Mapping | Iterable) -> list:
    """Convert options, or values by their labels, to (label, value) pairs with labels in the current language."""
    if not isinstance(options, Mapping):
        return [(label(x[0]), x[1]) if isinstance(x, tuple) else x for x in options]
    pairs = [(label(words), value) for words, value in options.items()]
    return list(options) if all(words == value for words, value in pairs) else pairs


def choice(value, options: Mapping | Iterable, description: str) -> widgets.Dropdown:
    """Return a drop-down list of options: values, or values by their labels. A value None would be shown as a blank."""
    return widgets.Dropdown(options=labelled(options), value=value, description=description, **_LOOK)


def switch(value: bool, description: str) -> widgets.Checkbox:
    """Return a check box for a boolean setting."""
    return widgets.Checkbox(value=value, description=description, indent=True, **_LOOK)


def steps(value, options: Iterable, description: str) -> widgets.SelectionSlider:
    """Return a slider over a few values, such as powers of two; options as in `labelled`."""
    return widgets.SelectionSlider(options=labelled(options), value=value, description=description, **_LOOK)


def integer(value: int, low: int, high: int, description: str, step: int = 1) -> widgets.IntSlider:
    """Return a slider over the whole numbers low, low + step, … up to high."""
    return widgets.IntSlider(value=value, min=low, max=high, step=step, description=description, **_LOOK)


def number(value: float, low: float, high: float, description: str, step: float | None, log: bool) -> NumberKnob:
    """Return a slider from low to high with stops `step` apart (None: a fortieth of it) or, with log, ten per
    decade."""
    if log:
        decades = math.log10(high / low)
        stops = {float(f"{low * 10 ** (i / 10):.2g}") for i in range(round(10 * decades))} | {high}
    else:
        step = step or (high - low) / 40
        stops = {round(low + i * step, 10) for i in range(round((high - low) / step))} | {high}
    return NumberKnob(value, description, stops=stops, low=low, high=high)


def operator_choice(value: str, names: Iterable[str] = tuple(OPERATORS)) -> widgets.Dropdown:
    """Return a drop-down list of operators by their labels; names: which, default all."""
    return choice(value, {OPERATORS[name].label: name for name in names}, "operator")


def stops_of(knob: widgets.Widget) -> list:
    """Return every value that a slider or list offers, in its order."""
    if isinstance(knob, widgets.IntSlider):
        return list(range(knob.min, knob.max + 1, knob.step))
    return [option[1] if isinstance(option, tuple) else option for option in knob.options]


def assign(knob: widgets.Widget, name: str, value) -> None:
    """Set a knob's value from code. Raise ValueError with its name, the values expected and the one received."""
    try:
        if hasattr(knob, "accept"):
            knob.accept(value)
        elif isinstance(knob, (widgets.IntSlider, widgets.BoundedIntText)):
            if isinstance(value, bool) or int(value) != value or not knob.min <= value <= knob.max:
                raise ValueError(f"expected a whole number from {knob.min} to {knob.max}, got {value!r}")
            knob.value = int(value)
        elif hasattr(knob, "options"):
            values = stops_of(knob)
            if value not in values:
                raise ValueError(f"expected one of {', '.join(map(str, values))}, got {value!r}")
            knob.value = value
        else:
            knob.value = value
    except (TypeError, ValueError, TraitError) as error:
        raise ValueError(f"{name}: {error}") from None
