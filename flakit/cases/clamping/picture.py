"""The picture of `clamping`: the exponent of every row, exact and clamped, and the weights of every pair from both."""

import math

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, Map, Maps, style, whole_ticks
from ...language import Words, number, say
from . import Shown

WORDS = Words() | {
    "knobs": {
        "w": "decay w",
        "block": "block rows",
        "bound": "bound b",
        "K": "channels K",
        "exclusive": "read before decay",
    },
    "alt": "A line of the exponent of every token of a block, cut off at the bound, the anchor's row marked; beside it "
    "the weights of its pairs, a row for each output and a column for each key, as they are and as they come out, the "
    "pairs hatched whose two tokens were cut to one exponent",
    "exponents": {False: "exponent $gi_i - n$", True: "exponent $ge_i - n$"},
    "true": "as it is",
    "clamped": "clamped",
    "anchor": "anchor",
    "right": "weights as they are",
    "computed": "weights as computed",
    "in right": "yellow 1, blue 0",
    "in computed": "hatched: cut alike",
    "cut": "cut alike",
    "bounds": ("-b", "0", "b"),
    "fine": "No token's exponent is beyond the bound of {bound:.3g}: nothing is cut off, and every weight is right.",
    "one": "A token whose exponent is beyond the bound of {bound:.3g} is cut off there, and its weights come out too "
    "large: the scores are off by {off:%}. No two tokens on one side of the anchor are cut off yet.",
    "spared": "A token whose exponent is beyond the bound of {bound:.3g} is cut off there, but that changes "
    "no score by more than rounding.",
    "alike": "{sides} lie beyond the bound of {bound:.3g} and get one exponent. Between two of them it cancels: "
    "{pairs} read at full weight, e^0 = 1, as if nothing were forgotten. The scores are off by {off:%}, and all are "
    "finite.",
    "sides": {
        1: "{most} tokens on one side of the anchor",
        2: "{most} tokens on one side of the anchor, {least} on the other,",
    },
    "pairs": {1: "one pair is", 2: "{count} pairs are"},
    "row": "token {i}: exponent {own} - n = {exponent}{cut}",
    "cut to": ", cut to {clamped}",
    "pair": "output {i}, key {j}: e^{a} · e^{b} = {query} · {key} = {computed} (true: e^{d} = {right})",
    "of": "({clamped}, not {exponent})",
    "future": "output {i}, key {j}: an output reads no later token",
    "bonus": "output {i}, key {j}: a token reads its own key through the bonus, without decay",
}
ON_VIEW = ("w", "anchor", "bound")
LINE = "scores off by"
PRESETS = {
    "fine": {"w": -5.0, "block": 16, "anchor": 0},
    "first two alike": {"w": -6.4, "block": 16, "anchor": 0},
    "full weight": {"w": -12.0, "block": 16, "anchor": 0},
    "anchor in the middle": {"w": -12.0, "block": 16, "anchor": 8},
}

_BEYOND = 1.7
"""Length of the exponent axis, in units of the bound."""


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, top, bottom = 0.55, 0.12, 0.3, 0.76
        side = min(2.75, (width - left - 2 * gap - 0.1) * 0.36)
        across = width - left - 2 * side - 2 * gap - 0.1
        self.canvas = Canvas(width, top + side + bottom)
        ax = self._ax = whole_ticks(self.canvas.axes(left, top, across, side, framed=True))
        ax.set(xlim=(-_BEYOND, _BEYOND), ylabel=say("token i"))
        self._title = ax.set_title(WORDS["exponents"][True])
        ax.set_xticks([-1, 0, 1], WORDS["bounds"])
        for bound in (-1, 1):
            ax.axvline(bound, color=style.GREY, linewidth=1, linestyle=(0, (1, 1.5)))
        (self._anchor,) = self.canvas.moving(ax.axhline(0, color=style.BLACK, linewidth=1.2))
        self._true = self.canvas.line(ax, color=style.SKY, linewidth=1.4, linestyle="--", marker="o", markersize=3.5)
        self._clamped = self.canvas.line(ax, color=style.INDIGO, linewidth=1.8, marker="o", markersize=4)
        self._cells = CellGrid(self.canvas, ax, "exponents")
        alike = {"lost": ("alike", WORDS["cut"]), "hatched": True}
        maps = {
            name: Map(WORDS[name], empty="unread", note=WORDS[f"in {name}"], **(alike if name == "computed" else {}))
            for name in ("right", "computed")
        }
        self._maps = Maps(
            self.canvas, maps, left=left + across + gap, top=top, size=(side, side), gap=gap,
            columns=say("key j"), labels=False,
        )  # fmt: skip
        handles = self._true, self._clamped, self._anchor
        words = [WORDS[name] for name in ("true", "clamped", "anchor")]
        self.canvas.legend(*handles, labels=words, handlelength=2.4)

    def update(self, shown: Shown) -> None:
        rows = np.arange(len(shown.exponents))
        if self.changed(len(rows), shown.exclusive):
            self._ax.set_ylim(len(rows) - 0.5, -0.5)
            self._title.set_text(WORDS["exponents"][shown.exclusive])
        self._true.set_data(shown.exponents / shown.bound, rows)
        self._clamped.set_data(shown.clamped / shown.bound, rows)
        at = shown.anchor - (not shown.exclusive)
        self._anchor.set_ydata([at, at])
        self._cells.update(len(rows), 1)
        self._maps.update(shown)

    def say(self, shown: Shown) -> str:
        least, most = sorted(int((side * shown.exponents > shown.bound).sum()) for side in (-1, 1))
        count = int(shown.alike.sum())
        return WORDS.say(
            "alike" if count else "fine" if not most else "one" if shown.off > 1e-6 else "spared",
            sides=WORDS.say("sides", 2 if least else 1, most=most, least=least),
            pairs=WORDS.say("pairs", count=count),
            bound=shown.bound,
            off=shown.off,
        )

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if cell.map == "exponents":
            exponent, clamped = shown.exponents[i], shown.clamped[i]
            cut = WORDS.say("cut to", clamped=clamped) if clamped != exponent else ""
            return WORDS.say("row", i=i, own="ge" if shown.exclusive else "gi", exponent=exponent, cut=cut)
        if shown.unread[i, j]:
            return WORDS.say("future" if j > i else "bonus", i=i, j=j)
        before = j + shown.exclusive  # the token that reads where key j has been written
        (a, query), (b, key) = _factor(shown, i, 1), _factor(shown, before, -1)
        d, computed, right = shown.exponents[i] - shown.exponents[before], shown.computed[i, j], shown.right[i, j]
        return WORDS.say("pair", i=i, j=j, a=a, b=b, query=query, key=key, computed=computed, d=d, right=right)


def _factor(shown: Shown, row: int, sign: int) -> tuple[str, float]:
    """Return a factor's exponent in words, and the factor. sign: 1 for a row's query factor, -1 for its key factor."""
    exponent, clamped = (sign * float(x[row]) + 0.0 for x in (shown.exponents, shown.clamped))
    words = number(clamped) if clamped == exponent else WORDS.say("of", clamped=clamped, exponent=exponent)
    return words, math.exp(clamped)
