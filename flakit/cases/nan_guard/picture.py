"""The picture of `nan_guard`: the weights of every pair, right and guarded, and the error of each output."""

from ...figures import ITSELF, Bars, Canvas, Cell, Drawing, HeatMap, Map, Maps, style
from ...language import Words, say
from . import Shown

WORDS = Words() | {
    "knobs": {"C": "chunk C", "share": "at w = 0", "w": "other w"},
    "alt": "A strip of the chunk's tokens, those without decay filled; the weights of its pairs, a row for each output "
    "and a column for each key, by the right guard and by the wrong one, the lost pairs marked; and how far each "
    "output is off",
    "tokens": "no decay",
    "right": "weights, guard d ≤ 0",
    "guarded": "weights, guard d < 0",
    "in right": "yellow 1, blue 0",
    "in guarded": "orange: 1 became 0",
    "off": "output off by",
    "fine": "Something decays between any two tokens, so d is never 0 and both guards give the same weights. Decays "
    "drawn at random are like this: no random test sees the fault.",
    "some": "Between {count} of {all} pairs nothing decays: d = 0, and the weight is e^0 = 1. The guard d < 0 takes "
    "that for forbidden and makes it e^-inf = 0: what nobody forgot is not read, and the output is off by {off:%}.",
    "all": "Nothing decays anywhere: every pair has d = 0 and the weight e^0 = 1. The guard d < 0 makes each of them "
    "e^-inf = 0, and no output reads anything.",
    "future": "output {i}, key {j}: an output reads earlier tokens only",
    "kept": "output {i}, key {j}: d = {d} < 0, so the weight is e^{d} = {weight}",
    "forbidden": "output {i}, key {j}: d = 0 is not < 0, so the weight is e^-inf = 0 (true: e^0 = 1)",
    "token": "token {j}: decay w = {w}, so e^{w} = {kept} of the state is kept",
    "row": "output {i}: {count} of its {all} pairs are lost, it is off by {off:%}",
}
ON_VIEW = ("share", "w")
LINE = "pairs lost"
PRESETS = {
    "fine": {"C": 64, "share": 0.0, "w": -0.1},
    "some lost": {"C": 64, "share": 0.5, "w": -0.1},
    "all lost": {"C": 64, "share": 1.0, "w": -0.1},
}


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, bars, strip, top, bottom = 0.72, 0.14, 1.0, 0.14, 0.48, 0.5
        side = min((width - left - 3 * gap - bars) / 2, 2.75)
        self.canvas = Canvas(width, top + side + bottom)
        self._tokens = []
        maps = {
            name: Map("", empty=ITSELF, note=WORDS[f"in {name}"], lost=("lost", say("lost")) if n else None)
            for n, name in enumerate(("right", "guarded"))
        }
        self._maps = Maps(
            self.canvas, maps, left=left, top=top, size=(side, side), gap=gap,
            rows=say("output i"), columns=say("key j"),
        )  # fmt: skip
        for n, name in enumerate(maps):
            over = self.canvas.axes(left + n * (side + gap), top - strip - 0.05, side, strip, xticks=[], yticks=[])
            over.set_title(WORDS[name])
            if n == 0:
                over.set_ylabel(WORDS["tokens"], rotation=0, ha="right", va="center", fontsize=8.5)
            self._tokens.append(HeatMap(self.canvas, over, cmap="Greys", name=f"tokens over {name}"))
        at = self._maps.right + gap + 0.06
        self._ax = self.canvas.axes(at, top, width - at - gap, side, title=WORDS["off"], size=10, xlim=(0, 1.1))
        self._ax.set_xticks([0, 1], ["0", "100%"])
        self._ax.tick_params(labelleft=False)
        self._off = Bars(self.canvas, self._ax, horizontal=True, thick=1.0, facecolor=style.BROKEN)

    def update(self, shown: Shown) -> None:
        C = len(shown.w)
        self._maps.update(shown)
        for strip in self._tokens:
            strip.update(0.8 * (shown.w == 0).numpy()[None])
        self._ax.set_ylim(C - 0.5, -0.5)
        self.canvas.pointable("off", self._ax, C, 1)
        self._off.update(shown.off)

    def say(self, shown: Shown) -> str:
        C, count = len(shown.w), int(shown.lost.sum())
        pairs = C * (C - 1) // 2
        kind = "fine" if not count else "all" if count == pairs else "some"
        return WORDS.say(kind, count=count, all=pairs, off=shown.off_by)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if cell.map.startswith("tokens"):
            return WORDS.say("token", j=j, w=shown.w[j], kept=shown.w[j].exp())
        if cell.map == "off":
            return WORDS.say("row", i=i, count=shown.lost[i].sum(), all=i, off=shown.off[i])
        kind = "future" if j >= i else "forbidden" if shown.lost[i, j] else "kept"
        return WORDS.say(kind, i=i, j=j, d=shown.d[i, j], weight=shown.guarded[i, j])
