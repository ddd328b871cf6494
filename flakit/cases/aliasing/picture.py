"""The picture of `aliasing`, a row per call: the caller's state in memory, the result, its difference from call 1's."""

import numpy as np
from torch import Tensor

from ...figures import Bars, Canvas, Cell, Drawing, HeatMap, style, whole_ticks
from ...language import Words, number, say
from . import Shown

WORDS = Words() | {
    "knobs": {"in_place": "in place", "calls": "equal calls", "K": "key K", "V": "value V", "M": "slots M"},
    "alt": "A row for each of several equal calls: the numbers in the memory of the caller's initial state before it, "
    "the output it returns, and how far that is from what the first call returned; arrows show who reads and writes",
    "states": "the caller's state, in memory",
    "o": "o of the call",
    "off": "off by",
    "address": "address",
    "value": "value v",
    "call": "call {n}",
    "writes": "writes its final state",
    "first": "One call alone is right. But its final state now lies where the caller's initial state was.",
    "in place": "Every call writes its final state over the caller's initial state, and the next call begins there: "
    "call {n} returns what {n} equal tokens would, {off:%} off. PyTorch counted {counted} in-place operations.",
    "apart": "Every call finds the state as the caller put it there, has memory of its own for the final state, and "
    "returns the same.",
    "state": "before call {n}, key {k}, slot {m} of the state is {x}{true}",
    "output": "call {n} returns {x} for value {v}{true}",
    "true": " (true: {x})",
}
ON_VIEW = ("calls", "in_place")
LINE = "o off by"
_SIZES = {"K": 16, "V": 16, "M": 8}
PRESETS = {
    "first call": {"calls": 1, "in_place": True} | _SIZES,
    "second call": {"calls": 2, "in_place": True} | _SIZES,
    "five calls": {"calls": 5, "in_place": True} | _SIZES,
    "repaired": {"calls": 5, "in_place": False} | _SIZES,
}

_HEIGHT = 2.3
_PLACES = 32  # of the memory: more numbers would be too narrow to tell apart


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, bars = 0.55, 0.75, 0.14 * width
        room = width - left - gap - bars - 0.3
        across = {"states": 0.62 * room, "o": 0.38 * room}
        self.canvas = Canvas(width, 3.35)
        self._maps = {}
        for name, at, words in (("states", left, "address"), ("o", left + across["states"] + gap, "value")):
            ax = self.canvas.axes(at, 0.35, across[name], _HEIGHT, title=WORDS[name], xlabel=WORDS[words])
            self._maps[name] = HeatMap(
                self.canvas, whole_ticks(ax), cmap=style.SIGNED, vmin=-1.0, vmax=1.0, rows_vary=True, name=name
            )
        self._calls = self._maps["states"].ax
        self._maps["o"].ax.set_yticks([])
        between = self.canvas.axes(left + across["states"], 0.35, gap, _HEIGHT, xlim=(-0.12, 1.12))
        self._off = self.canvas.axes(
            width - bars - 0.12, 0.35, bars, _HEIGHT, title=WORDS["off"], framed=True, xlim=(0, 1.95), yticks=[],
            xticks=[],
        )  # fmt: skip
        self._between = between
        between.set_axis_off()
        self._reads = self.canvas.line(
            between, "->", color=style.GREY, markevery=(1, 3), lw=1.2, ms=5, label=say("reads")
        )
        self._writes = self.canvas.line(
            between, "--<", color=style.BROKEN, markevery=(1, 3), lw=1.2, ms=5, label=WORDS["writes"]
        )
        self._bars = Bars(
            self.canvas, self._off, horizontal=True, thick=0.4, facecolor=style.BLUE, label=say("measured")
        )
        self._law = self.canvas.line(self._off, linestyle="none", marker="d", color=style.BLACK, ms=6, label=say("law"))
        self._words = [self._off.text(0, 0, "", va="center_baseline", fontsize=8.5) for _ in range(16)]
        handles = self._reads, self._writes, self._bars.patch, self._law
        self.canvas.legend(*handles, loc="lower left", at=(left, 3.35))
        self.canvas.moving(*self._words)

    def update(self, shown: Shown) -> None:
        calls = len(shown.o)
        for name, x in (("states", _memory(shown)), ("o", shown.o)):
            self._maps[name].update((x / x.abs().max()).numpy())
        limits = (calls - 0.5, -0.5)
        if self.changed(calls):
            self._between.set_ylim(limits)
            self._off.set_ylim(limits)
            self._calls.set_yticks(range(calls), [WORDS.say("call", n=n + 1) for n in range(calls)])
        rows = np.arange(calls, dtype=float)
        self._reads.set_data(_broken(0 * rows, 0 * rows + 1), _broken(rows, rows))
        end, down, mark = (0.0, 1.0, "<") if shown.in_place else (0.55, 0.32, "s")
        self._writes.set_marker(mark)
        self._writes.set_data(_broken(0 * rows + 1, 0 * rows + end), _broken(rows, rows + down))

        largest = max(float(shown.law.max()), float(shown.off.max())) or 1.0
        off = shown.off.numpy() / largest
        self._bars.update(off)
        self._law.set_data(shown.law.numpy() / largest, rows)
        for n, text in enumerate(self._words):
            text.set_visible(n < calls)
            if n < calls:
                text.set(x=off[n] + 0.2, y=n, text=number(shown.off[n], 2))

    def say(self, shown: Shown) -> str:
        if not shown.in_place:
            return WORDS["apart"]
        if len(shown.o) == 1:
            return WORDS["first"]
        return WORDS.say("in place", n=len(shown.o), off=shown.off[-1], counted=shown.counted)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        n, column = cell.row, cell.column
        if cell.map == "states":
            x, first = (float(_memory(shown)[call, column]) for call in (n, 0))
            k, m = divmod(column, shown.states.shape[-1])
            at = {"k": k, "m": m}
        else:
            x, first = (float(shown.o[call, column]) for call in (n, 0))
            at = {"v": column}
        true = "" if x == first else WORDS.say("true", x=first)
        return WORDS.say("state" if cell.map == "states" else "output", n=n + 1, x=x, true=true, **at)


def _memory(shown: Shown) -> Tensor:
    """Return the first 32 numbers of the caller's hk before each call, [calls, 32]."""
    return shown.states.flatten(1)[:, :_PLACES]


def _broken(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return coordinates of separate line segments for one `plot`: start, end and NaN for each, [3 n]."""
    return np.stack((start, end, np.full(len(start), np.nan)), 1).flatten()
