"""The kernel that reads offsets. The right and the faulty call differ only in the stride that they pass for them."""

import triton
import triton.language as tl
from torch import Tensor

from ...ops.common.dispatch import interpreted_alone


@triton.jit
def packed_kernel(
    r, k, v, w, o, offsets, stride, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o_t = scale r_t^T S, S <- diag(e^{w_t}) S + k_t v_t^T over the tokens of one sequence, from an empty S. In
    registers: S [BK, BV]. Tokens outside 0 … T - 1 are skipped: offsets read at a wrong stride may be any numbers."""
    i_n, i_h = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets + i_n * stride), tl.load(offsets + (i_n + 1) * stride)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    for t in range(begin, end):
        m_t = (t >= 0) & (t < T)
        row = t * H + i_h
        b_r = tl.load(r + row * K + o_k, mask=m_k & m_t, other=0.0)
        b_k = tl.load(k + row * K + o_k, mask=m_k & m_t, other=0.0)
        b_w = tl.load(w + row * K + o_k, mask=m_k & m_t, other=0.0)
        b_v = tl.load(v + row * V + o_v, mask=m_v & m_t, other=0.0)
        tl.store(o + row * V + o_v, tl.sum(b_S * b_r[:, None], 0) * scale, mask=m_v & m_t)
        b_S = tl.exp(b_w)[:, None] * b_S + b_k[:, None] * b_v[None, :]


@interpreted_alone()
def run_packed(r: Tensor, k: Tensor, v: Tensor, w: Tensor, o: Tensor, offsets: Tensor, raw: bool) -> None:
    """Compute o [1, T, H, V] from r, k, w [1, T, H, K], v, all contiguous, into o. raw: read offsets with stride 1."""
    _, T, H, K = k.shape
    V = v.shape[-1]
    stride = 1 if raw else offsets.stride(0)
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    packed_kernel[len(offsets) - 1, H](r, k, v, w, o, offsets, stride, K**-0.5, T, H=H, K=K, V=V, BK=BK, BV=BV)
