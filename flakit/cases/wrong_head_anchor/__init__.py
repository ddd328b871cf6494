"""An anchor from the wrong head: it cancels in algebra, so nothing is wrong until the decay is strong.

Cumulative decays are stored as [T, H, K], so the stride between tokens is H K. A kernel reads the middle row of its
block, its anchor n, at `middle * K` from its head's first row instead of `middle * H * K`: another token's row, often
another head's. As reported (flash-linear-attention issue #1084, pull request #1085): the short stride can corrupt
scores and gradients. As measured: exp(g_i - n) exp(n - g_j) is exp(g_i - g_j) for any n, so at ordinary decays the
error is only rounding, 1e-7. But the exponents no longer span half a block: they overflow where the right ones do not,
and give NaN. With one head the two addresses are equal.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...ops.common.dispatch import choose_backend
from ..knobs import DECAY, Range
from ..laws import LN_MAX, Measured, Row, kernel_place, search


def anchor(g: Tensor, *, wrong: bool = True) -> Tensor:
    """Return each head's anchor [H, K], the middle row of log decays g [block, H, K]; wrong: what is read instead."""
    block, H, K = g.shape
    middle = block // 2
    return g.view(-1, K)[middle : middle + H] if wrong else g[middle]


def scores(q: Tensor, k: Tensor, w: Tensor, *, wrong: bool = True, backend: str = "torch") -> Tensor:
    """Return A [H, block, block], the scores of pairs j <= i in one block; q, k, w [block, H, K], w natural log.
    wrong: use the faulty anchor. backend: "triton" for the kernel, on a GPU or interpreted, in float32; or "torch"."""
    g = w.cumsum(0)
    if choose_backend(backend, w) == "triton":
        from ..block_scores_triton import scores as kernel

        return kernel(q, k, g, anchor=len(g) // 2, short=wrong)
    n = anchor(g, wrong=wrong)
    query, key = q * (g - n).exp(), k * (n - g).exp()
    return torch.einsum("ihc,jhc->hij", query, key).tril()


def exact(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Return the same scores as `scores` in float64, from each pair's difference of decays, without an anchor."""
    q, k, g = q.double(), k.double(), w.double().cumsum(0)
    return torch.einsum("ihc,jhc,ijhc->hij", q, k, (g[:, None] - g[None]).clamp(max=0).exp()).tril()


def law(w: Tensor, *, wrong: bool = True) -> float:
    """Predict the factor on log decays w [block, H, K] at which the scores overflow, for operands of order 1: ln(max) /
    the largest distance of any row's g from its head's anchor."""
    g = w.double().cumsum(0)
    return LN_MAX[torch.float32] / (g - anchor(g, wrong=wrong)).abs().max().item()


def onset(w: Tensor, *, wrong: bool = True, tolerance: float = 1e-3, backend: str = "torch") -> float:
    """Measure what `law` predicts, in float32 with q = k = 1: the factor on w from which a score is not finite."""
    ones = torch.ones_like(w)

    def finite(factor: float) -> dict[str, bool]:
        return {"scores": bool(scores(ones, ones, w * factor, wrong=wrong, backend=backend).isfinite().all())}

    return search(finite, near=[law(w, wrong=wrong)], tolerance=tolerance)["scores"]


@functools.lru_cache(maxsize=2)
def _begins(H: int, block: int, spread: float, wrong: bool) -> float:
    """Return `onset` for the log decays of `decays`, measured with the kernel if this process can run it."""
    device, backend = kernel_place()
    return onset(decays(block, H, spread=spread).to(device), wrong=wrong, backend=backend)


def decays(block: int = 16, H: int = 4, K: int = 16, *, spread: float = 0.0) -> Tensor:
    """Return natural-log decays [block, H, K]: -(1 + h * spread) at every token of head h."""
    return -(1 + spread * torch.arange(H, dtype=torch.float32)).view(1, H, 1).expand(block, H, K).contiguous()


@dataclass(frozen=True)
class Anchored:
    """The scores A from one anchor row n per head, and their factors, with g the cumulative log decay of a token."""

    rows: list[tuple[int, int]]
    """The token and the head of the row that each head uses as its anchor."""
    exponents: Tensor
    """g - n of every token and head [block, H], equal in all channels."""
    read: Tensor
    """e^(g - n), [block, H]."""
    key: Tensor
    """e^(n - g), [block, H]."""
    scores: Tensor
    """A [H, block, block] of random q and k."""


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, and one block's decays, exponents and scores with either anchor."""

    K: int
    g: Tensor
    """Cumulative log decays [block, H], equal in all channels."""
    wrong: Anchored
    right: Anchored
    exact: Tensor
    """A [H, block, block] in float64, from the exact difference of each pair."""
    head: int
    """The head with the largest exponents for the wrong anchor."""
    off: float
    """The relative L2 error of all heads' scores with the wrong anchor."""


def show(
    *,
    H: Annotated[int, Range(1, 16)] = 4,
    block: Annotated[int, Range(2, 64)] = 16,
    spread: Annotated[float, Range(0, 1, 0.05)] = 0.0,
    w: Annotated[float, DECAY] = -1.0,
    seed: int = 0,
) -> Shown:
    """Return the |w| from which scores are NaN with either anchor beside that of `law`, and the scores' error with
    the wrong anchor at w <= 0. Head h has the decay w (1 + h * spread). Raises ValueError unless H >= 1, block >= 2."""
    if H < 1 or block < 2:
        raise ValueError(f"H, block: expected at least 1 head and 2 rows, got {H} and {block}")
    device, backend = kernel_place()
    logs = decays(block, H, spread=spread) * -w
    q, k = torch.randn(2, *logs.shape, generator=torch.Generator().manual_seed(seed))
    g, exact_scores = logs.cumsum(0), exact(q, k, logs)
    by_anchor = {}
    for wrong in (True, False):
        n = anchor(g, wrong=wrong)[:, 0]
        exponents = g[..., 0] - n
        rows = [divmod(block // 2 + h, H) if wrong else (block // 2, h) for h in range(H)]
        got = scores(*(x.to(device) for x in (q, k, logs)), wrong=wrong, backend=backend).cpu()
        by_anchor[wrong] = Anchored(rows, exponents, exponents.exp(), (-exponents).exp(), got)
    reach = by_anchor[True].exponents.abs().amax(0)
    error = relative_l2(by_anchor[True].scores, exact_scores)
    rows = []
    for which, wrong in (("wrong", True), ("right", False)):
        limit = law(decays(block, H, spread=spread), wrong=wrong)
        what = f"H = {H}, spread {spread:g}, {which} anchor: |w| at which NaN begins"
        rows.append(Row(what, math.nan, limit, _begins(H, block, spread, wrong)))
    recorded = 1e-7 if w == -1 else math.nan
    rows.append(Row(f"H = {H}, spread {spread:g}, wrong anchor: error at w = {w:g}", recorded, math.nan, error))
    K, head = logs.shape[-1], int(reach.argmax())
    return Shown(rows, K, g[..., 0], by_anchor[True], by_anchor[False], exact_scores, head, error)


def reproduce() -> list[Row]:
    """Return `show`'s rows for one head, and for four heads with equal and with different decays."""
    return [row for H, spread in ((1, 0.0), (4, 0.0), (4, 1.0)) for row in show(H=H, spread=spread).rows]
