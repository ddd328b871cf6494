"""The picture of `rounded_state`: the state after each token, rounded and exact, and where it stops."""

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, style
from ...language import Words, say
from . import Shown

WORDS = Words() | {
    "knobs": {"dtype": "state's dtype", "between": "at each token"},
    "alt": "The state after each token: exact as a dashed line, and as it is kept; where it stands still it is orange",
    "title": "a state that forgets nothing, after each token",
    "true": "exact",
    "kept": "as it is kept",
    "stopped": "it stands still",
    "counts": "The state counts to {state}: so far {dtype} holds every whole number.",
    "stands": "From token {t} on the state stands still at {state}. One more would need a bit that {dtype} does not "
    "have, and it rounds back. Of {true} writes {lost} are lost, and everything is finite.",
    "end": "In float32 between tokens, and rounded to {dtype} once, at the end: {state}, of {true}.",
    "random": "Writes of both signs: the largest sum is {most:.3g}, and the last is off by {lost:.2g} of that. A "
    "test with random inputs sees nothing else.",
    "cell": "after token {t}: {state}, exact {true}",
}
ON_VIEW = ("tokens", "dtype", "writes", "between")
LINE = "the state"
PRESETS = {
    "it counts": {"tokens": 128, "dtype": "bfloat16", "writes": "all equal", "between": True},
    "it stops": {"tokens": 1024, "dtype": "bfloat16", "writes": "all equal", "between": True},
    "random writes": {"tokens": 1024, "dtype": "bfloat16", "writes": "at random", "between": True},
    "repaired": {"tokens": 1024, "dtype": "bfloat16", "writes": "all equal", "between": False},
}


class Picture(Drawing):
    def __init__(self, width: float):
        left = 0.78
        self.canvas = Canvas(width, 3.0)
        look = {"title": WORDS["title"], "size": 9, "pad": 4, "xlabel": say("token t"), "ylabel": say("state")}
        ax = self._ax = self.canvas.axes(left, 0.35, width - left - 0.2, 2.15, **look)
        self._true = self.canvas.line(ax, **style.LAW, label=WORDS["true"], zorder=3)
        self._kept = self.canvas.line(ax, color=style.BLUE, linewidth=2.4, label=WORDS["kept"], zorder=2)
        self._stopped = self.canvas.line(ax, color=style.BROKEN, linewidth=3.2, label=WORDS["stopped"], zorder=4)
        ax.legend(loc="upper left", borderaxespad=0.2, labelspacing=0.2, handlelength=2.2)
        self._cells = CellGrid(self.canvas, ax, "tokens")
        self.canvas.labels(ax.xaxis, ax.yaxis)

    def update(self, shown: Shown) -> None:
        tokens = np.arange(len(shown.true))
        true, kept = shown.true.numpy(), shown.rounded.numpy()
        self._true.set_data(tokens, true)
        self._kept.set_data(tokens, kept)
        at = shown.stopped
        self._stopped.set_data([] if at is None else tokens[at:], [] if at is None else kept[at:])
        low, high = min(0.0, true.min(), kept.min()), max(true.max(), kept.max())
        self._ax.set(xlim=(-0.5, len(tokens) - 0.5), ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)))
        self._cells.update(1, len(tokens))

    def say(self, shown: Shown) -> str:
        state, true = shown.rounded[-1], shown.true[-1]
        if shown.writes == "at random":
            return WORDS.say("random", most=shown.true.abs().max(), lost=shown.lost)
        if not shown.between:
            return WORDS.say("end", dtype=shown.dtype, state=state, true=true)
        if shown.stopped is None:
            return WORDS.say("counts", state=state, dtype=shown.dtype)
        return WORDS.say("stands", t=shown.stopped, state=state, dtype=shown.dtype, true=true, lost=true - state)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t = cell.column
        return WORDS.say("cell", t=t, state=shown.rounded[t], true=shown.true[t])
