"""How far outputs and gradients are from the truth: three measures side by side, and the error along two axes below."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullFormatter, NullLocator

from . import style
from .canvas import Canvas

# Powers of ten on the scale of errors; 0 has a place to their left, what is larger and what is not finite to the right.
_LOW, _HIGH = -9, 3
_EXACT, _BEYOND, _NON_FINITE = _LOW - 1.7, _HIGH + 1, _HIGH + 2.7

_LOOKS = (
    {"color": style.BLUE, "marker": "o", "linestyle": "-"},
    {"color": style.VERMILLION, "marker": "s", "linestyle": (0, (4, 2))},
    {"color": style.GREEN, "marker": "^", "linestyle": (0, (1, 1.3))},
)


class Curves(NamedTuple):
    """One of the lower plots: the error (>= 0, inf where something is not finite) of each series along x."""

    title: str
    xlabel: str
    x: Sequence[float] | Sequence[str]  # names are spaced evenly
    errors: Mapping[str, Sequence[float]]
    log: bool = False  # along x
    now: float | None = None  # where the knobs stand
    note: str = ""  # said in the middle when there is nothing to draw


class GradientFigure:
    """Persistent: `update` redraws in place. series and measures give the words shown for each name."""

    def __init__(self, series: Mapping[str, str], tensors: Sequence[str], measures: Mapping[str, str]):
        if len(series) > len(_LOOKS):
            raise ValueError(f"series: expected at most {len(_LOOKS)}, got {len(series)}")
        self.series, self.tensors = tuple(series), tuple(tensors)
        self.canvas = Canvas(9.0, 6.5)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.985, "", va="top", fontsize=10.5, fontweight="bold")
            self._where = figure.text(0.012, 0.952, "", va="top", fontsize=9)
            above = figure.add_gridspec(1, len(measures), left=0.085, right=0.985, top=0.85, bottom=0.505, wspace=0.06)
            self._dots = {}
            axes = above.subplots(sharey=True)
            for ax, (measure, words) in zip(axes, measures.items(), strict=True):
                self._draw_measure(ax, measure, words)
            handles = [*(self._dots["l2", name] for name in self.series), self._rounding]
            words = [*series.values(), "storing the exact result in this dtype"]
            figure.legend(handles, words, loc="upper left", bbox_to_anchor=(0.075, 0.935), ncols=len(handles))
            below = figure.add_gridspec(1, 2, left=0.085, right=0.985, top=0.38, bottom=0.085, wspace=0.2)
            self._plots = [_Plot(self.canvas, ax, self.series) for ax in below.subplots()]
        self.canvas.labels(self._title, self._where)

    def _draw_measure(self, ax, measure: str, words: str) -> None:
        rows = np.arange(len(self.tensors))
        ax.set(title=words, xlim=(_EXACT - 0.6, _NON_FINITE + 0.6), ylim=(len(rows) - 0.5, -0.5))
        ax.set_yticks(rows, self.tensors)
        ticks = range(_LOW, _HIGH, 3)
        names = ["0", *(f"$10^{{{n}}}$" for n in ticks), f">$10^{{{_HIGH}}}$", "inf"]
        ax.set_xticks([_EXACT, *ticks, _BEYOND, _NON_FINITE], names)
        ax.tick_params(axis="y", length=0)
        for row in rows[1:]:
            ax.axhline(row - 0.5, color="#DDDDDD", linewidth=0.7, zorder=0)
        ax.axvspan(0, _BEYOND + 0.9, color="#F1F1F1", linewidth=0, zorder=0)
        ax.axvspan(_BEYOND + 0.9, _NON_FINITE + 0.6, linewidth=0, zorder=0, **style.INF)
        ax.axvline(0, color=style.GREY, linewidth=0.8, zorder=1)
        if measure == "l2":
            ax.text(0.2, -0.42, "worse than\nall zeros", fontsize=7.5, color=style.GREY, va="top")
            self._rounding = ax.axvline(0, color=style.BLACK, linestyle=(0, (2, 2)), linewidth=1.1, zorder=1)
            self.canvas.moving(self._rounding)
        for name, look in zip(self.series, _LOOKS, strict=False):
            (self._dots[measure, name],) = ax.plot(
                [], [], color=look["color"], marker=look["marker"], linestyle="none", markersize=5.5,
                markerfacecolor=look["color"] if look["marker"] != "s" else "white", markeredgewidth=1.6, zorder=3,
                clip_on=False,
            )  # fmt: skip
            self.canvas.moving(self._dots[measure, name])

    def update(
        self,
        *,
        title: str,
        where: str,
        errors: Mapping[tuple[str, str, str], float],
        rounding: float,
        curves: Sequence[Curves],
    ) -> None:
        """where: what ran where, and when if not now.

        errors: by (measure, series, tensor), absent where a series has none.
        rounding: the relative L2 error that storing the exact result would have.
        """
        self._title.set_text(title)
        self._where.set_text(where)
        shift = np.linspace(-0.27, 0.27, len(self.series))
        for (measure, name), dots in self._dots.items():
            found = [(row, errors.get((measure, name, tensor))) for row, tensor in enumerate(self.tensors)]
            found = [(row, error) for row, error in found if error is not None]
            dots.set_data([_place(e) for _, e in found], [row + shift[self.series.index(name)] for row, _ in found])
        self._rounding.set_xdata([np.log10(rounding)] * 2)
        for plot, shown in zip(self._plots, curves, strict=True):
            plot.update(shown)


class _Plot:
    """Errors of every series along one axis, whose scales follow what is shown."""

    def __init__(self, canvas: Canvas, ax, series: Sequence[str]):
        self.canvas, self.ax, self.series = canvas, ax, series
        self._scales = self._decades = None
        ax.spines[["top", "right"]].set_visible(False)
        self._title = ax.set_title("", fontsize=9.5)
        ax.xaxis.set_label_coords(0.5, -30 / ax.bbox.height)
        ax.yaxis.set_label_coords(0, 0.5)
        self._note = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center", color=style.GREY)
        self._bad = ax.add_patch(Rectangle((0, 0.9), 1, 0.1, transform=ax.transAxes, linewidth=0, **style.INF))
        self._now = ax.axvline(0, color=style.BLACK, linestyle=(0, (2, 1)), linewidth=1.2, zorder=1)
        self._lines, self._marks = {}, {}
        for name, look in zip(series, _LOOKS, strict=False):
            (self._lines[name],) = ax.plot([], [], **look, markersize=5, zorder=3)
            (self._marks[name],) = ax.plot(
                [], [], color=look["color"], marker="x", linestyle="none", markersize=6, markeredgewidth=1.6, zorder=4
            )
        canvas.labels(self._title, ax.xaxis, ax.yaxis)
        canvas.moving(self._note, self._bad, self._now, *self._lines.values(), *self._marks.values())

    def update(self, shown: Curves) -> None:
        self._title.set_text(shown.title)
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
        any_bad = False
        for name in self.series:
            errors = np.asarray(shown.errors.get(name, ()), dtype=float)
            at = x[: len(errors)]
            bad, zero = ~np.isfinite(errors), errors == 0
            any_bad |= bool(bad.any())
            # Exact steps are a gap in a line that is not exact; a line of them lies on the lower edge.
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
        self.ax.set_xlabel(shown.xlabel)
        if not x.size:
            axis.set_major_locator(NullLocator())
            return
        if shown.log:
            self.ax.set_xlim(x.min() / 1.4, x.max() * 1.4)
            self.ax.set_xscale("log")
            ticks = x if len(x) <= 9 else x[:: -(-len(x) // 9)]
            axis.set_major_locator(FixedLocator(ticks))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter("{x:g}")
        else:
            self.ax.set_xscale("linear")
            margin = 0.4 if names else 0.02 * (np.ptp(x) or 1)
            self.ax.set_xlim(x.min() - margin, x.max() + margin)
            axis.set_major_locator(FixedLocator(x) if names else MaxNLocator(6, integer=True))
            axis.set_major_formatter((lambda value, _: shown.x[round(value)]) if names else "{x:g}")

    def _scale_y(self, low: float, high: float, exact: bool) -> None:
        """The decades, and above them a band for what is not finite."""
        self.ax.set_ylim(low - 0.04 * (high - low), high + (high - low) / 6)
        step = next(n for n in (1, 2, 3, 5, 10, 20, 50, 100) if (high - low) / n <= 6 or n == 100)
        ticks = [low] if exact else np.arange(np.ceil(low / step) * step, high + 0.5, step)
        self.ax.yaxis.set_major_locator(FixedLocator(ticks))
        words = ["exact"] if exact else [f"$10^{{{n + 0:.0f}}}$" for n in ticks]  # + 0: no minus before a zero
        self.ax.yaxis.set_major_formatter(FixedFormatter(words))


def _decades(errors: Sequence[float]) -> tuple[float, float, bool]:
    """Whole decades around what is finite, and whether there is nothing but exact and infinite errors."""
    logs = np.log10([e for e in errors if 0 < e < np.inf])
    if not logs.size:
        return 0.0, 1.0, bool(len(errors))
    # A single step that happens to be right does not set the scale.
    low, high = np.floor(np.quantile(logs, 0.02)), np.ceil(logs.max())
    return low, max(high, low + 1), False


def _place(error: float) -> float:
    """Where an error stands on the scale of the dots."""
    if not np.isfinite(error):
        return _NON_FINITE
    if error == 0:
        return _EXACT
    return _BEYOND if error > 10**_HIGH else max(np.log10(error), _LOW)
