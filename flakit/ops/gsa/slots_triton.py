"""What both paths through a chunk share: loading stored memories, with slots as rows, and the softmax over slots."""

import triton
import triton.language as tl

from ..common.tiles_triton import (
    state_pointers,
)


@triton.jit
def memory(states, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Load a block of columns of memory i of states [memories, M, D] as stored, [BM, BD]; zeros unless `there`."""
    p, m = state_pointers(states, i, 0, i_d, M, D, BM, BD)
    return tl.load(p, mask=m & there, other=0.0)


@triton.jit
def units(scales, i, there, i_d, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
          BS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Load the row scales of that block, [BM]; ones unless SCALED. BS: columns that share a scale."""
    o_m = tl.arange(0, BM)
    if SCALED:
        BLOCKS = (D + BS - 1) // BS
        return tl.load(scales + (i.to(tl.int64) * BLOCKS + i_d * BD // BS) * M + o_m, mask=(o_m < M) & there, other=0.0)
    else:
        return tl.full([BM], 1.0, tl.float32)


@triton.jit
def softmax(b_scores, M: tl.constexpr, BM: tl.constexpr):
    b_scores = tl.where((tl.arange(0, BM) < M)[None, :], b_scores, -float("inf"))
    b_p = tl.exp(b_scores - tl.max(b_scores, 1)[:, None])
    return b_p / tl.sum(b_p, 1)[:, None]


@triton.jit
def softmax_grads(b_p, b_dp, SCALED: tl.constexpr):
    """Return p (dp - <p, dp>), as `chunk_torch.softmax_grads` does; SCALED, for 16-bit inputs: without its shift."""
    if not SCALED:
        largest = tl.max(b_p, 1)[:, None]
        b_dp -= tl.max(tl.where(b_p == largest, b_dp, -float("inf")), 1)[:, None]
    return b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
