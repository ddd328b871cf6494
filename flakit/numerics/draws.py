"""Random distributions of an operator's tensors: how `flakit.inputs` draws them, and how a standalone script does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from .arguments import plain, real_tensor, shown

Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Draws float64 numbers of a shape whose first axis is time."""


@dataclass(frozen=True)
class Draw:
    """The distribution of one tensor.

    sample: draws the numbers, a `Sampler`. script: a PyTorch expression for it, with `{shape}` in place
    of the sizes; "" if there is none. stream: the tensor whose random numbers it shares, "" for its own.
    """

    sample: Sampler
    script: str = ""
    stream: str = ""


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(logsigmoid(x))


def logsigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -x)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw vectors along the last axis, uniform in direction, of length 1."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _written_back(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    (gate,) = rng.spawn(1)  # a separate stream, so that a longer T continues a shorter one
    return unit(rng, shape) * sigmoid(gate.standard_normal(shape))


def _softmax(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = np.exp(rng.standard_normal(shape))
    return x / x.sum(-1, keepdims=True)


WORDS: Mapping[str, tuple[str, Draw]] = {
    "normal": (
        "standard normal",
        Draw(lambda rng, shape: rng.standard_normal(shape), "torch.randn({shape})"),
    ),
    "unit": (
        "a vector of length 1 along the last axis",
        Draw(unit, "torch.nn.functional.normalize(torch.randn({shape}), dim=-1)"),
    ),
    "sigmoid": (
        "sigmoid of a standard normal, between 0 and 1",
        Draw(lambda rng, shape: sigmoid(rng.standard_normal(shape)), "torch.randn({shape}).sigmoid()"),
    ),
    "softmax": ("softmax of a standard normal over the last axis", Draw(_softmax, "torch.randn({shape}).softmax(-1)")),
}
"""The draws by name, each with its meaning."""

NORMAL, UNIT, SIGMOID, SOFTMAX = (draw for _, draw in WORDS.values())
REMOVAL_KEY = Draw(
    lambda rng, shape: -unit(rng, shape), "-torch.nn.functional.normalize(torch.randn({shape}), dim=-1)", "a"
)
WRITTEN_BACK = Draw(_written_back, "-a * torch.rand({shape})", "a")
"""RWKV7's a = -κ̂ and b = κ̂ sigmoid(x), κ̂ of length 1 in each head: they share their key."""
ONE_MINUS_DECAY = Draw(lambda rng, shape: sigmoid(-rng.standard_normal(shape)), "torch.randn({shape}).sigmoid()", "g")
"""HGRN2's k = 1 - e^g where g = logsigmoid(x)."""


def uniform(low: float, high: float) -> Draw:
    """Return the uniform distribution of [low, high)."""
    return Draw(lambda rng, shape: rng.uniform(low, high, shape), f"torch.empty({{shape}}).uniform_({low}, {high})")


def recorded(x: Tensor | np.ndarray, axes: list[str]) -> Draw:
    """Return a `Draw` of recorded numbers x: read from a random start in time, cyclically, cut to the requested sizes.
    axes: the letters of x's axes. Axes other than time are read from their beginning."""
    drawn = sorted(range(len(axes)), key=lambda n: axes[n] != "T")
    values = torch.as_tensor(x).detach().to("cpu", torch.float64).permute(drawn).numpy()

    def sample(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = values
        for axis, size in enumerate(shape):
            start = rng.integers(values.shape[axis]) if axis == 0 else 0
            x = np.take(x, range(start, start + size), axis, mode="wrap")
        return x

    return Draw(sample)


def draw(name: str, choice: object, axes: list[str]) -> Draw:
    """Return the `Draw` that a description chooses for a tensor of these axes. Raises ValueError if there is none.

    choice: a name in `WORDS`, a pair (low, high) for a uniform one, a tensor of recorded numbers, a function
    (generator, shape with time first) -> array, or a `Draw`.
    """
    if isinstance(choice, Draw):
        return choice
    if isinstance(choice, str) and choice in WORDS:
        return WORDS[choice][1]
    if isinstance(choice, (Tensor, np.ndarray)):
        x = real_tensor(name, torch.as_tensor(choice))
        if x.ndim != len(axes) or not x.numel():
            raise ValueError(f"{name}: expected a tensor [{', '.join(axes)}], got {shown(choice)}")
        return recorded(x, axes)
    if isinstance(choice, (tuple, list)) and len(choice) == 2:
        low, high = (plain(x) for x in choice)
        ends = all(isinstance(x, Real) and not isinstance(x, bool) for x in (low, high))
        if ends and -math.inf < low <= high < math.inf:
            return uniform(float(low), float(high))
    if callable(choice):
        return Draw(choice)
    expected = f"one of {', '.join(WORDS)}, a pair (low, high), a tensor [{', '.join(axes)}] or a function"
    raise ValueError(f"{name}: expected {expected}, got {shown(choice)}")
