"""A phase diagram: where a computation is finite on a grid of settings, its error there, and the predicted border."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter

from ..language import Words
from ..numerics.arguments import one_of
from ..numerics.sweep import Sweep
from ..numerics.sweep_workers import in_words
from . import Canvas, HeatMap, style
from .canvas import WIDE

_ERRORS = (-8, 0)  # ends of the scale, powers of ten
_OUTLINE = [withStroke(linewidth=3.6, foreground="white")]
_RAISED = {"linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2.2, "color": style.BLACK}
_PIXELS = 1.5  # width of the narrowest cell of a map

WORDS = Words() | {
    "law": "law",
    "not finite": "not finite",
    "finite": "finite",
    "not measured": "not measured",
    "raised": "raised an error",
    "wrong": "law is wrong",
    "error": "error against float64",
    "every": "every tensor",
    "where": "{what}: where it is finite",
    "how wrong": "{what}: where it is finite, and how wrong",
    "line": "the line is the law: finite to its left",
}
"""The texts of the picture that do not depend on the data."""


@dataclass(frozen=True)
class Map:
    """Measurements on a grid of rows (the last one on top) and columns, and each row's predicted limit (`law`)."""

    rows: Sequence
    """The values of the vertical axis."""
    decay: np.ndarray
    """|log decay| of the columns, increasing; they need not be evenly spaced."""
    share: np.ndarray
    """[rows, columns]: share of the tensor's values that are finite; NaN where nothing was measured."""
    error: np.ndarray | None
    """[rows, columns]: relative L2 error against float64; None where only finiteness was measured."""
    law: np.ndarray
    """[rows]: the largest |log decay| that the law allows, inf where it allows all; NaN where there is no law."""
    raised: np.ndarray | None = None
    """[rows, columns]: whether an error was raised in place of a measurement; None if none was."""

    @property
    def known(self) -> np.ndarray:
        """The cells that were measured, boolean [rows, columns]."""
        return ~np.isnan(self.share)

    @property
    def broken(self) -> np.ndarray:
        """The cells with a non-finite value, boolean [rows, columns]."""
        return self.share < 1

    @property
    def predicted(self) -> np.ndarray:
        """The cells whose |log decay| exceeds the predicted limit, boolean [rows, columns]."""
        return self.decay > self.law[:, None]

    @property
    def wrong(self) -> np.ndarray:
        """The measured cells where `predicted` and `broken` differ, boolean [rows, columns]; none without a law."""
        return self.known & (self.predicted != self.broken) & ~np.isnan(self.law)[:, None]

    @property
    def distance(self) -> np.ndarray:
        """[rows, columns]: the ratio, >= 1, of each cell's decay and its row's limit (`law`); inf if that is inf."""
        with np.errstate(divide="ignore"):
            return np.exp(np.abs(np.log(self.decay) - np.log(self.law)[:, None]))

    @property
    def edges(self) -> np.ndarray:
        """The |log decay| at which columns begin and end, [columns + 1]: the geometric mean of two neighbours."""
        log = np.log(self.decay)
        middle = (log[1:] + log[:-1]) / 2
        return np.exp(np.concatenate(([2 * log[0] - middle[0]], middle, [2 * log[-1] - middle[-1]])))


class PhaseFigure:
    """The measurements as the map "cells", with the predicted limits as a line over it. `update` redraws in place.

    law, raised: whether the legend explains the line of predicted limits, and cells in which an error was raised."""

    def __init__(self, width: float = 9.4, *, law: bool = True, raised: bool = False):
        wide = width >= WIDE
        # Pixels around the map.
        height, left, top, right, bottom = (390, 64, 50, 190, 50) if wide else (340, 64, 68, 64, 50)
        across, down = 100 * width - left - right, height - top - bottom
        self.canvas = canvas = Canvas(width, height / 100)
        self._columns, self._asked = round(across / _PIXELS), None
        with style.context():
            self._title = canvas.text(0.04, 0.04, va="top", fontsize=10)
            self._subtitle = canvas.text(0.04, 0.22, va="top", fontsize=9, color=style.GREY)
            self.ax = ax = canvas.axes(*(x / 100 for x in (left, top, across, down)))
            self._map = HeatMap(canvas, ax, vmin=_ERRORS[0], vmax=_ERRORS[1])
            self._law = self.canvas.line(ax, path_effects=_OUTLINE, zorder=3, **style.LAW)
            self._wrong = self.canvas.line(
                ax, linestyle="", marker="X", markersize=8, color=style.BLUE, markeredgecolor="white", zorder=4
            )
            self._raised = self.canvas.line(ax, zorder=4, **_RAISED)
            ax.tick_params(axis="x", which="major", length=7, pad=1)
            ax.tick_params(which="minor", length=3)
            size = (0.42 if wide else 1.0) * down
            gap = 100 * width - right + 14
            beside = canvas.axes(*(x / 100 for x in (gap, top + down - size, 12, size)))
            self._bar = bar = self._map.colorbar(beside, WORDS["error"] if wide else "")
            ticks = range(_ERRORS[0], _ERRORS[1] + 1, 2)
            bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])
            handles = [
                Line2D([], [], label=WORDS["law"], **style.LAW),
                Patch(linewidth=0, label=WORDS["not finite"], **style.NAN),
                Patch(facecolor=style.FINITE, label=WORDS["finite"]),
                Patch(facecolor=style.EMPTY, label=WORDS["not measured"]),
                Line2D([], [], linestyle="", marker="X", markersize=8, color=style.BLUE, label=WORDS["wrong"]),
            ]
            handles += [Line2D([], [], label=WORDS["raised"], **_RAISED)] * raised
            x, y = (gap - 6, top) if wide else (left - 8, 38)
            canvas.legend(
                *(each for n, each in enumerate(handles) if (wide or n != 3) and (law or n not in (0, 4))),
                loc="upper left", at=(x / 100, y / 100), ncols=1 if wide else 4, borderaxespad=0, handlelength=2,
                labelspacing=0.6, columnspacing=1.2, handletextpad=0.6,
            )  # fmt: skip
        canvas.labels(self._title, self._subtitle)

    def update(self, *, title: str, subtitle: str, across: str, up: str, measured: Map) -> None:
        """Redraw. across, up: the labels of the two axes, with units."""
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        edges = np.log(measured.edges)
        scale = self._columns / (edges[-1] - edges[0])
        edges = (edges - edges[0]) * scale - 0.5  # in pixels of the map
        self._place = lambda decay: (np.log(decay) - np.log(measured.edges[0])) * scale - 0.5
        cells = np.searchsorted(edges, np.arange(self._columns), side="right") - 1

        # Row 0 belongs at the bottom, as on any axis that grows upwards.
        values = np.full(measured.share.shape, np.nan) if measured.error is None else _log10(measured.error)
        values = np.where(measured.broken, np.nan, values)
        finite = measured.known & ~measured.broken & np.isnan(values)
        values, empty, finite = (x[::-1, cells] for x in (values, ~measured.known, finite))
        self._map.update(values, empty=empty, finite=finite)

        if self._bar.ax.get_visible() != (measured.error is not None):
            self._bar.ax.set_visible(measured.error is not None)
            self.canvas.stale()
        rows = len(measured.rows)
        row, column = np.nonzero(measured.wrong)
        self._wrong.set_data((edges[column] + edges[column + 1]) / 2, rows - 1 - row)
        row, column = np.nonzero(np.zeros_like(measured.known) if measured.raised is None else measured.raised)
        self._raised.set_data((edges[column] + edges[column + 1]) / 2, rows - 1 - row)
        between = np.arange(rows, -1, -1) - 0.5
        with np.errstate(invalid="ignore"):
            border = np.clip(self._place(measured.law), -1, self._columns)
        self._law.set_data(np.repeat(border, 2), np.repeat(between, 2)[1:-1])
        self._ticks(measured, edges, across, up)

    def _ticks(self, measured: Map, edges: np.ndarray, across: str, up: str) -> None:
        rows = len(measured.rows)
        asked = (across, up, tuple(measured.rows), tuple(measured.decay))
        if asked == self._asked:
            return
        self._asked = asked
        self.canvas.pointable("cells", self.ax, rows, len(measured.decay), edges)
        low, high = (np.log10(measured.decay[end]) for end in (0, -1))
        decades = np.arange(np.ceil(low), np.floor(high) + 1)
        self.ax.set_xticks(self._place(10**decades), map(style.power, decades))
        self.ax.set_xticks(self._place(measured.decay), minor=True)
        self.ax.xaxis.set_minor_formatter(NullFormatter())
        every = -(-rows // 16)
        self.ax.set_yticks(np.arange(rows - 1, -1, -1)[::every], [str(row) for row in measured.rows][::every])
        self.ax.set(xlabel=across, ylabel=up)
        self.canvas.stale()


def phase(
    sweep: Sweep,
    across: str = "decay",
    *,
    tensor: str | None = None,
    law: Callable[[object], float] | Sequence[float] | None = None,
) -> PhaseFigure:
    """Draw a sweep over two axes as a phase diagram with predicted limits; `.canvas` is the picture.

    across: the axis of (log) decays, of either sign, evenly spaced in the logarithm of their size.
    tensor: whose finiteness and error to draw; default: whether any tensor is non-finite, and the largest error.
    law: the largest |decay| that is finite, as a function of the other axis's value, or a number for each.
    Raises ValueError for a sweep over other than two axes or without tensors, and for decays that are not so spaced."""
    if len(sweep.axes) != 2:
        raise ValueError(f"sweep: expected a sweep over two axes, got {', '.join(sweep.axes)}")
    one_of("across", across, sweep.axes)
    up = next(name for name in sweep.axes if name != across)
    names = sweep.tensors if tensor is None else (one_of("tensor", tensor, sweep.tensors),)
    if not names:
        raise ValueError("sweep: expected a sweep of tensors, got none that says which of its values are finite")
    decay = np.abs(np.asarray(sweep.axes[across], dtype=float))
    order = np.argsort(decay)
    steps = np.diff(np.log(decay[order])) if (decay > 0).all() and len(decay) > 1 else np.array([np.nan])
    if not np.allclose(steps, steps[0], rtol=1e-3) or not steps[0] > 0:
        raise ValueError(f"across: expected decays evenly spaced in their logarithm, got {sweep.axes[across]}")
    rows = sweep.axes[up]
    turned = list(sweep.axes) != [up, across]
    share, error = (worst(sweep, names, kind) for kind in _KINDS)
    share, error = (None if x is None else (x.T if turned else x)[:, order] for x in (share, error))
    limits = [np.nan] * len(rows) if law is None else [law(x) for x in rows] if callable(law) else list(law)
    title = WORDS.say("where" if error is None else "how wrong", what=tensor or WORDS["every"])
    raised = np.vectorize(bool, otypes=[bool])(sweep.raised)
    raised = (raised.T if turned else raised)[:, order]
    figure = PhaseFigure(law=law is not None, raised=bool(raised.any()))
    figure.update(
        title=title, across=f"|{across}|", up=up,
        subtitle="" if law is None else WORDS["line"],
        measured=Map([in_words(x) for x in rows], decay[order], share, error, np.asarray(limits, dtype=float), raised),
    )  # fmt: skip
    return figure


_KINDS = {"finite": np.min, "l2": np.max}


def worst(sweep: Sweep, names: Sequence[str], kind: str) -> np.ndarray | None:
    """Return, over several tensors and at each cell, the lowest share of finite values (kind "finite") or the largest
    error ("l2"); None if the sweep did not measure that."""
    grids = [sweep.grids[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in sweep.grids]
    return _KINDS[kind](grids, axis=0) if grids else None


def _log10(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.log10(x), *_ERRORS)
