"""Scores of one block of tokens with an anchored decay, as a kernel: for the cases that anchor or clamp it wrongly."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.common.dispatch import interpreted_alone


@triton.jit
def block_scores_kernel(
    q, k, read, g, n, A, T, bound,
    H: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ANCHOR: tl.constexpr, STRIDE: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    """A_ij = (q_i e^{read_i - n}) . (k_j e^{n - g_j}) for j <= i < T, with STRICT j < i; both exponents within +-bound.

    q, k, read, g [T, H, K], A [H, T, T], all float32, a program per head. n, the anchor, is the row [K] that begins
    ANCHOR * STRIDE + head * K numbers into the tensor n. In registers: the block of q and of k, [BC, BK].
    """
    i_h = tl.program_id(0)
    o_t, o_k = tl.arange(0, BC), tl.arange(0, BK)
    p_t = (o_t[:, None] * H + i_h) * K + o_k[None, :]
    m_k = o_k < K
    m_t = (o_t < T)[:, None] & m_k[None, :]
    b_n = tl.load(n + i_h * K + ANCHOR * STRIDE + o_k, mask=m_k, other=0.0)
    b_read = tl.load(read + p_t, mask=m_t, other=0.0) - b_n[None, :]
    b_key = b_n[None, :] - tl.load(g + p_t, mask=m_t, other=0.0)
    b_q = tl.load(q + p_t, mask=m_t, other=0.0) * tl.exp(tl.minimum(tl.maximum(b_read, -bound), bound))
    b_k = tl.load(k + p_t, mask=m_t, other=0.0) * tl.exp(tl.minimum(tl.maximum(b_key, -bound), bound))
    b_A = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_A = tl.where(o_t[:, None] >= o_t[None, :] + STRICT, b_A, 0.0)
    tl.store(A + (i_h * T + o_t[:, None]) * T + o_t[None, :], b_A, mask=(o_t < T)[:, None] & (o_t < T)[None, :])


@interpreted_alone()
def scores(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    *,
    anchor: int,
    read: Tensor | None = None,
    n: Tensor | None = None,
    short: bool = False,
    bound: float = float("inf"),
) -> Tensor:
    """Return scores A [H, T, T] float32 of q, k [T, H, K] under cumulative log decays g [T, H, K], anchored at one row.

    anchor: the row of g, or of n [*, H, K], that is the anchor. bound: both exponents are clamped to +-bound.
    read: the cumulative decay at each read, [T, H, K]; then no token reads itself. Default: g, and each does.
    short: the fault of `wrong_head_anchor`: the anchor's address has a stride of K per token instead of H K.
    """
    T, H, K = g.shape
    strict = read is not None
    read, n = g if read is None else read, g if n is None else n
    q, k, read, g, n = (x.float().contiguous() for x in (q, k, read, g, n))
    A = torch.empty(H, T, T, dtype=torch.float32, device=g.device)
    BC, BK = (max(16, triton.next_power_of_2(size)) for size in (T, K))
    sizes = {"H": H, "K": K, "BC": BC, "BK": BK, "ANCHOR": anchor, "STRIDE": K if short else H * K}
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter is numpy, and warns of what is to be seen here
        block_scores_kernel[H,](q, k, read, g, n, A, T, bound, **sizes, STRICT=int(strict))
    return A
