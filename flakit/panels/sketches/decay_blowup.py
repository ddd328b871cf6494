"""The sketches of 05_one_infinity."""

import functools
from dataclasses import replace

import torch

from ...cases import anchor
from ...cases.laws import LN_MAX
from ...figures.sketches.decay_blowup import (
    WORDS,
    Counting,
    CountingShown,
    Ends,
    EndsShown,
    Fatal,
    FatalShown,
)
from ...numerics.inputs import inputs
from ...numerics.words import number
from ..knobs import NumberKnob, choice, integer
from .sketch import Sketch

_END = 120
_EXPONENTS = (
    *range(-_END, _END + 1, 10), -104, -103, -95, -88, -87, -17, -9, 5, 11, 11.08, 11.1, 12, 88, 88.7, 88.72, 88.73,
    88.8, 89, 95,
)  # fmt: skip

ANCHORS = {
    "before the chunk's first row": "none",
    "after each block's first row": "block-start",
    "after each block's middle row": "middle",
}
"""Where the pairs inside a chunk, or inside each of its blocks, are anchored: names of `anchor.SCHEMES`."""

_CHUNK, _BLOCK = 64, 16
_TOKENS, _STRONG = 2 * _CHUNK, -500.0


@functools.cache
def _formats() -> tuple[torch.Tensor, dict, dict]:
    """A row of exponents, what each format holds of their exponentials, and its smallest number with all digits."""
    exponents = torch.arange(-_END, _END + 1, dtype=torch.float64)
    held = {number(dtype): exponents.exp().to(dtype).double().numpy() for dtype in LN_MAX}
    return exponents, held, {number(dtype): torch.finfo(dtype).smallest_normal for dtype in LN_MAX}


def _ends(exponent: float) -> EndsShown:
    exponents, held, smallest = _formats()
    true = torch.tensor(exponent, dtype=torch.float64).exp()
    values = {number(dtype): true.to(dtype).item() for dtype in LN_MAX}
    return EndsShown(exponent, values, exponents.numpy(), held, smallest)


def _counting(scheme: str) -> CountingShown:
    """At a decay of -1 an exponent is a number of tokens; the largest of all pairs is the one to count."""
    x = {"w": -torch.ones(1, _CHUNK, 1, 1)}
    exponents = [e.nan_to_num(-torch.inf) for e in anchor.exponents(x, scheme, chunk=_CHUNK, block=_BLOCK)]
    factor = max((0, 1), key=lambda n: exponents[n].max())
    i, j = (at.item() for at in torch.unravel_index(exponents[factor].argmax(), (_CHUNK, _CHUNK)))
    tile = next(
        tile
        for tile in anchor.tiles(scheme, _CHUNK, _BLOCK)
        if tile.rows.start <= i < tile.rows.stop and tile.keys.start <= j < tile.keys.stop
    )
    tokens = torch.zeros(_CHUNK, dtype=torch.bool)
    if factor:
        tokens[tile.anchor + 1 : j + 1] = True
    else:
        tokens[i : tile.anchor + 1] = True
    label = next(label for label, name in ANCHORS.items() if name == scheme)
    block = tile.rows.stop - tile.rows.start
    return CountingShown(label, tile.anchor, ("read", "key")[factor], (i, j)[factor], tokens.numpy(), block)


def _fatal(row: int) -> FatalShown:
    """A sequence for each position; the tiles left of the blocks are anchored at `row`, counted from the block."""
    x = inputs("rwkv6", B=_TOKENS, T=_TOKENS, H=1, K=2, decay=0.0)
    each = torch.arange(_TOKENS)
    x["w"][each, each] = _STRONG
    scheme = replace(anchor.SCHEMES["first-row"], left=row)
    found = anchor.run(x, scheme, chunk=_CHUNK, block=_BLOCK).non_finite
    lost = {name: bad.flatten(1).any(1).numpy() for name, bad in found.items() if len(bad) == _TOKENS}
    return FatalShown(_STRONG, row, lost, _CHUNK, _BLOCK)


SKETCHES = {
    "ends": Sketch(
        {"exponent": lambda: NumberKnob(80.0, "exponent x", stops=_EXPONENTS, low=-_END, high=_END)},
        _ends,
        Ends,
        WORDS.english["ends"]["alt"],
        {"float32 ends": {"exponent": 88.73}, "float16 ends": {"exponent": 11.1}, "too small": {"exponent": -104}},
        """import torch

true = torch.tensor({exponent}, dtype=torch.float64).exp()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    print(dtype, true.to(dtype).item())
""",
    ),
    "counting": Sketch(
        {"scheme": lambda: choice("none", ANCHORS, "anchor")},
        _counting,
        Counting,
        WORDS.english["counting"]["alt"],
        {},
        """import torch
from flakit.cases import anchor

w = -torch.ones(1, 64, 1, 1)  # at a decay of -1 an exponent is a number of tokens
for worst in anchor.worst(w, {scheme}):
    print("the factor of token", worst.token, "has the exponent", worst.exponent)
""",
    ),
    "fatal": Sketch(
        {"row": lambda: integer(0, -4, 8, "anchor row")},
        _fatal,
        Fatal,
        WORDS.english["fatal"]["alt"],
        {},
        """from dataclasses import replace

import flakit
from flakit.cases import anchor

scheme = replace(anchor.SCHEMES["first-row"], left={row})  # counted from the block's first row
x = flakit.inputs("rwkv6", B=128, T=128, H=1, K=2, decay=0.0)
x["w"][range(128), range(128)] = -500.0  # a sequence for each position
found = anchor.run(x, scheme).non_finite
for name in ("o", "dr", "dk", "dv", "dw"):
    print(name, "is lost at", found[name].flatten(1).any(1).nonzero().flatten().tolist())
""",
    ),
}
