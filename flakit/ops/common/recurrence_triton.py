"""What the token-by-token kernels of all operators share: loading tokens, an exact decay, blocks of a state.

A program carries a state's [BK, BV] block over one sequence, U tokens a turn. A load takes longer than a step, so the
rows of the next turn load while a program computes with those of the current one. Rows past the end of a sequence are
0, which changes neither a state nor its gradient.

The backward needs the states again and cannot divide by a decay to walk back, so the forward stores one every
CHECKPOINT tokens. The backward walks these tokens from there twice: first forward, writing the state before every turn
to a scratch buffer; then turn by turn in reverse, with the states within a turn in registers (GSA
needs none of them).

The layout of the scratch buffer decides which elements of a state a thread has. Exchanges between threads, by shuffles
or through shared memory and its barriers, take longer than arithmetic. The key channels (in GSA the slots) are last,
and a thread has four consecutive ones. In RWKV7's gradients one warp has all key channels, so that a thread has as many
as that leaves, two of 64. A row of keys is then loaded and stored in the layout in which it meets the state, and sums
over columns stay within a thread.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import factorial

import torch
import triton
import triton.language as tl

from .blocks_triton import arrived
from .kernel_triton import Memory, launched
from .launch import CHECKPOINT, TABLE, TOGETHER, Launch, block, cdiv, width
from .packed_triton import Packing

TAYLOR = tl.constexpr(tuple(1 / factorial(n) for n in range(9, 0, -1)))
"""Coefficients of the Taylor series of e^w - 1, from w^9 down to w."""

SUMS = 5
"""Tensors that one launch of `sum_kernel` sums."""

BLOCK = 1024
"""Elements of a tensor that one of its programs sums."""

ROWS = 64
"""Rows of a state (in RWKV6's backward columns) for which the launch table's num_warps holds; more get more warps."""


@triton.jit
def load_turn(
    keys, values, start, t, length, i_h, o_k, m_k, o_v, m_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr, G: tl.constexpr = 1,
):  # fmt: skip
    """Issue the loads of tokens t … t + U - 1 of a sequence, of G heads each. Return a tuple for each head and token:
    [1, BK] from each of `keys` [rows, H G, K], then [BV, 1] from each of `values` [rows, H G, V]; zeros outside the
    sequence. start, length: its first row, its tokens. o_k, m_k [BK], o_v, m_v [BV]: indices of channels, masks of
    those that exist."""
    turn = ()
    row = ((start + t) * H + i_h) * G
    for i_g in tl.static_range(G):
        for n in tl.static_range(U):
            within = (t + n >= 0) & (t + n < length)
            later, rows = n * H * G + i_g, ()  # a constant: distances from one address
            for x in tl.static_range(len(keys)):
                rows += (tl.load(keys[x] + row * K + o_k[None, :] + later * K, mask=m_k[None, :] & within, other=0.0),)
            for x in tl.static_range(len(values)):
                p = values[x] + row * V + o_v[:, None] + later * V
                rows += (tl.load(p, mask=m_v[:, None] & within, other=0.0),)
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
def _sum_between_threads(x):
    """Return the sums over axis 1 of x [A, L, C, B], as [A C B]. L are threads, C is what each of them has.

    While there are two of each, half the threads exchange the first half of what they have for the second half of what
    the others have, and add. So they exchange C numbers in all, where a sum of every c in every thread exchanges C in
    each of log2 L steps.
    """
    for _ in tl.static_range(4):
        if x.shape[1] > 1 and x.shape[2] > 1:
            x = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, 2, x.shape[2] // 2, x.shape[3]])
            a, b = tl.split(tl.permute(x, [0, 1, 2, 4, 5, 3]))
            first = (tl.arange(0, 2) == 0)[None, :, None, None, None]
            sent = tl.where(first, b, a).to(tl.int32, bitcast=True)
            received = (sent ^ tl.xor_sum(sent, 1, keep_dims=True)).to(tl.float32, bitcast=True)
            x = tl.where(first, a, b) + received
            x = tl.reshape(x, [2 * x.shape[0], x.shape[2], x.shape[3], x.shape[4]])
    x = tl.sum(x, 1)
    return tl.reshape(x, [x.shape[0] * x.shape[1] * x.shape[2]])


@triton.jit
def column_sums(x, ROWS: tl.constexpr = 4):
    """Return the sums over rows of a state's block x [R, D], of which a thread has ROWS consecutive rows.

    That makes the sum fast and is no condition; nor that a thread has 32 elements, as of 1024 a warp.
    """
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    C: tl.constexpr = D if D * ROWS < 32 else 32 // ROWS
    return _sum_between_threads(tl.sum(tl.reshape(x, [1, R // ROWS, ROWS, C, D // C]), 2))


@triton.jit
def row_sums(x, ROWS: tl.constexpr = 4):
    """Return the sums over columns of a state's block x [R, D]; the rest as in `column_sums`."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    C: tl.constexpr = D if D * ROWS < 32 else 32 // ROWS
    x = tl.sum(tl.reshape(x, [R // ROWS, ROWS, C, D // C]), 2)
    return _sum_between_threads(tl.permute(x, [0, 2, 1])[:, :, :, None])


@triton.jit
def sums_together(rows):
    """Return the sum of all elements of each of up to 1024 rows of one shape, then 0 up to a power of two. They take
    fewer exchanges than one by one."""
    for _ in tl.static_range(len(rows)):
        if len(rows) & (len(rows) - 1):
            rows += (tl.zeros_like(rows[0]),)
    COUNT: tl.constexpr = len(rows)
    SIZE: tl.constexpr = rows[0].numel
    sides = rows
    for _ in tl.static_range(10):
        pairs = ()
        for n in tl.static_range(len(sides) // 2):
            pairs += (tl.join(sides[n], sides[n + len(sides) // 2]),)
        if len(sides) > 1:
            sides = pairs
    x = tl.reshape(sides[0], [SIZE, COUNT])
    if SIZE > 32:  # more than the threads of a warp
        x = tl.sum(tl.reshape(x, [32, SIZE // 32, COUNT]), 1)
    totals = (_sum_between_threads(x[None, :, :, None]),)
    for _ in tl.static_range(10):
        if len(totals) < COUNT:
            halves = ()
            for n in tl.static_range(len(totals)):
                if totals[n].numel > 2:
                    halves += tl.split(tl.permute(tl.reshape(totals[n], [2, totals[n].numel // 2]), [1, 0]))
                else:
                    halves += tl.split(totals[n])
            totals = halves
    return totals


@triton.jit
def split_decay(b_w):
    """Return e^w as high + low; low is the rounding error of float32 where w > -1/2, 0 elsewhere.

    A slow decay multiplies a state thousands of times by nearly the same number, so that this number's rounding error
    accumulates instead of averaging out: 2e-5 at w = -1e-4 over 4096 tokens with e^w in one float32.
    """
    w = tl.maximum(b_w, -0.5)
    # e^w - 1 by its Taylor series; the last term is below 1e-9 of the sum.
    minus_one = TAYLOR[1] + w * TAYLOR[0]
    for n in tl.static_range(2, 9):
        minus_one = TAYLOR[n] + w * minus_one
    minus_one = w * minus_one
    high = 1.0 + minus_one
    low = minus_one - (high - 1.0)
    slow = b_w > -0.5
    return tl.where(slow, high, tl.exp(b_w)), tl.where(slow, low, 0.0)


@triton.jit
def turn_decays(turn, W: tl.constexpr, REVERSE: tl.constexpr = False):
    """Return e^w of each token of a turn, a tuple of vectors, and the sum of their low parts, for `decayed`: each low
    part times e^w of the turn's later tokens (REVERSE: its earlier ones), which the state has still to pass. W: the
    index of w among a token's rows."""
    high, low = split_decay(turn[0][W])
    highs, passed = (as_vector(high),), high
    for n in tl.static_range(1, len(turn)):
        high, own = split_decay(turn[n][W])
        highs += (as_vector(high),)
        if REVERSE:
            low += passed * own
            passed *= high
        else:
            low = high * low + own
    return highs, as_vector(low)


@triton.jit
def decayed(b_S, high, low, added, LAST: tl.constexpr):
    """Return diag(e^w) S + added, one step of a state or of its gradient. A turn's LAST step has the low parts of all
    its decays: what a step lacks until then is less than a rounding error."""
    if LAST:  # with what is added, since low S alone would be rounded away
        added = low[:, None] * b_S + added
    return high[:, None] * b_S + added


@triton.jit
def _add_blocks(shares, sums, size, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(shares + o, mask=o < size, other=0.0)
    for i in range(1, BLOCKS):
        total += tl.load(shares + size * i + o, mask=o < size, other=0.0)
    tl.store(sums + o, total.to(sums.dtype.element_ty), mask=o < size)


@launched("tokens")
def sum_kernel(
    shares_0, shares_1, shares_2, shares_3, shares_4, sums_0, sums_1, sums_2, sums_3, sums_4, tokens,
    D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write into each sums_i [tokens, D] the sum over blocks, in their order, of float32 shares_i [BLOCKS, tokens, D].
    i > 0 may be None. A program has BLOCK elements of each."""
    size = tl.cast(tokens, tl.int64) * D
    _add_blocks(shares_0, sums_0, size, BLOCKS, BLOCK)
    if sums_1 is not None:
        _add_blocks(shares_1, sums_1, size, BLOCKS, BLOCK)
    if sums_2 is not None:
        _add_blocks(shares_2, sums_2, size, BLOCKS, BLOCK)
    if sums_3 is not None:
        _add_blocks(shares_3, sums_3, size, BLOCKS, BLOCK)
    if sums_4 is not None:
        _add_blocks(shares_4, sums_4, size, BLOCKS, BLOCK)


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


@triton.jit
def zeros_as_stored(unread, at, m, count):
    """Return zeros in the layout of a float32 state stored at offsets `at` with mask m, for a call that stores none.

    They are loaded from no element of the tensor `unread`: a count is never negative, which the compiler does not know.
    """
    return tl.load(unread.to(tl.pointer_type(tl.float32)) + at, mask=m & (count < 0), other=0.0)


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
    return BK, BV, cdiv(V, BV), dict(num_warps=warps, num_stages=launch.num_stages)


def checkpoints_shape(x: torch.Tensor, V: int, packing: Packing | None) -> tuple[int, int, int, int]:
    """Return the shape of `checkpoints`, the states before every CHECKPOINT tokens, whatever the packing's offsets."""
    B, T, H, K = x.shape
    count = B * cdiv(T, CHECKPOINT) if packing is None else packing.capacity(CHECKPOINT)
    return count, H, K, V


def checkpoints(x: torch.Tensor, V: int, packing: Packing | None) -> torch.Tensor:
    """Allocate states for every CHECKPOINT tokens of x [B, T, H, K]: float32 [checkpoints, H, K, V], 0 if packed."""
    # A packed batch may fill fewer than are allocated, and an operator's output must not be uninitialized.
    allocate = x.new_empty if packing is None else x.new_zeros
    return allocate(checkpoints_shape(x, V, packing), dtype=torch.float32)


def tokens_per_turn(T: int, queries: int = 1, together: int = TOGETHER) -> int:
    """Return how many tokens a program loads at once: 1 for a decode step; fewer with several queries a token."""
    return 1 if T == 1 else max(1, together // queries)


def new_shares(blocks: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Allocate a gradient of each input from each block of a state, [blocks, ...] in float32; for a single block, of
    the input's own shape and dtype."""
    if blocks == 1:
        return [torch.empty_like(x) for x in inputs]
    return [x.new_empty(blocks, *x.shape, dtype=torch.float32) for x in inputs]


def sum_blocks(
    memory: Memory, blocks: int, shares: Sequence[torch.Tensor], *inputs: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Return the gradients of up to SUMS inputs [B, T, H, D] of one size, in their dtypes: the sums over blocks of the
    partial ones from `new_shares`."""
    if blocks == 1:
        return shares
    (*_, H, D), size = inputs[0].shape, inputs[0].numel()
    sums, absent = [torch.empty_like(x) for x in inputs], [None] * (SUMS - len(inputs))
    memory.launch(
        sum_kernel, cdiv(size, BLOCK), (*shares, *absent, *sums, *absent, size // (H * D)),
        lambda: dict(BLOCK=BLOCK), *[x.dtype for x in inputs], D=H * D, BLOCKS=blocks,
    )  # fmt: skip
    return sums


def sequences(x: torch.Tensor, packing: Packing | None) -> tuple[int, tuple]:
    """Return N and, for `locate_sequence`, (cu_seqlens, checkpoints_before), [N + 1] each, or Nones if not packed."""
    if packing is None:
        return x.shape[0], (None, None)
    before = packing.pieces(CHECKPOINT).before
    return packing.N, (packing.offsets, before)
