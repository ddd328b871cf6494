"""The gate that has no gradient where it forgets everything: w = -exp(x), and dx = dw w is 0 * inf = NaN.

RWKV6 computes its log decays as w = -exp(x), from a layer's output x. If e^x overflows, w is -inf. That is a valid
decay: e^w = 0, the state is cleared, and the kernel returns dw = 0. The right dx is 0 too, since dw vanishes like e^w,
much faster than w grows. But autograd multiplies dw by the derivative of -exp(x), which is w: 0 * inf = NaN.

As reported (flash-linear-attention #19): RWKV6's loss turns NaN after an update; -exp is not stable yet, logsigmoid is.
As measured: output and loss are finite, and one x above the `law`, 88.72 or in float16 11.09, suffices: its dx is NaN,
and so is the gradient of every weight from which x was computed. The kernel is not at fault, so the audit, which gives
w to an operator, has no probe for it and the fingerprint no row; `flakit.headroom` and `flakit.watch` count such
decays. `flakit.log_decay` computes the same w, and dx = 0 there.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...numerics.inputs import inputs
from ...ops.common.gate import log_decay
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import Range
from ..laws import LN_MAX, Measured, Row, search

T, K = 24, 6
"""Tokens, and channels of keys and values, of one head."""
TOKEN, CHANNEL = 9, 2
"""The element of x that is varied; the others are normal around -1."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in LN_MAX}
GATES = {"-exp": lambda x: -x.exp(), "logsigmoid": logsigmoid, "log_decay": log_decay}


def law(dtype: str = "float32", gate: str = "-exp") -> float:
    """Predict the gate's input x from which dx is NaN: for -exp, ln of the dtype's largest number; for others inf.

    >>> round(law(), 2), round(law("float16"), 2), law("float16", "log_decay")
    (88.72, 11.09, inf)
    """
    return LN_MAX[DTYPES[dtype]] if gate == "-exp" else math.inf


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the gate's input x, its decays w, and the gradients dw and dx, [T, K] each."""

    x: Tensor
    w: Tensor
    dw: Tensor
    dx: Tensor
    true: Tensor
    """dx of -exp(x), or of logsigmoid(x), in float64."""
    o: Tensor
    """The operator's output, [T, K]."""
    dtype: str
    gate: str


def _gradients(value: float, dtype: torch.dtype, gate: str, seed: int) -> tuple[Tensor, ...]:
    """Return x, w, dw, dx and o of one head, [T, K] each; x is `value` at token `TOKEN`, channel `CHANNEL`."""
    tensors = inputs("rwkv6", T=T, H=1, K=K, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x, do = torch.randn(2, 1, T, 1, K, generator=generator)
    x = x - 1
    x[0, TOKEN, 0, CHANNEL] = value
    x = x.to(dtype).requires_grad_()
    w = GATES[gate](x)
    o = fused_recurrent_rwkv6(*(tensors[name].to(dtype) for name in "rkv"), w, tensors["u"].to(dtype)).o
    dw, dx = torch.autograd.grad(o, (w, x), do.to(dtype))
    return tuple(y.detach()[0, :, 0] for y in (x, w, dw, dx, o))


@functools.lru_cache(maxsize=16)
def onset(dtype: str, gate: str, seed: int = 0) -> float:
    """Measure what `law` predicts: the smallest gate input x, before rounding, whose gradient is NaN; inf if none."""

    def finite(x: float) -> dict[str, bool]:
        return {"dx": bool(_gradients(x, DTYPES[dtype], gate, seed)[3].isfinite().all())}

    return search(finite, near=[LN_MAX[DTYPES[dtype]]], tolerance=1e-4)["dx"]


def show(
    *,
    x: Annotated[float, Range(-10.0, 100.0, 0.1)] = 89.0,
    dtype: Annotated[str, DTYPES] = "float32",
    gate: Annotated[str, GATES] = "-exp",
    seed: int = 0,
) -> Shown:
    """Set the gate's input x for one token and channel, and run RWKV6 behind it. Return whether dx is finite and the x
    from which it is NaN, beside the prediction of `law`, and all gradients. gate: of `GATES`."""
    tensors = dict(zip(("x", "w", "dw", "dx", "o"), _gradients(x, DTYPES[dtype], gate, seed), strict=True))
    x, end = tensors["x"][TOKEN, CHANNEL].item(), law(dtype, gate)  # rounded to the dtype
    *_, true, _ = _gradients(x, torch.float64, "-exp" if gate == "log_decay" else gate, seed)
    rows = [
        Row(f"{gate} in {dtype}, the x from which dx is NaN", math.nan, end, onset(dtype, gate, seed)),
        Row(f"{gate} in {dtype}, x = {x:.4g}, dx finite", math.nan, x <= end, bool(tensors["dx"].isfinite().all())),
    ]
    return Shown(rows, **tensors, true=true, dtype=dtype, gate=gate)


def reproduce() -> list[Row]:
    """Return the predicted and measured onset of NaN for every gate in every dtype, and rows on one x above it."""
    rows = [row for gate in GATES for dtype in DTYPES for row in show(x=100.0, dtype=dtype, gate=gate).rows]
    finite = bool(show(x=100.0).o.isfinite().all())
    return [*rows, Row("-exp in float32, x = 100, output finite", math.nan, True, finite)]
