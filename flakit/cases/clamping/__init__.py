"""A clamp makes numbers finite, not right: keys that should be forgotten are read at full weight.

The weight exp(ge_i - gi_j) of a pair is computed as exp(ge_i - n) exp(n - gi_j), with both exponents clamped so that
neither overflows; ge and gi are the exclusive and inclusive cumulative log decays, n is the anchor. As reported (sglang
issue #39971): the fast path of a prefill collapses for strong decays. Recorded are relative errors of 0.57 at w = -8,
0.36 for a mix of -12 and -0.01, of an unknown block and anchor. As measured: once two positions are beyond the bound on
the same side of the anchor, their clamped exponents cancel, and the pair has weight exp(0) = 1, whatever the decay
between them. With m positions beyond the bound, m (m - 1) / 2 pairs are read at full weight, although little but each
token's read of the previous one should remain: an error near 1 at once. Results are finite and of the right magnitude,
so no search for NaN detects it.

Tokens read before their decay, as in RWKV6; with `exclusive=False` after it, as in GSA, including their own key.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...ops.common.dispatch import choose_backend
from ..knobs import FINITE_DECAY, Range
from ..laws import Measured, Row

BOUND = 126 * math.log(2)
"""The clamp in the report, 126 powers of two, as a natural logarithm: 87.3."""


def scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    anchor: int = 0,
    bound: float = BOUND,
    exclusive: bool = True,
    backend: str = "torch",
) -> Tensor:
    """Return scores A [block, block] of linear attention with both exponents clamped to ±bound.

    q, k, w [block, K]; w natural-log decays. anchor: the token before which the exponents are anchored.
    backend: "triton" for the kernel, on a GPU or interpreted, in float32; "torch" for the same in PyTorch.
    """
    before = _before(w)
    seen, g, n = before[:-1] if exclusive else before[1:], before[1:], before[anchor]
    if choose_backend(backend, w) == "triton":
        from ..block_scores_triton import scores as kernel

        read, n = (seen[:, None] if exclusive else None), n[None, None]
        return kernel(*(x[:, None] for x in (q, k, g)), read=read, n=n, anchor=0, bound=bound)[0]
    on_read, on_key = (seen - n).clamp(-bound, bound), (n - g).clamp(-bound, bound)
    return ((q * on_read.exp()) @ (k * on_key.exp()).T).tril(-1 if exclusive else 0)


def exact(q: Tensor, k: Tensor, w: Tensor, *, exclusive: bool = True) -> Tensor:
    """Return the same scores as `scores`, but without anchor and clamp, from the difference of decays of each pair."""
    before = _before(w)
    seen, g = before[:-1] if exclusive else before[1:], before[1:]
    weights = (seen[:, None] - g[None, :]).clamp(max=0).exp()
    return torch.einsum("ic,jc,ijc->ij", q, k, weights).tril(-1 if exclusive else 0)


def _before(w: Tensor) -> Tensor:
    """Return the cumulative log decay before each token, and after the last one, [block + 1, K]."""
    return torch.cat((torch.zeros_like(w[:1]), w.cumsum(0)))


def law(w: float, *, block: int = 16, anchor: int = 0, bound: float = BOUND, exclusive: bool = True) -> float:
    """Predict the relative L2 error of `scores` at a uniform log decay w <= 0, for random q and k, from all pairs'
    weights. Only the cumulative decays at the tokens' reads matter: each key's exponent is one of theirs."""
    first = 0 if exclusive else 1
    exponents = [w * (place - anchor) for place in range(first, first + block)]
    clamped = [max(-bound, min(bound, x)) for x in exponents]
    if clamped == exponents:
        return 0.0
    pairs = [(reader, key) for reader in range(block) for key in range(exclusive, reader + 1)]
    true = [math.exp(w * (reader - key)) for reader, key in pairs]
    wrong = [math.exp(clamped[i] - clamped[j]) - weight for (i, j), weight in zip(pairs, true, strict=True)]
    return math.hypot(*wrong) / math.hypot(*true)


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for one block, exponents [block] and weights [block, block] (a row per
    output, a column per key), right and clamped."""

    bound: float
    exponents: Tensor
    """The cumulative decay at each read, minus n, [block]."""
    clamped: Tensor
    """The exponents clamped to -bound … bound, [block]."""
    right: Tensor
    """The right weights."""
    computed: Tensor
    """The weights from clamped exponents."""
    alike: Tensor
    """Pairs whose two exponents were clamped to one value, boolean."""
    off: float
    """The relative L2 error of the scores of random q and k."""
    finite: bool
    """Whether all of these scores are finite."""
    anchor: int
    """The token before which n is taken."""
    exclusive: bool
    """Whether tokens read before they decay."""

    @property
    def unread(self) -> Tensor:
        """Pairs whose weight is 0 by definition, boolean [block, block]: later keys and, if exclusive, the own key."""
        return ~torch.ones_like(self.right, dtype=torch.bool).tril(-int(self.exclusive))


def show(
    *,
    w: Annotated[float, FINITE_DECAY] = -8.0,
    block: Annotated[int, Range(2, 64)] = 16,
    anchor: Annotated[int, Range(0, 64)] = 0,
    bound: Annotated[float, Range(1, 88)] = BOUND,
    K: Annotated[int, Range(8, 128, 8)] = 64,
    exclusive: bool = True,
    seed: int = 0,
) -> Shown:
    """Return the error of the clamped scores at a uniform log decay w <= 0 beside the prediction of `law`, whether all
    are finite, and the weights of the pairs (for q = k = 1). Raises ValueError unless 0 <= anchor <= block."""
    if not 0 <= anchor <= block:
        raise ValueError(f"anchor: expected a token 0 ... {block - 1}, or {block} for behind the last, got {anchor}")
    q, k = torch.randn(2, 64, block, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    decays = torch.full((block, K), float(w), dtype=torch.float64)
    own = {"exclusive": exclusive}
    clamp = {"anchor": anchor, "bound": bound} | own
    pairs = [(scores(*x, decays, **clamp), exact(*x, decays, **own)) for x in zip(q, k, strict=True)]
    got, true = (torch.stack(x) for x in zip(*pairs, strict=True))

    one, channel = torch.ones(block, 1, dtype=torch.float64), decays[:, :1]
    places = _before(channel)[:, 0] - _before(channel)[anchor]
    cut = places.clamp(-bound, bound)
    exponents, clamped = (x[:-1] if exclusive else x[1:] for x in (places, cut))
    alike = (clamped[:, None] == cut[1:]) & (exponents[:, None] != places[1:])
    off, finite = relative_l2(got, true), bool(got.isfinite().all())
    what = f"w = {w:g}, anchored before token {anchor} of {block}"
    predicted = law(w, block=block, anchor=anchor, bound=bound, exclusive=exclusive)
    predicted = predicted if predicted > 1e-13 else 0.0  # below float64's resolution
    rows = [
        Row(f"{what}: scores off by", math.nan, predicted, off, 0.1),
        Row(f"{what}: all finite", math.nan, True, finite),
    ]
    return Shown(
        rows, bound=bound, exponents=exponents, clamped=clamped, right=exact(one, one, channel, **own),
        computed=scores(one, one, channel, **clamp), alike=alike.tril(-1), off=off, finite=finite,
        anchor=anchor, exclusive=exclusive,
    )  # fmt: skip


def reproduce() -> list[Row]:
    """Return the predicted and measured errors of a block's scores at four decays and two anchors."""
    return [row for anchor in (0, 8) for w in (-5.0, -8.0, -12.0, -50.0) for row in show(w=w, anchor=anchor).rows]
