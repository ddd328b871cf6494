"""Checks for a notebook's exercises: say where an answer differs from the reference, by how much, and what to try.

    check("one step of the state", my_step(S, k, v, w), step.state, hint="Which of the two terms decays?")

prints "right", or the worst index with yours, the reference and the hint. An answer that is still the `...` or the None
of an empty function is no error: the notebook goes on.
"""

import math
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from .arguments import shown
from .errors import compare
from .words import number

_EMPTY = (None, ...)


@dataclass(frozen=True)
class Verdict:
    """What a check found: true where the answer is right. Printed by then, so a notebook does not show it again."""

    right: bool
    text: str = field(repr=False)

    def __bool__(self) -> bool:
        return self.right

    def _ipython_display_(self) -> None:
        pass


def check(name: str, yours, reference, hint: str = "", *, tolerance: float = 1e-5) -> Verdict:
    """Compare an answer with its reference, print the verdict and return it.

    yours, reference: tensors, arrays, numbers or nested lists of numbers of one shape; anything else is compared by ==.
    tolerance: how far an element may be off, relative to the reference's root mean square. The same infinity is right;
    a reference must not hold NaN.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance: expected a number of at least 0, got {shown(tolerance)}")
    wrong = _difference(yours, reference, tolerance)
    lines = [f"{name}: {'not yet' if wrong else 'right'}", *wrong, *([_line("hint", hint)] if wrong and hint else [])]
    text = "\n".join(lines)
    print(text)
    return Verdict(not wrong, text)


def _difference(yours, reference, tolerance: float) -> list[str]:
    """What is wrong, in lines; none if nothing is."""
    if any(yours is empty for empty in _EMPTY):
        return [_line("yours", "nothing so far: put your answer where the ... is and run the cell again")]
    true = _numbers(reference)
    if true is None:
        return [] if yours == reference else [_line("yours", repr(yours)), _line("reference", repr(reference))]
    if true.isnan().any():
        raise ValueError("reference: expected numbers to compare with, got NaN among them")
    got = _numbers(yours)
    if got is None:
        return [_line("yours", f"{yours!r}, a {type(yours).__name__}; expected numbers")]
    if got.shape != true.shape:
        return [_line("yours", f"shape {list(got.shape)}"), _line("reference", f"shape {list(true.shape)}")]

    errors = compare(got, true)
    if errors.worst <= tolerance:
        return []
    at = errors.worst_index
    where = [_line("at", f"{list(at)}, the worst of {true.numel()} values")] if at else []
    return [*where, _line("yours", number(got[at].item(), 6)), _line("reference", number(true[at].item(), 6))]


def _numbers(x) -> Tensor | None:
    """x as a float64 tensor, None where it holds anything but numbers."""
    if isinstance(x, (bool, str)):
        return None
    try:
        return torch.as_tensor(x, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        return None


def _line(what: str, says: str) -> str:
    return f"  {what:<11}{says}"
