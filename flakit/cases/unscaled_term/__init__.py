"""A term of the loss that ignores the gradient that arrives: scale the loss, and the term keeps its size.

RWKV's training penalises the largest logit of every token. L2Wrap returns the loss unchanged, and its backward adds to
the gradient of that logit 1e-4 times the logit, divided by the number of tokens: the gradient of the mean of a term
1e-4 / 2 · max². But a backward pass is linear in the incoming gradient, and this one ignores it. If the loss is
multiplied by c before the backward pass, and the gradients divided by c after it, 1 / c of the term remains.

As reported (flash-linear-attention #963): the usual loss.backward() passes a 1 and is right, so the fault was not
noticed; anything else makes the term too small. As measured: the factor 1 / c makes it too small or too large. If each
of n accumulated losses is divided by n, the term is n times too strong; a loss scaler of 65,536 removes it; and the
weight of one loss among several does not apply to it. The loss and its own gradient are always right.

The operator is not at fault, and the audit does not see the loss. In an operator the audit's probe `cotangent` detects
such a term: it passes 0, -1 and others besides 1, and 0 must give 0. Two cures: multiply by the incoming gradient, as
the library now does, or add the term to the loss, where autograd does so and the log shows it.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...numerics.arguments import one_of
from ..knobs import Range
from ..laws import Measured, Row

T, VOCAB, FACTOR = 24, 64, 1e-4
"""Tokens, vocabulary size, and RWKV's factor of the term."""
WAYS = ("ignores what arrives", "multiplies by what arrives", "a term of the loss")


def pull(logits: Tensor) -> Tensor:
    """Return the gradient of RWKV's penalty on large logits, [..., V]: FACTOR * logit / number of tokens at each
    token's largest logit, 0 elsewhere."""
    largest, at = logits.max(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, at, largest * FACTOR / largest.numel())


class Wrapped(torch.autograd.Function):
    """Identity of the loss. backward also returns `pull(logits)`, times the incoming gradient unless `ignores`."""

    @staticmethod
    def forward(ctx, loss: Tensor, logits: Tensor, ignores: bool) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.ignores = ignores
        return loss.clone()

    @staticmethod
    def backward(ctx, arrives: Tensor):
        (logits,) = ctx.saved_tensors
        return arrives, pull(logits) if ctx.ignores else arrives * pull(logits), None


def with_term(loss: Tensor, logits: Tensor, way: str = WAYS[0]) -> Tensor:
    """Return the loss with RWKV's penalty on large logits [..., V], implemented as `way` says. Raises ValueError unless
    it is one of `WAYS`: `Wrapped` without and with the incoming gradient, or added to the loss."""
    one_of("way", way, WAYS)
    if way == WAYS[2]:
        return loss + FACTOR / 2 * logits.amax(-1).square().mean()
    return Wrapped.apply(loss, logits, way == WAYS[0])


def law(scale: float, way: str = WAYS[0]) -> float:
    """Predict which fraction of the penalty's gradient remains in `show`, which multiplies the loss by `scale`.

    >>> law(1.0), law(1 / 8), law(65536.0, "multiplies by what arrives")
    (1.0, 8.0, 1.0)
    """
    return 1 / scale if way == WAYS[0] else 1.0


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, [T] each, every token's largest logit and the parts of its gradient."""

    largest: Tensor
    alone: Tensor
    """The gradient of the loss without the term."""
    wanted: Tensor
    """The right gradient of the term."""
    got: Tensor
    """The actual gradient of the term, after the division by `scale`."""
    scale: float
    left: float
    """The fraction of the term that remains."""


def show(
    *, scale: Annotated[float, Range(0.01, 1e5, log=True)] = 2.0**16, way: Annotated[str, WAYS] = WAYS[0], seed: int = 0
) -> Shown:
    """Multiply a loss with RWKV's penalty on large logits by `scale`, and divide its gradient by it. Return which
    fraction of the penalty's gradient remains, beside the prediction of `law`, in float64. way: of `WAYS`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(T, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(VOCAB, (T,), generator=generator)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits)[0]

    alone = gradient(cross_entropy(logits, targets))
    total = gradient(scale * with_term(cross_entropy(logits, targets), logits, way)) / scale
    largest, at = logits.detach().max(-1, keepdim=True)
    parts = alone, pull(logits.detach()), total - alone
    alone, wanted, got = (part.gather(-1, at)[:, 0] for part in parts)
    left = (got @ wanted / (wanted @ wanted)).item()
    row = Row(f"{way}, loss × {scale:.4g}: of the term is left", math.nan, law(scale, way), left)
    return Shown([row], largest[:, 0], alone, wanted, got, scale, left)


def reproduce() -> list[Row]:
    """Return predicted and measured fractions of the penalty's gradient for four scales of the loss, in all `WAYS`."""
    return [row for way in WAYS for scale in (1.0, 1 / 8, 0.1, 2.0**16) for row in show(scale=scale, way=way).rows]
