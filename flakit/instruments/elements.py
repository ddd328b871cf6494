"""The wrong elements of a tensor that failed, at the smallest setting, as a matrix."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from .finding import Finding

if TYPE_CHECKING:
    from ..numerics.operators import Operator
    from .audit import Verdict


@dataclass(frozen=True)
class Elements:
    """The matrix of a tensor with the most wrong elements.

    got, true, off: the computed and the true values, and the error relative to the RMS of the whole tensor, float64
        [rows, columns].
    wrong: non-finite where the truth is finite, or off by more than the audit allows an element of ordinary size.
    rows, columns: their axes, "" for none; tokens run across if there are any. where: the index along other axes.
    count, total: how many elements of the whole tensor are wrong, of how many.
    """

    tensor: str
    got: np.ndarray = field(repr=False)
    true: np.ndarray = field(repr=False)
    off: np.ndarray = field(repr=False)
    wrong: np.ndarray = field(repr=False)
    rows: str
    columns: str
    where: Mapping[str, int]
    count: int
    total: int


def elements(verdict: "Verdict", op: "Operator") -> Elements | None:
    """The wrong elements of a verdict; None if no element is to blame, or the audit ended before it shrank."""
    finding = verdict.finding
    if verdict.smallest is None or finding is None:
        return None
    got, true = (x.detach().double().cpu() for x in verdict.smallest)
    name = finding.tensor
    off = torch.where(got == true, 0.0, got - true).abs()
    allowed = (finding.budget or finding.allowed) * _size(finding, off, true)
    wrong = ~got.isfinite() & true.isfinite() | (off > allowed)
    if not wrong.any():  # the failure lies elsewhere, or in another call
        return None
    axes = op.axes[name if name in op.axes else name[1:]].split()
    columns = "T" if "T" in axes else axes[-1]
    rows = next((axis for axis in reversed(axes) if axis != columns and axis not in ("B", "N")), "")
    others = [axis for axis in axes if axis not in (rows, columns)]
    sizes = [true.shape[axes.index(axis)] for axis in others]
    matrices = f"{' '.join(axes)} -> ({' '.join(others)}) {rows or 1} {columns}"
    got, true, off, wrong = (rearrange(x, matrices) for x in (got, true, off, wrong))
    most = int(wrong.sum((1, 2)).argmax())
    places = np.unravel_index(most, sizes) if others else ()
    rms = true.square().mean().sqrt()
    where = {axis: int(n) for axis, n in zip(others, places, strict=True)}
    one = [x[most].numpy() for x in (got, true, off / rms if rms else off, wrong)]
    return Elements(name, one[0], one[1], one[2], one[3], rows, columns, where, int(wrong.sum()), wrong.numel())


def _size(finding: Finding, off: Tensor, true: Tensor) -> float:
    """The size to which errors are relative, as in the audit: it may exceed the RMS."""
    rms = true.square().mean().sqrt().item()
    if finding.kind != "wrong" or not finding.figure:
        return rms
    whole = {"L2": off.square().mean().sqrt(), "worst element": off.max()}.get(finding.measure)
    return rms if whole is None else max(rms, whole.item() / finding.figure)
