"""How far decays are from the laws: their histogram, and below it the largest exponent that each kernel takes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ..numerics.words import number
from . import style
from .canvas import Canvas

_LEFT, _RIGHT = 0.335, 0.775
_TOP, _HISTOGRAM, _GAP, _LANE, _BOTTOM = 0.6, 0.85, 0.2, 0.235, 0.44  # inches
_WEAKEST, _STRONGEST = -3.0, 4.0  # powers of ten along the axis


class HeadroomFigure:
    """Persistent: `update` redraws in place. kernels: the words of each lane, from top to bottom."""

    def __init__(self, kernels: Sequence[str]):
        self.kernels = tuple(kernels)
        rows = len(self.kernels)
        height = _TOP + _HISTOGRAM + _GAP + _LANE * rows + _BOTTOM
        self.canvas = Canvas(9.0, height)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 1 - 0.08 / height, "", va="top", fontsize=10.5, fontweight="bold")
            self._subtitle = figure.text(0.012, 1 - 0.34 / height, "", va="top", fontsize=9, color=style.GREY)
            low = (_BOTTOM + _LANE * rows + _GAP) / height
            above = figure.add_axes((_LEFT, low, _RIGHT - _LEFT, _HISTOGRAM / height))
            below = figure.add_axes((_LEFT, _BOTTOM / height, _RIGHT - _LEFT, _LANE * rows / height))
            ticks = np.arange(_WEAKEST, _STRONGEST + 1)
            for ax in (above, below):
                ax.set(xlim=(_WEAKEST, _STRONGEST), xticks=ticks, yticks=[])
                ax.spines[["top", "right", "left"]].set_visible(False)
            above.set_xticklabels([])
            below.set_xticklabels([f"{10.0**tick:g}" for tick in ticks])
            above.set_ylim(0, 1.05)
            below.set_ylim(rows - 0.5, -0.5)
            below.set_xlabel("natural-log units: |w| of one token above, the sum in one exponent below")
            figure.text(0.012, low + _HISTOGRAM / height / 2, "all decays |w|, token by token", va="center", fontsize=9)
            self._bars = above.add_patch(PathPatch(_boxes([]), facecolor=style.SKY, linewidth=0))
            self._limits = [ax.axvline(0, **style.LAW, zorder=3) for ax in (above, below)]
            self._limit_words = above.text(0, 0.98, "", va="top", fontsize=8.5)
            below.hlines(range(rows), _WEAKEST, _STRONGEST, colors=style.EMPTY, linewidth=0.8, zorder=0)
            self._gone = below.add_patch(PathPatch(_boxes([]), zorder=1, linewidth=0, **style.NAN))
            (self._uniform,) = below.plot([], [], "|", color=style.BLACK, ms=11, mew=2, zorder=4, linestyle="none")
            (self._largest,) = below.plot([], [], "o", color=style.BLUE, ms=6.5, zorder=5, linestyle="none")
            across = below.get_yaxis_transform()
            self._words = []
            for row, words in enumerate(self.kernels):
                at = (_BOTTOM + _LANE * (rows - row - 0.5)) / height
                figure.text(0.012, at, words, va="center", fontsize=8.5)
                self._words.append(below.text(1.02, row, "", transform=across, va="center", fontsize=8.5))
            handles = [self._largest, self._uniform, self._limits[0], self._gone]
            figure.legend(
                handles,
                ["largest exponent", "law: the same |w| at every token", "law: ln(max)", "NaN"],
                loc="lower right", bbox_to_anchor=(0.995, 1 - (_TOP - 0.03) / height), ncols=4,
                columnspacing=1.2, handletextpad=0.3, borderaxespad=0,
            )  # fmt: skip
        self.canvas.moving(self._bars, self._gone, *self._limits, self._uniform, self._largest)
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
        """edges, counts: of the histogram of log10 |w|, [bins + 1] and [bins]. limit: ln(max) of the chosen format.

        exponents, limits, uniform: by kernel, the largest exponent (0: none is positive), the largest that is finite
        there, and the uniform |w| that the law allows, inf for ever.
        """
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        counts = np.asarray(counts, dtype=np.float64)
        tallest = counts.max() or 1.0
        bars = zip(edges, edges[1:], counts / tallest, strict=False)
        clipped = [(max(a, _WEAKEST), min(b, _STRONGEST), 0, y) for a, b, y in bars if y]
        self._bars.set_path(_boxes([box for box in clipped if box[0] < box[1]]))
        at = np.log10(limit)
        for line in self._limits:
            line.set_xdata([at, at])
        self._limit_words.set_text(f"ln(max) = {limit:.2f}")
        self._limit_words.set_x(at + 0.08)
        lanes = [(_across(x), row) for row, x in enumerate(exponents) if x > 0]
        self._largest.set_data(*(np.array(lanes).T if lanes else ([], [])))
        ticks = [(_across(x), row) for row, x in enumerate(uniform) if x < np.inf]
        self._uniform.set_data(*(np.array(ticks).T if ticks else ([], [])))
        beyond = [
            (_across(end), _STRONGEST, row - 0.36, row + 0.36)
            for row, (x, end) in enumerate(zip(exponents, limits, strict=True))
            if x > end
        ]
        self._gone.set_path(_boxes(beyond))
        for text, x, end, law in zip(self._words, exponents, limits, uniform, strict=True):
            said = verdict(x, end, law)
            if text.get_text() != said:
                text.set(text=said, color=style.VERMILLION if x > end else style.BLACK if x else style.GREY)


def verdict(exponent: float, limit: float, uniform: float) -> str:
    """A lane's words."""
    if not exponent:
        return "never breaks" if uniform == np.inf else "not at this length"
    if exponent > limit:
        return f"NaN: {number(exponent, 3)} is {number(exponent / limit, 3)} × too much"
    return f"holds up to {number(limit / exponent, 3)} × these"


def _across(x: float) -> float:
    return min(max(np.log10(x), _WEAKEST), _STRONGEST)


def _boxes(boxes: Sequence[tuple[float, float, float, float]]) -> Path:
    """Boxes (left, right, low, high) as one path."""
    corners = [[(a, y), (b, y), (b, z), (a, z), (a, y)] for a, b, y, z in boxes]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(np.array(corners, dtype=np.float64).reshape(-1, 2), codes or None)
