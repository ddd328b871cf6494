"""The picture of `wrong_head_anchor`: the anchor's place in memory, and exponents and scores with either anchor."""

import numpy as np
import torch

from ...figures import FUTURE, Canvas, Cell, CellGrid, Drawing, HeatMap, Map, Maps, signed, style, whole_ticks
from ...language import Words, say
from ...numerics.words import error
from ..laws import LN_MAX
from . import Shown

WORDS = Words() | {
    "knobs": {"H": "heads H", "block": "block rows", "w": "decay w"},
    "alt": "A map of the cumulative decays as they lie in memory, a row for each token and a column for each head, "
    "the anchor of one head marked as it is meant and as it is read; the exponents of that head's tokens with both; "
    "and its scores with both, a row for each output and a column for each key",
    "memory": "memory g",
    "exponents": "exponent $g_i - n$",
    "wrong": "scores, n as read",
    "right": "scores, n as meant",
    "read": "n as read",
    "meant": "n as meant",
    "end": "exp ends",
    "one": "With one head the two addresses are the same, and the anchor is the right one: no test with one head sees "
    "the fault.{both}",
    "both": " At this decay it overflows all the same: {count} of {all} scores are not finite.",
    "fine": "{where} But n cancels between e^(g_i - n) and e^(n - g_j): the scores are off by {off}, and nothing "
    "shows.",
    "infinite": "A decay of -inf makes g itself infinite, and inf - inf is NaN with any anchor.",
    "broken": "{where} The factors reach q or k times e^{reach:.3g} instead of e^{meant:.3g}, and float32 ends at "
    "e^{end:.2f}: {count} of {all} scores are inf or NaN. With n as meant {right}.",
    "where": "Head {head} should take n from token {token}; a stride {H} times too short reads token {wrong}{of}.",
    "of": " of head {other}",
    "all finite": "all are finite",
    "some": "{count} are",
    "cell": "token {t}, head {h}: g = {g}, its row begins at address ({t} · {H} + {h}) · {K} = {address}{mark}",
    "mark meant": "; the anchor of head {head}, as meant",
    "mark read": "; read as the anchor of head {head}",
    "row": "token {i} of head {head}: g - n = {wrong} with n as read, {right} as meant",
    "score": "output {i}, key {j}: e^{a} · e^{b} = {read} · {key} = {product} in every channel, score {score} "
    "(true: {exact})",
    "future": "output {i}, key {j}: an output reads no later token",
}
ON_VIEW = ("w", "H", "spread")
LINE = "wrong anchor: |w| at which NaN begins"
PRESETS = {
    "nothing shows": {"w": -1.0, "H": 4, "block": 16, "spread": 0.0},
    "first NaN": {"w": -6.9, "H": 4, "block": 16, "spread": 0.0},
    "all but n as meant": {"w": -10.0, "H": 4, "block": 16, "spread": 0.0},
    "one head": {"w": -10.0, "H": 1, "block": 16, "spread": 0.0},
}

_END = LN_MAX[torch.float32]
_BEYOND = 1.45
"""Length of the exponent axis, in units of the exponent at which exp overflows."""


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, top, bottom = 0.52, 0.12, 0.3, 0.76
        wide = (width - left - 3 * gap - 0.12) / 7.2
        memory, exponents, side = 1.1 * wide, 2.1 * wide, 2 * wide
        height = min(2.75, 1.35 * side)
        self.canvas = Canvas(width, top + height + bottom)
        ax = whole_ticks(self.canvas.axes(left, top, memory, height))
        ax.set(title=WORDS["memory"], xlabel=say("head"), ylabel=say("token i"))
        self._memory = HeatMap(self.canvas, ax, cmap="Greys_r", vmin=-1.6, name="memory")
        looks = {"meant": style.BLUE, "read": style.PURPLE}
        ring = {"markersize": 9, "mew": 2.4, "mfc": "none", "zorder": 6, "clip_on": False}
        self._spots = {
            name: self.canvas.line(ax, "os"[name == "meant"], mec=colour, label=WORDS[name], **ring)
            for name, colour in looks.items()
        }
        at = left + memory + gap
        ax = self._ax = whole_ticks(self.canvas.axes(at, top, exponents, height, framed=True))
        ax.set(xlim=(-_BEYOND, _BEYOND), title=WORDS["exponents"])
        ax.set_xticks([-1, 0, 1], [f"{sign * _END:.1f}" if sign else "0" for sign in (-1, 0, 1)])
        ax.tick_params(labelleft=False)
        for end in (-1, 1):
            ax.axvspan(end, end * _BEYOND, facecolor=style.INF["facecolor"])
        self._lines = {
            name: self.canvas.line(ax, color=colour, marker="os"[name == "meant"], markersize=4, zorder=3)
            for name, colour in looks.items()
        }
        self._cells = CellGrid(self.canvas, ax, "exponents")
        at += exponents + gap
        self._maps = Maps(
            self.canvas, {name: Map(WORDS[name], signed(8), empty=FUTURE) for name in ("wrong", "right")},
            left=at, top=top, size=(side, height), gap=gap, columns=say("key j"), labels=False,
        )  # fmt: skip
        self.canvas.legend(*self._spots.values(), *style.non_finite_handles())

    def update(self, shown: Shown) -> None:
        block, H = shown.g.shape
        h = shown.head
        largest = shown.g.nan_to_num(neginf=0.0).abs().max().clamp(min=1e-30)
        self._memory.update((shown.g / largest).numpy())
        if self.changed(block):
            self._ax.set_ylim(block - 0.5, -0.5)
        self._cells.update(block, 1)
        for name, each in {"read": shown.wrong, "meant": shown.right}.items():
            token, head = each.rows[h]
            self._spots[name].set_data([head], [token])
            self._lines[name].set_data(each.exponents[:, h] / _END, np.arange(block))
        self._maps.update({name: getattr(shown, name).scores[h] for name in self._maps})

    def say(self, shown: Shown) -> str:
        block, H = shown.g.shape
        h, (token, other) = shown.head, shown.wrong.rows[shown.head]
        bad = [int((~each.scores.isfinite()).sum()) for each in (shown.wrong, shown.right)]
        values = {
            "head": h,
            "token": shown.right.rows[h][0],
            "H": H,
            "wrong": token,
            "of": WORDS.say("of", other=other) if other != h else "",
            "off": error(shown.off),
            "reach": shown.wrong.exponents.abs().max(),
            "meant": shown.right.exponents.abs().max(),
            "end": _END,
            "count": bad[0],
            "all": H * block * (block + 1) // 2,
            "right": WORDS.say("some", count=bad[1]) if bad[1] else WORDS["all finite"],
        }
        if not shown.g.isfinite().all():
            return WORDS["infinite"]
        if H == 1:
            return WORDS.say("one", both=WORDS.say("both", **values) if bad[0] else "")
        return WORDS.say("broken" if bad[0] else "fine", where=WORDS.say("where", **values), **values)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        H, h, i, j = shown.g.shape[1], shown.head, cell.row, cell.column
        if cell.map == "memory":
            marks = [
                WORDS.say(f"mark {name}", head=h)
                for name, each in (("meant", shown.right), ("read", shown.wrong))
                if each.rows[h] == (i, j)
            ]
            address = (i * H + j) * shown.K
            return WORDS.say("cell", t=i, h=j, g=shown.g[i, j], H=H, K=shown.K, address=address, mark="".join(marks))
        if cell.map == "exponents":
            wrong, right = (each.exponents[i, h] for each in (shown.wrong, shown.right))
            return WORDS.say("row", i=i, head=h, wrong=wrong, right=right)
        if j > i:
            return WORDS.say("future", i=i, j=j)
        each = getattr(shown, cell.map)
        read, key = each.read[i, h], each.key[j, h]
        return WORDS.say(
            "score", i=i, j=j, a=each.exponents[i, h], b=0.0 - each.exponents[j, h], read=read, key=key,
            product=read * key, score=each.scores[h, i, j], exact=shown.exact[h, i, j],
        )  # fmt: skip
