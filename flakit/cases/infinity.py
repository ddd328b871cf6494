"""Follow one infinity through every intermediate of a small chunk whose decay is anchored at the chunk's start.

The weight of key j in the read of token i is exp(ge_i - gi_j), with gi the inclusive and ge the exclusive cumulative
log decay (RWKV6). A matrix product needs two factors, exp(ge_i) on the read and exp(-gi_j) on the key. With a uniform
decay w the key's factor is exp((j+1)|w|), infinite in float32 if (j+1)|w| > 88.72. These tensors become non-finite:

    dr      its sum over j includes masked keys, whose dA is exactly 0, and 0 * inf = NaN in every row. The last key,
            which no token of the chunk reads, suffices: |w| = 88.72 / C
    dk      of that key: inf * (a sum of exact zeros). dw: a running sum that starts there. The same |w|
    o, dv   need an infinite key that is read, the last but one: |w| = 88.72 / (C - 1). Tiny * inf is inf; 0 * inf, and
            inf - inf between channels, is NaN

`follow` computes with `anchor`'s scheme "none", and in float64 with exact differences; it returns all intermediates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.common.decay import sum_before
from .anchor.operators import RWKV6, scale
from .anchor.schemes import Products, masked

TENSORS = ("o", "dv", "dk", "dr", "dw")


@dataclass(frozen=True)
class Numbers:
    """The intermediates of a chunk of C tokens with K channels, in the order of computation.

    read, key: the two factors [C], equal in every channel. pairs: their product for each pair, row i reads key j.
        scores, kept: the scores before and after the mask. dA: do @ v.T, the gradient of `kept`, scaled and masked.
        pairs, scores, kept, dA are [C, C]. scaled: each key times its factor, [C, K]. o, dr: [C, K].
    """

    read: Tensor
    key: Tensor
    pairs: Tensor
    scores: Tensor
    kept: Tensor
    scaled: Tensor
    dA: Tensor
    o: Tensor
    dr: Tensor


@dataclass(frozen=True)
class Way:
    """The result of `follow`: the intermediates in float32 (`made`) and in float64 (`true`), whose range reaches e^709.

    exponents: of the two factors, [C] each. operands: r (scaled), k, v and do, [C, K].
    lost: the fraction of non-finite values in the keys' factors ("keys") and in each of `TENSORS`.
    """

    made: Numbers
    true: Numbers
    exponents: tuple[Tensor, Tensor]
    operands: Mapping[str, Tensor]
    lost: Mapping[str, float]

    @property
    def cell(self) -> tuple[int, int]:
        """The pair (i, j) to follow: the first infinite key with a read factor of 0 at the next token i, else the first
        infinite key and the next token. If only the last key is infinite, its own token; if none is, the last two."""
        read, key = self.made.read, self.made.key
        last = len(key) - 1
        pairs = [j for j in range(last) if not key[j].isfinite()]
        if not pairs:
            return (last, last - 1) if key.isfinite().all() else (last, last)
        j = next((j for j in pairs if read[j + 1] == 0), pairs[0])
        return j + 1, j


def inputs(decay: float, *, C: int = 8, K: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Draw one chunk of RWKV6, float32 [1, C, 1, K]: r, k, v, w, u and the gradient do. The bonus u [1, K] is 0.

    decay: w of every token and channel, natural log. r, k, v and do are one-digit decimals below 1 in size, so that
        only exponentials overflow. Raises ValueError unless decay is finite and <= 0.
    """
    if not -torch.inf < decay <= 0:
        raise ValueError(f"decay: expected a finite natural-log decay <= 0, got {decay!r}")
    rng = np.random.default_rng(seed)
    digits = rng.integers(1, 10, (4, 1, C, 1, K)) * rng.choice((-1, 1), (4, 1, C, 1, K)) / 10
    tensors = dict(zip(("r", "k", "v", "do"), torch.from_numpy(digits).float(), strict=True))
    return tensors | {"w": torch.full((1, C, 1, K), decay), "u": torch.zeros(1, K)}


def follow(decay: float, *, C: int = 8, K: int = 4, seed: int = 0) -> Way:
    """Run `inputs` forward and backward in float32 with both factors from the chunk's start, and right in float64."""
    x = inputs(decay, C=C, K=K, seed=seed)
    do = x.pop("do")[0, :, 0]
    chunk = RWKV6(x, lambda w, inclusive: Products(w, "none", inclusive=inclusive, chunk=C), C)
    grads = chunk.backward(do[None, None, None])

    (tile,) = chunk.products.tiles
    on_read, on_key = (exponent[0, 0, 0] for exponent in chunk.products.exponents(tile))
    r, k, v, low = chunk.q[0, 0, 0], chunk.k[0, 0, 0], chunk.v[0, 0, 0], chunk.products.low
    read, key = on_read.exp(), on_key.exp()
    numbers = Numbers(
        read=read[:, 0],
        key=key[:, 0],
        pairs=read[:, :1] * key[:, 0],
        scores=(r * read) @ (k * key).mT,
        kept=chunk.A[0, 0, 0],
        scaled=k * key,
        dA=masked(chunk.scale * (do @ v.mT), low, "where"),
        o=chunk.outputs["o"][0, :, 0],
        dr=grads["dr"][0, :, 0],
    )
    tensors = {"o": chunk.outputs["o"], **grads}
    lost = {"keys": key} | {name: tensors[name] for name in TENSORS}
    return Way(
        numbers,
        _true(x, do),
        (on_read[:, 0], on_key[:, 0]),
        {"r": r, "k": k, "v": v, "do": do},
        {name: (~each.isfinite()).double().mean().item() for name, each in lost.items()},
    )


def _true(x: Mapping[str, Tensor], do: Tensor) -> Numbers:
    r, k, v, w = (x[name][0, :, 0].double() for name in "rkvw")
    do, gi, ge = do.double(), w.cumsum(0), sum_before(w)
    r, low = r * scale(RWKV6, x), torch.ones(len(w), len(w)).tril(-1).bool()
    pairs = (ge[:, None] - gi).exp()  # [C, C, K]
    scores = torch.einsum("ic,jc,ijc->ij", r, k, pairs)
    kept = torch.where(low, scores, 0.0)
    dA = torch.where(low, scale(RWKV6, x) * (do @ v.mT), 0.0)
    dr = torch.einsum("ij,jc,ijc->ic", dA, k, torch.where(low[..., None], pairs, 0.0))
    key = (-gi).exp()
    return Numbers(ge.exp()[:, 0], key[:, 0], pairs[..., 0], scores, kept, k * key, dA, kept @ v, dr)
