"""What the token-by-token kernels of all operators share: loading tokens, an exact decay, blocks of a state.

A program carries a state's [BK, BV] block over one sequence, U tokens a turn. A load takes longer than a step, so the
rows of the next turn load while a program computes with those of the current one. Rows past the end of a sequence are
0, which changes neither a state nor its gradient.

The backward needs the states again and cannot divide by a decay to walk back, so the forward stores one every
CHECKPOINT tokens. The backward walks these tokens from there twice: first forward, writing the state before every turn
to a scratch buffer; then turn by turn in reverse, with the states within a turn in registers. The scratch buffer has
the key channels (in GSA the slots) last, which gives a thread four consecutive ones: what a row of keys holds then
reaches the threads by shuffles, without shared memory and its barriers.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .blocks_triton import arrived
from .launch import CHECKPOINT, TABLE, TOGETHER, Launch, block, width
from .packed_triton import Packing

ROWS = 64
"""Rows of a state (in RWKV6's backward columns) for which the launch table's num_warps holds; more get more warps."""


@triton.jit
def load_turn(
    keys, values, start, t, length, i_h, o_k, m_k, o_v, m_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr,
):  # fmt: skip
    """Issue the loads of tokens t … t + U - 1 of a sequence. Return a tuple for each token: [1, BK] from each of `keys`
    [rows, H, K], then [BV, 1] from each of `values` [rows, H, V]; zeros outside the sequence. start, length: its first
    row, its tokens. o_k, m_k [BK], o_v, m_v [BV]: indices of channels, masks of those that exist."""
    turn = ()
    for n in tl.static_range(U):
        row, within = (start + t + n) * H + i_h, (t + n >= 0) & (t + n < length)
        rows = ()
        for x in tl.static_range(len(keys)):
            rows += (tl.load(keys[x] + row * K + o_k[None, :], mask=m_k[None, :] & within, other=0.0),)
        for x in tl.static_range(len(values)):
            rows += (tl.load(values[x] + row * V + o_v[:, None], mask=m_v[:, None] & within, other=0.0),)
        turn += (rows,)
    return turn


@triton.jit
def arrived_turn(turn):
    """Wait for the result of `load_turn` and return it in float32."""
    loaded = ()
    for n in tl.static_range(len(turn)):
        rows = ()
        for x in tl.static_range(len(turn[n])):
            rows += (arrived(turn[n][x]).to(tl.float32),)
        loaded += (rows,)
    return loaded


@triton.jit
def as_vector(x):
    """Return a row, [1, D] of a key or [D, 1] of a value, as [D], for products with a state.

    A thread holds some elements of a row and needs those that multiply its part of the state. To change the layout,
    Triton would exchange what the row is computed from and recompute the row in every thread; a sum over the axis of
    one element it computes once, and exchanges the result. Rows are loaded with the axis of one element where the
    state has its axis of these channels, or Triton would give the state the row's layout.
    """
    if x.shape[0] == 1:
        x = tl.sum(x, 0)
    else:
        x = tl.sum(x, 1)
    return x


@triton.jit
def split_decay(b_w):
    """Return e^w as high + low; low is the rounding error of float32 where w > -1/2, 0 elsewhere.

    A slow decay multiplies a state thousands of times by nearly the same number, so that this number's rounding error
    accumulates instead of averaging out: 2e-5 at w = -1e-4 over 4096 tokens with e^w in one float32.
    """
    w = tl.maximum(b_w, -0.5)
    # e^w - 1 by its Taylor series; the last term is below 1e-9 of the sum.
    minus_one = 1.0 + w / 9.0
    for n in tl.static_range(2, 9):
        minus_one = 1.0 + w / (10 - n) * minus_one
    minus_one = w * minus_one
    high = 1.0 + minus_one
    low = minus_one - (high - 1.0)
    slow = b_w > -0.5
    return tl.where(slow, high, tl.exp(b_w)), tl.where(slow, low, 0.0)


@triton.jit
def relayout(p, x, m):
    """Store the tile x at pointers p, with mask m, and load it back: it then has the layout of the states stored there.

    Triton picks each tensor's layout by its first use, and duplicates computations that combine two layouts.
    """
    tl.store(p, x, mask=m)
    tl.debug_barrier()
    x = tl.load(p, mask=m, other=0.0)
    tl.debug_barrier()
    return x


def blocks_and_options(kernel: str, x: torch.Tensor, V: int) -> tuple[int, int, int, dict]:
    """Return BK (covering K), BV, the number of blocks along V, and launch options. x [B, T, H, K]. Raises ValueError
    if K exceeds the kernel's largest block."""
    return _blocks_and_options(TABLE[kernel, width(x.element_size())], x.shape[-1], V)


@lru_cache(1024)
def _blocks_and_options(launch: Launch, K: int, V: int) -> tuple[int, int, int, dict]:
    BK, BV = block(K, launch.BK), block(V, launch.BV)
    if K > BK:
        raise ValueError(f"r: expected K <= {BK} for the recurrent kernel, got K = {K}")
    warps = min(16, launch.num_warps * max(1, BK // ROWS))
    return BK, BV, -(-V // BV), dict(num_warps=warps, num_stages=launch.num_stages)


def checkpoints_shape(x: torch.Tensor, V: int, packing: Packing | None) -> tuple[int, int, int, int]:
    """Return the shape of `checkpoints`, the states before every CHECKPOINT tokens, whatever the packing's offsets."""
    B, T, H, K = x.shape
    count = B * -(-T // CHECKPOINT) if packing is None else packing.capacity(CHECKPOINT)
    return count, H, K, V


def checkpoints(x: torch.Tensor, V: int, packing: Packing | None) -> torch.Tensor:
    """Allocate states for every CHECKPOINT tokens of x [B, T, H, K]: float32 [checkpoints, H, K, V], 0 if packed."""
    # A packed batch may fill fewer than are allocated, and an operator's output must not be uninitialized.
    allocate = x.new_empty if packing is None else x.new_zeros
    return allocate(checkpoints_shape(x, V, packing), dtype=torch.float32)


def tokens_per_turn(T: int, queries: int = 1) -> int:
    """Return how many tokens a program loads at once: 1 for a decode step; fewer with several queries a token."""
    return 1 if T == 1 else max(1, TOGETHER // queries)


def new_shares(blocks: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Allocate a gradient of each input from each block of a state, [blocks, ...] in float32; for a single block, of
    the input's own shape and dtype."""
    if blocks == 1:
        return [torch.empty_like(x) for x in inputs]
    return [x.new_empty(blocks, *x.shape, dtype=torch.float32) for x in inputs]


def sum_blocks(blocks: int, shares: torch.Tensor) -> torch.Tensor:
    """Return the gradient [...] of an input: the sum over blocks of the partial ones from `new_shares`."""
    return shares if blocks == 1 else shares.sum(0)


def sequences(x: torch.Tensor, packing: Packing | None) -> tuple[int, tuple]:
    """Return N and, for `locate_sequence`, (cu_seqlens, checkpoints_before), [N + 1] each, or Nones if not packed."""
    if packing is None:
        return x.shape[0], (None, None)
    before = packing.pieces(CHECKPOINT).before
    return packing.N, (packing.offsets, before)
