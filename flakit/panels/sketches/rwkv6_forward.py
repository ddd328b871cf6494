"""The sketches of 01_rwkv6_forward."""

import math

import torch

from ...figures.sketches.rwkv6_forward import Forgetting, ForgettingShown, Reading, ReadingShown
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import DecayKnob, integer
from .sketch import Sketch

KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
VALUES = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.0, 1.0]])
"""Keys and values of four tokens, [4, 2] each, small enough to compute by hand."""

_MORE = 40  # tokens that "forgetting" reads after the first
_FORGETS = (0.0, -0.01, -0.02, -0.05, -0.07, -0.1, -0.2, -0.3, -0.5, -0.7, -1.0, -1.5, -2.0, -3.0, -5.0, -math.inf)


def _reading(direction: int) -> ReadingShown:
    angle = math.radians(direction)
    query = torch.tensor([math.cos(angle), math.sin(angle)])
    scores = KEYS @ query
    return ReadingShown(*(x.numpy() for x in (query, KEYS, VALUES, scores, scores @ VALUES)))


def _forgetting(w: float) -> ForgettingShown:
    """One token writes 1 into a state of one number, and later ones read what the decays between have left.

    A token reads before its own decay, so the next one still reads 1.
    """
    ones = torch.ones(1, _MORE + 2, 1, 1, dtype=torch.float64)
    k = ones.clone()
    k[:, 1:] = 0
    o = fused_recurrent_rwkv6(ones, k, ones, w * ones, torch.zeros(1, 1).double()).o
    return ForgettingShown(w, o[0, 2:, 0, 0].numpy())


SKETCHES = {
    "reading": Sketch(
        {"direction": lambda: integer(0, 0, 345, "direction", 15)},
        _reading,
        Reading,
        {"along channel 0": {"direction": 0}, "along channel 1": {"direction": 90}},
        """import math

import torch
from flakit.panels.sketches.rwkv6_forward import KEYS, VALUES

angle = math.radians({direction})
query = torch.tensor([math.cos(angle), math.sin(angle)])
print("products", KEYS @ query)
print("output", (KEYS @ query) @ VALUES)
""",
    ),
    "forgetting": Sketch(
        {"w": lambda: DecayKnob(-0.1, "decay w", stops=_FORGETS)},
        _forgetting,
        Forgetting,
        {"slow": {"w": -0.02}, "quick": {"w": -1.0}},
        """import math

for more in range(1, 41):
    print(more, math.exp(more * {w}))
""",
    ),
}
