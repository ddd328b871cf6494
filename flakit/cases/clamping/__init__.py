"""A clamp makes numbers finite, not right: keys that should be forgotten are read at full weight.

The weight exp(ge_i - gi_j) of a pair is formed as exp(ge_i - n) exp(n - gi_j), and both exponents are clamped so that
neither overflows. As told (sglang issue #39971): the fast path of a prefill collapses for strong decays. Errors of 0.57
at w = -8 and of 0.36 for a mix of -12 and -0.01 are on record, without block and anchor. As measured: once two places
lie beyond the bound on the same side of the anchor, their clamped exponents cancel, and the pair has the weight
exp(0) = 1, whatever lies between them. With m places beyond the bound that is m (m - 1) / 2 pairs read at full weight,
where in truth little is left but what each token reads of the one before it: an error near 1 at once. It is finite and
of the right size, and no search for NaN finds it.

Tokens read before they decay, as in RWKV6; with `exclusive=False` after it, as in GSA, and read themselves.
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
    """A [block, block] of linear attention, q, k, w [block, K], anchored before a token, both exponents clamped.

    backend: "triton" is the kernel, on a GPU or interpreted, in float32; "torch" its twin.
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
    """The same by the difference of each pair."""
    before = _before(w)
    seen, g = before[:-1] if exclusive else before[1:], before[1:]
    weights = (seen[:, None] - g[None, :]).clamp(max=0).exp()
    return torch.einsum("ic,jc,ijc->ij", q, k, weights).tril(-1 if exclusive else 0)


def _before(w: Tensor) -> Tensor:
    """The sum of the log decays before each token, and before what comes after the last, [block + 1, K]."""
    return torch.cat((torch.zeros_like(w[:1]), w.cumsum(0)))


def law(w: float, *, block: int = 16, anchor: int = 0, bound: float = BOUND, exclusive: bool = True) -> float:
    """The error of A (L2) at one uniform log decay w, random q and k: every pair's weight against what it should be.

    The places between two tokens that matter are those at which one reads: a key that is read lies before one of them.
    """
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
class Shown:
    """One block; weights have a row for each output and a column for each key, [block, block]."""

    bound: float
    exponents: Tensor
    """What each token has decayed by when it reads, less n, [block]."""
    clamped: Tensor
    """The same between -bound and bound."""
    right: Tensor
    """The weights."""
    computed: Tensor
    """The same of the clamped exponents."""
    alike: Tensor
    """Pairs whose two exponents were cut to one, boolean."""
    off: float
    """The relative L2 error of the scores of random q and k."""
    finite: bool
    """All of those."""
    anchor: int
    """The token before which n is counted."""
    exclusive: bool
    """Whether tokens read before they decay."""

    @property
    def unread(self) -> Tensor:
        """Pairs not read through a decay, boolean [block, block]: later keys; read before the decay, the own too."""
        return ~torch.ones_like(self.right, dtype=torch.bool).tril(-int(self.exclusive))


@lru_cache(maxsize=4)
def show(*, w: float, block: int, anchor: int, bound: float, K: int, exclusive: bool = True, seed: int = 0) -> Shown:
    """What `at` measures, with the weights that come of q and k of 1."""
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
    return Shown(
        bound=bound,
        exponents=exponents,
        clamped=clamped,
        right=exact(one, one, channel, **own),
        computed=scores(one, one, channel, **clamp),
        alike=alike.tril(-1),
        off=relative_l2(got, true),
        finite=bool(got.isfinite().all()),
        anchor=anchor,
        exclusive=exclusive,
    )


def at(
    *,
    w: Annotated[float, FINITE_DECAY] = -8.0,
    block: Annotated[int, Range(2, 64)] = 16,
    anchor: Annotated[int, Range(0, 64)] = 0,
    bound: Annotated[float, Range(1, 88)] = BOUND,
    K: Annotated[int, Range(8, 128, 8)] = 64,
    exclusive: bool = True,
    seed: int = 0,
) -> list[Row]:
    """One uniform log decay, block, anchor and bound: how far the clamped scores are off, and whether finite."""
    shown = show(w=w, block=block, anchor=anchor, bound=bound, K=K, exclusive=exclusive, seed=seed)
    what = f"w = {w:g}, anchored before token {anchor} of {block}"
    predicted = law(w, block=block, anchor=anchor, bound=bound, exclusive=exclusive)
    predicted = predicted if predicted > 1e-13 else 0.0  # float64 does not see less
    return [
        Row(f"{what}: scores off by", math.nan, predicted, shown.off, 0.1),
        Row(f"{what}: all finite", math.nan, True, shown.finite),
    ]


def reproduce() -> list[Row]:
    """The error of a block's scores by decay and anchor."""
    return [row for anchor in (0, 8) for w in (-5.0, -8.0, -12.0, -50.0) for row in at(w=w, anchor=anchor)]
