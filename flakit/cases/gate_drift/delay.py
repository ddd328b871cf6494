"""Train models on synthetic data on which their gates drift: predict the token two steps back (the task `Delay`)."""

import copy
from typing import NamedTuple

from ...models import Delay, LanguageModel
from ...numerics.arguments import one_of
from .. import padding
from .watched import LIMIT, RIGHT, Drift, T, faulty, follow

SIZE = 4
"""Sequences per step."""
LEARNING_RATE = {"gsa": 0.02, "rwkv6": 0.03, "attention": 0.02}
WARMUP = 6  # steps
PROJECTION = {"gsa": "blocks.0.time.f_proj", "rwkv6": "blocks.0.time.w"}
"""By operator, the name of the module that computes the gates."""
KERNELS = {
    "faulty": "GSA: padding that forgets nothing; RWKV6: blocks anchored at their first row",
    "clamped": "the faulty one behind the thread's stop-gap, |f| < 20 or |w| < 12",
    "right": "flakit's own",
}


def model(op: str = "gsa", *, dim: int = 32, seed: int = 0) -> LanguageModel:
    """Return an untrained model of one layer, heads of 16. Raises ValueError unless op is in `LEARNING_RATE`."""
    one_of("op", op, LEARNING_RATE)
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
    """Train on `Delay` with one of `KERNELS` and watch the gates. Return the trained model and its `Drift`.

    lr: constant after a short warm-up, default `LEARNING_RATE`. clip: largest gradient norm. dim: the model's width.
        tokens: per sequence, `T`, or another number with tokens mod 64 = 56, for which `law` holds too.
    start: a model to continue from, with other data; it is not changed. seconds: time limit of the training. Raises
        ValueError for an unknown kernel or operator.
    """
    one_of("kernel", kernel, KERNELS)
    trained, record = model(op, dim=dim, seed=seed) if start is None else copy.deepcopy(start), Drift(op, kernel)
    trained.to(device)
    follow(
        trained,
        record,
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
    return trained, record


def parts(model: LanguageModel) -> list[str]:
    """Return the names of the model's parts for `reinitialised`: the layer's modules, and the modules around it."""
    names = (name.split(".") for name, _ in model.named_parameters())
    return list(dict.fromkeys(".".join(name[: 4 if name[0] == "blocks" else 1]) for name in names))


def reinitialised(trained: LanguageModel, part: str, op: str = "gsa", *, seed: int = 100) -> LanguageModel:
    """Return a copy of a model of `op` with one part re-initialised. Raises ValueError unless it is among `parts`."""
    one_of("part", part, parts(trained))
    result = copy.deepcopy(trained)
    new = model(op, dim=trained.embedding.embedding_dim, seed=seed)
    fresh = {name: p for name, p in new.state_dict().items() if f"{name}.".startswith(f"{part}.")}
    result.load_state_dict(fresh, strict=False)
    return result


class Attempt(NamedTuple):
    """How a training went on after one part (`part`) was re-initialised: 0 in `lost` means that it is cured."""

    part: str
    lost: float
    """Fraction of non-finite steps."""
    exponent: float
    """The faulty kernel's largest exponent in the first step; the step fails if it is above `LIMIT`."""
    loss: float
    """Mean loss of the last ten steps; NaN if the forward pass fails too."""


def attempts(trained: LanguageModel, op: str = "gsa", *, steps: int = 20, seed: int = 0) -> list[Attempt]:
    """Find which part's re-initialisation cures a trained model: continue with the faulty kernel for each of `parts` in
    turn, and for none. Return an `Attempt` each, the fewest failed steps first."""
    rows = []
    for part in ("nothing", *parts(trained)):
        start = trained if part == "nothing" else reinitialised(trained, part, op)
        _, record = drift(op, start=start, steps=steps, seed=seed, progress=False)
        loss = sum(record.run.losses[-10:]) / len(record.run.losses[-10:])
        rows.append(Attempt(part, sum(record.lost) / steps, record.quantiles[0][-1], loss))
    return sorted(rows, key=lambda row: (row.lost, row.exponent))


def law(op: str = "gsa") -> float:
    """Return the log decay at which a step fails: a mean of -1.848 over 48 tokens (GSA), -88.72 at one (RWKV6)."""
    return -padding.law(T) if op == "gsa" else -LIMIT
