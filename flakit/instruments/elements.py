"""Which elements of the tensor that failed are wrong, at the smallest setting: a matrix of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .finding import Finding

if TYPE_CHECKING:
    from ..numerics.operators import Operator
    from .audit import Verdict


@dataclass(frozen=True)
class Elements:
    """One matrix of a tensor, that with most wrong elements.

    got, true, off: as computed, as it is, and the error relative to the RMS of the whole tensor, [rows, columns] in
    float64. wrong: not finite where the truth is, or off by more than the audit allows an element of ordinary size.
    rows, columns: their axes, tokens across where there are any, "" for none. where: the index along every other axis.
    count, total: wrong elements of the whole tensor.
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
    """None where none is to blame, or the audit ended before it had a look."""
    finding = verdict.finding
    if verdict.smallest is None or finding is None:
        return None
    got, true = (x.detach().double().cpu() for x in verdict.smallest)
    name = finding.tensor
    off = torch.where(got == true, 0.0, got - true).abs()
    allowed = (finding.budget or finding.allowed) * _size(finding, off, true)
    wrong = ~got.isfinite() & true.isfinite() | (off > allowed)
    if not wrong.any():  # it fails for what it does elsewhere, or at another call
        return None
    axes = op.axes[name if name in op.axes else name[1:]].split()
    columns = "T" if "T" in axes else axes[-1]
    rows = next((axis for axis in reversed(axes) if axis != columns and axis not in ("B", "N")), "")
    others = [axis for axis in axes if axis not in (rows, columns)]
    order = [axes.index(axis) for axis in (*others, *([rows] if rows else []), columns)]
    shape = [true.shape[n] for n in order]
    shape = [*shape[: len(others)], *([1] if not rows else []), *shape[len(others) :]]
    got, true, off, wrong = (x.permute(order).reshape(-1, *shape[-2:]) for x in (got, true, off, wrong))
    most = int(wrong.sum((1, 2)).argmax())
    places = np.unravel_index(most, shape[: len(others)]) if others else ()
    rms = true.square().mean().sqrt()
    return Elements(
        name,
        got=got[most].numpy(),
        true=true[most].numpy(),
        off=(off / rms if rms else off)[most].numpy(),
        wrong=wrong[most].numpy(),
        rows=rows,
        columns=columns,
        where={axis: int(n) for axis, n in zip(others, places, strict=True)},
        count=int(wrong.sum()),
        total=wrong.numel(),
    )


def _size(finding: Finding, off: Tensor, true: Tensor) -> float:
    """What errors are relative to: the size that the audit measured them by, which may be more than the RMS."""
    rms = true.square().mean().sqrt().item()
    if finding.kind != "wrong" or not finding.figure:
        return rms
    whole = {"L2": off.square().mean().sqrt(), "worst element": off.max()}.get(finding.measure)
    return rms if whole is None else max(rms, whole.item() / finding.figure)
