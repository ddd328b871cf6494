"""A key of hardly anything, brought to length one: the shorter it is, the larger its gradient, up to 1 / ε.

A delta rule wants keys of length one, and k / max(|k|, ε) makes them so. Its derivative along the key is 0, and across
it 1 / max(|k|, ε): a small key turns a long way for a small step. So a token whose key is nearly zero, such as padding
or an embedding that was never trained, is sent the largest gradient of all.

As told: ε only prevents a division by zero. As measured: at |k| = 0 it is the whole answer. With PyTorch's default of
1e-12 the gradient is multiplied by 10^12; everything is finite, and a clipped step is that one token's. With ε = 1e-6
under the root, k / √(|k|² + ε), as kernels have it, the factor is at most 1,000. So it is where the key that is
looked up is also written (DeltaNet, KDA). RWKV7 writes another one, and at |k| = 0 nothing arrives at the first.

The operator is blameless: it is given keys and not what they were made of, so the audit has no probe for it. The cure
is a larger ε, or to take tokens that say nothing out of the sequence.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ...ops.family import naive_delta_rule
from ..knobs import Range
from ..laws import Row

T, K, TOKEN = 24, 16, 9
"""Tokens of one head, channels of a key, and the token whose key is short; the others' are 4 long."""
WAYS = ("max(|k|, ε)", "√(|k|² + ε)")
"""What a key is divided by: torch.nn.functional.normalize, and kernels of delta rules."""


def lengths(k: Tensor, way: str, eps: float) -> Tensor:
    """What each key [..., K] is divided by, [..., 1]."""
    if way not in WAYS:
        raise ValueError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
    squares = k.square().sum(-1, keepdim=True)
    return (squares + eps).sqrt() if way == WAYS[1] else k.norm(dim=-1, keepdim=True).clamp_min(eps)


def law(length: float, way: str = WAYS[0], eps: float = 1e-12) -> float:
    """By how much the gradient of a key of this length grows, across the key.

    >>> f"{law(0.5):.4g}, {law(1e-9):.4g}, {law(0.0):.4g}, {law(0.0, '√(|k|² + ε)', 1e-6):.4g}"
    '2, 1e+09, 1e+12, 1000'
    """
    return 1 / (max(length, eps) if way == WAYS[0] else math.sqrt(length**2 + eps))


@dataclass(frozen=True)
class Shown:
    """The gradients that arrive at the unit keys and that leave for the keys, [T, K] each, and the keys."""

    arrives: Tensor
    leaves: Tensor
    direction: Tensor
    """Of the short key, [K]."""
    length: float
    way: str
    eps: float

    @property
    def factor(self) -> float:
        """How much the short key's gradient grows, across the key."""
        d = self.direction
        arrives, leaves = (x[TOKEN] - (x[TOKEN] @ d) * d for x in (self.arrives, self.leaves))
        return (leaves.norm() / arrives.norm()).item()

    @property
    def share(self) -> float:
        """Of the norm of all keys' gradients, the share of the other tokens: what clipping leaves them."""
        norms = self.leaves.norm(dim=-1)
        others = norms[torch.arange(T) != TOKEN].norm()
        return (others / norms.norm()).item()


@functools.lru_cache(maxsize=32)
def show(*, length: float, way: str, eps: float, seed: int) -> Shown:
    """What `at` measures: DeltaNet in float64."""
    x = inputs("delta_rule", T=T, H=1, K=K, dtype=torch.float64, seed=seed)
    do, _ = cotangents("delta_rule", x, grad_seed=seed)
    keys = math.sqrt(K) * x["k"]
    direction = keys[0, TOKEN, 0] / keys[0, TOKEN, 0].norm()
    keys[0, TOKEN, 0] = length * direction
    keys.requires_grad_()
    unit = keys / lengths(keys, way, eps)
    o, _ = naive_delta_rule(**x | {"k": unit})
    arrives, leaves = (x[0, :, 0] for x in torch.autograd.grad(o, (unit, keys), do))
    return Shown(arrives, leaves, direction, length, way, eps)


def at(
    *,
    length: Annotated[float, Range(1e-14, 10.0, log=True)] = 1e-9,
    way: Annotated[str, WAYS] = WAYS[0],
    eps: Annotated[float, Range(1e-12, 1.0, log=True)] = 1e-12,
    seed: int = 0,
) -> list[Row]:
    """One short key: by how much its gradient grows on its way through the normalisation."""
    shown = show(length=length, way=way, eps=eps, seed=seed)
    what = f"|k| = {length:.3g} over {way}, ε = {eps:.3g}: the gradient grows by"
    return [Row(what, math.nan, law(length, way, eps), shown.factor)]


def reproduce() -> list[Row]:
    """Both ways at keys of several lengths, and the ε that bounds what comes back."""
    rows = [row for length in (1.0, 1e-4, 1e-9, 1e-14) for row in at(length=length)]
    rows += [row for length in (1.0, 1e-4, 1e-14) for row in at(length=length, way=WAYS[1], eps=1e-6)]
    return [*rows, *at(length=1e-14, eps=0.1)]
