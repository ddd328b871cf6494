"""GSA one token after another as Triton kernels: the memory stays in registers, [M, BD] a program.

Both passes carry a state S [M, D] with the slots as rows, S <- diag(e^{g_t}) S + s_t y_t^T: hk turned to [M, K] with
y = k, and hv [M, V] with y = v. They differ in how S is read:

    first:   scores = S q     sums over D, so that blocks of D leave shares; the softmax of their sum is taken between
    second:  o = p^T S        sums over the slots

The gradients of a pass are the same too, with a row x over the slots (dscores or p) and one z over D (q or do), D_S
the gradient of S with the read x z^T at t included:

    dx = S z,   dz = S^T x,   ds += D_S y,   dy = D_S^T s,   dg += e^{g} sum_d S_{t-1} D_S

The second pass goes first: its dx is dp, which gives dscores. The states needed are recomputed segment after segment
from checkpoints, as in `rwkv6.recurrent_triton`; dg comes from the states themselves and cancels nothing.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import program
from ..common.launch import CHECKPOINT
from ..common.recurrence_triton import checkpoints, checkpoints_shape, cut, sequences, span, split_decay


@triton.jit
def pass_kernel(
    x, y, s, g, initial_state, out, states, final_state, cu_seqlens, offsets, T, tokens,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, WANTS_FINAL: tl.constexpr, KEEP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """S <- diag(e^{g_t}) S + s_t y_t^T, read by each query of the group. In registers: S [BM, BD].

    First: x = q [tokens, H G, D], out is this block's share of S q, [ND, tokens, H G, M].
    Second: x = p [tokens, H G, M], out = p^T S, [tokens, H G, D].
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_nh = program(ND)
    i_n, i_h = i_nh // H, i_nh % H
    o_m, o_d = tl.arange(0, BM), i_d * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    o_s, m_s = o_m[:, None] * D + o_d[None, :], m_m[:, None] & m_d[None, :]
    start, end, first = span(i_n, cu_seqlens, offsets, T, C, PACKED)
    share = i_d.to(tl.int64) * tokens * H * G

    b_S = tl.zeros([BM, BD], dtype=tl.float32)
    if HAS_INITIAL:
        b_S += tl.load(initial_state + i_nh.to(tl.int64) * M * D + o_s, mask=m_s, other=0.0)
    length = (end - start).to(tl.int32)
    for t in range(0, length):
        if KEEP:
            p_s = states + ((first + t // C) * H + i_h) * M * D + o_s
            tl.store(p_s, b_S, mask=m_s & (t % C == 0))
        row = (start + t) * H + i_h
        b_s = tl.load(s + row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
        b_g = tl.load(g + row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
        b_y = tl.load(y + row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        high, low = split_decay(b_g)
        b_S = high[:, None] * b_S + (low[:, None] * b_S + b_s[:, None] * b_y[None, :])
        for i_g in range(G):
            query = row * G + i_g
            if FIRST:
                b_x = tl.load(x + query * D + o_d, mask=m_d, other=0.0).to(tl.float32)
                tl.store(out + (share + query) * M + o_m, tl.sum(b_S * b_x[None, :], 1), mask=m_m)
            else:
                b_x = tl.load(x + query * M + o_m, mask=m_m, other=0.0)
                b_o = tl.sum(b_S * b_x[:, None], 0)
                tl.store(out + query * D + o_d, b_o.to(out.dtype.element_ty), mask=m_d)
    if WANTS_FINAL:
        tl.store(final_state + i_nh.to(tl.int64) * M * D + o_s, b_S, mask=m_s)


@triton.jit
def pass_grads_kernel(
    x, y, z, s, g, states, dfinal_state, scratch, dx, dy, dz, ds, dg, dinitial_state, cu_seqlens, offsets, T, tokens, N,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, FIRST: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Every gradient of one pass, from the last token. In registers: S or its gradient [BM, BD].

    x [tokens, H G, M] and z [tokens, H G, D] are each query's rows over the slots and over D; the first pass wants dz
    (dq), the second dx (dp). dx [ND, tokens, H G, M], ds and dg [ND, tokens, H, M] are this block's shares.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_nh = program(ND)
    i_n, i_h = i_nh // H, i_nh % H
    o_m, o_d = tl.arange(0, BM), i_d * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    o_s, m_s = o_m[:, None] * D + o_d[None, :], m_m[:, None] & m_d[None, :]
    start, end, first = span(i_n, cu_seqlens, offsets, T, C, PACKED)
    p_scratch = scratch + (i_d * N * H + i_nh).to(tl.int64) * C * BM * BD
    p_scratch += tl.arange(0, BM)[:, None] * BD + tl.arange(0, BD)[None, :]
    share = i_d.to(tl.int64) * tokens * H

    b_D = tl.zeros([BM, BD], dtype=tl.float32)
    if HAS_FINAL:
        b_D += tl.load(dfinal_state + i_nh.to(tl.int64) * M * D + o_s, mask=m_s, other=0.0)
    # A token's decay waits for the reads of the token before it: added alone, its low part would be rounded away.
    later_high, later_low = tl.full([BM], 1.0, dtype=tl.float32), tl.zeros([BM], dtype=tl.float32)
    segments = tl.cdiv(end - start, C).to(tl.int32)
    for j in range(0, segments):
        i = segments - 1 - j
        begin = start + tl.cast(i, tl.int64) * C
        length = tl.minimum(end - begin, C).to(tl.int32)
        b_S = tl.load(states + ((first + i) * H + i_h) * M * D + o_s, mask=m_s, other=0.0)
        for t in range(0, length):
            tl.store(p_scratch + t * BM * BD, b_S)
            row = (begin + t) * H + i_h
            b_s = tl.load(s + row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
            b_g = tl.load(g + row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
            b_y = tl.load(y + row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            high, low = split_decay(b_g)
            b_S = high[:, None] * b_S + (low[:, None] * b_S + b_s[:, None] * b_y[None, :])
        tl.debug_barrier()
        for u in range(0, length):
            t = length - 1 - u
            row = (begin + t) * H + i_h
            b_before = tl.load(p_scratch + t * BM * BD)
            b_s = tl.load(s + row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
            b_g = tl.load(g + row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
            b_y = tl.load(y + row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            high, low = split_decay(b_g)
            b_S = high[:, None] * b_before + (low[:, None] * b_before + b_s[:, None] * b_y[None, :])
            b_reads = later_low[:, None] * b_D
            for i_g in range(G):
                query = row * G + i_g
                b_x = tl.load(x + query * M + o_m, mask=m_m, other=0.0)
                b_z = tl.load(z + query * D + o_d, mask=m_d, other=0.0).to(tl.float32)
                b_reads += b_x[:, None] * b_z[None, :]
                if FIRST:
                    b_dz = tl.sum(b_S * b_x[:, None], 0)
                    tl.store(dz + query * D + o_d, b_dz.to(dz.dtype.element_ty), mask=m_d)
                else:
                    tl.store(dx + (share * G + query) * M + o_m, tl.sum(b_S * b_z[None, :], 1), mask=m_m)
            b_D = later_high[:, None] * b_D + b_reads
            later_high, later_low = high, low
            tl.store(dy + row * D + o_d, tl.sum(b_D * b_s[:, None], 0).to(dy.dtype.element_ty), mask=m_d)
            tl.store(ds + (share + row) * M + o_m, tl.sum(b_D * b_y[None, :], 1), mask=m_m)
            tl.store(dg + (share + row) * M + o_m, high * tl.sum(b_before * b_D, 1), mask=m_m)
        # The next segment overwrites the scratch that this one still reads.
        tl.debug_barrier()
    b_D = later_high[:, None] * b_D + later_low[:, None] * b_D
    tl.store(dinitial_state + i_nh.to(tl.int64) * M * D + o_s, b_D, mask=m_s)


def kept_shapes(q, k, v, s, g, cu_seqlens, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Shapes of what `forward` keeps for `backward`: p, and hk and hv every CHECKPOINT tokens, slots as rows."""
    return (*q.shape[:3], s.shape[-1]), *(checkpoints_shape(s, x.shape[-1], cu_seqlens) for x in (k, v))


def _slot_rows(states) -> tuple:
    """(hk [N, H, K, M], hv [N, H, M, V]) with hk turned to [N, H, M, K]."""
    return (None, None) if states is None else (states[0].mT.contiguous(), states[1].contiguous())


class _Passes:
    """What both passes of a call share."""

    def __init__(self, q, s, g, cu_seqlens):
        self.s, self.g, self.cu_seqlens = s, g, cu_seqlens
        (self.B, self.T, self.H, self.M), self.HQ = s.shape, q.shape[2]
        self.N, self.offsets = sequences(s, cu_seqlens)
        self.empty = s.new_empty(0, dtype=torch.float32).new_empty

    def rows(self, heads: int, ND: int) -> torch.Tensor:
        """Shares of numbers over the slots."""
        return self.empty(ND, self.B, self.T, heads, self.M)

    def run(self, x, y, out_dtype, first: bool, initial_state, wants_final: bool, keep: bool):
        """(S q [B, T, HQ, M] or p^T S [B, T, HQ, D], the final state or None, the checkpoints or None)."""
        D = y.shape[-1]
        BM, BD, ND, options = cut("gsa.recurrent", self.s, D)
        state = (self.N, self.H, self.M, D)
        out = self.rows(self.HQ, ND) if first else x.new_empty(self.B, self.T, self.HQ, D, dtype=out_dtype)
        final_state = self.empty(state) if wants_final else None
        kept = checkpoints(self.s, D, self.cu_seqlens) if keep else None
        pass_kernel[(ND * self.N * self.H,)](
            x, y, self.s, self.g, initial_state, out, kept, final_state, self.cu_seqlens, self.offsets, self.T,
            self.B * self.T, H=self.H, G=self.HQ // self.H, M=self.M, D=D, C=CHECKPOINT, BM=BM, BD=BD, FIRST=first,
            HAS_INITIAL=initial_state is not None, WANTS_FINAL=wants_final, KEEP=keep,
            PACKED=self.cu_seqlens is not None, **options,
        )  # fmt: skip
        return out.sum(0) if first else out, final_state, kept

    def differentiate(self, x, y, z, first: bool, kept, dfinal_state):
        """(dz of the first pass or dx of the second, dy, ds, dg, dinitial_state)."""
        D = y.shape[-1]
        BM, BD, ND, options = cut("gsa.recurrent_grads", self.s, D)
        dx, dz = (None, torch.empty_like(z)) if first else (self.rows(self.HQ, ND), None)
        ds, dg = self.rows(self.H, ND), self.rows(self.H, ND)
        dy, dinitial_state = torch.empty_like(y), self.empty(self.N, self.H, self.M, D)
        pass_grads_kernel[(ND * self.N * self.H,)](
            x, y, z, self.s, self.g, kept, dfinal_state, self.empty(ND * self.N * self.H, CHECKPOINT, BM, BD),
            dx, dy, dz, ds, dg, dinitial_state, self.cu_seqlens, self.offsets, self.T, self.B * self.T, self.N,
            H=self.H, G=self.HQ // self.H, M=self.M, D=D, C=CHECKPOINT, BM=BM, BD=BD, FIRST=first,
            HAS_FINAL=dfinal_state is not None, PACKED=self.cu_seqlens is not None, **options,
        )  # fmt: skip
        return dz if first else dx.sum(0), dy, ds.sum(0), dg.sum(0), dinitial_state


def forward(q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep):
    """o, (hk_T, hv_T) (None unless asked for), and as in `kept_shapes` (None unless kept)."""
    passes = _Passes(q, s, g, cu_seqlens)
    hk, hv = _slot_rows(initial_state)
    scores, last_hk, kept_hk = passes.run(q, k, None, True, hk, output_final_state, keep)
    p = (scale * scores).softmax(-1)
    o, last_hv, kept_hv = passes.run(p, v, q.dtype, False, hv, output_final_state, keep)
    return o, (last_hk.mT, last_hv) if output_final_state else None, (p, kept_hk, kept_hv) if keep else None


def backward(q, k, v, s, g, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dq, dk and dv in their inputs' dtypes, ds, dg and (dhk_0, dhv_0) in float32."""
    passes = _Passes(q, s, g, cu_seqlens)
    (p, hk, hv), (dhk, dhv) = kept, _slot_rows(dfinal_state)
    dp, dv, ds_v, dg_v, dhv = passes.differentiate(p, v, do, False, hv, dhv)
    dscores = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
    dq, dk, ds_k, dg_k, dhk = passes.differentiate(dscores, k, q, True, hk, dhk)
    return dq, dk, dv, ds_k + ds_v, dg_k + dg_v, (dhk.mT, dhv)
