"""The state-tracking experiment: which recurrence can follow moves that do not commute, and for how long?

    run, rows = follow("RWKV7, edit 2", items=3)

One layer learns `Permutations` on sequences that grow to 32 tokens; then it is asked along 512. All models have the
same width, heads, optimizer and data. Behind notebook 07 and data/state_tracking.json.
"""

from functools import partial

import torch

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
CHUNK = 16  # a short sequence in long chunks is mostly padding

MODELS = {
    "RWKV7, edit 2": {"mixer": "rwkv7", "edit": 2.0, "operator": partial(chunk_rwkv7, chunk_size=CHUNK)},
    "RWKV7, edit 1": {"mixer": "rwkv7", "edit": 1.0, "operator": partial(chunk_rwkv7, chunk_size=CHUNK)},
    "RWKV6": {"mixer": "rwkv6", "operator": partial(chunk_rwkv6, chunk_size=CHUNK)},
    "GSA": {"mixer": "gsa", "operator": partial(chunk_gsa, chunk_size=CHUNK)},
    "attention": {"mixer": "attention"},
}
"""The models by the names their rows have; "edit" is the option of `flakit.models.rwkv7.RWKV7`."""

SIZES = {3: {"dim": 32, "steps": 300}, 5: {"dim": 64, "steps": 500}}
"""Width and training steps for S3 and S5."""


def model(name: str, items: int = 3, seed: int = 0) -> LanguageModel:
    """One of `MODELS`, not trained yet."""
    if name not in MODELS:
        raise ValueError(f"name: expected one of {', '.join(MODELS)}, got {name!r}")
    if items not in SIZES:
        raise ValueError(f"items: expected one of {', '.join(map(str, SIZES))}, got {items!r}")
    task = Permutations(items)
    return LanguageModel(task.vocab, SIZES[items]["dim"], layers=1, head_size=8, seed=seed, **MODELS[name])


def follow(
    name: str, items: int = 3, seed: int = 0, *, steps: int | None = None, progress: bool = True
) -> tuple[Run, list[dict]]:
    """Train one of `MODELS` on swaps of 3 or 5 items, and judge it: the run, and a row for each of `LENGTHS`.

    steps: default those of `SIZES`. seed: of the weights and of the data; the test data is the same for all.
    accuracy is over 64 sequences; a guess is right once in items! times.
    """
    made, task = model(name, items, seed), Permutations(items)
    steps = SIZES[items]["steps"] if steps is None else steps

    def length(step: int) -> int:
        return max(4, min(LEARNT, round(4 + 1.3 * LEARNT * step / steps)))

    label = f"{name}, S{items}, seed {seed}"
    run = train(made, task.batch, steps=steps, size=32, T=length, lr=1e-2, seed=seed, progress=progress, label=label)
    right = accuracy(made, task.batch, LENGTHS[-1], seed=1000)
    shown = {"task": f"S{items}", "model": name, "seed": seed}
    final = torch.tensor(run.losses[-10:]).mean().item()
    counted = {"steps": steps, "skipped": len(run.skipped), "loss": final, "seconds": run.seconds}
    return run, [{**shown, "length": T, "accuracy": right[T // 2 : T].mean().item(), **counted} for T in LENGTHS]
