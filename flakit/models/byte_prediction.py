"""The byte-level experiment: each mixer, from both initialisations, learns to predict the next byte of Python source.

    model, run, held_out = learn("rwkv7", "published", **here())

All models share width, layers, optimizer, learning rate and data, and none is tuned. The experiment shows that models
on these operators train, not which operator is best. Notebook 13 and data/h200_language_models.json come from it.
"""

from dataclasses import dataclass, replace

import torch

from .corpus import Corpus, standard_library
from .language_model import LanguageModel
from .training import Run, mean_loss, train


@dataclass(frozen=True)
class Size:
    """The sizes of a model, its data and its training. head_size: also GSA's number of slots. size: sequences per
    step."""

    dim: int
    layers: int
    head_size: int
    T: int
    size: int
    steps: int
    lr: float
    modules: int | None = None
    """The number of standard-library modules in the corpus; None for all."""

    @property
    def tokens(self) -> int:
        """The number of tokens per training step."""
        return self.T * self.size


SMALL = Size(dim=32, layers=1, head_size=16, T=64, size=8, steps=100, lr=1e-2, modules=40)
"""A training that takes seconds on a CPU."""
LARGE = Size(dim=256, layers=4, head_size=64, T=1024, size=16, steps=1000, lr=2e-3)
"""A training that takes less than a minute on a GPU, in bfloat16."""


def corpora(size: Size) -> tuple[Corpus, Corpus]:
    """Return the text to train on, and the held-out text: the last tenth, which holds other modules."""
    return standard_library(size.modules).split(0.1)


def here() -> dict:
    """Return arguments of `learn` that suit this machine: `LARGE`, cut to 300 steps, in bfloat16 on a GPU; without one,
    `SMALL` on the CPU. Either takes seconds."""
    if torch.cuda.is_available():
        return {"size": replace(LARGE, steps=300), "device": "cuda", "autocast": torch.bfloat16}
    return {"size": SMALL, "device": "cpu"}


def model(mixer: str, initialisation: str, size: Size, *, seed: int = 0) -> LanguageModel:
    """Return an untrained model on the CPU. mixer, initialisation: as in `LanguageModel`."""
    options = {"slots": size.head_size} if mixer == "gsa" else {}
    sizes = {"dim": size.dim, "layers": size.layers, "head_size": size.head_size}
    return LanguageModel(Corpus.vocab, mixer=mixer, initialisation=initialisation, seed=seed, **sizes, **options)


def learn(
    mixer: str,
    initialisation: str,
    size: Size,
    *,
    seed: int = 0,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
    progress: bool = True,
) -> tuple[LanguageModel, Run, float]:
    """Train one model. Return it, its `Run`, and its mean loss on the held-out text, in nats per byte.

    seed: of the weights and the training data; the held-out text is always the same. autocast: as in `train`."""
    trained, (text, held_out) = model(mixer, initialisation, size, seed=seed).to(device), corpora(size)
    options = {"steps": size.steps, "lr": size.lr, "seed": seed, "label": f"{mixer}, {initialisation}"}
    run = train(trained, text.batch, size=size.size, T=size.T, autocast=autocast, progress=progress, **options)
    return trained, run, mean_loss(trained, held_out.batch, size.T, size=size.size, autocast=autocast, seed=1000)
