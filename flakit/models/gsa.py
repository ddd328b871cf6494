"""GSA's time mix: a softmax over a fixed number of slots, each with its own decay (arXiv:2409.07146, section 3)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.gsa import chunk_gsa
from .layers import linear
from .stream import WHOLE, Stream


class GSA(nn.Module):
    """The time mix of one layer, x [B, T, dim] to [B, T, dim].

    slots: number of slots per head, M. softening: divides the log forget gates, g = logsigmoid(f_proj x) / softening.
    operator: computes the recurrence: `chunk_gsa`, or any function with its signature and result."""

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
        self.norm = nn.RMSNorm(dim, eps=torch.finfo(torch.float32).eps)  # the default eps depends on the dtype
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor | None]:
        """Return this layer's contribution to x [B, T, dim], and first_value unchanged, which only RWKV7 uses."""
        q, k, v = (
            F.silu(project(x)).unflatten(-1, (-1, self.head_size)) for project in (self.query, self.key, self.value)
        )
        g = F.logsigmoid(self.f_proj(x).unflatten(-1, (-1, self.slots))) / self.softening
        g = stream.blank(g)  # padding does not decay the state; it writes 1 - e^g = 0
        # expm1, since 1 - e^g cancels: its error in bfloat16 is ten times as large.
        H, D, M = q.shape[2], self.head_size, self.slots
        o = stream.run(self.operator, q, k, v, -torch.expm1(g), g, state={"hk": (H, D, M), "hv": (H, M, D)})
        # In float32 or wider: the gradient contains rstd^3, which overflows float16 where o is 0.
        weight = self.norm.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        o = F.rms_norm(F.silu(o.flatten(2)).to(wide), weight.shape, weight.to(wide), self.norm.eps).to(weight.dtype)
        return self.output(o), first_value
