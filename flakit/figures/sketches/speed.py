"""The small pictures of 16_speed. Arrays in; each says itself in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...language import Words
from ...numerics.words import number
from .. import style
from ..canvas import Canvas, Cell
from ..drawing import Drawing
from .shared import pointable

MOVING, MULTIPLYING = style.LINES[0], style.LINES[1]
"""Colour and dash of what memory takes, and of what the products take."""

WORDS = Words() | {
    "roof": {
        "alt": "Left, the roof under which operations a second lie, over operations a byte, with a point for a call; "
        "right, a bar for how long its bytes take and one for its operations",
        "x": "operations per byte",
        "y": "10¹² operations a second",
        "times": "microseconds",
        "moving": "bytes",
        "multiplying": "operations",
        "call": "this call at its floor",
        "one": "One token a sequence",
        "more": "{tokens} tokens a sequence",
        "say": "{call}, heads of {K} channels: {intensity:.3g} operations per byte. The bytes take {moving} µs, the "
        "operations {multiplying} µs. {limit}",
        "memory": "The floor is set by the memory.",
        "products": "The floor is set by the products.",
        "arithmetic": {
            "moving": "{bytes} · 10⁶ bytes / {rate:.3g} · 10¹² a second = {us} µs",
            "multiplying": "{operations} · 10⁶ operations / {rate:.3g} · 10¹² a second = {us} µs",
        },
    },
    "kept": {
        "alt": "Over the tokens of a chunk, how long it takes to write and read a state for each chunk, which falls, "
        "how long the pairs inside chunks take to multiply, which rises, and the floor of the forward pass",
        "x": "tokens of a chunk, C",
        "y": "milliseconds",
        "states": "states: write, read",
        "pairs": "pairs: multiply",
        "floor": "floor of the forward",
        "say": "A state every {chunk} tokens, {itemsize} bytes a number: {size}. Written once and read once they take "
        "{states:.3g} ms, {times:.2g} times the forward's floor. The pairs inside chunks take {pairs:.2g} ms.",
        "every": "A state after every token, {itemsize} bytes a number: {size}. Written once and read once they take "
        "{states:.3g} ms, {times:.2g} times the forward's floor. No pair has to be multiplied but a token with itself.",
        "arithmetic": "C = {chunk}: states 2 · {size} / {rate:.3g} TB/s = {states:.3g} ms, pairs {pairs:.2g} ms",
    },
}


@dataclass(frozen=True)
class RoofShown:
    """A call's least bytes and operations, and what the device does at most: 10^12 of each a second."""

    tokens: int
    K: int
    bytes: int
    operations: int
    copy_tb_s: float
    tflops: float

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes

    @property
    def ms(self) -> tuple[float, float]:
        """Of moving the bytes, and of the operations."""
        return 1e-9 * self.bytes / self.copy_tb_s, 1e-9 * self.operations / self.tflops


class Roof(Drawing):
    """The roof with a call under it, and both of its times."""

    _ENDS = 0.2, 2000.0

    def __init__(self, width: float):
        height, words = 2.6, WORDS["roof"]
        self.canvas, self._roof = Canvas(width, height), None
        right = 3.1 if width > 8 else 2.3
        across = width - 0.7 - right - 0.35
        with style.context():
            self._ax = ax = self.canvas.axes(0.7, 0.12, across, height - 0.66)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set(xscale="log", yscale="log", xlim=self._ENDS, ylim=(0.3, 3000), xlabel=words["x"], ylabel=words["y"])
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_ticks([1, 10, 100, 1000], map(style.power, range(4)))
            ax.minorticks_off()
            (self._drop,) = self.canvas.moving(ax.plot([], [], color=style.GREY, linewidth=1, linestyle=":")[0])
            (self._point,) = self.canvas.moving(
                ax.plot([], [], "o", **style.HERE, markersize=9, zorder=4, label=words["call"])[0]
            )
            ax.legend(loc="upper left", handletextpad=0.4, borderaxespad=0.1)
            left = width - right + 0.55
            self._bars = []
            ax = self.canvas.axes(left, 0.42, right - 1.2, 1.0)
            ax.set_title(words["times"], pad=5)
            ax.set(xlim=(0, 1), ylim=(1.5, -0.5), xticks=[], yticks=[0, 1])
            ax.set_yticklabels([words["moving"], words["multiplying"]])
            ax.tick_params(axis="y", length=0)
            ax.spines[["top", "right", "bottom"]].set_visible(False)
            for row, look in enumerate((MOVING, MULTIPLYING)):
                (bar,) = ax.barh([row], [0.0], height=0.6, color=look["color"])
                text = ax.text(0, row, "", va="center", fontsize=9)
                self.canvas.moving(bar, text)
                self._bars.append((bar, text))
            pointable(self.canvas, "times", ax, 2, 1)

    def update(self, shown: RoofShown) -> None:
        if self._roof is None:
            x = np.array([self._ENDS[0], shown.tflops / shown.copy_tb_s, self._ENDS[1]])
            with style.context():
                (self._roof,) = self._ax.plot(x, np.minimum(x * shown.copy_tb_s, shown.tflops), color=style.BLACK)
            self.canvas.stale()
        moving, multiplying = shown.ms
        rate = min(shown.intensity * shown.copy_tb_s, shown.tflops)
        self._point.set_data([shown.intensity], [rate])
        self._drop.set_data([shown.intensity] * 2, [0.3, rate])
        for (bar, text), ms in zip(self._bars, shown.ms, strict=True):
            share = ms / max(moving, multiplying)
            bar.set_width(share)
            text.set(text=_us(ms), x=share + 0.03)

    def say(self, shown: RoofShown) -> str:
        words, (moving, multiplying) = WORDS["roof"], shown.ms
        return words.say(
            "say",
            call=words.say("one" if shown.tokens == 1 else "more", tokens=shown.tokens),
            K=shown.K,
            intensity=shown.intensity,
            moving=_us(moving),
            multiplying=_us(multiplying),
            limit=words["memory" if moving > multiplying else "products"],
        )

    def arithmetic(self, shown: RoofShown, cell: Cell) -> str:
        words, which = WORDS["roof"]["arithmetic"], ("moving", "multiplying")[cell.row]
        rate = (shown.copy_tb_s, shown.tflops)[cell.row]
        said = {"bytes": f"{shown.bytes / 1e6:,.4g}", "operations": f"{shown.operations / 1e6:,.0f}"}
        return words.say(which, **said, rate=rate, us=_us(shown.ms[cell.row]))


@dataclass(frozen=True)
class KeptShown:
    """For chunks of so many tokens [N]: bytes of their states, and milliseconds of moving these twice and of the pairs.

    at: which of them is chosen; itemsize: bytes of a number of a state; floor: milliseconds of the forward.
    """

    at: int
    itemsize: int
    chunks: Sequence[int]
    bytes: np.ndarray
    states: np.ndarray
    pairs: np.ndarray
    floor: float
    copy_tb_s: float


class Kept(Drawing):
    """Two lines over the size of a chunk, and where a chunk lies on them."""

    def __init__(self, width: float):
        height, words = 2.7, WORDS["kept"]
        self.canvas, self._ready = Canvas(width, height), False
        with style.context():
            self._ax = ax = self.canvas.axes(0.72, 0.12, width - 0.72 - 2.2, height - 0.66)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set(xlabel=style.logarithmic(words["x"]), ylabel=words["y"], yscale="log")
            self._lines = [
                ax.plot([], [], **look, label=words[name])[0]
                for name, look in (("states", MOVING), ("pairs", MULTIPLYING))
            ]
            (self._dots,) = self.canvas.moving(ax.plot([], [], "o", color=style.BLACK, markersize=7, zorder=5)[0])
            (self._at,) = self.canvas.moving(ax.plot([], [], color=style.GREY, linewidth=1, linestyle=":")[0])
            self.canvas.moving(self._lines[0])
            (self._floor,) = ax.plot([], [], color=style.BLACK, linewidth=1.2, label=words["floor"])
            handles, at = [*self._lines, self._floor], (1 - 2.15 / width, 0.97)
            self.canvas.figure.legend(handles=handles, loc="upper left", bbox_to_anchor=at, handlelength=2.6)

    def update(self, shown: KeptShown) -> None:
        n = len(shown.chunks)
        if not self._ready:
            with style.context():
                shortest = min(shown.states.min() / 2, shown.pairs.min())
                self._ax.set(xlim=(-0.5, n - 0.5), ylim=(shortest / 2, 2 * shown.states.max() * 4 / shown.itemsize))
                self._ax.set_xticks(range(0, n, 2), [str(chunk) for chunk in shown.chunks[::2]])
                self._ax.set_yticks([0.001, 0.01, 0.1, 1, 10], map(style.power, range(-3, 2)))
                self._ax.minorticks_off()
                self._lines[1].set_data(range(n), shown.pairs)
                self._floor.set_data([-0.5, n - 0.5], [shown.floor] * 2)
                pointable(self.canvas, "chunks", self._ax, 1, n)
            self.canvas.stale()
            self._ready = True
        self._lines[0].set_data(range(n), shown.states)
        self._dots.set_data([shown.at] * 2, [shown.states[shown.at], shown.pairs[shown.at]])
        self._at.set_data([shown.at] * 2, self._ax.get_ylim())

    def say(self, shown: KeptShown) -> str:
        words, n = WORDS["kept"], shown.at
        return words.say(
            "every" if shown.chunks[n] == 1 else "say",
            chunk=shown.chunks[n],
            itemsize=shown.itemsize,
            size=_size(shown.bytes[n]),
            states=shown.states[n],
            times=shown.states[n] / shown.floor,
            pairs=shown.pairs[n],
        )

    def arithmetic(self, shown: KeptShown, cell: Cell) -> str:
        n = cell.column
        return WORDS.say(
            "kept",
            "arithmetic",
            chunk=shown.chunks[n],
            size=_size(shown.bytes[n]),
            rate=shown.copy_tb_s,
            states=shown.states[n],
            pairs=shown.pairs[n],
        )


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _us(ms: float) -> str:
    return f"{1e3 * ms:,.0f}" if ms >= 0.1 else number(1e3 * ms, 3)
