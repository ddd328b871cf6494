"""The picture of a kernel's trace: the first tile with a non-finite value, the programs of its grid, the tree of tiles
that inherit it, and the headroom of each exponential, its distance from overflow."""

import unicodedata
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Rectangle

from ..language import Words
from . import style
from .canvas import WIDE, Canvas
from .fonts import FAMILY
from .heatmap import HeatMap
from .marks import CellGrid, whole_ticks

WORDS = Words() | {
    "tree": "What came of it",
    "nothing": "Nothing came of it: all is finite",
    "more": "… and {n} more",
    "rooms": "Headroom a line, in e-folds",
    "tightest": "Headroom a line, in e-folds (the tightest of {n})",
    "over": "{room:.2f} over",
    "left": "{room:.2f} left",
}
"""The texts of the picture that do not depend on the data."""

_CODE = ["monospace", FAMILY]


class Branch(NamedTuple):
    """A node of the tree of tiles: its depth, 0 for a root, source line and contents. nan: NaN, else only inf."""

    depth: int
    where: str
    what: str
    nan: bool


class Room(NamedTuple):
    """A source line with an exponential, its largest exponent, and how much more it may be before e^x overflows."""

    where: str
    largest: float
    left: float


class TraceFigure:
    """The picture of a trace, `width` inches wide. `update` redraws it in place.

    Cells can be pointed at in the maps "tile" and "programs", rows in "tree" and "rooms"."""

    def __init__(self, width: float = 9.4):
        wide = width >= WIDE
        height, left, across = (4.3, 0.42, 2.75) if wide else (3.85, 0.4, 1.55)
        self.canvas = Canvas(width, height)
        self._branches, self._lines = (7, 4) if wide else (5, 4)
        self._most = 66 if wide else 42  # letters of code that fit
        self._narrow = not wide
        tree = left + across + 0.25, width - left - across - 0.33
        with style.context():
            self._title = self.canvas.text(0.06, 0.05, va="top", fontsize=11, fontweight="bold")
            self._subtitle = self.canvas.text(0.06, 0.28, va="top", fontsize=8.5, color=style.GREY, family=_CODE)
            self._maps = []
            for name, top, tall in (("tile", 0.98, height - 2.27), ("programs", height - 0.7, 0.36)):
                ax = whole_ticks(self.canvas.axes(left, top, across, tall))
                ax.tick_params(length=2)
                first = ax.add_patch(Rectangle((0, 0), 1, 1, fill=False, linewidth=2.2, edgecolor=style.BLUE, zorder=4))
                self._maps.append((HeatMap(self.canvas, ax, name=name), ax, first))
                self.canvas.moving(first)
            look = {"loc": "upper right", "handlelength": 1.6, "columnspacing": 1.2}
            self.canvas.legend(*style.non_finite_handles(), at=(width, 0.46), **look)
            each = 0.335
            self._tree = self.canvas.axes(tree[0], 0.76, tree[1], each * (self._branches + 0.2))
            top = 0.76 + each * (self._branches + 0.2) + 0.3
            self._rooms = self.canvas.axes(tree[0], top, tree[1], height - top - 0.08)
            self._cells = CellGrid(self.canvas, self._tree, "tree"), CellGrid(self.canvas, self._rooms, "rooms")
        self.canvas.labels(self._title, self._subtitle)

    def update(
        self,
        *,
        title: str,
        subtitle: str,
        tile: np.ndarray,
        lane: tuple[int, int],
        tile_name: str,
        programs: np.ndarray | None,
        program: tuple[int, int],
        programs_name: str,
        empty: np.ndarray | None,
        tree: Sequence[Branch],
        rooms: Sequence[Room] = (),
        more: int = 0,
    ) -> None:
        """Redraw. tile, programs: [rows, columns], NaN or inf where an element of the tile, or a program of the grid,
        is not finite, else 0 (programs None: no grid to draw). lane, program: the first non-finite cell of each.

        tile_name, programs_name: titles; a narrow picture breaks them at " · ". empty: cells of `programs` that are not
        part of the grid. tree: parents before children; more: the number of nodes left out. rooms: the tightest
        first."""
        self._title.set_text(title)
        self._subtitle.set_text(cut(subtitle, self._most + (40 if not self._narrow else 34)))
        shown = ((tile, lane, tile_name, None), (programs, program, programs_name, empty))
        for (cells, (row, column), name, blank), (heat, ax, first) in zip(shown, self._maps, strict=True):
            for artist in (ax, *ax.get_children()):
                artist.set_visible(cells is not None)
            if cells is None:
                continue
            blank = np.zeros(cells.shape, bool) if blank is None else blank
            heat.update(cells, finite=np.isfinite(cells) & ~blank, empty=blank)
            first.set_bounds(column - 0.5, row - 0.5, 1, 1)
            with style.context():
                ax.set_title(name.replace(" · ", "\n") if self._narrow else name, fontsize=8.5)
                if cells.shape[0] == 1:
                    ax.set_yticks([])
        with style.context():
            self._grow(tree, more)
            self._fill(rooms)
        self.canvas.stale()

    def _grow(self, tree: Sequence[Branch], more: int) -> None:
        ax = self._tree
        ax.clear()
        ax.axis("off")
        ax.set(xlim=(0, 1), ylim=(self._branches - 0.35, -0.55))
        ax.set_title(WORDS["tree" if tree else "nothing"], fontsize=9.5)
        shown = tree[: self._branches - (len(tree) + more > self._branches)]
        last, step = {}, 0.022 if not self._narrow else 0.03
        for i, branch in enumerate(shown):
            x = 0.012 + step * branch.depth
            look = style.NAN if branch.nan else style.INF
            if branch.depth and branch.depth - 1 in last:
                x0 = x - step
                ax.plot([x0, x0, x], [last[branch.depth - 1] + 0.22, i, i], color=style.GREY, linewidth=0.9)
            ax.add_patch(Rectangle((x - step / 3, i - 0.2), 2 * step / 3, 0.4, linewidth=0.8, zorder=3, **look))
            where = cut(branch.where, self._most - 2 * branch.depth)
            ax.text(x + 0.8 * step, i - 0.02, where, fontsize=8.5, family=_CODE, va="bottom")
            ax.text(
                x + 0.8 * step, i + 0.04, cut(branch.what, self._most + 14), fontsize=8.5, color=style.GREY, va="top"
            )
            last[branch.depth] = i
        left = more + len(tree) - len(shown)
        if left:
            ax.text(0.012, len(shown), WORDS.say("more", n=left), fontsize=8.5, color=style.GREY, va="center")
        self._cells[0].update(len(shown), 1)

    def _fill(self, rooms: Sequence[Room]) -> None:
        """Draw a bar per exponential: its largest exponent as a share of the largest finite one."""
        ax, shown = self._rooms, rooms[: self._lines]
        ax.clear()
        ax.axis("off")
        ax.set(xlim=(0, 1), ylim=(self._lines - 0.5, -0.5))
        if not shown:
            self._cells[1].update(0, 1)
            return
        title = WORDS["rooms" if len(rooms) == len(shown) else "tightest"]
        ax.set_title(title.format(n=len(rooms)), fontsize=9.5)
        bar, end = 0.26, 0.97
        for i, room in enumerate(shown):
            limit = room.left + room.largest
            share = min(max(room.largest / limit, 0.0), 1.0) if np.isfinite(room.left) else float(room.left < 0)
            over = room.left <= 0
            look = style.INF if over else {"facecolor": style.SKY, "edgecolor": "none"}
            ax.add_patch(Rectangle((0, i - 0.32), bar, 0.64, facecolor=style.EMPTY, linewidth=0))
            ax.add_patch(Rectangle((0, i - 0.32), bar * share, 0.64, linewidth=0, **look))
            words = WORDS.say("over" if over else "left", room=abs(room.left))
            text = ax.text(bar / 2, i, words, fontsize=8.5, ha="center", va="center")
            if over:
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
            ax.text(bar + 0.015, i, cut(room.where, int(self._most * (end - bar))), fontsize=8.5, family=_CODE,
                    va="center")  # fmt: skip
        self._cells[1].update(len(shown), 1)


def cut(text: str, most: int) -> str:
    """Return the text, cut to a width of `most` letters; a Chinese character counts as two."""
    ends = accumulate(1 + (unicodedata.east_asian_width(x) in "WF") for x in text)
    fits = sum(end <= most for end in ends)
    return text if fits == len(text) else text[: fits - 1] + "…"
