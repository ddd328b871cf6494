"""Tensors whose memory is not laid out as their shape says: a kernel that does not ask reads other elements.

A kernel gets an address and computes offsets from shapes: element (n, c) at n C + c. A transposed view, a slice of a
fused projection or an expanded gradient has other strides. Two public cases, neither in the operators of this kit:
activation functions that took their inputs for contiguous (flash-linear-attention issue #759), and the initial state's
gradient of a convolution, wrong where the arriving gradient has strides of its own (#1138): plain `y.sum().backward()`
sends one number with stride 0 in every direction, and the kernel read the memory behind it. Nothing has to crash. The
cure is one `.contiguous()`, or strides as arguments.

`blind` reads a tensor as such a kernel does; the `law` predicts the fraction of elements that it misreads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ..knobs import Range
from ..laws import Measured, Row


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _slice(x: Tensor) -> Tensor:
    return torch.cat((x, -x, -x), -1)[..., : x.shape[-1]]


def _expanded(x: Tensor) -> Tensor:
    return x.flatten()[:1].clone().view(1, 1, 1, 1).expand(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads first, transposed": _heads_first,
    "slice of a fused projection": _slice,
    "expanded, stride 0": _expanded,
}
"""Functions that copy a tensor [B, T, H, D] to a memory layout; the last has one value everywhere. The other two
tensors of the fused projection hold the negated values."""


def layout(x: Tensor, name: str) -> Tensor:
    """Return x [B, T, H, D] in one of `LAYOUTS`. Raises ValueError for an unknown one."""
    return LAYOUTS[one_of("layout", name, LAYOUTS)](x)


def blind(x: Tensor) -> Tensor:
    """Return what a kernel reads that assumes x is contiguous: x's memory from its first element, NaN beyond its end.
    The memory beyond belongs to other tensors; NaN makes it visible."""
    size, storage = x.numel(), x.untyped_storage()
    memory = torch.tensor([], dtype=x.dtype, device=x.device).set_(storage)[x.storage_offset() :][:size]
    return torch.cat((memory, memory.new_full((size - memory.numel(),), math.nan))).view(x.shape)


def law(name: str, shape: tuple[int, int, int, int]) -> float:
    """Predict the fraction of elements [B, T, H, D] that a kernel misreads if it assumes contiguous memory, all values
    different. Raises ValueError for an unknown layout.

    Transposing a T x H matrix in place leaves gcd(T - 1, H - 1) + 1 of its rows in place, in every batch entry. For a
    slice of a third of each row only the first row is right; for an expanded value only the first element.
    """
    layout(torch.empty(1, 1, 1, 1), name)
    B, T, H, D = shape
    if name == "contiguous":
        return 0.0
    if name == "heads first, transposed":
        return 1 - (math.gcd(T - 1, H - 1) + 1) / (T * H) if T > 1 and H > 1 else 0.0
    return 1 - 1 / (B * T * H if name.startswith("slice") else B * T * H * D)


def read_blindly(inputs: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the inputs, those in `names` ({tensor: layout}) as a kernel reads them that assumes contiguous memory."""
    return {**inputs, **{name: blind(layout(inputs[name].detach(), kind)) for name, kind in names.items()}}


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for the rows [T, H] of the first sequence, D numbers each, which row belongs
    there and which one a kernel reads that assumes contiguous memory. Row t H + h is token t, head h."""

    layout: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    meant: Tensor
    """The index of the right row."""
    read: Tensor
    """The index of the row that a blind kernel reads, NaN beyond the tensor's memory."""
    neighbour: Tensor
    """Whether that row belongs to another tensor of the fused projection."""
    misread: float
    """The fraction of misread elements in the batch."""


def show(
    *,
    layout: Annotated[str, LAYOUTS] = "heads first, transposed",
    B: Annotated[int, Range(1, 8)] = 2,
    T: Annotated[int, Range(1, 512)] = 100,
    H: Annotated[int, Range(1, 32)] = 4,
    D: Annotated[int, Range(1, 128)] = 64,
) -> Shown:
    """Read a tensor [B, T, H, D] of the numbers 1, 2, … in one layout of `LAYOUTS` as a kernel does that assumes
    contiguous memory. Return the fraction misread beside the prediction of `law`."""
    shape, sizes = (B, T, H, D), [B, T, H, D]
    meant = LAYOUTS[layout](torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(shape))
    read = blind(meant)
    misread = (read != meant).double().mean().item()
    row = Row(f"{sizes}: misread", math.nan, law(layout, shape), misread)
    # The last element identifies a row: a row is beyond the memory if any of its elements is.
    rows = ((x[0, ..., -1].abs() - 1) // D for x in (meant, read))
    return Shown([row], layout, shape, meant.stride(), *rows, read[0, ..., -1] < 0, misread)


def reproduce() -> list[Row]:
    """Return the predicted and measured fraction of misread elements by layout, for a tensor [2, 100, 4, 64]."""
    return [row._replace(what=f"{name}, {row.what}") for name in LAYOUTS for row in show(layout=name).rows]
