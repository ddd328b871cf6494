"""A phase diagram: where on a grid of settings a computation is finite, how wrong it is there, and the law's border."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from . import style
from .canvas import Canvas
from .heatmap import HeatMap

_ERRORS = (-8, 0)  # powers of ten
_OUTLINE = [withStroke(linewidth=3.6, foreground="white")]


class Map(NamedTuple):
    """What was measured on a grid of rows (the last one on top) and columns, and what the law says of each row."""

    rows: Sequence
    """The values of the vertical axis."""
    decay: np.ndarray
    """|log decay| of the columns, evenly spaced in its logarithm."""
    share: np.ndarray
    """[rows, columns]: share of the tensor's values that are finite; NaN where nothing was measured."""
    error: np.ndarray | None
    """[rows, columns]: relative L2 error against float64; None where only finiteness was measured."""
    law: np.ndarray
    """[rows]: the largest |log decay| the law allows, inf where it allows all."""

    @property
    def broken(self) -> np.ndarray:
        """The cells that hold a non-finite value."""
        return self.share < 1

    @property
    def predicted(self) -> np.ndarray:
        """The cells in which the law expects one."""
        return self.decay > self.law[:, None]


class PhaseFigure:
    """The measurement as a map, the law as a line over it; `update` redraws in place."""

    def __init__(self):
        self.canvas = Canvas(9.2, 4.3)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.98, "", va="top", fontsize=11, fontweight="bold")
            self._subtitle = figure.text(0.012, 0.92, "", va="top", fontsize=9.5, color=style.GREY)
            self.ax = ax = figure.add_axes((0.075, 0.125, 0.7, 0.715))
            self._map = HeatMap(self.canvas, ax, vmin=_ERRORS[0], vmax=_ERRORS[1])
            (self._law,) = ax.plot([], [], path_effects=_OUTLINE, zorder=3, **style.LAW)
            bar = self._map.colorbar(figure.add_axes((0.8, 0.125, 0.016, 0.43)), "relative error against float64")
            ticks = range(_ERRORS[0], _ERRORS[1] + 1, 2)
            bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])
            figure.legend(
                handles=[
                    Line2D([], [], label="law", **style.LAW),
                    Patch(linewidth=0, label="not finite", **style.NAN),
                    Patch(facecolor=style.FINITE, label="finite"),
                    Patch(facecolor=style.EMPTY, label="not measured"),
                ],
                loc="upper left", bbox_to_anchor=(0.795, 0.85), borderaxespad=0, handlelength=2.4, labelspacing=0.7,
            )  # fmt: skip
        self.canvas.labels(self._title, self._subtitle)
        self.canvas.moving(self._law)

    def update(self, *, title: str, subtitle: str, across: str, up: str, measured: Map) -> None:
        """across, up: what the two axes are, with units."""
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        rows, columns = measured.share.shape
        # Row 0 belongs at the bottom, as on any axis that grows upwards.
        values = np.full((rows, columns), np.nan) if measured.error is None else _log10(measured.error)
        known = ~np.isnan(measured.share)
        values = np.where(measured.broken, np.nan, values)
        finite = known & ~measured.broken & np.isnan(values)
        self._map.update(values[::-1], empty=~known[::-1], finite=finite[::-1])

        step = np.log(measured.decay[-1] / measured.decay[0]) / (columns - 1)
        place = lambda decay: np.log(np.asarray(decay) / measured.decay[0]) / step  # noqa: E731
        edges = np.arange(rows, -1, -1) - 0.5
        with np.errstate(invalid="ignore"):
            border = np.clip(place(measured.law), -1, columns)
        self._law.set_data(np.repeat(border, 2), np.repeat(edges, 2)[1:-1])
        self._ticks(place, measured, across, up)

    def _ticks(self, place, measured: Map, across: str, up: str) -> None:
        rows = len(measured.rows)
        asked = (across, up, tuple(measured.rows), tuple(measured.decay))
        if asked == getattr(self, "_asked", None):
            return
        self._asked = asked
        low, high = (np.log10(measured.decay[end]) for end in (0, -1))
        decades = np.arange(np.ceil(low), np.floor(high) + 1)
        self.ax.set_xticks(place(10**decades), [f"{10**decade:g}" for decade in decades])
        every = -(-rows // 24)
        self.ax.set_yticks(np.arange(rows - 1, -1, -1)[::every], [str(row) for row in measured.rows][::every])
        self.ax.set(xlabel=across, ylabel=up)
        self.canvas.stale()


def _log10(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.log10(x), *_ERRORS)
