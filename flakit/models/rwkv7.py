"""RWKV7's time mix: the delta rule with a decay per channel (arXiv:2503.14456, section 4)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..ops.rwkv7 import chunk_rwkv7
from .layers import HeadNorm, LowRank, blends, linear, unit
from .stream import WHOLE, Stream

STRONGEST_DECAY = -math.exp(-0.5)
"""The lowest natural-log decay per token that any input can give: -0.6065."""


class RWKV7(nn.Module):
    """The time mix of one layer, x [B, T, dim] to [B, T, dim].

    edit: the largest fraction of a key's stored value that a token may remove: b = edit * sigmoid(.) * kappa.
        A token multiplies the state along kappa by e^w - edit * sigmoid(.). With the published 1.0 this eigenvalue is
        above -0.46, so that a flipped sign decays. 2.0 reaches -1, which state tracking needs (arXiv:2411.12537). Above
        1 + e^w, 1.55 at the strongest decay, a token can make the state grow; nothing here prevents it.
    w_rank, a_rank, g_rank, v_rank: ranks of the low-rank projections of the decay, the edit, the gate and the mix with
        layer 0's value.
    norm_eps: eps of the norm of each head, default 1e-5 head_size.
    operator: computes the recurrence: `chunk_rwkv7`, or any function with its signature and result."""

    STATE = ("shift", "state")

    def __init__(
        self,
        dim: int,
        layer: int,
        layers: int,
        *,
        head_size: int = 32,
        edit: float = 1.0,
        w_rank: int = 16,
        a_rank: int = 16,
        g_rank: int = 16,
        v_rank: int = 16,
        norm_eps: float | None = None,
        operator: Callable = chunk_rwkv7,
    ):
        super().__init__()
        self.head_size, self.edit, self.operator = head_size, edit, operator
        early, depth = 1 - layer / layers, layer / max(1, layers - 1)
        self.blend = blends(
            dim, r=0.2 * early, w=0.9 * early, k=0.7 * early, v=0.7 * early, a=0.9 * early, g=0.2 * early
        )
        self.w = LowRank(dim, w_rank, -6.5 + 5 * torch.linspace(0, 1, dim) ** (0.85 + depth**0.5), nn.Tanh)
        self.a = LowRank(dim, a_rank, torch.zeros(dim))
        self.g = LowRank(dim, g_rank, f=nn.Sigmoid)
        self.v_mix = LowRank(dim, v_rank, torch.ones(dim)) if layer else None
        self.receptance, self.key, self.value = linear(dim, dim, 0.5), linear(dim, dim, 0.05), linear(dim, dim, 0.5)
        self.removal = nn.Parameter(torch.full((dim,), 0.85))
        self.replacement = nn.Parameter(torch.ones(dim))
        self.bonus = nn.Parameter(torch.zeros(dim))
        self.norm = HeadNorm(dim // head_size, dim, norm_eps)
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor]:
        """Return this layer's contribution to x [B, T, dim], and layer 0's value [B, T, dim]. first_value: layer 0's
        value, None in layer 0 itself."""
        before = stream.shift(x)
        x = {name: torch.lerp(x, before, blend) for name, blend in self.blend.items()}
        r, k, v = self.receptance(x["r"]), self.key(x["k"]), self.value(x["v"])
        if first_value is None:
            first_value = v
        else:
            v = torch.lerp(v, first_value, self.v_mix(x["v"]).sigmoid().to(v.dtype))  # wider under autocast
        # Padding neither writes to the state, nor decays it, nor removes from it.
        w = stream.blank(STRONGEST_DECAY * self.w(x["w"]).sigmoid())
        share = self.a(x["a"]).sigmoid()
        kappa = stream.blank(unit(self._heads(k * self.removal)))
        k = stream.blank(k * (1 + (share - 1) * self.replacement))

        r, w, k, v, share = (self._heads(y) for y in (r, w, k, v, share))
        state = {"state": (r.shape[2], self.head_size, self.head_size)}
        o = stream.run(self.operator, r, w, k, v, -kappa, self.edit * share * kappa, state=state)
        own = (r * k * self._heads(self.bonus)).sum(-1, keepdim=True) * v
        o = self.norm(o) + own.flatten(2)
        return self.output(o * self.g(x["g"])), first_value

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size))
