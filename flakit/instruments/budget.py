"""The error budget of a correct kernel: twice the error of rounding, and nothing else.

    budget = 2 (sqrt(12) rho(dtype) + rho(float32) (n + |sum of the log decays|))        n = T + K + V

rho(dtype) is the relative L2 error of rounding once, eps / 2 / sqrt(6).

A dozen intermediate values, operands and results of products, may be stored in the inputs' dtype; their errors are
independent and add in squares. Sums along the sequence run in float32 (float64 for float64): every token may round once
more in the same direction, T times. A kernel that forms e^{g_i - g_j} from a running sum g of log decays rounds g
relative to its own size, and the exponential turns that into a relative error of the result: hence the largest
|sum of the log decays| of any channel. For a tensor that all tokens share, RWKV6's u, automatic differentiation adds up
the gradient in the tensor's dtype: one more rounding for every token of the batch.

The budget bounds three measures. L2 over the tensor: error <= budget. The worst element: error <= budget
(5 RMS + 2 max), five standard deviations and the rounding of the largest. The worst row: error <= 4 budget, relative to
the row's own size or the tensor's RMS, the larger.

If inputs cancel (a softmax between large scores, repeated keys), their own rounding moves the result by more than its
size suggests. So before a tensor counts as wrong, its `unit` is measured, how far it moves when every input moves by
one part in one, and all of the above becomes relative to the larger of truth and unit / 3. Errors within a spacing of
the dtype's subnormal numbers do not count, and beyond its largest number infinity is right.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.errors import Errors, compare, out_of_range
from ..numerics.evaluate import Arriving, truth
from ..numerics.gradients import rounding_error
from ..numerics.operators import Operator

ROUNDINGS = 12
DRAWS, STEP = 4, 1e-6


def budget(dtype: torch.dtype, terms: int, total: float, added: int = 0) -> float:
    """Return the allowed relative L2 error of a tensor, by the formula above.

    dtype: of the inputs. terms: n, the length of the longest sums. total: the largest |sum of the log decays| over the
    sequence. added: the number of tokens whose gradients are added up in the dtype, 0 for a tensor with a time axis.
    """
    along = rounding_error(torch.promote_types(dtype, torch.float32))
    return 2 * (math.sqrt(ROUNDINGS + added) * rounding_error(dtype) + along * (terms + total))


def total_decay(w: Tensor) -> float:
    """Return the largest |sum of log decays| of any channel over the sequence, for `budget`. w: natural logs [B, T,
    ...]. -inf counts as 0: its exponential is exactly 0, without rounding."""
    return w.detach().double().abs().nan_to_num(posinf=0.0).sum(1).max().item()


class Excess(NamedTuple):
    """The error of a tensor in the measure ("L2", "worst element", "worst row") with the largest share of its budget.
    figure: the error. allowed: its limit. errors: details of the error, None if the tensor is within its budget."""

    measure: str
    figure: float
    allowed: float
    errors: Errors | None = None

    @property
    def share(self) -> float:
        return self.figure / self.allowed


def judge(got: Tensor, true: Tensor, allowed: float, unit: Tensor | None = None) -> Excess:
    """Compare `got` with `true`, float64, by L2, worst element and worst row; return the worst relative to its limit.
    allowed: the relative L2 error of `budget`. unit: the tensor's sensitivity from `units`, None if not measured."""
    limits = torch.finfo(got.dtype)
    wide = torch.finfo(torch.promote_types(got.dtype, torch.float32))
    spacing = max(limits.smallest_normal * limits.eps, wide.smallest_normal)
    got = got.detach()
    right = out_of_range(got, true) | ((got.to(true) - true).abs() <= spacing)
    got = torch.where(right, true, got.to(true))
    finite = true.isfinite()
    if (finite & ~got.isfinite()).any():
        return Excess("non-finite", math.inf, allowed, compare(got, true))
    error = torch.where(finite, got - true, 0.0)
    largest = error.abs().max() if error.numel() else error.sum()
    if largest == 0:
        return Excess("L2", 0.0, allowed)
    size = true.square().mean().sqrt()
    if unit is not None:
        size = torch.maximum(size, unit.square().mean().sqrt() / 3)
    rows = torch.atleast_1d(true).square().mean(-1).sqrt().clamp(min=size)
    row = (torch.atleast_1d(error).square().mean(-1).sqrt() / rows).max()
    measures = [
        Excess("L2", (error.square().mean().sqrt() / size).item(), allowed),
        Excess("worst element", (largest / size).item(), allowed * (5 + 2 * (true.abs().max() / size).item())),
        Excess("worst row", row.item(), 4 * allowed),
    ]
    worst = max(measures, key=lambda x: x.share if x.share == x.share else math.inf)
    return worst if worst.share <= 1 else worst._replace(errors=compare(got, true))


def units(
    op: Operator, inputs: Mapping, arriving: Arriving, values: Mapping[str, Tensor], draws: int = DRAWS
) -> dict[str, Tensor]:
    """Return the sensitivity of every value: the RMS over a few draws of its change per relative change of all inputs.

    values: the float64 outputs and gradients by name; the result has their names and shapes. If the operator has a
    chunked form, the draws run as heads of one problem, which is faster.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.double() * (1 + STEP * noise.to(x.device))

    do, dstate = arriving
    tensors = op.leaves(inputs) | {"o": do} | dict(zip(op.outputs[1:], op.parts(dstate), strict=False))
    draws_of = [{name: moved(x) for name, x in tensors.items()} for _ in range(draws)]

    def truth_at(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        arrives = tensors.pop("o"), op.state([tensors.pop(name) for name in op.outputs[1:] if name in tensors])
        elsewhere = op.arguments(tensors, {**inputs, "scale": op.scale(inputs)})
        return truth(op, elsewhere, arriving=arrives, recurrence=False)

    if op.chunked is None:
        squares = {name: torch.zeros_like(x) for name, x in values.items()}
        for draw in draws_of:
            for name, x in truth_at(draw).items():
                squares[name] += ((x - values[name]) / STEP).square().nan_to_num(0.0) / draws
        return {name: x.sqrt() for name, x in squares.items()}
    moved_to = {name: torch.cat([draw[name] for draw in draws_of], _heads(op, name)) for name in tensors}
    sensitivity = {}
    for name, x in truth_at(moved_to).items():
        one_each = x.chunk(draws, _heads(op, name if name in op.outputs else name[1:]))
        squared = torch.stack([((y - values[name]) / STEP).square().nan_to_num(0.0) for y in one_each])
        sensitivity[name] = squared.mean(0).sqrt()
    return sensitivity


def _heads(op: Operator, name: str) -> int:
    """Return the index of a tensor's axis of heads, H, HQ or HV."""
    return next(n for n, axis in enumerate(op.axes[name].split()) if axis.startswith("H"))
