"""The sketch of 17_over_gpus: arrays in, picture and sentences out."""

from dataclasses import dataclass

import numpy as np

from ...language import Words
from .. import style
from ..canvas import Canvas, Cell
from ..drawing import Drawing
from ..maps import Map, Maps
from ..marks import LabelledBars
from .shared import percent, size

BARS = "walks", "sends", "holds"
"""The quantities of a rank, in the order of the bars."""

WORDS = Words() | {
    "ranks": {
        "alt": "Left, a square with a row for the state that enters each rank and a column for the rank that wrote: "
        "how much of what it wrote is left; right, bars for the tokens that a rank walks through, the bytes that it "
        "sends and the bytes that its tokens have",
        "enters": "state that enters rank",
        "wrote": "written by rank",
        "left": "what is left",
        "walks": "tokens, one after another",
        "sends": "bytes sent by a rank",
        "holds": "bytes of its tokens",
        "alone": "One rank walks through all {tokens} tokens and sends nothing.",
        "say": "{ranks} ranks walk through {tokens} tokens each. A rank sends {sends}, whatever it holds: here {holds} "
        "of inputs. The state that enters the last one is made of {maps}.",
        "one map": "what one rank wrote",
        "maps": "what {maps} ranks wrote",
        "cell": {
            "next": "rank {column} wrote it, and nothing lies between: all of it enters rank {row}",
            "through": "rank {column} wrote it, and it went through {between}: {share} of it enters rank {row}",
            "first": "nobody comes before rank 0: the initial state enters, here zeros",
            "own": "rank {row} reads its own tokens inside its slice, not through a state",
            "later": "rank {column} comes after rank {row}",
        },
        "between": "the tokens of rank {first}",
        "between many": "the tokens of ranks {first} to {last}",
        "bar": {
            "walks": "{all} tokens / {ranks} = {tokens}",
            "sends": "what it writes into a state, {written}, and what it does to one, {transition}",
            "nothing": "a single rank has nobody to send to",
            "holds": "{tokens} tokens · {each} bytes of inputs",
        },
    }
}


@dataclass(frozen=True)
class RanksShown:
    """left [ranks, ranks]: the share of what a rank wrote (column) that enters another one (row); NaN: none does.

    tokens: of the call. each, written, transition: bytes of all inputs of a token, of what a rank writes into the
    states, and of its transition, which acts on the states that enter.
    """

    left: np.ndarray
    tokens: int
    each: int
    written: int
    transition: int

    @property
    def ranks(self) -> int:
        return len(self.left)

    @property
    def walks(self) -> int:
        return self.tokens // self.ranks

    @property
    def sends(self) -> int:
        """Bytes sent to all others in the forward pass."""
        return self.written + self.transition if self.ranks > 1 else 0

    @property
    def holds(self) -> int:
        return self.walks * self.each


class Ranks(Drawing, words=WORDS["ranks"]):
    """The share that enters each rank, and the tokens and bytes of a rank."""

    def __init__(self, width: float):
        height, side = 2.9, 2.2
        self.canvas = Canvas(width, height)
        self._maps = Maps(
            self.canvas, {"ranks": Map("", array="left", empty="none")}, left=0.62, top=0.14, size=(side, side),
            rows=self.words["enters"], columns=self.words["wrote"],
        )  # fmt: skip
        self._maps.bar("ranks", self.words["left"], gap=0.12, width=0.13).set_yticks([0, 0.5, 1])
        left, self._bars = 0.62 + side + 1.15, {}
        for n, name in enumerate(BARS):
            ax = self.canvas.axes(left, 0.32 + 0.74 * n, width - left - 0.95, 0.3)
            ax.set_title(self.words[name], pad=3)
            ax.set_yticks([])
            colour = style.BLUE if name == "walks" else style.SKY
            self._bars[name] = LabelledBars(self.canvas, ax, name, [colour], thick=0.8, size=10, gap=0.015)

    def update(self, shown: RanksShown) -> None:
        self._maps.update({"left": shown.left, "none": np.isnan(shown.left)})
        most = shown.tokens * shown.each
        for name, value, full, label in (
            ("walks", shown.walks, shown.tokens, f"{shown.walks:,}"),
            ("sends", shown.sends, most, size(shown.sends)),
            ("holds", shown.holds, most, size(shown.holds)),
        ):
            self._bars[name].update([value / full], [label])

    def say(self, shown: RanksShown) -> str:
        before = shown.ranks - 1
        if shown.ranks == 1:
            return self.words.say("alone", tokens=f"{shown.tokens:,}")
        return self.words.say(
            "say", ranks=shown.ranks, tokens=f"{shown.walks:,}", sends=size(shown.sends), holds=size(shown.holds),
            maps=self.words.say("one map" if before == 1 else "maps", maps=before),
        )  # fmt: skip

    def arithmetic(self, shown: RanksShown, cell: Cell) -> str:
        row, column = cell.row, cell.column
        if cell.map in BARS:
            which = "nothing" if cell.map == "sends" and shown.ranks == 1 else cell.map
            at = {"all": f"{shown.tokens:,}", "ranks": shown.ranks, "tokens": f"{shown.walks:,}", "each": shown.each}
            at |= {"written": size(shown.written), "transition": size(shown.transition)}
            return self.words.say("bar", which, **at)
        if row <= column:
            which = "later" if row < column else "own" if row else "first"
            return self.words.say("cell", which, row=row, column=column)
        if row == column + 1:
            return self.words.say("cell", "next", row=row, column=column)
        between = self.words.say("between" if row == column + 2 else "between many", first=column + 1, last=row - 1)
        share = percent(float(shown.left[row, column]))
        return self.words.say("cell", "through", row=row, column=column, between=between, share=share)
