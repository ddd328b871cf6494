"""What every operator's step-by-step kernels share: the tokens of a sequence, an exact decay, the cuts of a state.

A program carries a state's [BK, BV] block over one sequence, U tokens a turn. A load takes longer than a step: while a
program computes with the rows of one turn, those of the next are on their way. Behind the end of a sequence rows are 0,
which change neither a state nor its gradient.

Its backward needs the states again and cannot divide by a decay to walk back, so the forward keeps one every CHECKPOINT
tokens. From it the backward walks a segment twice: first it writes the state before every turn to a scratch buffer;
then it takes the turns in reverse, and the states within one stay in registers.
"""

import torch
import triton
import triton.language as tl

from .blocks_triton import arrived
from .launch import CHECKPOINT, TABLE, TOGETHER, block, width
from .packed_triton import Packing

ROWS = 64
"""Rows of a state for which the launch table's warps are meant; a taller one gets more of them."""


@triton.jit
def span(i_n, cu_seqlens, offsets, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Where sequence i_n begins and ends, and the number of its first checkpoint."""
    if PACKED:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        first = tl.load(offsets + i_n).to(tl.int64)
    else:
        start = i_n.to(tl.int64) * T
        end = start + T
        first = i_n.to(tl.int64) * tl.cdiv(T, C)
    return start, end, first


@triton.jit
def load_turn(
    keys, values, start, t, length, i_h, o_k, m_k, o_v, m_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr,
):  # fmt: skip
    """Rows of U tokens of a sequence, the one numbered t and those behind it, on their way: a tuple a token, of [1, BK]
    from each of `keys` [rows, K] and then [BV, 1] from each of `values` [rows, V]. Where there is no such token, 0.
    """
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
    """What `load_turn` gave, in float32, for use from here on."""
    found = ()
    for n in tl.static_range(len(turn)):
        rows = ()
        for x in tl.static_range(len(turn[n])):
            rows += (arrived(turn[n][x]).to(tl.float32),)
        found += (rows,)
    return found


@triton.jit
def taken(x):
    """A row, [1, D] of a key or [D, 1] of a value, as [D], to meet a state.

    Each thread has some of a row's numbers, and needs all of those that meet its part of the state. Triton would rather
    hand round what a row was made of, and have every thread make the row anew; a sum it makes where its numbers are.
    Rows lie across how they meet a state, or Triton would spread the state over the threads as the row is.
    """
    if x.shape[0] == 1:
        x = tl.sum(x, 0)
    else:
        x = tl.sum(x, 1)
    return x


@triton.jit
def split_decay(b_w):
    """e^w as high + low, low being what float32 loses of it where w > -1/2 and 0 elsewhere.

    A slow decay multiplies a state thousands of times by nearly the same number, so that the number's rounding error
    adds up instead of averaging out: 2e-5 at w = -1e-4 over 4096 tokens with e^w in one float32.
    """
    w = tl.maximum(b_w, -0.5)
    # e^w - 1 by Taylor's series; the last term is below 1e-9 of the whole.
    minus_one = 1.0 + w / 9.0
    for n in tl.static_range(2, 9):
        minus_one = 1.0 + w / (10 - n) * minus_one
    minus_one = w * minus_one
    high = 1.0 + minus_one
    low = minus_one - (high - 1.0)
    slow = b_w > -0.5
    return tl.where(slow, high, tl.exp(b_w)), tl.where(slow, low, 0.0)


@triton.jit
def through(p, x, m):
    """x by way of memory, at p where m holds: spread over the threads as the states are that lie there.

    Triton spreads each tensor as suits its first use, and computes twice what two such tensors meet in.
    """
    tl.store(p, x, mask=m)
    tl.debug_barrier()
    x = tl.load(p, mask=m, other=0.0)
    tl.debug_barrier()
    return x


def cut(kernel: str, x: torch.Tensor, V: int) -> tuple[int, int, int, dict]:
    """Block of K (all of it), block of V, blocks along V, and launch options; x: a sequence with the state's rows."""
    launch = TABLE[kernel, width(x.element_size())]
    BK, BV = block(x.shape[-1], launch.BK), block(V, launch.BV)
    if x.shape[-1] > BK:
        raise ValueError(f"r: expected K <= {BK} for the recurrent kernel, got K = {x.shape[-1]}")
    warps = min(16, launch.num_warps * max(1, BK // ROWS))
    return BK, BV, -(-V // BV), dict(num_warps=warps, num_stages=launch.num_stages)


def checkpoints_shape(x: torch.Tensor, V: int, packing: Packing | None) -> tuple[int, int, int, int]:
    """Shape of the states kept every CHECKPOINT tokens, known without the offsets' values."""
    B, T, H, K = x.shape
    kept = B * -(-T // CHECKPOINT) if packing is None else packing.room(CHECKPOINT)
    return kept, H, K, V


def checkpoints(x: torch.Tensor, V: int, packing: Packing | None) -> torch.Tensor:
    """Room for the states kept every CHECKPOINT tokens, float32."""
    # A packed batch has room for more than it fills, and an operator's output may not be left to chance.
    new = x.new_empty if packing is None else x.new_zeros
    return new(checkpoints_shape(x, V, packing), dtype=torch.float32)


def together(T: int, queries: int = 1) -> int:
    """Tokens a turn: a decode has but one, and where a token has several queries their rows are loaded at once, too."""
    return 1 if T == 1 else max(1, TOGETHER // queries)


def summed(shares: torch.Tensor) -> torch.Tensor:
    """What every block along V has a share of, [blocks, ...], without its first axis."""
    return shares[0] if len(shares) == 1 else shares.sum(0)


def sequences(x: torch.Tensor, packing: Packing | None) -> tuple[int, tuple]:
    """The number of sequences; what `span` takes of packed ones: their offsets, and the checkpoints before each."""
    if packing is None:
        return x.shape[0], (None, None)
    before = packing.pieces(CHECKPOINT).before
    return packing.N, (packing.offsets, before)
