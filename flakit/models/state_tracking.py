"""The state-tracking experiment: which recurrence can follow permutations that do not commute, and for how long?

    model, run, rows = follow("RWKV7, edit 2", items=3)

A model trains on `Permutations` with sequences that grow to 32 tokens, and is tested at up to 512. All models share
width, heads, optimizer and data; those of four layers train twice as long. Notebook 10 and data/state_tracking.json
come from it.
"""

from functools import partial

from ..ops.gsa import chunk_gsa
from ..ops.rwkv6 import chunk_rwkv6
from ..ops.rwkv7 import chunk_rwkv7
from .language_model import LanguageModel
from .tasks import Permutations
from .training import Run, accuracy, train

LEARNT = 32
"""The number of tokens of the longest sequence in training."""
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
"""Test lengths in tokens; accuracy is taken over the second half of each."""
SIZES = {3: {"dim": 32, "steps": 300}, 5: {"dim": 64, "steps": 500}}
"""By the number of items, 3 (group S3) or 5 (S5), the width of the model and the training steps."""

_CHUNK = 16  # longer chunks would be mostly padding for short sequences
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
"""Models by the name in their rows: options of `LanguageModel`, the learning rate, and a factor `longer` on the steps
of `SIZES`. "edit" is the option of `flakit.models.rwkv7.RWKV7`."""


def model(name: str, items: int = 3, seed: int = 0) -> LanguageModel:
    """Return one of `MODELS`, untrained. Raises ValueError for an unknown name or number of items."""
    if name not in MODELS:
        raise ValueError(f"name: expected one of {'; '.join(MODELS)}, got {name!r}")
    if items not in SIZES:
        raise ValueError(f"items: expected one of {', '.join(map(str, SIZES))}, got {items!r}")
    options = {key: value for key, value in MODELS[name].items() if key not in ("lr", "longer")}
    return LanguageModel(Permutations(items).vocab, SIZES[items]["dim"], head_size=8, seed=seed, **options)


def follow(
    name: str, items: int = 3, seed: int = 0, *, steps: int | None = None, progress: bool = True
) -> tuple[LanguageModel, Run, list[dict]]:
    """Train one of `MODELS` on swaps of 3 or 5 items and test it. Return the model, its `Run`, and a row per test
    length: a dict with "length", "accuracy" and the training's settings.

    steps: default those of `SIZES`, twice as many for four layers. seed: of the weights and the training data; the test
    data is always the same. Accuracy is over 64 sequences; chance is 1 / items!."""
    trained, task = model(name, items, seed), Permutations(items)
    steps = SIZES[items]["steps"] * MODELS[name]["longer"] if steps is None else steps

    def length(step: int) -> int:
        return min(LEARNT, round(4 + 1.3 * LEARNT * step / steps))

    options = {"lr": MODELS[name]["lr"], "seed": seed, "progress": progress, "label": f"{name}, S{items}, seed {seed}"}
    run = train(trained, task.batch, steps=steps, size=32, T=length, **options)
    correct = accuracy(trained, task.batch, LENGTHS[-1], seed=1000)
    names = {"task": f"S{items}", "model": name, "seed": seed}
    loss = sum(run.losses[-10:]) / len(run.losses[-10:])
    training = {"steps": steps, "skipped": len(run.skipped), "loss": loss}
    rows = [{**names, "length": T, "accuracy": correct[T // 2 : T].mean().item(), **training} for T in LENGTHS]
    return trained, run, rows
