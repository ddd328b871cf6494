"""The one-column sketch of 05_one_infinity."""

from ...cases.infinity import follow
from ...figures.sketches.one_infinity import OneColumn, OneColumnShown
from ..knobs import DecayKnob
from .sketch import Sketch

_C, _K = 64, 8
_STOPS = (0.0, -0.5, -1.0, -1.2, -1.3, -1.34, -1.36, -1.38, -1.385, -1.39, -1.4, -1.41, -1.42, -1.5, -2.0, -3.0)


def _one_column(decay: float) -> OneColumnShown:
    way = follow(decay, C=_C, K=_K)
    arrays = (x.numpy() for x in (way.operands["k"], way.made.scaled, way.made.dr, way.true.dr, way.exponents[1]))
    return OneColumnShown(decay, *arrays, way.lost)


SKETCHES = {
    "one_column": Sketch(
        {"decay": lambda: DecayKnob(-1.39, "decay", stops=_STOPS, low=-3.0)},
        _one_column,
        OneColumn,
        {"fine": {"decay": -1.36}, "one column": {"decay": -1.39}, "o dies too": {"decay": -1.42}},
        f"""from flakit.cases.infinity import follow

for name, share in follow({{decay}}, C={_C}, K={_K}).lost.items():
    print(f"{{{{name:5}}}} {{{{share:7.2%}}}} not finite")
""",
    ),
}
