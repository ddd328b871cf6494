"""The sketches of 13_training."""

import functools

import torch
import torch.nn.functional as F

from ...cases import gate_drift, padding
from ...cases.gradient_accumulation import clipped
from ...figures.sketches.training import Clipping, ClippingShown, FProj, FProjShown, MeanOfMeans, MeanOfMeansShown
from ..knobs import integer, steps
from .sketch import Sketch

TARGETS = 12
_BAD = ("5", "1000", "1e20", "inf", "NaN")
_F = tuple(0.0 - f for f in (*range(0, 14), 14, 14.5, 14.7, 14.8, 14.9, 15, *range(16, 26)))
"""Stops of f, dense where the kernel breaks."""


def _mean_of_means(cut: int) -> MeanOfMeansShown:
    losses = torch.zeros(TARGETS, requires_grad=True)
    parts = losses[:cut], losses[cut:]
    ways = torch.stack([part.mean() for part in parts]).mean(), losses.mean()
    return MeanOfMeansShown(cut, *(torch.autograd.grad(way, losses)[0].numpy() for way in ways))


def _clipping(bad: str) -> ClippingShown:
    before, after = clipped(float(bad))
    return ClippingShown(before.numpy(), after.numpy(), torch.nn.utils.get_total_norm([before]).item())


def _g(f: float) -> float:
    """Return GSA's gate, as in the published model."""
    return F.logsigmoid(torch.tensor(f, dtype=torch.float64)).item() / 8


@functools.cache
def _exponents() -> tuple[list[float], list[float]]:
    """Return the gate and the largest exponent of the faulty kernel at each stop of f."""
    gates = [_g(f) for f in _F]
    exponents = gate_drift.exponents("gsa", torch.tensor(gates)[:, None, None, None].expand(-1, gate_drift.T, 1, 1))
    return gates, exponents.flatten().tolist()


def _f_proj(f: float) -> FProjShown:
    x = padding.inputs(gate_drift.T, _g(f))
    runs = {form: padding.run(x, form) for form in ("chunk", "right")}
    computed, true = (run["ds"][0, :, 0].numpy() for run in runs.values())
    gates, exponents = (torch.tensor(numbers).numpy() for numbers in _exponents())
    return FProjShown(
        f,
        torch.tensor(_F).numpy(),
        gates,
        exponents,
        padding.anchors(gate_drift.T)[0].tokens,
        gate_drift.LIMIT,
        padding.CLAMPS["gsa"],
        computed,
        true,
        bool(runs["chunk"]["o"].isfinite().all()),
    )


SKETCHES = {
    "mean_of_means": Sketch(
        {"cut": lambda: integer(2, 1, TARGETS - 1, "cut after")},
        _mean_of_means,
        MeanOfMeans,
        {"in the middle": {"cut": TARGETS // 2}, "one and the rest": {"cut": 1}},
        f"""import torch

losses = torch.zeros({TARGETS}, requires_grad=True)
mean_of_means = (losses[:{{cut}}].mean() + losses[{{cut}}:].mean()) / 2
print(torch.autograd.grad(mean_of_means, losses)[0])
""",
    ),
    "clipping": Sketch(
        {"bad": lambda: steps("5", _BAD, "gradient")},
        _clipping,
        Clipping,
        {"one inf": {"bad": "inf"}, "one NaN": {"bad": "NaN"}},
        """from flakit.cases.gradient_accumulation import clipped

before, after = clipped(float({bad}))
print(before)
print(after)
""",
    ),
    "f_proj": Sketch(
        {"f": lambda: steps(-8.0, [(f"{f:g}", f) for f in _F], "f")},
        _f_proj,
        FProj,
        {"fine": {"f": -14.7}, "first NaN": {"f": -14.8}, "at the clamp": {"f": -20.0}},
        """import torch
from flakit.cases import gate_drift, padding

g = torch.nn.functional.logsigmoid(torch.tensor({f})).item() / 8
x = padding.inputs(gate_drift.T, g)
print("largest exponent", gate_drift.exponents("gsa", x["g"]).max().item())
for name, tensor in padding.run(x).items():
    print(name, "finite" if tensor.isfinite().all() else "lost")
""",
    ),
}
