"""The weights of every pair as they should be and as the guard leaves them, and how far each output is off."""

import math

import numpy as np

from ...figures import style
from ...figures.canvas import Canvas, Cell
from ...figures.heatmap import HeatMap
from ...figures.marks import Bars, Marked, Ring, whole_ticks
from ...language import Words
from ...numerics.words import number, percent
from . import Shown

WORDS = Words() | {
    "knobs": {"C": "chunk C", "share": "at w = 0", "w": "other w"},
    "alt": "A strip of the chunk's tokens, those without decay filled; the weights of its pairs, a row for each output "
    "and a column for each key, by the right guard and by the wrong one, the lost pairs marked; and how far each "
    "output is off",
    "tokens": "no decay",
    "right": "weights, guard d ≤ 0",
    "guarded": "weights, guard d < 0",
    "in right": "yellow 1, dark 0",
    "in guarded": "orange: 1 became 0",
    "lost": "lost",
    "off": "output off by",
    "output i": "output i",
    "key j": "key j",
    "fine": "Something decays between any two tokens, so d is never 0 and both guards give the same weights. Decays "
    "drawn at random are like this: no random test sees the fault.",
    "some": "Between {count} of {all} pairs nothing decays: d = 0, and the weight is e^0 = 1. The guard d < 0 takes "
    "that for forbidden and makes it e^-inf = 0: what nobody forgot is not read, and the output is off by {off}.",
    "all": "Nothing decays anywhere: every pair has d = 0 and the weight e^0 = 1. The guard d < 0 makes each of them "
    "e^-inf = 0, and no output reads anything.",
    "future": "output {i}, key {j}: an output reads earlier tokens only",
    "kept": "output {i}, key {j}: d = {d} < 0, so the weight is e^{d} = {weight}",
    "forbidden": "output {i}, key {j}: d = 0 is not < 0, so the weight is e^-inf = 0 (true: e^0 = 1)",
    "token": "token {j}: decay w = {w}, so e^{w} = {kept} of the state is kept",
    "row": "output {i}: {count} of its {all} pairs are lost, it is off by {off}",
}
ON_VIEW = ("share", "w")
LINE = "pairs lost"
PRESETS = {
    "fine": {"C": 64, "share": 0.0, "w": -0.1},
    "some lost": {"C": 64, "share": 0.5, "w": -0.1},
    "all lost": {"C": 64, "share": 1.0, "w": -0.1},
}


class Picture:
    """Persistent: `update` redraws in place. width: inches."""

    def __init__(self, width: float):
        left, gap, bars, strip, top, bottom = 0.72, 0.14, 1.0, 0.14, 0.48, 0.5
        side = min((width - left - 3 * gap - bars) / 2, 2.75)
        self.canvas = Canvas(width, top + side + bottom)
        self._maps, self._tokens = {}, []
        with style.context():
            for n, name in enumerate(("right", "guarded")):
                at = left + n * (side + gap)
                ax = whole_ticks(self.canvas.axes(at, top, side, side))
                ax.set_xlabel(WORDS["key j"])
                over = self.canvas.axes(at, top - strip - 0.05, side, strip)
                over.set(title=WORDS[name], xticks=[], yticks=[])
                if n == 0:
                    ax.set_ylabel(WORDS["output i"])
                    over.set_ylabel(WORDS["tokens"], rotation=0, ha="right", va="center", fontsize=8.5)
                else:
                    ax.tick_params(labelleft=False)
                self._maps[name] = HeatMap(self.canvas, ax, name=name)
                words = ax.text(0.96, 0.95, WORDS[f"in {name}"], ha="right", va="top", transform=ax.transAxes, zorder=3)
                self.canvas.moving(words)
                self._tokens.append(HeatMap(self.canvas, over, cmap="Greys", name=f"tokens over {name}"))
            self._lost = Marked(self.canvas, ax, facecolor=style.VERMILLION, edgecolor=style.VERMILLION, linewidth=0.8)
            self._ring = Ring(self.canvas, ax)
            at += side + gap + 0.06
            self._ax = self.canvas.axes(at, top, width - at - gap, side)
            self._ax.set(xlim=(0, 1.1), title=WORDS["off"])
            self._ax.set_xticks([0, 1], ["0", "100%"])
            self._ax.tick_params(labelleft=False)
            self._ax.spines[["top", "right"]].set_visible(False)
            self._off = Bars(self.canvas, self._ax, horizontal=True, thick=1.0, facecolor=style.VERMILLION)

    def update(self, shown: Shown) -> None:
        C = len(shown.w)
        empty = ~np.tri(C, k=-1, dtype=bool)
        for name, heat in self._maps.items():
            heat.update(getattr(shown, name).numpy(), empty=empty)
        for strip in self._tokens:
            strip.update(0.8 * (shown.w == 0).numpy()[None])
        self._lost.update(shown.lost)
        self._ring.update(shown.lost, WORDS["lost"])
        self._ax.set_ylim(C - 0.5, -0.5)
        self.canvas.pointable("off", self._ax, C, 1)
        self._off.update(shown.off)

    def say(self, shown: Shown) -> str:
        C, count = len(shown.w), int(shown.lost.sum())
        pairs = C * (C - 1) // 2
        words = WORDS["fine" if not count else "all" if count == pairs else "some"]
        return words.format(count=count, all=pairs, off=percent(shown.off_by))

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if cell.map.startswith("tokens"):
            w = float(shown.w[j])
            return WORDS["token"].format(j=j, w=number(w), kept=number(math.exp(w)))
        if cell.map == "off":
            lost = int(shown.lost[i].sum())
            return WORDS["row"].format(i=i, count=lost, all=i, off=percent(float(shown.off[i])))
        if j >= i:
            return WORDS["future"].format(i=i, j=j)
        if shown.lost[i, j]:
            return WORDS["forbidden"].format(i=i, j=j)
        return WORDS["kept"].format(i=i, j=j, d=number(float(shown.d[i, j])), weight=number(float(shown.guarded[i, j])))
