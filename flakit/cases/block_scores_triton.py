"""One block's scores around an anchor, as kernels form them: three faults live in where the anchor is read, and how."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.common.dispatch import interpreted_alone


@triton.jit
def block_scores_kernel(
    q, k, g, A, T, bound,
    H: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ANCHOR: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """A_ij = (q_i e^{g_i - n}) . (k_j e^{n - g_j}) for j <= i < T, both exponents within +-bound.

    n lies ANCHOR times STRIDE numbers after the head's first row of g; a token is H K numbers. In registers: the block
    of q and of k, [BC, BK].
    """
    i_h = tl.program_id(0)
    o_t, o_k = tl.arange(0, BC), tl.arange(0, BK)
    p_t = (o_t[:, None] * H + i_h) * K + o_k[None, :]
    m_k = o_k < K
    m_t = (o_t < T)[:, None] & m_k[None, :]
    b_n = tl.load(g + i_h * K + ANCHOR * STRIDE + o_k, mask=m_k, other=0.0)
    b_d = tl.load(g + p_t, mask=m_t, other=0.0) - b_n[None, :]
    b_d = tl.minimum(tl.maximum(b_d, -bound), bound)
    b_q = tl.load(q + p_t, mask=m_t, other=0.0) * tl.exp(b_d)
    b_k = tl.load(k + p_t, mask=m_t, other=0.0) * tl.exp(-b_d)
    b_A = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_A = tl.where(o_t[:, None] >= o_t[None, :], b_A, 0.0)
    tl.store(A + (i_h * T + o_t[:, None]) * T + o_t[None, :], b_A, mask=(o_t < T)[:, None] & (o_t < T)[None, :])


@interpreted_alone()
def scores(q: Tensor, k: Tensor, g: Tensor, *, anchor: int, short: bool = False, bound: float = float("inf")) -> Tensor:
    """A [H, T, T] float32; q, k and cumulative log decays g [T, H, K], anchored at a row of g.

    short: the fault of the wrong head, K numbers a token instead of H K.
    """
    T, H, K = g.shape
    q, k, g = (x.float().contiguous() for x in (q, k, g))
    A = torch.empty(H, T, T, dtype=torch.float32, device=g.device)
    BC, BK = (max(16, triton.next_power_of_2(size)) for size in (T, K))
    stride = K if short else H * K
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter is numpy, and warns of what is to be seen here
        block_scores_kernel[H,](q, k, g, A, T, bound, H=H, K=K, BC=BC, BK=BK, ANCHOR=anchor, STRIDE=stride)
    return A
