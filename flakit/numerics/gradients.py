"""Errors of outputs and gradients as rows of a table: what the gradient comparer draws and data/ records."""

from collections.abc import Iterable
from inspect import signature

import torch
from torch import Tensor

from .errors import compare
from .evaluate import evaluate, truth
from .inputs import inputs as make_inputs
from .operators import Operator, operator

MEASURES = {
    "l2": "relative L2 error",
    "worst_element": "worst element / RMS",
    "worst_row": "worst row, relative L2",
}
"""The columns that hold an error, with the words a figure shows."""


def measures(got: Tensor, truth: Tensor) -> dict[str, float]:
    """The error columns of one tensor, and `non_finite`, the count of values that should be finite and are not."""
    errors = compare(got, truth)
    return {
        "l2": errors.l2,
        "worst_element": errors.worst,
        "worst_row": errors.worst_row,
        "non_finite": errors.non_finite,
    }


def along_time(got: Tensor, truth: Tensor) -> Tensor:
    """Where along t the error sits: [B, T, H, D] -> [T], float64.

    RMS error of each time step relative to the RMS of the whole truth, so that a step whose true value is tiny does not
    stand out; inf where a value that should be finite is not.
    """
    if got.ndim != 4:
        raise ValueError(f"got: expected [B, T, H, D], a tensor with a time axis, got {list(got.shape)}")
    truth = truth.double()
    error = torch.where(got.double() == truth, 0.0, (got.double() - truth).abs().nan_to_num(torch.inf, torch.inf))
    rms = truth.square().mean().sqrt()
    per_step = error.square().mean((0, 2, 3)).sqrt()
    return torch.where(per_step == 0, 0.0, per_step / rms)


def gradient_rows(
    op: str | Operator,
    *,
    forms: Iterable[str] | None = None,
    backend: str | None = None,
    grad_seed: int = 1,
    **setting,
) -> list[dict]:
    """One row per form and tensor at one setting: op, form, dtype, T, decay, tensor and the columns of `measures`.

    setting: arguments of `flakit.inputs`. forms: default every form of the operator. backend: as the operator takes it.
    Inputs, float64 truth and cotangents are the same for all forms.

    >>> rows = gradient_rows("rwkv6", T=256, decay=-8.0, dtype=torch.bfloat16)
    """
    op = operator(op)
    made = make_inputs(op, **setting)
    true = truth(op, made, grad_seed=grad_seed)
    r, decay = made[op.tensors[0]], setting.get("decay", signature(make_inputs).parameters["decay"].default)
    shown = {"dtype": str(r.dtype).removeprefix("torch."), "T": r.shape[1], "decay": decay}
    rows = []
    for form in op.forms if forms is None else forms:
        got = evaluate(op, made, form=form, backend=backend, grad_seed=grad_seed)
        for tensor, x in got.items():
            rows.append({"op": op.name, "form": form, **shown, "tensor": tensor, **measures(x, true[tensor])})
    return rows
