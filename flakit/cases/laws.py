"""What every case shares: where floating point ends, how an onset is searched, and the form of a case's numbers."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from ..ops.common.dispatch import has_triton, interpreted

LN_MAX = {dtype: math.log(torch.finfo(dtype).max) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
"""The largest x for which e^x is finite: 88.7228, 88.7189 and 11.0899."""


class Row(NamedTuple):
    """One number of a story: what the case file says, what the law predicts, what is measured here and now."""

    what: str
    recorded: float
    law: float
    measured: float


def kernel_place() -> tuple[str, str]:
    """Where this process can run a case's Triton kernel, as (device, backend): on a GPU, interpreted on the CPU, or
    nowhere, and then its twin in PyTorch stands in: "torch"."""
    if has_triton() and torch.cuda.is_available() and not interpreted():
        return "cuda", "triton"
    return "cpu", "triton" if has_triton() and interpreted() else "torch"


def search(
    finite: Callable[[float], Mapping[str, bool]],
    *,
    near: Iterable[float] = (),
    tolerance: float = 1e-3,
    highest: float = 1e3,
) -> dict[str, float]:
    """The smallest size at which each name stops being finite, inf where it never does up to `highest`.

    finite: measures one size > 0 and says of each name whether all its values are finite; once lost, finiteness is
    taken to stay lost. Bisection down to a relative `tolerance`, every measurement serving all names.
    near: sizes to look at first, such as a law's; right ones save most of the measurements, wrong ones cost some.
    """
    first = finite(highest)
    low = dict.fromkeys(first, highest * 1e-6)
    high = {name: math.inf if ok else highest for name, ok in first.items()}
    sides = 1 - 0.4 * tolerance, 1 + 0.4 * tolerance
    looks = [x * side for x in near for side in sides if highest * 1e-6 < x * side < highest]
    while True:
        wide = [name for name in high if low[name] * (1 + tolerance) < high[name] < math.inf]
        if not wide:
            return high
        size = looks.pop() if looks else math.sqrt(low[wide[0]] * high[wide[0]])
        for name, ok in finite(size).items():
            if ok:
                low[name] = max(low[name], size)
            else:
                high[name] = min(high[name], size)
