"""The sketches of lesson 01_rwkv6_forward: how a query reads tokens, and how a state forgets them."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...figures import Bars, Canvas, Cell, CellGrid, name_rows, style
from ...language import Words
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import DecayKnob, integer
from .sketch import Sketch, listed, percent, short

KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
VALUES = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.0, 1.0]])
"""Keys and values of four tokens, [4, 2] each, small enough to compute by hand."""

_MORE = 40  # tokens that "forgetting" reads after the first
_FORGETS = (0.0, -0.01, -0.02, -0.05, -0.07, -0.1, -0.2, -0.3, -0.5, -0.7, -1.0, -1.5, -2.0, -3.0, -5.0, -math.inf)

WORDS = Words() | {
    "reading": {
        "alt": "Left, an arrow for each key and one for the query; middle, a bar for its product with each "
        "key; right, a bar for each number of the output",
        "plane": "keys, and the query",
        "scores": "products: query · key",
        "output": "output",
        "token": "token {n}",
        "query": "q",
        "channel": "channel {n}",
        "say": "The query is ({x}, {y}). Its products with the keys are {scores}. Each token's value counts as often "
        "as its product says: the output is ({o0}, {o1}).",
        "score": "token {n}: {x} · {k0} + {y} · {k1} = {score}",
        "sum": "channel {n}: {terms} = {o}",
    },
    "forgetting": {
        "alt": "Bars: what is left in the state of what a token wrote, after one more token, two more, and so on",
        "x": "more tokens read",
        "y": "what is left",
        "half": "half is left",
        "none": "With w = 0 nothing fades: after {last} more tokens all of it is left.",
        "half-life": "With w = {w}, {one} is left after one more token. Half is left after {half:.3g} tokens.",
        "quick": "With w = {w}, {one} is left after one more token: less than half.",
        "lost": "With w = -inf nothing is left after one more token.",
        "arithmetic": "after {n} more: e^({n} · {w}) = {left}",
    },
}


@dataclass(frozen=True)
class ReadingShown:
    """A query [2], its products with `KEYS` [T], and the output [2]."""

    query: np.ndarray
    scores: np.ndarray
    output: np.ndarray


class Reading(Sketch, name="reading", words=WORDS):
    """Arrows for the keys and the query of a few two-channel tokens, and bars for their products and the output."""

    knobs = {"direction": lambda: integer(0, 0, 345, "direction", 15)}
    presets = {"along channel 0": {"direction": 0}, "along channel 1": {"direction": 90}}
    script = """import math

import torch
from flakit.panels.sketches.rwkv6_forward import KEYS, VALUES

angle = math.radians({direction})
query = torch.tensor([math.cos(angle), math.sin(angle)])
print("products", KEYS @ query)
print("output", (KEYS @ query) @ VALUES)
"""

    @staticmethod
    def compute(direction: int) -> ReadingShown:
        angle = math.radians(direction)
        query = torch.tensor([math.cos(angle), math.sin(angle)])
        scores = KEYS @ query
        return ReadingShown(*(x.numpy() for x in (query, scores, scores @ VALUES)))

    _reach = {"scores": 2.6, "output": 7.0}  # ends of the axes; the lesson's numbers reach 1.4 and 3.6

    def __init__(self, width: float):
        height = 2.6
        self.canvas = Canvas(width, height)
        self._bars, self._texts = {}, {}
        top, plane = height - 0.5 - 1.72, 1.72
        rest = width - 0.4 - plane - 0.8 - 0.85 - 0.2
        ax = self.canvas.axes(0.4, top, plane, plane)
        ax.set(title=self.words["plane"], xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        ax.axhline(0, color=style.EMPTY, zorder=0)
        ax.axvline(0, color=style.EMPTY, zorder=0)
        arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
        wide = arrow | {"mutation_scale": 22, "linewidth": 5}  # visible on both sides of a parallel query
        for n, key in enumerate(KEYS.numpy()):
            look = style.LINES[n]["color"]
            ax.annotate("", key, (0, 0), arrowprops=wide | {"color": look})
            ax.annotate(str(n), 1.28 * key, ha="center", va="center", color=look, fontsize=9)
        (self._query,) = self.canvas.moving(
            ax.annotate("", (1, 0), (0, 0), arrowprops=arrow | {"color": style.BLACK, "linewidth": 1.8}, zorder=5)
        )
        (self._name,) = self.canvas.moving(
            ax.text(0, 0, self.words["query"], ha="center", va="center", fontsize=9, fontweight="bold", zorder=6)
        )
        tokens = [self.words.say("token", n=n) for n in range(len(KEYS))]
        channels = [self.words.say("channel", n=n) for n in (0, 1)]
        for name, labels, colours, left, across in (
            ("scores", tokens, [look["color"] for look in style.LINES[: len(KEYS)]], 0.4 + plane + 0.8, 0.55 * rest),
            ("output", channels, [style.GREY] * 2, width - 0.2 - 0.45 * rest, 0.45 * rest),
        ):
            ax, rows, reach = self.canvas.axes(left, top, across, plane), range(len(labels)), self._reach[name]
            ax.set(title=self.words[name], xlim=(-reach, reach), xticks=(-reach // 2 + 1, 0, reach // 2))
            ax.set_ylim(len(labels) - 0.5, -0.5)
            name_rows(ax, labels)
            ax.axvline(0, color=style.BLACK, linewidth=0.8)
            self._bars[name] = self.canvas.moving(*ax.barh(rows, [0.0] * len(rows), height=0.6, color=colours))
            texts = (ax.text(0, n, "", va="center", fontsize=8.5, zorder=6) for n in rows)
            self._texts[name] = self.canvas.moving(*texts)
            CellGrid(self.canvas, ax, name, len(labels), 1)

    def update(self, shown: ReadingShown) -> None:
        self._query.xy = tuple(shown.query)
        x, y = shown.query
        self._name.set_position((x + 0.35 * y, y - 0.35 * x))  # beside the tip: the keys' numbers lie beyond it
        for name, values in (("scores", shown.scores), ("output", shown.output)):
            for bar, text, value in zip(self._bars[name], self._texts[name], values, strict=True):
                bar.set_width(value)
                away = math.copysign(0.03 * self._reach[name], value)
                text.set(x=value + away, text=short(value), ha="left" if value >= 0 else "right")

    def say(self, shown: ReadingShown) -> str:
        return self.words.say(
            "say", x=short(shown.query[0]), y=short(shown.query[1]),
            scores=listed([short(x) for x in shown.scores]), o0=short(shown.output[0]), o1=short(shown.output[1]),
        )  # fmt: skip

    def arithmetic(self, shown: ReadingShown, cell: Cell) -> str:
        n = cell.row
        if cell.map == "scores":
            (x, y), (k0, k1) = map(short, shown.query), map(short, KEYS[n])
            return self.words.say("score", n=n, x=x, y=y, k0=k0, k1=k1, score=short(shown.scores[n]))
        terms = " + ".join(f"{short(a)} · {short(v)}" for a, v in zip(shown.scores, VALUES[:, n], strict=True))
        return self.words.say("sum", n=n, terms=terms, o=short(shown.output[n]))


@dataclass(frozen=True)
class ForgettingShown:
    """A natural-log decay w <= 0, and the share left of what a token wrote after 1 … N more tokens, [N]."""

    w: float
    left: np.ndarray


class Forgetting(Sketch, name="forgetting", words=WORDS):
    """The share left of what a token wrote as bars over the tokens read since, with a mark at one half."""

    knobs = {"w": lambda: DecayKnob(-0.1, "decay w", stops=_FORGETS)}
    presets = {"slow": {"w": -0.02}, "quick": {"w": -1.0}}
    script = """import math

for more in range(1, 41):
    print(more, math.exp(more * {w}))
"""

    @staticmethod
    def compute(w: float) -> ForgettingShown:
        """Return what later tokens read of the 1 that one token wrote into a state of one number: what decay has left.

        A token reads before its own decay, so that the next one still reads 1."""
        ones = torch.ones(1, _MORE + 2, 1, 1, dtype=torch.float64)
        k = ones.clone()
        k[:, 1:] = 0
        o = fused_recurrent_rwkv6(ones, k, ones, w * ones, torch.zeros(1, 1).double()).o
        return ForgettingShown(w, o[0, 2:, 0, 0].numpy())

    def __init__(self, width: float):
        ax = self.plot(width, 2.4, left=0.65, right=0.15, top=0.15, bottom=0.5)
        self._bars = Bars(self.canvas, ax, thick=0.7, facecolor=style.BLUE)
        ax.set(xlabel=self.words["x"], xlim=(0.5, _MORE + 0.5))
        ax.set(ylabel=self.words["y"], ylim=(0, 1.02), yticks=(0, 0.25, 0.5, 0.75, 1))
        ax.axhline(0.5, color=style.GREY, linewidth=1, linestyle=(0, (4, 2)), zorder=0)
        (self._mark,) = self.canvas.moving(
            ax.axvline(0, color=style.BLACK, linewidth=1.8, linestyle=(0, (5, 2)), zorder=3)
        )
        (self._half,) = self.canvas.moving(ax.text(0, 0.93, self.words["half"], va="center", fontsize=9))
        CellGrid(self.canvas, ax, "left", 1, _MORE)

    def update(self, shown: ForgettingShown) -> None:
        half = _half_life(shown.w)
        self._bars.update([np.nan, *shown.left])
        for artist in (self._mark, self._half):
            artist.set_visible(0.5 <= half <= _MORE + 0.5)
        self._mark.set_xdata([half, half])
        late = half > 0.85 * _MORE
        self._half.set(x=half + (-0.3 if late else 0.3), ha="right" if late else "left")

    def say(self, shown: ForgettingShown) -> str:
        half, one = _half_life(shown.w), percent(float(shown.left[0]))
        if shown.w == 0:
            return self.words.say("none", last=_MORE)
        if shown.w == -math.inf:
            return self.words["lost"]
        return self.words.say("half-life" if half >= 1 else "quick", w=shown.w, one=one, half=half)

    def arithmetic(self, shown: ForgettingShown, cell: Cell) -> str:
        n = cell.column + 1
        return self.words.say("arithmetic", n=n, w=shown.w, left=shown.left[n - 1])


def _half_life(w: float) -> float:
    """Return the number of tokens after which half is left at a natural-log decay w; inf at 0."""
    return math.inf if w == 0 else math.log(2) / -w
