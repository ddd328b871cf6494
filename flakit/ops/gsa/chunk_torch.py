"""GSA in chunks of C tokens in plain PyTorch: the form the kernels compute, valid for every gate, on any device.

Both passes are the same sum over earlier tokens j, with a token's own decay e^{g_i} split off from the decay between i
and j so that the rest lies strictly between the two (`common.chunks`). Both states are stored with the slots as rows,
[M, K] and [M, V]; before_i and after_j are the sums of g over the chunk's rows before i and after j:

    scores_i = sum_j A_ij s_j e^{g_i + between} + e^{g_i + before_i} hk_in q_i + A_ii s_i,    A = scale q k^T
    o_i      = sum_j B_ij v_j + hv_in^T (p_i e^{g_i + before_i}),                             B = p s^T, decayed alike
    hk_out   = diag(e^{total}) hk_in + (s e^{after})^T k,   and hv_out alike with v

So in the first pass the decay is on the *output*'s channels, in the second on the contracted ones; in the backward both
have one form, a read (dscores in the first, p in the second) that sees the key s through the score matrix q k^T or
do v^T, and are computed together. The query heads of one group are reads of one token (`common.chunks`).
"""

import torch
from einops import rearrange
from torch import Tensor

from ..common.chunks import (
    apart,
    beside,
    carry_states,
    join_chunks,
    own_pairs,
    pair_grads,
    pair_scores,
    read_sums,
    split_chunks,
    weighed,
)
from ..common.decay import Level, decays


def _queries(x: Tensor, H: int, C: int, dtype: torch.dtype) -> Tensor:
    """Cut x [B, T, H G, D] into chunks with the queries of a group as adjacent rows, [B, H, N, C G, D]."""
    G, D = x.shape[2] // H, x.shape[3]
    x = split_chunks(rearrange(x, "b t (h g) d -> b t h (g d)", h=H), C, dtype)
    return x.unflatten(-1, (G, D)).flatten(-3, -2)


def _join_queries(x: Tensor, C: int, T: int) -> Tensor:
    """Join chunks [B, H, N, C G, D] to [B, T, H G, D], the inverse of `_queries`."""
    D = x.shape[-1]
    return rearrange(join_chunks(x.unflatten(-2, (C, -1)).flatten(-2), T), "b t h (g d) -> b t (h g) d", d=D)


def _own(A: Tensor, s: Tensor) -> Tensor:
    """Return each token's read of itself, A_ii s_i, [B, H, N, C G, M], of scores A [B, H, N, C G, C] and s [..., C,
    M]."""
    return (own_pairs(A, s.shape[-2]) * s[..., None, :]).flatten(-3, -2)


def _scores(read: Tensor, own: Tensor, s: Tensor, levels: list[Level]) -> Tensor:
    """Return the scores of all pairs, [..., C G, C]; the pairs of a token with itself use `own` as the read."""
    A = pair_scores(read, s, levels)
    own_pairs(A, s.shape[-2])[..., 0] = (own.unflatten(-2, (s.shape[-2], -1)) * s[..., None, :]).sum(-1)
    return A


def _slot_rows(states: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the memories (hk [B, H, K, M], hv [B, H, M, V]) with hk transposed to [B, H, M, K], slots as rows."""
    return (None, None) if states is None else (states[0].mT, states[1])


def softmax_grads(p: Tensor, dp: Tensor) -> Tensor:
    """Return a softmax's gradient p (dp - <p, dp>), with dp relative to that of the most probable slot. p, dp [..., M].

    Subtracting <p, dp> removes what all of dp share. Where one slot has nearly all of p, that is nearly all of its dp,
    and the difference would keep only a few digits.
    """
    dp = dp - dp.gather(-1, p.argmax(-1, keepdim=True))
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def forward(q, k, v, s, g, scale, initial_state, chunk_size) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute o [B, T, HQ, V] and (hk_T [B, H, K, M], hv_T [B, H, M, V]) in chunks; return them in float32 or float64.
    Inputs as in `reference.forward`; chunk_size: C, a power of two."""
    T, H, dtype = q.shape[1], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q = _queries(q, H, chunk_size, dtype) * scale
    k, v, s, g = (split_chunks(x, chunk_size, dtype) for x in (k, v, s, g))
    before, after, total, levels = decays(g)
    now = g.exp()
    hk_first, hv_first = _slot_rows(initial_state)
    written = (s * after).mT
    hk_in, hk = carry_states(total, written @ k, hk_first)
    hv_in, hv = carry_states(total, written @ v, hv_first)

    A = q @ k.mT
    earlier = read_sums(A, s, levels) + weighed(q @ hk_in.mT, before)
    p = (weighed(earlier, now) + _own(A, s)).softmax(-1)
    read = weighed(p, now)
    o = _scores(read, p, s, levels) @ v + weighed(read, before) @ hv_in
    return _join_queries(o, chunk_size, T), (hk.mT, hv)


def backward(q, k, v, s, g, scale, initial_state, do, dfinal_state, chunk_size) -> tuple:
    """Compute dq [B, T, HQ, K], dk, dv, ds, dg [B, T, H, *] and (dhk_0, dhv_0) in chunks; return them in float32 or
    float64. Inputs as in `reference.backward`; chunk_size: C, a power of two."""
    T, H, dtype = q.shape[1], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q, do = _queries(q, H, chunk_size, dtype) * scale, _queries(do, H, chunk_size, dtype)
    k, v, s, g = (split_chunks(x, chunk_size, dtype) for x in (k, v, s, g))
    before, after, total, levels = decays(g)
    now = g.exp()
    written = s * after
    hk_first, hv_first = _slot_rows(initial_state)
    hk_in, _ = carry_states(total, written.mT @ k, hk_first)
    hv_in, _ = carry_states(total, written.mT @ v, hv_first)

    # Reads of the first pass, and their gradients in the second: first from earlier chunks, then from all tokens.
    A = beside(q @ k.mT, do @ v.mT)
    from_states = weighed(beside(q @ hk_in.mT, do @ hv_in.mT), before)
    earlier = from_states + read_sums(A, s, levels)
    scores, dp = apart(weighed(earlier, now) + _own(A, s), -2, 2)
    p = scores.softmax(-1)
    dscores = softmax_grads(p, dp)

    own = beside(dscores, p)
    reads = weighed(own, now)
    scores_k, scores_v = apart(_scores(reads, own, s, levels), -2, 2)
    read_k, read_v = apart(weighed(reads, before), -2, 2)
    dhk_last, dhv_last = _slot_rows(dfinal_state)
    dhk, dhk_0 = carry_states(total, read_k.mT @ q, dhk_last, reverse=True)
    dhv, dhv_0 = carry_states(total, read_v.mT @ do, dhv_last, reverse=True)
    dq = (scores_k @ k + read_k @ hk_in) * scale
    dk = scores_k.mT @ q + written @ dhk
    dv = scores_v.mT @ do + written @ dhv

    # Between chunks, then inside, then of each token with itself.
    ds = (k @ dhk.mT + v @ dhv.mT) * after
    dg = (total * ((hk_in * dhk).sum(-1) + (hv_in * dhv).sum(-1)))[..., None, :].expand_as(g).clone()
    pair_grads(A, reads, s, levels, from_states, ds, dg)
    per_token = chunk_size, -1
    ds += (own_pairs(A, chunk_size) * own.unflatten(-2, per_token)).sum(-2)
    dg += (reads * earlier).unflatten(-2, per_token).sum(-2)

    rows = (join_chunks(x, T) for x in (dk, dv, ds, dg))
    return _join_queries(dq, chunk_size, T), *rows, (dhk_0.mT, dhv_0)
