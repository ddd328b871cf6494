"""A test that cannot fail: its decays forget so fast that an operator without a memory passes.

The usual practice: the operator is tested against a reference, on random inputs, with a tolerance. As measured: a test
of RWKV7 in flash-linear-attention uses log decays w uniform in [-8, -6], e^-7 per token. Only the delta rule itself
carries anything over to the next token. An implementation that reads a token and the two before it alone has a relative
L2 error of 8e-4 in o, far below the tolerance of 0.005. With the model's decays its error is 40%.

The law: apart from the decay, b (a^T S) carries a token over, once per step. With a of length 1 and b = -a sigmoid(x)
each step leaves sqrt(E[sigmoid(x)^2] / K) of it, 0.1 for K = 32. An operator that reads m tokens omits what is m steps
old, so its error is that number to the power m.

An operator that resets its state every 64 tokens resembles one that loses a chunk's state. Its recorded error is 39%,
at decays that were not recorded. `reset_law` gives 13% with decays by the model's formula of random x, 50 to 60% with
the slow decays of a fresh model, and 1% with decays in [-8, -6].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...numerics.inputs import inputs as make_inputs
from ...ops.rwkv7 import reference
from ..blind_measure import TOLERANCE
from ..knobs import Range
from ..laws import Measured, Row

SIGMOID_SQUARED = 0.2934
"""E[sigmoid(x)^2] for a standard normal x."""


def inputs(*, fast: bool = True, T: int = 64, H: int = 2, K: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Draw RWKV7 inputs, float64, B = 1. fast: log decays uniform in [-8, -6], else by RWKV7's formula of random x."""
    decay = None
    if fast:
        decay = torch.from_numpy(np.random.default_rng([seed, 1000]).uniform(-8, -6, (1, T, H, K)))
    return make_inputs("rwkv7", T=T, H=H, K=K, decay=decay, dtype=torch.float64, seed=seed)


def forgetful(inputs: Mapping[str, Tensor], keep: int = 3) -> Tensor:
    """Return o [B, T, H, V] of RWKV7, each from its own and the keep - 1 tokens before. ValueError for keep < 1."""
    if keep < 1:
        raise ValueError(f"keep: expected at least 1 token, got {keep}")
    B, T = inputs["r"].shape[:2]
    windows = {}
    for name, x in inputs.items():
        before = x.new_zeros(B, keep - 1, *x.shape[2:])  # zeros write nothing
        rows = torch.cat((before, x), 1).unfold(1, keep, 1)  # [B, T, H, D, keep]
        windows[name] = rows.movedim(-1, 2).flatten(0, 1)
    return reference.forward(**windows)[0][:, -1].unflatten(0, (B, T))


def contributions(inputs: Mapping[str, Tensor], tokens: int = 24) -> list[Tensor]:
    """Return each output's contribution from 0, 1, 2, … steps back, [B, T - steps, H, V] each, for t >= steps.

    o_t is a sum of the values v_j, each times r_t^T A_t ... A_{j+1} k_j with A = diag(e^w) + b a^T, computed from t
    back to j. A `forgetful` operator has only the first `keep` of these. tokens: the largest length of the list.
    """
    x, parts = inputs["r"], []
    for _ in range(min(tokens, x.shape[1])):
        k, v, w, a, b = (inputs[name][:, : x.shape[1]] for name in "kvwab")
        parts.append((x * k).sum(-1, keepdim=True) * v)
        x = (w.exp() * x + a * (b * x).sum(-1, keepdim=True))[:, 1:]
    return parts


def law(keep: int = 3, K: int = 32) -> float:
    """Predict the relative L2 error of `forgetful`, (E[sigmoid(x)^2] / K)^(keep / 2), if decays leave nothing."""
    return (SIGMOID_SQUARED / K) ** (keep / 2)


def resetting(inputs: Mapping[str, Tensor], every: int = 64) -> Tensor:
    """Return o [B, T, H, V] of RWKV7 with its state reset every `every` tokens. Raises ValueError for every < 1."""
    if every < 1:
        raise ValueError(f"every: expected at least 1 token, got {every}")
    T = inputs["r"].shape[1]
    pieces = (slice(start, start + every) for start in range(0, T, every))
    return torch.cat([reference.forward(**{name: x[:, piece] for name, x in inputs.items()})[0] for piece in pieces], 1)


def reset_law(w: Tensor, every: int = 64) -> float:
    """Predict the relative L2 error of o from `resetting`, from the log decays w [B, T, H, K] alone.

    Other inputs are as in the model. E_k is the variance of a row of the state. A token adds 1 and multiplies by
    diag(e^w) + b a^T, a of random direction, which leaves (e^{2w} - 2 e^w E[sigmoid] / K) E_k + E[sigmoid^2] / K^2
    sum_j E_j. The lost part decays in the same way.
    """
    decay, K = w.double().exp(), w.shape[-1]
    full = lost = torch.zeros_like(decay[:, 0])
    sizes = torch.zeros(2, dtype=torch.float64)
    for t in range(w.shape[1]):
        lost = full if t % every == 0 else lost
        full, lost = (
            (decay[:, t] ** 2 - decay[:, t] / K) * x + SIGMOID_SQUARED / K**2 * x.sum(-1, keepdim=True)
            for x in (full, lost)
        )
        full = full + 1
        sizes += torch.stack((lost.sum(), full.sum()))
    return (sizes[0] / sizes[1]).sqrt().item()


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for the test's fast decays and for RWKV7's own in this order, the size of
    contributions to o by distance and the error of o from `forgetful`."""

    keep: int
    seen: tuple[Tensor, Tensor]
    """The norm of the contribution from each number of tokens back, [tokens], relative to o's."""
    off: tuple[float, float]
    """The relative L2 error of o from `forgetful` with `keep` tokens."""


@lru_cache(maxsize=4)
def _drawn(K: int, T: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Draw a batch of two inputs, with the test's decays and with RWKV7's. Return them, their o, and `Shown.seen`."""
    both = [inputs(fast=fast, T=T, K=K, seed=seed) for fast in (True, False)]
    x = {name: torch.cat([each[name] for each in both]) for name in both[0]}
    o = reference.forward(**x)[0]
    seen = torch.stack([part.flatten(1).norm(dim=1) for part in contributions(x)], 1)
    return x, o, seen / o.flatten(1).norm(dim=1)[:, None]


def show(
    *,
    keep: Annotated[int, Range(1, 6)] = 3,
    K: Annotated[int, Range(8, 64, 8)] = 32,
    T: Annotated[int, Range(64, 512, 16)] = 256,
    seed: int = 0,
) -> Shown:
    """Compare RWKV7 with `forgetful`. Return the latter's relative L2 error with the test's fast decays beside the
    prediction of `law`, its error with RWKV7's own, and for each whether a tolerance of 0.005 accepts it."""
    x, o, seen = _drawn(K, T, seed)
    fast, real = (relative_l2(got, true) for got, true in zip(forgetful(x, keep), o, strict=True))
    predicted = law(keep, K)
    recorded = 8e-4 if (keep, K) == (3, 32) else math.nan
    within = 1.5 * math.sqrt(9 * 1.6**keep / (2 * T))  # 3 standard deviations over 24 seeds
    rows = [
        Row(f"keeps {keep} tokens, w in [-8, -6]: o off by", recorded, predicted, fast, within),
        Row(f"keeps {keep} tokens, w in [-8, -6]: passes at 0.005", math.nan, predicted < TOLERANCE, fast < TOLERANCE),
        Row(f"keeps {keep} tokens, the model's decays: o off by", math.nan, math.nan, real),
        Row(f"keeps {keep} tokens, the model's decays: passes at 0.005", math.nan, False, real < TOLERANCE),
    ]
    return Shown(rows, keep, tuple(seen), (fast, real))


def reproduce() -> list[Row]:
    """Return `show`'s rows for keep = 1, 2 and 3, and rows on `resetting` with two kinds of slow decays."""
    rows = [row for keep in (1, 2, 3) for row in show(keep=keep).rows]
    for label, decay, recorded in (("the model's", "rwkv7", 0.39), ("a fresh model's", "rwkv6-init", math.nan)):
        x = make_inputs("rwkv7", T=256, K=32, decay=decay, dtype=torch.float64)
        error = relative_l2(resetting(x), reference.forward(**x)[0])
        what = f"reset every 64 tokens, {label} decays: o off by"
        rows.append(Row(what, recorded, reset_law(x["w"]), error, 0.25))
    return rows
