"""The sketch "one_column" of lesson 05_one_infinity: one overflowing key and the gradient that it makes NaN."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...cases.infinity import follow
from ...figures import style
from ...figures.canvas import Canvas, Cell
from ...figures.maps import Map, Maps, powers, signed
from ...language import Words, say
from ..knobs import DecayKnob
from .sketch import Sketch
from .words import listed, percent

_C, _K = 64, 8
_STOPS = (0.0, -0.5, -1.0, -1.2, -1.3, -1.34, -1.36, -1.38, -1.385, -1.39, -1.4, -1.41, -1.42, -1.5, -2.0, -3.0)

WORDS = Words() | {
    "one_column": {
        "alt": "Two maps over the tokens of one chunk: every key times its factor, the infinite ones crossed, and dr, "
        "what is NaN hatched",
        "maps": {"keys": "every key times its factor: blue small, yellow huge", "dr": "$dr$"},
        "token": "token of the chunk",
        "fine": "At a decay of {w} the largest factor is e^{exponent:.2f} = {largest:.2g}: every key is finite, and so "
        "is every tensor.",
        "lost": {
            1: "At a decay of {w}, one key of {C} is infinite, and nobody of this chunk reads it. Lost of dr: {dr}.",
            2: "At a decay of {w}, the last {n} keys of {C} are infinite. Lost of dr: {dr}.",
        },
        "others": " Lost of {names}: {shares}. The output o is {o}.",
        "o": {False: "finite", True: "lost as well"},
        "keys": "key {t}, channel {c}: {k} · e^{exponent:.4g} = {made}",
        "dr": "dr of token {t}, channel {c}: {made} (true: {true})",
    }
}


@dataclass(frozen=True)
class OneColumnShown:
    """A chunk at one natural-log decay w: the keys, the keys times their factors, dr computed and true, [C, K] each;
    the exponents of the factors [C]; and the share of non-finite values of each tensor, by name."""

    w: float
    k: np.ndarray
    keys: np.ndarray
    dr: np.ndarray
    true: np.ndarray
    exponents: np.ndarray
    lost: Mapping[str, float]


class OneColumn(Sketch, name="one_column", words=WORDS):
    """A map of the keys times their factors, in which one column is infinite, and a map of the gradient dr."""

    knobs = {"decay": lambda: DecayKnob(-1.39, "decay", stops=_STOPS, low=-3.0)}
    presets = {"fine": {"decay": -1.36}, "one column": {"decay": -1.39}, "o dies too": {"decay": -1.42}}
    script = f"""from flakit.cases.infinity import follow

for name, share in follow({{decay}}, C={_C}, K={_K}).lost.items():
    print(f"{{{{name:5}}}} {{{{share:7.2%}}}} not finite")
"""

    @staticmethod
    def compute(decay: float) -> OneColumnShown:
        way = follow(decay, C=_C, K=_K)
        arrays = (x.numpy() for x in (way.operands["k"], way.made.scaled, way.made.dr, way.true.dr, way.exponents[1]))
        return OneColumnShown(decay, *arrays, way.lost)

    def __init__(self, width: float):
        left, down = 0.62, 0.85
        self.canvas = Canvas(width, 3.0)
        scales = {"keys": powers(-1, 38), "dr": signed()}
        self._maps = Maps(
            self.canvas,
            {name: Map(title, scales[name], across=True) for name, title in self.words["maps"].items()},
            left=left, top=0.34, size=(width - left - 0.12, down), gap=0.32, rows=say("channel"),
            columns=self.words["token"], stacked=True,
        )  # fmt: skip
        hatched = style.non_finite_handles()
        self.canvas.figure.legend(handles=hatched, loc="upper right", ncols=2, borderaxespad=0.2)

    def update(self, shown: OneColumnShown) -> None:
        largest = float(np.abs(shown.true).max())
        self._maps["dr"].colours.set_clim(-largest, largest)
        self._maps.update(shown)

    def say(self, shown: OneColumnShown) -> str:
        infinite = int(np.isinf(shown.keys).any(1).sum())
        if not infinite:
            exponent = shown.exponents.max()
            return self.words.say("fine", w=shown.w, exponent=exponent, largest=np.exp(np.float64(exponent)))
        share = {name: percent(lost) for name, lost in shown.lost.items()}
        others = [name for name in ("dk", "dw") if shown.lost[name]]
        lost = self.words.say("lost", n=infinite, w=shown.w, C=len(shown.keys), dr=share["dr"])
        shares, o = listed([share[name] for name in others]), self.words["o"][shown.lost["o"] > 0]
        return lost + self.words.say("others", names=listed(others), shares=shares, o=o)

    def arithmetic(self, shown: OneColumnShown, cell: Cell) -> str:
        t, c = cell.column, cell.row
        values = {"t": t, "c": c, "made": getattr(shown, cell.map)[t, c]}
        if cell.map == "dr":
            return self.words.say("dr", true=shown.true[t, c], **values)
        return self.words.say("keys", k=shown.k[t, c], exponent=shown.exponents[t], **values)
