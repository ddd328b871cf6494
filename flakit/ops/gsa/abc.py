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

    Each packed sequence begins anew. A rounding error of z_t in the middle of a sequence does no harm: the weight of
    token j in t is e^{s_j - z_j} e^{z_j - z_{j+1}} … e^{z_{t-1} - z_t}, from which all but z_t cancels.
    """
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    rows = s if cu_seqlens is None else to_batch(s, cu_seqlens)
    z = rows.logcumsumexp(1)
    g = torch.cat((torch.zeros_like(z[:, :1]), z[:, :-1] - z[:, 1:]), 1)
    g = g - g.detach().clamp(min=0)  # a parallel sum may round a z below the one before it
    slots = (rows - z).exp()
    return (slots, g) if cu_seqlens is None else (from_batch(slots, cu_seqlens), from_batch(g, cu_seqlens))
