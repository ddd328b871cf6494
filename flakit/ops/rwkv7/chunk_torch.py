"""RWKV7 in chunks of C tokens in plain PyTorch: the form the kernels compute, valid for every decay, on any device.

Every read of the state sees it decayed up to the row *before* its own: a reads S_{t-1} unchanged, and r, which reads
S_t, is split into q = scale * r e^{w} reading S_{t-1}, and the token's own k and b on the diagonal, without decay.
So there are two reads q and a, two keys k and b, and for i > j

    A_xy[i, j] = sum over K of x_i y_j exp(sum of w strictly between j and i),     A_qk, A_qb, A_ak, A_ab,

built level by level from dyadic blocks (`common.decay`). v2, the reads of a, depend on earlier reads in the chunk:

    v2    = A_ak v + A_ab v2 + (a e^{before}) S_in = U (A_ak v + (a e^{before}) S_in),     U = (I - A_ab)^{-1}
    o     = A_rk v + A_rb v2 + (q e^{before}) S_in         A_rk, A_rb: A_qk, A_qb and their diagonals
    S_out = diag(e^{total}) S_in + (k e^{after})^T v + (b e^{after})^T v2

with before_i, after_i the sums of w over the chunk's rows before and after i. The backward solves the transposed
system, y = U^T (A_rb^T do + (b e^{after}) D_out), and the gradients of both reads and both keys have RWKV6's form.
The gradient of a decay is a sum over all that it multiplies: each term carries its e^{w}.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ..common.chunks import (
    add_product,
    apart,
    join_chunks,
    own_pairs,
    pair_grads,
    pair_scores,
    split_beside,
    split_chunks,
    weigh_,
)
from ..common.decay import decays, level_blocks


def inverse(A: Tensor) -> Tensor:
    """Return (I - A)^{-1} for A strictly lower triangular [..., C, C], C a power of two, by recursive 2 x 2 blocks.

    The inverse of [[P, 0], [-Q, R]] is [[P', 0], [R' Q P', R']]: blocks double, and intermediates are blocks of the
    inverse itself. The product (I + A)(I + A^2)(I + A^4)… is equal in exact arithmetic only: its powers are huge and
    cancel where tokens repeat.
    """
    C = A.shape[-1]
    U = torch.eye(C, dtype=A.dtype, device=A.device).expand_as(A).contiguous()
    s = 1
    while s < C:
        left, right = level_blocks(U, s, 0, 0), level_blocks(U, s, 1, 1)
        level_blocks(U, s).copy_(right @ level_blocks(A, s) @ left)
        s *= 2
    return U


class _Chunks:
    """The quantities of a call's chunks that do not depend on the state; rows [B, H, N, C, K] or [B, H, N, C, V].

    `reads` holds q and a, `keys` k and b, `written` v and v2 as adjacent rows, [B, H, N, 2 C, D].
    """

    def __init__(self, r, w, k, v, a, b, scale, chunk_size):
        dtype = torch.promote_types(r.dtype, torch.float32)
        w = split_chunks(w, chunk_size, dtype)
        reads, keys, written = (split_beside(*x, C=chunk_size, dtype=dtype) for x in ((r, a), (k, b), (v, None)))
        (q, a), (k, b), (self.v, self.v2) = reads.unbind(-2), keys.unbind(-2), written.unbind(-2)
        self.reads, self.keys, self.written = (x.flatten(-3, -2) for x in (reads, keys, written))
        self.r, self.now = q * scale, w.exp()
        self.before, self.after, self.total, self.levels = decays(w)
        torch.mul(self.r, self.now, out=q)
        self.q_in, self.a_in = q * self.before, a * self.before
        self.k_out, self.b_out = k * self.after, b * self.after

        self.A = pair_scores(self.reads, self.keys, self.levels)
        own_pairs(self.A, chunk_size)[..., 0, :] = (self.r[..., None, :] * keys).sum(-1)
        self.A_r, A_a = apart(self.A, -2, 2)
        self.A_ak, A_ab = apart(A_a, -1, 2)
        self.U = inverse(A_ab)

    def states(self, initial_state) -> tuple[Tensor, Tensor]:
        """Return the state entering each chunk [B, H, N, K, V] and the final state; fill v2 [B, H, N, C, V]."""
        local, written = self.A_ak @ self.v, self.k_out.mT @ self.v
        return _carry(self.total, self.a_in, local, self.U, self.v2, self.b_out, written, initial_state)

    def dstates(self, do, y, dfinal_state) -> tuple[Tensor, Tensor]:
        """Return the gradient leaving each chunk [B, H, N, K, V] and dinitial_state; fill y [B, H, N, C, V], the
        gradient of a's reads."""
        local, written = apart(self.A_r, -1, 2)[1].mT @ do, self.q_in.mT @ do
        return _carry(self.total, self.b_out, local, self.U.mT, y, self.a_in, written, dfinal_state, reverse=True)


def _carry(total, read, local, U, x, write, written, state, reverse=False) -> tuple[Tensor, Tensor]:
    """Compute x = U (local + read S), then S <- diag(total) S + written + write^T x, chunk by chunk. Fill x; return the
    S entering each chunk and the last one."""
    B, H, N, K, V = written.shape
    entering, last = written.new_empty(B * H, N, K, V), written.new_empty(B, H, K, V)
    states = [*(entering.unbind(1)[::-1] if reverse else entering.unbind(1)), last.flatten(0, 1)]
    states[0].copy_(state.flatten(0, 1)) if state is not None else states[0].zero_()
    each = (y.flatten(0, 1).unbind(1) for y in (total[..., None], read, local, U, x, write, written))
    steps = list(zip(*each, strict=True))
    for (S, leaving), step in zip(pairwise(states), reversed(steps) if reverse else steps, strict=True):
        total, read, local, U, x, write, written = step
        torch.bmm(U, torch.baddbmm(local, read, S), out=x)
        torch.addcmul(written, total, S, out=leaving).baddbmm_(write.mT, x)
    return entering.unflatten(0, (B, H)), last


def forward(r, w, k, v, a, b, scale, initial_state, chunk_size) -> tuple[Tensor, Tensor]:
    """Compute o [B, T, H, V] and the final state [B, H, K, V] in chunks; return them in float32 or float64. Inputs as
    in `reference.forward`; chunk_size: C, a power of two."""
    chunks = _Chunks(r, w, k, v, a, b, scale, chunk_size)
    S, final_state = chunks.states(initial_state)
    o = chunks.A_r @ chunks.written
    add_product(o, chunks.q_in, S)
    return join_chunks(o, r.shape[1]), final_state


def backward(r, w, k, v, a, b, scale, initial_state, do, dfinal_state, chunk_size) -> tuple[Tensor, ...]:
    """Compute dr, dw, dk, dv, da, db [B, T, H, *] and dinitial_state [B, H, K, V] in chunks; return them in float32 or
    float64. Inputs as in `reference.backward`; chunk_size: C, a power of two."""
    T = r.shape[1]
    chunks = _Chunks(r, w, k, v, a, b, scale, chunk_size)
    at_reads = split_beside(do, None, C=chunk_size, dtype=chunks.r.dtype)
    do, y = at_reads.unbind(-2)  # the gradients of the reads of q and a
    S, _ = chunks.states(initial_state)
    D, dinitial_state = chunks.dstates(do, y, dfinal_state)
    at_reads = at_reads.flatten(-3, -2)
    dv = apart(chunks.A, -1, 2)[0].mT @ at_reads
    add_product(dv, chunks.k_out, D)

    # Between chunks, then inside.
    dreads = weigh_(at_reads @ S.mT, chunks.before)
    dkeys = weigh_(chunks.written @ D.mT, chunks.after)
    dw = (chunks.total * (S * D).sum(-1))[..., None, :].expand_as(chunks.r).clone()
    dA = at_reads @ chunks.written.mT
    pair_grads(dA, chunks.reads, chunks.keys, chunks.levels, dreads, dkeys, dw)

    # q = r e^{w} includes its own token's decay; r reads its own token's keys without any.
    (q, _), (dq, da), (k, b), (dk, db) = (apart(x, -2, 2) for x in (chunks.reads, dreads, chunks.keys, dkeys))
    at_k, at_b = own_pairs(dA, chunk_size)[..., 0, :, None].unbind(-2)
    dw.addcmul_(q, dq)
    dr = (dq * chunks.now).addcmul_(at_k, k).addcmul_(at_b, b).mul_(scale)
    dk.addcmul_(at_k, chunks.r)
    db.addcmul_(at_b, chunks.r)
    return (*(join_chunks(x, T) for x in (dr, dw, dk, dv, da, db)), dinitial_state)
