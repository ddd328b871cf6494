"""Chunk and recurrent disagree: three causes that look alike, and a story that explains none of them.

As told (flash-linear-attention issues #29 and #36, pull request #37): in bfloat16 most outputs of the two forms differ,
gradients by up to "3024 times"; the decay tensor was shared between the two calls, `w.clone()` cured it; and small
differences are amplified along the sequence.
As measured, three effects to be told apart:
- the scale: the script called one form with its default K^-0.5 and the other with 1. That alone gives all six reported
  differences (`REPORTED`), clone or no clone; the two results then differ by one constant factor (`ratio`);
- aliasing, the story as told: a kernel that overwrites w with its running sum spoils every later call that is handed
  the same w. No published version did this to w, so `overwriting_chunk` is a constructed example;
- precision: dw from rounded dr and dk (see `decay_gradient`).
Nothing is amplified along the sequence: a difference between two states is multiplied by e^w <= 1 at every token
(`perturbed`); only a positive w makes it grow, which is the fault in `log_space`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.evaluate import evaluate
from ..numerics.inputs import inputs as make_inputs
from ..ops.rwkv6 import RWKV6Output, chunk_rwkv6, reference
from .aliasing import overwrite
from .laws import Row

REPORTED = {"o": 145.0, "dr": 202.0, "dk": 198.0, "dv": 57.25, "dw": 163.0, "du": 1392.0}
"""The worst absolute differences between the two forms that the report lists."""


def inputs(*, B: int = 4, T: int = 1024, H: int = 4, K: int = 100, V: int = 200, seed: int = 0) -> dict[str, Tensor]:
    """The report's inputs: bfloat16, decays logsigmoid(randn)."""
    return make_inputs("rwkv6", B=B, T=T, H=H, K=K, V=V, decay="logsigmoid", dtype=torch.bfloat16, seed=seed)


def run(
    inputs: Mapping[str, Tensor], *, form: str = "chunk", scale: float | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Output, final state and every gradient, the gradient arriving at o uniform in [0, 1) as in the report."""
    v = inputs["v"]
    do = torch.rand(v.shape, generator=torch.Generator().manual_seed(seed)).to(v)
    return evaluate("rwkv6", {**inputs, "scale": scale}, form=form, arriving=(do, None))


class Ratio(NamedTuple):
    """`got` as a multiple of `other`: the best factor, and what share of got (L2) it leaves unexplained."""

    factor: float
    unexplained: float


def ratio(got: Tensor, other: Tensor) -> Ratio:
    """Fit got = factor * other by least squares: look at this before anything else when two results disagree.

    unexplained near 0 with a factor that is not 1: a scale is missing somewhere. Near 1: they have nothing in common.
    """
    if got.shape != other.shape:
        raise ValueError(f"got: expected {list(other.shape)} like other, got {list(got.shape)}")
    x, y = other.detach().double().flatten(), got.detach().double().flatten()
    if not (x.any() and y.any()):
        raise ValueError("got and other: expected values other than zero, got zeros in one of them")
    factor = (x @ y) / (x @ x)
    return Ratio(factor.item(), ((y - factor * x).norm() / y.norm()).item())


def overwriting_chunk(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, chunk: int = 64, **how) -> RWKV6Output:
    """The constructed fault: `chunk_rwkv6`, and then w holds its own running sum in each chunk (see `aliasing`)."""
    made = chunk_rwkv6(r, k, v, w.clone(), u, **how)
    overwrite(w, chunk, backend="torch")
    return made


def perturbed(inputs: Mapping[str, Tensor], size: float = 1e-3, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """|S'_t - S_t| / |S'_0 - S_0| for t = 1 … T, two runs whose initial states differ by `size` times random numbers.

    Returns it as measured, and as w alone predicts it: row k of the difference shrinks by e^{w_k} at every token. In
    float64; w may be positive.
    """
    x = {name: inputs[name].detach().double() for name in ("r", "k", "v", "w", "u")}
    B, _, H, K = x["r"].shape
    generator = torch.Generator().manual_seed(seed)
    start, change = torch.randn(2, B, H, K, x["v"].shape[-1], generator=generator, dtype=torch.float64)
    change *= size
    runs = (reference.steps(**x, initial_state=S) for S in (start, start + change))
    measured = torch.stack([(b.state - a.state).norm() for a, b in zip(*runs, strict=True)]) / change.norm()
    left = x["w"].cumsum(1).movedim(1, 0).exp()  # [T, B, H, K]
    predicted = (left * change.norm(dim=-1)).flatten(1).norm(dim=1) / change.norm()
    return measured, predicted


def reproduce(seed: int = 0) -> list[Row]:
    """The reported differences, from the scale alone. Law: all is linear in it, so 1 - K^-0.5 of the larger result."""
    x = inputs(seed=seed)
    one, default = (run(x, scale=scale, seed=seed) for scale in (1.0, None))
    share = 1 - x["r"].shape[-1] ** -0.5
    return [
        Row(
            f"worst difference of {name}",
            told,
            share * one[name].abs().max().item(),
            (one[name].double() - default[name].double()).abs().max().item(),
        )
        for name, told in REPORTED.items()
    ]
