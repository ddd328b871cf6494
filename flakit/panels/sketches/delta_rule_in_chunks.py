"""The sketches of 09_delta_rule_in_chunks."""

import functools

from ...cases import inverse
from ...figures.sketches.delta_rule_in_chunks import Chained, ChainedShown
from .. import knobs
from .sketch import Sketch


def _chained(spread: float, halves: bool = False) -> ChainedShown:
    L = inverse.matrix(spread=spread)
    return ChainedShown(spread, L.numpy(), inverse.invert(L, "substitution", "float64").numpy(), halves)


def _spread():
    return knobs.number(0.0, 0.0, 5.0, "spread", 0.1, False)


PRESETS = {"one token": {"spread": 0.0}, "much alike": {"spread": 0.3}, "different": {"spread": 3.0}}
SCRIPT = """from flakit.cases import inverse

L = inverse.matrix(spread={spread})
print(L)
print(inverse.invert(L, "substitution", "float64"))
"""

SKETCHES = {
    name: Sketch({"spread": _spread}, compute, Chained, PRESETS, SCRIPT)
    for name, compute in (("chained", _chained), ("halved", functools.partial(_chained, halves=True)))
}
