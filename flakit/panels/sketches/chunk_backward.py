"""The sketch of 04_chunk_backward."""

import functools

import torch

from ...figures.sketches.chunk_backward import Passing, PassingShown
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ..knobs import integer
from .sketch import Sketch

_TOKENS = 8
SEED = 173
"""Of inputs in which no pair outweighs all others, and whose rounded sums in the panel agree."""


@functools.cache
def _pairs() -> torch.Tensor:
    """For one channel: what token i reads of what token j wrote, times the gradient of the loss, [T, T]."""
    x = inputs("rwkv6", T=_TOKENS, H=1, K=1, V=4, decay=-0.3, dtype=torch.float64, seed=SEED)
    do, _ = cotangents("rwkv6", x)
    r, k, v, w, do = (tensor[0, :, 0] for tensor in (x["r"], x["k"], x["v"], x["w"], do))
    between = (w.cumsum(0) - w)[:, None, 0] - w.cumsum(0)[None, :, 0]
    return ((do @ v.T) * r * k.T * between.exp()).tril(-1)


SKETCHES = {
    "passing": Sketch(
        {"t": lambda: integer(3, 0, _TOKENS - 1, "token t")},
        lambda t: PassingShown(t, _pairs().numpy()),
        Passing,
        {},
        """from flakit.panels import sketch

shown = sketch("passing", t={t}).result
print("pairs that pass:", shown.count({t}), " their sum, dw:", shown.dw({t}))
""",
    ),
}
