"""A decay that was not in log space: the state grows, and every gradient but the bonus's turns NaN.

Operators take the *logarithm* of the decay and compute S <- e^w S + k v^T. Feed them w = sigmoid(x), a number between 0
and 1 that looks like a decay, and e^w lies between 1 and 2.7: nothing is forgotten, everything is amplified.

As told (flash-linear-attention issue #11): the sigmoid saturates, its gradient is unstable, only u.grad is sane.
As measured: the sigmoid is not even in the graph (w was made a leaf after it). The state grows by about e^0.5 a token,
so float32 ends at token 160 or so, in the forward pass too; in float64 the same numbers stay finite (1e55 typically,
1e62 at most after 256 tokens). The gradient of u is sane because it is the only one that never meets the state. Cures:
logsigmoid(x) or -exp(x), a different model each and not "mathematically equivalent"; and a guard w <= 0, which flakit's
operators have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..numerics.inputs import inputs as make_inputs
from ..ops.rwkv6 import reference
from .laws import LN_MAX, Row

FED = {
    "sigmoid": torch.sigmoid,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "-exp": lambda x: -x.exp(),
}
"""What is fed as w, from x standard normal: the fault, and its two cures."""

GRADIENTS = ("dr", "dk", "dv", "dw", "du")


def inputs(
    fed: str = "sigmoid",
    *,
    bias: float = 0.0,
    B: int = 2,
    T: int = 256,
    H: int = 4,
    K: int = 64,
    V: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The inputs of the story in float32: everything standard normal, w made from x + bias by `FED[fed]`."""
    if fed not in FED:
        raise ValueError(f"fed: expected one of {', '.join(FED)}, got {fed!r}")
    made = make_inputs("rwkv6", B=B, T=T, H=H, K=K, V=V, decay=0.0, seed=seed)
    x = torch.from_numpy(np.random.default_rng([seed, 1000]).standard_normal((T, B, H, K))).transpose(0, 1)
    return made | {"w": FED[fed](x + bias).float().contiguous()}


@dataclass(frozen=True)
class Growth:
    """What the recurrence did: sizes over time [T], and of every tensor the share of its values that are finite."""

    state: Tensor  # largest |S_t|
    output: Tensor  # largest |o_t|
    finite: Mapping[str, float]  # o and each gradient
    nan: Mapping[str, float]  # the share that is NaN
    onset: int | None  # first t with a non-finite state


def run(inputs: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Growth:
    """The recurrence and its backward pass for the loss o.mean(), in float32 or float64 arithmetic."""
    x = {name: inputs[name].detach().to(dtype) for name in ("r", "k", "v", "w", "u")}
    do = torch.full_like(x["v"], 1 / x["v"].numel())
    forward, backward = [], []
    for step in reference.steps(**x, do=do):
        if isinstance(step, reference.ForwardStep):
            forward.append((step.state.abs().max(), step.o))
        else:
            backward.append(step)
    state, o = (torch.stack(parts) for parts in zip(*forward, strict=True))
    grads = {name: torch.stack([getattr(step, name) for step in backward]) for name in GRADIENTS}
    tensors = {"o": o, **grads, "du": grads["du"].sum((0, 1))}
    bad = (~state.isfinite()).nonzero()
    return Growth(
        state=state,
        output=o.abs().amax((1, 2, 3)),
        finite={name: y.isfinite().double().mean().item() for name, y in tensors.items()},
        nan={name: y.isnan().double().mean().item() for name, y in tensors.items()},
        onset=int(bad[0]) if len(bad) else None,
    )


def law(w: Tensor, dtype: torch.dtype = torch.float32) -> int | None:
    """The first t (within a few tokens) at which the state overflows: the largest row sum of w [B, T, H, K] passes
    ln(max). None where it never does, as with every w <= 0."""
    limit = math.log(torch.finfo(dtype).max)
    passed = (w.double().cumsum(1).amax((0, 2, 3)) > limit).nonzero()
    return int(passed[0]) if len(passed) else None


def reproduce(seed: int = 0) -> list[Row]:
    """The numbers of the story: sizes, onset, and which gradients are sane."""
    x = inputs("sigmoid", seed=seed)
    single, double = run(x), run(x, torch.float64)
    mean = x["w"].double().mean().item()
    never = math.inf
    rows = [
        Row("first t with a non-finite state", 161, law(x["w"]), single.onset),
        Row("the same, from the mean of w", 177, LN_MAX[torch.float32] / mean, single.onset),
        *(
            Row(f"log10 of the largest |o| at t = {t}", math.log10(told), math.nan, single.output[t].log10().item())
            for t, told in ((50, 1e12), (100, 8e23), (150, 2e35))
        ),
        # 0.996 is 255 / 256: one row of the story's dw was finite, as an empty sum at the last token would be.
        Row("share of dw that is NaN", 0.996, math.nan, single.nan["dw"]),
        Row("share of du that is finite", 1.0, 1.0, single.finite["du"]),
        Row("log10 of the largest |S_T| in float64", 54, math.nan, double.state[-1].log10().item()),
    ]
    for fed in ("logsigmoid", "-exp"):
        cured = inputs(fed, seed=seed)
        onset = run(cured).onset
        rows.append(Row(f"first t, fed {fed}", never, law(cured["w"]) or never, onset or never))
    return rows
