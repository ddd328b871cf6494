"""The sketches of lessons 00_start_here, 05_one_infinity and 06_the_anchor: a gradient that a strong decay makes NaN,
number formats, the anchor, and one strong decay."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.lines import Line2D

from ...cases import anchor as case
from ...cases.laws import LN_MAX
from ...figures import Canvas, Cell, HeatMap, Map, Maps, Marked, name_rows, signed, style
from ...language import Words, say
from ...numerics.evaluate import truth
from ...numerics.inputs import inputs
from ...numerics.words import number
from ...ops.common.decay import sum_before
from ..knobs import DecayKnob, NumberKnob, integer
from .sketch import Sketch, listed, percent, verb

_BREAKS = (0.0, -0.1, -0.3, -0.5, -0.7, -0.9, -1.0, -1.1, -1.2, -1.3, -1.33, -1.36, -1.39, -1.42, -1.5, -2.0, -5.0)

_END = 120
_EXPONENTS = (
    *range(-_END, _END + 1, 10), -104, -103, -95, -88, -87, -17, -9, 5, 11, 11.08, 11.1, 12, 88, 88.7, 88.72, 88.73,
    88.8, 89, 95,
)  # fmt: skip

_RANGE = torch.arange(-_END, _END + 1, dtype=torch.float64)
"""The exponents along the strips of the sketch "ends"."""

_CHUNK, _BLOCK = 64, 16
_TOKENS, STRONG = 2 * _CHUNK, -500.0

WORDS = Words() | {
    "broken": {
        "alt": "Two heat maps of one gradient, tokens from left to right and channels from top to bottom: as a fast "
        "kernel computes it in float32, and as it is in float64",
        "computed": "dr as a fast kernel computes it",
        "true": "dr as it is",
        "positive": "positive",
        "negative": "negative",
        "fine": "At a decay of {decay} everything is fine: the output o and all gradients, {names}.",
        "some": "At a decay of {decay}, {bad} {are} broken; {good} {still} fine.",
        "share": "Of dr, {share} is NaN, though no true value is larger than {largest:.3g}.",
        "arithmetic": "dr of token {t}, channel {c}: {computed} (true: {true})",
    },
    "ends": {
        "alt": "A strip for each number format along the exponents x: where e^x becomes 0, where it has few digits "
        "left, where it is an ordinary number, and where it is infinite; a line at the chosen exponent",
        "x": "exponent x",
        "kinds": ("becomes 0", "few digits left", "an ordinary number", "inf"),
        "say": "e^{x} is {true:.3g}. What the formats hold of it: {held}.",
        "held": "{format} {value:.3g}",
        "arithmetic": "{format}: e^{x} = {value:.3g} (true: {true:.3g})",
    },
    "counting": {
        "alt": "The 16 tokens of a block in a row, with the anchor and the token whose factor is largest; the tokens "
        "whose decays are in its exponent are coloured",
        "token with it": "the token whose factor it is",
        "added": "decays in its exponent",
        "say": "Anchored {anchor}, the largest factor of all is that of {whose} {token}. Its exponent undoes the "
        "decays of tokens {first} to {last}, both of them included.",
        "inside": "before token {anchor} (n = ge_{anchor} = gi_{before})",
        "start": "before token 0, at the start of the block (n = ge_0 = 0)",
        "end": "behind the last token (n = gi_{before})",
        "whose": {"key": "key", "read": "reader"},
        "in": "token {t}: its decay is in the exponent, with the sign turned",
        "out": "token {t}: its decay is not in the exponent",
    },
    "fatal": {
        "alt": "128 tokens in two strips, a chunk each, cut into blocks of 16; hatched where one strong decay, at this "
        "token alone, makes some value NaN or infinite",
        "token": "the token that decays",
        "chunk": "tokens {first} – {last}",
        "anchor": {0: "before token p, the first of each block", 1: "before token p + 1 of each block"},
        "inside": "before token p + {n} of each block",
        "before": "before token p − {n}, p the first of each block",
        "say": "Anchored {anchor}, one token with w = {w} breaks something at {n} of {T} positions: {where}.\n"
        "What breaks: {lost}.",
        "none": "Anchored {anchor}, one token with w = {w} breaks nothing, at whichever of the {T} positions it "
        "stands.\nEverything is finite.",
        "more": "{first} and {n} more",
        "fine": "w = {w} at token {t} alone: everything is finite",
        "broken": "w = {w} at token {t} alone: lost in {lost}",
    },
}


@dataclass(frozen=True)
class BrokenShown:
    """The gradient dr at one natural-log decay, computed and true, [T, K] each; each tensor's non-finite share."""

    decay: float
    computed: np.ndarray
    true: np.ndarray
    shares: Mapping[str, float]


class Broken(Sketch, name="broken", words=WORDS):
    """A map of a gradient beside its true values; the readout names the tensors that are not finite."""

    knobs = {"decay": lambda: DecayKnob(-1.0, "decay", stops=_BREAKS, low=-5.0)}
    presets = {"fine": {"decay": -1.33}, "broken": {"decay": -1.39}}
    script = """import flakit
from flakit.cases import anchor

x = flakit.inputs("rwkv6", T=64, H=1, K=32, decay={decay}, seed={seed})
for name, bad in anchor.run(x, "none").non_finite.items():
    print(f"{{name:12}} {{bad.double().mean():7.2%}} not finite")
"""
    random = True

    @staticmethod
    def compute(decay: float, seed: int = 0) -> BrokenShown:
        x = inputs("rwkv6", T=64, H=1, K=32, decay=decay, seed=seed)
        run, exact = case.run(x, "none"), truth("rwkv6", x, recurrence=False)
        shares = {name: bad.double().mean().item() for name, bad in run.non_finite.items() if name != "final_state"}
        return BrokenShown(decay, run.tensors["dr"][0, :, 0].numpy(), exact["dr"][0, :, 0].numpy(), shares)

    def __init__(self, width: float):
        left, gap, across = 0.55, 0.15, (width - 0.8) / 2
        high = min(across, 2.9)
        self.canvas = Canvas(width, high + 1.0)
        self._maps = Maps(
            self.canvas, {name: Map(self.words[name], signed(), across=True) for name in ("computed", "true")},
            left=left, top=0.5, size=(across, high), gap=gap, rows=say("channel"), columns=say("token"),
        )  # fmt: skip
        signs = (style.swatch(getattr(style, name.upper()), self.words[name]) for name in ("negative", "positive"))
        self.canvas.legend(*signs, *style.non_finite_handles()[:1], loc="upper right")

    def update(self, shown: BrokenShown) -> None:
        largest = float(np.abs(shown.true).max())
        for heat in self._maps.values():
            heat.colours.set_clim(-largest, largest)
        self._maps.update(shown)

    def say(self, shown: BrokenShown) -> str:
        decay = shown.decay
        bad = [name for name, share in shown.shares.items() if share]
        good = [name for name in shown.shares if name not in bad]
        if not bad:
            return self.words.say("fine", decay=decay, names=listed([name for name in good if name != "o"]))
        sentence = self.words.say(
            "some", decay=decay, bad=listed(bad), are=verb(bad), good=listed(good), still=verb(good)
        )
        return f"{sentence}\n" + self.words.say(
            "share", share=percent(float((~np.isfinite(shown.computed)).mean())), largest=np.abs(shown.true).max()
        )

    def arithmetic(self, shown: BrokenShown, cell: Cell) -> str:
        t, c = cell.column, cell.row
        return self.words.say("arithmetic", t=t, c=c, computed=shown.computed[t, c], true=shown.true[t, c])


@dataclass(frozen=True)
class EndsShown:
    """An exponent x, and the value that each number format stores for e^x, by the format's name."""

    exponent: float
    values: Mapping[str, float]


class Ends(Sketch, name="ends", words=WORDS):
    """A strip for each number format from e^-120 to e^120: zero, few digits, ordinary, inf; and a line at one
    exponent."""

    knobs = {"exponent": lambda: NumberKnob(80.0, "exponent x", stops=_EXPONENTS, low=-_END, high=_END)}
    presets = {"float32 ends": {"exponent": 88.73}, "float16 ends": {"exponent": 11.1}, "too small": {"exponent": -104}}
    script = """import torch

true = torch.tensor({exponent}, dtype=torch.float64).exp()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    print(dtype, true.to(dtype).item())
"""

    @staticmethod
    def compute(exponent: float) -> EndsShown:
        true = torch.tensor(exponent, dtype=torch.float64).exp()
        return EndsShown(exponent, {number(dtype): true.to(dtype).item() for dtype in LN_MAX})

    _colours = {"few": 0.55, "cmap": "Blues"}

    def __init__(self, width: float):
        self.canvas = Canvas(width, 1.82)
        left, right, lane, top = 0.82, 0.95, 0.26, 0.42
        across = width - left - right
        self._values, self._lines = [], []
        for n, dtype in enumerate(LN_MAX):
            ax = self.canvas.axes(left, top + n * (lane + 0.08), across, lane)
            ax.set(xticks=[], yticks=[])
            heat = HeatMap(self.canvas, ax, cmap=self._colours["cmap"], name=f"lane {n}")
            held = _RANGE.exp().to(dtype).double().numpy()
            # Below a format's smallest normal number digits are lost.
            usual = np.isfinite(held) & (held >= torch.finfo(dtype).smallest_normal)
            values = np.where(np.isfinite(held), self._colours["few"], held)
            heat.update(values[None], empty=(held == 0)[None], finite=usual[None])
            name_rows(ax, [number(dtype)])
            self._lines.append(ax.axvline(0, color=style.BLACK, linewidth=2, zorder=6))
            middle = top + n * (lane + 0.08) + lane / 2
            self._values.append(self.canvas.text(left + across + 0.1, middle, va="center", fontsize=10))
        ticks = range(0, 2 * _END + 1, 40)
        ax.set_xticks(ticks, [f"{n - _END}" for n in ticks])
        ax.set_xlabel(self.words["x"])
        few = heat.colours.cmap(self._colours["few"])
        zero, tiny, usual, inf = self.words["kinds"]
        handles = [style.swatch(style.EMPTY, zero), style.swatch(few, tiny), style.swatch(style.FINITE, usual)]
        handles.append(style.non_finite_handles()[1])
        handles[-1].set_label(inf)
        self.canvas.legend(*handles, loc="upper left", handlelength=1.4, columnspacing=1.2)
        self.canvas.moving(*self._values, *self._lines)

    def update(self, shown: EndsShown) -> None:
        for line, text, value in zip(self._lines, self._values, shown.values.values(), strict=True):
            line.set_xdata([shown.exponent + _END] * 2)
            text.set_text(number(value, 3))

    def say(self, shown: EndsShown) -> str:
        held = [self.words.say("held", format=name, value=x) for name, x in shown.values.items()]
        return self.words.say("say", x=shown.exponent, true=np.exp(shown.exponent), held=", ".join(held))

    def arithmetic(self, shown: EndsShown, cell: Cell) -> str:
        at = self.compute(float(cell.column - _END))
        name, value = list(at.values.items())[int(cell.map.split()[-1])]
        return self.words.say("arithmetic", format=name, x=at.exponent, value=value, true=np.exp(at.exponent))


@dataclass(frozen=True)
class CountingShown:
    """A block's largest factor: whether of a "key" or a query ("read"), its token, and the tokens whose decays its
    exponent sums, boolean [C]. anchor: the token before which the exponents are 0; C: behind the last token."""

    anchor: int
    factor: str
    token: int
    tokens: np.ndarray


class Counting(Sketch, name="counting", words=WORDS):
    """A row of tokens that marks the anchor, the token of the largest factor, and the decays in its exponent."""

    knobs = {"anchor": lambda: integer(0, 0, _BLOCK, "anchor")}
    script = """import torch

w = -torch.ones(16)  # at a decay of -1 an exponent is a number of tokens
gi = w.cumsum(0)
ge = gi - w
n = w[:{anchor}].sum()  # the sum of the log decays before the anchor
print("of the readers", (ge - n).tolist())
print("of the keys", (n - gi).tolist())
"""

    @staticmethod
    def compute(anchor: int) -> CountingShown:
        """Return the largest exponent if every decay is -1, so that an exponent is a number of tokens."""
        w = -torch.ones(_BLOCK, 1)
        n = w[:anchor].sum(0)
        exponents = {"read": sum_before(w) - n, "key": n - w.cumsum(0)}
        factor = max(("key", "read"), key=lambda name: exponents[name].max())
        token = int(exponents[factor].argmax())
        tokens = torch.zeros(_BLOCK, dtype=torch.bool)
        tokens[slice(anchor, token + 1) if factor == "key" else slice(token, anchor)] = True
        return CountingShown(anchor, factor, token, tokens.numpy())

    def __init__(self, width: float):
        self.canvas = Canvas(width, 1.4)
        ax = self.canvas.axes(0.15, 0.55, width - 0.3, 0.34)
        ax.set(xticks=range(_BLOCK), yticks=[], xlabel=say("token"))
        HeatMap(self.canvas, ax, name="tokens").update(np.zeros((1, _BLOCK)), finite=np.ones((1, _BLOCK), bool))
        self._added = Marked(self.canvas, ax, facecolor=style.W)
        self.canvas.moving(*ax.plot(*_upright(np.arange(1, _BLOCK)), color="white", linewidth=1.0, zorder=3))
        look = {"linewidth": 2.6, "clip_on": False, "zorder": 7}
        self._anchor = self.canvas.line(ax, color=style.BLACK, **look)
        self._arrow = self.canvas.line(ax, color=style.K, marker="o", markevery=[1], **look)
        handles = [
            Line2D([], [], color=style.BLACK, linewidth=2.6, label=say("anchor")),
            Line2D([], [], color=style.K, linewidth=2.6, marker="o", label=self.words["token with it"]),
            style.swatch(style.W, self.words["added"]),
        ]
        self.canvas.legend(*handles, loc="upper left")

    def update(self, shown: CountingShown) -> None:
        at = shown.anchor - 0.5
        self._added.update(shown.tokens[None])
        self._anchor.set_data([at, at], [-0.8, 0.5])
        self._arrow.set_data([at, shown.token], [-0.75, -0.75])

    def say(self, shown: CountingShown) -> str:
        a = shown.anchor
        first, last = np.flatnonzero(shown.tokens)[[0, -1]]
        place = self.words.say("start" if a == 0 else "end" if a == _BLOCK else "inside", anchor=a, before=a - 1)
        return self.words.say(
            "say", anchor=place, whose=self.words["whose"][shown.factor], token=shown.token, first=first, last=last
        )

    def arithmetic(self, shown: CountingShown, cell: Cell) -> str:
        return self.words.say("in" if shown.tokens[cell.column] else "out", t=cell.column)


def _upright(before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of vertical lines at the left edges of these cells of a one-row map, separated by NaN."""
    return np.repeat(before - 0.5, 3), np.tile([-0.5, 0.5, np.nan], len(before))


@dataclass(frozen=True)
class FatalShown:
    """By tensor, the positions at which a single strong decay makes it non-finite, boolean [T]. anchor: the token
    before which the exponents are 0, counted from each block's first."""

    anchor: int
    lost: Mapping[str, np.ndarray]

    @property
    def fatal(self) -> np.ndarray:
        """The positions at which any tensor becomes non-finite, boolean [T]."""
        return np.any(list(self.lost.values()), axis=0)


class Fatal(Sketch, name="fatal", words=WORDS):
    """A strip of positions for each of two chunks, hatched where one strong decay makes a value non-finite."""

    knobs = {"anchor": lambda: integer(1, -3, 9, "anchor p +")}
    script = """from dataclasses import replace

import flakit
from flakit.cases import anchor

scheme = replace(anchor.SCHEMES["first-row"], left={anchor} - 1)  # a row of gi is the place behind it
x = flakit.inputs("rwkv6", B=128, T=128, H=1, K=2, decay=0.0)
x["w"][range(128), range(128)] = -500.0  # a sequence for each position
lost = anchor.run(x, scheme).non_finite
for name in ("o", "dr", "dk", "dv", "dw"):
    print(name, "is lost at", lost[name].flatten(1).any(1).nonzero().flatten().tolist())
"""

    @staticmethod
    def compute(anchor: int) -> FatalShown:
        """Return what one strong decay at each position of a sequence makes non-finite, a sequence per position.
        Tiles left of a block are anchored before the block's token `anchor`."""
        x = inputs("rwkv6", B=_TOKENS, T=_TOKENS, H=1, K=2, decay=0.0)
        each = torch.arange(_TOKENS)
        x["w"][each, each] = STRONG
        scheme = replace(case.SCHEMES["first-row"], left=anchor - 1)
        non_finite = case.run(x, scheme, chunk=_CHUNK, block=_BLOCK).non_finite
        lost = {name: bad.flatten(1).any(1).numpy() for name, bad in non_finite.items() if len(bad) == _TOKENS}
        return FatalShown(anchor, lost)

    _few = 8
    """The largest number of positions that are marked by arrows."""

    def __init__(self, width: float):
        self.canvas = Canvas(width, 2.02)
        self._strips, self._arrows = [], []
        starts = np.arange(0, _CHUNK, _BLOCK)
        for n in range(2):
            ax = self.canvas.axes(1.25, 0.45 + 0.72 * n, width - 1.4, 0.32)
            ax.set_xticks([*starts, _CHUNK - 1], [n * _CHUNK + t for t in (*starts, _CHUNK - 1)])
            name_rows(ax, [self.words.say("chunk", first=n * _CHUNK, last=(n + 1) * _CHUNK - 1)])
            self._strips.append(HeatMap(self.canvas, ax, name=f"chunk {n}"))
            self.canvas.moving(*ax.plot(*_upright(starts[1:]), color=style.BLACK, linewidth=1.2, zorder=4))
            look = {"color": style.BROKEN, "markersize": 7, "linewidth": 0, "clip_on": False, "zorder": 7}
            self._arrows.append(self.canvas.line(ax, "v", **look))
        ax.set_xlabel(self.words["token"])
        self.canvas.legend(*style.non_finite_handles()[:1], loc="upper right")

    def update(self, shown: FatalShown) -> None:
        few = shown.fatal.sum() <= self._few
        for strip, arrows, fatal in zip(self._strips, self._arrows, shown.fatal.reshape(2, 1, _CHUNK), strict=True):
            strip.update(np.where(fatal, np.nan, 0.0), finite=~fatal)
            at = np.flatnonzero(fatal) if few else []
            arrows.set_data(at, np.full(len(at), -0.75))

    def say(self, shown: FatalShown) -> str:
        where = [str(t) for t in np.flatnonzero(shown.fatal)]
        a = shown.anchor
        place = self.words["anchor"].get(a) or self.words.say("inside" if a > 0 else "before", n=abs(a))
        values = {"anchor": place, "w": STRONG, "T": _TOKENS, "n": len(where)}
        if not where:
            return self.words.say("none", **values)
        if len(where) > 12:
            listing = self.words.say("more", first=", ".join(where[:10]), n=len(where) - 10)
        else:
            listing = listed(where)
        return self.words.say("say", where=listing, lost=listed(self._lost(shown, shown.fatal)), **values)

    @staticmethod
    def _lost(shown: FatalShown, at: np.ndarray | int) -> list[str]:
        return [name for name, lost in shown.lost.items() if lost[at].any()]

    def arithmetic(self, shown: FatalShown, cell: Cell) -> str:
        t = int(cell.map.split()[-1]) * _CHUNK + cell.column
        lost = self._lost(shown, t)
        return self.words.say("broken" if lost else "fine", w=STRONG, t=t, lost=listed(lost))
