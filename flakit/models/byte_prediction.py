"""The byte-level experiment: each mixer, from both initialisations, learns to say the next byte of Python's own source.

    model, run, held_out = learn("rwkv7", "published", **here())

All have the same width, layers, optimizer, learning rate and data, and nothing is tuned for any of them: it shows that
models on these operators train, not which operator is best. Behind notebook 13 and data/h200_language_models.json.
"""

from dataclasses import dataclass, replace

import torch

from .corpus import Corpus, standard_library
from .language_model import LanguageModel
from .training import Run, mean_loss, train


@dataclass(frozen=True)
class Size:
    """A model, its data and its training. head_size is also the number of GSA's slots. size: sequences a step."""

    dim: int
    layers: int
    head_size: int
    T: int
    size: int
    steps: int
    lr: float
    modules: int | None = None
    """Only the first so many of the standard library's."""

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.T * self.size


SMALL = Size(dim=32, layers=1, head_size=16, T=64, size=8, steps=100, lr=1e-2, modules=40)
"""Seconds on a CPU."""
LARGE = Size(dim=256, layers=4, head_size=64, T=1024, size=16, steps=1000, lr=2e-3)
"""Under a minute on a GPU, in bfloat16."""


def corpora(size: Size) -> tuple[Corpus, Corpus]:
    """The text to train on, and its last tenth, other modules, which is held out."""
    return standard_library(size.modules).split(0.1)


def here() -> dict:
    """What `learn` takes for a run of seconds on this machine: `LARGE`, cut to 300 steps, in bfloat16 where there is a
    GPU; else `SMALL` on the CPU."""
    if torch.cuda.is_available():
        return {"size": replace(LARGE, steps=300), "device": "cuda", "autocast": torch.bfloat16}
    return {"size": SMALL, "device": "cpu"}


def model(mixer: str, initialisation: str, size: Size, *, seed: int = 0) -> LanguageModel:
    """A model before training, on the CPU. mixer, initialisation: as `LanguageModel` takes them."""
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
    """Train one: the model, what happened, and its mean loss on the text held out, in nats a byte.

    seed: of the weights and the training data; the text held out is the same for all. autocast: as in `train`.
    """
    made, (text, held_out) = model(mixer, initialisation, size, seed=seed).to(device), corpora(size)
    how = {"steps": size.steps, "lr": size.lr, "seed": seed, "label": f"{mixer}, {initialisation}"}
    run = train(made, text.batch, size=size.size, T=size.T, autocast=autocast, progress=progress, **how)
    return made, run, mean_loss(made, held_out.batch, size.T, size=size.size, autocast=autocast, seed=1000)
