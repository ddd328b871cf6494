"""GSA in chunks of C tokens with plain PyTorch: the form the kernels compute, safe for every gate, on any device.

Both passes are the same sum over earlier tokens j, with a token's own fading e^{g_i} taken out of the decay between i
and j so that what remains is strictly between the two (`common.chunks`). The states are both kept with the slots as
rows, [M, K] and [M, V]; before_i and after_j are the sums of g over the chunk's rows before i and after j:

    scores_i = sum_j A_ij s_j e^{g_i + between} + e^{g_i + before_i} hk_in q_i + A_ii s_i,    A = scale q k^T
    o_i      = sum_j B_ij v_j + hv_in^T (p_i e^{g_i + before_i}),                             B = p s^T, decayed alike
    hk_out   = diag(e^{total}) hk_in + (s e^{after})^T k,   and hv_out alike with v

So in the first pass the decay sits on the *output*'s channels, in the second on the contracted ones; to the backward
pass they are one thing, a read (dscores in the first, p in the second) that meets the key s with the score matrix q k^T
or do v^T. Query heads of one group are an axis G beside the chunks; what they share is summed over it.
"""

import torch
from einops import rearrange
from torch import Tensor

from ..common.chunks import carry_states, pair_grads, pair_scores, read_sums, split_chunks
from ..common.decay import sum_after, sum_before


def _heads(x: Tensor, H: int, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, G H, D] -> [B, H, G, N, C, D]; keys and values have G = 1."""
    return split_chunks(x, C, dtype).unflatten(1, (H, -1))


def _tokens(x: Tensor, T: int) -> Tensor:
    return rearrange(x, "b h g n c d -> b (n c) (h g) d")[:, :T]


def _carry(decay: Tensor, written: Tensor, state: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """`carry_states` for [B, H, 1, N, …]: the group's axis is not the states'."""
    entering, last = carry_states(decay[:, :, 0], written[:, :, 0], state, reverse)
    return entering[:, :, None], last


def _diagonal(A: Tensor) -> Tensor:
    return A.diagonal(0, -2, -1)[..., None]


def _slot_rows(states: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """(hk [B, H, K, M], hv [B, H, M, V]) with hk turned to [B, H, M, K]."""
    return (None, None) if states is None else (states[0].mT, states[1])


def _read_slots(q, k, s, g, hk_in) -> tuple[Tensor, Tensor, Tensor]:
    """A = q k^T (q holds the scale), the scores without their own token's part and fading, and their softmax p."""
    A = q @ k.mT
    faded = read_sums(A, s, g) + (q @ hk_in.mT) * sum_before(g).exp()
    return A, faded, (g.exp() * faded + _diagonal(A) * s).softmax(-1)


def forward(q, k, v, s, g, scale, initial_state, chunk_size) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """o [B, T, HQ, V] and (hk_T, hv_T), in float32 (float64 for float64 inputs)."""
    T, H, dtype = q.shape[1], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q, k, v, s, g = (_heads(x, H, chunk_size, dtype) for x in (q, k, v, s, g))
    hk_first, hv_first = _slot_rows(initial_state)
    written, total = (s * sum_after(g).exp()).mT, g.sum(-2).exp()
    hk_in, hk = _carry(total, written @ k, hk_first)
    hv_in, hv = _carry(total, written @ v, hv_first)

    _, _, p = _read_slots(q * scale, k, s, g, hk_in)
    read = p * g.exp()
    o = pair_scores(read, s, g) @ v + (p * s).sum(-1, keepdim=True) * v + (read * sum_before(g).exp()) @ hv_in
    return _tokens(o, T), (hk.mT, hv)


def backward(q, k, v, s, g, scale, initial_state, do, dfinal_state, chunk_size) -> tuple:
    """dq [B, T, HQ, K], dk, dv, ds, dg [B, T, H, *] and (dhk_0, dhv_0), in float32 or float64."""
    T, H, dtype = q.shape[1], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q, k, v, s, g, do = (_heads(x, H, chunk_size, dtype) for x in (q, k, v, s, g, do))
    q = q * scale
    before, after, now, total = sum_before(g).exp(), sum_after(g).exp(), g.exp(), g.sum(-2).exp()
    hk_first, hv_first = _slot_rows(initial_state)
    hk_in, _ = _carry(total, (s * after).mT @ k, hk_first)
    hv_in, _ = _carry(total, (s * after).mT @ v, hv_first)

    A, scores_faded, p = _read_slots(q, k, s, g, hk_in)
    dB = do @ v.mT
    dp_faded = read_sums(dB, s, g) + (do @ hv_in.mT) * before
    dp = now * dp_faded + _diagonal(dB) * s
    dscores = p * (dp - (p * dp).sum(-1, keepdim=True))

    read_k, read_v = dscores * now, p * now
    dhk_last, dhv_last = _slot_rows(dfinal_state)
    dhk, dhk_0 = _carry(total, ((read_k * before).mT @ q).sum(2, keepdim=True), dhk_last, reverse=True)
    dhv, dhv_0 = _carry(total, ((read_v * before).mT @ do).sum(2, keepdim=True), dhv_last, reverse=True)

    def both_ways(read, own, rows, hidden, dhidden):
        """Gradients of a pass's left and right factor in A_ij = sum_m read_im s_jm e^{between}: `rows` of later and of
        earlier tokens, and what those hold."""
        mixed = pair_scores(read, s, g) + torch.diag_embed((own * s).sum(-1))
        later, earlier = rows
        dlater = mixed @ earlier + (read * before) @ hidden
        dearlier = (mixed.mT @ later).sum(2, keepdim=True) + (s * after) @ dhidden
        return dlater, dearlier

    dq, dk = both_ways(read_k, dscores, (q, k), hk_in, dhk)
    _, dv = both_ways(read_v, p, (do, v), hv_in, dhv)

    # What enters or leaves the chunk passes all gates before or after it.
    ds = (k @ dhk.mT + v @ dhv.mT) * after
    dg = (total * ((hk_in * dhk).sum(-1) + (hv_in * dhv).sum(-1)))[..., None, :] + sum_before(s * ds)
    for read, own, dA, hidden, rows, faded in (
        (read_k, dscores, A, hk_in, q, scores_faded),
        (read_v, p, dB, hv_in, do, dp_faded),
    ):
        _, ds_pairs, dg_pairs = pair_grads(dA, read, s, g)
        ds = ds + (ds_pairs + _diagonal(dA) * own).sum(2, keepdim=True)
        through = dg_pairs + sum_after(read * before * (rows @ hidden.mT)) + read * faded
        dg = dg + through.sum(2, keepdim=True)

    dq, dk, dv, ds, dg = (_tokens(x, T) for x in (dq * scale, dk, dv, ds, dg))
    return dq, dk, dv, ds, dg, (dhk_0.mT, dhv_0)
