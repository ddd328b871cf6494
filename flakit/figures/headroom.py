"""The headroom of decays: their histogram, below it each kernel's largest exponent beside the largest finite one."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ..language import Words
from . import Canvas, CellGrid, style
from .canvas import WIDE
from .heatmap import boxes

_WEAKEST, _STRONGEST = -3.0, 4.0  # powers of ten along the axis

WORDS = Words() | {
    "across": {True: "largest exponent of a factor: a sum of |w| (log scale)", False: "largest exponent (log scale)"},
    "decays": {
        True: "all decays, token by token:\n|w| of one (log scale)",
        False: "all decays: |w|\nof one (log scale)",
    },
    "limit": "ln(max) = {limit:.2f}",
    "legend": {
        True: ("largest exponent", "law: a kernel ends, all |w| alike", "law: ln(max)", "NaN"),
        False: ("largest exponent", "law, equal |w|", "ln(max)", "NaN"),
    },
    "never": {True: "never breaks", False: "never"},
    "short": {True: "not at this length", False: "too short"},
    "breaks": {True: "NaN: {exponent:.3g} is {times:.3g} × too much", False: "NaN: {times:.3g} ×"},
    "holds": {True: "holds up to {times:.3g} × these", False: "to {times:.3g} ×"},
}

LANES = "kernels"
"""The map to point at: a row per kernel."""


class HeadroomFigure:
    """A histogram of decays above a lane per kernel. `update` redraws in place. kernels: the lanes' labels."""

    def __init__(self, kernels: Sequence[str], width: float = 9.4):
        self.kernels = tuple(kernels)
        self.wide = width >= WIDE
        rows, start = len(self.kernels), 0.6
        # The lanes' ends, from the picture's, and heights, in inches.
        left, right, histogram, gap, lane, bottom = (
            (3.02, 2.34, 0.62, 0.37, 0.204, 0.44) if self.wide else (1.52, 0.95, 0.44, 0.36, 0.165, 0.42)
        )
        height = start + histogram + gap + lane * rows + bottom
        self.canvas = Canvas(width, height)
        with style.context():
            self._title = self.canvas.text(0.1, 0.06, va="top", fontsize=10.5, fontweight="bold")
            self._subtitle = self.canvas.text(width - 0.1, 0.08, va="top", ha="right", fontsize=9)
            across, top = width - left - right, start + histogram + gap
            above = self.canvas.axes(left, start, across, histogram)
            below = self.canvas.axes(left, top, across, lane * rows)
            ticks = np.arange(_WEAKEST, _STRONGEST + 1)
            for ax in (above, below):
                ax.set(xlim=(_WEAKEST, _STRONGEST), yticks=[])
                ax.set_xticks(ticks, list(map(style.power, ticks)))
                ax.spines["left"].set_visible(False)
                ax.tick_params(pad=2)
            above.set_ylim(0, 1.05)
            below.set_ylim(rows - 0.5, -0.5)
            below.set_xlabel(WORDS["across"][self.wide], labelpad=2)
            self.canvas.text(0.1, start + histogram / 2, WORDS["decays"][self.wide], va="center", fontsize=9)
            self._bars = above.add_patch(PathPatch(Path(np.empty((0, 2))), facecolor=style.SKY, linewidth=0))
            self._uniform = self.canvas.line(
                above, "|", color=style.BLACK, ms=11, mew=2, zorder=4, linestyle="none", clip_on=False
            )
            self._limit = below.axvline(0, **style.LAW, zorder=3)
            self._limit_words = below.text(0, -0.55, "", va="bottom", ha="center", fontsize=8.5)
            below.hlines(range(rows), _WEAKEST, _STRONGEST, colors=style.EMPTY, linewidth=0.8, zorder=0)
            self._gone = below.add_patch(PathPatch(Path(np.empty((0, 2))), zorder=1, linewidth=0, **style.NAN))
            self._largest = self.canvas.line(below, "o", color=style.BLUE, ms=6.5, zorder=5, linestyle="none")
            self._words = []
            for row, words in enumerate(self.kernels):
                self.canvas.text(0.1, top + lane * (row + 0.5), words, va="center", fontsize=8.5)
                place = {"transform": below.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
                self._words.append(below.text(1 + 0.06 / across, row, "", **place))
            handles = self._largest, self._uniform, self._limit, self._gone
            self.canvas.legend(
                *handles, labels=WORDS["legend"][self.wide], loc="upper left", at=(0.05, 0.28), columnspacing=1.2,
                handletextpad=0.4, borderaxespad=0, borderpad=0.2,
            )  # fmt: skip
            CellGrid(self.canvas, below, LANES, rows, 1)
        self.canvas.moving(self._bars, self._gone, self._limit)
        self.canvas.labels(self._title, self._subtitle, self._limit_words, *self._words)

    def update(
        self,
        *,
        title: str,
        subtitle: str,
        edges: Sequence[float],
        counts: Sequence[float],
        limit: float,
        exponents: Sequence[float],
        limits: Sequence[float],
        uniform: Sequence[float],
    ) -> None:
        """Redraw. edges, counts: of the histogram of log10 |w|, [bins + 1] and [bins]. limit: ln of the format's
        largest number.

        exponents, limits: for each kernel, its largest exponent (0: none is positive) and the largest e^x can take
        without overflow. uniform: for each, the largest finite |w| if all tokens have the same, inf for any."""
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        edges, heights = np.clip(edges, _WEAKEST, _STRONGEST), np.asarray(counts) / (max(counts) or 1)
        seen = (heights > 0) & (edges[:-1] < edges[1:])
        self._bars.set_path(boxes(edges[:-1][seen], edges[1:][seen], 0, heights[seen]))
        at = np.log10(limit)
        self._limit.set_xdata([at, at])
        self._limit_words.set_text(WORDS.say("limit", limit=limit))
        self._limit_words.set_x(at)
        rows, largest, ends = np.arange(len(exponents)), np.asarray(exponents), np.asarray(limits)
        there, beyond = largest > 0, largest > ends
        self._largest.set_data(_across(largest[there]), rows[there])
        laws = _across([x for x in uniform if x < np.inf])
        self._uniform.set_data(laws, np.zeros(len(laws)))
        self._gone.set_path(boxes(_across(ends[beyond]), _STRONGEST, rows[beyond] - 0.36, rows[beyond] + 0.36))
        for text, x, end, law in zip(self._words, exponents, limits, uniform, strict=True):
            label = verdict(x, end, law, self.wide)
            if text.get_text() != label:
                text.set(text=label, color=style.BROKEN if x > end else style.BLACK if x else style.GREY)


def verdict(exponent: float, limit: float, uniform: float, wide: bool = True) -> str:
    """Return the text at the end of a kernel's lane: by what factor its exponent is above or below its limit, if any.

    exponent, limit, uniform: as in `HeadroomFigure.update`, of one kernel. wide: the long text."""
    if not exponent:
        return WORDS["never" if uniform == np.inf else "short"][wide]
    if exponent > limit:
        return WORDS.say("breaks", wide, exponent=exponent, times=exponent / limit)
    return WORDS.say("holds", wide, times=limit / exponent)


def _across(x: Sequence[float]) -> np.ndarray:
    return np.clip(np.log10(x), _WEAKEST, _STRONGEST)
