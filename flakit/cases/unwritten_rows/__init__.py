"""Rows behind the last offset: a packed batch is padded to a fixed length, and nobody writes its last rows.

Static shapes need padding: offsets [0, 60, 100] in a batch of 128 rows. A kernel has a program for each sequence, none
for rows 100 … 127, and allocates its results with `torch.empty`. So those rows hold the previous contents of the
memory, and a weight's gradient, dW = x^T dk, sums over all rows.

As reported (flash-linear-attention PR #892; this kit's own kernels on a GPU, November 2026): gradients that are NaN in
some runs and not in others. As measured: outputs up to 2e38 and NaN in rows that no test checks; the rows of the
sequences are right. If the memory holds an earlier tensor, all is finite, and dW has an error that the `law` predicts.
The cure is one small kernel that reads the last offset and writes zeros after it.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.evaluate import evaluate
from ...numerics.inputs import inputs
from ..knobs import Range
from ..laws import Measured, Row

CHANNELS = 16
"""Channels of the keys, and of the inputs x of the layer that computes them: dW is [16, 16]."""
MEMORY = ("zeros", "an earlier tensor", "NaN")
"""Possible contents of a result's memory before it is written."""


def written(tokens: int, seed: int = 0) -> Tensor:
    """Return dk of RWKV6 for random packed inputs, [tokens, CHANNELS]: the rows that a kernel writes."""
    x = inputs("rwkv6", T=tokens, H=1, K=CHANNELS, decay=-0.5, seed=seed, cu_seqlens=[0, tokens // 3, tokens])
    return evaluate("rwkv6", x, grad_seed=seed)["dk"][0, :, 0]


def run(
    dk: Tensor, padding: int, memory: str = "NaN", times: float = 1.0, *, zeroed: bool = False, seed: int = 0
) -> Tensor:
    """Return dk followed by unwritten padding rows, [tokens + padding, CHANNELS]. memory: what those hold, of `MEMORY`;
    ValueError for others. times: the earlier tensor's RMS relative to dk's. zeroed: True for 0 in those rows."""
    one_of("memory", memory, MEMORY)
    behind = torch.zeros(padding, CHANNELS)
    if memory == "NaN":
        behind.fill_(math.nan)
    elif memory == "an earlier tensor":
        behind = torch.randn(padding, CHANNELS, generator=_generator(seed + 1)) * times * dk.square().mean().sqrt()
    return torch.cat((dk, torch.zeros_like(behind) if zeroed else behind))


def weight_gradient(dk: Tensor, seed: int = 0) -> Tensor:
    """Return dW = x^T dk of the layer that computed the keys, over all rows of dk; x [rows, CHANNELS] is random."""
    return torch.randn(len(dk), CHANNELS, generator=_generator(seed)).double().T @ dk.double()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law(tokens: int, padding: int, memory: str = "NaN", times: float = 1.0) -> float:
    """Predict the relative L2 error of dW: times * sqrt(padding / tokens) with an earlier tensor in the memory.

    Both parts of dW are sums of independent products, so their norms grow with the root of their number of rows.

    >>> law(100, 25, "an earlier tensor", times=2.0)
    1.0
    """
    if memory == "an earlier tensor":
        return times * math.sqrt(padding / tokens)
    return 0.0 if memory == "zeros" or not padding else math.inf


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, dk with padding rows, and the weight's gradient dW = x^T dk, actual and true."""

    dk: Tensor
    """[rows, CHANNELS]"""
    tokens: int
    """Number of rows that belong to a sequence."""
    computed: Tensor
    """dW [CHANNELS, CHANNELS] of all rows."""
    true: Tensor
    """dW of the sequences' rows."""
    error: float
    """Relative L2 error of dW, inf if it is NaN."""

    @property
    def lost(self) -> Tensor:
        """Which elements of dk are unwritten and not 0, boolean [rows, CHANNELS]."""
        return (torch.arange(len(self.dk)) >= self.tokens)[:, None] & (self.dk != 0)


def show(
    *,
    tokens: Annotated[int, Range(10, 500, 10)] = 100,
    padding: Annotated[int, Range(0, 256, 4)] = 28,
    memory: Annotated[str, MEMORY] = "an earlier tensor",
    times: Annotated[float, Range(0.01, 1e6, log=True)] = 1.0,
    zeroed: bool = False,
    seed: int = 0,
) -> Shown:
    """Return the error of a weight's gradient dW beside the prediction of `law`, for packed sequences with rows of
    padding. memory, times, zeroed: as in `run`."""
    dk = written(tokens, seed)
    back = run(dk, padding, memory, times, zeroed=zeroed, seed=seed)
    right = torch.cat((dk, torch.zeros(padding, CHANNELS)))
    computed, true = (weight_gradient(each, seed) for each in (back, right))
    error = ((computed - true).norm() / true.norm()).nan_to_num(math.inf).item()
    predicted, contents = (0.0, "zeroed") if zeroed else (law(tokens, padding, memory, times), memory)
    what = f"{tokens} tokens, {padding} rows of padding, {contents}: error of dW"
    return Shown([Row(what, math.nan, predicted, error, 0.3)], back, tokens, computed, true, error)


def reproduce() -> list[Row]:
    """Return predicted and measured relative L2 errors of dW: with each of `MEMORY` in the padding rows, with more rows
    or larger contents, and with the padding rows zeroed."""
    rows = [row for memory in MEMORY for row in show(memory=memory).rows]
    for tokens, padding, times in ((400, 112, 1.0), (100, 28, 100.0)):
        rows += show(tokens=tokens, padding=padding, times=times).rows
    return rows + show(memory="NaN", zeroed=True).rows
