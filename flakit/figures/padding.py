"""A chunk that the sequence ends in: the exponents of its empty rows, the gradient they reach, the limit by length."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator, MultipleLocator

from ..numerics.words import percent
from . import style
from .canvas import Canvas
from .heatmap import HeatMap

_DECADES = (-4, 2)
_WEAKEST, _STRONGEST = 0.5, 200.0  # |g| on the axis of limits


class PaddingFigure:
    """Persistent: `update` redraws in place."""

    def __init__(self):
        self.canvas = Canvas(9.0, 3.9)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.98, "", va="top", fontsize=10.5, fontweight="bold")
            self._subtitle = figure.text(0.012, 0.928, "", va="top", fontsize=9.5, color=style.GREY)
            self._draw_chunk(figure)
            self._draw_limits(figure.add_axes((0.735, 0.14, 0.25, 0.6)))
            figure.legend(
                handles=[*style.non_finite_handles(), self._predicted, self._end],
                labels=["NaN", "inf", "lost by the law", "end of the sequence"],
                loc="upper right", bbox_to_anchor=(0.995, 0.99), ncols=4, handlelength=2, columnspacing=1.2,
                borderaxespad=0,
            )  # fmt: skip
        self.canvas.labels(self._title, self._subtitle)

    def _draw_chunk(self, figure) -> None:
        bottom, height = 0.14, 0.6
        exponents, gradient = (
            figure.add_axes((left, bottom, width, height)) for left, width in ((0.06, 0.15), (0.345, 0.22))
        )
        exponents.set(xlabel="block of keys", ylabel="row i of the last chunk")
        exponents.set_title("exponent $gi_i - n$\nat the block's anchor")
        gradient.set(ylabel="token t")
        self._gradient_ax = gradient
        self._exponents = HeatMap(self.canvas, exponents, cmap=style.SIGNED, vmin=-1.0, vmax=1.0)
        self._gradient = HeatMap(self.canvas, gradient, vmin=_DECADES[0], vmax=_DECADES[1], rows_vary=True)
        self._name = gradient.set_title("")
        self._exponent_bar = self._exponents.colorbar(figure.add_axes((0.222, bottom, 0.012, height)), "")
        bar = self._gradient.colorbar(figure.add_axes((0.577, bottom, 0.012, height)), "magnitude")
        ticks = range(_DECADES[0], _DECADES[1] + 1, 2)
        bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])
        (self._end,) = exponents.plot([], [], color=style.BLUE, linewidth=2, zorder=4)
        (self._predicted,) = gradient.plot(
            [], [], color=style.BLACK, linewidth=2, zorder=4, solid_capstyle="projecting"
        )
        for axis in (exponents.yaxis, gradient.yaxis):
            axis.set_major_locator(MultipleLocator(16))
        for axis in (exponents.xaxis, gradient.xaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        self._first = 0
        gradient.yaxis.set_major_formatter(lambda row, _: f"{row + self._first:.0f}")
        self.canvas.labels(self._name)
        self.canvas.moving(self._end, self._predicted, *exponents.spines.values(), *gradient.spines.values())

    def _draw_limits(self, ax) -> None:
        self._limits = ax
        ax.set(yscale="log", ylim=(_WEAKEST, _STRONGEST), xlabel="tokens in the last chunk, R")
        ax.set_title("|log gate| without a NaN")
        ax.set_yticks([1, 10, 100], ["1", "10", "100"])
        ax.xaxis.set_major_locator(MultipleLocator(16))
        ax.spines[["top", "right"]].set_visible(False)
        (self._law,) = ax.plot(
            [], [], color=style.BLACK, linewidth=1.4, marker="|", markersize=5, zorder=3, label="law"
        )
        (self._measured,) = ax.plot(
            [],
            [],
            "o",
            color=style.VERMILLION,
            markersize=11,
            markerfacecolor="none",
            mew=2,
            zorder=4,
            label="measured",
        )
        (self._now,) = ax.plot([], [], "D", color=style.BLUE, markersize=6, zorder=5, label="now")
        ax.legend(loc="upper right", borderaxespad=0.1)
        self.canvas.moving(self._law, self._measured, self._now)

    def update(
        self,
        *,
        title: str,
        subtitle: str,
        limit: float,
        exponents: np.ndarray,
        tokens: int,
        name: str,
        columns: str,
        first: int,
        gradient: np.ndarray,
        predicted: np.ndarray,
        limits: Sequence[float],
        measured: float | None,
        now: tuple[int, float],
    ) -> None:
        """exponents: [chunk, blocks], NaN where there is none; limit: ln of the largest number; tokens: R.

        gradient, predicted: `name` and where the law says it is lost, [rows, channels] of the last chunk; columns: what
        its channels are; first: the token of row 0. limits: the law for R = 1, 2, …; measured: at this R, None if
        there is none; now: (R, |log gate|).
        """
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        if self._exponents.colours.norm.vmax != limit:
            self._exponents.colours.set_clim(-limit, limit)
            self._exponent_bar.set_ticks([-limit, 0, limit], labels=[f"{-limit:.1f}", "0", f"{limit:.1f}\nln max"])
            self.canvas.stale()
        empty = np.isnan(exponents) | np.isneginf(exponents)
        self._exponents.update(np.where(exponents > limit, np.inf, exponents), empty=empty)
        self._end.set_data([-0.5, exponents.shape[1] - 0.5], [tokens - 0.5] * 2)

        with np.errstate(divide="ignore"):
            logs = np.log10(np.abs(gradient))
        self._gradient.update(np.where(gradient == 0, _DECADES[0], logs))
        self._first = first
        self._predicted.set_data(*_border(predicted))
        share = 1 - np.isfinite(gradient).mean()
        self._name.set_text(f"{name} of the last chunk\n{percent(share) + ' not finite' if share else 'finite'}")
        if self._gradient_ax.get_xlabel() != columns:
            self._gradient_ax.set_xlabel(columns)
            self.canvas.stale()

        at = np.arange(1, len(limits) + 1)
        self._law.set_data(at, np.where(np.isfinite(limits), limits, np.nan))
        if self._limits.get_xlim() != (-1, len(limits) + 2):
            self._limits.set_xlim(-1, len(limits) + 2)
            self.canvas.stale()
        R, size = now
        self._measured.set_data([R], [np.nan if measured is None else measured])
        self._now.set_data([R], [min(max(size, _WEAKEST * 1.1), _STRONGEST / 1.1)])


def _border(mask: np.ndarray) -> tuple[list[float], list[float]]:
    """The edges between true and false cells as one broken line."""
    padded = np.pad(np.asarray(mask, dtype=bool), 1)
    x, y = [], []
    for row, column in zip(*np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1]), strict=True):
        x += [column - 0.5, column + 0.5, np.nan]
        y += [row - 0.5, row - 0.5, np.nan]
    for row, column in zip(*np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1]), strict=True):
        x += [column - 0.5, column - 0.5, np.nan]
        y += [row - 0.5, row + 0.5, np.nan]
    return x, y
