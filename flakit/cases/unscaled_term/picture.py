"""The picture of `unscaled_term`: what the penalty adds to the gradient of each token's largest logit, and should."""

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, style
from ...language import Words, number, say
from . import Shown, T

WORDS = Words() | {
    "knobs": {"scale": "loss ×", "way": "the term"},
    "alt": "For each token the size of three gradients at its largest logit, on a logarithmic scale: that of the loss "
    "alone, what a term of the loss should add to it, and what it adds; the last is orange where it is another",
    "title": "loss × {scale}: the gradient at each token's largest logit, divided by it",
    "alone": "of the loss alone",
    "wanted": "what the term should add",
    "got": "what it adds",
    "wrong": "what it adds, wrong",
    "one": "The loss is taken as it is, and a 1 arrives at the term. It has its full size, whether it looks at what "
    "arrives or not.",
    "strong": "The loss is multiplied by {scale} before the backward pass, as where its parts are accumulated, and the "
    "gradient is divided by it again. The term does not see what arrives: it is {factor} times as large as it should "
    "be.",
    "weak": "The loss is multiplied by {scale} before the backward pass, as a loss scaler does, and the gradient is "
    "divided by it again. The term does not see what arrives: it is {factor} times smaller than it should be.",
    "right": "The loss is multiplied by {scale} before the backward pass, and the gradient is divided by it again. The "
    "term is multiplied along with it, and has its full size.",
    "cell": "token {t}, largest logit {largest:.3g}: the loss alone has the gradient {alone:.3g} there; the term "
    "should add {wanted:.3g} and adds {got:.3g}",
}
ON_VIEW = ("scale", "way")
LINE = "of the term is left"
PRESETS = {
    "no scale": {"scale": 1.0, "way": "ignores what arrives"},
    "in 8 parts": {"scale": 0.125, "way": "ignores what arrives"},
    "a loss scaler": {"scale": 65536.0, "way": "ignores what arrives"},
    "repaired": {"scale": 65536.0, "way": "multiplies by what arrives"},
}

_LOW, _HIGH = 1e-11, 1.0


class Picture(Drawing):
    def __init__(self, width: float):
        left = 0.85
        self.canvas = Canvas(width, 3.0)
        ax = self.canvas.axes(left, 0.35, width - left - 0.2, 2.15)
        self._title = ax.set_title("", fontsize=9, loc="left", pad=4)
        ax.set(yscale="log", ylim=(_LOW, _HIGH), xlim=(-0.5, T - 0.5))
        ax.set(xlabel=say("token t"), ylabel=style.logarithmic(say("size")))
        ax.set_yticks([1e-10, 1e-8, 1e-6, 1e-4, 1e-2])
        ax.minorticks_off()
        looks = {"alone": {"marker": "o", "color": style.GREY, "markersize": 5}}
        looks["wanted"] = {"marker": "_", "color": style.BLACK, "markersize": 14, "markeredgewidth": 2.2}
        looks["got"] = {"marker": "o", "color": style.BLUE, "markersize": 6}
        looks["wrong"] = {"marker": "X", "color": style.BROKEN, "markersize": 8}
        self._points = {
            name: self.canvas.line(ax, linestyle="none", label=WORDS[name], zorder=3, **look)
            for name, look in looks.items()
        }
        ax.legend(loc="upper right", borderaxespad=0.2, labelspacing=0.3, ncols=4, columnspacing=1.0)
        CellGrid(self.canvas, ax, "tokens", 1, T)
        self.canvas.moving(self._title)

    def update(self, shown: Shown) -> None:
        self._title.set_text(WORDS.say("title", scale=_whole(shown.scale)))
        tokens, right = np.arange(T), _right(shown)
        drawn = {"alone": shown.alone, "wanted": shown.wanted, "got" if right else "wrong": shown.got}
        for name, points in self._points.items():
            points.set_data(*((tokens, drawn[name].abs().numpy()) if name in drawn else ([], [])))

    def say(self, shown: Shown) -> str:
        if shown.scale == 1:
            return WORDS.say("one")
        kind = "right" if _right(shown) else "strong" if shown.left > 1 else "weak"
        factor = max(shown.left, 1 / shown.left)
        return WORDS.say(kind, scale=_whole(shown.scale), factor=_whole(factor))

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t = cell.column
        values = {name: getattr(shown, name)[t] for name in ("largest", "alone", "wanted", "got")}
        return WORDS.say("cell", t=t, **values)


def _right(shown: Shown) -> bool:
    return abs(shown.left - 1) < 1e-6


def _whole(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else number(x, 3)
