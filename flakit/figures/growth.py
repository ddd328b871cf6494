"""A state that grows: its size over time against the end of a number format, and which tensors remain finite."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle

from ..numerics.words import percent
from . import style
from .canvas import Canvas

_HIGHEST, _LOWEST = 1.35, -0.35  # of the vertical axis, as shares of the format's largest exponent


class GrowthFigure:
    """Persistent: `update` redraws in place. tensors: the names of the bars, from top to bottom."""

    def __init__(self, tensors: Sequence[str]):
        self.tensors = tuple(tensors)
        self.canvas = Canvas(9.0, 3.5)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.975, "", va="top", fontsize=10.5, fontweight="bold")
            self._draw_size(figure.add_axes((0.07, 0.145, 0.52, 0.66)))
            self._draw_shares(figure.add_axes((0.66, 0.145, 0.25, 0.66)))
        self.canvas.labels(self._title)

    def _draw_size(self, ax) -> None:
        self._ax = ax
        ax.set(xlabel="token t", ylabel=r"log10 of the largest $|S_t|$")
        self._gone = ax.add_patch(Rectangle((0, 0), 0, 1, transform=ax.get_xaxis_transform(), linewidth=0, **style.NAN))
        self._end = ax.axhline(0, color=style.GREY, linewidth=1)
        self._end_words = ax.text(
            0.01, 0, "", color=style.GREY, fontsize=8.5, va="bottom", transform=ax.get_yaxis_transform()
        )
        self._law = ax.axvline(0, **style.LAW, zorder=4)
        (self._line,) = ax.plot([], [], **style.LINES[0], zorder=3)
        handles = [self._line, self._law, self._gone]
        words = ["measured", "law: ends here", "not finite"]
        ax.legend(handles, words, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
        self.canvas.moving(self._gone, self._law, self._line, *ax.spines.values())

    def _draw_shares(self, ax) -> None:
        rows = np.arange(len(self.tensors))
        ax.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6), xlabel="share that is finite")
        ax.set_title("each tensor, after the backward pass")
        ax.set_yticks(rows, self.tensors)
        ax.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
        ax.tick_params(axis="y", length=0)
        lost = ax.barh(rows, np.ones(len(rows)), height=0.62, linewidth=0, zorder=1, **style.NAN)
        self._finite = ax.barh(rows, np.ones(len(rows)), height=0.62, color=style.SKY, zorder=2)
        self._percents = [ax.text(1.03, row, "", va="center", fontsize=8.5) for row in rows]
        self.canvas.labels(*self._percents)
        self.canvas.moving(*lost, *self._finite, *ax.spines.values())

    def update(
        self,
        *,
        title: str,
        size: Sequence[float],
        onset: int | None,
        law: int | None,
        end: tuple[str, float],
        finite: Mapping[str, float],
    ) -> None:
        """size: the largest |S_t| of every token [T]; onset: the first that is not finite; law: the predicted one.

        end: a number format and the largest number it holds. finite: the share of each tensor that is finite.
        """
        self._title.set_text(title)
        size = np.asarray(size, dtype=np.float64)
        with np.errstate(divide="ignore"):
            logs = np.log10(size)
        self._line.set_data(np.arange(len(size)), np.where(np.isfinite(logs), logs, np.nan))
        self._gone.set_visible(onset is not None)
        if onset is not None:
            self._gone.set_bounds(onset - 0.5, 0, len(size) - onset, 1)
        self._law.set_visible(law is not None)
        if law is not None:
            self._law.set_xdata([law, law])

        name, largest = end
        top = np.log10(largest)
        limits = (-0.5, len(size) - 0.5), (_LOWEST * top, _HIGHEST * top)
        if (self._ax.get_xlim(), self._ax.get_ylim()) != limits:
            self._ax.set(xlim=limits[0], ylim=limits[1])
            self._end.set_ydata([top, top])
            self._end_words.set_y(top)
            self._end_words.set_text(f"{name} ends at $10^{{{top:.1f}}}$")
            self.canvas.stale()
        for name, bar, words in zip(self.tensors, self._finite, self._percents, strict=True):
            bar.set_width(finite[name])
            words.set_text(percent(finite[name]))
