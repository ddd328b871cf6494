"""What every case shares: where floating point ends, how an onset is searched, and the form of a case's numbers."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.common.dispatch import has_triton, interpreted

LN_MAX = {dtype: math.log(torch.finfo(dtype).max) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
"""The largest x for which e^x is finite: 88.7228, 88.7189 and 11.0899."""


class Row(NamedTuple):
    """One number of a story: what the case file says, what the law predicts, what is measured here and now.

    NaN stands for "says nothing". Verdicts are True and False, places are words.
    """

    what: str
    recorded: float | bool | str
    law: float | bool | str
    measured: float | bool | str
    within: float = 2e-3
    """How far law and measurement may be apart: the larger is at most 1 + within times the smaller."""

    @property
    def agrees(self) -> bool | None:
        """Whether law and measurement agree (to float32 rounding, where the law says 0); None without a law."""
        law, measured = self.law, self.measured
        if law != law:
            return None
        if isinstance(law, str) or isinstance(measured, str) or law == measured:
            return law == measured
        if law == 0:
            return abs(measured) <= 1e-6
        low, high = sorted((abs(law), abs(measured)))
        return law * measured > 0 and high < math.inf and high <= (1 + self.within) * low


def kernel_place() -> tuple[str, str]:
    """Where this process can run a case's Triton kernel, as (device, backend): on a GPU, interpreted on the CPU, or
    nowhere, and then its twin in PyTorch stands in: "torch"."""
    if has_triton() and torch.cuda.is_available() and not interpreted():
        return "cuda", "triton"
    return "cpu", "triton" if has_triton() and interpreted() else "torch"


def kept_in_states(w: Tensor) -> Tensor:
    """How many tokens' worth S_{t-1} still holds of every row, [B, T, H, K] float64 from w: their e^{2 (sum of w)}.

    With independent k and v of variance 1 that is the variance of the row's elements: c_0 = 0 and
    c_t = e^{2 w_{t-1}} c_{t-1} + 1.
    """
    kept, c = (2 * w.detach().double()).exp(), [torch.zeros_like(w[:, 0], dtype=torch.float64)]
    for t in range(w.shape[1] - 1):
        c.append(kept[:, t] * c[-1] + 1)
    return torch.stack(c, 1)


def kept_in_gradients(w: Tensor, at_end: float, read: float) -> Tensor:
    """The same for D_t, the gradient of S_t: it starts with `at_end` at S_T and every later token adds `read`."""
    kept = (2 * w.detach().double()).exp()
    d = [torch.full_like(w[:, 0], at_end, dtype=torch.float64)]
    for t in reversed(range(1, w.shape[1])):
        d.append(kept[:, t] * d[-1] + read)
    return torch.stack(d[::-1], 1)


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
