"""Small panels with one knob each, for the sentence of a lesson that needs them."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ipywidgets as widgets
import torch

from ..cases import anchor
from ..figures.canvas import Cell
from ..figures.sketches import WORDS, Broken, BrokenShown, Forgetting, ForgettingShown, Reading, ReadingShown
from ..numerics.evaluate import truth
from ..numerics.inputs import inputs
from ..ops.rwkv6 import fused_recurrent_rwkv6
from . import knobs
from .base import Panel
from .shared import literal

KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
VALUES = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.0, 1.0]])
"""Keys and values of four tokens, [4, 2] each, small enough to be done by hand."""

_MORE = 40  # tokens that "forgetting" reads after the first
_BREAKS = (0.0, -0.1, -0.3, -0.5, -0.7, -0.9, -1.0, -1.1, -1.2, -1.3, -1.33, -1.36, -1.39, -1.42, -1.5, -2.0, -5.0)
_FORGETS = (0.0, -0.01, -0.02, -0.05, -0.07, -0.1, -0.2, -0.3, -0.5, -0.7, -1.0, -1.5, -2.0, -3.0, -5.0, -math.inf)


def _broken(decay: float, seed: int = 0) -> BrokenShown:
    x = inputs("rwkv6", T=64, H=1, K=32, decay=decay, seed=seed)
    run, exact = anchor.run(x, "none"), truth("rwkv6", x, recurrence=False)
    shares = {name: bad.double().mean().item() for name, bad in run.non_finite.items() if name != "final_state"}
    return BrokenShown(decay, run.tensors["dr"][0, :, 0].numpy(), exact["dr"][0, :, 0].numpy(), shares)


def _reading(direction: int) -> ReadingShown:
    angle = math.radians(direction)
    query = torch.tensor([math.cos(angle), math.sin(angle)])
    scores = KEYS @ query
    return ReadingShown(*(x.numpy() for x in (query, KEYS, VALUES, scores, scores @ VALUES)))


def _forgetting(w: float) -> ForgettingShown:
    """One token writes 1 into a state of one number, and each later one reads what those between them have left.

    The next token reads before its own decay, so the first that finds less is the second.
    """
    ones = torch.ones(1, _MORE + 2, 1, 1, dtype=torch.float64)
    k = ones.clone()
    k[:, 1:] = 0
    o = fused_recurrent_rwkv6(ones, k, ones, w * ones, torch.zeros(1, 1).double()).o
    return ForgettingShown(w, o[0, 2:, 0, 0].numpy())


@dataclass(frozen=True)
class Sketch:
    """What one knob sets, how its arrays are computed, what draws them, and a script that remakes the numbers."""

    knob: str
    make: Callable[[], widgets.Widget]
    compute: Callable
    picture: type
    presets: Mapping[str, Mapping]
    script: str
    random: bool = False  # computed from random inputs: there is a seed


SKETCHES = {
    "broken": Sketch(
        "decay",
        lambda: knobs.DecayKnob(-1.0, "decay", stops=_BREAKS, low=-5.0),
        _broken,
        Broken,
        {"fine": {"decay": -1.33}, "broken": {"decay": -1.39}},
        """import flakit
from flakit.cases import anchor

x = flakit.inputs("rwkv6", T=64, H=1, K=32, decay={decay}, seed={seed})
for name, bad in anchor.run(x, "none").non_finite.items():
    print(f"{{name:12}} {{bad.double().mean():7.2%}} not finite")
""",
        random=True,
    ),
    "reading": Sketch(
        "direction",
        lambda: knobs.integer(0, 0, 345, "direction", 15),
        _reading,
        Reading,
        {"along channel 0": {"direction": 0}, "along channel 1": {"direction": 90}},
        """import math

import torch
from flakit.panels.sketch import KEYS, VALUES

angle = math.radians({direction})
query = torch.tensor([math.cos(angle), math.sin(angle)])
print("products", KEYS @ query)
print("output", (KEYS @ query) @ VALUES)
""",
    ),
    "forgetting": Sketch(
        "w",
        lambda: knobs.DecayKnob(-0.1, "decay w", stops=_FORGETS),
        _forgetting,
        Forgetting,
        {"slow": {"w": -0.02}, "quick": {"w": -1.0}},
        """import math

for more in range(1, 41):
    print(more, math.exp(more * {w}))
""",
    ),
}


class SketchPanel(Panel):
    """One knob, a sentence or two, one small picture."""

    readout_lines = 2

    def __init__(self, name: str, **settings):
        self.sketch, self.name = SKETCHES[name], f"sketch-{name}"
        self.on_view = (self.sketch.knob,)
        self.main, self.presets = self.sketch.knob, self.sketch.presets
        self._compute = functools.lru_cache(maxsize=64)(self.sketch.compute)
        super().__init__({self.sketch.knob: self.sketch.make()}, settings, alt=WORDS[name]["alt"])
        if not self.sketch.random:
            self.knobs["seed"].layout.display = "none"

    def compute(self, **setting):
        return self._compute(**{name: x for name, x in setting.items() if name != "seed" or self.sketch.random})

    def draw(self, result, **_) -> None:
        self._picture().update(result)
        self.canvas = self._picture().canvas

    def _picture(self):
        return self.figure(self.sketch.picture)

    def describe(self, result, **_) -> str:
        return self._picture().say(result)

    def arithmetic(self, result, cell: Cell, **_) -> str:
        return self._picture().arithmetic(result, cell)

    def script(self, **setting) -> str:
        return self.sketch.script.format(**{name: literal(x) for name, x in setting.items()})


def sketch(name: str, **settings) -> SketchPanel:
    """A small panel with one knob.

    name: "broken" (a gradient that a decay breaks; decay), "reading" (four tokens read by a query; direction, in
    degrees) or "forgetting" (what is left of a token; w). settings: the knob, and the seed of "broken".

    >>> sketch("forgetting", w=-0.5)
    """
    if name not in SKETCHES:
        raise ValueError(f"name: expected one of {', '.join(SKETCHES)}, got {name!r}")
    return SketchPanel(name, **settings)
