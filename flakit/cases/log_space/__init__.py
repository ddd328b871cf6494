"""A decay that was not in log space: the state grows, and every gradient but the bonus's turns NaN.

Operators take the *logarithm* of the decay and compute S <- e^w S + k v^T. With w = sigmoid(x), a number between 0 and
1 that looks like a decay, e^w is between 1 and 2.7: the state is amplified instead of decayed.

As reported (flash-linear-attention issue #11): the sigmoid saturates, its gradient is unstable, only u.grad is sane.
As measured: the sigmoid is not even in the graph (w became a leaf after it). The state grows by about e^0.5 per token,
so float32 overflows near token 160, in the forward pass too; in float64 the same numbers stay finite (typically 1e55,
at most 1e62 after 256 tokens). The gradient of u is finite because it alone does not depend on the state. A fraction
1 - 1/T of dw is NaN: the last token's decay affects no read, so autograd leaves a zero there. Cures: logsigmoid(x) or
`flakit.log_decay(x)`, which is -exp(x) with a finite gradient; different models each and not "mathematically
equivalent"; and a check w <= 0, which flakit's operators have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.inputs import inputs as make_inputs
from ...ops.rwkv6 import chunk_rwkv6, reference
from ..knobs import Range
from ..laws import LN_MAX, Measured, Row

FED = {"sigmoid": torch.sigmoid, "logsigmoid": torch.nn.functional.logsigmoid, "-exp": lambda x: -x.exp()}
"""By name, the formula that computes w from x, standard normal: the fault, and its two cures."""

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
    """Draw RWKV6 inputs, float32, w = `FED[fed]`(x + bias), x normal. Raises ValueError for an unknown `fed`."""
    one_of("fed", fed, FED)
    tensors = make_inputs("rwkv6", B=B, T=T, H=H, K=K, V=V, decay=0.0, seed=seed)
    x = torch.from_numpy(np.random.default_rng([seed, 1000]).standard_normal((T, B, H, K))).transpose(0, 1)
    return tensors | {"w": FED[fed](x + bias).float().contiguous()}


@dataclass(frozen=True)
class Growth:
    """How a recurrence grows. rows: the largest element of every row of S_t, [T, B H K]; state, output: the largest of
    |S_t| and of |o_t|, [T]. finite, nan: the finite and the NaN fraction of o and each gradient. onset: the first t
    with a non-finite state; None if there is none."""

    rows: Tensor
    state: Tensor
    output: Tensor
    finite: Mapping[str, float]
    nan: Mapping[str, float]
    onset: int | None


def run(inputs: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Growth:
    """Return the `Growth` of RWKV6's recurrence, and of its gradients for the loss o.mean(), in float32 or float64."""
    x = {name: inputs[name].detach().to(dtype) for name in ("r", "k", "v", "w", "u")}
    do = torch.full_like(x["v"], 1 / x["v"].numel())
    forward, backward = [], []
    for step in reference.steps(**x, do=do):
        if isinstance(step, reference.ForwardStep):
            forward.append((step.state.abs().amax(-1).flatten(), step.o))
        else:
            backward.append(step)
    rows, o = (torch.stack(parts) for parts in zip(*forward, strict=True))
    state = rows.amax(1)
    grads = {name: torch.stack([getattr(step, name) for step in backward]) for name in GRADIENTS}
    tensors = {"o": o, **grads, "du": grads["du"].sum((0, 1))}
    bad = (~state.isfinite()).nonzero()
    return Growth(
        rows=rows,
        state=state,
        output=o.abs().amax((1, 2, 3)),
        finite={name: y.isfinite().double().mean().item() for name, y in tensors.items()},
        nan={name: y.isnan().double().mean().item() for name, y in tensors.items()},
        onset=int(bad[0]) if len(bad) else None,
    )


def script(fed: str = "sigmoid", *, T: int = 256, seed: int = 0) -> dict[str, Tensor]:
    """Run the report's own lines: return o and the gradient of each input after o.mean().backward(), by autograd. The
    recurrence replaces the report's kernel; both accept a positive w without an error."""
    torch_random = torch.Generator().manual_seed(seed)
    B, H, K = 2, 4, 64
    r, k, w, v = (torch.randn(B, H, T, K, generator=torch_random) for _ in range(4))
    u = torch.randn(H, K, generator=torch_random)
    leaves = {"r": r, "k": k, "v": v, "w": FED[fed](w), "u": u}
    for x in leaves.values():
        x.requires_grad_()
    o, _ = reference.forward(**{name: x if name == "u" else x.transpose(1, 2) for name, x in leaves.items()})
    o.mean().backward()
    return {"o": o.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}


def refused(w: Tensor) -> bool:
    """Return whether flakit's operators raise ValueError for w [B, T, H, K], as they do if any element is positive."""
    zeros = torch.zeros_like(w)
    try:
        chunk_rwkv6(zeros, zeros, zeros, w, zeros[0, 0])
    except ValueError as error:
        return str(error).startswith("w: ")
    return False


def law(w: Tensor, dtype: torch.dtype = torch.float32) -> int | None:
    """Predict, within a few tokens, the first t at which the state overflows: the largest running sum of w [B, T, H, K]
    exceeds ln(max). None if it never does, as for every w <= 0."""
    limit = math.log(torch.finfo(dtype).max)
    above = (_sums(w).amax(1) > limit).nonzero()
    return int(above[0]) if len(above) else None


def _sums(w: Tensor) -> Tensor:
    """Return the running sums over tokens of w [B, T, H, K], a column for each row of a state, [T, B H K]."""
    return w.double().cumsum(1).transpose(0, 1).flatten(1)


TOKENS = 3
"""Tolerance of the law's onset in tokens: the summands are of order 1, not exactly 1."""


def _onset(what: str, recorded: float, w: Tensor, measured: int | None, dtype: torch.dtype = torch.float32) -> Row:
    predicted, measured = law(w, dtype) or math.inf, measured or math.inf
    return Row(what, recorded, predicted, measured, within=TOKENS / min(predicted, measured))


DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the size of each row of the state by token, measured and predicted, the fastest
    first, and the fraction of each tensor that is finite."""

    decay: tuple[float, float]
    """The smallest and the largest w."""
    sums: Tensor
    """The running sum of w, [T, rows]: the first token's contribution to the row grows by e to this sum."""
    sizes: Tensor
    """The largest |S_t| of every row, [T, rows]."""
    finite: Mapping[str, float]
    """Fraction of finite values in the output and each gradient."""
    nan: Mapping[str, float]
    """Fraction of NaN in the output and each gradient."""
    onset: int | None
    """The first token with a non-finite state."""
    law: int | None
    dtype: torch.dtype


def show(
    *,
    fed: Annotated[str, FED] = "sigmoid",
    bias: Annotated[float, Range(-8, 8, 0.25)] = 0.0,
    T: Annotated[int, Range(1, 2048)] = 256,
    K: Annotated[int, Range(1, 128)] = 32,
    dtype: Annotated[str, DTYPES] = "float32",
    seed: int = 0,
) -> Shown:
    """Run RWKV6 with w = `FED[fed]`(x + bias), x normal. Return the token at which the state overflows beside the
    prediction of `law`, the finite fraction of each tensor, and whether flakit's operators refuse w."""
    x, kind = inputs(fed, bias=bias, B=1, T=T, H=2, K=K, seed=seed), DTYPES[dtype]
    w, growth = x["w"], run(x, kind)
    rows = [
        _onset("first t with a non-finite state", math.nan, w, growth.onset, kind),
        Row("share of du that is finite", math.nan, 1.0, growth.finite["du"]),
        *(Row(f"share of {name} that is finite", math.nan, math.nan, share) for name, share in growth.finite.items()),
        Row("refused by flakit's operators", math.nan, bool((w > 0).any()), refused(w)),
    ]
    sums, low_high = _sums(w), tuple(float(end) for end in w.aminmax())
    order = sums[-1].argsort(descending=True)
    states = sums[:, order], growth.rows[:, order]
    return Shown(rows, low_high, *states, growth.finite, growth.nan, growth.onset, law(w, kind), kind)


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured sizes, onsets, and finite fractions of the gradients."""
    x, tensors = inputs(), script()
    single, double = run(x), run(x, torch.float64)
    mean, T = x["w"].double().mean().item(), x["w"].shape[1]
    finite = {name: y.isfinite().double().mean().item() for name, y in tensors.items()}
    differs = (tensors["du"] - script("logsigmoid")["du"]).abs().max().item()
    rows = [
        _onset("first t with a non-finite state", 161, x["w"], single.onset),
        Row("an estimate of it that comes late: 88.72 / mean of w", 177, math.nan, LN_MAX[torch.float32] / mean),
        *(
            Row(f"log10 of the largest |o| at t = {t}", math.log10(size), math.nan, single.output[t].log10().item())
            for t, size in ((50, 1e12), (100, 8e23), (150, 2e35))
        ),
        Row("the script: share of dw that is NaN", 0.996, 1 - 1 / T, tensors["dw"].isnan().double().mean().item()),
        Row("the script: share of du that is finite", 1.0, 1.0, finite["du"]),
        Row("the script: share of o that is finite", math.nan, math.nan, finite["o"]),
        Row("du differs from that of logsigmoid(x) in", 0.0, 0.0, differs),
        Row("a positive w is refused by flakit's operators", True, True, refused(x["w"][:1, :2, :1])),
        Row("log10 of the largest |S_T| in float64", 54, math.nan, double.state[-1].log10().item()),
    ]
    for fed in ("logsigmoid", "-exp"):
        cured = inputs(fed)
        rows.append(_onset(f"first t, fed {fed}", math.inf, cured["w"], run(cured).onset))
    return rows
