"""A chain of transitions multiplied in TF32: each product rounds its factors to eleven bits, and the errors add up.

What a chunk of RWKV7, KDA or a delta rule does to a state is a matrix M, K x K. Over ranks, and over parts of a
sequence on one GPU, somebody multiplies these matrices, chunk after chunk, before any state is known. As told
(flash-linear-attention #1180): that was done in TF32, which loses precision in a long context; three TF32 products for
each one cure it. As measured: each factor of a product is off by 0.43 times 2^-11; where nothing fades nothing of that
is lost again, and n chunks make sqrt(2 (n - 1)) of it. That is what storing the result in bfloat16 costs from 33 chunks
on, 2,112 tokens. A tree has as many products as a chain, and as large an error.

The audit's probe `ranks` sees it over two processes, in float32: three chunks in which nearly nothing fades, and nearly
nothing is written, are off by 4e-4, as the law says, where 2e-5 is granted. Where an operator has a chain in one
process, the probe `truth` sees a single such product, 3e-4 where 1e-5 is granted; in bfloat16 it is below what storing
costs until a sequence is longer than the audit's. A test with short sequences, or with decays that forget within a
chunk, passes.
"""

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ..knobs import Range
from ..laws import Row

K, CHUNK = 64, 64
BITS = {"bfloat16": 8, "TF32": 11, "three TF32": 11, "float32": 24}
"""Binary digits that a factor keeps, the leading one counted."""
WAYS = tuple(BITS)
STORED = 1.66e-3
"""What storing a result in bfloat16 costs, relative L2."""


def _rounding() -> float:
    """The RMS of what rounding takes of a normal number of variance 1, or of any power of 4, in units of 2^-bits: in
    the binade from 2^e on that is 2^e / sqrt(3)."""
    below = [math.erf(2.0**e / math.sqrt(2)) for e in range(-20, 5)]
    return math.sqrt(sum((high - low) * 4.0**e / 3 for e, (low, high) in enumerate(pairwise(below), -20)))


ROUNDED = _rounding()
"""0.43; elements of an orthogonal matrix of K = 64 rows are nearly normal, of variance 1 / 64."""


def rounded(x: Tensor, bits: int) -> Tensor:
    """x to so many binary digits, to nearest."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def product(x: Tensor, y: Tensor, way: str) -> Tensor:
    """x y of float64 matrices, its factors in one of `WAYS` and its sums exact.

    Three TF32: x = x0 + x1, the first as TF32 has it, the second what it lost; x0 y0 + x0 y1 + x1 y0.
    """
    bits = BITS[way]
    x0, y0 = rounded(x, bits), rounded(y, bits)
    if way != "three TF32":
        return x0 @ y0
    x1, y1 = rounded(x - x0, bits), rounded(y - y0, bits)
    return x0 @ y0 + x0 @ y1 + x1 @ y0


def law(chunks: int, way: str = "TF32") -> float:
    """How far off the product of so many matrices is, relative L2, that keep what they are given.

    >>> round(law(33), 5), round(law(33, "bfloat16"), 4)
    (0.00166, 0.0133)
    """
    unit = 2.0 ** -BITS[way]
    one = ROUNDED * unit
    each = math.sqrt(2) * one
    if way == "three TF32":  # of each factor what rounding takes of the rest, which is spread evenly, and x1 y1
        each = one * math.sqrt(2 * unit**2 / 7 + one**2)
    return math.sqrt(chunks - 1) * each


def transitions(chunks: int, seed: int = 0) -> Tensor:
    """[chunks, K, K]: each the edits I - 2 κ κ^T of 64 tokens, κ of length one: RWKV7 with w = 0 and b = -2 a."""
    keys = torch.randn(CHUNK, chunks, K, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    keys = torch.nn.functional.normalize(keys, dim=2)
    found = torch.eye(K, dtype=torch.float64).expand(chunks, K, K)
    for key in keys:
        found = found - 2 * key @ (key.mT @ found)
    return found


@dataclass(frozen=True)
class Shown:
    """A chain, looked at after 2, 4, 8 … chunks."""

    way: str
    chunks: tuple[int, ...]
    errors: tuple[float, ...]
    """Relative L2 of the product so far."""
    law: tuple[float, ...]


def show(*, chunks: int, way: str, seed: int = 0) -> Shown:
    """What `at` measures."""
    return _show(chunks, way, seed)


@functools.lru_cache(maxsize=16)
def _show(chunks: int, way: str, seed: int) -> Shown:
    true = got = torch.eye(K, dtype=torch.float64)
    looked, errors, laws = [], [], []
    for n, M in enumerate(transitions(chunks, seed), 1):
        true = M @ true
        got = M if n == 1 else product(M, got, way)
        if n > 1 and (n & (n - 1) == 0 or n == chunks):
            looked.append(n)
            errors.append(relative_l2(got, true))
            laws.append(law(n, way))
    return Shown(way, tuple(looked), tuple(errors), tuple(laws))


def at(
    *,
    chunks: Annotated[int, Range(2, 512, log=True)] = 128,
    way: Annotated[str, WAYS] = "TF32",
    seed: int = 0,
) -> list[Row]:
    """A chain of so many chunks of 64 tokens, nothing of which fades."""
    shown = show(chunks=chunks, way=way, seed=seed)
    return [Row(f"{way}, {chunks} chunks: the chain is off by", math.nan, law(chunks, way), shown.errors[-1], 0.08)]


def reproduce() -> list[Row]:
    """Two chunks, 32 and 512, in every way."""
    return [row for way in WAYS for chunks in (2, 32, 512) for row in at(chunks=chunks, way=way)]
