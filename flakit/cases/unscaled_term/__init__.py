"""A term of the loss that ignores the gradient that arrives: scale the loss, and the term keeps its size.

RWKV's training holds the largest logit of every token back. L2Wrap returns the loss as it is, and in its backward pass
adds to the gradient of that logit 1e-4 times the logit, over the number of tokens: the gradient of a term
1e-4 / 2 · max², averaged. But a backward pass is linear in what arrives, and this one does not look at it. Whoever
multiplies the loss by c before the backward pass, and divides what comes back by c, is left with 1 / c of the term.

As told (flash-linear-attention #963): the usual loss.backward() sends a 1 and is right, so nobody noticed; anything
else makes the term too small. As measured: 1 / c of it is too small or too large. A loss that is divided by n, as each
of n parts that are accumulated, has the term n times too strong; a loss scaler's 65,536 leaves nothing of it; and of
a loss that has a weight among others the term has none. The loss and its own gradient are right throughout.

The operator is blameless, and the audit is not given the loss. Such a term in an operator is what its probe `cotangent`
sees, which sends 0, -1 and others besides 1: 0 has to give 0. Two cures: multiply by what arrives, as the library has
done since, or write the term into the loss, where autograd does so, and the log shows it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..knobs import Range
from ..laws import Row

T, VOCAB, FACTOR = 24, 64, 1e-4
"""Tokens, different ones, and the term's factor, which is RWKV's."""
WAYS = ("ignores what arrives", "multiplies by what arrives", "a term of the loss")


def pull(logits: Tensor) -> Tensor:
    """The term's gradient: at the largest logit of every token FACTOR times that logit over the tokens."""
    largest, at = logits.max(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, at, largest * FACTOR / largest.numel())


class Wrapped(torch.autograd.Function):
    """The loss as it is, and in its backward pass the term. ignores: whatever arrives."""

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
    """The loss with the term, in one of `WAYS`. logits [..., V]: those that the loss was made of."""
    if way not in WAYS:
        raise ValueError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
    if way == WAYS[2]:
        return loss + FACTOR / 2 * logits.amax(-1).square().mean()
    return Wrapped.apply(loss, logits, way == WAYS[0])


def law(scale: float, way: str = WAYS[0]) -> float:
    """How much of the term is left in a step whose loss was multiplied by `scale`.

    >>> law(1.0), law(1 / 8), law(65536.0, "multiplies by what arrives")
    (1.0, 8.0, 1.0)
    """
    return 1 / scale if way == WAYS[0] else 1.0


@dataclass(frozen=True)
class Shown:
    """At the largest logit of each token, [T]: that logit, and what the gradient divided by the scale has there."""

    largest: Tensor
    alone: Tensor
    """Of the loss without the term."""
    wanted: Tensor
    """Of the term."""
    got: Tensor
    """Of the term, as it is."""
    scale: float
    way: str

    @property
    def left(self) -> float:
        """How much of the term there is."""
        return (self.got @ self.wanted / (self.wanted @ self.wanted)).item()


@functools.lru_cache(maxsize=32)
def show(*, scale: float, way: str, seed: int) -> Shown:
    """What `at` measures, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(T, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(VOCAB, (T,), generator=generator)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits)[0]

    alone = gradient(cross_entropy(logits, targets))
    whole = gradient(scale * with_term(cross_entropy(logits, targets), logits, way)) / scale
    largest, at = logits.detach().max(-1, keepdim=True)
    parts = (alone, pull(logits.detach()), whole - alone)
    return Shown(largest[:, 0], *(part.gather(-1, at)[:, 0] for part in parts), scale, way)


def at(
    *,
    scale: Annotated[float, Range(0.01, 1e5, log=True)] = 2.0**16,
    way: Annotated[str, WAYS] = WAYS[0],
    seed: int = 0,
) -> list[Row]:
    """One scale of the loss: how much of the term is left once it is divided out."""
    what = f"{way}, loss × {scale:.4g}: of the term is left"
    return [Row(what, math.nan, law(scale, way), show(scale=scale, way=way, seed=seed).left)]


def reproduce() -> list[Row]:
    """No scale, eight parts, a weight and a loss scaler, in every way."""
    return [row for way in WAYS for scale in (1.0, 1 / 8, 0.1, 2.0**16) for row in at(scale=scale, way=way)]
