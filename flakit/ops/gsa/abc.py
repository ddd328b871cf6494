"""ABC, attention with bounded-memory control: GSA without a gate of its own (arXiv:2110.02488).

Every slot normalises its writes over time, so that it holds a weighted mean of all tokens so far:

    z_t = log sum_{j<=t} e^{s_j},   hk_t = sum_{j<=t} e^{s_j - z_t} k_j   and hv_t alike with v

This is GSA with g_t = z_{t-1} - z_t (0 at the first token) and e^{s_t - z_t} in place of s_t.
"""

import torch
from torch import Tensor

from ..common.packed import positions


def slots_and_gates(s: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (e^{s - z}, g) [B, T, H, M], in float32 (float64 for float64) and differentiable, of a finite s [B, T, H,
    M]; g <= 0 is a natural-log decay.

    Each packed sequence starts anew; s past the last one is not read. Computed in float64: z is as large as s, and its
    gradient sums terms that nearly cancel.
    """
    wide, s = torch.promote_types(s.dtype, torch.float32), s.double()
    if cu_seqlens is None:
        position = torch.arange(s.shape[1], device=s.device)
        z = s.logcumsumexp(1)
    else:
        position = positions(cu_seqlens, s.shape[1])
        unused = torch.arange(s.shape[1], device=s.device) >= cu_seqlens[-1]
        s = s.masked_fill(unused[:, None, None], 0)  # a NaN in padding would reach its gradient
        z = _PackedLogCumSumExp.apply(s, position)
    g = (z.roll(1, 1) - z).where((position > 0)[:, None, None], 0)
    g = g - g.detach().clamp(min=0)  # a parallel sum may round a z below the one before it
    return (s - z).exp().to(wide), g.to(wide)


class _PackedLogCumSumExp(torch.autograd.Function):
    """Computes z_t = log sum_{j<=t} e^{s_j} within each packed sequence, s [1, T, H, M], by doubling.

    The host never reads the offsets, so nothing synchronizes with a GPU, compiled graphs do not break, and nothing is
    padded. The gradient is explicit because autograd would save every doubling step:

        ds_j = e^{s_j - z_j} G_j,     G_j = sum_{t>=j} dz_t e^{z_j - z_t} = dz_j + e^{z_j - z_{j+1}} G_{j+1}
    """

    @staticmethod
    def forward(s: Tensor, position: Tensor) -> Tensor:
        z, reach = s.clone(), 1
        while reach < s.shape[1]:
            z = torch.logaddexp(z, z.roll(reach, 1).where((position >= reach)[:, None, None], -torch.inf))
            reach *= 2
        return z

    @staticmethod
    def setup_context(ctx, inputs, z):
        ctx.save_for_backward(*inputs, z)

    @staticmethod
    def backward(ctx, dz: Tensor) -> tuple[Tensor, None]:
        s, position, z = ctx.saved_tensors
        last = position.roll(-1) == 0
        decay = (z - z.roll(-1, 1)).exp().masked_fill(last[:, None, None], 0)
        reach = 1
        while reach < s.shape[1]:
            dz = dz + decay * dz.roll(-reach, 1)
            decay = decay * decay.roll(-reach, 1)
            reach *= 2
        return (s - z).exp() * dz, None
