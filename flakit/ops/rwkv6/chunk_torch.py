"""RWKV6 in chunks of C tokens in plain PyTorch: the form the kernels compute, valid for every decay, on any device.

Inside a chunk, token j contributes to output i > j through A_ij = scale * sum_k r_i k_j exp(sum_{j<t<i} w_t), built
level by level from dyadic blocks (`common.decay`); the diagonal holds the bonus u. The state carries the rest:

    o      = A v + (scale r e^{before}) S_in            before_i = sum of w over the chunk's rows before i
    S_out  = diag(e^{total}) S_in + (k e^{after})^T v   after_j  = sum of w over the chunk's rows after j

The gradient of a decay is a sum over all that it multiplies, so each term carries its e^{w} and a decay of -50 costs no
precision. The widely used difference of two prefix sums cancels and leaves noise.
"""

import torch
from torch import Tensor

from ..common.chunks import carry_states, join_chunks, pair_grads, pair_scores, split_chunks
from ..common.decay import Level, decays


def scores(q: Tensor, k: Tensor, u: Tensor, levels: list[Level]) -> Tensor:
    """Return A [B, H, N, C, C], lower triangular, of q = scale r and k [B, H, N, C, K] and u [H, 1, 1, K]."""
    A = pair_scores(q, k, levels)
    A.diagonal(0, -2, -1).copy_((q * u * k).sum(-1))
    return A


def forward(r, k, v, w, u, scale, initial_state, chunk_size) -> tuple[Tensor, Tensor]:
    """Compute o [B, T, H, V] and the final state [B, H, K, V] in chunks; return them in float32 or float64. Inputs as
    in `reference.forward`; chunk_size: C, a power of two."""
    T, dtype = r.shape[1], torch.promote_types(r.dtype, torch.float32)
    r, k, v, w = (split_chunks(x, chunk_size, dtype) for x in (r, k, v, w))
    q, u = r * scale, u.to(dtype)[:, None, None]
    before, after, total, levels = decays(w)
    S, final_state = carry_states(total, (k * after).mT @ v, initial_state)
    o = scores(q, k, u, levels) @ v + (q * before) @ S
    return join_chunks(o, T), final_state


def backward(r, k, v, w, u, scale, initial_state, do, dfinal_state, chunk_size) -> tuple[Tensor, ...]:
    """Compute dr, dk, dv, dw [B, T, H, *], du [H, K] and dinitial_state [B, H, K, V] in chunks; return them in float32
    or float64. Inputs as in `reference.backward`; chunk_size: C, a power of two."""
    T, dtype = r.shape[1], torch.promote_types(r.dtype, torch.float32)
    r, k, v, w, do = (split_chunks(x, chunk_size, dtype) for x in (r, k, v, w, do))
    q, u = r * scale, u.to(dtype)[:, None, None]
    before, after, total, levels = decays(w)
    S, _ = carry_states(total, (k * after).mT @ v, initial_state)
    D, dinitial_state = carry_states(total, (q * before).mT @ do, dfinal_state, reverse=True)

    dv = scores(q, k, u, levels).mT @ do + (k * after) @ D

    # Between chunks, then inside. dq is the gradient of q = scale * r.
    dq, dk = (do @ S.mT) * before, (v @ D.mT) * after
    dw = (total * (S * D).sum(-1))[..., None, :].expand_as(w).clone()
    dA = do @ v.mT
    pair_grads(dA, q, k, levels, dq, dk, dw)

    # The diagonal carries no decay.
    diagonal = dA.diagonal(0, -2, -1)[..., None]
    dr, dk = (dq + diagonal * u * k) * scale, dk + diagonal * u * q
    du = (diagonal * q * k).sum((0, 2, 3))

    return (*(join_chunks(x, T) for x in (dr, dk, dv, dw)), du, dinitial_state)
