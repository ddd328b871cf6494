"""The picture of `rounded_chain`: the error of a chain of transitions against its length, and bfloat16's rounding."""

import numpy as np

from ...figures import Canvas, Cell, CellGrid, Drawing, style
from ...language import Words, label, say
from . import BITS, CHUNK, STORED, WAYS, Shown, law

WORDS = Words() | {
    "knobs": {"way": "products in"},
    "alt": "The error of a product of transition matrices after 2, 4, 8 and more chunks, on logarithmic scales, with "
    "the law and a line for what storing a result in bfloat16 costs; points above that line are orange crosses",
    "title": "products in {way}: the chain is off by",
    "chunks n": "chunks (log scale)",
    "stored": "storing in bfloat16",
    "below": "less than that",
    "above": "more than that",
    "short": "Each product rounds its two factors to {bits} binary digits. After {n} chunks, {tokens} tokens, the "
    "chain is off by {error:.2g}: less than storing the result in bfloat16 would cost.{from}",
    "from": " That is reached after {first} chunks.",
    "long": "Each product rounds its two factors to {bits} binary digits, and nothing fades: every error stays. After "
    "{n} chunks, {tokens} tokens, the chain is off by {error:.2g}, {times:.2g} times what storing the result in "
    "bfloat16 costs.",
    "three": "Each factor is taken as two TF32 numbers, what TF32 keeps of it and what it loses, and three products "
    "are added up. After {n} chunks, {tokens} tokens, the chain is off by {error:.2g}.",
    "cell": "after {n} chunks, {products} products: off by {error:.2g} (law: {law:.2g})",
}
ON_VIEW = ("way", "chunks")
LINE = "the chain is off by"
PRESETS = {
    "a long chain in TF32": {"way": "TF32", "chunks": 512},
    "a short one": {"way": "TF32", "chunks": 16},
    "in bfloat16": {"way": "bfloat16", "chunks": 512},
    "repaired": {"way": "three TF32", "chunks": 512},
}

_MOST = 9
"""The largest number of chunks, as a power of two."""


class Picture(Drawing):
    def __init__(self, width: float):
        left = 0.85
        self.canvas = Canvas(width, 3.1)
        ax = self.canvas.axes(left, 0.35, width - left - 0.2, 1.95)
        self._title = ax.set_title("", fontsize=9, loc="left", pad=4)
        ax.set(yscale="log", ylim=(1e-8, 0.3), xlim=(0.5, _MOST + 0.5), xlabel=WORDS["chunks n"])
        ax.set_xticks(range(1, _MOST + 1), [str(2**n) for n in range(1, _MOST + 1)])
        ax.set_yticks([1e-7, 1e-5, 1e-3, 1e-1])
        ax.minorticks_off()
        stored = ax.axhline(STORED, color=style.GREY, linewidth=1.2, label=WORDS["stored"])
        self._law = self.canvas.line(ax, **style.LAW, label=say("law"), zorder=4)
        self._below = self.canvas.line(ax, "o", color=style.BLUE, markersize=6, label=WORDS["below"], zorder=3)
        self._above = self.canvas.line(ax, "X", color=style.BROKEN, markersize=8, label=WORDS["above"], zorder=3)
        self.canvas.legend(self._law, stored, self._below, self._above, columnspacing=1.0, handletextpad=0.4)
        CellGrid(self.canvas, ax, "chunks", 1, _MOST)
        self.canvas.moving(self._title)

    def update(self, shown: Shown) -> None:
        self._title.set_text(WORDS.say("title", way=label(shown.way)))
        at, errors = np.log2(shown.chunks), np.array(shown.errors)
        above = errors > STORED
        self._law.set_data(at, shown.law)
        self._below.set_data(at[~above], errors[~above])
        self._above.set_data(at[above], errors[above])

    def say(self, shown: Shown) -> str:
        n, error = shown.chunks[-1], shown.errors[-1]
        values = {"n": n, "tokens": f"{n * CHUNK:,}", "error": error, "bits": BITS[shown.way]}
        if shown.way == "three TF32":
            return WORDS.say("three", **values)
        if error > STORED:
            return WORDS.say("long", times=error / STORED, **values)
        reached = shown.way in WAYS[:2]
        first = next(n for n in range(2, 100) if law(n, shown.way) > STORED) if reached else None
        return WORDS.say("short", **values, **{"from": WORDS.say("from", first=first) if reached else ""})

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        n = 2 ** (cell.column + 1)
        if n not in shown.chunks:
            return ""
        error, predicted = (dict(zip(shown.chunks, x, strict=True))[n] for x in (shown.errors, shown.law))
        return WORDS.say("cell", n=n, products=n - 1, error=error, law=predicted)
