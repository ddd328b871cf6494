"""The state-tracking experiment: which recurrence can follow moves that do not commute, and for how long?

    model, run, rows = follow("RWKV7, edit 2", items=3)

A model learns `Permutations` on sequences that grow to 32 tokens; then it is asked along 512. All have the same
width, heads, optimizer and data; those of four layers learn twice as long. Behind notebook 10 and
data/state_tracking.json.
"""

from functools import partial

from ..ops.gsa import chunk_gsa
from ..ops.rwkv6 import chunk_rwkv6
from ..ops.rwkv7 import chunk_rwkv7
from .language_model import LanguageModel
from .tasks import Permutations
from .training import Run, accuracy, train

LEARNT = 32
"""Tokens of the longest sequence in training."""
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
"""Where the answers are judged: over the second half of each length."""
SIZES = {3: {"dim": 32, "steps": 300}, 5: {"dim": 64, "steps": 500}}
"""Width and training steps for S3 and S5."""

_CHUNK = 16  # a short sequence in long chunks is mostly padding
_SHALLOW = {
    "RWKV7, edit 2": {"mixer": "rwkv7", "edit": 2.0, "operator": partial(chunk_rwkv7, chunk_size=_CHUNK)},
    "RWKV7, edit 1": {"mixer": "rwkv7", "edit": 1.0, "operator": partial(chunk_rwkv7, chunk_size=_CHUNK)},
    "RWKV6": {"mixer": "rwkv6", "operator": partial(chunk_rwkv6, chunk_size=_CHUNK)},
    "GSA": {"mixer": "gsa", "operator": partial(chunk_gsa, chunk_size=_CHUNK)},
    "attention": {"mixer": "attention"},
}
_DEEP = {"layers": 4, "lr": 5e-3, "longer": 2}
MODELS = {name: {"layers": 1, "lr": 1e-2, "longer": 1} | options for name, options in _SHALLOW.items()} | {
    f"{name}, 4 layers": _DEEP | options for name, options in _SHALLOW.items() if name != "RWKV7, edit 2"
}
"""The models by the names their rows have: options of `LanguageModel`, the learning rate, and how many times the steps
of `SIZES` they get. "edit" is the option of `flakit.models.rwkv7.RWKV7`."""


def model(name: str, items: int = 3, seed: int = 0) -> LanguageModel:
    """One of `MODELS`, not trained yet."""
    if name not in MODELS:
        raise ValueError(f"name: expected one of {'; '.join(MODELS)}, got {name!r}")
    if items not in SIZES:
        raise ValueError(f"items: expected one of {', '.join(map(str, SIZES))}, got {items!r}")
    options = {key: value for key, value in MODELS[name].items() if key not in ("lr", "longer")}
    return LanguageModel(Permutations(items).vocab, SIZES[items]["dim"], head_size=8, seed=seed, **options)


def follow(
    name: str, items: int = 3, seed: int = 0, *, steps: int | None = None, progress: bool = True
) -> tuple[LanguageModel, Run, list[dict]]:
    """Train one of `MODELS` on swaps of 3 or 5 items and judge it: the model, the run, a row for each of `LENGTHS`.

    steps: default those of `SIZES`, twice as many for four layers. seed: of the weights and of the training data; the
    test data is the same for all. accuracy is over 64 sequences; a guess is right once in items! times.
    """
    made, task = model(name, items, seed), Permutations(items)
    steps = SIZES[items]["steps"] * MODELS[name]["longer"] if steps is None else steps

    def length(step: int) -> int:
        return min(LEARNT, round(4 + 1.3 * LEARNT * step / steps))

    how = {"lr": MODELS[name]["lr"], "seed": seed, "progress": progress, "label": f"{name}, S{items}, seed {seed}"}
    run = train(made, task.batch, steps=steps, size=32, T=length, **how)
    right = accuracy(made, task.batch, LENGTHS[-1], seed=1000)
    shown = {"task": f"S{items}", "model": name, "seed": seed}
    loss = sum(run.losses[-10:]) / len(run.losses[-10:])
    counted = {"steps": steps, "skipped": len(run.skipped), "loss": loss}
    rows = [{**shown, "length": T, "accuracy": right[T // 2 : T].mean().item(), **counted} for T in LENGTHS]
    return made, run, rows
