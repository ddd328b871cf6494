"""RWKV7 in chunks of C tokens with plain PyTorch: the form the kernels compute, safe for every decay, on any device.

Every read of the state sees it decayed up to the row *before* its own: a reads S_{t-1} as it is, and r, which reads
S_t, is split into q = scale * r e^{w} reading S_{t-1}, and the token's own k and b on the diagonal, without decay.
So there are two reads q and a, two keys k and b, and for i > j

    A_xy[i, j] = sum over K of x_i y_j exp(sum of w strictly between j and i),     A_qk, A_qb, A_ak, A_ab,

built level by level from dyadic blocks (`common.decay`). What a finds depends on what a found before it in the chunk:

    v2    = A_ak v + A_ab v2 + (a e^{before}) S_in = U (A_ak v + (a e^{before}) S_in),     U = (I - A_ab)^{-1}
    o     = A_rk v + A_rb v2 + (q e^{before}) S_in         A_rk, A_rb: A_qk, A_qb and their diagonals
    S_out = diag(e^{total}) S_in + (k e^{after})^T v + (b e^{after})^T v2

with before_i, after_i the sums of w over the chunk's rows before and after i. Backwards the same system is solved
transposed, y = U^T (A_rb^T do + (b e^{after}) D_out), and the gradients of both reads and both keys have RWKV6's form.
The gradient of the decay is the sum over everything that passes through it: each term carries its e^{w}.
"""

import torch
from torch import Tensor

from ..common.chunks import (
    apart,
    beside,
    join_chunks,
    own_pairs,
    pair_grads,
    pair_scores,
    split_chunks,
    weighed,
)
from ..common.decay import decays, level_blocks


def inverse(A: Tensor) -> Tensor:
    """(I - A)^{-1} for A strictly lower triangular [..., C, C], C a power of two, by recursive 2 x 2 blocks.

    The inverse of [[P, 0], [-Q, R]] is [[P', 0], [R' Q P', R']]: blocks double, and nothing grows that the inverse
    itself does not hold. The product (I + A)(I + A^2)(I + A^4)… is equal in algebra only: its powers are huge and
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
    """Everything of a call's chunks that does not depend on the state; rows are [B, H, N, C, K] or [B, H, N, C, V].

    `reads` holds q and a, `keys` holds k and b as neighbouring rows, [B, H, N, 2 C, K].
    """

    def __init__(self, r, w, k, v, a, b, scale, chunk_size):
        dtype = torch.promote_types(r.dtype, torch.float32)
        r, w, k, self.v, a, b = (split_chunks(x, chunk_size, dtype) for x in (r, w, k, v, a, b))
        self.r, self.now = r * scale, w.exp()
        self.before, self.after, self.total, self.levels = decays(w)
        self.reads, self.keys = beside(self.r * self.now, a), beside(k, b)
        self.q_in, self.a_in = self.r * self.now * self.before, a * self.before
        self.k_out, self.b_out = k * self.after, b * self.after

        A = pair_scores(self.reads, self.keys, self.levels)
        (self.A_rk, self.A_rb), (self.A_ak, A_ab) = ((x.contiguous() for x in apart(y, -1, 2)) for y in apart(A, -2, 2))
        for A, y in ((self.A_rk, k), (self.A_rb, b)):
            A.diagonal(0, -2, -1).copy_((self.r * y).sum(-1))
        self.U = inverse(A_ab)

    def states(self, initial_state) -> tuple[Tensor, Tensor, Tensor]:
        """The state entering each chunk [B, H, N, K, V], what a finds [B, H, N, C, V], and the final state."""
        found, written = self.A_ak @ self.v, self.k_out.mT @ self.v
        return _carry(self.total, self.a_in, found, self.U, self.b_out, written, initial_state)

    def dstates(self, do, dfinal_state) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient leaving each chunk [B, H, N, K, V], of what a looks up [B, H, N, C, V], and dinitial_state."""
        found, written = self.A_rb.mT @ do, self.q_in.mT @ do
        return _carry(self.total, self.b_out, found, self.U.mT, self.a_in, written, dfinal_state, reverse=True)


def _carry(total, read, found, U, write, written, state, reverse=False) -> tuple[Tensor, Tensor, Tensor]:
    """x = U (found + read S), then S <- diag(total) S + written + write^T x: every S, every x and the last S."""
    B, H, _, K, V = written.shape
    S = written.new_zeros(B, H, K, V) if state is None else state.to(written.dtype)
    entering, solved = torch.empty_like(written), torch.empty_like(found)
    each = (x.unbind(2) for x in (total[..., None], read, found, U, write, written, entering, solved))
    chunks = list(zip(*each, strict=True))
    for total, read, found, U, write, written, S_in, x in reversed(chunks) if reverse else chunks:
        S_in.copy_(S)
        x.copy_(U @ (found + read @ S))
        S = total * S + written + write.mT @ x
    return entering, solved, S


def forward(r, w, k, v, a, b, scale, initial_state, chunk_size) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] and the final state [B, H, K, V], in float32 (float64 for float64 inputs)."""
    chunks = _Chunks(r, w, k, v, a, b, scale, chunk_size)
    S, v2, final_state = chunks.states(initial_state)
    o = chunks.A_rk @ chunks.v + chunks.A_rb @ v2 + chunks.q_in @ S
    return join_chunks(o, r.shape[1]), final_state


def backward(r, w, k, v, a, b, scale, initial_state, do, dfinal_state, chunk_size) -> tuple[Tensor, ...]:
    """dr, dw, dk, dv, da, db [B, T, H, *] and dinitial_state [B, H, K, V], in float32 or float64."""
    T = r.shape[1]
    chunks = _Chunks(r, w, k, v, a, b, scale, chunk_size)
    do = split_chunks(do, chunk_size, chunks.r.dtype)
    S, v2, _ = chunks.states(initial_state)
    D, y, dinitial_state = chunks.dstates(do, dfinal_state)
    dv = chunks.A_rk.mT @ do + chunks.A_ak.mT @ y + chunks.k_out @ D

    # Between chunks, then inside. at_reads holds the gradients of what q and a read, written what k and b write.
    at_reads, written = beside(do, y), beside(chunks.v, v2)
    dreads = weighed(at_reads @ S.mT, chunks.before)
    dkeys = weighed(written @ D.mT, chunks.after)
    dw = (chunks.total * (S * D).sum(-1))[..., None, :].expand_as(chunks.r).clone()
    dA = at_reads @ written.mT
    pair_grads(dA, chunks.reads, chunks.keys, chunks.levels, dreads, dkeys, dw)

    # q = r e^{w} passes its own token's decay too; r meets its own token's keys without any.
    (q, _), (dq, da), (k, b), (dk, db) = (apart(x, -2, 2) for x in (chunks.reads, dreads, chunks.keys, dkeys))
    at_k, at_b = own_pairs(dA, chunk_size)[..., 0, :, None].unbind(-2)
    dw += q * dq
    dr = (dq * chunks.now + at_k * k + at_b * b) * scale
    dk, db = dk + at_k * chunks.r, db + at_b * chunks.r
    return (*(join_chunks(x, T) for x in (dr, dw, dk, dv, da, db)), dinitial_state)
