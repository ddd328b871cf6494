"""The sketches of 05_one_infinity and 06_the_anchor."""

import functools
from dataclasses import replace

import torch

from ...cases import anchor as case
from ...cases.laws import LN_MAX
from ...figures.sketches.decay_blowup import Counting, CountingShown, Ends, EndsShown, Fatal, FatalShown
from ...numerics.inputs import inputs
from ...numerics.words import number
from ...ops.common.decay import sum_before
from ..knobs import NumberKnob, integer
from .sketch import Sketch

_END = 120
_EXPONENTS = (
    *range(-_END, _END + 1, 10), -104, -103, -95, -88, -87, -17, -9, 5, 11, 11.08, 11.1, 12, 88, 88.7, 88.72, 88.73,
    88.8, 89, 95,
)  # fmt: skip

_CHUNK, _BLOCK = 64, 16
_TOKENS, _STRONG = 2 * _CHUNK, -500.0


@functools.cache
def _formats() -> tuple[torch.Tensor, dict, dict]:
    """Return exponents, their exponentials in each format, and each format's smallest normal number."""
    exponents = torch.arange(-_END, _END + 1, dtype=torch.float64)
    held = {number(dtype): exponents.exp().to(dtype).double().numpy() for dtype in LN_MAX}
    return exponents, held, {number(dtype): torch.finfo(dtype).smallest_normal for dtype in LN_MAX}


def _ends(exponent: float) -> EndsShown:
    exponents, held, smallest = _formats()
    true = torch.tensor(exponent, dtype=torch.float64).exp()
    values = {number(dtype): true.to(dtype).item() for dtype in LN_MAX}
    return EndsShown(exponent, values, exponents.numpy(), held, smallest)


def _counting(anchor: int) -> CountingShown:
    """At a decay of -1 an exponent is a number of tokens. Count those of the largest exponent."""
    w = -torch.ones(_BLOCK, 1)
    n = w[:anchor].sum(0)
    exponents = {"read": sum_before(w) - n, "key": n - w.cumsum(0)}
    factor = max(("key", "read"), key=lambda name: exponents[name].max())
    token = int(exponents[factor].argmax())
    tokens = torch.zeros(_BLOCK, dtype=torch.bool)
    tokens[slice(anchor, token + 1) if factor == "key" else slice(token, anchor)] = True
    return CountingShown(anchor, factor, token, tokens.numpy())


def _fatal(anchor: int) -> FatalShown:
    """One sequence per position of the strong decay. Tiles left of a block are anchored before its token `anchor`."""
    x = inputs("rwkv6", B=_TOKENS, T=_TOKENS, H=1, K=2, decay=0.0)
    each = torch.arange(_TOKENS)
    x["w"][each, each] = _STRONG
    scheme = replace(case.SCHEMES["first-row"], left=anchor - 1)
    non_finite = case.run(x, scheme, chunk=_CHUNK, block=_BLOCK).non_finite
    lost = {name: bad.flatten(1).any(1).numpy() for name, bad in non_finite.items() if len(bad) == _TOKENS}
    return FatalShown(_STRONG, anchor, lost, _CHUNK, _BLOCK)


SKETCHES = {
    "ends": Sketch(
        {"exponent": lambda: NumberKnob(80.0, "exponent x", stops=_EXPONENTS, low=-_END, high=_END)},
        _ends,
        Ends,
        {"float32 ends": {"exponent": 88.73}, "float16 ends": {"exponent": 11.1}, "too small": {"exponent": -104}},
        """import torch

true = torch.tensor({exponent}, dtype=torch.float64).exp()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    print(dtype, true.to(dtype).item())
""",
    ),
    "counting": Sketch(
        {"anchor": lambda: integer(0, 0, _BLOCK, "anchor")},
        _counting,
        Counting,
        {},
        """import torch

w = -torch.ones(16)  # at a decay of -1 an exponent is a number of tokens
gi = w.cumsum(0)
ge = gi - w
n = w[:{anchor}].sum()  # the sum of the log decays before the anchor
print("of the readers", (ge - n).tolist())
print("of the keys", (n - gi).tolist())
""",
    ),
    "fatal": Sketch(
        {"anchor": lambda: integer(1, -3, 9, "anchor p +")},
        _fatal,
        Fatal,
        {},
        """from dataclasses import replace

import flakit
from flakit.cases import anchor

scheme = replace(anchor.SCHEMES["first-row"], left={anchor} - 1)  # a row of gi is the place behind it
x = flakit.inputs("rwkv6", B=128, T=128, H=1, K=2, decay=0.0)
x["w"][range(128), range(128)] = -500.0  # a sequence for each position
lost = anchor.run(x, scheme).non_finite
for name in ("o", "dr", "dk", "dv", "dw"):
    print(name, "is lost at", lost[name].flatten(1).any(1).nonzero().flatten().tolist())
""",
    ),
}
