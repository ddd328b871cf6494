"""Errors of outputs and gradients: those of every tensor side by side, and those of one tensor along two axes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from ..language import Words
from . import Canvas, CellGrid, name_rows, style
from .canvas import WIDE

# Ends of the scale of errors, in powers of ten. 0 is drawn to their left, larger and non-finite errors to the right.
_LOW, _HIGH = -9, 3
_EXACT, _BEYOND, _NON_FINITE = _LOW - 1.7, _HIGH + 1, _HIGH + 2.7

_LOOKS = (
    {"color": style.BLUE, "marker": "o", "linestyle": "-"},
    {"color": style.PURPLE, "marker": "s", "linestyle": (0, (4, 2))},
    {"color": style.GREEN, "marker": "^", "linestyle": (0, (1, 1.3))},
)

WORDS = Words() | {
    "zeros": {True: "worse than\nall zeros", False: "worse\nthan\nzeros"},
    "rounding": {True: "storing the exact result in this dtype", False: "rounding alone"},
    "exact": "exact",
}

ERRORS, PLOTS = "errors", ("upper curves", "lower curves")
"""The maps to point at: the dots, a row per tensor and series; and each plot, with a column per whole number of x."""


class Curves(NamedTuple):
    """A plot: the error (>= 0, inf where something is not finite) of each series along x."""

    title: str
    xlabel: str
    x: Sequence[float] | Sequence[str]  # names are spaced evenly
    errors: Mapping[str, Sequence[float]]
    log: bool = False  # along x
    now: float | None = None  # the knob's value
    note: str = ""  # shown in the middle if there is nothing to draw
    setting: str = ""  # the fixed settings, where there is room
    where: str = ""  # the device


class GradientFigure:
    """Dots for the errors of every tensor, and two plots beside them. `update` redraws in place. series: at most 3
    names with the text shown for each, else ValueError is raised."""

    def __init__(self, series: Mapping[str, str], tensors: Sequence[str], width: float = 9.4):
        if len(series) > len(_LOOKS):
            raise ValueError(f"series: expected at most {len(_LOOKS)}, got {len(series)}")
        self.series, self.tensors = tuple(series), tuple(tensors)
        self.wide = width >= WIDE
        # Inches; the dots, and of the plots the tops, left, width and height.
        if self.wide:
            height, dots, tops, plots = 4.26, (0.86, 0.92, 3.75, 3.02), (0.99, 2.79), (5.35, 3.9, 0.97)
        else:
            height, dots, tops, plots = 3.5, (0.83, 1.05, 2.3, 2.15), (1.05, 2.45), (3.75, 2.05, 0.6)
        self.canvas = Canvas(width, height)
        with style.context():
            self._title = self.canvas.text(0.1, 0.05, va="top", fontsize=10.5, fontweight="bold")
            self._where = self.canvas.text(0.1, 0.26, va="top", fontsize=9)
            self._draw_dots(self.canvas.axes(*dots, framed=True))
            handles = [*(self._dots[name] for name in self.series), self._rounding]
            words = [*series.values(), WORDS["rounding"][self.wide]]
            self.canvas.legend(
                *handles, labels=words, loc="upper left", at=(0.05, 0.4), borderaxespad=0.5, borderpad=0.2,
                ncols=min(len(handles), 4 if self.wide else 2), columnspacing=1.2, handletextpad=0.4, labelspacing=0.2,
            )  # fmt: skip
            left, *size = plots
            self._plots = [
                _Plot(self.canvas, self.canvas.axes(left, top, *size), self.series, name, wide=self.wide)
                for top, name in zip(tops, PLOTS, strict=True)
            ]
        self.canvas.labels(self._title, self._where, self._measure)

    def _draw_dots(self, ax) -> None:
        rows = np.arange(len(self.tensors))
        ax.set(xlim=(_EXACT - 0.6, _NON_FINITE + 0.6), ylim=(len(rows) - 0.5, -0.5))
        self._measure = ax.set_title("", fontsize=9.5, pad=4)
        name_rows(ax, self.tensors)
        ticks = range(_LOW, _HIGH, 3)
        names = ["0", *(f"$10^{{{n}}}$" for n in ticks), f">$10^{{{_HIGH}}}$" if self.wide else "", "inf"]
        ax.set_xticks([_EXACT, *ticks, _BEYOND, _NON_FINITE], names)
        ax.tick_params(axis="x", pad=2)
        for row in rows[1:]:
            ax.axhline(row - 0.5, color="#DDDDDD", linewidth=0.7, zorder=0)
        ax.axvspan(0, _BEYOND + 0.9, color="#F1F1F1", linewidth=0, zorder=0)
        ax.axvspan(_BEYOND + 0.9, _NON_FINITE + 0.6, linewidth=0, zorder=0, **style.INF)
        ax.axvline(0, color=style.GREY, linewidth=0.8, zorder=1)
        ax.text(0.2, -0.44, WORDS["zeros"][self.wide], fontsize=8.5, color=style.GREY, va="top", linespacing=1)
        self._rounding = ax.axvline(0, color=style.BLACK, linestyle=(0, (2, 2)), linewidth=1.1, zorder=1)
        self.canvas.moving(self._rounding)
        self._dots = {}
        for name, look in zip(self.series, _LOOKS, strict=False):
            face = look["color"] if look["marker"] != "s" else "white"
            self._dots[name] = self.canvas.line(
                ax, **look | {"linestyle": "none"}, markersize=5.5, markerfacecolor=face, markeredgewidth=1.6, zorder=3,
                clip_on=False,
            )  # fmt: skip
        CellGrid(self.canvas, ax, ERRORS, len(rows) * len(self.series), 1)

    def lane(self, row: int) -> tuple[str, str]:
        """Return the tensor and the series of a row of the map `ERRORS`."""
        return self.tensors[row // len(self.series)], self.series[row % len(self.series)]

    def update(
        self,
        *,
        title: str,
        where: str,
        measure: str,
        errors: Mapping[tuple[str, str], float],
        rounding: float | None,
        curves: Sequence[Curves],
    ) -> None:
        """Redraw. where: the device that measured, and the date of a recording. measure: what the errors are.

        errors: by (series, tensor); missing where a series has none. rounding: the error that merely storing the exact
        result would have, None where that is not known. curves: of the upper and the lower plot."""
        self._title.set_text(title)
        self._where.set_text(where)
        self._measure.set_text(measure)
        lanes = len(self.series)
        for n, (name, dots) in enumerate(self._dots.items()):
            points = [(row, errors.get((name, tensor))) for row, tensor in enumerate(self.tensors)]
            points = [(row, error) for row, error in points if error is not None]
            dots.set_data([_place(e) for _, e in points], [row + (n + 0.5) / lanes - 0.5 for row, _ in points])
        self._rounding.set_visible(rounding is not None)
        if rounding is not None:
            self._rounding.set_xdata([np.log10(rounding)] * 2)
        for plot, shown in zip(self._plots, curves, strict=True):
            plot.update(shown)


class _Plot:
    """The errors of every series along one axis, whose scales follow the data."""

    def __init__(self, canvas: Canvas, ax, series: Sequence[str], name: str, *, wide: bool):
        self.ax, self.series, self._wide = ax, series, wide
        self._ticks = 9 if wide else 4  # at most, along a logarithmic axis
        self._cells = CellGrid(canvas, ax, name)
        self._scales = self._decades = None
        self._decades_shown = ax.bbox.height // 18
        self._title = ax.set_title("", fontsize=9, linespacing=1.1, pad=4)
        ax.tick_params(pad=2)
        ax.xaxis.set_label_coords(0.5, -24 / ax.bbox.height)
        ax.yaxis.set_label_coords(0, 0.5)
        self._note = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center", color=style.GREY)
        self._bad = ax.add_patch(Rectangle((0, 0.9), 1, 0.1, transform=ax.transAxes, linewidth=0, **style.INF))
        self._now = ax.axvline(0, color=style.BLACK, linestyle=(0, (2, 1)), linewidth=1.2, zorder=1)
        canvas.labels(self._title, ax.xaxis, ax.yaxis)
        canvas.moving(self._note, self._bad, self._now)
        self._lines, self._marks = {}, {}
        for name, look in zip(series, _LOOKS, strict=False):
            self._lines[name] = canvas.line(ax, **look, markersize=5, zorder=3)
            cross = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6}
            self._marks[name] = canvas.line(ax, color=look["color"], linestyle="none", **cross, zorder=4)

    def update(self, shown: Curves) -> None:
        about = f"{shown.title} ({shown.setting})" if self._wide and shown.setting else shown.title
        self._title.set_text(f"{about}\n{shown.where}" if shown.where else about)
        self._note.set_text(shown.note)
        names = bool(len(shown.x)) and isinstance(shown.x[0], str)
        x = np.arange(len(shown.x)) if names else np.asarray(shown.x, dtype=float)
        low, high, exact = _decades([e for errors in shown.errors.values() for e in errors])
        scales = (shown.xlabel, shown.log, tuple(shown.x))
        if scales != self._scales:
            self._scale_x(x, shown, names)
            self._scales = scales
        if (low, high, exact) != self._decades:
            self._scale_y(low, high, exact)
            self._decades = (low, high, exact)
        # Columns can be pointed at where x counts from 0.
        self._cells.update(1, len(x) if x.size and not shown.log and not names else 0)
        any_bad = False
        for name in self.series:
            errors = np.asarray(shown.errors.get(name, ()), dtype=float)
            at = x[: len(errors)]
            bad, zero = ~np.isfinite(errors), errors == 0
            any_bad |= bool(bad.any())
            # An error of 0 is a gap in the line; a line of zeros lies on the lower edge.
            gaps = bad | (zero & (not zero.all()))
            height = np.log10(np.where(gaps | zero, 1.0, errors))
            height = np.where(zero, low, np.clip(height, low, None))
            self._lines[name].set_data(at, np.where(gaps, np.nan, height))
            self._lines[name].set_markersize(5 if len(at) <= 24 else 0)
            self._marks[name].set_data(at[bad], np.full(bad.sum(), high + (high - low) / 11))
        self._bad.set_visible(any_bad)
        self._now.set_visible(shown.now is not None)
        if shown.now is not None:
            self._now.set_xdata([shown.now] * 2)

    def _scale_x(self, x: np.ndarray, shown: Curves, names: bool) -> None:
        axis = self.ax.xaxis
        if shown.log:
            self.ax.set_xlabel(style.logarithmic(shown.xlabel), loc="right")
        else:
            self.ax.set_xlabel(shown.xlabel, loc="center")
        if not x.size:
            axis.set_major_locator(NullLocator())
            return
        if shown.log:
            self.ax.set(xlim=(x.min() / 1.4, x.max() * 1.4), xscale="log")
            ticks = x[:: -(-len(x) // self._ticks)]
            axis.set_major_locator(FixedLocator(ticks))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter("{x:g}")
        else:
            self.ax.set(xscale="linear", xlim=(x.min() - 0.5, x.max() + 0.5))
            axis.set_major_locator(FixedLocator(x) if names else MaxNLocator(min(6, self._ticks), integer=True))
            axis.set_major_formatter((lambda value, _: shown.x[round(value)]) if names else "{x:g}")

    def _scale_y(self, low: float, high: float, exact: bool) -> None:
        """Set the range of decades, with a band above it for non-finite errors. exact: every error is 0 or infinite."""
        self.ax.set_ylim(low - 0.04 * (high - low), high + (high - low) / 6)
        step = next(n for n in (1, 2, 3, 5, 10, 20, 50, 100) if (high - low) / n <= self._decades_shown or n == 100)
        ticks = [low] if exact else np.arange(np.ceil(low / step) * step, high + 0.5, step)
        words = [WORDS["exact"]] if exact else [f"$10^{{{n + 0:.0f}}}$" for n in ticks]  # + 0: no minus before a zero
        self.ax.set_yticks(ticks, words)


def _decades(errors: Sequence[float]) -> tuple[float, float, bool]:
    """Return the lowest and highest power of ten of the finite errors, and whether all errors are 0 or infinite."""
    logs = np.log10([e for e in errors if 0 < e < np.inf])
    if not logs.size:
        return 0.0, 1.0, bool(len(errors))
    # A single error that happens to be 0 does not set the scale.
    low, high = np.floor(np.quantile(logs, 0.02)), np.ceil(logs.max())
    return low, max(high, low + 1), False


def _place(error: float) -> float:
    """Return an error's position on the scale of the dots: log10, or a place of its own if it is 0 or infinite."""
    if not np.isfinite(error):
        return _NON_FINITE
    if error == 0:
        return _EXACT
    return _BEYOND if error > 10**_HIGH else max(np.log10(error), _LOW)
