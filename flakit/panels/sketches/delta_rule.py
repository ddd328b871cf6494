"""The sketches of lessons 08_delta_rule and 09_delta_rule_in_chunks: one edit of a small memory, repeated
edits under one key, and the matrix of a chunk's edits with its inverse."""

from dataclasses import dataclass

import numpy as np
import torch

from ...cases import inverse
from ...figures import FUTURE, ITSELF, Bars, Canvas, Cell, CellGrid, Map, Maps, signed, style
from ...language import Words
from ...ops.rwkv7 import fused_recurrent_rwkv7, reference
from ..knobs import number
from .sketch import Sketch, percent, short

DOOR, LAMP = torch.eye(2)
OPEN, CLOSED, ON, OFF = torch.eye(4)
"""One-hot keys of two things, and one-hot values for their states."""

_KNOBS = {"alpha": lambda: number(1.0, 0.0, 2.0, "taken out α", 0.1, False)}
_PRESETS = {
    "adds": {"alpha": 0.0},
    "corrects": {"alpha": 0.5},
    "replaces": {"alpha": 1.0},
    "turns round": {"alpha": 2.0},
}
_WRITES = ((DOOR, CLOSED), (LAMP, ON), (DOOR, OPEN))
_TOKENS = 8  # of "revisions", all under one key

_C = 16  # tokens of the chunk of "chained"

WORDS = Words() | {
    "editing": {
        "alt": "Four small tables with a row for the door and one for the lamp, and a column each for open, closed, on "
        "and off: the memory before, what is taken out, what is written, and the memory now",
        "maps": {"before": "before", "taken": "+ taken out", "written": "+ written", "now": "= now"},
        "rows": ("door", "lamp"),
        "columns": ("open", "closed", "on", "off"),
        "none": "With α = 0 nothing is taken out. Asked about the door, the memory answers both: open {open}, closed "
        "{closed}.",
        "part": "With α = {alpha}, {share} of what stood under the door is taken out before the new value is written. "
        "Asked about the door, the memory answers: open {open}, closed {closed}.",
        "all": "With α = 1 all of what stood under the door is taken out. The memory answers: open {open}, closed "
        "{closed}.",
        "more": "With α = {alpha} more is taken out than stood there. Open is {open}, and closed stands there turned "
        "round: {closed}.",
        "now": "{row}, {column}: {before} + {taken} + {written} = {now}",
        "taken": "{row}, {column}: -{alpha} · {before} = {taken}",
        "given": "{row}, {column}: {value}",
    },
    "revisions": {
        "alt": "Bars: how much the value of each of eight tokens under one key counts in the answer after the last",
        "x": "token",
        "y": "how much it counts",
        "none": "With α = 0 all {T} values count alike: every one of them is in the answer.",
        "part": "With α = {alpha} the last value counts in full, the one before it {before}, and the first {first}.",
        "all": "With α = 1 only the last value counts. All others have been taken out again.",
        "more": "With α = {alpha} the values count with changing signs: the one before the last {before}, the first "
        "{first}.",
        "arithmetic": "token {n}: taken out of {later} times later, (1 - {alpha})^{later} = {counts}",
    },
    "chained": {
        "alt": "Two square maps over the tokens of a chunk: how much token i finds of what token j put back, and the "
        "inverse, how much of it is left when all edits in between have been made",
        "maps": {"found": "found directly: L", "inverse": "through all edits: $(I - L)^{-1}$"},
        "halves": {"found": ("$I - P_1$", "Q", "$I - P_2$"), "inverse": ("$P_1^{-1}$", "X", "$P_2^{-1}$")},
        "i": "token i",
        "j": "token j",
        "same": "One token, {C} times: token i finds up to {found} of what each earlier one put back. Through all "
        "edits the largest number is {largest}, and beyond the second diagonal {far}.",
        "differ": "Keys that differ by {spread}: token i finds up to {found} of what an earlier one put back. Through "
        "all edits the largest number is {largest}, and beyond the second diagonal {far}.",
        "found": "token {i} finds {value} times what token {j} put back",
        "inverse": "of what token {j} would find with no edits, {value} reaches token {i}",
        "upper": "token {i} comes before token {j}, and finds nothing of it",
        "diagonal": "token {i} does not find what it is about to put back itself",
    },
}


@dataclass(frozen=True)
class EditingShown:
    """The table [2, 4] before an edit, what it removes (`taken`) and writes, and the table after. alpha: the share
    removed."""

    alpha: float
    before: np.ndarray
    taken: np.ndarray
    written: np.ndarray
    now: np.ndarray


class Editing(Sketch, name="editing", words=WORDS):
    """The four tables of one edit, with each number in its cell."""

    knobs, presets = _KNOBS, _PRESETS
    script = """import torch
from flakit.panels.sketches.delta_rule import CLOSED, DOOR, LAMP, ON, OPEN

memory = torch.outer(DOOR, CLOSED) + torch.outer(LAMP, ON)
answer = DOOR @ memory
memory = memory - {alpha} * torch.outer(DOOR, answer) + torch.outer(DOOR, OPEN)
print("asked about the door: open, closed, on, off =", (DOOR @ memory).tolist())
"""

    @staticmethod
    def compute(alpha: float) -> EditingShown:
        k, v = (torch.stack(rows)[None, :, None] for rows in zip(*_WRITES, strict=True))
        *_, last = reference.steps(r=k, w=torch.zeros_like(k), k=k, v=v, a=-k, b=alpha * k)
        tables = (last.state_before, last.edit, last.kv, last.state)
        return EditingShown(alpha, *(table[0, 0].numpy() for table in tables))

    _largest = 2.6  # end of the scale: beyond every number, so that black digits are legible

    def __init__(self, width: float):
        left, gap = 0.52, 0.16
        across = (width - left - 0.1 - 3 * gap) / 4
        narrow = across < 1.5  # the columns' names are upright
        self.canvas, self._numbers = Canvas(width, 1.75 if narrow else 1.45), {}
        self._maps = Maps(
            self.canvas, {name: Map(title, signed(self._largest)) for name, title in self.words["maps"].items()},
            left=left, top=0.32, size=(across, 0.84), gap=gap,
        )  # fmt: skip
        for n, (name, heat) in enumerate(self._maps.items()):
            heat.ax.set_xticks(range(4), self.words["columns"], rotation=90 if narrow else 0)
            heat.ax.set_yticks(range(2), self.words["rows"] if n == 0 else ("", ""))
            heat.ax.tick_params(length=0)
            self._numbers[name] = {
                (row, column): heat.ax.text(column, row, "", ha="center", va="center", fontsize=9.5, zorder=6)
                for row in range(2)
                for column in range(4)
            }
            self.canvas.moving(*self._numbers[name].values())

    def update(self, shown: EditingShown) -> None:
        self._maps.update(shown)
        for name, numbers in self._numbers.items():
            for cell, text in numbers.items():
                text.set_text(short(getattr(shown, name)[cell]))

    def say(self, shown: EditingShown) -> str:
        alpha = shown.alpha
        kind = "none" if alpha == 0 else "part" if alpha < 1 else "all" if alpha == 1 else "more"
        opened, closed = (short(x) for x in shown.now[0, :2])
        return self.words.say(kind, alpha=short(alpha), share=percent(alpha), open=opened, closed=closed)

    def arithmetic(self, shown: EditingShown, cell: Cell) -> str:
        at = (cell.row, cell.column)
        where = {"row": self.words["rows"][cell.row], "column": self.words["columns"][cell.column]}
        tables = {name: short(getattr(shown, name)[at]) for name in self.words["maps"]}
        if cell.map == "now":
            return self.words.say("now", **where, **tables)
        if cell.map == "taken" and cell.row == 0:
            return self.words.say("taken", **where, alpha=short(shown.alpha), **tables)
        return self.words.say("given", **where, value=tables[cell.map])


@dataclass(frozen=True)
class RevisionsShown:
    """The weight of each token's value in the last output, [T] (`counts`). alpha: the share of the stored value that
    each token removes before it writes."""

    alpha: float
    counts: np.ndarray


class Revisions(Sketch, name="revisions", words=WORDS):
    """A bar for each token: the weight of its value in the last output, if all tokens write under one key."""

    knobs, presets = _KNOBS, _PRESETS
    script = """import torch
from flakit import fused_recurrent_rwkv7

k = torch.ones(1, 8, 1, 1)  # eight tokens, all under one key
v = torch.ones_like(k, requires_grad=True)
o = fused_recurrent_rwkv7(k, torch.zeros_like(k), k, v, -k, {alpha} * k).o
print(torch.autograd.grad(o[0, -1].sum(), v)[0].flatten().tolist())
"""

    @staticmethod
    def compute(alpha: float) -> RevisionsShown:
        """Return as weights the gradient of the last output with respect to every token's value."""
        k = torch.ones(1, _TOKENS, 1, 1, dtype=torch.float64)
        v = torch.ones_like(k, requires_grad=True)
        o = fused_recurrent_rwkv7(k, torch.zeros_like(k), k, v, -k, alpha * k).o
        (counts,) = torch.autograd.grad(o[0, -1].sum(), v)
        return RevisionsShown(alpha, counts[0, :, 0, 0].numpy())

    def __init__(self, width: float):
        ax = self.plot(width, 2.2, left=0.65, right=0.15, top=0.12, bottom=0.5)
        ax.set(xlabel=self.words["x"], xlim=(-0.5, _TOKENS - 0.5))
        ax.set(ylabel=self.words["y"], ylim=(-1.25, 1.25), yticks=(-1, 0, 1))
        ax.axhline(0, color=style.BLACK, linewidth=0.8)
        self._bars = Bars(self.canvas, ax, thick=0.7, facecolor=style.BLUE)
        look = {"ha": "center", "va": "center", "fontsize": 8.5, "zorder": 6}
        self._numbers = self.canvas.moving(*(ax.text(n, 0, "", **look) for n in range(_TOKENS)))
        CellGrid(self.canvas, ax, "counts", 1, _TOKENS)

    def update(self, shown: RevisionsShown) -> None:
        self._bars.update(shown.counts)
        for text, counts in zip(self._numbers, shown.counts, strict=True):
            text.set(y=counts + (0.13 if counts >= 0 else -0.13), text=short(counts))

    def say(self, shown: RevisionsShown) -> str:
        alpha, counts = shown.alpha, shown.counts
        kind = "none" if alpha == 0 else "part" if alpha < 1 else "all" if alpha == 1 else "more"
        values = {"before": percent(counts[-2]), "first": percent(counts[0])}
        if kind == "more":
            values = {"before": short(counts[-2]), "first": short(counts[0])}
        return self.words.say(kind, T=_TOKENS, alpha=short(alpha), **values)

    def arithmetic(self, shown: RevisionsShown, cell: Cell) -> str:
        n = cell.column
        later = _TOKENS - 1 - n
        return self.words.say("arithmetic", n=n, later=later, alpha=short(shown.alpha), counts=short(shown.counts[n]))


@dataclass(frozen=True)
class ChainedShown:
    """L [C, C], the share of token j's edit that token i finds directly (`found`), and its inverse (I - L)^-1 [C, C],
    through all edits in between. spread: length of each key's random part beside the unit part common to all."""

    spread: float
    found: np.ndarray
    inverse: np.ndarray


class Chained(Sketch, name="chained", words=WORDS):
    """The matrix L of a chunk's edits beside the inverse (I - L)^-1."""

    knobs = {"spread": lambda: number(0.0, 0.0, 5.0, "spread", 0.1, False)}
    presets = {"one token": {"spread": 0.0}, "much alike": {"spread": 0.3}, "different": {"spread": 3.0}}
    script = """from flakit.cases import inverse

L = inverse.matrix(spread={spread})
print(L)
print(inverse.invert(L, "substitution", "float64"))
"""

    @staticmethod
    def compute(spread: float) -> ChainedShown:
        L = inverse.matrix(spread=spread, C=_C)
        return ChainedShown(spread, L.numpy(), inverse.invert(L, "substitution", "float64").numpy())

    def __init__(self, width: float):
        height, side = 2.7, 1.95
        self.canvas = Canvas(width, height)
        empty = {"found": ITSELF, "inverse": FUTURE}
        self._maps = Maps(
            self.canvas, {name: Map(title, signed(), empty=empty[name]) for name, title in self.words["maps"].items()},
            left=0.6, top=0.3, size=(side, side), gap=0.4, rows=self.words["i"], columns=self.words["j"],
        )  # fmt: skip
        self._maps.bar("inverse").set_yticks([-1, 0, 1])

    def update(self, shown: ChainedShown) -> None:
        self._maps.update(shown)

    def say(self, shown: ChainedShown) -> str:
        far = np.abs(np.tril(shown.inverse, -2)).max()
        return self.words.say(
            "differ" if shown.spread else "same", C=_C, spread=short(shown.spread),
            found=short(np.abs(shown.found).max()), largest=short(np.abs(shown.inverse).max()), far=short(far),
        )  # fmt: skip

    def arithmetic(self, shown: ChainedShown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if j > i:
            return self.words.say("upper", i=i, j=j)
        if j == i and cell.map == "found":
            return self.words.say("diagonal", i=i)
        return self.words.say(cell.map, i=i, j=j, value=short(getattr(shown, cell.map)[i, j]))


class Halved(Chained, name="halved"):
    """`Chained`, with lines between the halves of the chunk and the names of the blocks."""

    def __init__(self, width: float):
        super().__init__(width)
        first, border, second = (_C * n / 4 - 0.5 for n in (1, 2, 3))
        line = {"color": style.BLACK, "linewidth": 1.4, "zorder": 5}
        look = {"ha": "center", "va": "center", "fontsize": 12, "zorder": 6}
        look["bbox"] = {"facecolor": "white", "edgecolor": style.BLACK, "linewidth": 0.6, "pad": 2.5}
        for name, heat in self._maps.items():
            self.canvas.moving(heat.ax.axhline(border, **line), heat.ax.axvline(border, **line))
            corner, below, last = self.words["halves"][name]
            for text, row, column in ((corner, first, first), (below, second, first), (last, second, second)):
                self.canvas.moving(heat.ax.text(column, row, text, **look))
