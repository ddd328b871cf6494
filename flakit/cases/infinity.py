"""One infinity's way: every intermediate of a small chunk whose decay is anchored at the chunk's start.

The weight of key j in the read of token i is exp(ge_i - gi_j), gi the inclusive, ge the exclusive sum of the log decays
(RWKV6). A matrix product needs it as two factors, exp(ge_i) on the read and exp(-gi_j) on the key. With one decay w for
all tokens the key's is exp((j+1)|w|), and infinite in float32 where (j+1)|w| > 88.72. Then, one after another:

    dr      the sum over j runs through masked keys as well, whose dA is exactly 0, and 0 * inf = NaN in every row: the
            last key, which no token of the chunk reads, is enough. |w| = 88.72 / C
    dk      of that key: inf * (a sum of exact zeros). dw: a running sum that starts there. The same |w|
    o, dv   need an infinite key that is read: the last but one. |w| = 88.72 / (C - 1). Tiny * inf is inf; 0 * inf, and
            inf - inf between channels, is NaN

`follow` computes with `anchor`'s own scheme "none" and keeps what it passes through; beside it the same in float64,
from exact differences.
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
    """What a chunk of C tokens with K channels passes through, in the order it is computed.

    read, key: the two factors [C], the same in every channel. pairs: their product for every pair, row i reads key j.
    scores, kept: the scores before and after the mask. dA: do @ v.T, the gradient of `kept`, scaled and masked. These
    are [C, C].
    scaled: each key times its factor, [C, K]. o, dr: [C, K].
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
    """made: as float32 computes it; true: the same in float64, where nothing ends before e^709.

    exponents: of the two factors, [C] each. operands: r (scaled), k, v and do, [C, K].
    lost: the share of non-finite values among the keys' factors ("keys") and in each of `TENSORS`.
    """

    made: Numbers
    true: Numbers
    exponents: tuple[Tensor, Tensor]
    operands: Mapping[str, Tensor]
    lost: Mapping[str, float]

    @property
    def cell(self) -> tuple[int, int]:
        """The pair (i, j) to follow: an infinite key and the token after it, the first such pair, or the first in which
        the read's factor has become 0. Where only the last key is infinite, its own token; where none is, the last two
        tokens."""
        read, key = self.made.read, self.made.key
        last = len(key) - 1
        pairs = [j for j in range(last) if not key[j].isfinite()]
        if not pairs:
            return (last, last - 1) if key.isfinite().all() else (last, last)
        j = next((j for j in pairs if read[j + 1] == 0), pairs[0])
        return j + 1, j


def inputs(decay: float, *, C: int = 8, K: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """One chunk of RWKV6, float32 [1, C, 1, K], without the bonus: u [1, K] is 0.

    decay: w (natural logarithm, finite, <= 0) of every token and channel; a ValueError otherwise.
    r, k, v and the arriving gradient do have one digit after the point and are below 1: only exponentials overflow.
    """
    if not -torch.inf < decay <= 0:
        raise ValueError(f"decay: expected a finite natural-log decay <= 0, got {decay!r}")
    rng = np.random.default_rng(seed)
    digits = rng.integers(1, 10, (4, 1, C, 1, K)) * rng.choice((-1, 1), (4, 1, C, 1, K)) / 10
    made = dict(zip(("r", "k", "v", "do"), torch.from_numpy(digits).float(), strict=True))
    return made | {"w": torch.full((1, C, 1, K), decay), "u": torch.zeros(1, K)}


def follow(decay: float, *, C: int = 8, K: int = 4, seed: int = 0) -> Way:
    """Run `inputs` forward and backward through the faulty scheme, and the right way in float64."""
    x = inputs(decay, C=C, K=K, seed=seed)
    do = x.pop("do")[0, :, 0]
    chunk = RWKV6(x, lambda w, inclusive: Products(w, "none", inclusive=inclusive, chunk=C), C)
    grads = chunk.backward(do[None, None, None])

    (tile,) = chunk.products.tiles
    on_read, on_key = (exponent[0, 0, 0] for exponent in chunk.products.exponents(tile))
    r, k, v, low = chunk.q[0, 0, 0], chunk.k[0, 0, 0], chunk.v[0, 0, 0], chunk.products.low
    read, key = on_read.exp(), on_key.exp()
    made = Numbers(
        read=read[:, 0],
        key=key[:, 0],
        pairs=read[:, :1] * key[:, 0],
        scores=(r * read) @ (k * key).mT,
        kept=chunk.A[0, 0, 0],
        scaled=k * key,
        dA=masked(chunk.scale * (do @ v.mT), low, "where"),
        o=chunk.made["o"][0, :, 0],
        dr=grads["dr"][0, :, 0],
    )
    tensors = {"o": chunk.made["o"], **grads}
    lost = {"keys": key} | {name: tensors[name] for name in TENSORS}
    return Way(
        made,
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
