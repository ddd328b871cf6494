"""Parts shared by the mixers: size checks, initial values, low-rank projections, a norm per head, the channel mix."""

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .stream import WHOLE, Stream


def whole(name: str, x: object, least: int = 1) -> int:
    """Return x as an int. Raise ValueError, with `name`, unless it is an integer, Python's or numpy's, of at least
    `least`."""
    if isinstance(x, bool) or not isinstance(x, Integral) or x < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {x!r}")
    return int(x)


def ramp(dim: int) -> Tensor:
    """Return the relative positions of channels, 0, 1/dim, …, below 1: [dim]."""
    return torch.arange(dim) / dim


def blends(dim: int, **powers: float) -> nn.ParameterDict:
    """Return token-shift weights [dim] by name: a channel's share of the previous token, initially 1 - ramp^power."""
    return nn.ParameterDict({name: nn.Parameter(1 - ramp(dim) ** power) for name, power in powers.items()})


def linear(inputs: int, outputs: int, size: float) -> nn.Linear:
    """Return a linear layer without bias, its weights uniform in ±size / sqrt(inputs); zero for size 0."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.uniform_(layer.weight, -size / inputs**0.5, size / inputs**0.5)
    return layer


def unit(x: Tensor) -> Tensor:
    """Return each row of x [..., D] scaled to unit length; rows shorter than eps = 1e-12 are divided by eps, zeros stay
    0.

    In float16 eps is the smallest normal number, 6e-5: 1e-12 would round to 0 and give 0 / 0 = NaN. The norm is taken
    in float32 or wider: a sum of squares can overflow float16 where its root does not."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(wide, dim=-1, eps=max(1e-12, torch.finfo(x.dtype).smallest_normal)).to(x.dtype)


class LowRank(nn.Module):
    """The projection bias + f(x A) B with A [dim, rank] and B [rank, outputs]. A starts at zero, so the initial output
    is the bias (plus f(0) B)."""

    def __init__(self, dim: int, rank: int, bias: Tensor | None = None, f=nn.Identity, outputs: int | None = None):
        super().__init__()
        self.f = f()
        self.A = nn.Parameter(torch.zeros(dim, rank))
        self.B = nn.Parameter(nn.init.orthogonal_(torch.empty(rank, outputs or dim), gain=0.1))
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x @ self.A) @ self.B
        return y if self.bias is None else y + self.bias


class HeadNorm(nn.GroupNorm):
    """Group norm with one group per head: o [B, T, H, V] to [B, T, H V], then a gain and an offset per channel."""

    def __init__(self, heads: int, dim: int, eps: float | None = None):
        super().__init__(heads, dim, eps=1e-5 * dim / heads if eps is None else eps)

    def forward(self, o: Tensor) -> Tensor:
        B, T = o.shape[:2]
        return super().forward(o.reshape(B * T, self.num_channels)).view(B, T, self.num_channels)


class ChannelMix(nn.Module):
    """RWKV7's channel mix, used by every model here: V relu(K x')^2, where x' blends a token with the previous one.

    hidden: rows of K, default 4 dim. gated: multiply by sigmoid(R x''), with another blend x'', as published for
    RWKV6."""

    STATE = ("shift",)

    def __init__(self, dim: int, layer: int, layers: int, *, hidden: int | None = None, gated: bool = False):
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.blend = nn.Parameter(1 - ramp(dim) ** ((1 - layer / layers) ** 4))
        self.key = linear(dim, hidden, 0.5)
        self.value = linear(hidden, dim, 0.0)
        self.gate_blend = nn.Parameter(1 - ramp(dim) ** (1 - layer / layers)) if gated else None
        self.gate = linear(dim, dim, 0.0) if gated else None

    def forward(self, x: Tensor, stream: Stream = WHOLE) -> Tensor:
        before = stream.shift(x)
        y = self.value(self.key(torch.lerp(x, before, self.blend)).relu().square())
        return y if self.gate is None else self.gate(torch.lerp(x, before, self.gate_blend)).sigmoid() * y
