"""The small pictures of 00_start_here. Arrays in; each says itself in words."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...language import Words
from ...numerics.words import number
from .. import style
from ..canvas import Canvas, Cell
from ..heatmap import HeatMap
from .shared import listed, percent, verb

WORDS = Words() | {
    "broken": {
        "alt": "Two heat maps of one gradient, tokens from left to right and channels from top to bottom: as a fast "
        "kernel computes it in float32, and as it is in float64",
        "computed": "dr as a fast kernel computes it",
        "true": "dr as it is",
        "token": "token",
        "channel": "channel",
        "fine": "At a decay of {decay} everything is fine: the output o and all gradients, {names}.",
        "some": "At a decay of {decay}, {bad} {are} broken; {good} {still} fine.",
        "share": "Of dr, {share} is NaN, though no true value is larger than {largest}.",
        "arithmetic": "dr of token {t}, channel {c}: {computed} (true: {true})",
    },
}


@dataclass(frozen=True)
class BrokenShown:
    """One gradient, computed and true, each [T, K]; the share of every tensor that is not finite, by name."""

    decay: float
    computed: np.ndarray
    true: np.ndarray
    shares: Mapping[str, float]


class Broken:
    """A gradient beside its true values, and a sentence on which tensors are broken. width: inches."""

    def __init__(self, width: float):
        words, height = WORDS["broken"], 2.75
        self.canvas = Canvas(width, height)
        self._maps, side, gap = {}, 0.55, 0.15
        across = (width - side - 0.1 - gap) / 2
        with style.context():
            for n, name in enumerate(("computed", "true")):
                left = side + n * (across + gap)
                ax = self.canvas.figure.add_axes((left / width, 0.5 / height, across / width, 1.72 / height))
                ax.set(title=words[name], xlabel=words["token"])
                if n == 0:
                    ax.set_ylabel(words["channel"])
                else:
                    ax.set_yticks([])
                self._maps[name] = HeatMap(self.canvas, ax, cmap=style.SIGNED, name=name)
            self.canvas.figure.legend(handles=style.non_finite_handles()[:1], loc="upper right", borderaxespad=0.2)

    def update(self, shown: BrokenShown) -> None:
        largest = float(np.abs(shown.true).max())
        for name, heat in self._maps.items():
            heat.colours.set_clim(-largest, largest)
            heat.update(getattr(shown, name).T)

    def say(self, shown: BrokenShown) -> str:
        words, decay = WORDS["broken"], number(shown.decay)
        bad = [name for name, share in shown.shares.items() if share]
        good = [name for name in shown.shares if name not in bad]
        if not bad:
            return words["fine"].format(decay=decay, names=listed([name for name in good if name != "o"]))
        sentence = words["some"].format(
            decay=decay, bad=listed(bad), are=verb(bad), good=listed(good), still=verb(good)
        )
        return f"{sentence}\n" + words["share"].format(
            share=percent(float((~np.isfinite(shown.computed)).mean())), largest=number(np.abs(shown.true).max(), 3)
        )

    def arithmetic(self, shown: BrokenShown, cell: Cell) -> str:
        t, c = cell.column, cell.row
        return WORDS["broken"]["arithmetic"].format(
            t=t, c=c, computed=number(float(shown.computed[t, c])), true=number(float(shown.true[t, c]))
        )
