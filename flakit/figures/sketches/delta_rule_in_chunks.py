"""The small picture of 07_delta_rule_in_chunks. Arrays in; it says itself in words."""

from dataclasses import dataclass

import numpy as np

from .. import style
from ..canvas import Canvas, Cell
from ..heatmap import HeatMap
from ..marks import whole_ticks
from .shared import short

WORDS = {
    "chained": {
        "alt": "Two square maps over the tokens of a chunk: how much token i finds of what token j put back, and the "
        "inverse, how much of it is left when all edits in between have been made",
        "maps": {"found": "found directly: L", "inverse": "through all edits: $(I - L)^{-1}$"},
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
    },
}


@dataclass(frozen=True)
class ChainedShown:
    """How much token i finds directly of what token j put back [C, C], the inverse [C, C], how far keys differ."""

    spread: float
    found: np.ndarray
    inverse: np.ndarray


class Chained:
    """The matrix of a chunk's edits beside its inverse. width: inches."""

    def __init__(self, width: float):
        words, height, side = WORDS["chained"], 2.7, 1.95
        self.canvas, self._maps = Canvas(width, height), {}
        gap = 0.55 if width > 8 else 0.4
        with style.context():
            for n, (name, title) in enumerate(words["maps"].items()):
                ax = whole_ticks(self.canvas.axes(0.6 + n * (side + gap), 0.3, side, side))
                ax.set(title=title, xlabel=words["j"])
                if n == 0:
                    ax.set_ylabel(words["i"])
                self._maps[name] = HeatMap(self.canvas, ax, cmap=style.SIGNED, vmin=-1, vmax=1, name=name)
            bar = self.canvas.axes(0.6 + 2 * side + gap + 0.15, 0.3, 0.12, side)
            self._maps["inverse"].colorbar(bar, "").set_ticks([-1, 0, 1])

    def update(self, shown: ChainedShown) -> None:
        C = len(shown.found)
        upper = np.triu(np.ones((C, C), bool), 1)
        self._maps["found"].update(shown.found, empty=np.triu(np.ones((C, C), bool)))
        self._maps["inverse"].update(shown.inverse, empty=upper)

    def say(self, shown: ChainedShown) -> str:
        far = np.abs(np.tril(shown.inverse, -2)).max()
        return WORDS["chained"]["differ" if shown.spread else "same"].format(
            C=len(shown.found),
            spread=short(shown.spread),
            found=short(np.abs(shown.found).max()),
            largest=short(np.abs(shown.inverse).max()),
            far=short(far),
        )

    def arithmetic(self, shown: ChainedShown, cell: Cell) -> str:
        words, i, j = WORDS["chained"], cell.row, cell.column
        if j > i:
            return words["upper"].format(i=i, j=j)
        if j == i and cell.map == "found":
            return words["diagonal"].format(i=i)
        return words[cell.map].format(i=i, j=j, value=short(getattr(shown, cell.map)[i, j]))
