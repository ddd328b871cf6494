"""Case 3 in training: gates that drift until a kernel's fault is reached, and what brings the training back.

As told (flash-linear-attention issue #77): NaN in the gradients as training goes on, rare at first, then more and more
often; re-initialising the forget gate's projection cures it, re-initialising anything else does not.
As measured here: nothing has to push the gates. The task is to say the token two before (`Delay`), all older tokens are
noise, and forgetting faster is better, so that AdamW lowers the log decays step by step. A step is lost as soon as one
exponent that the faulty kernel takes passes ln(max) = 88.72:

    GSA, the fault of `padding`     minus the gates of the last chunk's first tokens, summed (48 of them at T = 56)
    RWKV6, bug A of `anchor`        minus the decay of one token, at the first row of a block inside a chunk

Which sequence does it depends on its tokens, hence "rare at first". A lost step is skipped, as trainers with a
non-finite guard do, and so is any step that would have turned back: the share of lost steps grows, for GSA to all.
The projection that makes the gates, f_proj (RWKV6: w), re-initialised brings the training back, until the gates have
drifted again. In GSA so do the norms that it sees everything through, which leaves the gates just inside the limit; of
the other parameters none does. The thread's clamp |f| < 20 changes nothing, |w| < 12 rules bug A out. The right kernel
on the same data loses no step, nor does softmax attention, which has no gates.

The one knob that hurries is the learning rate, `LEARNING_RATE`: several times a usual one, and held. At a quarter of it
GSA loses its first step after 2680 instead of some 200 (data/gate_drift.json), and then goes the same way. RWKV6 gets
there with three seeds of four. A wider GSA on the story's 3000 tokens at a rate of 0.002, on a GPU, loses its first
step after some 3000 and soon all of them; with the right kernel the same gates drift on, to three times the limit, and
no step is lost (data/h200_gate_drift.json).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import Delay, LanguageModel, Run, train
from ..ops.gsa import chunk_gsa
from ..ops.rwkv6 import chunk_rwkv6
from . import padding
from .anchor.operators import OPERATORS
from .anchor.schemes import Products
from .anomaly import operator
from .laws import LN_MAX

T, SIZE = 56, 4
"""Tokens a sequence and sequences a step: T mod 64 = 56, as at the story's 3000 tokens."""
LEARNING_RATE = {"gsa": 0.02, "rwkv6": 0.03, "attention": 0.02}
WARMUP = 6  # steps
PROJECTION = {"gsa": "blocks.0.time.f_proj", "rwkv6": "blocks.0.time.w"}
"""The parameters that make the gates."""
KERNELS = {
    "faulty": "GSA: padding that forgets nothing; RWKV6: blocks anchored at their first row",
    "clamped": "the faulty one behind the thread's stop-gap, |f| < 20 or |w| < 12",
    "right": "flakit's own",
}
LIMIT = LN_MAX[torch.float32]
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class _Output(NamedTuple):
    o: Tensor


_RIGHT = {"gsa": chunk_gsa, "rwkv6": chunk_rwkv6}


def faulty(op: str, tokens: int = T) -> Callable[..., _Output]:
    """The operator with the fault of `KERNELS`, for sequences of that many tokens; called like flakit's own."""
    call = operator(op, padding.products(tokens) if op == "gsa" else partial(Products, scheme="first-row"))
    return lambda *x: _Output(call(*x))


def exponents(op: str, decay: Tensor, *, chunk: int = 64, block: int = 16) -> Tensor:
    """The law: the exponents that the fault takes in one step, which is lost if any of them is above `LIMIT`.

    decay: GSA's g or RWKV6's w, [B, T, H, K or M]. Returns the largest of each sequence, head and channel, [B, H, *].
    """
    tokens = decay.shape[1]
    if op == "gsa":
        # Gates are not positive: of the last chunk's anchors, the one after the most tokens has the largest exponent.
        most = padding.anchors(tokens, chunk=chunk, block=block)[:1]
        start = tokens - tokens % chunk
        return -decay[:, start : start + (most[0].tokens if most else 0)].sum(1)
    rows = [p for p in range(block, tokens, block) if p % chunk]
    return -decay[:, rows].amin(1) if rows else torch.zeros_like(decay[:, 0])


@dataclass
class Drift:
    """A training and its gates. quantiles: of the exponents of each step, [steps, 5]: 0, 10, 50, 90 and 100%."""

    op: str
    kernel: str
    run: Run = field(default_factory=Run)
    quantiles: list[list[float]] = field(default_factory=list)

    @property
    def lost(self) -> list[bool]:
        """Which steps were not finite, and skipped."""
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


def model(op: str = "gsa", *, dim: int = 32, seed: int = 0) -> LanguageModel:
    """One layer with heads of 16, before training. op: "gsa", "rwkv6", or "attention" as the control."""
    if op not in LEARNING_RATE:
        raise ValueError(f"op: expected one of {', '.join(LEARNING_RATE)}, got {op!r}")
    return LanguageModel(Delay().vocab, dim=dim, layers=1, mixer=op, head_size=16, seed=seed)


def drift(
    op: str = "gsa",
    kernel: str = "faulty",
    *,
    steps: int = 280,
    seed: int = 0,
    lr: float | None = None,
    clip: float | None = 1.0,
    dim: int = 32,
    tokens: int = T,
    start: LanguageModel | None = None,
    device: str = "cpu",
    seconds: float | None = None,
    progress: bool = True,
) -> tuple[LanguageModel, Drift]:
    """Train on `Delay` with one of `KERNELS` and watch the gates: the trained model, and what happened.

    lr: held after a short warm-up, default `LEARNING_RATE`. clip: of the gradient's norm.
    dim: the model's width. tokens: a sequence, `T` or another with tokens mod 64 = 56 for the same law.
    start: a model to go on from, with other data; it is not changed. seconds: stop by then, whatever `steps` says.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    made, found = model(op, dim=dim, seed=seed) if start is None else copy.deepcopy(start), Drift(op, kernel)
    made.to(device)
    if op != "attention":
        at, bound = OPERATORS[op].names.index(OPERATORS[op].decay), padding.bound(op)
        compute = _RIGHT[op] if kernel == "right" else faulty(op, tokens)

        def watched(*x: Tensor):
            decay = x[at].clamp(min=bound) if kernel == "clamped" else x[at]
            largest = exponents(op, decay.detach()).flatten()
            found.quantiles.append(largest.quantile(largest.new_tensor(QUANTILES)).tolist())
            return compute(*x[:at], decay, *x[at + 1 :])

        made.blocks[0].time.operator = watched
    found.run = train(
        made,
        Delay().batch,
        steps=steps,
        size=SIZE,
        T=tokens,
        lr=LEARNING_RATE[op] if lr is None else lr,
        warmup=WARMUP / steps if start is None else 0.0,
        cosine=False,
        clip=clip,
        seconds=seconds,
        seed=seed if start is None else seed + 1000,
        progress=progress,
        label=op if op == "attention" else f"{op}, {kernel} kernel",
    )
    if op != "attention":
        made.blocks[0].time.operator = _RIGHT[op]
    return made, found


def parts(model: LanguageModel) -> list[str]:
    """The names under which parameters can be re-initialised: modules of the layer, and what is around it."""
    names = (name.split(".") for name, _ in model.named_parameters())
    return list(dict.fromkeys(".".join(name[: 4 if name[0] == "blocks" else 1]) for name in names))


def reinitialised(trained: LanguageModel, part: str, op: str = "gsa", *, seed: int = 100) -> LanguageModel:
    """A copy of a model of `op` with one of its `parts` as a new model has it."""
    if part not in parts(trained):
        raise ValueError(f"part: expected one of {', '.join(parts(trained))}, got {part!r}")
    made = copy.deepcopy(trained)
    new = model(op, dim=trained.embedding.embedding_dim, seed=seed)
    fresh = {name: p for name, p in new.state_dict().items() if f"{name}.".startswith(f"{part}.")}
    made.load_state_dict(fresh, strict=False)
    return made


class Attempt(NamedTuple):
    """Training gone on with one part re-initialised."""

    part: str
    lost: float
    """Share of lost steps."""
    exponent: float
    """The largest of the first step; `LIMIT` is where it fails."""
    loss: float
    """Mean of the last ten steps; NaN where the forward pass is lost too."""


def attempts(trained: LanguageModel, op: str = "gsa", *, steps: int = 20, seed: int = 0) -> list[Attempt]:
    """Re-initialise one part of a model after another and go on with the faulty kernel: which one brings it back?"""
    rows = []
    for part in ("nothing", *parts(trained)):
        start = trained if part == "nothing" else reinitialised(trained, part, op)
        _, found = drift(op, start=start, steps=steps, seed=seed, progress=False)
        loss = sum(found.run.losses[-10:]) / len(found.run.losses[-10:])
        rows.append(Attempt(part, sum(found.lost) / steps, found.quantiles[0][-1], loss))
    return sorted(rows, key=lambda row: (row.lost, row.exponent))


def law(op: str = "gsa") -> float:
    """The log decay at which a step is lost: -1.848 a token on average over 48 tokens (GSA), -88.72 at one (RWKV6)."""
    return -padding.law(T) if op == "gsa" else -LIMIT
