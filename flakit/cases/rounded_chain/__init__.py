"""A chain of transitions multiplied in TF32: each product rounds its factors to eleven bits, and the errors add up.

A chunk of RWKV7, KDA or a delta rule acts on a state as a matrix M, K x K. Over ranks, or over parts of a sequence on
one GPU, these matrices are multiplied chunk by chunk before any state is known. As reported
(flash-linear-attention #1180): this was done in TF32, which loses precision in a long context; three TF32 products per
product cure it. As measured: each factor has a relative rounding error of 0.43 times 2^-11. Without decay the errors
persist, and n chunks accumulate sqrt(2 (n - 1)) of it. From 33 chunks, 2,112 tokens, that exceeds the rounding of a
bfloat16 result. A tree has as many products as a chain, and an error as large.

The audit's probe `ranks` detects it over two processes in float32: three chunks with nearly no decay and nearly no
writes have an error of 4e-4, as the law predicts, where 2e-5 is allowed. If an operator has such a chain in one
process, the probe `truth` detects a single product, 3e-4 where 1e-5 is allowed; in bfloat16 it is below the storage
rounding for sequences as short as the audit's. Tests with short sequences, or with strong decay, pass.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ..knobs import Range
from ..laws import Measured, Row, rounded

K, CHUNK = 64, 64
BITS = {"bfloat16": 8, "TF32": 11, "three TF32": 11, "float32": 24}
"""Significand bits of a factor, including the leading one."""
WAYS = tuple(BITS)
STORED = 1.66e-3
"""The relative L2 error of storing a result in bfloat16."""


def _rounding() -> float:
    """Return the RMS error of rounding a normally distributed number of variance 1 (or any power of 4), in units of
    2^-bits, for a significand of `bits` bits: between 2^e and 2^(e+1) it is 2^e / sqrt(3)."""
    below = [math.erf(2.0**e / math.sqrt(2)) for e in range(-20, 5)]
    return math.sqrt(sum((high - low) * 4.0**e / 3 for e, (low, high) in enumerate(pairwise(below), -20)))


ROUNDED = _rounding()
"""0.43; elements of an orthogonal matrix of K = 64 rows are nearly normal, of variance 1 / 64."""


def product(x: Tensor, y: Tensor, way: str) -> Tensor:
    """Return x @ y of float64 matrices with factors rounded as `way` says, one of `WAYS`, and sums in float64. "three
    TF32": x = x0 + x1, with x0 = x rounded to TF32 and x1 the rest; x0 y0 + x0 y1 + x1 y0."""
    bits = BITS[way]
    x0, y0 = rounded(x, bits), rounded(y, bits)
    if way != "three TF32":
        return x0 @ y0
    x1, y1 = rounded(x - x0, bits), rounded(y - y0, bits)
    return x0 @ y0 + x0 @ y1 + x1 @ y0


def law(chunks: int, way: str = "TF32") -> float:
    """Predict the relative L2 error of a chain of `chunks` norm-preserving matrices, multiplied as in `product`.

    >>> round(law(33), 5), round(law(33, "bfloat16"), 4)
    (0.00166, 0.0133)
    """
    unit = 2.0 ** -BITS[way]
    one = ROUNDED * unit
    each = math.sqrt(2) * one
    if way == "three TF32":  # the rounding of each factor's rest, which is uniform, and x1 y1
        each = one * math.sqrt(2 * unit**2 / 7 + one**2)
    return math.sqrt(chunks - 1) * each


def transitions(chunks: int, seed: int = 0) -> Tensor:
    """Draw the transition matrices of chunks, [chunks, K, K] float64: each the product over 64 tokens of I - 2 κ κ^T
    with |κ| = 1, as of RWKV7 with w = 0, b = -2 a."""
    keys = torch.randn(CHUNK, chunks, K, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    keys = torch.nn.functional.normalize(keys, dim=2)
    M = torch.eye(K, dtype=torch.float64).expand(chunks, K, K)
    for key in keys:
        M = M - 2 * key @ (key.mT @ M)
    return M


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, and for the products of 2, 4, 8, … and of all transition matrices their number
    (`chunks`), and their relative L2 error, measured (`errors`) and predicted (`law`)."""

    way: str
    chunks: tuple[int, ...]
    errors: tuple[float, ...]
    law: tuple[float, ...]


def show(
    *, chunks: Annotated[int, Range(2, 512, log=True)] = 128, way: Annotated[str, WAYS] = "TF32", seed: int = 0
) -> Shown:
    """Multiply the transition matrices of `chunks` chunks of 64 tokens without decay, products as `way` says, one of
    `WAYS`. Return the relative L2 error of the product beside the prediction of `law`."""
    true = got = torch.eye(K, dtype=torch.float64)
    counts, errors, laws = [], [], []
    for n, M in enumerate(transitions(chunks, seed), 1):
        true = M @ true
        got = M if n == 1 else product(M, got, way)
        if n > 1 and (n & (n - 1) == 0 or n == chunks):
            counts.append(n)
            errors.append(relative_l2(got, true))
            laws.append(law(n, way))
    row = Row(f"{way}, {chunks} chunks: the chain is off by", math.nan, laws[-1], errors[-1], 0.08)
    return Shown([row], way, tuple(counts), tuple(errors), tuple(laws))


def reproduce() -> list[Row]:
    """Return the predicted and measured errors of the products of 2, 32 and 512 chunks in each of `WAYS`."""
    return [row for way in WAYS for chunks in (2, 32, 512) for row in show(chunks=chunks, way=way).rows]
