"""A guard against NaN that forgets: exp(where(d < 0, d, -inf)) sends a decay of exactly nothing to 0 instead of 1.

A difference d of cumulative log decays must not be positive, so a guard replaces non-negative ones. As reported
(flash-linear-attention #104, #461): results change where the decay is masked out. As measured: with d = 0, no decay,
the pair's weight becomes exp(-inf) = 0, full decay. Every pair of tokens j < i with decays of exactly 0 between them is
lost: a run of L such tokens loses L (L + 1) / 2 pairs of its chunk, a chunk without decay all of them. Nothing is NaN,
and random decays are never exactly 0, so random tests do not detect it. `d <= 0` is right.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.errors import relative_l2
from ..knobs import FINITE_DECAY, Range
from ..laws import Measured, Row

GUARDS = {"d < 0": torch.lt, "d <= 0": torch.le}
"""The condition under which a guard leaves d as it is: the fault, and its cure."""


def weights(w: Tensor, guard: str = "d < 0") -> Tensor:
    """Return the weights exp(d) of all pairs j < i of a chunk, [C, C], d = g_i - g_j from one head's log decays w [C];
    0 where the guard does not hold for d. Raises ValueError for an unknown guard."""
    one_of("guard", guard, GUARDS)
    g = w.cumsum(0)
    d = g[:, None] - g[None, :]
    return torch.where(GUARDS[guard](d, torch.zeros_like(d)), d, -torch.inf).exp().tril(-1)


def law(w: Tensor) -> int:
    """Predict the number of pairs that the guard "d < 0" loses, for log decays w [C]: L (L + 1) / 2 for every run of L
    tokens with a decay of 0, without the chunk's first token, whose decay lies between no two tokens."""
    lost = run = 0
    for zero in (w[1:] == 0).tolist():
        run = run + 1 if zero else 0
        lost += run
    return lost


def chunk(C: int = 64, share: float = 0.5, *, w: float = -0.1, seed: int = 0) -> Tensor:
    """Draw log decays [C], float64: a fraction of about `share` exactly 0, the others w."""
    keep = torch.rand(C, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(keep, 0.0, w).double()


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for one chunk, d and the weights of all pairs [C, C] (a row per output, a
    column per key), right and guarded, and each output's error [C]."""

    w: Tensor
    """Log decays [C]."""
    d: Tensor
    """g_i - g_j of every pair."""
    right: Tensor
    """Weights by the guard d <= 0."""
    guarded: Tensor
    """Weights by the guard d < 0."""
    lost: Tensor
    """Pairs whose weight is wrongly 0, boolean."""
    off: Tensor
    """The relative L2 error of each output, [C]; 0 for an output that is rightly 0."""
    off_by: float
    """The relative L2 error of all outputs."""


def show(
    *,
    C: Annotated[int, Range(1, 256)] = 64,
    share: Annotated[float, Range(0, 1, 0.05)] = 0.5,
    w: Annotated[float, FINITE_DECAY] = -0.1,
    seed: int = 0,
) -> Shown:
    """Draw one chunk in which a fraction `share` of the tokens has decay 0, the others w. Return the number of pairs
    that the guard loses beside the prediction of `law`, and the outputs' error."""
    decays = chunk(C, share, w=w, seed=seed)
    q, k, v = torch.randn(3, C, 64, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    guarded, right = (weights(decays, guard) for guard in GUARDS)
    faulty, true = ((q @ k.T * each) @ v for each in (guarded, right))
    off = ((faulty - true).norm(dim=-1) / true.norm(dim=-1)).nan_to_num(0.0)
    g, lost = decays.cumsum(0), (guarded == 0) & (right > 0)
    off_by, what = relative_l2(faulty, true), f"C = {C}, {share:.0%} of the tokens without decay"
    rows = [
        Row(f"{what}: pairs lost", math.nan, law(decays), int(lost.sum())),
        Row(f"{what}: output off by", math.nan, math.nan, off_by),
    ]
    return Shown(rows, decays, g[:, None] - g[None, :], right, guarded, lost, off, off_by)


def reproduce() -> list[Row]:
    """Return rows on lost pairs and output errors of chunks with none, half and all of their tokens without decay."""
    return [row for share in (0.0, 0.5, 1.0) for row in show(share=share).rows]
