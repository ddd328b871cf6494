"""GSA's time mix: a softmax over a fixed number of slots, each with its own decay (arXiv:2409.07146, section 3)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.gsa import chunk_gsa
from .layers import linear
from .stream import WHOLE, Stream


class GSA(nn.Module):
    """One layer's mixing along time.

    slots: how many slots a head has. f_proj makes the forget gates, g = logsigmoid(f_proj x) / softening.
    operator: what computes the recurrence: `chunk_gsa`, or anything that is called and answers like it.
    """

    STATE = ("hk", "hv")

    def __init__(
        self,
        dim: int,
        layer: int,
        layers: int,
        *,
        head_size: int = 32,
        slots: int = 16,
        softening: float = 8.0,
        operator: Callable = chunk_gsa,
    ):
        super().__init__()
        self.head_size, self.slots, self.softening, self.operator = head_size, slots, softening, operator
        self.query, self.key, self.value = (linear(dim, dim, 0.5) for _ in range(3))
        self.f_proj = linear(dim, dim // head_size * slots, 0.5)
        self.norm = nn.RMSNorm(dim, eps=torch.finfo(torch.float32).eps)  # the default would be another in float64
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor | None]:
        """x [B, T, dim] to this layer's contribution; first_value is RWKV7's alone and handed on."""
        q, k, v = (F.silu(make(x)).unflatten(-1, (-1, self.head_size)) for make in (self.query, self.key, self.value))
        g = F.logsigmoid(self.f_proj(x).unflatten(-1, (-1, self.slots))) / self.softening
        g = stream.blank(g)  # padding lets nothing fade, and with it 1 - e^g, which it writes, is 0
        # As 1 - e^g it would be a difference of nearly equal numbers, and ten times as wrong in bfloat16.
        H, D, M = q.shape[2], self.head_size, self.slots
        o = stream.run(self.operator, q, k, v, -torch.expm1(g), g, state={"hk": (H, D, M), "hv": (H, M, D)})
        # In float32 at least: rstd^3, of which the gradient is made, is beyond float16 where o is 0.
        weight = self.norm.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        o = F.rms_norm(F.silu(o.flatten(2)).to(wide), weight.shape, weight.to(wide), self.norm.eps).to(weight.dtype)
        return self.output(o), first_value
