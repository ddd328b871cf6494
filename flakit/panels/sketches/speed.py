"""The sketches of lesson 16_speed: the roofline, the cost of storing states, and rare strong decays."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Marked, name_rows, style
from ...figures.marks import LabelledBars
from ...language import Words
from ...numerics import recorded
from ...numerics.words import number
from ...numerics.work import moved, work
from ..knobs import choice, steps
from .sketch import Sketch, size

_CHUNK = 16
"""Tokens per chunk in RWKV6's kernels for this call."""
_ONE_IN = [n * 10**power for power in range(6, 2, -1) for n in (10, 5, 2)] + [1000]
TOKENS, _HEADS = [1 << n for n in range(13)], (16, 32, 64, 128, 256, 512)

MOVING, MULTIPLYING = style.LINES[0], style.LINES[1]
"""Colour and dash of the time of memory traffic, and of the time of matrix products."""

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
    "tail": {
        "alt": "Left, the chunks of several heads: black where a chunk holds a steep gate, blue where it is computed "
        "the slow way; right, a bar each for the share of steep gates, of the chunks and of the heads that hold one, "
        "and of the chunks that are computed the slow way",
        "x": "chunk of {tokens} tokens",
        "y": "head",
        "steep": "holds a steep gate",
        "slow": "computed the slow way",
        "bars": ["steep gates", "steep chunks", "steep heads", "slow way"],
        "say": "One gate in {one_in:,} is steep: {chunks} of the chunks hold a steep gate, and {heads} of the heads. "
        "{way}",
        "head": "A head takes one way as a whole: {slow} of all chunks are computed the slow way.",
        "chunk": "Each chunk takes its own way: {slow} of all chunks are computed the slow way.",
        "arithmetic": {
            "cell": "head {head}, chunk {chunk}: {steep}, computed the {way}",
            "some": "at least one of its gates is steep",
            "none": "no gate is steep",
            "quick way": "quick way",
            "slow way": "slow way",
            "gates": "1 / {one_in:,} = {share}",
            "any": "at least one of {n:,} gates is steep: 1 - (1 - 1/{one_in:,})^{n:,} = {share}",
        },
    },
}


@dataclass(frozen=True)
class RoofShown:
    """A call on so many tokens with key size K, and the least bytes that it must move and operations it must do."""

    tokens: int
    K: int
    bytes: int
    operations: int

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes

    @property
    def ms(self) -> tuple[float, float]:
        """The milliseconds in which the device moves the bytes, and in which it does the operations."""
        copy_tb_s, tflops = peaks()
        return 1e-9 * self.bytes / copy_tb_s, 1e-9 * self.operations / tflops


class Roof(Sketch, name="roof", words=WORDS):
    """The roofline with a call below it, and bars for the call's time of bytes and time of operations."""

    knobs = {"tokens": lambda: steps(1, TOKENS, "tokens"), "K": lambda: steps(64, _HEADS, "channels K")}
    presets = {
        "one token": {"tokens": 1, "K": 64},
        "a text": {"tokens": 4096, "K": 64},
        "wide": {"tokens": 4096, "K": 512},
    }
    script = """from flakit.numerics import recorded
from flakit.numerics.work import work

table = recorded.read("h200_speed")
row = table.rows[0] | {{"T": {tokens}, "K": {K}, "V": {K}, "decode": True}}
call = work(row, "forward")
floor = call.floor_ms(table.meta["copy_tb_s"], table.meta["tflops"])
print("operations per byte", call.intensity, "floor", floor, "ms")
"""

    @staticmethod
    def compute(tokens: int, K: int) -> RoofShown:
        """Return the work of a call that reads a state and returns one."""
        call = work(_row() | {"T": tokens, "K": K, "V": K, "decode": True}, "forward")
        return RoofShown(tokens, K, call.bytes, call.operations)

    _ENDS = 0.2, 2000.0

    def __init__(self, width: float):
        height = 2.6
        self.canvas = Canvas(width, height)
        right = 3.1 if width > 8 else 2.3
        across = width - 0.7 - right - 0.35
        ax = self.canvas.axes(0.7, 0.12, across, height - 0.66)
        ax.set(xlabel=self.words["x"], ylabel=self.words["y"])
        ax.set(xscale="log", yscale="log", xlim=self._ENDS, ylim=(0.3, 3000))
        copy_tb_s, tflops = peaks()
        x = np.array([self._ENDS[0], tflops / copy_tb_s, self._ENDS[1]])
        ax.plot(x, np.minimum(x * copy_tb_s, tflops), color=style.BLACK)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks([1, 10, 100, 1000], map(style.power, range(4)))
        ax.minorticks_off()
        self._drop = self.canvas.line(ax, color=style.GREY, linewidth=1, linestyle=":")
        self._point = self.canvas.line(ax, "o", **style.HERE, markersize=9, zorder=4, label=self.words["call"])
        ax.legend(loc="upper left", handletextpad=0.4, borderaxespad=0.1)
        left = width - right + 0.55
        ax = self.canvas.axes(left, 0.42, right - 1.2, 1.0)
        ax.set_title(self.words["times"], pad=5)
        name_rows(ax, [self.words["moving"], self.words["multiplying"]])
        self._bars = LabelledBars(self.canvas, ax, "times", [look["color"] for look in (MOVING, MULTIPLYING)])

    def update(self, shown: RoofShown) -> None:
        copy_tb_s, tflops = peaks()
        rate = min(shown.intensity * copy_tb_s, tflops)
        self._point.set_data([shown.intensity], [rate])
        self._drop.set_data([shown.intensity] * 2, [0.3, rate])
        self._bars.update((ms / max(shown.ms) for ms in shown.ms), map(_us, shown.ms))

    def say(self, shown: RoofShown) -> str:
        (moving, multiplying) = shown.ms
        return self.words.say(
            "say", call=self.words.say("one" if shown.tokens == 1 else "more", tokens=shown.tokens), K=shown.K,
            intensity=shown.intensity, moving=_us(moving), multiplying=_us(multiplying),
            limit=self.words["memory" if moving > multiplying else "products"],
        )  # fmt: skip

    def arithmetic(self, shown: RoofShown, cell: Cell) -> str:
        words, which = self.words["arithmetic"], ("moving", "multiplying")[cell.row]
        values = {"bytes": f"{shown.bytes / 1e6:,.4g}", "operations": f"{shown.operations / 1e6:,.0f}"}
        return words.say(which, **values, rate=peaks()[cell.row], us=_us(shown.ms[cell.row]))


@dataclass(frozen=True)
class KeptShown:
    """For each chunk size of `TOKENS`, [N]: the bytes of the stored states, and the milliseconds to write and read
    them. at: the index of the chosen size. itemsize: bytes per number of a state."""

    at: int
    itemsize: int
    bytes: np.ndarray
    states: np.ndarray


class Kept(Sketch, name="kept", words=WORDS):
    """The times to move the states and to multiply the pairs, over the chunk size, with a mark at the chosen one."""

    knobs = {
        "chunk": lambda: steps(32, TOKENS, "chunk C"),
        "itemsize": lambda: choice(4, {"float32": 4, "float16": 2}, "states"),
    }
    presets = {
        "every token": {"chunk": 1, "itemsize": 4},
        "32, float32": {"chunk": 32, "itemsize": 4},
        "64, float16": {"chunk": 64, "itemsize": 2},
    }
    script = """from flakit.numerics import recorded
from flakit.numerics.work import moved

table = recorded.read("h200_speed")
size = moved(table.rows[0], ["states"], every={chunk}, itemsize={itemsize})
print(size, "bytes of states, written and read in", 2e-9 * size / table.meta["copy_tb_s"], "ms")
"""

    @staticmethod
    def compute(chunk: int, itemsize: int) -> KeptShown:
        sizes = np.array([moved(_row(), ["states"], every=C, itemsize=itemsize) for C in TOKENS])
        return KeptShown(TOKENS.index(chunk), itemsize, sizes, 2e-9 * sizes / peaks()[0])

    def __init__(self, width: float):
        height, n = 2.7, len(TOKENS)
        self.canvas = Canvas(width, height)
        self._ax = ax = self.canvas.axes(0.72, 0.12, width - 0.72 - 2.2, height - 0.66)
        ax.set(xlabel=style.logarithmic(self.words["x"]), ylabel=self.words["y"], yscale="log", xlim=(-0.5, n - 0.5))
        self._states = self.canvas.line(ax, **MOVING, label=self.words["states"])
        (pairs,) = ax.plot(range(n), pair_times(), **MULTIPLYING, label=self.words["pairs"])
        self._dots = self.canvas.line(ax, "o", color=style.BLACK, markersize=7, zorder=5)
        self._at = self.canvas.line(ax, color=style.GREY, linewidth=1, linestyle=":")
        look = {"color": style.BLACK, "linewidth": 1.2, "label": self.words["floor"]}
        (floor,) = ax.plot([-0.5, n - 0.5], [_floor()] * 2, **look)
        states = self.compute(1, 4).states
        ax.set_ylim(min(states.min() / 2, pair_times().min()) / 2, 2 * states.max())
        ax.set_xticks(range(0, n, 2), [str(chunk) for chunk in TOKENS[::2]])
        ax.set_yticks([0.001, 0.01, 0.1, 1, 10], map(style.power, range(-3, 2)))
        ax.minorticks_off()
        CellGrid(self.canvas, ax, "chunks", 1, n)
        handles, at = [self._states, pairs, floor], (1 - 2.15 / width, 0.97)
        self.canvas.figure.legend(handles=handles, loc="upper left", bbox_to_anchor=at, handlelength=2.6)

    def update(self, shown: KeptShown) -> None:
        at = shown.at
        self._states.set_data(range(len(TOKENS)), shown.states)
        self._dots.set_data([at] * 2, [shown.states[at], pair_times()[at]])
        self._at.set_data([at] * 2, self._ax.get_ylim())

    def say(self, shown: KeptShown) -> str:
        n = shown.at
        return self.words.say(
            "every" if n == 0 else "say", chunk=TOKENS[n], itemsize=shown.itemsize, size=size(shown.bytes[n]),
            states=shown.states[n], times=shown.states[n] / _floor(), pairs=pair_times()[n],
        )  # fmt: skip

    def arithmetic(self, shown: KeptShown, cell: Cell) -> str:
        n = cell.column
        return self.words.say(
            "arithmetic", chunk=TOKENS[n], size=size(shown.bytes[n]), rate=peaks()[0], states=shown.states[n],
            pairs=pair_times()[n],
        )  # fmt: skip


@dataclass(frozen=True)
class TailShown:
    """The chunks that hold a steep gate, a decay too strong for the fast path, boolean [heads, chunks], if one gate in
    `one_in` is steep. by_head: whether such a head is computed slowly as a whole, or only its steep chunks."""

    one_in: int
    by_head: bool
    steep: np.ndarray

    @property
    def slow(self) -> np.ndarray:
        return self.steep.any(1, keepdims=True) | np.zeros_like(self.steep) if self.by_head else self.steep

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The expected shares of steep gates, of chunks and of heads that hold one, and of chunks computed slowly."""
        gates, chunks, heads = (-math.expm1(n * math.log1p(-1 / self.one_in)) for n in (1, *_gates()))
        return gates, chunks, heads, heads if self.by_head else chunks


class Tail(Sketch, name="tail", words=WORDS):
    """A map of each head's chunks (black: holds a steep gate; blue: off the fast path), and bars of expected shares."""

    knobs = {
        "one_in": lambda: steps(1_000_000, [(f"{n:,}", n) for n in _ONE_IN], "one gate in"),
        "by": lambda: choice("head", {"the head": "head", "each chunk": "chunk"}, "chooses"),
    }
    presets = {
        "one in a million": {"one_in": 1_000_000, "by": "head"},
        "each chunk": {"one_in": 1_000_000, "by": "chunk"},
        "one in 10,000": {"one_in": 10_000, "by": "head"},
    }
    script = """steep = 1 / {one_in}
gates = {{"chunk": 16 * 64, "head": 4096 * 64}}
held = {{name: 1 - (1 - steep) ** n for name, n in gates.items()}}
print("hold a steep gate:", held, "computed the slow way:", held[{by}])
"""

    @staticmethod
    def compute(one_in: int, by: str) -> TailShown:
        row, (gates, _) = _row(), _gates()
        # One seed for every share, so that steep chunks stay steep; with it the heads shown are about as expected.
        lowest = np.random.default_rng(38).random((row["H"], row["T"] // _CHUNK))
        return TailShown(one_in, by == "head", lowest < -np.expm1(gates * np.log1p(-1 / one_in)))

    def __init__(self, width: float):
        height, heads, chunks = 2.75, _row()["H"], _row()["T"] // _CHUNK
        self.canvas = Canvas(width, height)
        right = 3.3 if width > 8 else 2.5
        ax = self.canvas.axes(0.55, 0.38, width - 0.55 - right, height - 0.92, facecolor=style.FINITE, framed=True)
        ax.set(xlabel=self.words.say("x", tokens=_CHUNK), xlim=(-0.5, chunks - 0.5))
        ax.set(ylabel=self.words["y"], ylim=(heads - 0.5, -0.5), yticks=[0, heads - 1])
        self._slow = Marked(self.canvas, ax, facecolor=style.SKY)
        self._steep = Marked(self.canvas, ax, facecolor=style.BLACK, zorder=3)
        handles = [style.swatch(style.BLACK, self.words["steep"]), style.swatch(style.SKY, self.words["slow"])]
        self.canvas.legend(*handles, at=(0.5, 0), loc="upper left", borderaxespad=0.5, handlelength=1.4)
        bars = self.canvas.axes(width - right + 1.1, 0.38, right - 1.85, height - 0.92)
        name_rows(bars, self.words["bars"])
        self._bars = LabelledBars(self.canvas, bars, "shares", [style.BLACK] * 3 + [style.SKY], gap=0.04)
        self.canvas.pointable("chunks", ax, heads, chunks)

    def update(self, shown: TailShown) -> None:
        self._slow.update(shown.slow)
        self._steep.update(shown.steep)
        self._bars.update(shown.shares, map(_share, shown.shares))

    def say(self, shown: TailShown) -> str:
        (_, chunks, heads, slow) = map(_share, shown.shares)
        way = self.words.say("head" if shown.by_head else "chunk", slow=slow)
        return self.words.say("say", one_in=shown.one_in, chunks=chunks, heads=heads, way=way)

    def arithmetic(self, shown: TailShown, cell: Cell) -> str:
        words = self.words["arithmetic"]
        if cell.map == "chunks":
            at = cell.row, cell.column
            steep, way = "some" if shown.steep[at] else "none", "slow way" if shown.slow[at] else "quick way"
            return words.say("cell", head=cell.row, chunk=cell.column, steep=words[steep], way=words[way])
        share, one_in = _share(shown.shares[cell.row]), shown.one_in
        if cell.row == 0:
            return words.say("gates", one_in=one_in, share=share)
        of_head = cell.row == 2 or (cell.row == 3 and shown.by_head)
        return words.say("any", n=_gates()[of_head], one_in=one_in, share=share)


def _share(share: float) -> str:
    return f"{np.format_float_positional(100 * share, precision=2, fractional=False, trim='-')}%"


def _us(ms: float) -> str:
    return f"{1e3 * ms:,.0f}" if ms >= 0.1 else number(1e3 * ms, 3)


@functools.cache
def _row() -> dict:
    """Return the recorded row of RWKV6, chunked, at the sizes of a model: a dict with B, T, H, K, V and times."""
    call = {"op": "rwkv6", "form": "chunk", "who": "flakit", "B": 8, "decay": "rwkv6-init", "dtype": "bfloat16"}
    return dict(recorded.read("h200_speed").select(**call)[0])


@functools.cache
def peaks() -> tuple[float, float]:
    """Return the recording device's peak rates per second: 10^12 bytes copied, and 10^12 operations."""
    meta = recorded.read("h200_speed").meta
    return meta["copy_tb_s"], meta["tflops"]


def pair_times() -> np.ndarray:
    """Return the milliseconds to multiply the pairs inside chunks, for each chunk size of `TOKENS`, [N]."""
    # For every pair of tokens of a chunk: a score, and a product with the value.
    row = _row()
    pairs = [2 * row["B"] * row["T"] * row["H"] * C * (row["K"] + row["V"]) for C in TOKENS]
    return 1e-9 * np.array(pairs) / peaks()[1]


def _floor() -> float:
    """Return the milliseconds of the forward pass by the roofline: the least that the device allows."""
    return work(_row(), "forward").floor_ms(*peaks())


def _gates() -> tuple[int, int]:
    """Return the number of gates in a chunk, and in a head's full sequence."""
    row = _row()
    return _CHUNK * row["K"], row["T"] * row["K"]
