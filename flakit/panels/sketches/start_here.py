"""The sketch of lesson 00_start_here: a gradient that a strong decay makes NaN."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...cases import anchor
from ...figures import Canvas, Cell, Map, Maps, signed, style
from ...language import Words, say
from ...numerics.evaluate import truth
from ...numerics.inputs import inputs
from ..knobs import DecayKnob
from .sketch import Sketch, listed, percent, verb

_BREAKS = (0.0, -0.1, -0.3, -0.5, -0.7, -0.9, -1.0, -1.1, -1.2, -1.3, -1.33, -1.36, -1.39, -1.42, -1.5, -2.0, -5.0)

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
    }
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
        run, exact = anchor.run(x, "none"), truth("rwkv6", x, recurrence=False)
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
