"""A case's knobs: the keyword arguments of its `show`, read from its signature.

Each knob's values are declared with its type, and nowhere else:

    def show(*, w: Annotated[float, DECAY] = -8.0, block: Annotated[int, Range(2, 64)] = 16,
             mask: Annotated[str, MASKS] = "where", exclusive: bool = False) -> Shown:
"""

import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Range:
    """The numbers from low to high, the valid values of a knob. step: distance between the stops of a slider; log:
    stops are logarithmic. Values between stops are valid too."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}{', a natural-log decay' if self.decay else ''}"

    @property
    def decay(self) -> bool:
        """Whether the range is one of natural-log decays: it goes from below 0 to 0."""
        return self.low < self.high == 0


DECAY = Range(-math.inf, 0.0)
FINITE_DECAY = Range(-1e3, 0.0)
"""Natural-log decays, with and without -inf."""


@dataclass(frozen=True)
class Knob:
    """One keyword argument of a case's `show`: its default, its types, and its choices or its range of numbers."""

    default: object
    kinds: tuple[type, ...]
    choices: tuple[str, ...] | tuple[int, ...] = ()
    range: Range | None = None

    @property
    def expects(self) -> str:
        numbers = f" {self.range}" if self.range else ""
        words = {
            int: "a whole number" + numbers,
            float: "a number" + numbers,
            bool: "true or false",
            type(None): "none",
        }
        free = [words[kind] for kind in self.kinds if kind in words and not self._chosen(kind)]
        return " or ".join([*map(str, self.choices), *free]) or "a word"

    def parse(self, text: str) -> object:
        """Parse a value as the narrowest of the knob's types that fits. Raises ValueError if none does."""
        for kind in (int, float, bool, type(None), str):  # the narrowest first
            if kind in self.kinds:
                try:
                    return _FROM_TEXT.get(kind, kind)(text)
                except (KeyError, ValueError):
                    pass
        raise ValueError(text)

    def fits(self, value: object) -> bool:
        kind = type(value)
        if self._chosen(kind):
            return value in self.choices
        if kind not in self.kinds and not (kind is int and float in self.kinds):
            return False
        return self.range is None or kind not in (int, float) or value in self.range

    def _chosen(self, kind: type) -> bool:
        """Return whether there are choices and they have type `kind`."""
        return bool(self.choices) and type(self.choices[0]) is kind


_WORDS = {"true": True, "yes": True, "false": False, "no": False}
_FROM_TEXT: dict[type, Callable] = {bool: lambda text: _WORDS[text.lower()], type(None): {"none": None}.__getitem__}


def knobs_of(show: Callable) -> dict[str, Knob]:
    """Return the knobs of a case's `show` by name, from its signature and `Annotated` types."""
    hints, knobs = typing.get_type_hints(show, include_extras=True), {}
    for name, parameter in inspect.signature(show).parameters.items():
        hint, choices, numbers = hints[name], (), None
        if typing.get_origin(hint) is typing.Annotated:
            for metadata in hint.__metadata__:
                if isinstance(metadata, Range):
                    numbers = metadata
                else:
                    choices = tuple(metadata)
            hint = hint.__origin__
        knobs[name] = Knob(parameter.default, typing.get_args(hint) or (hint,), choices, numbers)
    return knobs
