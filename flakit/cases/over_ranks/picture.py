"""The picture of `over_ranks`: errors of the state's gradient at each slice, by head, and of each token's dv."""

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, HeatMap, style
from ...language import Words, number, percent, say
from ..laws import share
from . import FAULTS, H, Shown, T

WORDS = Words() | {
    "knobs": {"w": "decay w"},
    "alt": "Above, for each head, how far off the gradient of the state is that reaches the initial state, and that "
    "enters each slice from behind; below, for each token of the last head how far off its dv is, with the law, and "
    "lines between the slices",
    "entering": "D at the initial state, and entering each slice: off by",
    "tokens": "dv of head {h}: off by",
    "gate": "Every output is right. But the pre-pass lets all heads fade as head 0 does: on rank 0 the gradient that "
    "enters head {h} from behind is off by {entering}, and dv of its first token still by {first}. On rank {last} "
    "nothing enters, and every gradient is right.",
    "alike": "The pre-pass reads head 0's decay for all heads, and all heads have that decay: nothing shows, in any "
    "gradient. So it is with one head.",
    "first": "Every output and every token's gradient is right. Rank 0 has no rank before it to tell, and what its "
    "tokens ask of the initial state goes with the message that is not sent: that gradient is zero, {initial} of it is "
    "lost. Without an initial state nobody sees it.",
    "none": "Over {ranks} ranks every output and every gradient is what one process gives.",
    "cell": "head {h}, rank {rank}: D enters from {behind} tokens behind, off by {off} (law: {law})",
    "initial": "head {h}: the gradient of the initial state is off by {off}",
    "last": "head {h}, rank {rank}: no token is behind, and nothing enters",
    "token": "token {t} of head {h}, on rank {rank}: D has come back over {walked} tokens of its own slice, dv is off "
    "by {off} (law: {law})",
}
ON_VIEW = ("fault", "ranks", "spread")
LINE = "where it enters the first slice"
_SETTING = {"ranks": 4, "w": -0.05, "spread": 0.2}
PRESETS = {
    "the gate of head 0": {"fault": "head 0's gate"} | _SETTING,
    "heads alike": {"fault": "head 0's gate"} | _SETTING | {"spread": 0.0},
    "the first rank's": {"fault": "first rank's D"} | _SETTING,
    "repaired": {"fault": "none"} | _SETTING,
}

_TOP = 0.5


class Picture(Drawing):
    def __init__(self, width: float):
        left, right = 1.15, 0.2
        room = width - left - right
        self.canvas = Canvas(width, 3.4)
        ax = self._ranks = self.canvas.axes(left, 0.3, room, 0.85, title=WORDS["entering"], ylabel=say("head"))
        self._entering = HeatMap(self.canvas, ax, vmax=_TOP, name="entering")
        self._shares = [[ax.text(0, 0, "", ha="center", va="center", fontsize=8.5) for _ in range(9)] for _ in range(H)]

        look = {"title": WORDS.say("tokens", h=H - 1), "xlabel": say("token t"), "xlim": (-0.5, T - 0.5)}
        ax = self._tokens = self.canvas.axes(left, 1.75, room, 1.1, **look)
        ax.yaxis.set_major_formatter(lambda x, _: percent(x))
        self._borders = [ax.axvline(0, color=style.GREY, linewidth=1) for _ in range(7)]
        self._law = self.canvas.line(ax, **style.LAW, label=say("law"), zorder=4)
        self._wrong = self.canvas.line(ax, "X", color=style.BROKEN, markersize=6, label=say("wrong"), zorder=3)
        self._right = self.canvas.line(ax, "o", color=style.BLUE, markersize=4.5, label=say("right"), zorder=3)
        self.canvas.legend(self._law, self._wrong, self._right, columnspacing=1.0, handletextpad=0.4)
        CellGrid(self.canvas, ax, "tokens", 1, T)
        texts = [text for row in self._shares for text in row]
        self.canvas.moving(*self._borders, *texts)

    def update(self, shown: Shown) -> None:
        ranks, off = shown.ranks, np.column_stack((shown.first.numpy(), shown.entering.numpy()))
        measured, law = shown.tokens[-1].numpy(), shown.law[-1].numpy()
        top = next(x for x in (0.2, 0.5, 1.0, 2.0, 1e9) if max(measured.max(), law.max()) <= x)
        self._entering.update(off)
        decays = [f"{h}: w {number(w)}" for h, w in enumerate(shown.decays.tolist())]
        if self.changed(ranks, top, decays):
            self._ranks.set_yticks(range(H), decays)
            self._ranks.set_xticks(range(ranks + 1), ["$S_0$", *(f"{say('rank')} {n}" for n in range(ranks))])
            self._tokens.set(ylim=(-0.05 * top, 1.1 * top), yticks=[0, top / 2, top])
        for h, row in enumerate(self._shares):
            for n, text in enumerate(row):
                seen = n <= ranks
                text.set(text=share(off[h, n]) if seen else "", position=(min(n, ranks), h))
                text.set_color(style.BLACK if seen and off[h, n] > 0.6 * _TOP else "white")
        for n, line in enumerate(self._borders, 1):
            at = n * shown.slice - 0.5 if n < ranks else -0.5
            line.set_xdata([at, at])
        tokens, wrong = np.arange(T), measured > 1e-6
        self._law.set_data(tokens, law)
        self._wrong.set_data(tokens[wrong], measured[wrong])
        self._right.set_data(tokens[~wrong], measured[~wrong])

    def say(self, shown: Shown) -> str:
        values = {
            "h": H - 1,
            "entering": share(shown.entering[-1, 0].item()),
            "first": share(shown.tokens[-1, 0].item()),
            "last": shown.ranks - 1,
            "initial": share(shown.initial),
            "ranks": shown.ranks,
        }
        if shown.fault == FAULTS[0]:
            return WORDS.say("gate" if shown.predicted.any() else "alike", **values)
        return WORDS.say("first" if shown.fault == FAULTS[1] else "none", **values)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "entering":
            h, n = cell.row, cell.column - 1
            if n < 0:
                return WORDS.say("initial", h=h, off=share(shown.first[h].item()))
            behind = T - shown.slice * (n + 1)
            off, law = share(shown.entering[h, n].item()), share(shown.predicted[h, n].item())
            return WORDS.say("cell" if behind else "last", h=h, rank=n, behind=behind, off=off, law=law)
        t, h = cell.column, H - 1
        walked, rank = shown.slice - 1 - t % shown.slice, t // shown.slice
        off, law = share(shown.tokens[h, t].item()), share(shown.law[h, t].item())
        return WORDS.say("token", t=t, h=h, rank=rank, walked=walked, off=off, law=law)
