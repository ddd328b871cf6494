"""The picture of `anomaly`: each operation inside the node, its outputs by token, the one that PyTorch names."""

import numpy as np

from ...figures import Canvas, Cell, Drawing, HeatMap, Marked, style, whole_ticks
from ...language import Words, rephrase, say
from . import NOTHING, Operation, Shown

WORDS = Words() | {
    "knobs": {"T": "length T", "op": "operator", "form": "padding"},
    "alt": "A strip of every operation of the forward and the backward pass, those that return an infinity or a NaN "
    "marked, with an arrow at the first; below, the output and every gradient over the tokens, what is lost marked, "
    "and the gradient that anomaly detection names",
    "operations": "inside the node, not watched: its operations in order (NaN orange, inf pink)",
    "passes": "forward    backward",
    "first": "first: {name}",
    "returned": "what the node returns, token by token",
    "output": "{n}: {name}",
    "o": "o, not watched",
    "token": "token t",
    "nothing": "Anomaly detection says nothing, and there is nothing to say: no operation, forward or backward, makes "
    "an infinity or a NaN.",
    "missed": "Anomaly detection says nothing. Yet operation {n} of the {which} pass, {name}, makes an infinity.",
    "said": "Anomaly detection names {words}, and is right. It does not say that tokens {tokens} are lost,{also} nor "
    "that it began with an {name}, operation {n} of the {which} pass: it looks at what the node returns backward, and "
    "there for NaN alone.",
    "also": {0: "", 1: " nor that {names} is lost too,", 2: " nor that {names} are lost too,"},
    "backward": {False: "forward", True: "backward"},
    "operation": "operation {n} of the {which} pass, {name}: {what}",
    "kinds": {"finite": "finite", "inf": "an infinity", "NaN": "a NaN"},
    "made": "{kind}, made of finite numbers",
    "passed": "{kind}, from operands that had one",
    "returns": "{name} of token {t}: {nan:%} NaN, {inf:%} infinite",
}
ON_VIEW = ("gate", "T", "form")
LINE = "anomaly detection"
PRESETS = {
    "nothing said": {"gate": -1.84, "T": 120, "op": "gsa", "form": "chunk"},
    "ds named": {"gate": -1.86, "T": 120, "op": "gsa", "form": "chunk"},
    "dk named": {"gate": -1.86, "T": 120, "op": "rwkv6", "form": "chunk"},
}


class Picture(Drawing):
    def __init__(self, width: float):
        left, right = 1.15, 0.75
        self.canvas = Canvas(width, 3.3)
        self._strip = self.canvas.axes(left, 0.56, width - left - right, 0.42, xticks=[], yticks=[])
        self._strip.set_title(WORDS["operations"], fontsize=9, loc="right" if width < 8 else "left", pad=17)
        self._operations = HeatMap(self.canvas, self._strip, name="operations")
        self._border = self._strip.axvline(0, color=style.BLACK, linewidth=2, zorder=4)
        self._passes = self._strip.text(0, -0.6, WORDS["passes"], ha="center", va="bottom", fontsize=8.5)
        mark = {"color": style.BROKEN, "markersize": 9, "linewidth": 0, "clip_on": False, "zorder": 8}
        self._arrow = self.canvas.line(self._strip, "^", **mark)
        self._first = self._strip.text(0, 0.95, "", ha="center", va="top", fontsize=9, color=style.BROKEN)
        look = {"title": WORDS["returned"], "size": 9, "pad": 4, "xlabel": WORDS["token"]}
        ax = whole_ticks(self.canvas.axes(left, 1.62, width - left - right, 1.22, **look))
        self._returned = HeatMap(self.canvas, ax, name="returned")
        beside, inch = ax.get_yaxis_transform(), 1 / (width - left - right)
        (self._named,) = ax.plot([1 + 0.09 * inch], [0], "<", **mark, transform=beside)
        self._word = ax.text(
            1 + 0.18 * inch, 0, say("named"), va="center", fontsize=9, color=style.BROKEN, transform=beside
        )
        self._marks = {
            kind: [
                Marked(self.canvas, on, facecolor=colour, edgecolor=colour, linewidth=0.8) for on in (self._strip, ax)
            ]
            for kind, colour in (("NaN", style.BROKEN), ("inf", style.PURPLE))
        }
        self.canvas.moving(self._border, self._passes, self._first, self._named, self._word)

    def update(self, shown: Shown) -> None:
        seen, names = shown.operations, list(shown.nan)
        tokens = len(shown.nan["o"])
        kinds = np.array([each.kind for each in seen])[None]
        forward = sum(not each.backward for each in seen)
        self._operations.update(np.zeros(kinds.shape), finite=np.ones(kinds.shape, bool))
        self._border.set_xdata([forward - 0.5] * 2)
        self._passes.set_x(forward - 0.5)
        n = next((n for n, each in enumerate(seen) if each.made), None)
        for artist in (self._arrow, self._first):
            artist.set_visible(n is not None)
        if n is not None:
            self._arrow.set_data([n], [0.62])
            self._first.set_x(n)
            self._first.set_text(WORDS.say("first", name=seen[n].name))

        ax = self._returned.ax
        if self.changed(names, tokens):
            labels = [WORDS.say("output", n=n, name=name) for n, name in enumerate(names[1:])]
            ax.set_yticks(range(len(names)), [WORDS["o"], *labels])
        lost = {"NaN": _rows(shown.nan) > 0, "inf": _rows(shown.inf) > 0}
        self._returned.update(np.zeros((len(names), tokens)), finite=np.ones((len(names), tokens), bool))
        for kind, (within, returned) in self._marks.items():
            within.update(kinds == kind)
            returned.update(lost[kind])
        row = next((row for row, name in enumerate(names) if shown.words.endswith(f", {name}")), None)
        for artist in (self._named, self._word):
            artist.set_visible(row is not None)
        if row is not None:
            self._named.set_ydata([row])
            self._word.set_y(row)

    def say(self, shown: Shown) -> str:
        first = next((each for each in shown.operations if each.made), None)
        if first is None:
            return WORDS["nothing"]
        where = {
            "name": first.name,
            "n": _number(shown.operations, shown.operations.index(first)),
            "which": WORDS["backward"][first.backward],
        }
        if shown.words == NOTHING:
            return WORDS.say("missed", **where)
        named = shown.words.split(", ")[1]
        rows = shown.nan[named].nonzero()[:, 0]
        also = [name for name in shown.nan if name != named and (shown.nan[name] + shown.inf[name]).any()]
        return WORDS.say(
            "said", words=rephrase(shown.words), tokens=f"{int(rows[0])} … {int(rows[-1])}",
            also=WORDS.say("also", min(len(also), 2), names=", ".join(also)), **where,
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "returned":
            name = list(shown.nan)[cell.row]
            nan, inf = (shares[name][cell.column] for shares in (shown.nan, shown.inf))
            return WORDS.say("returns", name=name, t=cell.column, nan=nan, inf=inf)
        each = shown.operations[cell.column]
        kind = WORDS["kinds"][each.kind]
        words = "{kind}" if each.kind == "finite" else WORDS["made" if each.made else "passed"]
        return WORDS.say(
            "operation", n=_number(shown.operations, cell.column), which=WORDS["backward"][each.backward],
            name=each.name, what=words.format(kind=kind),
        )  # fmt: skip


def _number(seen: list[Operation], at: int) -> int:
    """Return the number, from 1, of operation `at` within its own pass, forward or backward."""
    return 1 + sum(each.backward == seen[at].backward for each in seen[:at])


def _rows(shares) -> np.ndarray:
    return np.stack([share.numpy() for share in shares.values()])
