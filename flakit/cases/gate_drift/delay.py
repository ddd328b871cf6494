"""Gates that drift on synthetic data: the token two before, all older ones being noise (`Delay`)."""

import copy
from typing import NamedTuple

from ...models import Delay, LanguageModel
from .. import padding
from .watched import LIMIT, RIGHT, Drift, T, faulty, follow

SIZE = 4
"""Sequences a step."""
LEARNING_RATE = {"gsa": 0.02, "rwkv6": 0.03, "attention": 0.02}
WARMUP = 6  # steps
PROJECTION = {"gsa": "blocks.0.time.f_proj", "rwkv6": "blocks.0.time.w"}
"""The parameters that make the gates."""
KERNELS = {
    "faulty": "GSA: padding that forgets nothing; RWKV6: blocks anchored at their first row",
    "clamped": "the faulty one behind the thread's stop-gap, |f| < 20 or |w| < 12",
    "right": "flakit's own",
}


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
    follow(
        made,
        found,
        RIGHT.get(op) if kernel == "right" or op == "attention" else faulty(op, tokens),
        Delay().batch,
        bound=padding.bound(op) if kernel == "clamped" else None,
        steps=steps,
        size=SIZE,
        T=tokens,
        lr=LEARNING_RATE[op] if lr is None else lr,
        warmup=WARMUP / steps if start is None else 0.0,
        clip=clip,
        seconds=seconds,
        seed=seed if start is None else seed + 1000,
        progress=progress,
        label=op if op == "attention" else f"{op}, {kernel} kernel",
    )
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
