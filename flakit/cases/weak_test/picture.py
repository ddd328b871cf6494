"""The picture of `weak_test`: contributions to o by distance, for fast and RWKV7's own decays; forgotten: hatched."""

import numpy as np

from ...figures import Bars, Canvas, Cell, CellGrid, Drawing, style
from ...language import Words
from ...numerics.words import error
from ..blind_measure import TOLERANCE
from . import Shown

WORDS = Words() | {
    "knobs": {"keep": "tokens kept", "K": "channels K", "T": "length T"},
    "alt": "Two rows of bars on a logarithmic scale: how much of an output comes from the token so many steps back, "
    "with the test's decays and with the model's, what the operator forgets hatched; beside each, how far the operator "
    "is off, against the test's tolerance",
    "decays": ("the test's decays: w from -8 to -6", "the model's decays"),
    "share": "share of o",
    "back": "tokens back",
    "kept": "read",
    "forgotten": "forgotten by the operator",
    "off": "operator off by",
    "verdicts": ({True: "the test passes", False: "the test fails"}, {True: "it would pass", False: "it would fail"}),
    "tolerance": "tolerance {tolerance:g}",
    "passes": "The operator forgets all but the last {tokens}, and the test passes it: with its decays nothing is left "
    "of what is older, and the output is off by {fast}, below {tolerance:g}. With the model's decays it is off by "
    "{real:%}.",
    "caught": "The operator forgets all but the last {tokens}, and the test catches it: the output is off by {fast}, "
    "above {tolerance:g}. With the model's decays it is off by {real:%}.",
    "tokens": {1: "token", 2: "{keep} tokens"},
    "bar": "{back}, {decays}: {share:.2g} of o comes from there, and the operator {reads}",
    "tokens back": {0: "the token itself", 1: "1 token back", 2: "{back} tokens back"},
    "whose": ("the test's decays", "the model's decays"),
    "reads": "reads it",
    "forgets": "has forgotten it",
    "error": "{decays}: the operator is off by {off}, {side} the tolerance of {tolerance:g}",
    "below": "below",
    "above": "above",
}
ON_VIEW = ("keep", "K")
LINE = "w in [-8, -6]: o off by"
PRESETS = {
    "passes": {"keep": 3, "K": 32, "T": 256},
    "caught": {"keep": 2, "K": 32, "T": 256},
    "wider heads": {"keep": 2, "K": 64, "T": 256},
}

_LOW, _HIGH = -8.0, 0.3
"""Range of the axis of fractions, in powers of ten."""


class Picture(Drawing):
    def __init__(self, width: float):
        left, top, height, between, bottom = 0.72, 0.3, 1.12, 0.36, 0.74
        right = 0.25 * width
        across = width - left - right - 0.35
        self.canvas = Canvas(width, top + 2 * height + between + bottom)
        self._bars, self._errors = [], []
        for n, words in enumerate(WORDS["decays"]):
            at = top + n * (height + between)
            ax = self.canvas.axes(left, at, across, height)
            ax.set(ylim=(_LOW, _HIGH), title=words, ylabel=WORDS["share"], xlim=(-0.5, 23.5))
            ax.set_yticks([-8, -4, 0], ["$10^{-8}$", "$10^{-4}$", "1"])
            ax.set_xticks(range(0, 24, 4))
            kept = Bars(self.canvas, ax, facecolor=style.BLUE)
            forgotten = Bars(self.canvas, ax, facecolor="white", edgecolor=style.BROKEN, hatch="////", linewidth=0.8)
            self._bars.append((kept, forgotten, CellGrid(self.canvas, ax, f"seen {n}")))
            beside = self.canvas.axes(left + across + 0.25, at, right, height)
            beside.set(xlim=(_LOW, _HIGH), ylim=(0.6, -0.6), yticks=[])
            beside.set_xticks([-8, -4, 0], ["$10^{-8}$", "$10^{-4}$", "1"])
            (line,) = self.canvas.moving(beside.axvline(np.log10(TOLERANCE), **style.LAW, zorder=4))
            off = Bars(self.canvas, beside, horizontal=True, facecolor=style.BROKEN)
            verdict = beside.set_title("")
            self._errors.append((off, verdict, CellGrid(self.canvas, beside, f"off {n}")))
            if n:
                ax.set_xlabel(WORDS["back"])
                beside.set_xlabel(WORDS["off"])
            else:
                ax.tick_params(labelbottom=False)
                beside.tick_params(labelbottom=False)
        words = WORDS["kept"], WORDS["forgotten"], WORDS.say("tolerance", tolerance=TOLERANCE)
        self.canvas.legend(kept.patch, forgotten.patch, line, labels=words, handlelength=2.4)
        self.canvas.labels(*(verdict for _, verdict, _ in self._errors))

    def update(self, shown: Shown) -> None:
        for (kept, forgotten, over), (bar, verdict, beside), words, seen, off in zip(
            self._bars, self._errors, WORDS["verdicts"], shown.seen, shown.off, strict=True
        ):
            back = np.arange(len(seen))
            sizes = np.clip(np.log10(seen.numpy()), _LOW, _HIGH)
            kept.update(np.where(back < shown.keep, sizes, np.nan), begin=_LOW)
            forgotten.update(np.where(back >= shown.keep, sizes, np.nan), begin=_LOW)
            over.update(1, len(seen))
            bar.update([np.clip(np.log10(off), _LOW, _HIGH)], begin=_LOW)
            bar.patch.set_facecolor(style.BLUE if off < TOLERANCE else style.BROKEN)
            verdict.set_text(words[off < TOLERANCE])
            beside.update(1, 1)

    def say(self, shown: Shown) -> str:
        fast, real = shown.off
        return WORDS.say(
            "passes" if fast < TOLERANCE else "caught", tokens=WORDS.say("tokens", min(shown.keep, 2), keep=shown.keep),
            fast=error(fast), real=real, tolerance=TOLERANCE,
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        kind, n = cell.map.split()
        n = int(n)
        if kind == "off":
            return WORDS.say(
                "error", decays=WORDS["whose"][n], off=error(shown.off[n]),
                side=WORDS["below" if shown.off[n] < TOLERANCE else "above"], tolerance=TOLERANCE,
            )  # fmt: skip
        back = cell.column
        return WORDS.say(
            "bar", back=WORDS.say("tokens back", min(back, 2), back=back), decays=WORDS["whose"][n],
            share=shown.seen[n][back], reads=WORDS["reads" if back < shown.keep else "forgets"],
        )  # fmt: skip
