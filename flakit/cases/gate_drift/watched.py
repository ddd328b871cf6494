"""A training whose gates are watched: the operator with a fault, the law over its exponents, and what came of it."""

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
"""Tokens of a sequence of `Delay`: T mod 64 = 56, as at the story's 3000 tokens."""
LIMIT = LN_MAX[torch.float32]
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
RIGHT = {"gsa": chunk_gsa, "rwkv6": chunk_rwkv6}


class Output(NamedTuple):
    o: Tensor


def faulty(op: str, tokens: int = T, scheme: str = "first-row") -> Callable[..., Output]:
    """The operator with a fault, for sequences of that many tokens; called like flakit's own.

    GSA: padding that forgets nothing. RWKV6: its chunks anchored by `scheme`, "first-row" (bug A) or "none" (the
    chunk's start), two of `anchor.SCHEMES`.
    """
    call = operator(op, padding.products(tokens) if op == "gsa" else partial(Products, scheme=scheme))
    return lambda *x: Output(call(*x))


def exponents(op: str, decay: Tensor, scheme: str = "first-row", *, chunk: int = 64, block: int = 16) -> Tensor:
    """The law: the exponents that the fault takes in one step, which is lost if any of them is above `LIMIT`.

    decay: GSA's g or RWKV6's w, [B, T, H, K or M]. scheme: RWKV6's, as `faulty` takes it.
    Returns the largest of each sequence, head and channel, [B, H, *].
    """
    tokens = decay.shape[1]
    if op == "gsa":
        # Gates are not positive: of the last chunk's anchors, the one after the most tokens has the largest exponent.
        most = padding.anchors(tokens, chunk=chunk, block=block)[:1]
        start = tokens - tokens % chunk
        return -decay[:, start : start + (most[0].tokens if most else 0)].sum(1)
    if scheme == "none":
        return torch.stack([-part.sum(1) for part in decay.split(chunk, 1)]).amax(0)
    rows = [p for p in range(block, tokens, block) if p % chunk]
    return -decay[:, rows].amin(1) if rows else torch.zeros_like(decay[:, 0])


@dataclass
class Drift:
    """A training and its gates. first: the number of its first step.

    quantiles: of the exponents of each step, [steps, 5]: 0, 10, 50, 90 and 100%.
    """

    op: str
    kernel: str
    run: Run = field(default_factory=Run)
    quantiles: list[list[float]] = field(default_factory=list)
    first: int = 0

    @property
    def lost(self) -> list[bool]:
        """Which steps were not finite."""
        skipped = set(self.run.skipped)
        return [n in skipped for n in range(len(self.run.losses))]

    @property
    def predicted(self) -> list[bool]:
        """Which steps the law says the faulty kernel loses."""
        return [q[-1] > LIMIT for q in self.quantiles]

    def share(self, window: int = 20) -> list[float]:
        """Share of lost steps in each window of that many, one after another."""
        lost = self.lost
        parts = [lost[n : n + window] for n in range(0, len(lost), window)]
        return [sum(part) / len(part) for part in parts]


def follow(
    model: LanguageModel,
    found: Drift,
    compute: Callable[..., Output],
    batch: Callable,
    *,
    scheme: str = "first-row",
    bound: float | None = None,
    **how,
) -> Drift:
    """Train a model in place, its mixer's operator being `compute`, and fill in what happened.

    scheme: whose exponents are watched, as `exponents` takes it. bound: a clamp below the log decays.
    how: as `models.train` takes it.
    """
    mixer, op = model.blocks[0].time, found.op
    if op in RIGHT:
        own, at = mixer.operator, OPERATORS[op].names.index(OPERATORS[op].decay)

        def watched(*x: Tensor):
            decay = x[at] if bound is None else x[at].clamp(min=bound)
            largest = exponents(op, decay.detach(), scheme).flatten()
            found.quantiles.append(largest.quantile(largest.new_tensor(QUANTILES)).tolist())
            return compute(*x[:at], decay, *x[at + 1 :])

        mixer.operator = watched
    try:
        found.run = train(model, batch, cosine=False, **how)
    finally:
        if op in RIGHT:
            mixer.operator = own
    return found
