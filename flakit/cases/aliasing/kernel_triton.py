"""The two kernels of the case that write to the memory they read from, which PyTorch cannot notice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.common.dispatch import interpreted_alone


@triton.jit
def running_sum_kernel(w, T, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Overwrite w [B, T, H, K] with its running sum within each chunk of C tokens. In registers: a row [BK]."""
    i_c, i_bh = tl.program_id(0), tl.program_id(1)
    o_k = tl.arange(0, BK)
    b_sum = tl.zeros([BK], dtype=tl.float32)
    for i in range(0, C):
        t = i_c * C + i
        p_w = w + ((i_bh // H * T + t) * H + i_bh % H) * K + o_k
        m_w = (o_k < K) & (t < T)
        b_sum += tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)
        tl.store(p_w, b_sum.to(w.dtype.element_ty), mask=m_w)


@interpreted_alone()
def overwrite(w: Tensor, chunk: int) -> None:
    """Replace contiguous w [B, T, H, K] by its running sum within each chunk of `chunk` tokens, in place."""
    B, T, H, K = w.shape
    running_sum_kernel[triton.cdiv(T, chunk), B * H](w, T, H=H, K=K, C=chunk, BK=triton.next_power_of_2(K))


@triton.jit
def decode_kernel(
    q, k, v, s, g, hk, hv, o, final_hk, final_hv, scale,
    K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One token of GSA for one head: hk <- hk diag(e^g) + k s^T, p = softmax(scale q^T hk), hv <- diag(e^g) hv + s v^T,
    o = p^T hv. In registers: hk [BK, BM], hv [BM, BV]. The kernel is right; the fault is a caller that passes the same
    addresses for hk and final_hk, hv and final_hv."""
    i_bh = tl.program_id(0)
    o_k, o_v, o_m = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BM)
    m_k, m_v, m_m = o_k < K, o_v < V, o_m < M
    o_hk, m_hk = o_k[:, None] * M + o_m[None, :], m_k[:, None] & m_m[None, :]
    o_hv, m_hv = o_m[:, None] * V + o_v[None, :], m_m[:, None] & m_v[None, :]
    b_q = tl.load(q + i_bh * K + o_k, mask=m_k, other=0.0) * scale
    b_k = tl.load(k + i_bh * K + o_k, mask=m_k, other=0.0)
    b_v = tl.load(v + i_bh * V + o_v, mask=m_v, other=0.0)
    b_s = tl.load(s + i_bh * M + o_m, mask=m_m, other=0.0)
    b_kept = tl.exp(tl.load(g + i_bh * M + o_m, mask=m_m, other=0.0))

    b_hk = tl.load(hk + i_bh * K * M + o_hk, mask=m_hk, other=0.0) * b_kept[None, :] + b_k[:, None] * b_s[None, :]
    tl.store(final_hk + i_bh * K * M + o_hk, b_hk, mask=m_hk)
    b_scores = tl.where(m_m, tl.sum(b_hk * b_q[:, None], 0), float("-inf"))
    b_p = tl.exp(b_scores - tl.max(b_scores, 0))
    b_p = b_p / tl.sum(b_p, 0)
    b_hv = tl.load(hv + i_bh * M * V + o_hv, mask=m_hv, other=0.0) * b_kept[:, None] + b_s[:, None] * b_v[None, :]
    tl.store(final_hv + i_bh * M * V + o_hv, b_hv, mask=m_hv)
    tl.store(o + i_bh * V + o_v, tl.sum(b_p[:, None] * b_hv, 0), mask=m_v)


@interpreted_alone()
def decode(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, hk: Tensor, hv: Tensor, scale: float, in_place: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return o [B, 1, H, V] of one token and its final states hk [B, H, K, M], hv [B, H, M, V], contiguous float32 as
    all inputs. in_place: the final states overwrite hk and hv; otherwise they are new tensors."""
    B, H, K, M = hk.shape
    V = hv.shape[-1]
    o = torch.empty_like(v)
    final_hk, final_hv = (hk, hv) if in_place else (torch.empty_like(hk), torch.empty_like(hv))
    BK, BV, BM = (triton.next_power_of_2(size) for size in (K, V, M))
    decode_kernel[B * H,](
        q, k, v, s, g, hk, hv, o, final_hk, final_hv, scale, K=K, V=V, M=M, BK=BK, BV=BV, BM=BM
    )  # fmt: skip
    return o, (final_hk, final_hv)
