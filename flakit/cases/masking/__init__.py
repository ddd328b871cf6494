"""A mask that comes after the exponential: the forward pass is finite, the gradient is NaN.

The decay between two tokens of a chunk is exp(ge_i - gi_j), the sum of the log decays before i less that up to and with
j (RWKV6, whose tokens read before they decay). For j < i the exponent is <= 0; for the pairs that the mask will remove
it is positive, up to C tokens of decay, and overflows at |w| = 88.72 / C. Where tokens read after they decay, as in
GSA, it is exp(gi_i - gi_j), and C - 1 tokens.

As reported (transformers issue #48455, and many like it): a gated linear attention trains until its loss turns NaN. As
measured: `exp(x).masked_fill(...)` replaces the infinities, so the output is right. But the derivative of exp is exp
itself: automatic differentiation multiplies the mask's zero by the infinity underneath, and the decay's gradient is
NaN. At C = 32 that begins at a uniform w of -2.773, and in the report's form, which reads after the decay, at -2.862;
masking with -inf *before* the exponential has no onset at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.inputs import inputs as make_inputs
from ...ops.common.decay import sum_before
from ..knobs import DECAY, Range
from ..laws import LN_MAX, Measured, Row, search

MASKS = {
    "none": "none: outputs see the future",
    "multiply": "multiply by 0",
    "where": "where, after exp",
    "before": "-inf, before exp",
}
"""How pairs with future keys are masked, and the label of each; only "before" is right."""

TENSORS = ("o", "dr", "dk", "dv", "dw")


def weights(w: Tensor, mask: str = "where", *, exclusive: bool = True) -> Tensor:
    """Return the decay between every output i and key j of a chunk, w [..., C, K] -> [..., C, C, K], with future keys
    masked as `mask` says, one of `MASKS`. gi is the running sum of w with the token's own, ge without it.

    exclusive: outputs read before the state decays, as in RWKV6: exp(ge_i - gi_j) for j < i. Otherwise after it, as in
        GSA: exp(gi_i - gi_j) for j <= i; the masked exponents then span up to C - 1 tokens instead of C.
    """
    return _masked(_exponents(w, exclusive), one_of("mask", mask, MASKS), exclusive)[1]


def _exponents(w: Tensor, exclusive: bool) -> Tensor:
    """Return the exponents of `weights` before any mask, w [..., C, K] -> [..., C, C, K]."""
    gi = w.cumsum(-2)
    return (sum_before(w) if exclusive else gi)[..., :, None, :] - gi[..., None, :, :]


def _masked(exponents: Tensor, mask: str, exclusive: bool) -> tuple[Tensor, Tensor]:
    """Return exp(exponents) [..., C, C, K], for "before" of masked exponents, and the weights left by the mask."""
    C = exponents.shape[-2]
    past = torch.ones(C, C, dtype=torch.bool, device=exponents.device).tril(-1 if exclusive else 0)[..., None]
    if mask == "before":
        exponents = exponents.masked_fill(~past, -torch.inf)
    exponentials = exponents.exp()
    if mask == "where":
        return exponentials, torch.where(past, exponentials, 0.0)
    return exponentials, exponentials * past if mask == "multiply" else exponentials


def run(inputs: Mapping[str, Tensor], mask: str = "where", *, exclusive: bool = True) -> dict[str, Tensor]:
    """Run one chunk of linear attention with decays as in `weights`, and its gradients by automatic differentiation.

    inputs: r, k, w [B, C, H, K] and v [B, C, H, V] as from `flakit.inputs("rwkv6", T=C)`; no bonus, scale 1. Returns o
        [B, C, H, V] and the gradients of o.sum(): dr, dk, dv, dw.
    """
    leaves = {name: inputs[name].detach().transpose(1, 2).requires_grad_() for name in "rkvw"}
    r, k, v, w = leaves.values()
    A = torch.einsum("bhik,bhjk,bhijk->bhij", r, k, weights(w, mask, exclusive=exclusive))
    o = A @ v
    grads = torch.autograd.grad(o.sum(), tuple(leaves.values()))
    results = {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.transpose(1, 2) for name, x in results.items()}


def law(
    mask: str = "where",
    *,
    tensor: str = "dw",
    chunk: int = 32,
    exclusive: bool = True,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return the largest uniform |w| per token at which `tensor` is finite: ln(dtype's max) / n, inf if it cannot fail.

    n = chunk tokens between the first output and the last key, or chunk - 1 if outputs read after the decay. "where"
    makes dw alone non-finite; "multiply" and "none" all tensors (for "none", with operands of order 1).
    """
    one_of("tensor", tensor, TENSORS)
    safe = {"before": TENSORS, "where": ("o", "dr", "dk", "dv")}.get(one_of("mask", mask, MASKS), ())
    return math.inf if tensor in safe else LN_MAX[dtype] / (chunk if exclusive else chunk - 1)


def onset(mask: str = "where", *, chunk: int = 32, exclusive: bool = True, tolerance: float = 1e-3) -> dict[str, float]:
    """Measure what `law` predicts: by tensor, the |w| from which it is non-finite, in float32 with operands of ±1."""
    x = make_inputs("rwkv6", T=chunk, H=1, K=1, decay=-1.0)
    x |= {name: x[name].sign() for name in "rkv"}

    def finite(size: float) -> dict[str, bool]:
        results = run({**x, "w": x["w"] * size}, mask, exclusive=exclusive)
        return {name: bool(y.isfinite().all()) for name, y in results.items()}

    return search(finite, tolerance=tolerance)


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for one channel of one chunk, log decays (`exponents`), weights and gradients
    of o.sum() for all pairs, [C, C], a row per output, a column per key."""

    exponents: Tensor
    made: Tensor
    """exp(exponents); of masked exponents if the mask comes before exp."""
    kept: Tensor
    """The weights after the mask."""
    arriving: Tensor
    """The gradient of `made`, as it arrives from `kept` through the mask."""
    gradient: Tensor
    """The gradient of `exponents`: `arriving` times `made`."""
    finite: Mapping[str, bool]
    """By name of `TENSORS`, whether all its values are finite."""
    exclusive: bool = True
    """Whether outputs read before the state decays."""


def show(
    *,
    w: Annotated[float, DECAY] = -2.9,
    chunk: Annotated[int, Range(2, 128)] = 32,
    mask: Annotated[str, MASKS] = "where",
    exclusive: bool = True,
) -> Shown:
    """Run one chunk at a uniform log decay w <= 0. Return rows on which tensors are finite and the |w| from which each
    is not, beside the prediction of `law`. Operands are ±1. mask: of `MASKS`. exclusive: as in `weights`."""
    x = make_inputs("rwkv6", T=chunk, H=1, K=1, decay=w)
    x |= {name: x[name].sign() for name in "rkv"}
    results = run(x, mask, exclusive=exclusive)
    r, k, v, decay = (x[name][0, :, 0] for name in "rkvw")
    exponents = _exponents(decay, exclusive).requires_grad_()
    exponentials, masked = _masked(exponents, mask, exclusive)
    exponentials.retain_grad()
    (torch.einsum("ik,jk,ijk->ij", r, k, masked) @ v).sum().backward()
    steps = (exponents.detach(), exponentials.detach(), masked.detach(), exponentials.grad, exponents.grad)
    finite = {name: bool(y.isfinite().all()) for name, y in results.items()}
    ends, rows = onset(mask, chunk=chunk, exclusive=exclusive), []
    for tensor, is_finite in finite.items():
        limit = law(mask, tensor=tensor, chunk=chunk, exclusive=exclusive)
        rows.append(Row(f"{tensor} finite at w = {w:g}", math.nan, -w < limit, is_finite))
        rows.append(Row(f"{tensor} ends at |w|", math.nan, limit, ends[tensor]))
    return Shown(rows, *(step[..., 0] for step in steps), finite, exclusive)


def reproduce() -> list[Row]:
    """Return the predicted and measured |w| per token from which o and dw are non-finite at C = 32, by mask. Recorded
    numbers, those of the report, are for dw where outputs read after the decay."""
    thread = {("where", "dw"): 88.72 / 31, ("before", "dw"): math.inf}
    rows = []
    for exclusive, masks in ((True, MASKS), (False, ("where", "before"))):
        for mask in masks:
            measured = onset(mask, exclusive=exclusive)
            for tensor in ("o", "dw"):
                recorded = math.nan if exclusive else thread.get((mask, tensor), math.nan)
                what = f"C = 32, {MASKS[mask]}: {tensor}" + ("" if exclusive else ", read after the decay")
                rows.append(Row(what, recorded, law(mask, tensor=tensor, exclusive=exclusive), measured[tensor]))
    return rows
