"""A clamp makes numbers finite, not right: keys that should be forgotten are read at full weight.

The weight exp(g_i - g_j) of a pair is formed as exp(g_i - n) exp(n - g_j), and both exponents are clamped so that
neither overflows. As told (sglang issue #39971): the fast path of a prefill collapses for strong decays. Errors of 0.57
at w = -8 and of 0.36 for a mix of -12 and -0.01 are on record, without block and anchor. As measured: once two tokens
lie beyond the bound on the same side of the anchor, their clamped exponents cancel, and the pair has the weight
exp(0) = 1, whatever lies between them. With m tokens beyond the bound that is m (m - 1) / 2 pairs read at full weight,
where in truth little but the diagonal is left: an error near 1 at once. It is finite and of the right size, and no
search for NaN finds it.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...ops.common.dispatch import choose_backend
from ..knobs import FINITE_DECAY, Range
from ..laws import Row

BOUND = 126 * math.log(2)
"""The clamp of the story, 126 powers of two, as a natural logarithm: 87.3."""


def scores(q: Tensor, k: Tensor, w: Tensor, *, anchor: int = 0, bound: float = BOUND, backend: str = "torch") -> Tensor:
    """A [block, block] of inclusive linear attention, q, k, w [block, K], anchored at a row, both exponents clamped.

    backend: "triton" is the kernel, on a GPU or interpreted, in float32; "torch" its twin.
    """
    g = w.cumsum(0)
    if choose_backend(backend, w) == "triton":
        from ..block_scores_triton import scores as kernel

        return kernel(*(x[:, None] for x in (q, k, g)), anchor=anchor, bound=bound)[0]
    clamped = (g - g[anchor]).clamp(-bound, bound)
    return ((q * clamped.exp()) @ (k * (-clamped).exp()).T).tril()


def exact(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The same by the difference of each pair."""
    g = w.cumsum(0)
    return torch.einsum("ic,jc,ijc->ij", q, k, (g[:, None] - g[None, :]).clamp(max=0).exp()).tril()


def law(w: float, *, block: int = 16, anchor: int = 0, bound: float = BOUND) -> float:
    """The error of A (L2) at one uniform log decay w, random q and k: every pair's weight against e^{w (i - j)}."""
    exponents = [w * (row - anchor) for row in range(block)]
    clamped = [max(-bound, min(bound, x)) for x in exponents]
    if clamped == exponents:
        return 0.0
    pairs = [(i, j) for i in range(block) for j in range(i + 1)]
    true = [math.exp(w * (i - j)) for i, j in pairs]
    wrong = [math.exp(clamped[i] - clamped[j]) - weight for (i, j), weight in zip(pairs, true, strict=True)]
    return math.hypot(*wrong) / math.hypot(*true)


@dataclass(frozen=True)
class Shown:
    """One block; weights have a row for each output and a column for each key, [block, block]."""

    bound: float
    exponents: Tensor
    """g - n of every row [block], n the anchor's."""
    clamped: Tensor
    """The same between -bound and bound."""
    right: Tensor
    """e^(g_i - g_j)."""
    computed: Tensor
    """e^(clamped_i) e^(-clamped_j)."""
    alike: Tensor
    """Pairs of two rows that were given one exponent, boolean."""
    off: float
    """The relative L2 error of the scores of random q and k."""
    finite: bool
    """All of those."""


@lru_cache(maxsize=4)
def show(*, w: float, block: int, anchor: int, bound: float, K: int, seed: int = 0) -> Shown:
    """What `at` measures, with the weights that come of q and k of 1."""
    if not 0 <= anchor < block:
        raise ValueError(f"anchor: expected a row 0 ... {block - 1}, got {anchor}")
    q, k = torch.randn(2, 64, block, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    decays = torch.full((block, K), float(w), dtype=torch.float64)
    pairs = [(scores(*x, decays, anchor=anchor, bound=bound), exact(*x, decays)) for x in zip(q, k, strict=True)]
    got, true = (torch.stack(x) for x in zip(*pairs, strict=True))

    one, channel = torch.ones(block, 1, dtype=torch.float64), decays[:, :1]
    g = channel[:, 0].cumsum(0)
    exponents = g - g[anchor]
    clamped = exponents.clamp(-bound, bound)
    alike = (clamped[:, None] == clamped) & (exponents[:, None] != exponents)
    return Shown(
        bound=bound,
        exponents=exponents,
        clamped=clamped,
        right=exact(one, one, channel),
        computed=scores(one, one, channel, anchor=anchor, bound=bound),
        alike=alike.tril(-1),
        off=relative_l2(got, true),
        finite=bool(got.isfinite().all()),
    )


def at(
    *,
    w: Annotated[float, FINITE_DECAY] = -8.0,
    block: Annotated[int, Range(2, 64)] = 16,
    anchor: Annotated[int, Range(0, 63)] = 0,
    bound: Annotated[float, Range(1, 88)] = BOUND,
    K: Annotated[int, Range(8, 128, 8)] = 64,
    seed: int = 0,
) -> list[Row]:
    """One uniform log decay, block, anchor row and bound: how far the clamped scores are off, and whether finite."""
    shown = show(w=w, block=block, anchor=anchor, bound=bound, K=K, seed=seed)
    what, predicted = f"w = {w:g}, anchor row {anchor} of {block}", law(w, block=block, anchor=anchor, bound=bound)
    predicted = predicted if predicted > 1e-13 else 0.0  # float64 does not see less
    return [
        Row(f"{what}: scores off by", math.nan, predicted, shown.off, 0.1),
        Row(f"{what}: all finite", math.nan, True, shown.finite),
    ]


def reproduce() -> list[Row]:
    """The error of a block's scores by decay and anchor."""
    return [row for anchor in (0, 8) for w in (-5.0, -8.0, -12.0, -50.0) for row in at(w=w, anchor=anchor)]
