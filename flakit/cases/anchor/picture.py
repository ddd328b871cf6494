"""The picture of `anchor`: one chunk's cumulative decay with its anchors, the two exponents of every pair, the weights
that they give, and the tokens at which each tensor is non-finite."""

import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from ...figures import Canvas, Cell, CellGrid, Drawing, HeatMap, Map, Maps, Marked, powers, signed, style, whole_ticks
from ...language import Words, say
from ..laws import LN_MAX
from . import SCHEMES, Shown

WORDS = Words() | {
    "knobs": {"w": "decay w", "row": "at token", "scheme": "anchor", "op": "operator", "T": "length T"},
    "alt": "One chunk with a row for each token: the running sum of the decays with the anchors as read and as meant; "
    "maps of the two exponents of every pair and of the weight they make, infinities hatched; and for every tensor the "
    "tokens at which it is lost",
    "sums": "1 sum and\nanchors",
    "read": {False: "2 read factor\n$ge_i - n$", True: "2 read factor\n$gi_i - n$"},
    "key": "3 key factor\n$n - gi_j$",
    "weights": "4 their product:\nthe weight",
    "lost": "5 lost: NaN,\ninf crossed",
    "colours": "2, 3: green below 0, purple above · 4: yellow 1, blue near 0 · plain grey: no product",
    "row": "row i",
    "gi": "$gi_i$",
    "as read": "read",
    "as meant": "meant",
    "anchor": "Anchor {label}.",
    "infinite": "Row {row} of the {factor} factor has the exponent {exponent}, above {end:.2f}: it is infinite, though "
    "no weight is above 1. Lost: {lost}; finite: {finite}.",
    "large": "The largest exponent is {exponent}, in row {row} of the {factor} factor: below {end:.2f}, so every "
    "factor is finite, and every tensor.",
    "small": "No exponent is above 0, whatever the decay: every factor lies between 0 and 1, and all is finite.",
    "factors": {"read": "read", "key": "key"},
    "pair": "output {i}, key {j}: e^{read} · e^{key} = {q} · {k} = {weight}{true}",
    "future": "output {i}, key {j}: e^{read} · e^{key} = {q} · {k} = {weight}, masked afterwards",
    "none": "output {i}, key {j}: no product is formed",
    "alone": "row {i}: e^({own} - n) = e^{exponent} = {factor}{inf}",
    "alone inf": "; with no key or a masked one it meets a zero, and 0 · inf = NaN",
    "no anchor": "row {i}: no anchor, every pair has an exponent of its own",
    "sum": "row {i}: gi = {sum}, the read has decayed by {seen}{anchors}",
    "is read": "; as read the anchor of rows {rows}",
    "is meant": "; as meant the anchor of rows {rows}",
    "no token": "row {i}: behind the end of the sequence",
    "tensor": "{name} of token {t}: {nan:%} NaN, {inf:%} infinite",
    "true": " (true: {true})",
}
ON_VIEW = ("w", "row", "scheme")
LINE = "o ends at |w|"
PRESETS = {
    "fine": {"w": -88.7, "row": 16, "scheme": "first-row", "op": "rwkv6", "T": 128, "chunk": 64, "block": 16},
    "bug A": {"w": -88.8, "row": 16, "scheme": "first-row", "op": "rwkv6", "T": 128, "chunk": 64, "block": 16},
    "bad repair": {"w": -1.4, "row": "none", "scheme": "previous-row-across", "op": "rwkv6", "T": 128, "chunk": 64},
    "repaired": {"w": -88.8, "row": 16, "scheme": "previous-row", "op": "rwkv6", "T": 128, "chunk": 64, "block": 16},
}

_END = LN_MAX[next(iter(LN_MAX))]
_FEW = 6
"""The largest number of infinite rows that get arrows."""


class Picture(Drawing):
    def __init__(self, width: float):
        wide = width > 8
        left, top, gap, strip = 0.62, 0.5, 0.15, 0.1
        first, last = (1.2, 1.2) if wide else (0.8, 0.86)
        side = (width - left - first - last - 4 * gap - 3 * 0.1 - strip - 0.08) / 3
        high, below = 2.4, 0.68
        self.canvas, self._first, self._arrows = Canvas(width, top + high + below), 0, {}
        self.canvas.figure.text(left / width, 0.03, WORDS["colours"], fontsize=8.5, va="bottom")
        self._draw_sums(self.canvas.axes(left, top, first, high, title=WORDS["sums"], size=9, pad=4, framed=True))
        at = left + first + gap
        ax = self.canvas.axes(at, top, strip, high, xticks=[], yticks=[])
        self._alone = HeatMap(self.canvas, ax, cmap=style.SIGNED, vmin=-_END, vmax=_END, name="alone")
        mark = {"color": style.BROKEN, "markersize": 8, "linewidth": 0, "clip_on": False, "zorder": 8}
        self._arrows["alone"] = self.canvas.line(ax, ">", **mark)
        at += strip + 0.04
        titles = {**WORDS, "read": WORDS["read"][False]}
        scales = {"read": signed(_END), "key": signed(_END), "weights": powers(-20, 0)}
        self._maps = Maps(
            self.canvas, {name: Map(titles[name], scale, empty="unformed") for name, scale in scales.items()},
            left=at, top=top, size=(side, high), gap=gap + 0.1, columns=say("key j"), labels=False,
        )  # fmt: skip
        for name, heat in self._maps.items():
            self._arrows[name] = self.canvas.line(heat.ax, "<", **mark)
        at = self._maps.right + gap + 0.1
        self._draw_lost(self.canvas.axes(at, top, last, high, title=WORDS["lost"], size=9, pad=4, xticks=[], yticks=[]))

    def _draw_sums(self, ax) -> None:
        self._sums = whole_ticks(ax)
        ax.set(xlabel=WORDS["gi"], ylabel=WORDS["row"])
        ax.xaxis.set_major_locator(MaxNLocator(2))
        ax.yaxis.set_major_formatter(lambda row, _: f"{row + self._first:.0f}")
        self._line = self.canvas.line(ax, color=style.BLUE, linewidth=1.8, zorder=3)
        ring = {"markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.6, "linewidth": 0}
        self._meant = self.canvas.line(ax, "o", color=style.GREEN, **ring, zorder=5, clip_on=False)
        self._read = self.canvas.line(ax, "o", color=style.BLACK, markersize=4.5, zorder=6, clip_on=False)
        ax.legend(
            [self._read, self._meant], [WORDS["as read"], WORDS["as meant"]], loc="lower right", borderaxespad=0.1,
            handlelength=0.8, handletextpad=0.4, borderpad=0.2,
        )  # fmt: skip
        self._sums_cells = CellGrid(self.canvas, ax, "sums")
        self.canvas.labels(ax.xaxis)

    def _draw_lost(self, ax) -> None:
        self._lost_ax = ax
        self._lost = HeatMap(self.canvas, ax, name="lost")
        self._marked = {
            "nan": Marked(self.canvas, ax, linewidth=0.8, **style.NAN),
            "inf": Marked(self.canvas, ax, linewidth=0.8, **style.INF),
        }

    def update(self, shown: Shown) -> None:
        C = len(shown.sums)
        names = list(shown.nan)
        if self.changed(shown.first, C, names):
            self._first = shown.first
            self._sums.set_ylim(C - 0.5, -1.8)
            self._lost_ax.set_xticks(range(len(names)), names, rotation=90)
        self._maps.entitle("read", WORDS["read"][shown.inclusive])
        lowest = min(float(shown.sums.min()), -1.0, *(each.n for each in shown.as_read))
        self._sums.set_xlim(1.12 * lowest, -0.08 * lowest)
        self._line.set_data(shown.sums, range(C))
        for line, tiles in ((self._read, shown.as_read), (self._meant, shown.as_meant)):
            line.set_data([each.n for each in tiles], [max(each.row, -1) for each in tiles])
        self._sums_cells.update(C, 1)

        alone = shown.alone.numpy()[:, None]
        self._alone.update(np.where(alone > _END, np.inf, alone), empty=np.isnan(alone))
        formed = ~shown.read.isnan().numpy()
        arrays = {name: getattr(shown, name).double().numpy() for name in self._maps}
        for name in ("read", "key"):  # what exp makes infinite
            arrays[name] = np.where(arrays[name] > _END, np.inf, arrays[name])
        self._maps.update(arrays | {"unformed": ~formed})
        for name, x in arrays.items():
            self._point(name, (formed & ~np.isfinite(x)).any(1), 1.04 * C)
        self._point("alone", alone[:, 0] > _END, -1.2)

        lost = {"nan": _columns(shown.nan), "inf": _columns(shown.inf)}
        tokens, tensors = lost["nan"].shape
        self._lost.update(np.zeros((C, tensors)), finite=(np.arange(C) < tokens)[:, None].repeat(tensors, 1))
        for kind, mark in self._marked.items():
            full = np.zeros((C, tensors), bool)
            full[:tokens] = lost[kind] > 0
            mark.update(full)

    def _point(self, name: str, rows: np.ndarray, x: float) -> None:
        """Place the arrows `name` at x, one beside each true row; none if more than `_FEW` rows are true."""
        few = np.flatnonzero(rows) if rows.sum() <= _FEW else []
        self._arrows[name].set_data(np.full(len(few), x), few)

    def say(self, shown: Shown) -> str:
        largest = []
        for name, x in (("read", shown.alone[:, None]), ("read", shown.read), ("key", shown.key.T)):
            rows = x.nan_to_num(-math.inf).amax(1)
            largest.append((float(rows.max()), name, shown.first + int(rows.argmax())))
        exponent, factor, row = max(largest)
        lost = [name for name, finite in shown.finite.items() if not finite]
        sentence = WORDS.say(
            "infinite" if exponent > _END else "large" if exponent > 0 else "small", row=row,
            factor=WORDS["factors"][factor], exponent=exponent, end=_END, lost=", ".join(lost) or say("nothing"),
            finite=", ".join(name for name, finite in shown.finite.items() if finite),
        )  # fmt: skip
        return f"{WORDS.say('anchor', label=say(SCHEMES[shown.scheme].label))} {sentence}"

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        at, i, j = (cell.row, cell.column), shown.first + cell.row, shown.first + cell.column
        if cell.map == "sums":
            anchors = "".join(
                WORDS.say(words, rows=f"{shown.first + each.rows[0]} … {shown.first + each.rows[-1]}")
                for words, tiles in (("is read", shown.as_read), ("is meant", shown.as_meant))
                for each in tiles
                if each.row == cell.row
            )
            return WORDS.say("sum", i=i, sum=shown.sums[cell.row], seen=shown.seen[cell.row], anchors=anchors)
        if cell.map == "alone":
            exponent = shown.alone[cell.row]
            if exponent.isnan():
                return WORDS.say("no anchor", i=i)
            inf, own = WORDS["alone inf"] if exponent > _END else "", "gi" if shown.inclusive else "ge"
            return WORDS.say("alone", i=i, own=own, exponent=exponent, factor=exponent.exp(), inf=inf)
        if cell.map == "lost":
            name = list(shown.nan)[cell.column]
            if cell.row >= len(shown.nan[name]):
                return WORDS.say("no token", i=i)
            nan, inf = (shares[name][cell.row] for shares in (shown.nan, shown.inf))
            return WORDS.say("tensor", name=name, t=i, nan=nan, inf=inf)
        read, key = shown.read[at], shown.key[at]
        if read.isnan():
            return WORDS.say("none", i=i, j=j)
        weight, true = float(shown.weights[at]), float(shown.true[at])
        seen = cell.column < cell.row or (cell.column == cell.row and shown.seen[cell.row] == shown.sums[cell.row])
        return WORDS.say(
            "pair" if seen else "future", i=i, j=j, read=read, key=key, q=read.exp(), k=key.exp(), weight=weight,
            true="" if math.isclose(weight, true, rel_tol=1e-3) else WORDS.say("true", true=true),
        )  # fmt: skip


def _columns(shares) -> np.ndarray:
    """Stack fractions of lost values, [C] for each tensor, to [C, tensors]."""
    return np.stack([share.numpy() for share in shares.values()], 1)
