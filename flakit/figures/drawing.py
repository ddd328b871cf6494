"""The base class of a case's or sketch's picture, which is drawn once, redrawn in place, and described in sentences."""

from abc import ABC, abstractmethod
from typing import Any

from . import style
from .canvas import Canvas, Cell


class Drawing(ABC):
    """What a panel asks of a case's or a sketch's picture. `__init__` and `update` run inside `style.context()`.

    The argument `shown` holds the arrays of one setting: a frozen dataclass that the case's `show` or the sketch's
    `compute` returns."""

    canvas: Canvas
    """The canvas, which `__init__` makes. The cells of its maps can be pointed at."""
    _fixed: tuple | None = None

    def __init_subclass__(cls) -> None:
        for name in {"__init__", "update"} & vars(cls).keys():
            setattr(cls, name, style.context()(vars(cls)[name]))

    @abstractmethod
    def __init__(self, width: float):
        """Draw what no setting changes, `width` inches wide."""

    @abstractmethod
    def update(self, shown: Any) -> None:
        """Redraw for a setting in place; `canvas.png()` is then the picture."""

    def changed(self, *values: object) -> bool:
        """Return whether any of these values, on which the parts that do not move depend, changed since the last call.
        If so, the next picture is drawn from scratch."""
        if values == self._fixed:
            return False
        self._fixed = values
        self.canvas.stale()
        return True

    @abstractmethod
    def say(self, shown: Any) -> str:
        """Return sentences on what the picture shows: a panel's readout, and the text for readers who cannot see it."""

    @abstractmethod
    def arithmetic(self, shown: Any, cell: Cell) -> str:
        """Return a line on how the number in a cell is computed."""

    def beside(self, shown: Any, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Return the places to highlight with a cell: map, row and column (None: every row, every column)."""
        return []
