"""The contract of a picture that belongs to a case or a sketch: drawn once, redrawn in place, put into words."""

from abc import ABC, abstractmethod
from typing import Any

from . import style
from .canvas import Canvas, Cell


class Drawing(ABC):
    """What a panel asks of a case's or a sketch's picture. `__init__` and `update` run inside `style.context()`.

    `shown` holds the arrays of one setting: a frozen dataclass, from the case's `show` or the sketch's `compute`.
    """

    canvas: Canvas
    """Made by `__init__`. The cells of its maps can be pointed at."""
    _fixed: tuple | None = None

    def __init_subclass__(cls) -> None:
        for name in {"__init__", "update"} & vars(cls).keys():
            setattr(cls, name, style.context()(vars(cls)[name]))

    @abstractmethod
    def __init__(self, width: float):
        """Draw, `width` inches wide, what no setting changes."""

    @abstractmethod
    def update(self, shown: Any) -> None:
        """Redraw in place; `canvas.png()` is the picture."""

    def changed(self, *values: object) -> bool:
        """Return whether these values, on which the parts that do not move depend, differ from those of the last call.

        If so, the next picture is drawn from scratch.
        """
        if values == self._fixed:
            return False
        self._fixed = values
        self.canvas.stale()
        return True

    @abstractmethod
    def say(self, shown: Any) -> str:
        """Return what the picture shows, in sentences: a panel's readout, and the words for those who do not see it."""

    @abstractmethod
    def arithmetic(self, shown: Any, cell: Cell) -> str:
        """Return how the number in a cell comes about, in one line."""

    def beside(self, shown: Any, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Return the places that light up with a cell: map, row and column, None for all of them."""
        return []
