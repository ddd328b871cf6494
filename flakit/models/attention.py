"""Causal softmax attention with rotary positions: the control, a model without a recurrence or a decay."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import linear


class Attention(nn.Module):
    """One layer's mixing along time."""

    def __init__(self, dim: int, layer: int, layers: int, *, head_size: int = 32):
        super().__init__()
        self.head_size = head_size
        self.query, self.key, self.value = (linear(dim, dim, 1.0) for _ in range(3))
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [B, T, dim] to this layer's contribution; first_value is RWKV7's alone and handed on."""
        q, k, v = (
            make(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for make in (self.query, self.key, self.value)
        )
        o = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.output(o.transpose(1, 2).flatten(2)), first_value


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of [..., T, D]: pairs of channels turned by angles that grow with t."""
    T, D = x.shape[-2:]
    speed = 10_000 ** -(torch.arange(0, D, 2, device=x.device) / D)
    angle = torch.outer(torch.arange(T, device=x.device), speed)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
