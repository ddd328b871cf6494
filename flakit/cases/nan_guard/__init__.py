"""A guard against NaN that forgets: exp(where(d < 0, d, -inf)) sends a decay of exactly nothing to 0 instead of 1.

A difference of cumulative log decays must not be positive, so a guard replaces what is not negative. As told
(flash-linear-attention #104, #461): results change where the decay is masked out. As measured: with d = 0, "nothing is
forgotten", the pair's weight becomes exp(-inf) = 0, "all is forgotten". Every pair of tokens j < i whose decays between
are all exactly 0 is lost: a run of L such tokens loses L (L + 1) / 2 pairs of its chunk, a chunk without any decay all
of them. Nothing is NaN, and with decays drawn at random nothing is ever 0: no random test sees it. `d <= 0` is right.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ..knobs import FINITE_DECAY, Range
from ..laws import Row

GUARDS = {"d < 0": torch.lt, "d <= 0": torch.le}
"""What a guard lets through: the fault, and its cure."""


def weights(w: Tensor, guard: str = "d < 0") -> Tensor:
    """exp(g_i - g_j) of every pair j < i of one chunk, [C, C] from one head's log decays w [C], guarded."""
    if guard not in GUARDS:
        raise ValueError(f"guard: expected one of {', '.join(GUARDS)}, got {guard!r}")
    g = w.cumsum(0)
    d = g[:, None] - g[None, :]
    return torch.where(GUARDS[guard](d, torch.zeros_like(d)), d, -torch.inf).exp().tril(-1)


def law(w: Tensor) -> int:
    """How many pairs the guard "d < 0" loses: L (L + 1) / 2 for every run of L tokens with a decay of 0, but the
    chunk's first token, whose decay stands between no two of its tokens."""
    lost = run = 0
    for zero in (w[1:] == 0).tolist():
        run = run + 1 if zero else 0
        lost += run
    return lost


def lost(w: Tensor, guard: str = "d < 0") -> int:
    """The measured counterpart of `law`: pairs j < i that get no weight and should have one."""
    right = weights(w, "d <= 0")
    return int(((weights(w, guard) == 0) & (right > 0)).sum())


def chunk(C: int = 64, share: float = 0.5, *, w: float = -0.1, seed: int = 0) -> Tensor:
    """Log decays [C], about `share` of them exactly 0 and the others w, in float64."""
    keep = torch.rand(C, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(keep, 0.0, w).double()


def at(
    *,
    C: Annotated[int, Range(1, 256)] = 64,
    share: Annotated[float, Range(0, 1, 0.05)] = 0.5,
    w: Annotated[float, FINITE_DECAY] = -0.1,
    seed: int = 0,
) -> list[Row]:
    """One chunk of C tokens, a share of which has no decay: the pairs lost, and what it does to the outputs."""
    decays = chunk(C, share, w=w, seed=seed)
    q, k, v = torch.randn(3, C, 64, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    scores = q @ k.T
    faulty, right = ((scores * weights(decays, guard)) @ v for guard in GUARDS)
    what = f"C = {C}, {share:.0%} of the tokens without decay"
    return [
        Row(f"{what}: pairs lost", math.nan, law(decays), lost(decays)),
        Row(f"{what}: output off by", math.nan, math.nan, relative_l2(faulty, right)),
    ]


def reproduce() -> list[Row]:
    """From no token without decay to all of them."""
    return [row for share in (0.0, 0.5, 1.0) for row in at(share=share)]
