"""The picture of `transposed_mask`: the state's entries that the mask keeps, by tile, and wrong ones at every size."""

import numpy as np
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ...figures import Canvas, Cell, Drawing, HeatMap, Marked, style, whole_ticks
from ...language import Words, say
from . import MOST, Shown

WORDS = Words() | {
    "knobs": {"K": "keys K", "V": "values V", "BK": "tile BK", "BV": "tile BV"},
    "alt": "The state as rows of keys and columns of values, cut into tiles: hatched where the mask leaves out an "
    "entry or lets through memory beyond the state; beside it the number of wrong entries for every K and V",
    "state": "the state in memory, tile by tile",
    "sizes": "wrong entries at each size",
    "missing": "not loaded: read as 0",
    "outside": "loaded from beyond",
    "right": "as it should be",
    "refused": "does not compile",
    "no size": "no size at all",
    "faulty": "In a tile that the edge cuts off, the mask is the mirror image of what it should be: {wrong} entries of "
    "the state are not loaded and count as 0, and as many are loaded from beyond it. The first token's dr is off by "
    "{dr:%}: finite, plausible, wrong.",
    "hidden": "Nothing is wrong here: {why}, and the mask is its own mirror image. A test with these sizes sees "
    "nothing.",
    "whole": "K and V are multiples of the tile",
    "one": "K = V fits into one tile",
    "compiler": "A mask [{BK}, {BV}] does not fit a tile [{BV}, {BK}]: the compiler refuses the kernel, with any GPU "
    "and with none. That is luck. Make the tile square, and the same line compiles.",
    "repaired": "The mask has the shape of the tile, [{BV}, {BK}]: all of the state is loaded, and nothing else.",
    "entry": "key {k}, value {v}: {seen}{mirror}",
    "loaded": "loaded as {seen}",
    "zero": "not loaded, read as 0 (true: {state})",
    "beyond": "beyond the state",
    "loaded beyond": "beyond the state, and loaded (true: left out)",
    "mirror": "; the mask asks for its mirror image in the tile, key {k}, value {v}, which lies {where} the state",
    "inside": "inside",
    "without": "beyond",
    "size": "K = {K}, V = {V}: {count} wrong entries of {all} by the law",
    "uncounted": "K = {K}, V = {V}: the kernel does not compile",
}
ON_VIEW = ("K", "V", "transposed")
LINE = "wrong entries"
PRESETS = {
    "hidden": {"K": 64, "V": 64, "BK": 32, "BV": 32, "transposed": True},
    "wrong": {"K": 100, "V": 120, "BK": 32, "BV": 32, "transposed": True},
    "not square": {"K": 100, "V": 120, "BK": 16, "BV": 64, "transposed": True},
    "repaired": {"K": 100, "V": 120, "BK": 32, "BV": 32, "transposed": False},
}

MISSING = style.NAN
OUTSIDE = style.NAN | {"facecolor": "white", "hatch": "\\\\\\\\"}
RIGHT = "#F4F8FB"

_HEIGHT = 2.45


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, bar = 0.62, 0.68, 0.66
        room = width - left - gap - bar
        self.canvas = Canvas(width, 3.75)
        look = {"title": WORDS["state"], "framed": True, "xlabel": say("value v"), "ylabel": say("key k")}
        ax = whole_ticks(self.canvas.axes(left, 0.3, 0.6 * room, _HEIGHT, **look))
        self._draw_state(ax, 4 if width > 8 else 2)
        right = left + 0.6 * room + gap
        self._draw_sizes(
            self.canvas.axes(right, 0.3, 0.4 * room, _HEIGHT, title=WORDS["sizes"], xlabel="V", ylabel="K"),
            self.canvas.axes(right + 0.4 * room + 0.08, 0.3, 0.12, _HEIGHT),
        )

    def _draw_state(self, ax, columns: int) -> None:
        self._ax = ax
        ax.set_facecolor(style.EMPTY)
        self._inside = ax.add_patch(Rectangle((-0.5, -0.5), 1, 1, facecolor=RIGHT, linewidth=0, zorder=1))
        self._missing, self._outside = (Marked(self.canvas, ax, zorder=2, **look) for look in (MISSING, OUTSIDE))
        self._edges = self.canvas.line(ax, color=style.GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=3)
        self._border = ax.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, linewidth=1.6, zorder=4))
        self._refused = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center", fontsize=10, zorder=5)
        handles = [
            Patch(linewidth=0, label=WORDS["missing"], **MISSING),
            Patch(linewidth=0, label=WORDS["outside"], **OUTSIDE),
            style.swatch(RIGHT, WORDS["right"]),
            self._edges,
        ]
        self._edges.set_label(say("tile"))
        self.canvas.legend(*handles, loc="lower left", ncols=columns, borderaxespad=0.3)
        self.canvas.moving(self._inside, self._border, *ax.spines.values(), self._refused)

    def _draw_sizes(self, ax, bar) -> None:
        self._sizes = HeatMap(self.canvas, ax, name="sizes")
        scale = self._sizes.colorbar(bar, "")
        scale.locator = MaxNLocator(5, integer=True)
        for axis in (ax.xaxis, ax.yaxis):
            sizes = range(32, MOST + 1, 32)
            axis.set_ticks([size - 1 for size in sizes], sizes)
        self._here = [
            ax.plot([0], [0], "o", markersize=9, markerfacecolor="none", markeredgecolor=colour, mew=width, zorder=6)[0]
            for colour, width in ((style.BLACK, 3.5), ("white", 1.6))
        ]
        self._no_size = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center", fontsize=9.5, zorder=5)
        self.canvas.moving(*self._here, self._no_size)

    def update(self, shown: Shown) -> None:
        (K, V), (BK, BV) = shown.state.shape, shown.tile
        rows, columns = -(-K // BK) * BK, -(-V // BV) * BV
        compiles = shown.seen is not None
        counts = shown.counts.numpy() if compiles else np.zeros((MOST, MOST))
        top = max(1.0, counts.max())
        if self.changed(rows, columns, top):
            self._ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
            self._sizes.colours.set_clim(0, top)
        self.canvas.pointable("state", self._ax, rows, columns)
        missing, outside = np.zeros((2, rows, columns), bool)
        if compiles:
            missing[:K, :V] = _missing(shown)
            outside = shown.mask.numpy().copy()
            outside[:K, :V] = False
        self._missing.update(missing)
        self._outside.update(outside)
        for patch in (self._inside, self._border):
            patch.set_bounds(-0.5, -0.5, V, K)
        self._edges.set_data(*_grid(rows, columns, BK, BV))
        self._refused.set_text("" if compiles else WORDS["refused"])
        self._no_size.set_text("" if compiles else WORDS["no size"])

        self._sizes.update(counts, empty=np.full(counts.shape, not compiles))
        for mark in self._here:
            mark.set_data([V - 1], [K - 1])
            mark.set_visible(compiles)

    def say(self, shown: Shown) -> str:
        (K, V), (BK, BV) = shown.state.shape, shown.tile
        if shown.seen is None:
            return WORDS.say("compiler", BK=BK, BV=BV)
        if not shown.transposed:
            return WORDS.say("repaired", BK=BK, BV=BV)
        wrong = int(_missing(shown).sum())
        if wrong:
            return WORDS.say("faulty", wrong=wrong, dr=shown.dr)
        return WORDS.say("hidden", why=WORDS["whole" if K % BK == V % BV == 0 else "one"])

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "sizes":
            K, V = cell.row + 1, cell.column + 1
            if shown.counts is None:
                return WORDS.say("uncounted", K=K, V=V)
            return WORDS.say("size", K=K, V=V, count=int(shown.counts[cell.row, cell.column]), all=K * V)
        if shown.seen is None:
            return WORDS["refused"]
        (K, V), k, v = shown.state.shape, cell.row, cell.column
        if k >= K or v >= V:
            seen = WORDS["loaded beyond" if shown.mask[k, v] else "beyond"]
        else:
            zero = bool(_missing(shown)[k, v])
            seen = WORDS.say("zero" if zero else "loaded", seen=shown.seen[k, v], state=shown.state[k, v])
        mirror = ""
        if shown.transposed:
            row, column = _mirror(shown, cell)
            where = WORDS["inside" if row < K and column < V else "without"]
            mirror = WORDS.say("mirror", k=row, v=column, where=where)
        return WORDS.say("entry", k=k, v=v, seen=seen, mirror=mirror)

    def beside(self, shown: Shown, cell: Cell) -> list[tuple[str, int, int]]:
        """Return (map, row, column) of the entry that the transposed mask tests in place of this cell, if any."""
        if cell.map != "state" or shown.seen is None or not shown.transposed:
            return []
        return [("state", *_mirror(shown, cell))]


def _missing(shown: Shown) -> np.ndarray:
    return (shown.seen != shown.state).numpy()


def _mirror(shown: Shown, cell: Cell) -> tuple[int, int]:
    """Return the (row, column) in the same square tile with row and column exchanged."""
    y, x = cell.row % shown.tile[0], cell.column % shown.tile[1]
    return cell.row - y + x, cell.column - x + y


def _grid(rows: int, columns: int, BK: int, BV: int) -> tuple[list[float], list[float]]:
    """Return the x and y of one line that draws the inner edges of the tiles, with NaN between edges."""
    gap = [np.nan]
    across = [(y - 0.5) for y in range(BK, rows, BK)]
    down = [(x - 0.5) for x in range(BV, columns, BV)]
    x = [part for _ in across for part in (-0.5, columns - 0.5, *gap)] + [part for x in down for part in (x, x, *gap)]
    y = [part for y in across for part in (y, y, *gap)] + [part for _ in down for part in (-0.5, rows - 0.5, *gap)]
    return x, y
