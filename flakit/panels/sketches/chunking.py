"""The sketches of lessons 03_chunking and 04_chunk_backward: chunks and states, the anchor of the exponents, how pairs
become products, and which pairs contribute to the gradient of a decay."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.patches import Patch, Rectangle

from ...cases.anchor import Scheme, exponents, tiles
from ...figures import (
    ITSELF,
    Bars,
    Canvas,
    Cell,
    CellGrid,
    HeatMap,
    Map,
    Maps,
    Marked,
    Strip,
    signed,
    style,
    whole_ticks,
)
from ...figures.marks import LabelledBars
from ...language import Words, say
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ...numerics.words import number
from ...ops.common.decay import level_blocks
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import choice, integer, steps
from .sketch import Sketch

_T, SLOW = 32, -0.1  # of "chunks"
_CHUNK, _SMALL, _BLOCK, DECAY = 64, 16, 4, -1.0  # of "split", of "ways", and the decay of both

MIDDLE = Scheme("whole-middle", "one product about the middle", whole=True, diagonal="middle")
"""A scheme that computes a chunk as a single product, whose exponents refer to any row (the anchor)."""

WAYS = ("one product", "blocks", "halves of halves")
_PAST = np.tri(_SMALL, k=-1, dtype=bool)
"""The pairs of a small chunk in which a token reads an earlier one, boolean [C, C]."""

READER, KEY = {"color": style.R, "linestyle": "-"}, {"color": style.K, "linestyle": "--"}
"""Colour and dash of the token that reads, and of the token that wrote."""

_PAIRS = {
    "reads": "token i, which reads",
    "wrote": "token j, which wrote",
    "future": "token {i} comes before token {j} and does not see it",
    "itself": "token {i} itself: the bonus u, without a decay",
}

_TOKENS = 8  # of "passing"
SEED = 173
"""A seed of inputs in which no pair outweighs all others and the rounded sums in the panel agree."""

WORDS = Words() | {
    "chunks": _PAIRS
    | {
        "alt": "A square of all pairs of tokens, by the way in which the one reaches the other: inside one chunk or "
        "through a state; beside it, bars for the steps that wait for each other and for the pairs inside chunks",
        "steps": "steps, one after another",
        "pairs": "pairs inside chunks",
        "intra": "inside a chunk: intra",
        "inter": "through a state: inter",
        "itself": "the token itself: bonus u",
        "future": "the future: nothing",
        "chunks of": "Chunks of {chunk} tokens",
        "one step": "one step",
        "more steps": "{steps} steps, one after another",
        "say": "{chunks}: {steps}. {intra} pairs are computed inside chunks, {inter} meet through a state.",
        "one": "Every token is a chunk of its own: {steps}, as in the recurrence. All {inter} pairs meet through a "
        "state.",
        "whole": "All tokens are one chunk: {steps}. All {intra} pairs are computed inside it, and no state is needed.",
        "cell": {
            "intra": "token {i} reads token {j} inside their chunk; {weight:.3g} of it is left at w = {w}",
            "inter": "token {j} is in the state that enters at token {first}, and token {i} reads it there; "
            "{weight:.3g} of it is left at w = {w}",
            "itself": "token {i} sees itself through the bonus u",
            "future": "token {i} comes before token {j} and does not see it",
        },
        "bar": {"steps": "{T} tokens / {chunk} = {steps}", "pairs": "{steps} · {chunk} · {less} / 2 = {intra}"},
    },
    "split": _PAIRS
    | {
        "alt": "Left, the exponents of the readers' and of the keys' factors over the tokens of a chunk, which cross "
        "near the anchor; right, the weights that they make, which never change",
        "exponents": "exponent at w = {w}",
        "token": "token of the chunk",
        "reader": "reader",
        "key": "key",
        "large": "factors larger than 1",
        "weight": "exponent of the product",
        "say": "The anchor lies {where}. The largest factor of a reader is {reader}, that of a key {key}. "
        "The largest weight that they make is {weight:.3g}.",
        "start": "before token 0, at the start of the chunk (n = ge_0 = 0)",
        "end": "after token {before}, at the end of the chunk (n = gi_{before})",
        "at": "before token {anchor} (n = ge_{anchor} = gi_{before})",
        "factors": "token {n}: as a reader e^{read}, as a key e^{key}",
        "pair": "token {i} reads token {j}: e^{read} · e^{key} = {made:.3g} (true: {true:.3g})",
    },
    "ways": _PAIRS
    | {
        "alt": "Left, all pairs of tokens of a chunk with the number of the product that makes them; right, a bar for "
        "the largest exponent of a factor of each product",
        "map": "which product makes a pair",
        "largest": "largest exponent, w = {w}",
        "product": "product {n}",
        "single": "one by one",
        "dot": "·",
        "none": "no factors",
        "factor": "e^{exponent}",
        "products": {1: "One product makes", 2: "Two products make", 3: "Three products make", 4: "Four products make"},
        "all": "{products} all {pairs} pairs.",
        "some": "{products} {pairs} pairs; the other {single} are computed one by one.",
        "large": "The largest factor is {largest}, though no weight is larger than 1.",
        "small": "No factor is larger than 1.",
        "pair": "token {i} reads token {j} by product {n}: e^{read} · e^{key} = {made:.3g}",
        "alone": "token {i} reads token {j}, computed by itself: e^{read} = {made:.3g}",
        "bar": "product {n}, {pairs} pairs: readers up to e^{read}, keys up to e^{key}",
        "row": "{pairs} pairs, an exponential for each, and none is larger than 1",
    },
    "passing": {
        "alt": "Left, what every pair of tokens adds to the loss, with a frame around the pairs that pass one token; "
        "right, the gradient of the decay of each token",
        "map": "what a pair adds to the loss",
        "reads": "token i, which reads",
        "wrote": "token j, which wrote",
        "bars": "dw of each token",
        "token": "token t",
        "say": {
            0: "No pair passes token {t}: nothing was written before it or nothing is read after it. dw is 0.",
            1: "{n} pairs of {all} pass token {t}, and their sum is dw of it: {dw:.2f}. Read after it is {read:.2f}, "
            "of which {own:.2f} comes from keys of token {t} and later.",
        },
        "passes": "token {i} reads token {j}: {x:.3f}. The way leads past token {t}, whose decay is in its weight",
        "misses": "token {i} reads token {j}: {x:.3f}. The way does not lead past token {t}",
        "future": "token {i} does not read token {j} through the state",
        "bar": "token {t}: {n} pairs pass it, and add up to {dw:.3f}",
    },
}

KINDS = ("intra", "inter", "itself", "future")
"""How one token reaches another: inside a chunk, through a state, itself by the bonus, not at all (the future)."""


@dataclass(frozen=True)
class ChunksShown:
    """For every pair [T, T]: index in `KINDS`, and the weight of token j in output i. chunk: tokens per chunk."""

    chunk: int
    kinds: np.ndarray
    weights: np.ndarray

    @property
    def counts(self) -> dict[str, int]:
        """The number of sequential steps, and of pairs inside chunks ("intra") and through a state ("inter")."""
        pairs = {name: int((self.kinds == n).sum()) for n, name in enumerate(KINDS[:2])}
        return {"steps": _T // self.chunk, **pairs}


class Chunks(Sketch, name="chunks", words=WORDS):
    """A map of every pair of tokens by its kind, and bars for the steps and pairs that a chunk size costs."""

    knobs = {"chunk": lambda: steps(8, [1 << n for n in range(_T.bit_length())], "chunk C")}
    presets = {"token by token": {"chunk": 1}, "chunks of 8": {"chunk": 8}, "one chunk": {"chunk": _T}}
    script = """import torch
from flakit import fused_recurrent_rwkv6

T, chunk = 32, {chunk}
ones, values, u = torch.ones(1, T, 1, 1), torch.eye(T)[None, :, None], torch.zeros(1, 1)
inside = fused_recurrent_rwkv6(ones, ones, values, -0.1 * ones, u, cu_seqlens=torch.arange(0, T + 1, chunk)).o
print("steps", T // chunk, "pairs inside chunks", (inside != 0).sum().item())
"""

    @staticmethod
    def compute(chunk: int) -> ChunksShown:
        """Return the pairs' weights: each token writes its own unit vector, so that an output shows every token's."""
        ones = torch.ones(1, _T, 1, 1, dtype=torch.float64)
        values, u = torch.eye(_T, dtype=torch.float64)[None, :, None], torch.zeros(1, 1, dtype=torch.float64)
        past, itself, inside = (
            fused_recurrent_rwkv6(ones, ones, values, SLOW * ones, bonus, cu_seqlens=starts).o[0, :, 0]
            # A sequence for each chunk: no state enters a chunk.
            for bonus, starts in ((u, None), (u + 1, None), (u, torch.arange(0, _T + 1, chunk)))
        )
        kinds = torch.full((_T, _T), KINDS.index("future"))
        kinds[itself != 0], kinds[past != 0] = KINDS.index("itself"), KINDS.index("inter")
        kinds[inside != 0] = KINDS.index("intra")
        return ChunksShown(chunk, kinds.numpy(), past.numpy())

    def __init__(self, width: float):
        height, side = 2.8, 2.15
        self.canvas, self._marks = Canvas(width, height), {}
        looks = {
            "intra": {"facecolor": style.SKY},
            "inter": {"facecolor": style.YELLOW, "edgecolor": style.GREY, "hatch": "..."},
            "itself": {"facecolor": style.INDIGO},
        }
        ax = self.canvas.axes(0.6, 0.12, side, side, facecolor=style.EMPTY, framed=True)
        ax.set(xlabel=self.words["wrote"], ylabel=self.words["reads"], xlim=(-0.5, _T - 0.5), ylim=(_T - 0.5, -0.5))
        pairs = whole_ticks(ax)
        for name, look in looks.items():
            self._marks[name] = Marked(self.canvas, ax, **look)
        self._edges = self.canvas.line(ax, color="white", linewidth=2, zorder=3)
        left, self._bars = 0.6 + side + 0.4, {}
        for n, name in enumerate(("steps", "pairs")):
            ax = self.canvas.axes(left, 0.3 + 0.68 * n, width - left - 0.55, 0.3, yticks=[])
            ax.set_title(self.words[name], pad=3)
            colour = style.BLUE if name == "steps" else style.SKY
            self._bars[name] = LabelledBars(self.canvas, ax, name, [colour], thick=0.8, size=10, gap=0.012)
        handles = [Patch(label=self.words[name], linewidth=0, **look) for name, look in looks.items()]
        handles.append(style.swatch(style.EMPTY, self.words["future"]))
        look = {"loc": "upper left", "borderaxespad": 0.5, "labelspacing": 0.4}
        self.canvas.legend(*handles, at=(left - 0.1, 1.5), ncols=2 if width > 8 else 1, **look)
        self.canvas.pointable("pairs of tokens", pairs, _T, _T)

    def update(self, shown: ChunksShown) -> None:
        for name, marked in self._marks.items():
            marked.update(shown.kinds == KINDS.index(name))
        edges = np.arange(shown.chunk, _T, shown.chunk) - 0.5
        ends, gaps = np.tile([-0.5, _T - 0.5, np.nan], len(edges)), np.repeat(edges, 3)
        self._edges.set_data(np.concatenate((ends, gaps)), np.concatenate((gaps, ends)))
        self._edges.set_linewidth(2 if shown.chunk > 2 else 0.5)  # wider edges would hide the pairs
        counts = shown.counts
        for name, count, most in (("steps", counts["steps"], _T), ("pairs", counts["intra"], _T * (_T - 1) / 2)):
            self._bars[name].update([count / most], [str(count)])

    def say(self, shown: ChunksShown) -> str:
        counts = shown.counts
        one = "one" if shown.chunk == 1 else "whole" if counts["steps"] == 1 else "say"
        steps = self.words.say("one step" if counts["steps"] == 1 else "more steps", **counts)
        return self.words.say(one, chunks=self.words.say("chunks of", chunk=shown.chunk), **counts | {"steps": steps})

    def arithmetic(self, shown: ChunksShown, cell: Cell) -> str:
        if cell.map in self.words["bar"]:
            return self.words.say("bar", cell.map, T=_T, chunk=shown.chunk, less=shown.chunk - 1, **shown.counts)
        i, j = cell.row, cell.column
        first, weight = i - i % shown.chunk, shown.weights[i, j]
        return self.words.say("cell", KINDS[shown.kinds[i, j]], i=i, j=j, first=first, weight=weight, w=SLOW)


@dataclass(frozen=True)
class SplitShown:
    """The exponents of the queries' (`read`) and the keys' factors [C], relative to the row before token `anchor`, and
    each pair's product of factors (`made`) [C, C]."""

    anchor: int
    read: np.ndarray
    key: np.ndarray
    made: np.ndarray


class Split(Sketch, name="split", words=WORDS):
    """Exponents of queries and keys by token, which the anchor shifts, and their products, which it leaves alone."""

    knobs = {"anchor": lambda: integer(0, 0, _CHUNK, "anchor")}
    presets = {"start": {"anchor": 0}, "middle": {"anchor": _CHUNK // 2}, "end": {"anchor": _CHUNK}}
    script = """import torch
from flakit.ops.common.decay import sum_before

w = torch.full((64, 1), -1.0)
gi, ge = w.cumsum(0), sum_before(w)
n = torch.cat((ge, gi[-1:]))[{anchor}]
read, key = (ge - n).exp(), (n - gi).exp()
print("largest factors", read.max().item(), key.max().item())
print("largest weight", (read @ key.T).tril(-1).max().item())
"""

    @staticmethod
    def compute(anchor: int) -> SplitShown:
        x = inputs("rwkv6", T=_CHUNK, H=1, K=1, decay=DECAY)
        if anchor == 0:
            read, key = exponents(x, "none")
        else:  # the decay before a token is the decay up to the previous row
            read, key = exponents(x, MIDDLE, row=anchor - 1)
        return SplitShown(anchor, read[:, 0].numpy(), key[0].numpy(), (read.exp() * key.exp()).numpy())

    def __init__(self, width: float):
        height, side = 2.8, 2.02
        self.canvas, self._lines = Canvas(width, height), {}
        across, largest = width - 0.62 - 0.85 - side - 0.72, _CHUNK * -DECAY
        ax = self.canvas.axes(0.62, 0.32, across, side)
        ax.set(xlabel=self.words["token"], xlim=(-0.5, _CHUNK + 0.5), ylim=(-1.08 * largest, 1.08 * largest))
        ax.set_ylabel(self.words.say("exponents", w=DECAY), labelpad=1)
        CellGrid(self.canvas, ax, "tokens", 1, _CHUNK)
        ax.axhline(0, color=style.GREY, linewidth=0.8)
        ax.axhspan(0, 1e9, facecolor=style.INF["facecolor"], alpha=0.6, zorder=0)
        ax.text(0.5, 0.97, self.words["large"], transform=ax.transAxes, ha="center", va="top", fontsize=9)
        for name, look in (("reader", READER), ("key", KEY)):
            self._lines[name] = self.canvas.line(ax, label=self.words[name], zorder=4, **look)
        upright = ax.get_xaxis_transform()
        (self._mark,) = ax.plot([0, 0], [0, 1], color=style.BLACK, linewidth=1.2, transform=upright)
        self._name = ax.text(0, 0.02, say("anchor"), transform=upright, fontsize=9, va="bottom")
        self._name.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1})
        self.canvas.moving(self._mark, self._name)
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.01), ncols=2, borderaxespad=0, borderpad=0.1)
        box = self.canvas.axes(width - side - 0.72, 0.32, side, side)
        box.set(xlabel=self.words["wrote"], ylabel=self.words["reads"], title=self.words["weight"])
        self._map = HeatMap(self.canvas, whole_ticks(box), vmin=-largest, vmax=0, name="pairs")
        self._map.colorbar(self.canvas.axes(width - 0.64, 0.32, 0.09, side), "")

    def update(self, shown: SplitShown) -> None:
        self._lines["reader"].set_data(range(_CHUNK), shown.read)
        self._lines["key"].set_data(range(_CHUNK), shown.key)
        self._mark.set_xdata([shown.anchor - 0.5] * 2)
        right = shown.anchor < _CHUNK / 2
        self._name.set(x=shown.anchor - 0.5 + (0.8 if right else -0.8), ha="left" if right else "right")
        future = np.triu(np.ones((_CHUNK, _CHUNK), bool))
        with np.errstate(divide="ignore"):
            self._map.update(np.log(np.where(future, 1, shown.made)), empty=future)

    def say(self, shown: SplitShown) -> str:
        n = shown.anchor
        where = self.words.say("start" if n == 0 else "end" if n == _CHUNK else "at", anchor=n, before=n - 1)
        factors = {name: _power(x.max()) for name, x in (("reader", shown.read), ("key", shown.key))}
        return self.words.say("say", where=where, weight=np.tril(shown.made, -1).max(), **factors)

    def arithmetic(self, shown: SplitShown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if cell.map == "tokens":
            return self.words.say("factors", n=j, read=shown.read[j], key=shown.key[j])
        if i <= j:
            return self.words.say("itself" if i == j else "future", i=i, j=j)
        read, key = float(shown.read[i]), float(shown.key[j])
        return self.words.say("pair", i=i, j=j, read=read, key=key, made=shown.made[i, j], true=np.exp(read + key))


@dataclass(frozen=True)
class WaysShown:
    """For every pair of a chunk the number of the matrix product that computes it (0: computed singly, -1: not at all),
    and the exponents of the reader's and of the key's factor, [C, C] each. A product may compute future pairs, too,
    which no output reads."""

    product: np.ndarray
    read: np.ndarray
    key: np.ndarray

    @property
    def rows(self) -> list[tuple[int, int, float, float]]:
        """A tuple for each product: number, pairs, largest exponent of a reader and of a key. Single pairs come last,
        as 0."""
        rows = []
        for n in [*range(1, self.product.max() + 1), 0]:
            mask = self.product == n
            if mask.any():
                pairs = int((mask & _PAST).sum())
                rows.append((n, pairs, float(self.read[mask].max()), float(self.key[mask].max())))
        return rows


class Ways(Sketch, name="ways", words=WORDS):
    """A map of the matrix product that computes each pair of a chunk, and a bar for each product's largest factor."""

    knobs = {"way": lambda: choice(WAYS[0], {way: way for way in WAYS}, "way")}
    presets = {way: {"way": way} for way in WAYS}
    script = """from flakit.panels import sketch

shown = sketch("ways", way={way}).result
made = shown.product > 0
print("products", shown.product.max(), "largest exponents", shown.read[made].max(), shown.key[made].max())
"""

    @staticmethod
    def compute(way: str) -> WaysShown:
        x, C = inputs("rwkv6", T=_SMALL, H=1, K=1, decay=DECAY), _SMALL
        product = torch.zeros(C, C, dtype=torch.int64)
        if way == "one product":
            read, key = exponents(x, MIDDLE, chunk=C, row=C // 2 - 1)
            product[:] = 1
        elif way == "blocks":
            read, key = exponents(x, "previous-row", chunk=C, block=_BLOCK)
            anchored = [tile for tile in tiles("previous-row", C, _BLOCK) if tile.anchor is not None]
            for n, tile in enumerate(anchored, 1):
                product[tile.rows, tile.keys] = n
        else:
            read, key = exponents(x, "dyadic", chunk=C)
            for n in range(1, C.bit_length()):
                level_blocks(product, C >> n)[:] = n
        product.masked_fill_(read.isnan(), -1)
        return WaysShown(product.numpy(), read.numpy(), key.numpy())

    _most = 4  # largest number of products

    def __init__(self, width: float):
        height, side, most = 3.0, 2.2, self._most
        self.canvas = Canvas(width, height)
        ax = whole_ticks(self.canvas.axes(0.6, 0.28, side, side))
        ax.set(xlabel=self.words["wrote"], ylabel=self.words["reads"], title=self.words["map"])
        self._strip = Strip(self.canvas, ax, _SMALL, _SMALL, vmin=0, vmax=most, name="pairs")
        left, reach = 0.6 + side + 1.05, _SMALL / 2 * -DECAY
        self._ax = ax = self.canvas.axes(left, 0.28, width - left - 0.75, side)
        ax.set(ylim=(most - 0.5, -0.5), yticks=[], xlim=(0, 1.12 * reach), xlabel=self.words.say("largest", w=DECAY))
        self._bars = self.canvas.moving(*ax.barh(range(most), [0.0] * most, height=0.55, color=style.BLUE))
        look = {"va": "center", "fontsize": 9}
        self._names = [ax.text(-0.02 * reach, n, "", ha="right", **look) for n in range(most)]
        self._values = [ax.text(0, n, "", **look) for n in range(most)]
        self.canvas.moving(*self._names, *self._values)
        CellGrid(self.canvas, ax, "products", most, 1)

    def update(self, shown: WaysShown) -> None:
        signs = [
            [(str(n) if n else self.words["dot"]) if there else "" for n, there in zip(*row, strict=True)]
            for row in zip(shown.product, _PAST, strict=True)
        ]
        self._strip.update(shown.product, signs, empty=~_PAST)
        rows = shown.rows
        for n, (bar, name, value) in enumerate(zip(self._bars, self._names, self._values, strict=True)):
            there = n < len(rows)
            for artist in (bar, name, value):
                artist.set_visible(there)
            if there:
                product, _, read, key = rows[n]
                largest = max(read, key) if product else 0.0
                bar.set_width(largest)
                name.set_text(self.words.say("product", n=product) if product else self.words["single"])
                label = self.words.say("factor", exponent=largest) + (" = 1" if largest == 0 else "")
                value.set(text=label if product else self.words["none"], x=largest + 0.02 * self._ax.get_xlim()[1])

    def say(self, shown: WaysShown) -> str:
        products = [row for row in shown.rows if row[0]]
        pairs, single = (sum(row[1] for row in shown.rows if bool(row[0]) == numbered) for numbered in (True, False))
        largest = max(max(read, key) for _, _, read, key in products)
        first = self.words.say(
            "some" if single else "all", products=self.words["products"][len(products)], pairs=pairs, single=single
        )
        return f"{first} {self.words.say('large' if largest > 0 else 'small', largest=_power(largest))}"

    def arithmetic(self, shown: WaysShown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        if cell.map == "products":
            if cell.row >= len(shown.rows):
                return self.say(shown)
            n, pairs, read, key = shown.rows[cell.row]
            return self.words.say("bar" if n else "row", n=n, pairs=pairs, read=read, key=key)
        if i <= j:
            return self.words.say("itself" if i == j else "future", i=i, j=j)
        n = int(shown.product[i, j])
        read, key = float(shown.read[i, j]), float(shown.key[i, j])
        weight = np.exp(read) * np.exp(key)
        return self.words.say("pair" if n else "alone", i=i, j=j, n=n, read=read, key=key, made=weight)


def _power(exponent: float) -> str:
    """Format a power of e and its value.

    >>> _power(64.0), _power(8.0), _power(0.0)
    ('e^64 = 6.2e+27', 'e^8 = 2,981', 'e^0 = 1')
    """
    value = float(np.exp(np.float64(exponent)))
    return f"e^{number(exponent)} = {number(value, 2) if value >= 1e6 else f'{round(value):,}'}"


@dataclass(frozen=True)
class PassingShown:
    """What each pair, token i reading token j, adds to the loss in one channel, [C, C], zero unless j < i. t: the
    selected token."""

    t: int
    pairs: np.ndarray

    def read(self, t: int) -> float:
        """Return the sum over the pairs whose reader comes after token t."""
        return float(self.pairs[t + 1 :].sum())

    def own(self, t: int) -> float:
        """Return the part of the sum `read(t)` whose pairs were written by token t or later."""
        return float(self.pairs[t + 1 :, t:].sum())

    def dw(self, t: int) -> float:
        """Return the decay's gradient at token t: the sum over the pairs written before t and read after it."""
        return float(self.pairs[t + 1 :, :t].sum())

    @property
    def sums(self) -> np.ndarray:
        """`dw` of every token, [C]."""
        return np.array([self.dw(t) for t in range(_TOKENS)])

    def count(self, t: int) -> int:
        return t * (_TOKENS - 1 - t)


class Passing(Sketch, name="passing", words=WORDS):
    """A map of all pairs of a chunk with a frame around those that pass one token, and a bar for each token's dw."""

    knobs = {"t": lambda: integer(3, 0, _TOKENS - 1, "token t")}
    script = """from flakit.panels import sketch

shown = sketch("passing", t={t}).result
print("pairs that pass:", shown.count({t}), " their sum, dw:", shown.dw({t}))
"""

    @staticmethod
    def compute(t: int) -> PassingShown:
        return PassingShown(t, _pairs().numpy())

    def __init__(self, width: float):
        side, left = 1.98, 0.62
        self.canvas = Canvas(width, 2.8)
        names = {"rows": self.words["reads"], "columns": self.words["wrote"]}
        maps = {"pairs": Map(self.words["map"], signed(1.5), empty=ITSELF)}
        self._maps = Maps(self.canvas, maps, left=left, top=0.28, size=(side, side), **names)
        self._maps.bar("pairs")
        self._frame = Rectangle((0, 0), 0, 0, fill=False, edgecolor=style.BLACK, linewidth=2.5, zorder=4)
        self.canvas.moving(self._maps["pairs"].ax.add_patch(self._frame))
        start = left + side + 1.15
        ax = whole_ticks(self.canvas.axes(start, 0.28, width - start - 0.2, side, title=self.words["bars"]))
        ax.axhline(0, color=style.GREY, linewidth=0.8)
        sums = PassingShown(0, _pairs().numpy()).sums
        low, high = min(0, *sums), max(0, *sums)
        ax.set(xlabel=self.words["token"], xlim=(-0.6, _TOKENS - 0.4), ylim=(1.15 * low - 0.05, 1.15 * high + 0.05))
        self._own, self._others = (
            Bars(self.canvas, ax, thick=0.7, facecolor=style.W, alpha=alpha) for alpha in (1, 0.35)
        )
        CellGrid(self.canvas, ax, "bars", 1, _TOKENS)

    def update(self, shown: PassingShown) -> None:
        own = np.arange(_TOKENS) == shown.t
        self._maps.update(shown)
        t, n = shown.t, shown.count(shown.t)
        self._frame.set_bounds(-0.5, t + 0.5, t if n else 0, _TOKENS - 1 - t if n else 0)
        self._frame.set_visible(n > 0)
        self._own.update(np.where(own, shown.sums, np.nan))
        self._others.update(np.where(own, np.nan, shown.sums))

    def say(self, shown: PassingShown) -> str:
        t, pairs = shown.t, _TOKENS * (_TOKENS - 1) // 2
        sums = {"dw": shown.dw(t), "read": shown.read(t), "own": shown.own(t)}
        return self.words.say("say", n=shown.count(t), t=t, all=pairs, **sums)

    def arithmetic(self, shown: PassingShown, cell: Cell) -> str:
        if cell.map == "bars":
            t = cell.column
            return self.words.say("bar", t=t, n=shown.count(t), dw=shown.dw(t))
        i, j, t = cell.row, cell.column, shown.t
        if j >= i:
            return self.words.say("future", i=i, j=j)
        return self.words.say("passes" if j < t < i else "misses", i=i, j=j, t=t, x=float(shown.pairs[i, j]))


@functools.cache
def _pairs() -> torch.Tensor:
    """Return, for one channel, what token i reads of token j times the gradient of the loss, float64 [T, T]."""
    x = inputs("rwkv6", T=_TOKENS, H=1, K=1, V=4, decay=-0.3, dtype=torch.float64, seed=SEED)
    do, _ = cotangents("rwkv6", x)
    r, k, v, w, do = (tensor[0, :, 0] for tensor in (x["r"], x["k"], x["v"], x["w"], do))
    between = (w.cumsum(0) - w)[:, None, 0] - w.cumsum(0)[None, :, 0]
    return ((do @ v.T) * r * k.T * between.exp()).tril(-1)
