"""Marks over maps and plots: cells of one kind, rings around few, bars, labels, and grids of cells to point at."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from . import style
from .canvas import Canvas
from .heatmap import HeatMap, boxes, outline, thinnest


def whole_ticks(ax: Axes) -> Axes:
    """Put a few ticks at whole numbers of both axes; return `ax`."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    return ax


def name_rows(ax: Axes, names: Collection[str], **look) -> None:
    """Label the rows 0, 1, … of the vertical axis, without tick marks. look: properties of the texts."""
    ax.set_yticks(range(len(names)), list(names), **look)
    ax.tick_params(axis="y", length=0)


class Marked:
    """Cells of one kind, filled or hatched over a map. `update` takes a boolean matrix of the map's shape."""

    def __init__(self, canvas: Canvas, ax: Axes, *, zorder: float = 1.6, **look):
        self._ax = ax
        self._patch = PathPatch(Path(np.empty((0, 2))), zorder=zorder, **{"linewidth": 0, **look})
        ax.add_patch(self._patch)
        canvas.moving(self._patch)

    def update(self, mask: np.ndarray) -> None:
        mask = np.asarray(mask)
        self._patch.set_visible(bool(mask.any()))
        if mask.any():
            self._patch.set_path(outline(mask, np.ones(2), thinnest(self._ax)))


class Ring:
    """A ring with a label around cells that are too few or too small to be seen. It is hidden if the cells span more
    than `most` pixels in either direction."""

    def __init__(self, canvas: Canvas, ax: Axes, *, colour: str = style.BROKEN, most: float = 22.0):
        self._ax, self._most = ax, most
        self._ring = ax.add_patch(
            Ellipse((0, 0), 1, 1, facecolor="none", edgecolor=colour, linewidth=2, zorder=7, clip_on=False)
        )
        self._word = ax.text(0, 0, "", color=colour, fontsize=9, fontweight="bold", va="center", zorder=8)
        self._word.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1})
        for artist in canvas.moving(self._ring, self._word):
            artist.set_visible(False)

    def update(self, mask: np.ndarray, word: str = "") -> None:
        """Draw the ring around the true cells of a matrix of the map's shape; hide it if there are none, or enough to
        be seen."""
        rows, columns = np.nonzero(np.asarray(mask))
        shown = len(rows) > 0
        if shown:
            first = columns.min() - 0.5, rows.min() - 0.5
            last = columns.max() + 0.5, rows.max() + 0.5
            # Pixels per unit of the axes, in either direction.
            scale = np.abs(np.diff(self._ax.transData.transform([(0, 0), (1, 1)]), axis=0)[0])
            size = np.subtract(last, first) * scale
            shown = bool((size <= self._most).all())
        for artist in (self._ring, self._word):
            artist.set_visible(shown)
        if shown:
            middle = np.add(first, last) / 2
            across, down = np.maximum(1.5 * size, 14) / scale
            self._ring.set(center=middle, width=across, height=down)
            # The label lies on the side with more room, within the axes.
            low, high = sorted(self._ax.get_xlim())
            left = middle[0] > (low + high) / 2
            low, high = sorted(self._ax.get_ylim())
            inside = 11 / scale[1]
            self._word.set_text(word)
            self._word.set_ha("right" if left else "left")
            self._word.set_position(
                (
                    middle[0] + (-1 if left else 1) * (across / 2 + 4 / scale[0]),
                    min(max(middle[1], low + inside), high - inside),
                )
            )


class NonFiniteRings:
    """Two rings, around the NaN and around the infinities of a map where these are too few to be seen."""

    def __init__(self, canvas: Canvas, ax: Axes):
        self._rings = {
            kind: Ring(canvas, ax, colour=look["edgecolor"]) for kind, look in (("NaN", style.NAN), ("inf", style.INF))
        }

    def update(self, values: np.ndarray) -> None:
        for (word, ring), kind in zip(self._rings.items(), (np.isnan, np.isinf), strict=True):
            ring.update(kind(np.asarray(values)), word)


class Bars:
    """A bar at every whole number, all drawn as one path. look: its properties."""

    def __init__(self, canvas: Canvas, ax: Axes, *, horizontal: bool = False, thick: float = 0.8, **look):
        self._horizontal, self._thick = horizontal, thick
        self.patch = PathPatch(Path(np.empty((0, 2))), **{"linewidth": 0, "zorder": 2, **look})
        ax.add_patch(self.patch)
        canvas.moving(self.patch)

    def update(self, ends: np.ndarray, begin: float = 0.0) -> None:
        """Redraw bars from `begin` to each of `ends` [N]; one that ends where it begins, or at NaN, is left out."""
        ends = np.asarray(ends, dtype=np.float64)
        at = np.flatnonzero(~np.isnan(ends) & (ends != begin))
        self.patch.set_visible(len(at) > 0)
        across, along = (at - self._thick / 2, at + self._thick / 2), (begin, ends[at])
        self.patch.set_path(boxes(*along, *across) if self._horizontal else boxes(*across, *along))


class LabelledBars:
    """Horizontal bars along an axis from 0 to 1, each with a label behind it. They are the rows of the map `name`."""

    def __init__(
        self, canvas: Canvas, ax: Axes, name: str, colours: list[str], *, thick: float = 0.6, size: float = 9,
        gap: float = 0.03,
    ):  # fmt: skip
        rows, self._gap = range(len(colours)), gap
        ax.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xticks=[])
        ax.spines["bottom"].set_visible(False)
        self._bars = canvas.moving(*ax.barh(rows, [0.0] * len(rows), height=thick, color=colours))
        self._labels = canvas.moving(*(ax.text(0, row, "", va="center", fontsize=size) for row in rows))
        CellGrid(canvas, ax, name, len(rows), 1)

    def update(self, lengths: Iterable[float], labels: Iterable[str]) -> None:
        for bar, text, length, label in zip(self._bars, self._labels, lengths, labels, strict=True):
            bar.set_width(length)
            text.set(text=label, x=length + self._gap)


class CellGrid:
    """An invisible grid of cells to point at, over axes of any scale: equal rows and columns from the upper left, as
    the map `name`."""

    def __init__(self, canvas: Canvas, ax: Axes, name: str, rows: int = 0, columns: int = 0):
        self._canvas, self._name = canvas, name
        self._ax = canvas.figure.add_axes(ax.get_position())
        self._ax.set_axis_off()
        self.update(rows, columns)

    def update(self, rows: int, columns: int) -> None:
        """Change the number of rows and columns; if either is 0, nothing can be pointed at."""
        self._ax.set_visible(rows > 0 and columns > 0)
        if not self._ax.get_visible():
            return
        self._ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
        self._canvas.pointable(self._name, self._ax, rows, columns)


class Strip:
    """A `HeatMap` with a label in each cell. `update` redraws it in place.

    rows, columns: the largest number of cells. size: font size of the labels in points. options: those of `HeatMap`."""

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

        values [rows, columns]: what the colours show. words: labels, by row and column. empty: as in
        `HeatMap.update`."""
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
