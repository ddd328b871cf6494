"""The sketches of lesson 10_state_tracking: swaps of three things, and states that a token reflects."""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ...figures import Bars, Canvas, Cell, CellGrid, name_rows, style
from ...language import Words, say
from ...models.tasks import Permutations
from ...ops.rwkv7 import fused_recurrent_rwkv7
from ..knobs import NumberKnob, integer, number
from .sketch import Sketch, percent, short

MOVES, READINGS, DECAY = 10, 16, -0.6
TURNS = round(1 + math.exp(DECAY), 4)
"""The alpha that reverses the state along kappa at this decay without changing its size."""
BEFORE, KAPPA = np.array([0.9, 0.3]), np.array([1.0, -1.0]) / math.sqrt(2)
"""A column of a state [2], and the unit vector along which a token of the sketch "mirror" edits it."""

_SCRIPT = """import torch
from flakit import fused_recurrent_rwkv7

kappa, w, alpha, times = {kappa}, {w}, {alpha}, {times}
k = torch.zeros(1, times, 1, len(kappa))
a = -kappa + k
state = {state}[None, None, :, None]
x = dict(r=k, w=w + k, k=k, v=k[..., :1], a=a, b=-alpha * a, initial_state=state)
print(fused_recurrent_rwkv7(**x, output_final_state=True).final_state[0, 0, :, 0])
"""

WORDS = Words() | {
    "swaps": {
        "alt": "A line for each of three things, over the moves: the place in which it lies; moves to come are pale",
        "x": "moves so far",
        "places": ("1st", "2nd", "3rd"),
        "things": ("A", "B", "C"),
        "begin": "Nothing has moved yet: {order}.",
        "say": "Move {t} swaps {swap}. Now they lie {order}: one of {all} orders.",
        "swap": "{a} and {b}",
        "first": "before the first move {thing} lies {place}",
        "arithmetic": "after move {t} {thing} lies {place}",
    },
    "mirror": {
        "alt": "Left, a plane with the direction kappa, a column of the state as an arrow, and what one token makes of "
        "it; right, a scale from 1, kept, over 0, forgotten, to -1, turned round",
        "plane": "one column of the state",
        "scale": "along κ multiplied by",
        "before": "before",
        "after": "after",
        "kept": "1\nkept",
        "forgotten": "0\nforgotten",
        "turned": "−1\nturned\nround",
        "say": "Along κ the state is multiplied by 1 - {alpha} = {factor}{what}. At right angles to κ nothing changes.",
        "what": {
            "kept": ": it is kept",
            "fades": ": part of it is gone",
            "forgotten": ": it is forgotten",
            "fades round": ": it is turned round, and part of it is gone",
            "turned": ": it is turned round, and all of it is there",
        },
        "before is": "before: ({x}, {y})",
        "after is": "after: ({x}, {y}) = before - {alpha} · (κ · before) κ",
        "factor is": "1 - {alpha} = {factor}",
    },
    "again": {
        "alt": "A bar for each time that one and the same token is read: the size of what the state holds along kappa "
        "then, on a logarithmic axis, in one colour where it is as it was and in another where it is turned round",
        "x": "times that the token was read",
        "y": "size of what is left",
        "same": "as it was",
        "turned": "turned round",
        "say": "With w = {w} and α = {alpha}, one reading multiplies the state along κ by {factor:.3g}. After {n} "
        "readings {left}",
        "grown": "it is {size:.3g} times as large: it grows without end.",
        "held": "it is as large as in the beginning.",
        "faded": "{size} of it is left.",
        "arithmetic": "after {n}: ({kept:.3g} - {alpha})^{n} = {factor:.3g}^{n} = {left:.3g}",
    },
}


@dataclass(frozen=True)
class SwapsShown:
    """The two places that each move swaps, [N, 2]; the thing in each place after 0 … N moves, [N + 1, 3]."""

    t: int  # moves so far
    moves: np.ndarray
    orders: np.ndarray


class Swaps(Sketch, name="swaps", words=WORDS):
    """Three things that swap places, each a line over the moves."""

    knobs = {"t": lambda: integer(0, 0, MOVES, "moves")}
    presets = {"begin": {"t": 0}, "end": {"t": MOVES}}
    script = f"""import torch
from flakit.models import Permutations

tokens, orders = Permutations(items=3).batch(1, {MOVES + 1}, torch.Generator().manual_seed(1))
print("moves", tokens[0, 1 : {{t}} + 1].tolist(), "order", orders[0, {{t}}].item())
"""

    @staticmethod
    def compute(t: int) -> SwapsShown:
        return SwapsShown(t, *_moves())

    def __init__(self, width: float):
        self._lines, self._ends = [], []
        ax = self.plot(width, 2.1, left=0.55, right=0.4, top=0.12, bottom=0.55)
        ax.spines["left"].set_visible(False)
        ax.set(xlabel=self.words["x"], xlim=(-0.1, MOVES + 0.1), xticks=range(MOVES + 1), ylim=(2.35, -0.35))
        name_rows(ax, self.words["places"])
        _, orders = _moves()
        for thing, look in zip(range(3), style.LINES, strict=False):
            places = (orders == thing).argmax(1)
            ax.plot(range(MOVES + 1), places, **look | {"linewidth": 2.2}, alpha=0.18)
            line = self.canvas.line(ax, **look | {"linewidth": 3}, zorder=3)
            name = ax.text(0, 0, self.words["things"][thing], ha="left", va="center", fontsize=11, fontweight="bold")
            name.set(color=look["color"], zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
            self._lines.append((line, places))
            self._ends.append(name)
        self.canvas.moving(*self._ends)
        CellGrid(self.canvas, ax, "places", 3, MOVES + 1)

    def update(self, shown: SwapsShown) -> None:
        for (line, places), name in zip(self._lines, self._ends, strict=True):
            line.set_data(range(shown.t + 1), places[: shown.t + 1])
            name.set_position((shown.t + 0.12, places[shown.t]))

    def say(self, shown: SwapsShown) -> str:
        order = ", ".join(self.words["things"][thing] for thing in shown.orders[shown.t])
        if shown.t == 0:
            return self.words.say("begin", order=order)
        a, b = (self.words["places"][place] for place in shown.moves[shown.t - 1])
        return self.words.say("say", t=shown.t, swap=self.words.say("swap", a=a, b=b), order=order, all=6)

    def arithmetic(self, shown: SwapsShown, cell: Cell) -> str:
        t = cell.column
        thing = self.words["things"][shown.orders[t, cell.row]]
        return self.words.say("arithmetic" if t else "first", t=t, thing=thing, place=self.words["places"][cell.row])


@dataclass(frozen=True)
class MirrorShown:
    """A column of a state [2] after one token without decay, which removes alpha times the part of `BEFORE` along
    `KAPPA`."""

    alpha: float
    after: np.ndarray

    @property
    def factor(self) -> float:
        """The factor by which the token multiplies the part along kappa: 1 - alpha."""
        return float(KAPPA @ self.after / (KAPPA @ BEFORE))


class Mirror(Sketch, name="mirror", words=WORDS):
    """A plane with a column of a state before and after one token, and a scale of the factor along kappa."""

    knobs = {"alpha": lambda: number(0.0, 0.0, 2.0, "α", 0.125, log=False)}
    presets = {"forgets": {"alpha": 1.0}, "mirrors": {"alpha": 2.0}}
    script = _SCRIPT.format(
        kappa="torch.tensor([1.0, -1.0]) / 2**0.5",
        w=0.0,
        alpha="{alpha}",
        times=1,
        state="torch.tensor([0.9, 0.3])",
    )

    @staticmethod
    def compute(alpha: float) -> MirrorShown:
        before, kappa = map(torch.as_tensor, (BEFORE, KAPPA))
        return MirrorShown(alpha, _read(before, kappa, 0.0, alpha, 1)[0].numpy())

    def __init__(self, width: float):
        height = 2.9
        self.canvas = Canvas(width, height)
        side = height - 0.75
        plane = ax = self.canvas.axes(0.55, 0.3, 1.2 * side, side)
        ax.set(title=self.words["plane"], xlabel=say("row 0"), ylabel=say("row 1"))
        ax.set(xlim=(-0.6, 1.8), ylim=(-0.85, 1.15), xticks=(0, 1), yticks=(0, 1))
        ax.axhline(0, color=style.EMPTY, zorder=0)
        ax.axvline(0, color=style.EMPTY, zorder=0)
        left = 0.55 + 1.2 * side + 0.5
        ax = self.canvas.axes(left, 0.35 + 0.5 * side, width - left - 0.3, 0.25)
        ax.set_title(self.words["scale"], pad=18)
        ax.set(xlim=(1.12, -1.12), ylim=(-0.5, 0.5), yticks=[])
        ax.set_xticks([1, 0, -1], [self.words[name] for name in ("kept", "forgotten", "turned")])
        for label, side_ in zip(ax.get_xticklabels(), ("left", "center", "right"), strict=True):
            label.set(ha=side_, multialignment=side_)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.axhline(0, color=style.EMPTY, linewidth=6, zorder=0, solid_capstyle="butt")
        self._here = self.canvas.line(ax, "o", **style.HERE, markersize=12, zorder=5)
        CellGrid(self.canvas, ax, "factor", 1, 1)
        arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
        x, y = 3 * KAPPA
        plane.plot([-x, x], [-y, y], color=style.GREY, linestyle=(0, (3, 2)), linewidth=1.4, zorder=1)
        plane.text(KAPPA[0] + 0.08, KAPPA[1] + 0.08, "κ", ha="center", fontsize=11, color=style.GREY)
        plane.annotate("", BEFORE, (0, 0), arrowprops=arrow | {"color": style.BLUE, "linewidth": 2})
        x, y = BEFORE + (0.08, -0.16)
        plane.text(x, y, self.words["before"], ha="left", va="center", color=style.BLUE, fontsize=9)
        look = {"color": style.PURPLE, "linewidth": 2.6}
        self._arrows = self.canvas.moving(
            plane.annotate("", (1, 0), (0, 0), arrowprops=arrow | look, zorder=5),
            plane.text(0, 0, self.words["after"], ha="center", va="center", color=style.PURPLE, fontsize=9, zorder=6),
            *plane.plot([], [], color=style.PURPLE, linewidth=1, linestyle=(0, (1, 2)), zorder=2),
        )
        CellGrid(self.canvas, plane, "plane", 1, 2)

    def update(self, shown: MirrorShown) -> None:
        arrow, name, way = self._arrows
        arrow.xy = tuple(shown.after)
        name.set_position(tuple(shown.after + (0, 0.16)))
        way.set_data(*np.stack((BEFORE, shown.after), 1))
        self._here.set_data([shown.factor], [0])

    def say(self, shown: MirrorShown) -> str:
        factor = round(shown.factor, 6)
        if factor in (1, 0, -1):
            what = {1: "kept", 0: "forgotten", -1: "turned"}[factor]
        else:
            what = "fades" if factor > 0 else "fades round"
        return self.words.say("say", alpha=short(shown.alpha), factor=short(factor), what=self.words["what"][what])

    def arithmetic(self, shown: MirrorShown, cell: Cell) -> str:
        alpha = short(shown.alpha)
        if cell.map == "factor":
            return self.words.say("factor is", alpha=alpha, factor=short(shown.factor))
        x, y = map(short, (BEFORE, shown.after)[cell.column])
        return self.words.say("before is" if cell.column == 0 else "after is", x=x, y=y, alpha=alpha)


@dataclass(frozen=True)
class AgainShown:
    """The part of the state along kappa, first 1, after 1 … N readings of one token that removes alpha of it, [N]."""

    alpha: float
    left: np.ndarray


class Again(Sketch, name="again", words=WORDS):
    """A bar for what is left along kappa after each reading, with its sign as the colour."""

    knobs = {
        "alpha": lambda: NumberKnob(1.0, "α", stops={*(round(0.1 * n, 1) for n in range(21)), TURNS}, low=0.0, high=2.0)
    }
    presets = {"as published": {"alpha": 0.9}, "keeps its size": {"alpha": TURNS}, "grows": {"alpha": 2.0}}
    script = _SCRIPT.format(
        kappa="torch.full((4,), 0.5)", w=DECAY, alpha="{alpha}", times=READINGS, state="torch.full((4,), 0.5)"
    )

    @staticmethod
    def compute(alpha: float) -> AgainShown:
        kappa = torch.full((4,), 0.5, dtype=torch.float64)
        return AgainShown(alpha, (_read(kappa, kappa, DECAY, alpha, READINGS) @ kappa).numpy())

    _LOW, _HIGH = 1e-4, 1e4

    def __init__(self, width: float):
        ax = self.plot(width, 2.5, left=0.75, right=1.6, top=0.15, bottom=0.55)
        ax.set(xlabel=self.words["x"], xlim=(-0.6, READINGS - 0.4))
        ax.set_xticks(range(0, READINGS, 3), range(1, READINGS + 1, 3))
        ax.set(ylabel=self.words["y"], yscale="log", ylim=(self._LOW, self._HIGH))
        ax.set_yticks([1e-4, 1e-2, 1, 1e2, 1e4])
        ax.minorticks_off()
        ax.axhline(1, **style.LAW, zorder=4)
        self._same = Bars(self.canvas, ax, facecolor=style.BLUE)
        self._turned = Bars(self.canvas, ax, facecolor=style.PURPLE)
        handles = [style.swatch(style.BLUE, self.words["same"]), style.swatch(style.PURPLE, self.words["turned"])]
        self.canvas.figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1 - 1.55 / width, 0.95), handlelength=1.4
        )
        CellGrid(self.canvas, ax, "left", 1, READINGS)

    def update(self, shown: AgainShown) -> None:
        sizes = np.clip(np.abs(shown.left), self._LOW, self._HIGH)
        for bars, mask in ((self._same, shown.left > 0), (self._turned, shown.left < 0)):
            bars.update(np.where(mask, sizes, np.nan), begin=self._LOW)

    def say(self, shown: AgainShown) -> str:
        last = abs(float(shown.left[-1]))
        if abs(last - 1) < 0.02:
            left = self.words["held"]
        else:
            left = self.words.say("grown", size=last) if last > 1 else self.words.say("faded", size=percent(last))
        return self.words.say("say", w=DECAY, alpha=shown.alpha, factor=shown.left[0], n=READINGS, left=left)

    def arithmetic(self, shown: AgainShown, cell: Cell) -> str:
        n = cell.column + 1
        return self.words.say(
            "arithmetic", n=n, kept=np.exp(DECAY), alpha=shown.alpha, factor=shown.left[0],
            left=shown.left[n - 1],
        )  # fmt: skip


@functools.cache
def _moves() -> tuple[np.ndarray, np.ndarray]:
    """Return the places that each move swaps [N, 2], and the thing in each place after 0 … N moves [N + 1, 3]."""
    task = Permutations(items=3)
    tokens, answers = task.batch(1, MOVES + 1, torch.Generator().manual_seed(1))
    orders = list(itertools.permutations(range(3)))
    moved = [orders[order] for order in task.after[0]]  # the order after each move from the initial one
    swaps = [[place for place in range(3) if moved[token - 1][place] != place] for token in tokens[0, 1:]]
    return np.array(swaps), np.array([orders[n] for n in answers[0]])


def _read(column: torch.Tensor, kappa: torch.Tensor, w: float, alpha: float, times: int) -> torch.Tensor:
    """Return a state of one column [K] after each of `times` tokens that write nothing, [times, K].

    kappa [K]: the direction they edit; w: their natural-log decay; alpha: the share that they remove along kappa."""

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return x.expand(1, times, 1, len(x))

    nothing, K = torch.zeros_like(kappa), len(kappa)
    x = {"w": tokens(torch.full_like(kappa, w)), "k": tokens(nothing), "v": tokens(nothing[:1])}
    x |= {"a": tokens(-kappa), "b": tokens(alpha * kappa), "initial_state": column.float().view(1, 1, K, 1)}
    rows = [fused_recurrent_rwkv7(r=tokens(row), **x).o[0, :, 0, 0] for row in torch.eye(K, dtype=kappa.dtype)]
    return torch.stack(rows, 1)
