"""What several models use: sizes checked, the token before, low-rank matrices, a norm per head, the channel mix."""

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .stream import WHOLE, Stream


def whole(name: str, x: object, least: int = 1) -> int:
    """A whole number, Python's or numpy's, or an error that names it."""
    if isinstance(x, bool) or not isinstance(x, Integral) or x < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {x!r}")
    return int(x)


def ramp(dim: int) -> Tensor:
    """The channels' places from 0 to 1, [dim]."""
    return torch.arange(dim) / dim


def blends(dim: int, **powers: float) -> nn.ParameterDict:
    """How much of the token before each use of x takes, per channel: 1 - ramp^power, as RWKV starts it."""
    return nn.ParameterDict({name: nn.Parameter(1 - ramp(dim) ** power) for name, power in powers.items()})


def linear(inputs: int, outputs: int, size: float) -> nn.Linear:
    """A matrix without a bias, uniform in ±size / sqrt(inputs); size 0 makes it zero."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.uniform_(made.weight, -size / inputs**0.5, size / inputs**0.5)
    return made


def unit(x: Tensor) -> Tensor:
    """Each row of x [..., D] at length one, whatever its own length from 1e-12 on; a row of zeros stays zero.

    In float16 from its smallest normal number on, 6e-5: there 1e-12 is 0, and 0 / 0 NaN. In float32 at least: a sum of
    squares leaves float16 where its root does not.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(wide, dim=-1, eps=max(1e-12, torch.finfo(x.dtype).smallest_normal)).to(x.dtype)


class LowRank(nn.Module):
    """bias + f(x A) B with A [dim, rank] and B [rank, outputs]; A starts at zero, so that the bias decides at first."""

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
    """Each head of [B, T, H, V] to mean 0 and variance 1, then a gain and an offset per channel: [B, T, H V]."""

    def __init__(self, heads: int, dim: int, eps: float | None = None):
        super().__init__(heads, dim, eps=1e-5 * dim / heads if eps is None else eps)

    def forward(self, o: Tensor) -> Tensor:
        B, T = o.shape[:2]
        return super().forward(o.reshape(B * T, self.num_channels)).view(B, T, self.num_channels)


class ChannelMix(nn.Module):
    """V relu(K x')^2 with x' a blend of the token and the one before: RWKV7's, used in every model here.

    hidden: rows of K, default 4 dim. gated: times sigmoid(R x''), x'' another such blend, as RWKV6 was published.
    """

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
