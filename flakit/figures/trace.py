"""Where values stop being finite: the first bad tile, the programs of its grid, and the family tree after it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Rectangle

from . import style
from .canvas import Canvas
from .heatmap import HeatMap

_MOST = 9  # branches that have room


class Branch(NamedTuple):
    """One node of the tree. depth: 0 for a root; nan: whether it holds NaN, else infinities alone."""

    depth: int
    where: str
    what: str
    nan: bool


class TraceFigure:
    """`update` redraws in place. Cells are NaN or infinite where a lane or a program is, and 0 elsewhere."""

    def __init__(self):
        self.canvas = Canvas(9.2, 4.6)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.98, "", va="top", fontsize=11, fontweight="bold")
            self._subtitle = figure.text(0.012, 0.925, "", va="top", fontsize=9, color=style.GREY, family="monospace")
            self._maps = []
            for name, box in (("tile", (0.055, 0.41, 0.3, 0.38)), ("programs", (0.055, 0.1, 0.3, 0.17))):
                ax = figure.add_axes(box)
                ax.tick_params(length=2, labelsize=7.5)
                first = ax.add_patch(Rectangle((0, 0), 1, 1, fill=False, linewidth=2.2, edgecolor=style.BLUE, zorder=4))
                self._maps.append((HeatMap(self.canvas, ax, name=name), ax, first))
                self.canvas.moving(first)
            figure.legend(handles=style.non_finite_handles(), loc="upper left", bbox_to_anchor=(0.24, 0.9), ncols=2,
                          borderaxespad=0, handlelength=1.6, columnspacing=1.2)  # fmt: skip
            self._tree = figure.add_axes((0.39, 0.04, 0.6, 0.8))
            self._tree.axis("off")
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
        more: int = 0,
    ) -> None:
        """tile [rows, columns] and programs likewise (None: no grid), with the cell of each that was first.

        empty: cells of `programs` that are none. tree: from a root down, parents before children; more: nodes left out.
        """
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
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
                ax.set_title(name, fontsize=9)
                ax.locator_params(integer=True, nbins=6)
        self._grow(tree, more)
        self.canvas.stale()

    def _grow(self, tree: Sequence[Branch], more: int) -> None:
        ax = self._tree
        with style.context():
            ax.clear()
            ax.axis("off")
            ax.set(xlim=(0, 1), ylim=(_MOST + 0.3, -0.6))
            ax.set_title("What came of it", fontsize=9.5)
            last = {}
            for i, branch in enumerate(tree[:_MOST]):
                x = 0.012 + 0.026 * branch.depth
                look = style.NAN if branch.nan else style.INF
                if branch.depth and branch.depth - 1 in last:
                    x0 = x - 0.026
                    ax.plot([x0, x0, x], [last[branch.depth - 1] + 0.22, i, i], color=style.GREY, linewidth=0.9)
                ax.add_patch(Rectangle((x - 0.008, i - 0.2), 0.016, 0.4, linewidth=0.8, zorder=3, **look))
                ax.text(x + 0.016, i - 0.05, branch.where, fontsize=8, family="monospace", va="bottom")
                ax.text(x + 0.016, i + 0.02, branch.what, fontsize=7.5, color=style.GREY, va="top")
                last[branch.depth] = i
            left = more + max(0, len(tree) - _MOST)
            if left:
                ax.text(0.012, _MOST - 0.2, f"… and {left} more", fontsize=8, color=style.GREY)
