"""The sketch of lesson 04_chunk_backward: which pairs of tokens contribute to the gradient of a token's decay."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.patches import Rectangle

from ...figures import ITSELF, Bars, Canvas, Cell, CellGrid, Map, Maps, signed, style, whole_ticks
from ...language import Words
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ..knobs import integer
from .sketch import Sketch

_TOKENS = 8
SEED = 173
"""A seed of inputs in which no pair outweighs all others and the rounded sums in the panel agree."""

WORDS = Words() | {
    "passing": {
        "alt": "Left, what every pair of tokens adds to the loss, with a frame around the pairs that pass one token; "
        "right, the gradient of the decay of each token",
        "map": "what a pair adds to the loss",
        "reads": "token i, which reads",
        "wrote": "token j, which wrote",
        "bars": "dw of each token",
        "token": "token t",
        "say": {
            0: "No pair passes token {t}: nothing was written before it or nothing is read after it. dw is 0.",
            1: "{n} pairs of {all} pass token {t}, and their sum is dw of it: {dw:.2f}. Read after it is {read:.2f}, "
            "of which {own:.2f} comes from keys of token {t} and later.",
        },
        "passes": "token {i} reads token {j}: {x:.3f}. The way leads past token {t}, whose decay is in its weight",
        "misses": "token {i} reads token {j}: {x:.3f}. The way does not lead past token {t}",
        "future": "token {i} does not read token {j} through the state",
        "bar": "token {t}: {n} pairs pass it, and add up to {dw:.3f}",
    }
}


@dataclass(frozen=True)
class PassingShown:
    """What each pair, token i reading token j, adds to the loss in one channel, [C, C], zero unless j < i. t: the
    selected token."""

    t: int
    pairs: np.ndarray

    def read(self, t: int) -> float:
        """Return the sum over the pairs whose reader comes after token t."""
        return float(self.pairs[t + 1 :].sum())

    def own(self, t: int) -> float:
        """Return the part of the sum `read(t)` whose pairs were written by token t or later."""
        return float(self.pairs[t + 1 :, t:].sum())

    def dw(self, t: int) -> float:
        """Return the decay's gradient at token t: the sum over the pairs written before t and read after it."""
        return float(self.pairs[t + 1 :, :t].sum())

    @property
    def sums(self) -> np.ndarray:
        """`dw` of every token, [C]."""
        return np.array([self.dw(t) for t in range(_TOKENS)])

    def count(self, t: int) -> int:
        return t * (_TOKENS - 1 - t)


class Passing(Sketch, name="passing", words=WORDS):
    """A map of all pairs of a chunk with a frame around those that pass one token, and a bar for each token's dw."""

    knobs = {"t": lambda: integer(3, 0, _TOKENS - 1, "token t")}
    script = """from flakit.panels import sketch

shown = sketch("passing", t={t}).result
print("pairs that pass:", shown.count({t}), " their sum, dw:", shown.dw({t}))
"""

    @staticmethod
    def compute(t: int) -> PassingShown:
        return PassingShown(t, _pairs().numpy())

    def __init__(self, width: float):
        side, left = 1.98, 0.62
        self.canvas = Canvas(width, 2.8)
        names = {"rows": self.words["reads"], "columns": self.words["wrote"]}
        maps = {"pairs": Map(self.words["map"], signed(1.5), empty=ITSELF)}
        self._maps = Maps(self.canvas, maps, left=left, top=0.28, size=(side, side), **names)
        self._maps.bar("pairs")
        self._frame = Rectangle((0, 0), 0, 0, fill=False, edgecolor=style.BLACK, linewidth=2.5, zorder=4)
        self.canvas.moving(self._maps["pairs"].ax.add_patch(self._frame))
        start = left + side + 1.15
        ax = whole_ticks(self.canvas.axes(start, 0.28, width - start - 0.2, side, title=self.words["bars"]))
        ax.axhline(0, color=style.GREY, linewidth=0.8)
        sums = PassingShown(0, _pairs().numpy()).sums
        low, high = min(0, *sums), max(0, *sums)
        ax.set(xlabel=self.words["token"], xlim=(-0.6, _TOKENS - 0.4), ylim=(1.15 * low - 0.05, 1.15 * high + 0.05))
        self._own, self._others = (
            Bars(self.canvas, ax, thick=0.7, facecolor=style.W, alpha=alpha) for alpha in (1, 0.35)
        )
        CellGrid(self.canvas, ax, "bars", 1, _TOKENS)

    def update(self, shown: PassingShown) -> None:
        own = np.arange(_TOKENS) == shown.t
        self._maps.update(shown)
        t, n = shown.t, shown.count(shown.t)
        self._frame.set_bounds(-0.5, t + 0.5, t if n else 0, _TOKENS - 1 - t if n else 0)
        self._frame.set_visible(n > 0)
        self._own.update(np.where(own, shown.sums, np.nan))
        self._others.update(np.where(own, np.nan, shown.sums))

    def say(self, shown: PassingShown) -> str:
        t, pairs = shown.t, _TOKENS * (_TOKENS - 1) // 2
        sums = {"dw": shown.dw(t), "read": shown.read(t), "own": shown.own(t)}
        return self.words.say("say", n=shown.count(t), t=t, all=pairs, **sums)

    def arithmetic(self, shown: PassingShown, cell: Cell) -> str:
        if cell.map == "bars":
            t = cell.column
            return self.words.say("bar", t=t, n=shown.count(t), dw=shown.dw(t))
        i, j, t = cell.row, cell.column, shown.t
        if j >= i:
            return self.words.say("future", i=i, j=j)
        return self.words.say("passes" if j < t < i else "misses", i=i, j=j, t=t, x=float(shown.pairs[i, j]))


@functools.cache
def _pairs() -> torch.Tensor:
    """Return, for one channel, what token i reads of token j times the gradient of the loss, float64 [T, T]."""
    x = inputs("rwkv6", T=_TOKENS, H=1, K=1, V=4, decay=-0.3, dtype=torch.float64, seed=SEED)
    do, _ = cotangents("rwkv6", x)
    r, k, v, w, do = (tensor[0, :, 0] for tensor in (x["r"], x["k"], x["v"], x["w"], do))
    between = (w.cumsum(0) - w)[:, None, 0] - w.cumsum(0)[None, :, 0]
    return ((do @ v.T) * r * k.T * between.exp()).tril(-1)
