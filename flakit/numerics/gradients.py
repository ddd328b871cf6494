"""Errors of outputs and gradients as rows of a table, for the gradient comparer and the recordings in data/."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .arguments import flag, listed, one_of, plain, real_tensor, shown
from .errors import compare
from .evaluate import cotangents, evaluate, truth
from .inputs import inputs as make_inputs
from .operators import Operator, operator

MEASURES = {
    "l2": "relative L2 error",
    "worst_element": "worst element / RMS",
    "worst_row": "worst row, relative L2",
}
"""The error columns, with their labels in figures."""


def measures(got: Tensor, truth: Tensor) -> dict[str, float]:
    """Return one tensor's error columns by name, those of `MEASURES` and two more: `non_finite`, the count of values
    that should be finite but are not, and `rms`, the truth's root mean square, to which the errors are relative."""
    errors = compare(got, truth)
    columns = {"l2": errors.l2, "worst_element": errors.worst, "worst_row": errors.worst_row}
    return columns | {"non_finite": errors.non_finite, "rms": truth.double().square().mean().sqrt().item()}


def rounding_error(dtype: torch.dtype) -> float:
    """Return the relative L2 error of rounding exact values, uniform over a binade, to nearest in a dtype. Raises
    ValueError if it is no floating-point dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point torch.dtype, got {shown(dtype)}")
    return torch.finfo(dtype).eps / 2 / math.sqrt(6)


def along_time(got: Tensor, truth: Tensor) -> Tensor:
    """Return the error of each token, float64 [T], of tensors [B, T, H, D] or [B, T, H]; else raises ValueError.

    This is the RMS error relative to the RMS of the whole truth, so that steps with tiny true values do not dominate;
    inf where a value that should be finite is not.
    """
    got, truth = real_tensor("got", got), real_tensor("truth", truth)
    if got.ndim not in (3, 4):
        raise ValueError(f"got: expected [B, T, H, D], a tensor with a time axis, got {list(got.shape)}")
    if got.shape != truth.shape:
        raise ValueError(f"truth: expected {list(got.shape)} like got, got {list(truth.shape)}")
    truth = truth.double()
    error = torch.where(got.double() == truth, 0.0, (got.double() - truth).abs().nan_to_num(torch.inf, torch.inf))
    rms = truth.square().mean().sqrt()
    per_step = error.square().mean((0, *range(2, error.ndim))).sqrt()
    return torch.where(per_step == 0, 0.0, per_step / rms)


def gradient_rows(
    op: str | Operator,
    *,
    forms: Iterable[str] | None = None,
    others: Mapping[str, Callable[..., Mapping[str, Tensor]]] | None = None,
    backend: str | None = None,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    recurrence: bool | None = None,
    over_time: bool = False,
    keep: bool = False,
    **setting,
) -> list[dict]:
    """Return one row per form and tensor at one setting: op, form, dtype, T, decay, tensor and `measures`.

    setting: arguments of `flakit.inputs`, such as cu_seqlens for packed sequences. forms: one or several; default: all
    forms of the operator. backend: passed to the operator; recurrence: to `truth`.
    dfinal_state: also use a gradient with respect to the final state, which exposes kernels that drop it.
    others: further functions, by their form in the rows; each receives the inputs, the gradient with respect to o and,
    with dfinal_state, that with respect to the final state, and returns some of the tensors by name.
    over_time: add `along_time`, a list over t; None for tensors without a time axis.
    keep: add the tensors themselves, `got` and `true`.
    All forms share inputs, float64 truth and cotangents.

    >>> rows = gradient_rows("rwkv6", T=256, decay=-8.0, dtype=torch.bfloat16)
    """
    op, over_time, keep = operator(op), flag("over_time", over_time), flag("keep", keep)
    if others is not None and (not isinstance(others, Mapping) or not all(map(callable, others.values()))):
        raise TypeError(f"others: expected a dict of functions or None, got {shown(others)}")
    others = others or {}
    forms = [one_of("forms", form, op.forms) for form in listed(tuple(op.forms) if forms is None else forms)]
    if not forms and not others:
        raise ValueError(f"forms: expected at least one of {', '.join(op.forms)}, got none")
    inputs = make_inputs(op, **setting)
    arriving = cotangents(op, inputs, grad_seed=grad_seed, dfinal_state=dfinal_state)
    true = truth(op, inputs, arriving=arriving, recurrence=recurrence)
    results: dict[str, Mapping[str, Tensor]] = {}
    for form in forms:
        results[form] = evaluate(op, inputs, form=form, backend=backend, arriving=arriving)
    for name, run in others.items():
        results[name] = _checked(name, run(inputs, *(x for x in arriving if x is not None)), true)

    first, decay = inputs[op.tensors[0]], plain(setting.get("decay"))
    same = {"dtype": str(first.dtype).removeprefix("torch."), "T": first.shape[1]}
    same["decay"] = op.profile if decay is None else decay
    rows = []
    for form, tensors in results.items():
        for tensor, x in tensors.items():
            row = {"op": op.name, "form": form, **same, "tensor": tensor, **measures(x, true[tensor])}
            if over_time:
                has_time = tensor == "o" or tensor.removeprefix("d") in op.sequences
                row["along_time"] = along_time(x, true[tensor]).tolist() if has_time else None
            rows.append(row | ({"got": x, "true": true[tensor]} if keep else {}))
    return rows


def _checked(name: str, tensors: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    unknown = [x for x in tensors if x not in true] if isinstance(tensors, Mapping) else [shown(tensors)]
    if unknown:
        raise ValueError(f"others[{name!r}]: expected some of {', '.join(true)} by name, got {', '.join(unknown)}")
    return tensors
