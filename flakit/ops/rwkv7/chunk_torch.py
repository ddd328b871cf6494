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

from ..common.chunks import join_chunks, pair_grads, pair_scores, split_chunks
from ..common.decay import level_blocks, sum_after, sum_before


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
    """Everything of a call's chunks that does not depend on the state; rows are [B, H, N, C, K] or [B, H, N, C, V]."""

    def __init__(self, r, w, k, v, a, b, scale, chunk_size):
        dtype = torch.promote_types(r.dtype, torch.float32)
        r, w, k, self.v, a, b = (split_chunks(x, chunk_size, dtype) for x in (r, w, k, v, a, b))
        self.w, self.r = w, r * scale
        self.reads, self.keys = torch.stack((self.r * w.exp(), a)), torch.stack((k, b))
        self.before, self.after, self.total = sum_before(w).exp(), sum_after(w).exp(), w.sum(-2).exp()
        (A_rk, A_rb), (self.A_ak, A_ab) = pair_scores(torch.stack((self.reads,) * 2, 1), self.keys[None], w)
        self.A_rk, self.A_rb = (
            A + torch.diag_embed((self.r * y).sum(-1)) for A, y in zip((A_rk, A_rb), self.keys, strict=True)
        )
        self.U = inverse(A_ab)
        self.q_in, self.a_in = self.reads * self.before
        self.k_out, self.b_out = self.keys * self.after

    def no_state(self) -> Tensor:
        B, H, _, _, K = self.w.shape
        return self.w.new_zeros(B, H, K, self.v.shape[-1])

    def states(self, initial_state) -> tuple[Tensor, Tensor, Tensor]:
        """The state entering each chunk [B, H, N, K, V], what a finds [B, H, N, C, V], and the final state."""
        found, transfer = self.U @ (self.A_ak @ self.v), self.U @ self.a_in
        written = self.k_out.mT @ self.v
        S = self.no_state() if initial_state is None else initial_state.to(written.dtype)
        entering, v2 = torch.empty_like(written), torch.empty_like(self.v)
        for n in range(written.shape[2]):
            entering[:, :, n] = S
            v2[:, :, n] = found[:, :, n] + transfer[:, :, n] @ S
            S = self.total[:, :, n, :, None] * S + written[:, :, n] + self.b_out[:, :, n].mT @ v2[:, :, n]
        return entering, v2, S

    def dstates(self, do, dfinal_state) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient leaving each chunk [B, H, N, K, V], of what a looks up [B, H, N, C, V], and dinitial_state."""
        found, transfer = self.U.mT @ (self.A_rb.mT @ do), self.U.mT @ self.b_out
        written = self.q_in.mT @ do
        D = self.no_state() if dfinal_state is None else dfinal_state.to(written.dtype)
        leaving, y = torch.empty_like(written), torch.empty_like(do)
        for n in reversed(range(written.shape[2])):
            leaving[:, :, n] = D
            y[:, :, n] = found[:, :, n] + transfer[:, :, n] @ D
            D = self.total[:, :, n, :, None] * D + written[:, :, n] + self.a_in[:, :, n].mT @ y[:, :, n]
        return leaving, y, D


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
    w, reads, keys = chunks.w, chunks.reads, chunks.keys
    do = split_chunks(do, chunk_size, w.dtype)
    S, v2, _ = chunks.states(initial_state)
    D, y, dinitial_state = chunks.dstates(do, dfinal_state)
    dv = chunks.A_rk.mT @ do + chunks.A_ak.mT @ y + chunks.k_out @ D

    # Between chunks; at_reads holds the gradients of what q and a read, written what k and b write.
    at_reads, written = torch.stack((do, y)), torch.stack((chunks.v, v2))
    dreads = at_reads @ S.mT * chunks.before
    dkeys = written @ D.mT * chunks.after
    dw = (chunks.total * (S * D).sum(-1))[..., None, :]
    dw = dw + sum_after((reads * dreads).sum(0)) + sum_before((keys * dkeys).sum(0))

    # Inside: both reads with both keys.
    dA = at_reads[:, None] @ written[None].mT
    dreads_pairs, dkeys_pairs, dw_pairs = pair_grads(dA, reads[:, None], keys[None], w)
    dreads, dkeys, dw = dreads + dreads_pairs.sum(1), dkeys + dkeys_pairs.sum(0), dw + dw_pairs.sum((0, 1))

    # q = r e^{w} passes its own token's decay too; r meets its own token's keys without any.
    dq, da = (x.clone() for x in dreads)  # what an operator returns may not share memory
    dw = dw + reads[0] * dq
    diagonal = dA[0].diagonal(0, -2, -1)[..., None]
    dr = (dq * w.exp() + (diagonal * keys).sum(0)) * scale
    dk, db = (x.clone() for x in dkeys + diagonal * chunks.r)
    return (*(join_chunks(x, T) for x in (dr, dw, dk, dv, da, db)), dinitial_state)
