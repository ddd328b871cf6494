"""The picture of `final_state_gradient`: the final state's gradient at each token, and what each gradient loses."""

import numpy as np
from matplotlib.ticker import MaxNLocator

from ...figures import Bars, Canvas, Cell, Drawing, HeatMap, style
from ...language import Words, say
from ..laws import share
from . import Shown

WORDS = Words() | {
    "knobs": {"on": "loss reads", "fault": "drop gradient", "H": "heads H", "K": "key K", "T": "tokens T"},
    "alt": "How much of the gradient of the final state is left at each token and row of the state, walking back; "
    "below it the share of each token's gradients that is lost, and bars for the whole tensors with the law",
    "reach": "what is left of the final state's gradient, walking back",
    "lost": "share of each token's gradient that is lost",
    "whole": "whole tensor",
    "arrives": "the gradient of\nthe final state",
    "dropped": "dropped",
    "taken": "walks back",
    "none": "none arrives",
    "o": "The loss reads the outputs alone: no gradient arrives at the final state, and to drop it does no harm. A "
    "test of this kind sees nothing.",
    "both": "The gradient of the final state is dropped, and the walk back begins with zeros. dk is off by "
    "{last} at the last token and by {first} at the first, by {dk} in all, and dw by {dw}. dr and du never meet it.",
    "state": "The loss reads the state alone, and its gradient is dropped: dk, dv and dw are lost, all zeros, as in a "
    "model that has nothing left to learn.",
    "right": "The gradient of the final state walks back with the others, and nothing is lost.",
    "left": "token {t}, row {k}: e^{exponent} = {left} of what arrives at the final state is left here{fate}",
    "fate": {"dropped": ", and it is dropped", "taken": "", "none": ", but nothing arrives"},
    "token": "{name} of token {t}: its size is {computed} (true: {true}), off by {lost}",
    "no token": "{name} is one for all tokens: off by {lost}",
}
ON_VIEW = ("decay", "on", "fault")
LINE = "dk off by"
_SETTING = {"profile": "rwkv6-wide", "T": 104, "H": 4, "K": 32}
PRESETS = {
    "loss on o": {"on": "o", "fault": True} | _SETTING,
    "on both": {"on": "both", "fault": True} | _SETTING,
    "on the state": {"on": "state", "fault": True} | _SETTING,
    "repaired": {"on": "both", "fault": False} | _SETTING,
}

_ROWS = ("dr", "dk", "dv", "dw", "du")


class Picture(Drawing):
    def __init__(self, width: float):
        left, bars, gap = 0.62, 0.2 * width, 0.12
        room = width - left - bars - gap - 0.12
        self.canvas = Canvas(width, 3.75)
        ax = self.canvas.axes(left, 0.3, room, 1.3, title=WORDS["reach"], ylabel=say("row k"))
        ax.tick_params(labelbottom=False)
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        self._reach = HeatMap(self.canvas, ax, name="reach")

        ax = self.canvas.axes(left + room + gap, 0.3, bars, 1.3, xlim=(0, 1), ylim=(0, 1))
        ax.set_axis_off()
        ax.text(0.55, 0.66, WORDS["arrives"], ha="center", fontsize=8.5)
        (self._arrow,) = ax.plot([0.0, 0.98], [0.5, 0.5], marker="<", markevery=[0], ms=8, lw=2)
        (self._cross,) = ax.plot([0.55], [0.5], "x", color=style.BROKEN, ms=14, mew=3)
        self._fate = ax.text(0.55, 0.22, "", ha="center", fontsize=8.5)

        ax = self.canvas.axes(left, 1.98, room, 1.15, title=WORDS["lost"], xlabel=say("token t"))
        ax.set_yticks(range(len(_ROWS)), _ROWS)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        self._lost = HeatMap(self.canvas, ax, name="gradients")

        ax = self.canvas.axes(left + room + gap, 1.98, bars, 1.15, title=WORDS["whole"], framed=True)
        ax.set(xlim=(0, 1.75), ylim=(len(_ROWS) - 0.5, -0.5), yticks=[])
        ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        self._bars = Bars(self.canvas, ax, horizontal=True, thick=0.55, facecolor=style.BLUE, label=say("measured"))
        self._law = self.canvas.line(ax, "d", color=style.BLACK, ms=6, label=say("law"), zorder=3)
        self._words = [ax.text(0, n, "", va="center_baseline", fontsize=8.5) for n in range(len(_ROWS))]
        look = {"handlelength": 1.0, "columnspacing": 1.0, "borderaxespad": 0.1, "handletextpad": 0.4}
        self.canvas.legend(self._bars.patch, self._law, at=(width - 0.1, 3.75), **look)
        self.canvas.moving(self._arrow, self._cross, *self._words)
        self.canvas.labels(self._fate)

    def update(self, shown: Shown) -> None:
        fate = _fate(shown)
        reach, T = shown.reach.T.numpy(), len(shown.reach)
        self._reach.update(reach, empty=np.full(reach.shape, fate == "none"))
        self._arrow.set(
            color=style.BROKEN if fate == "dropped" else style.GREEN if fate == "taken" else style.EMPTY,
            linestyle="-" if fate == "taken" else "--",
        )
        self._cross.set_visible(fate == "dropped")
        self._fate.set_text(WORDS[fate])

        lost = np.stack([shown.lost[name].numpy() if name in shown.lost else np.zeros(T) for name in _ROWS])
        self._lost.update(lost, empty=np.array([[name not in shown.lost] * T for name in _ROWS]))
        errors = np.array([shown.errors[name] for name in _ROWS])
        self._bars.update(errors)
        self._law.set_data([shown.law[name] for name in _ROWS], range(len(_ROWS)))
        for text, x in zip(self._words, errors, strict=True):
            text.set(x=x + 0.12, text=share(x))

    def say(self, shown: Shown) -> str:
        if not shown.fault:
            return WORDS["right"]
        first, *_, last = (share(float(x)) for x in shown.lost["dk"])
        whole = {name: share(shown.errors[name]) for name in ("dk", "dw")}
        return WORDS.say(shown.on, first=first, last=last, **whole)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t = cell.column
        if cell.map == "reach":
            left = shown.reach[t, cell.row]
            return WORDS.say("left", t=t, k=cell.row, exponent=left.log(), left=left, fate=WORDS["fate"][_fate(shown)])
        name = _ROWS[cell.row]
        if name not in shown.lost:
            return WORDS.say("no token", name=name, lost=share(shown.errors[name]))
        return WORDS.say(
            "token", name=name, t=t, computed=shown.computed[name][t], true=shown.true[name][t],
            lost=share(float(shown.lost[name][t])),
        )  # fmt: skip


def _fate(shown: Shown) -> str:
    return "none" if shown.on == "o" else "dropped" if shown.fault else "taken"
