"""Causal softmax attention with rotary positions: the control, a model without a recurrence or a decay."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import linear
from .stream import WHOLE, Stream


class Attention(nn.Module):
    """One layer's mixing along time. Its state grows with every token: keys, already turned, values [N, S, H, D], and
    which of the S were tokens, [N, S]."""

    STATE = ("keys", "values", "tokens")

    def __init__(self, dim: int, layer: int, layers: int, *, head_size: int = 32):
        super().__init__()
        self.head_size = head_size
        self.query, self.key, self.value = (linear(dim, dim, 1.0) for _ in range(3))
        self.output = linear(dim, dim, 0.0)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor | None]:
        """x [B, T, dim] to this layer's contribution; first_value is RWKV7's alone and handed on."""
        q, k, v = (
            make(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for make in (self.query, self.key, self.value)
        )
        if stream.layout is None and stream.came is None and stream.kept is None:
            o = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        else:
            o = self._with_what_came(q, k, v, stream)
        return self.output(o.transpose(1, 2).flatten(2)), first_value

    def _with_what_came(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream) -> Tensor:
        (B, H, T, D), layout = q.shape, stream.layout
        at = torch.arange(T, device=q.device)
        seen = (at[:, None] >= at)[None]
        tokens = torch.ones(B, T, dtype=torch.bool, device=q.device)
        if layout is not None and layout.cu_seqlens is not None:
            if stream.came is not None or stream.kept is not None:
                raise ValueError(
                    "cu_seqlens: expected None where a state comes in or goes out with mixer 'attention', whose state "
                    "has one length; give the sequences as rows with a mask"
                )
            place, seen = (at - layout.start)[None], seen & (layout.sequence[:, None] == layout.sequence)
        else:
            tokens = tokens if layout is None else layout.mask
            place = tokens.cumsum(1) - 1
            # What is no token sees itself, for a softmax over nothing would be NaN.
            seen = seen & tokens[:, None] | (at[:, None] == at)
        had = stream.given("tokens", (B, None), torch.bool)
        if had is not None:
            place = place + had.sum(1, keepdim=True)
        q, k = rotate(q, place), rotate(k, place)
        if had is not None:
            shape = (B, had.shape[1], H, D)
            k = torch.cat((stream.given("keys", shape, k.dtype).transpose(1, 2), k), 2)
            v = torch.cat((stream.given("values", shape, v.dtype).transpose(1, 2), v), 2)
            seen = torch.cat((had[:, None].expand(-1, T, -1), seen.expand(B, -1, -1)), 2)
        if stream.kept is not None:
            stream.keep("keys", k.transpose(1, 2))
            stream.keep("values", v.transpose(1, 2))
            stream.keep("tokens", tokens if had is None else torch.cat((had, tokens), 1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


def rotate(x: Tensor, place: Tensor | None = None) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of [..., T, D]: pairs of channels turned by angles that grow with t.

    place: [B, T], where each token of x [B, H, T, D] stands in its sequence; default t.
    """
    T, D = x.shape[-2:]
    speed = 10_000 ** -(torch.arange(0, D, 2, device=x.device) / D)
    if place is None:
        angle = torch.outer(torch.arange(T, device=x.device), speed)
    else:
        angle = place[:, None, :, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
