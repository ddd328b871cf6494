"""RWKV6's time mix: data-dependent decay per channel (arXiv:2404.05892, section 4)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.common.gate import log_decay
from ..ops.rwkv6 import chunk_rwkv6
from .layers import HeadNorm, LowRank, blends, linear
from .stream import WHOLE, Stream


class RWKV6(nn.Module):
    """The time mix of one layer, x [B, T, dim] to [B, T, dim].

    w_rank: rank of the low-rank projection of the decay. blend_rank: rank of those of the token-shift weights.
    norm_eps: eps of the norm of each head, default 1e-5 head_size.
    operator: computes the recurrence: `chunk_rwkv6`, or any function with its signature and result."""

    STATE = ("shift", "state")

    def __init__(
        self,
        dim: int,
        layer: int,
        layers: int,
        *,
        head_size: int = 32,
        w_rank: int = 16,
        blend_rank: int = 16,
        norm_eps: float | None = None,
        operator: Callable = chunk_rwkv6,
    ):
        super().__init__()
        self.head_size, self.operator = head_size, operator
        early, depth, place = 1 - layer / layers, layer / max(1, layers - 1), torch.linspace(0, 1, dim)
        self.blend_all = blends(dim, x=early)["x"]
        self.blend = blends(dim, w=early, k=early, v=early, r=0.5 * early, g=0.5 * early)
        self.blend_by_token = nn.ModuleDict({name: LowRank(dim, blend_rank, f=nn.Tanh) for name in self.blend})
        self.w = LowRank(dim, w_rank, -6 + 5 * place ** (0.7 + 1.3 * depth), nn.Tanh)
        self.u = nn.Parameter(depth * (1 - place) + 0.1 * ((torch.arange(dim) + 1) % 3 - 1))
        self.receptance, self.key, self.value = (linear(dim, dim, 0.5) for _ in range(3))
        self.gate = linear(dim, dim, 0.5)
        self.norm = HeadNorm(dim // head_size, dim, norm_eps)
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor | None]:
        """Return this layer's contribution to x [B, T, dim], and first_value unchanged, which only RWKV7 uses."""
        before = stream.shift(x)
        blended = torch.lerp(x, before, self.blend_all)
        by_token = {name: blend + self.blend_by_token[name](blended) for name, blend in self.blend.items()}
        x = {name: torch.lerp(x, before, blend) for name, blend in by_token.items()}
        r, k, v, w = self.receptance(x["r"]), self.key(x["k"]), self.value(x["v"]), log_decay(self.w(x["w"]))
        inputs = r, stream.blank(k), v, stream.blank(w)  # padding neither writes to the state nor decays it
        u, size = self._heads(self.u), self.head_size
        state = {"state": (len(u), size, size)}
        o = stream.run(self.operator, *(self._heads(y) for y in inputs), u, state=state)
        return self.output(self.norm(o) * F.silu(self.gate(x["g"]))), first_value

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size))
