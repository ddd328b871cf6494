"""A key of hardly anything, brought to length one: the shorter it is, the larger its gradient, up to 1 / ε.

A delta rule needs keys of unit length, which k / max(|k|, ε) gives. Its derivative along the key is 0, and across it 1
/ max(|k|, ε): a small key rotates far for a small step. So a token with a key close to zero, such as padding or an
untrained embedding, gets the largest gradient of all.

Commonly assumed: ε only prevents a division by zero. As measured: at |k| = 0 the gradient depends on ε alone. With
PyTorch's default of 1e-12 it is multiplied by 10^12; everything is finite, and that token dominates a clipped step.
With ε = 1e-6 under the root, k / √(|k|² + ε), as in kernels, the factor is at most 1,000. This holds if the key that is
looked up is also written (DeltaNet, KDA). RWKV7 writes another key, and at |k| = 0 the first one gets no gradient.

The operator is not at fault: it sees only normalised keys, so the audit has no probe for it. The cure is a larger ε, or
to remove tokens without content from the sequence.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ...ops.family import naive_delta_rule
from ..knobs import Range
from ..laws import Measured, Row

T, K, TOKEN = 24, 16, 9
"""Tokens of one head, channels of a key, and the token with the short key; the others have length 4."""
WAYS = ("max(|k|, ε)", "√(|k|² + ε)")
"""The divisors of a key: that of torch.nn.functional.normalize, and that of kernels of delta rules."""


def lengths(k: Tensor, way: str, eps: float) -> Tensor:
    """Return the divisor of each key k [..., K], [..., 1]; way: one of `WAYS`. Raises ValueError for another."""
    one_of("way", way, WAYS)
    squares = k.square().sum(-1, keepdim=True)
    return (squares + eps).sqrt() if way == WAYS[1] else k.norm(dim=-1, keepdim=True).clamp_min(eps)


def law(length: float, way: str = WAYS[0], eps: float = 1e-12) -> float:
    """Predict by what the normalisation multiplies a gradient perpendicular to the key. length: |k|; way: of `WAYS`.

    >>> f"{law(0.5):.4g}, {law(1e-9):.4g}, {law(0.0):.4g}, {law(0.0, '√(|k|² + ε)', 1e-6):.4g}"
    '2, 1e+09, 1e+12, 1000'
    """
    return 1 / (max(length, eps) if way == WAYS[0] else math.sqrt(length**2 + eps))


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and arguments, gradients [T, K] of unit keys (`arrives`) and keys (`leaves`)."""

    arrives: Tensor
    leaves: Tensor
    length: float
    way: str
    eps: float
    factor: float
    """By what the normalisation multiplies the part of the short key's gradient perpendicular to it."""

    @property
    def share(self) -> float:
        """The norm of all other keys' gradients once the gradient of all keys is clipped to a norm of 1."""
        norms = self.leaves.norm(dim=-1)
        others = norms[torch.arange(T) != TOKEN].norm()
        return (others / norms.norm()).item()


def show(
    *,
    length: Annotated[float, Range(1e-14, 10.0, log=True)] = 1e-9,
    way: Annotated[str, WAYS] = WAYS[0],
    eps: Annotated[float, Range(1e-12, 1.0, log=True)] = 1e-12,
    seed: int = 0,
) -> Shown:
    """Run DeltaNet in float64 on normalised keys of which one has |k| = length. Return by what the normalisation
    multiplies that key's gradient, beside the prediction of `law`. way: the divisor, of `WAYS`. eps: its ε."""
    x = inputs("delta_rule", T=T, H=1, K=K, dtype=torch.float64, seed=seed)
    do, _ = cotangents("delta_rule", x, grad_seed=seed)
    keys = math.sqrt(K) * x["k"]
    direction = keys[0, TOKEN, 0] / keys[0, TOKEN, 0].norm()
    keys[0, TOKEN, 0] = length * direction
    keys.requires_grad_()
    unit = keys / lengths(keys, way, eps)
    o, _ = naive_delta_rule(**x | {"k": unit})
    arrives, leaves = (x[0, :, 0] for x in torch.autograd.grad(o, (unit, keys), do))
    before, after = (x[TOKEN] - (x[TOKEN] @ direction) * direction for x in (arrives, leaves))
    factor = (after.norm() / before.norm()).item()
    what = f"|k| = {length:.3g} over {way}, ε = {eps:.3g}: the gradient grows by"
    return Shown([Row(what, math.nan, law(length, way, eps), factor)], arrives, leaves, length, way, eps, factor)


def reproduce() -> list[Row]:
    """Return predicted and measured gradient factors by key length, for both of `WAYS` and for a larger ε."""
    rows = [row for length in (1.0, 1e-4, 1e-9, 1e-14) for row in show(length=length).rows]
    rows += [row for length in (1.0, 1e-4, 1e-14) for row in show(length=length, way=WAYS[1], eps=1e-6).rows]
    return rows + show(length=1e-14, eps=0.1).rows
