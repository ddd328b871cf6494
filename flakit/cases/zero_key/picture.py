"""The picture of `zero_key`: the norm of each token's gradient before and after its key's normalisation."""

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, style
from ...language import Words, number, percent, say
from . import TOKEN, Shown, T

WORDS = Words() | {
    "knobs": {"length": "one |k|", "way": "divided by", "eps": "ε"},
    "alt": "For each token the size of the gradient that arrives at its key of length one, and of the one that leaves "
    "for the key as the layer made it, on a logarithmic scale; the token with the short key is orange where its "
    "gradient is more than a hundred times every other",
    "title": "size of each token's gradient",
    "arrives": "at the key of length one",
    "leaves": "at the key",
    "largest": "at the short key",
    "fair": "The key of token {t} is {length:.3g} long. Its gradient grows by {factor:.3g}, and is at most a hundred "
    "times the largest other.",
    "large": "The key of token {t} is {length:.3g} long. A step of that length turns it round, and its gradient grows "
    "by {factor:.3g}. Clipped together, the other {n} tokens keep {share} of the step. Everything is finite.",
    "bounded": "The key of token {t} is {length:.3g} long, shorter than ε lets count. Its gradient grows by "
    "{factor:.3g} = 1 / {end:.2g}, and by no more at length 0. Clipped together, the other {n} tokens keep {share} of "
    "the step.",
    "cell": "token {t}: the gradient arrives with size {arrives:.3g} and leaves with {leaves:.3g}",
}
ON_VIEW = ("length", "way", "eps")
LINE = "the gradient grows by"
PRESETS = {
    "a usual key": {"length": 1.0, "way": "max(|k|, ε)", "eps": 1e-12},
    "a short key": {"length": 1e-6, "way": "max(|k|, ε)", "eps": 1e-12},
    "nearly zero": {"length": 1e-14, "way": "max(|k|, ε)", "eps": 1e-12},
    "ε under a root": {"length": 1e-14, "way": "√(|k|² + ε)", "eps": 1e-6},
    "repaired": {"length": 1e-14, "way": "max(|k|, ε)", "eps": 0.1},
}

_LOW, _HIGH, _FAR = 1e-4, 1e14, 100.0


class Picture(Drawing):
    def __init__(self, width: float):
        left = 0.85
        self.canvas = Canvas(width, 3.0)
        ax = self.canvas.axes(left, 0.35, width - left - 0.2, 2.15, title=WORDS["title"], size=9, pad=4)
        ax.set(yscale="log", ylim=(_LOW, _HIGH), xlim=(-0.5, T - 0.5))
        ax.set(xlabel=say("token t"), ylabel=style.logarithmic(say("size")), yticks=[1e-4, 1, 1e4, 1e8, 1e12])
        ax.minorticks_off()
        looks = {"arrives": {"marker": "_", "color": style.BLACK, "markersize": 14, "markeredgewidth": 2.2}}
        looks["leaves"] = {"marker": "o", "color": style.BLUE, "markersize": 6}
        looks["largest"] = {"marker": "X", "color": style.BROKEN, "markersize": 10}
        self._points = {
            name: self.canvas.line(ax, linestyle="none", label=WORDS[name], zorder=3, **look)
            for name, look in looks.items()
        }
        ax.legend(loc="upper right", borderaxespad=0.2, labelspacing=0.3)
        CellGrid(self.canvas, ax, "tokens", 1, T)

    def update(self, shown: Shown) -> None:
        tokens, (arrives, leaves) = np.arange(T), _sizes(shown)
        self._points["arrives"].set_data(tokens, arrives)
        short = (tokens == TOKEN) & _large(shown)
        self._points["leaves"].set_data(tokens[~short], leaves[~short])
        self._points["largest"].set_data(tokens[short], leaves[short])

    def say(self, shown: Shown) -> str:
        values = {"t": TOKEN, "length": shown.length, "factor": shown.factor, "n": T - 1}
        values["share"] = percent(shown.share) if shown.share > 1e-4 else number(shown.share, 2)
        if not _large(shown):
            return WORDS.say("fair", **values)
        bounded = shown.length < (shown.eps if shown.way.startswith("max") else shown.eps**0.5)
        return WORDS.say("bounded" if bounded else "large", end=1 / shown.factor, **values)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        arrives, leaves = _sizes(shown)
        t = cell.column
        return WORDS.say("cell", t=t, arrives=arrives[t], leaves=leaves[t])


def _sizes(shown: Shown) -> tuple[np.ndarray, np.ndarray]:
    return tuple(x.norm(dim=-1).numpy() for x in (shown.arrives, shown.leaves))


def _large(shown: Shown) -> bool:
    """Return whether the short key's gradient is more than 100 times the largest of all others."""
    _, leaves = _sizes(shown)
    return bool(leaves[TOKEN] > _FAR * np.delete(leaves, TOKEN).max())
