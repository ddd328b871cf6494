"""Rows behind the last offset: a packed batch is padded to a fixed length, and nobody writes its last rows.

Static shapes need padding: offsets [0, 60, 100] in a batch of 128 rows. A kernel has a program for each sequence, none
for rows 100 … 127, and its results come from `torch.empty`. So those rows hold whatever the memory held before, and a
weight's gradient, dW = x^T dk, sums over all rows.

As told (flash-linear-attention PR #892; this kit's own kernels on a GPU, November 2026): gradients that are NaN in some
runs and not in others. As measured: outputs up to 2e38 and NaN in rows that no test looked at; the rows of the
sequences are right. Where the memory holds an earlier tensor everything is finite, and dW is wrong by a size that the
`law` predicts. The cure is one small kernel that reads the last offset and writes zeros behind it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.evaluate import evaluate
from ...numerics.inputs import inputs
from ..knobs import Range
from ..laws import Row

CHANNELS = 16
"""Of keys and of the layer's inputs: dW is [16, 16]."""
MEMORY = ("zeros", "an earlier tensor", "NaN")
"""What the memory of a result may hold before it is written."""


def written(tokens: int, seed: int = 0) -> Tensor:
    """dk of RWKV6, [tokens, CHANNELS]: the rows that a kernel writes."""
    x = inputs("rwkv6", T=tokens, H=1, K=CHANNELS, decay=-0.5, seed=seed, cu_seqlens=[0, tokens // 3, tokens])
    return evaluate("rwkv6", x, grad_seed=seed)["dk"][0, :, 0]


def run(
    dk: Tensor, padding: int, memory: str = "NaN", times: float = 1.0, *, zeroed: bool = False, seed: int = 0
) -> Tensor:
    """dk as it comes back, [tokens + padding, CHANNELS]: the given rows, and what the memory held behind them.

    memory: one of `MEMORY`; times: the earlier tensor's RMS, in units of dk's. zeroed: the cure.
    """
    if memory not in MEMORY:
        raise ValueError(f"memory: expected one of {', '.join(MEMORY)}, got {memory!r}")
    behind = torch.zeros(padding, CHANNELS)
    if memory == "NaN":
        behind.fill_(math.nan)
    elif memory == "an earlier tensor":
        behind = torch.randn(padding, CHANNELS, generator=_generator(seed + 1)) * times * dk.square().mean().sqrt()
    return torch.cat((dk, torch.zeros_like(behind) if zeroed else behind))


def weight_gradient(dk: Tensor, seed: int = 0) -> Tensor:
    """dW = x^T dk of the layer that made the keys, over all rows; x [rows, CHANNELS] is normal."""
    return torch.randn(len(dk), CHANNELS, generator=_generator(seed)).double().T @ dk.double()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law(tokens: int, padding: int, memory: str = "NaN", times: float = 1.0) -> float:
    """The relative L2 error of dW: times sqrt(padding / tokens) where an earlier tensor is in the memory.

    Both parts of dW are sums of independent products, so their sizes are as the roots of their numbers of rows.

    >>> law(100, 25, "an earlier tensor", times=2.0)
    1.0
    """
    if memory == "an earlier tensor":
        return times * math.sqrt(padding / tokens)
    return 0.0 if memory == "zeros" or not padding else math.inf


@dataclass(frozen=True)
class Shown:
    """dk as it comes back, and the weight's gradient made of it."""

    dk: Tensor
    """[rows, CHANNELS]"""
    tokens: int
    """Rows that belong to a sequence."""
    found: Tensor
    """dW [CHANNELS, CHANNELS] of all rows."""
    true: Tensor
    """dW of the sequences' rows."""

    @property
    def lost(self) -> Tensor:
        """Which elements of dk nobody wrote and are not 0, [rows, CHANNELS]."""
        return (torch.arange(len(self.dk)) >= self.tokens)[:, None] & (self.dk != 0)

    @property
    def error(self) -> float:
        """Relative L2 of dW, inf where it is no number."""
        error = ((self.found - self.true).norm() / self.true.norm()).item()
        return math.inf if math.isnan(error) else error


@functools.lru_cache(maxsize=4)
def show(*, tokens: int, padding: int, memory: str, times: float, zeroed: bool, seed: int) -> Shown:
    """What `at` measures."""
    dk = written(tokens, seed)
    back = run(dk, padding, memory, times, zeroed=zeroed, seed=seed)
    true = torch.cat((dk, torch.zeros(padding, CHANNELS)))
    return Shown(back, tokens, weight_gradient(back, seed), weight_gradient(true, seed))


def at(
    *,
    tokens: Annotated[int, Range(10, 500, 10)] = 100,
    padding: Annotated[int, Range(0, 256, 4)] = 28,
    memory: Annotated[str, MEMORY] = "an earlier tensor",
    times: Annotated[float, Range(0.01, 1e6, log=True)] = 1.0,
    zeroed: bool = False,
    seed: int = 0,
) -> list[Row]:
    """Packed sequences of so many tokens and padding behind them, whose memory held something before."""
    shown = show(tokens=tokens, padding=padding, memory=memory, times=times, zeroed=zeroed, seed=seed)
    predicted = 0.0 if zeroed else law(tokens, padding, memory, times)
    how = "zeroed" if zeroed else memory
    what = f"{tokens} tokens, {padding} rows of padding, {how}: error of dW"
    return [Row(what, math.nan, predicted, shown.error, 0.3)]


def reproduce() -> list[Row]:
    """The error of a weight's gradient, by what the memory held, with and without the cure."""
    rows = [row for memory in MEMORY for row in at(memory=memory)]
    for tokens, padding, times in ((400, 112, 1.0), (100, 28, 100.0)):
        rows += at(tokens=tokens, padding=padding, times=times)
    return rows + at(memory="NaN", zeroed=True)
