"""The sketches of 02_rwkv6_backward."""

import functools
import math

import torch

from ...figures.sketches.rwkv6_backward import Growth, GrowthShown, Walk, WalkShown
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ...ops.rwkv6 import reference
from ..knobs import integer, number
from .sketch import Sketch

DECAYS = torch.tensor([0.0, -0.2, -1.0, -2.0])
"""The natural-log decay of each row of the state in "walking_back", the same at every token."""

WRITES, READS = 1, 6
"""The only token that writes, and the only token whose output enters the loss."""

_WRITTEN = torch.tensor([1.0, -0.6, 0.3, -0.9, 0.5])
_ARRIVES = torch.tensor([-0.8, 0.4, 1.0, 0.6, -0.3])
_TOKENS = 8

_LONG = 192  # tokens of "growth": at w = 0.5 a state overflows after 177


@functools.cache
def _walk() -> dict:
    """Return the arrays [T, …] of both passes over eight tokens, of which one writes and one reads."""
    x = {name: torch.zeros(1, _TOKENS, 1, 4) for name in ("r", "k")}
    x |= {name: torch.zeros(1, _TOKENS, 1, 5) for name in ("v", "do")}
    x["k"][:, WRITES], x["v"][:, WRITES] = 1.0, _WRITTEN
    x["r"][:, READS], x["do"][:, READS] = 1.0, _ARRIVES
    w = DECAYS.expand(1, _TOKENS, 1, 4)
    steps = list(reference.steps(**x, w=w, u=torch.zeros(1, 4), scale=1.0))
    forward, backward = steps[:_TOKENS], steps[: _TOKENS - 1 : -1]
    arrays = {name: tensor[0, :, 0] for name, tensor in {**x, "w": w}.items()}
    arrays["states"] = torch.stack([step.state[0, 0] for step in forward])
    arrays["gradients"] = torch.stack([step.dstate[0, 0] for step in backward])
    return {name: tensor.numpy() for name, tensor in arrays.items()}


def _growth(w: float) -> GrowthShown:
    x = inputs("rwkv6", T=_LONG, H=1, K=4, V=4, decay=0.0, dtype=torch.float64)
    x["w"] = torch.full_like(x["w"], w)
    do, _ = cotangents("rwkv6", x)
    sizes, finite = {}, {}
    for dtype in (torch.float64, torch.float32):
        steps = list(reference.steps(**{name: tensor.to(dtype) for name, tensor in {**x, "do": do}.items()}))
        forward, backward = steps[:_LONG], steps[: _LONG - 1 : -1]
        for name, field, part in (("S", "state", forward), ("D", "dstate", backward), ("dw", "dw", backward)):
            along = torch.stack([getattr(step, field) for step in part]).flatten(1)
            if dtype is torch.float64:
                sizes[name] = along.abs().amax(1).numpy()
            else:
                finite[name] = along.isfinite().all(1).numpy()
    return GrowthShown(w, sizes, finite, math.log10(torch.finfo(torch.float32).max))


SKETCHES = {
    "walking_back": Sketch(
        {"step": lambda: integer(2 * _TOKENS - 1, 0, 2 * _TOKENS - 1, "step")},
        lambda step: WalkShown(step, WRITES, READS, **_walk()),
        Walk,
        {"forward, done": {"step": _TOKENS - 1}, "back, done": {"step": 2 * _TOKENS - 1}},
        """from flakit.panels import sketch

shown = sketch("walking_back", step={step}).result
for t, (S, D) in enumerate(zip(shown.states, shown.gradients)):
    print(f"token {{t}}: rows of S {{abs(S).max(1)}}, rows of D {{abs(D).max(1)}}")
""",
    ),
    "growth": Sketch(
        {"w": lambda: number(0.5, -0.3, 0.8, "w", 0.05, False)},
        _growth,
        Growth,
        {"fades": {"w": -0.1}, "grows": {"w": 0.4}, "overflows": {"w": 0.6}},
        """import torch
from flakit import inputs
from flakit.numerics.evaluate import cotangents
from flakit.ops.rwkv6 import reference

x = inputs("rwkv6", T=192, H=1, K=4, V=4, decay=0.0)
x["w"] += {w}  # above 0 no logarithm of a decay: the state grows
do, _ = cotangents("rwkv6", x)
for step in reference.steps(**x, do=do):
    if isinstance(step, reference.BackwardStep):
        print(step.t, "D", step.dstate.abs().max().item(), "dw", step.dw.abs().max().item())
    else:
        print(step.t, "S", step.state.abs().max().item())
""",
    ),
}
