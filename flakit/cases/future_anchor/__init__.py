"""An anchor from the future: outputs change when only later decays do.

The anchor n of a block's scores, exp(g_i - n) exp(n - g_j) with cumulative log decays g, is the middle row of its C
rows, or the last row of a partial block. As reported (flash-linear-attention issue #1240, pull request #1242): outputs
before token P depend on gates from P on. As measured: n cancels in algebra but not in rounding, and for rows before the
anchor's, n is a sum over future decays. If the decay at P changes and P is not after the anchor's row, outputs at t < P
change in their last digits, in `show` by some 5e-7 of their root mean square. An anchor at the block's first row, or a
difference for each pair, leaks nothing.

The size is harmless. But causality can be tested to the bit, and is not: a prefix computed alone differs from the same
prefix in a longer text, and a cache filled by one does not match the other.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...ops.common.dispatch import choose_backend
from ..knobs import Range
from ..laws import Measured, Row

ANCHORS = {"middle": lambda C, T: min(C // 2, T - 1), "first": lambda C, T: 0, "pair": None}
"""The anchor row of a block of C rows, T of them filled; "pair": exact differences of pairs, without an anchor."""


def outputs(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, anchor: str = "middle", *, block: int = 16, backend: str = "torch"
) -> Tensor:
    """Return o [T, V] of inclusive linear attention in one block of at most `block` rows, masked after the product.

    q, k, w: [T, K], w natural log <= 0; v: [T, V]. backend: "triton" computes the scores in a kernel, on a GPU or
        interpreted, except for anchor "pair"; "torch" is PyTorch. Raises ValueError for other anchors or T > block.
    """
    one_of("anchor", anchor, ANCHORS)
    if len(w) > block:
        raise ValueError(f"w: expected at most {block} rows, got {len(w)}")
    g = _cumulative(w)
    if ANCHORS[anchor] is None:
        A = (q[:, None] * k[None] * (g[:, None] - g[None]).clamp(max=0).exp()).sum(-1).tril()
    elif choose_backend(backend, w) == "triton":
        from ..block_scores_triton import scores

        A = scores(*(x[:, None] for x in (q, k, g)), anchor=ANCHORS[anchor](block, len(w)))[0]
    else:
        query, key = _factors(g, ANCHORS[anchor](block, len(w)))
        A = ((q * query)[:, None] * (k * key)[None]).sum(-1).tril()
    return torch.stack([(A[i, : i + 1, None] * v[: i + 1]).sum(0) for i in range(len(w))])


def _cumulative(w: Tensor) -> Tensor:
    """Return cumulative log decays [T, K] of w [T, K], summed row by row so that no sum depends on later rows."""
    return torch.stack([w[: t + 1].sum(0) for t in range(len(w))])


def _factors(g: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Return e^{g - n} for the reads and e^{n - g} for the keys, with n = g[row]."""
    return (g - g[row]).exp(), (g[row] - g).exp()


def law(anchor: str, *, P: int, T: int = 16, block: int = 16) -> bool:
    """Predict whether outputs before token P change with a decay at P: if 0 < P <= the anchor's row."""
    where = ANCHORS[anchor]
    return where is not None and 0 < P <= where(block, T)


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, one block's decays, exponents and outputs before and after a change at P."""

    P: int
    row: int | None
    """The anchor's row; None without an anchor."""
    w: tuple[Tensor, Tensor]
    """Natural-log decays before and after the change, [T, K]."""
    exponents: tuple[Tensor, Tensor]
    """g - n of every token [T, K]; 0 without an anchor."""
    own: tuple[Tensor, Tensor]
    """The weight of every token's own pair [T, K], e^{g - n} e^{n - g}, which is 1."""
    moved: Tensor
    """The largest change of each output [T], relative to the RMS of the outputs before P (of all if P is 0)."""
    largest: float
    """The largest change of an output before P."""


def show(
    *,
    anchor: Annotated[str, ANCHORS] = "middle",
    P: Annotated[int, Range(0, 63)] = 5,
    T: Annotated[int, Range(1, 64)] = 16,
    block: Annotated[int, (8, 16, 32, 64)] = 16,
    seed: int = 0,
) -> Shown:
    """Lower the decays at token P by 0.37, and compare law and measurement: do the outputs before P change? T: filled
    rows of a block of `block` rows. anchor: one of `ANCHORS`. Raises ValueError unless 0 <= P < T <= block."""
    if not 0 <= P < T:
        raise ValueError(f"P: expected a token 0 ... {T - 1}, got {P}")
    if T > block:
        raise ValueError(f"T: expected at most the {block} rows of a block, got {T}")
    q, k, v, w = torch.randn(4, T, 32, generator=torch.Generator().manual_seed(seed))
    w = -w.abs()
    later = w.clone()
    later[P] -= 0.37
    before, after = (outputs(q, k, v, decays, anchor, block=block) for decays in (w, later))
    moved = (after - before).abs().amax(-1) / before[: P or None].square().mean().sqrt()
    row = ANCHORS[anchor] and ANCHORS[anchor](block, T)
    g = [_cumulative(decays) for decays in (w, later)]
    if row is None:
        exponents, own = [torch.zeros_like(x) for x in g], [torch.ones_like(x) for x in g]
    else:
        exponents, own = [x - x[row] for x in g], [torch.mul(*_factors(x, row)) for x in g]
    largest = moved[:P].max().item() if P else 0.0
    what = f"anchor: {anchor}, decays at {P} of {T} change: outputs before it change"
    rows = [
        Row(what, math.nan, law(anchor, P=P, T=T, block=block), largest > 0),
        Row(f"anchor: {anchor}, decays at {P} of {T} change: by, of their RMS", math.nan, math.nan, largest),
    ]
    return Shown(rows, P, row, (w, later), tuple(exponents), tuple(own), moved, largest)


def reproduce() -> list[Row]:
    """Return whether outputs before P change, predicted and measured, around the anchor's row and for all anchors."""
    settings = [
        ("middle", 5, 16),
        ("middle", 8, 16),
        ("middle", 9, 16),
        ("middle", 5, 6),
        ("first", 5, 16),
        ("pair", 5, 16),
    ]
    return [row for anchor, P, T in settings for row in show(anchor=anchor, P=P, T=T).rows]
