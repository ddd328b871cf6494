"""A chunk as a matrix product with every number printed: a row per token, a column per key, a factor on each side,
their products in between and the result at the right. And the share of each tensor that is non-finite."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from ..language import say
from . import Canvas, Cell, CellGrid, HeatMap, Marked, name_rows, style

# Pixels, from the left and from the top.
_WIDTH, _HEIGHT = 590, 312
_CELL, _ROW, _FACTOR, _RESULT = 40, 25, 40, 40
_LEFT, _TOP, _GAP = 58, 58, 5

CHUNKS = ("left chunk", "right chunk")
"""The maps of `LossFigure` to point at: a row per tensor."""

LIT = {"edgecolor": style.BLUE, "facecolor": "none", "linewidth": 2.6}
"""The frame of the cell that a sentence explains; the highlighted term of the formula has the same colour."""

_DIMMED = {"facecolor": "white", "edgecolor": "none", "alpha": 0.65}
"""A translucent cover over numbers that play no part in a step."""


def rounded(x: float, digits: int) -> str:
    """Format a number with `digits` digits. A tie is decided by the decimal digits, not by float32's rounding error,
    which depends on how the number was computed.

    >>> rounded(0.19499999, 2), rounded(0.195, 2), rounded(9.9e4, 2), rounded(-1.2e-7, 2)
    ('0.2', '0.2', '9.9e4', '-1.2e-7')
    """
    written = f"{float(f'{x:.5g}'):.{digits}g}"
    return written.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def short(x: float) -> str:
    """Format a number in at most six characters.

    >>> short(float("inf")), short(9.1e-42), short(-0.195), short(0.0331), short(0.0), short(7.0)
    ('inf', '9e-42', '-.195', '0.033', '0', '7')
    """
    if x != x:
        return "NaN"
    if abs(x) == np.inf:
        return "inf" if x > 0 else "-inf"
    if x == 0:
        return "0"
    digits = 1 if not 0.01 <= abs(x) < 99 else 2 if abs(x) < 0.1 else 3
    return rounded(x, digits).replace("-0.", "-.")


def _raised(x: float) -> str:
    """Format a number in superscript characters: a formula of matplotlib would take most of a redraw."""
    # The decimal point is the Canadian syllabics' middle dot: the usual one hangs low and reads like a comma.
    return f"{x:.4g}".translate(str.maketrans("-.0123456789", "⁻\u1427⁰¹²³⁴⁵⁶⁷⁸⁹"))


class _Numbers(Artist):
    """An artist that prints a string in each cell [rows, columns] of its axes; cells are whole pixels wide and high.

    Each distinct string is rendered once and then copied: a hundred texts would cost ten times the rest of a redraw."""

    def __init__(self, rows: int, columns: int, width: int, height: int):
        super().__init__()
        self.strings = np.full((rows, columns), "", dtype=object)
        self._size, self._stamps = (width, height), {}
        self.set_zorder(5)

    def draw(self, renderer) -> None:
        left, bottom = np.round(self.axes.bbox.extents[:2]).astype(int)
        width, height = self._size
        for (row, column), words in np.ndenumerate(self.strings):
            if words:
                below = len(self.strings) - 1 - row
                place = left + column * width, bottom + below * height
                renderer.draw_image(renderer.new_gc(), *place, self._stamp(words))

    def _stamp(self, words: str) -> np.ndarray:
        if words not in self._stamps:
            width, height = self._size
            look = {"ha": "center", "va": "center", "fontsize": 8.5}
            if words in ("NaN", "inf", "-inf"):
                behind = style.NAN if words == "NaN" else style.INF
                look |= {"bbox": {"facecolor": behind["facecolor"], "edgecolor": "none", "pad": 0.8}, "weight": "bold"}
            text = Text(width / 2, height / 2, words, **look)
            text.set_figure(self.figure)
            drawn = RendererAgg(width, height, self.figure.dpi)
            text.draw(drawn)
            self._stamps[words] = np.array(drawn.buffer_rgba())[::-1]  # the bottom row first
        return self._stamps[words]


class WayFigure:
    """A chunk's product as in the module's docstring: C tokens, a result [C, K]. `update` redraws it in place."""

    def __init__(self, C: int, K: int):
        self.canvas = Canvas(_WIDTH / 100, _HEIGHT / 100)
        self._grids, self._numbers, self._absent = {}, {}, {}
        across, down = C * _CELL, C * _ROW
        centre, right = _LEFT + _FACTOR + _GAP, _LEFT + _FACTOR + 2 * _GAP + across
        with style.context():
            self._grid("key", centre, _TOP, across, _ROW, 1, C)
            self._grid("read", _LEFT, _TOP + _ROW + _GAP, _FACTOR, down, C, 1)
            self._grid("pairs", centre, _TOP + _ROW + _GAP, across, down, C, C)
            self._grid("result", right, _TOP + _ROW + _GAP, K * _RESULT, down, C, K)
            ax = self._grids["pairs"].ax
            corners = np.repeat(np.arange(C), 2)
            (self._diagonal,) = ax.plot(
                corners[1:] - 0.5, corners[:-1] + 0.5, color=style.BLACK, linewidth=1.6, zorder=3
            )
            self._words = {
                "key": self._text(centre + across / 2, 9, ha="center"),
                "read": self._text(6, _TOP - 2),
                "pairs": self._text(centre + across / 2, _HEIGHT - 9, ha="center", weight="bold"),
                "result": self._text(right + K * _RESULT / 2, _TOP + _ROW / 2, ha="center", weight="bold"),
            }
            on_keys = [
                self._text(centre + (j + 0.5) * _CELL, _TOP - 20, ha="center", fontsize=9, linespacing=1.1)
                for j in range(C)
            ]
            first = _TOP + 1.5 * _ROW + _GAP
            on_reads = [self._text(_LEFT - 4, first + i * _ROW, ha="right", fontsize=9) for i in range(C)]
            self._exponents = on_reads, on_keys
            self._lit = {
                name: grid.ax.add_patch(Rectangle((0, 0), 1, 1, zorder=6, clip_on=False, **LIT))
                for name, grid in self._grids.items()
            }
            self._dimmed = [
                self._grids[name].ax.add_patch(
                    Rectangle((0, 0), 1, 1, transform=self._grids[name].ax.transAxes, zorder=5.5, **_DIMMED)
                )
                for name in ("key", "read")
            ]
            self.canvas.legend(*style.non_finite_handles(), columnspacing=1.2)
        self.canvas.labels(*self._words.values(), *on_keys, *on_reads)
        self.canvas.moving(self._diagonal, *self._numbers.values(), *self._dimmed, *self._lit.values())

    def _grid(self, name, left, top, width, height, rows, columns) -> None:
        ax = self.canvas.axes(left / 100, top / 100, width / 100, height / 100)
        ax.set(xticks=[], yticks=[])
        heat = HeatMap(self.canvas, ax, name=name)
        heat.shape = rows, columns
        heat.update(np.zeros(heat.shape))
        self._grids[name] = heat
        self._absent[name] = Marked(self.canvas, ax, facecolor="white")
        self._numbers[name] = ax.add_artist(_Numbers(rows, columns, width // columns, height // rows))

    def _text(self, x, y, **look):
        return self.canvas.text(x / 100, y / 100, **{"va": "center", "fontsize": 9} | look)

    def update(
        self,
        *,
        exponents: tuple[Sequence[float], Sequence[float]],
        words: Mapping[str, str],
        lit: Mapping[str, tuple[int, int]],
        diagonal: bool = False,
        dim: bool = False,
        **values: np.ndarray | None,
    ) -> None:
        """Show the numbers of one step.

        exponents: of the tokens' and of the keys' factors, [C] each.
        values: "key" [C], "read" [C], "pairs" [C, C], "result" [C, K]; missing, None or masked: not computed yet.
        words: a label for each of these. lit: by name, the cell (row, column) to frame.
        diagonal: whether to draw the border between past and future pairs. dim: whether to veil both factors."""
        for texts, each, space in zip(self._exponents, exponents, (" ", "\n"), strict=True):
            for n, (text, exponent) in enumerate(zip(texts, each, strict=True)):
                text.set_text(f"{n}{space}e{_raised(exponent)}")
        for name, grid in self._grids.items():
            x = values.get(name)
            x = np.ma.masked_all(grid.shape) if x is None else np.ma.asarray(x, dtype=np.float64).reshape(grid.shape)
            self._show(name, x)
            self._words[name].set_text(words.get(name, ""))
            self._lit[name].set_visible(name in lit)
            if name in lit:
                row, column = lit[name]
                self._lit[name].set_xy((column - 0.5, row - 0.5))
        self._diagonal.set_visible(diagonal)
        for cover in self._dimmed:
            cover.set_visible(dim)

    def printed(self, cell: Cell) -> bool:
        """Return whether a cell holds a number."""
        return bool(self._numbers[cell.map].strings[cell.row, cell.column])

    def _show(self, name: str, x: np.ma.MaskedArray) -> None:
        grid = self._grids[name]
        absent, x = np.ma.getmaskarray(x), x.filled(0)
        grid.update(x, empty=x == 0, finite=np.isfinite(x) & (x != 0))
        self._absent[name].update(absent)
        strings = ["" if nothing else short(number) for number, nothing in zip(x.flat, absent.flat, strict=True)]
        self._numbers[name].strings[:] = np.reshape(strings, x.shape)


class LossFigure:
    """Bars for the non-finite share of each tensor in two chunks; row one, the keys' factors, is hatched as inf."""

    def __init__(self, heading: str, names: Sequence[str]):
        self.canvas = Canvas(_WIDTH / 100, _HEIGHT / 100)
        left, width, height = 150, 140, 216
        self._bars, self._shares, self._titles = [], [], []
        with style.context():
            for n, chunk in enumerate(CHUNKS):
                start = left + n * (width + 70)
                ax = self.canvas.figure.add_axes((start / _WIDTH, 0.07, width / _WIDTH, height / _HEIGHT))
                ax.set(xlim=(0, 1), ylim=(len(names) - 0.4, -0.6), xticks=[], yticks=[])
                ax.spines["bottom"].set_visible(False)
                if n == 0:
                    name_rows(ax, names, fontsize=9.5)
                CellGrid(self.canvas, ax, chunk, len(names), 1)
                looks = [style.INF] + [style.NAN] * (len(names) - 1)
                bars = [ax.barh(row, 0, 0.62, linewidth=0, **look)[0] for row, look in enumerate(looks)]
                self._bars.append(bars)
                self._shares.append([ax.text(0, row, "", va="center", fontsize=10) for row in range(len(names))])
                title = self.canvas.figure.text(start / _WIDTH, 0.83, "", fontsize=9.5, va="center")
                self._titles.append(title)
            self.canvas.text(0.08, 0.05 * _HEIGHT / 100, heading, fontsize=10.5, weight="bold", va="center")
            nan, inf = style.non_finite_handles()
            nan.set_label(say("NaN or inf"))
            self.canvas.legend(inf, nan, loc="upper right", columnspacing=1.2)
        self.canvas.moving(*chain(*self._bars, *self._shares), *self._titles)

    def update(self, titles: Sequence[str], shares: Sequence[Sequence[float]], labels: Sequence[Sequence[str]]) -> None:
        """Redraw. titles: one per chunk. shares, labels: [chunk][tensor], non-finite shares (0 … 1) and texts."""
        for n, (title, share, words) in enumerate(zip(titles, shares, labels, strict=True)):
            self._titles[n].set_text(title)
            for bar, text, x, word in zip(self._bars[n], self._shares[n], share, words, strict=True):
                bar.set_width(x)
                text.set_text(word)
                text.set_x(x + 0.02)
                text.set_fontweight("bold" if x == 1 else "normal")
