"""An anchor from the wrong head: it cancels in algebra, so nothing is wrong until the decay is strong.

Cumulative decays lie as [T, H, K]; one token further is H K numbers away. A kernel reads the row in the middle of its
block, its anchor n, `middle * K` numbers from its head's first row instead of `middle * H * K`: another token's, and
often another head's. As told (flash-linear-attention issue #1084, pull request #1085): the short stride can corrupt
scores and gradients. As measured: exp(g_i - n) exp(n - g_j) is exp(g_i - g_j) for any n, so that the error is that of
rounding, 1e-7, at every ordinary decay; but the exponents are no longer those of half a block. They overflow where
the right ones have room, and NaN begins. With one head the two addresses are the same.
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
from ..laws import LN_MAX, Row, kernel_place, search


def anchor(g: Tensor, *, wrong: bool = True) -> Tensor:
    """The row that each head of a block takes as its anchor, [H, K] from its cumulative log decays g [block, H, K]."""
    block, H, K = g.shape
    middle = block // 2
    return g.view(-1, K)[middle : middle + H] if wrong else g[middle]


def scores(q: Tensor, k: Tensor, w: Tensor, *, wrong: bool = True, backend: str = "torch") -> Tensor:
    """A [H, block, block] of inclusive linear attention in one block; q, k, w [block, H, K].

    backend: "triton" is the kernel, on a GPU or interpreted, in float32; "torch" its twin.
    """
    g = w.cumsum(0)
    if choose_backend(backend, w) == "triton":
        from ..block_scores_triton import scores as kernel

        return kernel(q, k, g, anchor=len(g) // 2, short=wrong)
    n = anchor(g, wrong=wrong)
    query, key = q * (g - n).exp(), k * (n - g).exp()
    return torch.einsum("ihc,jhc->hij", query, key).tril()


def exact(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The same in float64, by the difference of each pair."""
    q, k, g = q.double(), k.double(), w.double().cumsum(0)
    return torch.einsum("ihc,jhc,ijhc->hij", q, k, (g[:, None] - g[None]).clamp(max=0).exp()).tril()


def law(w: Tensor, *, wrong: bool = True) -> float:
    """The factor on the log decays w [block, H, K] at which a factor of the scores overflows, operands of order 1:
    ln(max) over the largest distance of any row's g from its head's anchor."""
    g = w.double().cumsum(0)
    return LN_MAX[torch.float32] / (g - anchor(g, wrong=wrong)).abs().max().item()


def onset(w: Tensor, *, wrong: bool = True, tolerance: float = 1e-3, backend: str = "torch") -> float:
    """The measured counterpart of `law`, in float32 with operands of size 1."""
    ones = torch.ones_like(w)

    def finite(factor: float) -> dict[str, bool]:
        return {"scores": bool(scores(ones, ones, w * factor, wrong=wrong, backend=backend).isfinite().all())}

    return search(finite, near=[law(w, wrong=wrong)], tolerance=tolerance)["scores"]


@functools.lru_cache(maxsize=2)
def _begins(H: int, block: int, spread: float, wrong: bool) -> float:
    """The onset of `decays`, where this process runs kernels: the same for every w."""
    device, backend = kernel_place()
    return onset(decays(block, H, spread=spread).to(device), wrong=wrong, backend=backend)


def decays(block: int = 16, H: int = 4, K: int = 16, *, spread: float = 0.0) -> Tensor:
    """Log decays [block, H, K] of -1, each further head's stronger by `spread`."""
    return -(1 + spread * torch.arange(H, dtype=torch.float32)).view(1, H, 1).expand(block, H, K).contiguous()


@dataclass(frozen=True)
class Anchored:
    """What comes of one anchor."""

    rows: list[tuple[int, int]]
    """The token and the head whose row each head takes as its anchor."""
    exponents: Tensor
    """g - n of every token and head [block, H], the same in all its channels."""
    read: Tensor
    """e^(g - n), [block, H]."""
    key: Tensor
    """e^(n - g), [block, H]."""
    scores: Tensor
    """A [H, block, block] of random q and k."""


@dataclass(frozen=True)
class Shown:
    """One block at one decay."""

    K: int
    g: Tensor
    """Cumulative log decays [block, H], the same in all channels."""
    wrong: Anchored
    right: Anchored
    exact: Tensor
    """A in float64, by the difference of each pair."""
    head: int
    """The one whose exponents reach furthest with the wrong anchor."""
    off: float
    """The relative L2 error of all heads' scores with the wrong anchor."""


def show(*, H: int, block: int, spread: float, w: float, seed: int = 0) -> Shown:
    """What `at` measures at w."""
    return _show_once(H, block, spread, w, seed)


@functools.lru_cache(maxsize=1)
def _show_once(H: int, block: int, spread: float, w: float, seed: int) -> Shown:
    if H < 1 or block < 2:
        raise ValueError(f"H, block: expected at least 1 head and 2 rows, got {H} and {block}")
    device, backend = kernel_place()
    logs = decays(block, H, spread=spread) * -w
    q, k = torch.randn(2, *logs.shape, generator=torch.Generator().manual_seed(seed))
    g, exact_scores = logs.cumsum(0), exact(q, k, logs)
    made = {}
    for wrong in (True, False):
        n = anchor(g, wrong=wrong)[:, 0]
        exponents = g[..., 0] - n
        rows = [divmod(block // 2 + h, H) if wrong else (block // 2, h) for h in range(H)]
        got = scores(*(x.to(device) for x in (q, k, logs)), wrong=wrong, backend=backend).cpu()
        made[wrong] = Anchored(rows, exponents, exponents.exp(), (-exponents).exp(), got)
    reach = made[True].exponents.abs().amax(0)
    off = relative_l2(made[True].scores, exact_scores)
    return Shown(logs.shape[-1], g[..., 0], made[True], made[False], exact_scores, int(reach.argmax()), off)


def at(
    *,
    H: Annotated[int, Range(1, 16)] = 4,
    block: Annotated[int, Range(2, 64)] = 16,
    spread: Annotated[float, Range(0, 1, 0.05)] = 0.0,
    w: Annotated[float, DECAY] = -1.0,
    seed: int = 0,
) -> list[Row]:
    """One number of heads and block, the heads' decays apart by `spread` times w: the onset of both anchors, the error
    of the wrong one at w."""
    off = show(H=H, block=block, spread=spread, w=w, seed=seed).off
    return [
        Row(
            f"H = {H}, spread {spread:g}, {which} anchor: |w| at which NaN begins",
            math.nan,
            law(decays(block, H, spread=spread), wrong=which == "wrong"),
            _begins(H, block, spread, which == "wrong"),
        )
        for which in ("wrong", "right")
    ] + [
        Row(
            f"H = {H}, spread {spread:g}, wrong anchor: error at w = {w:g}",
            1e-7 if w == -1 else math.nan,
            math.nan,
            off,
        )
    ]


def reproduce() -> list[Row]:
    """One head and several, alike and different."""
    return [row for H, spread in ((1, 0.0), (4, 0.0), (4, 1.0)) for row in at(H=H, spread=spread)]
