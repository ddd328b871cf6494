"""Which entries of a state a mask lets through, tile by tile, and how many it gets wrong at every size."""

import numpy as np
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from . import style
from .canvas import Canvas
from .heatmap import HeatMap, outline

MISSING = {"facecolor": "#9CC7E3", "hatch": "////", "edgecolor": style.BLUE}
OUTSIDE = {"facecolor": "#F7E3B5", "hatch": "\\\\\\\\", "edgecolor": "#B07A00"}
RIGHT = "#F4F8FB"


class TileFigure:
    """Persistent: `update` redraws in place. most: the largest K and V of the map on the right."""

    def __init__(self, most: int):
        self.canvas = Canvas(9.0, 3.9)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.975, "", va="top", fontsize=10.5, fontweight="bold")
            self._draw_tiles(figure.add_axes((0.065, 0.235, 0.4, 0.6)))
            self._draw_sizes(
                figure.add_axes((0.58, 0.235, 0.33, 0.6)), figure.add_axes((0.925, 0.235, 0.014, 0.6)), most
            )
        self.canvas.labels(self._title)

    def _draw_tiles(self, ax) -> None:
        self._ax = ax
        ax.set(xlabel="value v", ylabel="key k")
        ax.set_title("the state in memory, tile by tile")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        self._inside = ax.add_patch(Rectangle((-0.5, -0.5), 1, 1, facecolor=RIGHT, linewidth=0, zorder=1))
        ax.set_facecolor(style.EMPTY)
        self._kinds = []
        for look in (MISSING, OUTSIDE):
            patch = ax.add_patch(PathPatch(Path(np.empty((0, 2))), zorder=2, **look))
            patch.set_linewidth(0)
            self._kinds.append(patch)
        (self._edges,) = ax.plot([], [], color=style.GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=3)
        self._border = ax.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, linewidth=1.6, zorder=4))
        self._refused = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center", fontsize=10, zorder=5)
        words = ("in the state, not loaded: read as 0", "not in the state, loaded", "as it should be", "tile")
        handles = [*self._kinds, Patch(facecolor=RIGHT, edgecolor=style.GREY, linewidth=0.6), self._edges]
        ax.legend(handles, words, loc="upper left", bbox_to_anchor=(-0.13, -0.19), ncols=2, columnspacing=1.2)
        self.canvas.moving(self._inside, *self._kinds, self._edges, self._border, *ax.spines.values(), self._refused)

    def _draw_sizes(self, ax, bar, most: int) -> None:
        ax.set_title("wrong entries at every size (law)")
        ax.set(xlabel="V", ylabel="K")
        self._sizes = HeatMap(self.canvas, ax)
        bar = self._sizes.colorbar(bar, "")
        bar.locator = MaxNLocator(5, integer=True)
        self._most = most
        self._bar = bar
        for axis in (ax.xaxis, ax.yaxis):
            sizes = range(16, most + 1, 16)
            axis.set_ticks([size - 1 for size in sizes], sizes)
        self._here = [
            ax.plot([0], [0], "o", markersize=9, markerfacecolor="none", markeredgecolor=colour, mew=width, zorder=6)[0]
            for colour, width in ((style.BLACK, 3.5), ("white", 1.6))
        ]
        self._sizes_refused = ax.text(
            0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center", fontsize=10, zorder=5
        )
        self.canvas.moving(*self._here, self._sizes_refused)

    def update(
        self, *, title: str, size: tuple[int, int], tile: tuple[int, int], loaded=None, counts=None, refused: str = ""
    ) -> None:
        """size: (K, V); tile: (BK, BV); loaded: what the mask lets through, boolean [K, V] rounded up to whole tiles.

        counts: wrong entries at every size, [most, most] from K, V = 1. Without the two, `refused` says why.
        """
        self._title.set_text(title)
        (K, V), (BK, BV) = size, tile
        rows, columns = -(-K // BK) * BK, -(-V // BV) * BV
        limits = (-0.5, columns - 0.5), (rows - 0.5, -0.5)
        if (self._ax.get_xlim(), self._ax.get_ylim()) != limits:
            self._ax.set(xlim=limits[0], ylim=limits[1])
            self.canvas.stale()
        inside = np.zeros((rows, columns), bool)
        inside[:K, :V] = True
        loaded = inside if loaded is None else np.asarray(loaded)
        for patch, mask in zip(self._kinds, (inside & ~loaded, loaded & ~inside), strict=True):
            patch.set_path(outline(mask, np.ones(2)))
            patch.set_visible(bool(mask.any()))
        for patch in (self._inside, self._border):
            patch.set_bounds(-0.5, -0.5, V, K)
        self._edges.set_data(*_grid(rows, columns, BK, BV))
        self._refused.set_text(refused)
        self._sizes_refused.set_text(refused and "no size at all")

        shown = np.zeros((self._most, self._most)) if counts is None else np.asarray(counts)
        top = max(1.0, shown.max())
        if self._sizes.colours.norm.vmax != top:
            self._sizes.colours.set_clim(0, top)
            self.canvas.stale()
        self._sizes.update(shown, empty=np.full(shown.shape, counts is None))
        for mark in self._here:
            mark.set_data([V - 1], [K - 1])
            mark.set_visible(counts is not None)


def _grid(rows: int, columns: int, BK: int, BV: int) -> tuple[list[float], list[float]]:
    """The inner edges of the tiles as one broken line."""
    gap = [np.nan]
    across = [(y - 0.5) for y in range(BK, rows, BK)]
    down = [(x - 0.5) for x in range(BV, columns, BV)]
    x = [part for _ in across for part in (-0.5, columns - 0.5, *gap)] + [part for x in down for part in (x, x, *gap)]
    y = [part for y in across for part in (y, y, *gap)] + [part for _ in down for part in (-0.5, rows - 0.5, *gap)]
    return x, y
