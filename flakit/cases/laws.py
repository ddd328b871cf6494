"""What all cases share: floating-point limits, the rows of a case's numbers, devices, and the search for an onset."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..language import percent
from ..ops.common.dispatch import has_triton, interpreted

LN_MAX = {dtype: math.log(torch.finfo(dtype).max) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
"""The largest x for which e^x is finite: 88.7228, 88.7189 and 11.0899."""


class Row(NamedTuple):
    """One number of a case: as recorded earlier, as predicted by the case's law, and as measured now. what: its
    description. recorded and law are NaN if there is none. Verdicts are booleans, positions are strings."""

    what: str
    recorded: float | bool | str
    law: float | bool | str
    measured: float | bool | str
    within: float = 2e-3
    """Tolerance: the larger of law and measurement is at most 1 + within times the smaller."""

    @property
    def agrees(self) -> bool | None:
        """Whether law and measurement agree `within` the tolerance (1e-6 if the law is 0); None without a law."""
        law, measured = self.law, self.measured
        if law != law:
            return None
        if isinstance(law, str) or isinstance(measured, str) or law == measured:
            return law == measured
        if law == 0:
            return abs(measured) <= 1e-6
        low, high = sorted((abs(law), abs(measured)))
        return law * measured > 0 and high < math.inf and high <= (1 + self.within) * low


@dataclass(frozen=True)
class Measured:
    """The numbers of one setting of a case's knobs. Each case's `Shown` adds the arrays of its picture."""

    rows: list[Row]


def on_cpu() -> AbstractContextManager:
    """Return a context in which tensors are allocated on the CPU, whatever `torch.set_default_device` says.

    If that is the CPU, this is a null context: PyTorch's intercepts every call, which costs as much as an operation.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def kernel_place() -> tuple[str, str]:
    """Return (device, backend) for a case's Triton kernel in this process: ("cuda", "triton"), ("cpu", "triton") if
    interpreted, or ("cpu", "torch") if neither is possible: the same computation in PyTorch."""
    if has_triton() and torch.cuda.is_available() and not interpreted():
        return "cuda", "triton"
    return "cpu", "triton" if has_triton() and interpreted() else "torch"


def share(x: float) -> str:
    """Format a relative error as a percentage; below 1e-4, which may be rounding, as 0%."""
    return percent(x) if x > 1e-4 else "0%"


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round x to `bits` significand bits, including the leading 1, to nearest, ties to even."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def state_variances(w: Tensor) -> Tensor:
    """Return the variance of the elements of each row of S_{t-1}, [B, T, H, K] float64, from the log decays w.

    For independent k and v of variance 1: c_0 = 0 and c_t = e^{2 w_{t-1}} c_{t-1} + 1, the effective number of tokens
    that the row still holds. Reversed in time, this is the recurrence of `gradient_variances`.
    """
    return gradient_variances(w.flip(1), 0.0, 1.0).flip(1)


def gradient_variances(w: Tensor, at_end: float, read: float) -> Tensor:
    """Return the variance of the elements in each row of D_t, the gradient of the state S_t, [B, T, H, K] float64. It
    is `at_end` at the last token; with every token back it is multiplied by e^{2 w} and `read` is added."""
    factors = (2 * w.detach().double()).exp()
    d = [torch.full_like(w[:, 0], at_end, dtype=torch.float64)]
    for t in reversed(range(1, w.shape[1])):
        d.append(factors[:, t] * d[-1] + read)
    return torch.stack(d[::-1], 1)


def search(
    finite: Callable[[float], Mapping[str, bool]],
    *,
    near: Iterable[float] = (),
    tolerance: float = 1e-3,
    highest: float = 1e3,
) -> dict[str, float]:
    """Find the smallest size at which each name stops being finite, inf if it is finite up to `highest`.

    finite: finite(size) -> by name, whether all its values are finite, for a size > 0; assumed monotonic.
    Bisects to a relative `tolerance`; every measurement serves all names.
    near: sizes to try first, such as a law's; right ones save most measurements, wrong ones cost some.
    """
    first = finite(highest)
    low = dict.fromkeys(first, highest * 1e-6)
    high = {name: math.inf if ok else highest for name, ok in first.items()}
    sides = 1 - 0.4 * tolerance, 1 + 0.4 * tolerance
    first_tries = [x * side for x in near for side in sides if highest * 1e-6 < x * side < highest]
    while True:
        wide = [name for name in high if low[name] * (1 + tolerance) < high[name] < math.inf]
        if not wide:
            return high
        size = first_tries.pop() if first_tries else math.sqrt(low[wide[0]] * high[wide[0]])
        for name, ok in finite(size).items():
            if ok:
                low[name] = max(low[name], size)
            else:
                high[name] = min(high[name], size)
