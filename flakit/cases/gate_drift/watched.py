"""Training with the gates recorded: faulty operators, the largest exponent that they take, and the record of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...models import LanguageModel, Run, train
from ...ops.gsa import chunk_gsa
from ...ops.rwkv6 import chunk_rwkv6
from .. import padding
from ..anchor.operators import OPERATORS
from ..anchor.schemes import Products
from ..anomaly import operator
from ..laws import LN_MAX

T = 56
"""Tokens per sequence of `Delay`: T mod 64 = 56, as for the report's 3000 tokens."""
LIMIT = LN_MAX[torch.float32]
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
RIGHT = {"gsa": chunk_gsa, "rwkv6": chunk_rwkv6}


class Output(NamedTuple):
    o: Tensor


def faulty(op: str, tokens: int = T, scheme: str = "first-row") -> Callable[..., Output]:
    """Return a faulty operator for sequences of `tokens` tokens. Call it like `chunk_gsa` or `chunk_rwkv6`; it returns
    o.

    op "gsa": the fault of `padding`. op "rwkv6": chunks anchored by `scheme`, a name in `anchor.SCHEMES`: "first-row"
    (one row too late) or "none" (the chunk's start).
    """
    call = operator(op, padding.products(tokens) if op == "gsa" else partial(Products, scheme=scheme))
    return lambda *x: Output(call(*x))


def exponents(op: str, decay: Tensor, scheme: str = "first-row", *, chunk: int = 64, block: int = 16) -> Tensor:
    """Return the faulty kernel's largest exponent by sequence, head and channel, [B, H, K or M], in natural log.

    The law: a step fails if any of them is above `LIMIT`. decay: GSA's g or RWKV6's w, [B, T, H, K or M], <= 0. scheme:
    RWKV6's, as in `faulty`. chunk, block: tokens.
    """
    tokens = decay.shape[1]
    if op == "gsa":
        # Gates are <= 0, so the anchor of the last chunk with the most tokens has the largest exponent.
        farthest = padding.anchors(tokens, chunk=chunk, block=block)[:1]
        start = tokens - tokens % chunk
        return -decay[:, start : start + (farthest[0].tokens if farthest else 0)].sum(1)
    if scheme == "none":
        return torch.stack([-part.sum(1) for part in decay.split(chunk, 1)]).amax(0)
    rows = [p for p in range(block, tokens, block) if p % chunk]
    return -decay[:, rows].amin(1) if rows else torch.zeros_like(decay[:, 0])


@dataclass
class Drift:
    """The record of a training run (`run`: losses, gradient norms) and its gates. first: the number of its first step.
    quantiles [steps, 5]: the 0, 10, 50, 90 and 100% quantiles of each step's `exponents`."""

    op: str
    kernel: str
    run: Run = field(default_factory=Run)
    quantiles: list[list[float]] = field(default_factory=list)
    first: int = 0

    @property
    def lost(self) -> list[bool]:
        """Whether the loss or gradient norm of each step was not finite."""
        skipped = set(self.run.skipped)
        return [n in skipped for n in range(len(self.run.losses))]

    @property
    def predicted(self) -> list[bool]:
        """Whether the law predicts that the faulty kernel fails in each step."""
        return [q[-1] > LIMIT for q in self.quantiles]

    def share(self, window: int = 20) -> list[float]:
        """Return the fraction of `lost` steps in consecutive windows of `window` steps."""
        lost = self.lost
        parts = [lost[n : n + window] for n in range(0, len(lost), window)]
        return [sum(part) / len(part) for part in parts]


def follow(
    model: LanguageModel,
    drift: Drift,
    compute: Callable[..., Output],
    batch: Callable,
    *,
    scheme: str = "first-row",
    bound: float | None = None,
    **options,
) -> Drift:
    """Train a model in place with `compute` as its mixer's operator; record losses and gates in `drift` and return it.

    scheme: the scheme whose exponents are recorded, as in `exponents`. bound: lower clamp of the log decays. batch,
        options: arguments of `models.train`.
    """
    mixer, op = model.blocks[0].time, drift.op
    if op in RIGHT:
        own, at = mixer.operator, OPERATORS[op].names.index(OPERATORS[op].decay)

        def watched(*x: Tensor):
            decay = x[at] if bound is None else x[at].clamp(min=bound)
            largest = exponents(op, decay.detach(), scheme).flatten()
            drift.quantiles.append(largest.quantile(largest.new_tensor(QUANTILES)).tolist())
            return compute(*x[:at], decay, *x[at + 1 :])

        mixer.operator = watched
    try:
        drift.run = train(model, batch, cosine=False, **options)
    finally:
        if op in RIGHT:
            mixer.operator = own
    return drift
