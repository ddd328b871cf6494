"""Causal softmax attention with rotary position embeddings: the baseline mixer without recurrence or decay."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import linear
from .stream import WHOLE, Stream


class Attention(nn.Module):
    """The time mix of one layer, x [B, T, dim] to [B, T, dim].

    Its state is a KV cache that grows with every token: rotated keys and values, both [N, S, H, D], and a bool mask
    `tokens` [N, S], False for padding."""

    STATE = ("keys", "values", "tokens")

    def __init__(self, dim: int, layer: int, layers: int, *, head_size: int = 32):
        super().__init__()
        self.head_size = head_size
        self.query, self.key, self.value = (linear(dim, dim, 1.0) for _ in range(3))
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor | None]:
        """Return this layer's contribution to x [B, T, dim], and first_value unchanged, which only RWKV7 uses."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if stream.layout is None and stream.initial is None and stream.final is None:
            o = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        else:
            o = self._masked(q, k, v, stream)
        return self.output(o.transpose(1, 2).flatten(2)), first_value

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream) -> Tensor:
        """Attend with an explicit mask: for padding, packed sequences and cached keys. q, k, v, result: [B, H, T, D].
        Raise ValueError for packed sequences with a state."""
        (B, H, T, D), layout = q.shape, stream.layout
        t = torch.arange(T, device=q.device)
        visible = (t[:, None] >= t)[None]
        tokens = torch.ones(B, T, dtype=torch.bool, device=q.device)
        if layout is not None and layout.cu_seqlens is not None:
            if stream.initial is not None or stream.final is not None:
                raise ValueError(
                    "cu_seqlens: expected None where a state comes in or goes out with mixer 'attention', whose state "
                    "has one length; give the sequences as rows with a mask"
                )
            position, visible = (t - layout.start)[None], visible & (layout.sequence[:, None] == layout.sequence)
        else:
            tokens = tokens if layout is None else layout.mask
            position = tokens.cumsum(1) - 1
            # Padding attends to itself: a softmax over nothing would be NaN.
            visible = visible & tokens[:, None] | (t[:, None] == t)
        cached = stream.read("tokens", (B, None), torch.bool)
        if cached is not None:
            position = position + cached.sum(1, keepdim=True)
        q, k = rotate(q, position), rotate(k, position)
        if cached is not None:
            shape = (B, cached.shape[1], H, D)
            k = torch.cat((stream.read("keys", shape, k.dtype).transpose(1, 2), k), 2)
            v = torch.cat((stream.read("values", shape, v.dtype).transpose(1, 2), v), 2)
            visible = torch.cat((cached[:, None].expand(-1, T, -1), visible.expand(B, -1, -1)), 2)
        if stream.final is not None:
            stream.write("keys", k.transpose(1, 2))
            stream.write("values", v.transpose(1, 2))
            stream.write("tokens", tokens if cached is None else torch.cat((cached, tokens), 1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])


def rotate(x: Tensor, place: Tensor | None = None) -> Tensor:
    """Apply rotary position embeddings (arXiv:2104.09864) to x [..., T, D]: rotate each pair of channels by an angle
    proportional to the token's position.

    place: [B, T], the position of each token of x [B, H, T, D] in its sequence; default 0 … T - 1."""
    T, D = x.shape[-2:]
    speed = 10_000 ** -(torch.arange(0, D, 2, device=x.device) / D)
    if place is None:
        angle = torch.outer(torch.arange(T, device=x.device), speed)
    else:
        angle = place[:, None, :, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
