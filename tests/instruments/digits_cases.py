"""Planted losses of digits: what runs, the line to be named and the word for it; beside each a form that loses none.

Each case runs a kernel of `lossy_triton`, interpreted, or PyTorch code. Its line is the one whose comment is `line`.
"""

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from flakit.cases.inverse import matrix
from flakit.instruments.digits import Kind

T, D = 64, 16
LOSSY = Path(__file__).with_name("lossy_triton.py")


class Case(NamedTuple):
    """right: runs the form that loses nothing. shown: how the case is called in a picture."""

    shown: str
    kernel: bool
    line: str
    kind: str
    wrong: Callable[[], object]
    right: Callable[[], object]


def _kernels():
    return importlib.import_module("tests.instruments.lossy_triton")


def _drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _near() -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose running sums are some 30,000 times their difference's."""
    a = 1000 * (1 + _drawn(T, D).abs())
    return a, a + 0.1 * _drawn(T, D, seed=1)


A, B = _near()
L = matrix(2.0).float().contiguous()
SMALL = -1e-4 * (1 + 0.2 * _drawn(T, D).abs())
X, SPREAD = _drawn(T, D), _drawn(64)
LOW, LOWER, HIGH = (n + SPREAD for n in (-100, -200, 95))
COUNTS = torch.cat([torch.full((1, D), 1e8), _drawn(T - 1, D).abs() * 0.2])
FAR = 300 + _drawn(64)


def running_sums(apart: bool):
    _kernels().decay_gradient[(1,)](A, B, torch.empty(T, D), T=T, D=D, APART=apart)


def product_form():
    _kernels().inverse[(1,)](L, torch.empty(16, 16), C=16, LEVELS=3)


def substituted():
    _kernels().substitution[(1,)](L, torch.empty(16, 16), C=16)


def rounded_gate(rounded: bool):
    _kernels().gate[(1,)](SMALL, X, torch.empty(T, D), T=T, D=D, ROUNDED=rounded)


def softmax(x: torch.Tensor, safe: bool):
    _kernels().softmax[(1,)](x, torch.empty(64), D=64, SAFE=safe)


def products(precision: str):
    _kernels().scores[(1,)](X, A, torch.empty(T, T), C=T, D=D, PRECISION=precision)


def counted(apart: bool):
    _kernels().counted[(1,)](COUNTS, torch.empty(D), T=T, D=D, APART=apart)


def variance(shifted: bool):
    _kernels().variance[(1,)](FAR, torch.empty(1), D=64, SHIFTED=shifted)


# The same in PyTorch.


def torch_sums(apart: bool):
    if apart:
        return A.cumsum(0) - B.cumsum(0)  # two running sums in PyTorch
    return (A - B).cumsum(0)


def torch_product():
    inverse, power = torch.eye(16) + L, L
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power  # the product form in PyTorch
    return inverse


def torch_solved():
    return torch.linalg.solve_triangular(torch.eye(16) - L, torch.eye(16), upper=False, unitriangular=True)


def torch_gate(rounded: bool):
    gate = SMALL.exp()
    if rounded:
        gate = gate.to(torch.bfloat16)  # the gate becomes 1 in PyTorch
    state, out = torch.zeros(D), []
    for g, x in zip(gate, X, strict=True):
        state = state * g.float() + x
        out.append(state)
    return torch.stack(out)


def torch_softmax(x: torch.Tensor, safe: bool):
    e = (x - x.max() if safe else x).exp()  # without the maximum in PyTorch
    return e / e.sum()


def torch_counted(apart: bool):
    total, small = COUNTS[0], torch.zeros(D)
    for x in COUNTS[1:]:
        if apart:
            small = small + x
        else:
            total = total + x  # the addend vanishes in PyTorch
    return total - COUNTS[0] + small


def torch_variance(shifted: bool):
    mean = FAR.mean()
    if shifted:
        return (FAR - mean).square().mean()
    return FAR.square().mean() - mean * mean  # mean of squares less square of the mean in PyTorch


CASES = {
    "running sums": Case("dw: two running sums", True, "two running sums", Kind.CANCELLATION,
                         lambda: running_sums(True), lambda: running_sums(False)),
    "inverse": Case("inverse: product form", True, "the product form", Kind.CANCELLATION, product_form, substituted),
    "gate": Case("gate in bfloat16", True, "the gate becomes 1", Kind.ROUNDING,
                 lambda: rounded_gate(True), lambda: rounded_gate(False)),
    "softmax, low": Case("softmax, scores −100", True, "without the maximum", Kind.UNDERFLOW,
                         lambda: softmax(LOW, False), lambda: softmax(LOW, True)),
    "softmax, lower": Case("softmax, scores −200", True, "without the maximum", Kind.UNDERFLOW,
                           lambda: softmax(LOWER, False), lambda: softmax(LOWER, True)),
    "softmax, high": Case("softmax, scores 95", True, "without the maximum", Kind.OVERFLOW,
                          lambda: softmax(HIGH, False), lambda: softmax(HIGH, True)),
    "TF32": Case("TF32 for float32", True, "operands in TF32", Kind.TF32,
                 lambda: products("tf32"), lambda: products("ieee")),
    "absorption": Case("a vanished addend", True, "the addend vanishes", Kind.ABSORPTION,
                       lambda: counted(False), lambda: counted(True)),
    "variance": Case("variance by squares", True, "mean of squares less square of the mean", Kind.CANCELLATION,
                     lambda: variance(False), lambda: variance(True)),
    "running sums, torch": Case("dw: two running sums", False, "two running sums in PyTorch", Kind.CANCELLATION,
                                lambda: torch_sums(True), lambda: torch_sums(False)),
    "inverse, torch": Case("inverse: product form", False, "the product form in PyTorch", Kind.CANCELLATION,
                           torch_product, torch_solved),
    "gate, torch": Case("gate in bfloat16", False, "the gate becomes 1 in PyTorch", Kind.ROUNDING,
                        lambda: torch_gate(True), lambda: torch_gate(False)),
    "softmax, low, torch": Case("softmax, scores −100", False, "without the maximum in PyTorch", Kind.UNDERFLOW,
                                lambda: torch_softmax(LOW, False), lambda: torch_softmax(LOW, True)),
    "softmax, high, torch": Case("softmax, scores 95", False, "without the maximum in PyTorch", Kind.OVERFLOW,
                                 lambda: torch_softmax(HIGH, False), lambda: torch_softmax(HIGH, True)),
    "absorption, torch": Case("a vanished addend", False, "the addend vanishes in PyTorch", Kind.ABSORPTION,
                              lambda: torch_counted(False), lambda: torch_counted(True)),
    "variance, torch": Case("variance by squares", False, "mean of squares less square of the mean in PyTorch",
                            Kind.CANCELLATION, lambda: torch_variance(False), lambda: torch_variance(True)),
}  # fmt: skip


def lines_with(text: str) -> list[int]:
    """The lines of the kernels that hold a text."""
    return [i for i, line in enumerate(LOSSY.read_text().splitlines(), 1) if text in line]


@contextmanager
def unwatched(*_):
    """In the place of `watch_compiled`: nothing is traced beside digits, for which kernels would run rewritten, too."""
    yield lambda: False


def line_of(case: Case) -> int:
    """The line that is to be named."""
    lines = (LOSSY if case.kernel else Path(__file__)).read_text().splitlines()
    (line,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {case.line}")]
    return line
