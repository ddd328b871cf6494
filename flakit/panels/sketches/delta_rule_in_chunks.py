"""The sketches of lesson 09_delta_rule_in_chunks: the matrix of a chunk's edits and its inverse."""

from dataclasses import dataclass

import numpy as np

from ...cases import inverse
from ...figures import FUTURE, ITSELF, Canvas, Cell, Map, Maps, signed, style
from ...language import Words
from ..knobs import number
from .sketch import Sketch, short

_C = 16  # tokens of the chunk

WORDS = Words() | {
    "chained": {
        "alt": "Two square maps over the tokens of a chunk: how much token i finds of what token j put back, and the "
        "inverse, how much of it is left when all edits in between have been made",
        "maps": {"found": "found directly: L", "inverse": "through all edits: $(I - L)^{-1}$"},
        "halves": {"found": ("$I - P_1$", "Q", "$I - P_2$"), "inverse": ("$P_1^{-1}$", "X", "$P_2^{-1}$")},
        "i": "token i",
        "j": "token j",
        "same": "One token, {C} times: token i finds up to {found} of what each earlier one put back. Through all "
        "edits the largest number is {largest}, and beyond the second diagonal {far}.",
        "differ": "Keys that differ by {spread}: token i finds up to {found} of what an earlier one put back. Through "
        "all edits the largest number is {largest}, and beyond the second diagonal {far}.",
        "found": "token {i} finds {value} times what token {j} put back",
        "inverse": "of what token {j} would find with no edits, {value} reaches token {i}",
        "upper": "token {i} comes before token {j}, and finds nothing of it",
        "diagonal": "token {i} does not find what it is about to put back itself",
    }
}


@dataclass(frozen=True)
class ChainedShown:
    """L [C, C], the share of token j's edit that token i finds directly (`found`), and its inverse (I - L)^-1 [C, C],
    through all edits in between. spread: length of each key's random part beside the unit part common to all."""

    spread: float
    found: np.ndarray
    inverse: np.ndarray


class Chained(Sketch, name="chained", words=WORDS):
    """The matrix L of a chunk's edits beside the inverse (I - L)^-1."""

    knobs = {"spread": lambda: number(0.0, 0.0, 5.0, "spread", 0.1, False)}
    presets = {"one token": {"spread": 0.0}, "much alike": {"spread": 0.3}, "different": {"spread": 3.0}}
    script = """from flakit.cases import inverse

L = inverse.matrix(spread={spread})
print(L)
print(inverse.invert(L, "substitution", "float64"))
"""

    @staticmethod
    def compute(spread: float) -> ChainedShown:
        L = inverse.matrix(spread=spread, C=_C)
        return ChainedShown(spread, L.numpy(), inverse.invert(L, "substitution", "float64").numpy())

    def __init__(self, width: float):
        height, side = 2.7, 1.95
        self.canvas = Canvas(width, height)
        empty = {"found": ITSELF, "inverse": FUTURE}
        self._maps = Maps(
            self.canvas, {name: Map(title, signed(), empty=empty[name]) for name, title in self.words["maps"].items()},
            left=0.6, top=0.3, size=(side, side), gap=0.4, rows=self.words["i"], columns=self.words["j"],
        )  # fmt: skip
        self._maps.bar("inverse").set_yticks([-1, 0, 1])

    def update(self, shown: ChainedShown) -> None:
        self._maps.update(shown)

    def say(self, shown: ChainedShown) -> str:
        far = np.abs(np.tril(shown.inverse, -2)).max()
        return self.words.say(
            "differ" if shown.spread else "same", C=_C, spread=short(shown.spread),
            found=short(np.abs(shown.found).max()), largest=short(np.abs(shown.inverse).max()), far=short(far),
        )  # fmt: skip

    def arithmetic(self, shown: ChainedShown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if j > i:
            return self.words.say("upper", i=i, j=j)
        if j == i and cell.map == "found":
            return self.words.say("diagonal", i=i)
        return self.words.say(cell.map, i=i, j=j, value=short(getattr(shown, cell.map)[i, j]))


class Halved(Chained, name="halved"):
    """`Chained`, with lines between the halves of the chunk and the names of the blocks."""

    def __init__(self, width: float):
        super().__init__(width)
        first, border, second = (_C * n / 4 - 0.5 for n in (1, 2, 3))
        line = {"color": style.BLACK, "linewidth": 1.4, "zorder": 5}
        look = {"ha": "center", "va": "center", "fontsize": 12, "zorder": 6}
        look["bbox"] = {"facecolor": "white", "edgecolor": style.BLACK, "linewidth": 0.6, "pad": 2.5}
        for name, heat in self._maps.items():
            self.canvas.moving(heat.ax.axhline(border, **line), heat.ax.axvline(border, **line))
            corner, below, last = self.words["halves"][name]
            for text, row, column in ((corner, first, first), (below, second, first), (last, second, second)):
                self.canvas.moving(heat.ax.text(column, row, text, **look))
