"""Source lines that lose digits: for each the number of correct decimal digits going in and coming out."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.patches import Rectangle

from ..language import Words
from . import style
from .canvas import WIDE, Canvas
from .fonts import FAMILY
from .marks import CellGrid
from .trace import cut

WORDS = Words() | {
    "digits": "decimal digits that are right",
    "none": "not measured",
    "in": "going in",
    "out": "coming out",
    "lost": "the line that lost them",
    "budget": "what float32 should have",
    "more": "… and {n} lines that lost less",
}
"""The texts of the picture that do not depend on the data."""

MOST = 8.0
"""The end of the axis in digits; larger numbers are drawn there. float32 has 7.2."""


class Row(NamedTuple):
    """A source line, the correct decimal digits of its operands and of its result (None: not measured), and whether it
    causes a wrong result."""

    text: str
    inside: float | None
    out: float | None
    broken: bool = False


class DigitsFigure:
    """The picture of up to `lines` source lines, `width` inches wide. `update` redraws it in place. Rows can be pointed
    at in the map "lines"."""

    def __init__(self, width: float = 9.4, lines: int = 13):
        self.wide, self._lines = width >= WIDE, lines
        across, tall = (3.2, 0.25 * lines) if self.wide else (2.3, 0.22 * lines)
        self.canvas = Canvas(width, 0.72 + tall + 0.5)
        left = width - across - 0.15
        with style.context():
            self._title = self.canvas.text(0.06, 0.05, va="top", fontsize=11, fontweight="bold")
            self._subtitle = self.canvas.text(0.06, 0.28, va="top", fontsize=8.5, color=style.GREY)
            self._code = self.canvas.axes(0.1, 0.72, left - 0.2, tall)
            self._bars = self.canvas.axes(left, 0.72, across, tall)
            both = self.canvas.axes(0.1, 0.72, width - 0.2, tall)
            both.set_axis_off()
            self._cells = CellGrid(self.canvas, both, "lines")
        self.canvas.labels(self._title, self._subtitle)

    def update(self, *, title: str, subtitle: str, rows: Sequence[Row], budget: float, more: int = 0) -> None:
        """Redraw. rows: in source order; budget: digits a float32 result should have; more: count of lines left out."""
        self._title.set_text(title)
        self._subtitle.set_text(cut(subtitle, 140 if self.wide else 90))
        shown = rows[: self._lines - (more > 0)]
        with style.context():
            for ax in (self._code, self._bars):
                ax.clear()
                ax.set(ylim=(self._lines - 0.5, -0.5))
            self._code.set_axis_off()
            self._code.set_xlim(0, 1)
            for n, row in enumerate(shown):
                self._code.text(
                    0, n, cut(row.text, 74 if self.wide else 42), fontsize=8.5, family=["monospace", FAMILY],
                    color=style.BROKEN if row.broken else style.BLACK, fontweight="bold" if row.broken else "normal",
                    va="center",
                )  # fmt: skip
                self._bar(n, row)
            if more:
                words = WORDS.say("more", n=more)
                self._code.text(0, len(shown), words, fontsize=8.5, color=style.GREY, va="center")
            self._frame(budget, any(row.broken for row in shown))
            self._cells.update(self._lines, 1)
        self.canvas.stale()

    def _bar(self, n: int, row: Row) -> None:
        ax = self._bars
        if row.inside is None or row.out is None:
            ax.add_patch(Rectangle((0, n - 0.3), MOST, 0.6, facecolor=style.EMPTY, linewidth=0))
            ax.text(MOST / 2, n, WORDS["none"], fontsize=8, ha="center", va="center")
            return
        inside, out = (min(x, MOST) for x in (row.inside, row.out))
        colour = style.BROKEN if row.broken else style.BLUE
        ax.plot([inside, out], [n, n], color=colour, linewidth=4 if row.broken else 3, solid_capstyle="butt", zorder=2)
        hollow = {"markersize": 6, "markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.4}
        ax.plot(inside, n, "o", zorder=3, **hollow)
        ax.plot(out, n, "X" if row.broken else "o", markersize=8 if row.broken else 6, color=colour, zorder=4)

    def _frame(self, budget: float, broken: bool) -> None:
        ax = self._bars
        ax.set(xlim=(-0.3, MOST + 0.3), yticks=[], xticks=range(0, int(MOST) + 1, 2), xlabel=WORDS["digits"])
        ax.grid(axis="y", visible=False)
        ax.spines[["top", "right", "left"]].set_visible(False)
        hollow = {"markersize": 6, "markerfacecolor": "white", "markeredgewidth": 1.4}
        handles = ax.plot([], [], "o", color=style.BLUE, label=WORDS["in"], **hollow)
        handles += ax.plot([], [], "o", color=style.BLUE, markersize=6, label=WORDS["out"])
        handles += ax.plot([], [], "X", color=style.BROKEN, markersize=8, label=WORDS["lost"]) if broken else []
        handles += ax.plot([budget] * 2, [-0.5, self._lines - 0.5], zorder=1, label=WORDS["budget"], **style.LAW)
        for old in list(self.canvas.figure.legends):
            old.remove()
        _, height = self.canvas.figure.get_size_inches()
        self.canvas.legend(
            *handles, loc="lower left", at=(0.06, height - 0.02), borderaxespad=0, ncols=4 if self.wide else 2,
            columnspacing=1.2 if self.wide else 0.4, handlelength=1.6, handletextpad=0.5,
        )  # fmt: skip
