"""Triton kernels that had bug A: blocks anchored at their first row, one too late. The row to load is an argument."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.common.dispatch import interpreted_alone


@triton.jit
def load_anchor(
    gi, i_c, i_b, o_k, m_k,
    C: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, ANCHOR: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Load the anchor of block i_b in chunk i_c: gi of the row ANCHOR tokens after the block's first, [BK], from gi [N,
    C, K]; o_k, m_k: channels and their mask. A row before the chunk is 0, with ACROSS the previous chunk's row."""
    row = i_b * BC + ANCHOR
    if ACROSS:
        m_row = i_c * C + row >= 0
    else:
        m_row = row >= 0
    return tl.load(gi + (i_c * C + row) * K + o_k, mask=m_k & m_row, other=0.0)


@triton.jit
def scores_kernel(
    q, k, seen, gi, A,
    N, K: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    ANCHOR: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute A_ij = (q_i e^{seen_i - n}) . (k_j e^{n - gi_j}) for rows i of a block and keys j of earlier blocks.

    n is the block's anchor. q, k, seen, gi [heads, N, C, K] float32; seen and gi are cumulative natural-log decays, up
    to the read and up to the key. A [heads, N, C, C]. In registers: a block of reads and one of keys, [BC, BK].
    """
    i_b, i_c, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = i_h * N * C * K
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_i = i_b * BC + tl.arange(0, BC)
    p_i, m_i = (i_c * C + o_i[:, None]) * K + o_k[None, :], m_k[None, :] & (o_i < C)[:, None]
    b_n = load_anchor(gi + base, i_c, i_b, o_k, m_k, C, BC, K, ANCHOR, ACROSS)
    b_q = tl.load(q + base + p_i, mask=m_i, other=0.0)
    b_q = b_q * tl.exp(tl.load(seen + base + p_i, mask=m_i, other=0.0) - b_n[None, :])
    for n in range(0, C // BC):
        if n < i_b:
            o_j = n * BC + tl.arange(0, BC)
            p_j, m_j = (i_c * C + o_j[:, None]) * K + o_k[None, :], m_k[None, :] & (o_j < C)[:, None]
            b_k = tl.load(k + base + p_j, mask=m_j, other=0.0)
            b_k = b_k * tl.exp(b_n[None, :] - tl.load(gi + base + p_j, mask=m_j, other=0.0))
            b_A = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BC, BC]
            tl.store(A + ((i_h * N + i_c) * C + o_i[:, None]) * C + o_j[None, :], b_A)


@triton.jit
def read_kernel(
    A, k, seen, gi, d,
    N, K: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    ANCHOR: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute d_i = e^{seen_i - n} sum_j A_ij (k_j e^{n - gi_j}), for rows and keys as in `scores_kernel`. A [heads, N,
    C, C]; k, seen, gi, d [heads, N, C, K]. In registers: d of one block, [BC, BK]."""
    i_b, i_c, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = i_h * N * C * K
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_i = i_b * BC + tl.arange(0, BC)
    p_i, m_i = (i_c * C + o_i[:, None]) * K + o_k[None, :], m_k[None, :] & (o_i < C)[:, None]
    b_n = load_anchor(gi + base, i_c, i_b, o_k, m_k, C, BC, K, ANCHOR, ACROSS)
    b_d = tl.zeros([BC, BK], dtype=tl.float32)
    for n in range(0, C // BC):
        if n < i_b:
            o_j = n * BC + tl.arange(0, BC)
            p_j, m_j = (i_c * C + o_j[:, None]) * K + o_k[None, :], m_k[None, :] & (o_j < C)[:, None]
            b_k = tl.load(k + base + p_j, mask=m_j, other=0.0)
            b_k = b_k * tl.exp(b_n[None, :] - tl.load(gi + base + p_j, mask=m_j, other=0.0))
            b_A = tl.load(A + ((i_h * N + i_c) * C + o_i[:, None]) * C + o_j[None, :])
            b_d += tl.dot(b_A, b_k, input_precision="ieee")
    if ACROSS or i_b > 0:
        b_d = b_d * tl.exp(tl.load(seen + base + p_i, mask=m_i, other=0.0) - b_n[None, :])
    tl.store(d + base + p_i, b_d, mask=m_i)


@interpreted_alone()
def _launch(kernel, first: Tensor, key: Tensor, seen: Tensor, gi: Tensor, last: int, block: int, **options) -> Tensor:
    """Launch `kernel` on first, key, seen and gi [..., N, C, *], whose leading axes broadcast. Return a float32 tensor
    [..., N, C, last], or [..., N, C, C] for last = 0."""
    *_, N, C, K = key.shape
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (first, key, gi)))
    inputs = [x.expand(*lead, *x.shape[-3:]).contiguous() for x in (first, key, seen, gi)]
    out = torch.zeros(*lead, N, C, last or C, dtype=torch.float32, device=key.device)
    kernel[C // block, N, lead.numel()](
        *inputs, out, N, K=K, C=C, BC=block, BK=max(16, triton.next_power_of_2(K)), **options
    )  # fmt: skip
    return out


def scores(query: Tensor, key: Tensor, seen: Tensor, gi: Tensor, block: int, anchor: int, across: bool) -> Tensor:
    """Return `Products.scores` [..., N, C, C] for pairs in different blocks, else 0. anchor: of `load_anchor`."""
    return _launch(scores_kernel, query, key, seen, gi, 0, block, ANCHOR=anchor, ACROSS=across)


def read(A: Tensor, key: Tensor, seen: Tensor, gi: Tensor, block: int, anchor: int, across: bool) -> Tensor:
    """Return `Products.read` over pairs in different blocks, [..., N, C, K] float32. anchor: of `load_anchor`."""
    return _launch(read_kernel, A, key, seen, gi, key.shape[-1], block, ANCHOR=anchor, ACROSS=across)
