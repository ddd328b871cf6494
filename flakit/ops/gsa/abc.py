"""ABC, attention with bounded-memory control: what GSA becomes without a gate of its own (arXiv:2110.02488).

Every slot normalises what is written into it over time, so that it holds a weighted mean of all tokens so far:

    z_t = log sum_{j<=t} e^{s_j},   hk_t = sum_{j<=t} e^{s_j - z_t} k_j   and hv_t alike with v

which is GSA with g_t = z_{t-1} - z_t (0 at the first token) and e^{s_t - z_t} in place of s_t.
"""

import torch
from torch import Tensor

from ..common.packed import from_batch, to_batch


def slots_and_gates(s: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(e^{s - z}, g), both [B, T, H, M] in float32 (float64 for float64) and differentiable; s [B, T, H, M] is finite.

    Each packed sequence begins anew. In float64: z is as large as s, and its gradient sums what nearly cancels.
    """
    wide = torch.promote_types(s.dtype, torch.float32)
    rows = (s if cu_seqlens is None else to_batch(s, cu_seqlens)).double()
    z = rows.logcumsumexp(1)
    g = torch.cat((torch.zeros_like(z[:, :1]), z[:, :-1] - z[:, 1:]), 1)
    g = g - g.detach().clamp(min=0)  # a parallel sum may round a z below the one before it
    found = (rows - z).exp(), g
    return tuple((x if cu_seqlens is None else from_batch(x, cu_seqlens)).to(wide) for x in found)
