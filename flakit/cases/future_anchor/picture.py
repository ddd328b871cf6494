"""The picture of `future_anchor`: the decays that the anchor sums, and each output's change with one token's decays."""

import numpy as np

from ...figures import Bars, Canvas, Cell, CellGrid, Drawing, HeatMap, Marked, name_rows, style
from ...language import Words, say
from ...numerics.words import error, number
from . import Shown

WORDS = Words() | {
    "knobs": {"anchor": "anchor n", "P": "changed P", "T": "tokens T", "block": "block rows"},
    "alt": "A strip of the block's tokens that marks those whose decays the anchor adds up, and the token whose decays "
    "change; below it, on a logarithmic scale, by how much every output moves, those before that token apart",
    "sum": "in the sum n",
    "none": "no anchor: every pair takes the difference of its own two sums",
    "row": "n",
    "changed": "P",
    "moved": "change of output",
    "before": "before P: must not change",
    "after": "from P on: may change",
    "same": "the same to the last bit",
    "future": "Token {P}'s decays change, and the anchor n, the sum of the decays up to row {row}, holds them. In "
    "e^(g_i - n) · e^(n - g_j) n cancels in algebra but not in rounding: {count} of the {P} outputs before token {P} "
    "change, by up to {size} of their size.",
    "past": "The anchor n is the sum of the decays up to row {row}, before token {P}: nothing that is read before "
    "token {P} holds its decays, and the {P} outputs there are the same to the last bit.",
    "pair": "Every pair takes the difference of its own two sums, which end before token {P}: the {P} outputs before "
    "it are the same to the last bit.",
    "first": "Token 0 is the first: there is no output before it.",
    "decay": "token {t}: w = {w} in channel 0{held}",
    "another": "token {t}: w = {w} in channel 0 becomes {later}{held}",
    "held": ", a part of the sum n",
    "output": "output {t}: {moved}. Its own key's weight in channel {c} is {weight}{later} (true: 1)",
    "then": ", and then {weight}",
    "still": " before and after",
    "no anchor": "output {t}: {moved}. Its own key's weight is e^0 = 1 before and after",
    "moves": "moves by {size}",
    "stays": "the same to the last bit",
}
ON_VIEW = ("P", "anchor")
LINE = "outputs before it change"
PRESETS = {
    "future moves the past": {"anchor": "middle", "P": 5, "T": 16, "block": 16},
    "after the anchor": {"anchor": "middle", "P": 9, "T": 16, "block": 16},
    "block not full": {"anchor": "middle", "P": 5, "T": 6, "block": 16},
    "first row": {"anchor": "first", "P": 5, "T": 16, "block": 16},
}

_LOW, _HIGH = -9.0, 1.5
"""Range of the axis of changes, in powers of ten."""


class Picture(Drawing):
    def __init__(self, width: float):
        left, top, strip, height = 0.95, 0.34, 0.26, 2.25
        self.canvas = Canvas(width, top + strip + 0.12 + height + 0.72)
        tokens = self.canvas.axes(left, top, width - left - 0.15, strip, xticks=[])
        name_rows(tokens, [WORDS["sum"]])
        self._tokens = HeatMap(self.canvas, tokens, cmap="Blues", name="tokens")
        self._held = Marked(self.canvas, tokens, facecolor=style.W)
        self._none = tokens.text(
            0.5, 0.5, WORDS["none"], transform=tokens.transAxes, ha="center", va="center", zorder=5
        )
        self._row = tokens.text(0, 0, WORDS["row"], ha="center", va="center_baseline", zorder=5)
        self._changed = tokens.annotate(
            WORDS["changed"], (0, -0.5), (0, 15), textcoords="offset points", ha="center", va="center",
            fontweight="bold", annotation_clip=False,
            arrowprops={"arrowstyle": "-|>", "shrinkA": 4, "shrinkB": 0, "color": style.BLACK},
        )  # fmt: skip
        self._ax = self.canvas.axes(left, top + strip + 0.12, width - left - 0.15, height)
        self._ax.set(ylim=(_LOW, _HIGH), xlabel=say("token"), ylabel=WORDS["moved"])
        self._ax.set_yticks(range(-9, 1, 3), ["0", "$10^{-6}$", "$10^{-3}$", "1"])
        self._before = Bars(self.canvas, self._ax, facecolor=style.BROKEN, label=WORDS["before"])
        self._after = Bars(self.canvas, self._ax, facecolor=style.SKY, label=WORDS["after"])
        look = {"color": style.GREEN, "markersize": 6, "clip_on": False, "zorder": 4}
        self._same = self.canvas.line(self._ax, "o", **look, label=WORDS["same"])
        self._line = self._ax.axvline(0, color=style.BLACK, linewidth=1, linestyle=(0, (2, 2)))
        self._cells = CellGrid(self.canvas, self._ax, "outputs")
        self.canvas.legend(self._before.patch, self._after.patch, self._same, columnspacing=1.2)
        self.canvas.moving(self._none, self._row, self._changed, self._line)

    def update(self, shown: Shown) -> None:
        T, P = len(shown.moved), shown.P
        tokens = np.arange(T)
        held = np.zeros(T, bool) if shown.row is None else tokens <= shown.row
        self._tokens.update(0.45 * held[None], empty=~held[None])
        self._held.update((held & (tokens == P))[None])
        self._none.set_visible(shown.row is None)
        self._row.set_visible(shown.row is not None)
        self._row.set_x(shown.row or 0)
        self._changed.xy = P, -0.5
        if self.changed(T):
            self._ax.set_xlim(-0.5, T - 0.5)
        self._cells.update(1, T)
        moved = shown.moved.numpy()
        sizes = np.where(moved > 0, shown.moved.log10().clamp(_LOW, _HIGH), np.nan)
        self._before.update(np.where(tokens < P, sizes, np.nan), begin=_LOW)
        self._after.update(np.where(tokens >= P, sizes, np.nan), begin=_LOW)
        same = tokens[moved == 0]
        self._same.set_data(same, np.full(len(same), _LOW))
        self._line.set_xdata([P - 0.5, P - 0.5])

    def say(self, shown: Shown) -> str:
        count = int((shown.moved[: shown.P] > 0).sum())
        if shown.P == 0:
            return WORDS["first"]
        kind = "future" if count else "pair" if shown.row is None else "past"
        return WORDS.say(kind, P=shown.P, row=shown.row, count=count, size=error(shown.largest))

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t = cell.column
        if cell.map == "tokens":
            w, later = (x[t, 0] for x in shown.w)
            held = WORDS["held"] if shown.row is not None and t <= shown.row else ""
            return WORDS.say("decay" if w == later else "another", t=t, w=w, later=later, held=held)
        moved = WORDS.say("moves" if shown.moved[t] > 0 else "stays", size=error(float(shown.moved[t])))
        if shown.row is None:
            return WORDS.say("no anchor", t=t, moved=moved)
        before, after = shown.own
        c = int((after - before)[t].abs().argmax())
        (a, b), was, now = (float(x[t, c]) for x in shown.exponents), float(before[t, c]), float(after[t, c])
        return WORDS.say(
            "output", t=t, moved=moved, c=c, weight=_weight(a, was),
            later=WORDS.say("still" if a == b else "then", weight=_weight(b, now)),
        )  # fmt: skip


def _weight(exponent: float, weight: float) -> str:
    return f"e^{number(exponent)} · e^{number(-exponent)} = {number(weight, 8)}"
