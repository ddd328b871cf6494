"""The picture of `blind_measure`: the rows with zeroed elements, and three error measures against their number."""

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, HeatMap, Marked, Ring, style, whole_ticks
from ...language import Words, say
from . import Shown

WORDS = Words() | {
    "knobs": {"size": "elements N"},
    "alt": "A map of the tensor's first rows, the lost elements marked; beside it, on logarithmic scales, the ratio of "
    "root mean squares, the worst row and the worst element against the number of lost elements, with the tolerance "
    "and the number that it accepts",
    "map": "first {rows} of {all} rows",
    "element": "element of the row",
    "curves": "error with n elements lost",
    "n": "lost elements",
    "ratio": "ratio of RMS",
    "worst_row": "worst row",
    "worst": "worst element",
    "law": "law: root of the share lost",
    "tolerance": "tolerance {tolerance:g}",
    "accepted": "{lost} of {size} elements are 0 instead of what they should be, {where}, and the test passes: the "
    "ratio of root mean squares is {ratio:.3g}, not above {tolerance:g}. The worst element is off by {worst:.2g} times "
    "the tensor's RMS, the worst row by {row:%}.",
    "rows": {1: "all in one row", 2: "{rows} rows of 64 that follow each other"},
    "none": "A single lost element makes the ratio {ratio:.2g}, above {tolerance:g}: in {size} elements none is "
    "accepted.",
    "cell lost": "row {i}, element {j}: 0 (true: {true:.3g} times the RMS)",
    "cell": "row {i}, element {j}: {true:.3g} times the RMS, as it should be",
    "point": "{n} of {size} lost: ratio of RMS {ratio:.3g}, {verdict}; worst row {row:%}, worst element {worst:.2g}",
    "passes": "accepted",
    "fails": "seen",
}
ON_VIEW = ("tolerance", "size")
LINE = "share of elements lost"
PRESETS = {
    "0.005": {"tolerance": 0.005, "size": 2**20},
    "0.05": {"tolerance": 0.05, "size": 2**20},
    "small tensor": {"tolerance": 0.005, "size": 2**14},
}

_CURVES = ("ratio", "worst_row", "worst")
_LOW, _HIGH = -4.0, 1.0
"""Range of the error axis, in powers of ten."""
_COLUMNS = 60
"""Number of points on the curves that a pointer can select."""


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, top, bottom, height = 0.52, 0.75, 0.3, 0.85, 2.2
        side = 0.42 * (width - left - gap - 0.15)
        self.canvas = Canvas(width, top + height + bottom)
        ax = whole_ticks(self.canvas.axes(left, top, side, height))
        ax.set(xlabel=WORDS["element"], ylabel=say("row"))
        self._title = ax.set_title("")
        self._map = HeatMap(self.canvas, ax, cmap="Greys", vmin=-5, vmax=5, name="map")
        self._lost = Marked(self.canvas, ax, facecolor=style.BROKEN, edgecolor=style.BROKEN, linewidth=0.8)
        self._ring = Ring(self.canvas, ax)
        ax = self._ax = self.canvas.axes(left + side + gap, top, width - left - side - gap - 0.15, height)
        ax.set(title=WORDS["curves"], xlabel=WORDS["n"], ylim=(_LOW, _HIGH))
        ax.set_yticks(range(-4, 2), ["$10^{-4}$", "$10^{-3}$", "$10^{-2}$", "$10^{-1}$", "1", "10"])
        self._lines = {
            name: self.canvas.line(ax, **look, label=WORDS[name])
            for name, look in zip(_CURVES, style.LINES, strict=False)
        }
        self._law = self.canvas.line(ax, **style.LAW, label=WORDS["law"], zorder=4)
        self._tolerance = ax.axhline(0, color=style.GREY, linewidth=1.2)
        self._accepted = ax.axvspan(0, 1, facecolor=style.NAN["facecolor"], zorder=0)
        self._words = ax.text(0, 0, "", ha="right", va="bottom", color=style.GREY, fontsize=8.5, zorder=5)
        self._cells = CellGrid(self.canvas, ax, "curves")
        self.canvas.legend(*self._lines.values(), self._law, handlelength=2.6, columnspacing=1.2)
        self.canvas.moving(self._tolerance, self._accepted, self._words)
        self.canvas.labels(self._title)

    def update(self, shown: Shown) -> None:
        self._title.set_text(WORDS.say("map", rows=len(shown.truth), all=shown.size // 64))
        self._map.update(shown.truth.numpy())
        self._lost.update(shown.lost)
        self._ring.update(shown.lost, say("lost"))
        counts = np.log10(shown.counts.numpy())
        limits = -0.15, counts[-1]
        if self.changed(limits):
            self._ax.set_xlim(limits)
            powers = range(0, int(counts[-1]) + 1, 2)
            self._ax.set_xticks(powers, [f"$10^{{{power}}}$" if power else "1" for power in powers])
            self._cells.update(1, _COLUMNS)
        for name, line in self._lines.items():
            line.set_data(counts, np.log10(getattr(shown, name).numpy()))
        self._law.set_data(counts, (counts - counts[-1]) / 2)
        tolerance = np.log10(shown.tolerance)
        self._tolerance.set_ydata([tolerance, tolerance])
        lost = shown.accepted.lost
        self._accepted.set_visible(lost > 0)
        self._accepted.set_x(limits[0])
        self._accepted.set_width(np.log10(max(lost, 1)) - limits[0])
        self._words.set_text(WORDS.say("tolerance", tolerance=shown.tolerance))
        self._words.set_position((limits[1], tolerance))

    def say(self, shown: Shown) -> str:
        lost, errors = shown.accepted.lost, shown.accepted.errors
        if not lost:
            return WORDS.say("none", ratio=shown.ratio[0], tolerance=shown.tolerance, size=shown.size)
        rows = -(-lost // 64)
        return WORDS.say(
            "accepted", lost=lost, size=shown.size, where=WORDS.say("rows", min(rows, 2), rows=rows), ratio=errors.l2,
            tolerance=shown.tolerance, worst=errors.worst, row=errors.worst_row,
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if cell.map == "map":
            return WORDS.say("cell lost" if shown.lost[i, j] else "cell", i=i, j=j, true=shown.truth[i, j])
        low, high = self._ax.get_xlim()
        place = low + (j + 0.5) / _COLUMNS * (high - low)
        at = int((shown.counts.log10() - place).abs().argmin())
        ratio = float(shown.ratio[at])
        return WORDS.say(
            "point", n=int(shown.counts[at]), size=shown.size, ratio=ratio,
            verdict=WORDS["passes" if ratio <= shown.tolerance else "fails"], row=shown.worst_row[at],
            worst=shown.worst[at],
        )  # fmt: skip
