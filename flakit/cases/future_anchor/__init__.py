"""An anchor from the future: outputs change when only later decays do.

In the middle of a block of C rows stands the anchor n of its scores, exp(g_i - n) exp(n - g_j); in a block that is not
full, the last row that is there. As told (flash-linear-attention issue #1240, pull request #1242): outputs before token
P depend on gates from P on. As measured: n cancels in algebra and not in rounding; for the rows before it, it is a sum
over decays of the future. Change a decay at t >= P and outputs at t < P change in their last digits, 1.9e-6 on record.
The verdict is a matter of rows: it happens where the changed token is not after the anchor and the outputs are before
it. An anchor at the block's first row, or a difference of each pair, lets nothing through.

The size is nothing; that causality can be tested to the bit, and is not, is the point: a prefix computed alone differs
from the same prefix in a longer text, and a cache filled by one does not match the other.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from ...ops.common.dispatch import choose_backend
from ..knobs import Range
from ..laws import Row

ANCHORS = {"middle": lambda C, T: min(C // 2, T - 1), "first": lambda C, T: 0, "pair": None}
"""Which row of a block of C rows, T of them filled, is the anchor; "pair": the exact difference of each pair."""


def outputs(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, anchor: str = "middle", *, block: int = 16, backend: str = "torch"
) -> Tensor:
    """o [T, V] of inclusive linear attention in one block of at most `block` rows, masked after the product.

    backend: "triton" is the kernel of the scores, on a GPU or interpreted, for the two anchors; "torch" its twin.
    """
    if anchor not in ANCHORS:
        raise ValueError(f"anchor: expected one of {', '.join(ANCHORS)}, got {anchor!r}")
    if len(w) > block:
        raise ValueError(f"w: expected at most {block} rows, got {len(w)}")
    # Sums row by row and products by broadcasting: no reduction may depend on what follows.
    g = torch.stack([w[: t + 1].sum(0) for t in range(len(w))])
    if ANCHORS[anchor] is None:
        A = (q[:, None] * k[None] * (g[:, None] - g[None]).clamp(max=0).exp()).sum(-1).tril()
    elif choose_backend(backend, w) == "triton":
        from ..block_scores_triton import scores

        A = scores(*(x[:, None] for x in (q, k, g)), anchor=ANCHORS[anchor](block, len(w)))[0]
    else:
        n = g[ANCHORS[anchor](block, len(w))]
        A = ((q * (g - n).exp())[:, None] * (k * (n - g).exp())[None]).sum(-1).tril()
    return torch.stack([(A[i, : i + 1, None] * v[: i + 1]).sum(0) for i in range(len(w))])


def law(anchor: str, *, P: int, T: int = 16, block: int = 16) -> bool:
    """Whether outputs before P change with a decay at P: P <= anchor row, and there are outputs before P."""
    where = ANCHORS[anchor]
    return where is not None and 0 < P <= where(block, T)


def run(
    anchor: str,
    *,
    P: int,
    T: int = 16,
    block: int = 16,
    K: int = 32,
    change: float = 0.37,
    seed: int = 0,
    backend: str = "torch",
) -> float:
    """The largest change of any output before P, relative to their RMS, when the decays at P grow by `change`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, w = torch.randn(4, T, K, generator=generator)
    w = -w.abs()
    later = w.clone()
    later[P] -= change
    before, after = (outputs(q, k, v, decays, anchor, block=block, backend=backend)[:P] for decays in (w, later))
    return ((after - before).abs().max() / before.square().mean().sqrt()).item() if P else 0.0


def at(
    *,
    anchor: Annotated[str, ANCHORS] = "middle",
    P: Annotated[int, Range(0, 63)] = 5,
    T: Annotated[int, Range(1, 64)] = 16,
    block: Annotated[int, (8, 16, 32, 64)] = 16,
    seed: int = 0,
) -> list[Row]:
    """One anchor, and the token P whose decays change in a block with T rows."""
    if not 0 <= P < T:
        raise ValueError(f"P: expected a token 0 ... {T - 1}, got {P}")
    if T > block:
        raise ValueError(f"T: expected at most the {block} rows of a block, got {T}")
    size = run(anchor, P=P, T=T, block=block, seed=seed)
    what = f"anchor: {anchor}, decays at {P} of {T} change"
    return [
        Row(f"{what}: outputs before it change", math.nan, law(anchor, P=P, T=T, block=block), size > 0),
        Row(f"{what}: by, of their RMS", math.nan, math.nan, size),
    ]


def reproduce() -> list[Row]:
    """Around the anchor row 8, in a block that is not full, and with the two anchors that let nothing through."""
    settings = [
        ("middle", 5, 16),
        ("middle", 8, 16),
        ("middle", 9, 16),
        ("middle", 5, 6),
        ("first", 5, 16),
        ("pair", 5, 16),
    ]
    return [row for anchor, P, T in settings for row in at(anchor=anchor, P=P, T=T)]
