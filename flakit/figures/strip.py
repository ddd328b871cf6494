"""A small heat map with a label in each cell, such as memory addresses."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from . import style
from .canvas import Canvas
from .heatmap import HeatMap


class Strip:
    """A `HeatMap` with a label in each cell. Persistent: `update` redraws in place.

    rows, columns: the largest number of cells. size: font size of the labels in points. options: those of `HeatMap`.
    """

    def __init__(self, canvas: Canvas, ax: Axes, rows: int, columns: int, *, size: float = 8.5, **options):
        self._heat = HeatMap(canvas, ax, **options)
        self._words = [
            [ax.text(x, y, "", ha="center", va="center_baseline", fontsize=size, zorder=5) for x in range(columns)]
            for y in range(rows)
        ]
        # The cells below them change, so that these texts cannot be restored as pixels.
        canvas.moving(*(text for row in self._words for text in row))

    def update(self, values: np.ndarray, words: Sequence[Sequence[str]], empty: np.ndarray | None = None) -> None:
        """Redraw. Cells outside `values` and `words` stay blank; NaN is hatched.

        values [rows, columns]: colours. words: labels, by row and column. empty: as in `HeatMap.update`.
        """
        values = np.asarray(values, dtype=np.float64)
        self._heat.update(values, empty=empty)
        low, high = self._heat.colours.get_clim()
        for y, row in enumerate(self._words):
            for x, text in enumerate(row):
                there = y < len(words) and x < len(words[y])
                text.set_visible(there)
                if there:
                    dark = values[y, x] < (low + high) / 2 and not (empty is not None and empty[y, x])
                    text.set(text=words[y][x], color="white" if dark else style.BLACK)
