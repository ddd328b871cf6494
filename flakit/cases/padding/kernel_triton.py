"""The kernel of `padding`'s key gradients. The faulty and the right form differ in the value loaded beyond token T."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.common.dispatch import interpreted_alone


@triton.jit
def key_grads_kernel(
    A, x, seen, gi, d, T,
    K: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """d_j = e^{n - gi_j} sum_i A_ij (x_i e^{seen_i - n}) over the rows i of later blocks of j's chunk; see `key_grads`.

    n = gi of the last token of j's block. A [B H, T, C], the others [B H, T, K]. In registers: d of one block, [BC,
    BK]. Beyond T a load gives 0, to A and x always, to `seen` unless FORM is "right", which gives -inf there.
    """
    i_b, i_bh = tl.program_id(0), tl.program_id(1)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_j = i_b * BC + tl.arange(0, BC)
    p_j, m_j = (i_bh * T + o_j[:, None]) * K + o_k[None, :], (o_j < T)[:, None] & m_k[None, :]
    chunk_end = (i_b * BC // C + 1) * C
    if FORM == "blocks":
        chunk_end = tl.minimum(chunk_end, tl.cdiv(T, BC) * BC)
    last = tl.minimum(i_b * BC + BC, T) - 1
    b_n = tl.load(gi + (i_bh * T + last) * K + o_k, mask=m_k, other=0.0)
    b_d = tl.zeros([BC, BK], dtype=tl.float32)
    for n in range(1, C // BC):
        o_i = i_b * BC + n * BC + tl.arange(0, BC)
        m_i = (o_i < T)[:, None] & m_k[None, :]
        p_i = (i_bh * T + o_i[:, None]) * K + o_k[None, :]
        if (i_b + n) * BC < chunk_end:
            if FORM == "right":
                b_seen = tl.load(seen + p_i, mask=m_i, other=float("-inf"))
            else:
                b_seen = tl.load(seen + p_i, mask=m_i, other=0.0)
            b_x = tl.load(x + p_i, mask=m_i, other=0.0) * tl.exp(b_seen - b_n[None, :])  # [BC, BK]
            p_A = (i_bh * T + o_i[None, :]) * C + (o_j % C)[:, None]
            b_A = tl.load(A + p_A, mask=(o_i < T)[None, :], other=0.0)  # [BC keys, BC rows]
            b_d += tl.dot(b_A, b_x, input_precision="ieee")
    b_gi = tl.load(gi + p_j, mask=m_j, other=0.0)
    tl.store(d + p_j, b_d * tl.exp(b_n[None, :] - b_gi), mask=m_j)


@interpreted_alone()
def key_grads(A: Tensor, x: Tensor, seen: Tensor, gi: Tensor, T: int, block: int, form: str) -> Tensor:
    """Return what rows of later blocks contribute to the key gradients, [B, H, N, C, K] like x, and 0 beyond T.

    A [B, H, N, C, C]: the gradient of each pair's score; x: the rows' queries; seen: the cumulative log decay in the
    chunk at each row's read; gi: at each key. The kernel gets T tokens alone; form decides what it loads beyond them.
    """
    B, H, N, C, K = x.shape

    def tokens(y: Tensor) -> Tensor:
        return y.expand(B, H, N, C, y.shape[-1]).reshape(B * H, N * C, -1)[:, :T].contiguous()

    A, x, seen, gi = (tokens(y) for y in (A, x, seen, gi))
    d = torch.zeros(B * H, N * C, K, dtype=x.dtype, device=x.device)
    rows = torch.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter is numpy, and warns of what is to be seen here
        key_grads_kernel[triton.cdiv(T, block), B * H](
            A, x, seen, gi, rows, T, K=K, C=C, BC=block, BK=max(16, triton.next_power_of_2(K)), FORM=form
        )
    d[:, :T] = rows
    return d.view(B, H, N, C, K)
