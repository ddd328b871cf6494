"""The sketches of lesson 11_gsa: what slots hold, beside softmax attention, and the gate that makes them forget."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...figures import Bars, Canvas, Cell, CellGrid, Strip, style
from ...language import Words, say
from ...numerics.words import number
from ...ops.gsa import fused_recurrent_gsa, reference
from ..knobs import DecayKnob, NumberKnob
from .sketch import Sketch, percent, short

_T, _M, _K = 8, 4, 6
_GATES = (0.0, -0.1, -0.2, -0.3, -0.5, -0.7, -1.0, -1.5, -2.0, -3.0, -5.0)
_MORE = 40  # tokens that "slot_gate" reads after the first
_F = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -5.0, -7.0, -10.0, -15.0, -20.0, -30.0, -40.0)
_FIELD = 50.0  # the largest |f|

WORDS = Words() | {
    "slots": {
        "alt": "Left, a table with a row for each slot and a column for each token: how much of the token the slot "
        "holds; right, a bar for each token: its weight in what the last query reads, and a diamond where softmax "
        "attention over as many tokens as there are slots has it",
        "holds": "how much of each token a slot holds",
        "weights": "what the last query reads",
        "gsa": "GSA",
        "attention": "softmax attention over the last {M}",
        "fades": "Nothing fades: every slot holds two tokens in full, one on top of the other. The weights of the last "
        "query are {off} off those of softmax attention over the last {M} tokens.",
        "keeps": "A slot keeps {kept} of its old token when a new one is written to it. The weights of the last query "
        "are {off} off those of softmax attention over the last {M} tokens.",
        "wiped": "A slot is wiped before it is written to, and holds one token. The weights of the last query are "
        "those of softmax attention over the last {M} tokens; they differ by {rounding}.",
        "held": "slot {m} holds token {j} with {how} = {x}",
        "new": "its strength, 1: nothing was written to the slot since",
        "old": "its strength times what the slot has kept since, 1 · e^{gate}",
        "never": "slot {m} holds nothing of token {j}: it was written to slot {other}, with strength 1, and to the "
        "others with strength 0",
        "weight": "token {j}: p of slot {m} · what it holds = {p} · {x} = {weight} (softmax attention: {attention})",
    },
    "slot_gate": {
        "alt": "Left, the log decay of a slot as a curve over what the model computes, f, the present f marked; right, "
        "bars: what is left in a slot after one more token, two more, and so on",
        "curve": "gate g = logsigmoid(f) / 8",
        "left": "what is left in the slot",
        "x": "more tokens read",
        "half": "half is left",
        "say": "f = {f}: g = {g:.3g}. A slot keeps {one} of itself at every token; {half}.",
        "half-life": "half is left after {half:.3g} tokens",
        "quick": "less than half is left after one",
        "arithmetic": "after {n} more: e^({n} · {g}) = {left}",
        "gate": "f = {f}: logsigmoid(f) / 8 = {g}",
    },
}


@dataclass(frozen=True)
class SlotsShown:
    """Tokens written in turn into M slots, each of which decays by e^gate when it is written (gate: natural-log, <= 0).

    holds [M, T]: the share of each token in a slot after the last token; p [M]: the last query's weights of the slots;
    weights [T]: its weights of the tokens; attention [T]: the weights of softmax attention over the last M tokens."""

    gate: float
    holds: np.ndarray
    p: np.ndarray
    weights: np.ndarray
    attention: np.ndarray

    @property
    def off(self) -> float:
        """The relative L2 distance between `weights` and `attention`."""
        return float(np.linalg.norm(self.weights - self.attention) / np.linalg.norm(self.attention))


class Slots(Sketch, name="slots", words=WORDS):
    """A table of what each slot holds, and a query's weights of the tokens beside those of softmax attention."""

    knobs = {"gate": lambda: DecayKnob(0.0, "gate", stops=_GATES)}
    presets = {"nothing fades": {"gate": 0.0}, "wiped first": {"gate": float("-inf")}}
    script = """import torch
from flakit.ops.gsa import reference

q, k = torch.randn(2, 1, 8, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
v = torch.eye(8, dtype=torch.float64)[None, :, None]
s = torch.nn.functional.one_hot(torch.arange(8) % 4, 4).double()[None, :, None]
*_, last = reference.steps(q, k, v, s, torch.where(s > 0, {gate}, 0.0))
print("what each slot holds of each token", last.hv[0, 0], sep="\\n")
print("weights of the tokens", last.o[0, 0])
print("softmax attention    ", (6**-0.5 * k[0, 4:, 0] @ q[0, -1, 0]).softmax(0))
"""

    @staticmethod
    def compute(gate: float) -> SlotsShown:
        """Return the slots' contents: values are unit vectors, so that a slot shows how much of each token it holds."""
        q, k = torch.randn(2, 1, _T, 1, _K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        v = torch.eye(_T, dtype=torch.float64)[None, :, None]
        s = torch.nn.functional.one_hot(torch.arange(_T) % _M, _M).double()[None, :, None]
        *_, last = reference.steps(q, k, v, s, torch.where(s > 0, gate, 0.0))
        window = slice(_T - _M, _T)
        attention = torch.zeros(_T, dtype=torch.float64)
        attention[window] = (_K**-0.5 * k[0, window, 0] @ q[0, -1, 0]).softmax(0)
        return SlotsShown(gate, *(x.numpy() for x in (last.hv[0, 0], last.p[0, 0], last.o[0, 0], attention)))

    def __init__(self, width: float):
        height, left, gap = 2.65, 0.6, 0.75
        self.canvas = Canvas(width, height)
        across = 0.6 * (width - left - gap - 0.15)
        rest = width - left - gap - 0.15 - across
        table = self.canvas.axes(left, 0.32, across, 1.5)
        table.set(xlabel=say("token"), ylabel=say("slot"), title=self.words["holds"])
        ax = self.canvas.axes(left + across + gap, 0.32, rest, 1.5)
        ax.set(ylim=(0, 1), yticks=(0, 0.5, 1), xlabel=say("token"), title=self.words["weights"])
        self._bars = Bars(self.canvas, ax, facecolor=style.BLUE, label=self.words["gsa"])
        look = {"color": style.BLACK, "markerfacecolor": "white", "markersize": 7, "markeredgewidth": 1.6}
        self._marks = self.canvas.line(ax, "D", label=self.words.say("attention", M=_M), **look)
        self._strip = Strip(self.canvas, table, _M, _T, name="holds")
        table.set(xticks=range(_T), yticks=range(_M))
        ax.set(xticks=range(_T), xlim=(-0.6, _T - 0.4))
        self.canvas.legend(self._bars.patch, self._marks, handlelength=1.2)
        CellGrid(self.canvas, ax, "weights", 1, _T)

    def update(self, shown: SlotsShown) -> None:
        held = [["" if x == 0 else short(x) for x in row] for row in shown.holds]
        self._strip.update(shown.holds, held, empty=shown.holds == 0)
        self._bars.update(shown.weights)
        inside = np.flatnonzero(shown.attention)
        self._marks.set_data(inside, shown.attention[inside])

    def say(self, shown: SlotsShown) -> str:
        words = "fades" if shown.gate == 0 else "wiped" if shown.gate == -math.inf else "keeps"
        return self.words.say(
            words, kept=percent(math.exp(shown.gate)), off=percent(shown.off),
            rounding=say("nothing at all") if shown.off == 0 else number(shown.off, 2), M=_M,
        )  # fmt: skip

    def arithmetic(self, shown: SlotsShown, cell: Cell) -> str:
        j = cell.column
        if cell.map == "weights":
            m = j % _M
            return self.words.say("weight",
                j=j, m=m, p=short(shown.p[m]), x=short(shown.holds[m, j]), weight=short(shown.weights[j]),
                attention=short(shown.attention[j]),
            )  # fmt: skip
        m, x = cell.row, shown.holds[cell.row, j]
        if j % _M != m:
            return self.words.say("never", m=m, j=j, other=j % _M)
        new = j + _M >= _T
        how = self.words["new"] if new else self.words.say("old", gate=shown.gate)
        return self.words.say("held", m=m, j=j, how=how, x=x)


@dataclass(frozen=True)
class SlotGateShown:
    """The model's output f, the gate g it makes (natural-log, <= 0), and the share left of a slot after 1 … N more
    tokens, [N]."""

    f: float
    g: float
    left: np.ndarray


class SlotGate(Sketch, name="slot_gate", words=WORDS):
    """The gate as a function of f, and how a slot decays by it."""

    knobs = {"f": lambda: NumberKnob(0.0, "f", stops=_F, low=-_FIELD, high=_FIELD)}
    presets = {"fresh": {"f": 0.0}, "drifted": {"f": -20.0}}
    script = """import torch

g = torch.nn.functional.logsigmoid(torch.tensor({f}, dtype=torch.float64)) / 8
print("g =", g.item())
for more in range(1, 41):
    print(more, (more * g).exp().item())
"""

    @staticmethod
    def compute(f: float) -> SlotGateShown:
        """Return what is left of 1 that the first token writes into a single slot, whose softmax is 1: the outputs."""
        g = _gate(torch.tensor(f, dtype=torch.float64))
        ones = torch.ones(1, _MORE + 1, 1, 1, dtype=torch.float64)
        s = ones.clone()
        s[:, 1:] = 0
        o = fused_recurrent_gsa(ones, ones, ones, s, g * ones).o
        return SlotGateShown(f, g.item(), o[0, 1:, 0, 0].numpy())

    def __init__(self, width: float):
        height, left, gap = 2.4, 0.6, 0.7
        self.canvas = Canvas(width, height)
        across = 0.4 * (width - left - gap - 0.15)
        rest = width - left - gap - 0.15 - across
        curve = self.canvas.axes(left, 0.32, across, 1.55)
        curve.set(title=self.words["curve"], xlabel=say("f"))
        ax = self.canvas.axes(left + across + gap, 0.32, rest, 1.55)
        ax.set(title=self.words["left"], xlabel=self.words["x"], xlim=(-0.5, _MORE - 0.5))
        ax.set(ylim=(0, 1.02), yticks=(0, 0.5, 1))
        ticks = [1, *range(10, _MORE + 1, 10)]
        ax.set_xticks([n - 1 for n in ticks], ticks)
        ax.axhline(0.5, color=style.GREY, linewidth=1, linestyle=(0, (4, 2)), zorder=0)
        self._bars = Bars(self.canvas, ax, thick=0.7, facecolor=style.BLUE)
        self._dot = self.canvas.line(curve, "o", **style.HERE, markersize=9, zorder=5)
        f = torch.linspace(max(_F) + 1, min(_F) - 1, 200, dtype=torch.float64)
        curve.plot(f.numpy(), _gate(f).numpy(), **style.LINES[0])
        CellGrid(self.canvas, ax, "left", 1, _MORE)
        CellGrid(self.canvas, curve, "gate", 1, 1)

    def update(self, shown: SlotGateShown) -> None:
        self._bars.update(shown.left)
        self._dot.set_data([shown.f], [shown.g])

    def say(self, shown: SlotGateShown) -> str:
        half = math.log(2) / -shown.g
        return self.words.say(
            "say", f=shown.f, g=shown.g, one=percent(float(shown.left[0])),
            half=self.words.say("half-life", half=half) if half >= 1 else self.words["quick"],
        )  # fmt: skip

    def arithmetic(self, shown: SlotGateShown, cell: Cell) -> str:
        n = cell.column + 1
        if cell.map == "gate":
            return self.words.say("gate", f=shown.f, g=shown.g)
        return self.words.say("arithmetic", n=n, g=shown.g, left=shown.left[n - 1])


def _gate(f: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.logsigmoid(f) / 8
