"""The chunked form in plain PyTorch, shared by operators with a decay per channel: splitting tensors into chunks,
carrying states between them, and the products of token pairs inside them.

A read x_i sees a key y_j of an earlier token j < i through the decay strictly between the two, w_{j+1} … w_{i-1}:

    A_ij = sum_k x_i[k] y_j[k] exp(sum_{j<t<i} w_t)

Everything is built level by level from dyadic blocks (`common.decay`), so that no w <= 0 can overflow or cancel. The
pair of a token with itself has no decay; each operator handles it.

A token may have R reads and Y keys (RWKV7: two and two; GSA: one read for each query of its group). They are adjacent
rows: reads [..., C R, K], keys [..., C Y, K], A [..., C R, C Y], so that one product serves them all.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .decay import Level, halves, level_blocks


def split_chunks(x: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """Cut x [B, T, H, D] into N chunks of C tokens, [B, H, N, C, D]; rows beyond T are zero, which changes no state."""
    if x.shape[1] % C:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return rearrange(x, "b (n c) h d -> b h n c d", c=C).to(dtype).contiguous()  # otherwise every product would copy it


def split_beside(*x: Tensor | None, C: int, dtype: torch.dtype) -> Tensor:
    """Cut n tensors [B, T, H, D] into chunks, with the rows of a token adjacent: [B, H, N, C, n, D] in `dtype`. Rows
    beyond T are zero. None, allowed for all but the first, leaves its rows uninitialized, to be filled later."""
    B, T, H, D = x[0].shape
    N = -(-T // C)
    rows = x[0].new_empty(B, H, N * C, len(x), D, dtype=dtype)
    rows[:, :, T:] = 0
    for n, each in enumerate(x):
        if each is not None:
            rows[:, :, :T, n] = each.transpose(1, 2)
    return rows.unflatten(2, (N, C))


def join_chunks(x: Tensor, T: int) -> Tensor:
    """Join chunks [B, H, N, C, D] to a copy [B, T, H, D]: the inverse of `split_chunks`."""
    return rearrange(x, "b h n c d -> b (n c) h d")[:, :T].clone(memory_format=torch.contiguous_format)


def beside(*x: Tensor) -> Tensor:
    """Interleave the rows of n tensors [..., C, D] to [..., C n, D], the rows of a token adjacent."""
    return torch.stack(x, -2).flatten(-3, -2)


def apart(x: Tensor, axis: int, n: int) -> tuple[Tensor, ...]:
    """Return n views of x: every nth row (axis -2) or column (-1), from the 1st, 2nd, … nth on. On rows this inverts
    `beside`."""
    return x.unflatten(axis, (-1, n)).unbind(axis)


def add_product(x: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a contiguous x, in place. The leading axes of all three are equal."""
    x.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))


def own_pairs(A: Tensor, C: int) -> Tensor:
    """Return the scores of each token with itself, as a view [..., C, R, Y] of A [..., C R, C Y]."""
    return A.unflatten(-1, (C, -1)).unflatten(-3, (C, -1)).diagonal(0, -4, -2).movedim(-1, -3)


def carry_states(decay: Tensor, written: Tensor, state: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return the state entering each chunk (reverse: the gradient leaving it), [B, H, N, K, V], and the last state.

    decay [B, H, N, K] and written [B, H, N, K, V]: of each chunk; state [B, H, K, V]: the initial one, None for zeros.
    """
    B, H, N, K, V = written.shape
    state = written.new_zeros(B, H, K, V) if state is None else state.to(written.dtype)
    entering = torch.empty_like(written)
    for n in reversed(range(N)) if reverse else range(N):
        entering[:, :, n] = state
        state = decay[:, :, n, :, None] * state + written[:, :, n]
    return entering, state


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., C n, K], n rows a token, times weight [..., C, K], one row a token."""
    n = x.shape[-2] // weight.shape[-2]
    return x * weight if n == 1 else (x.unflatten(-2, (-1, n)) * weight[..., None, :]).flatten(-3, -2)


def weigh_(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x by weight in place, with the shapes of `weighed`; return x."""
    return x.unflatten(-2, (weight.shape[-2], -1)).mul_(weight[..., None, :]).flatten(-3, -2)


def pair_scores(read: Tensor, key: Tensor, levels: list[Level]) -> Tensor:
    """Return the scores A [..., C R, C Y] of all pairs, zero unless the key's token precedes the read's. read [..., C
    R, K] has all leading axes; key [..., C Y, K] and the levels may have leading axes of size 1."""
    A = read.new_zeros(*read.shape[:-1], key.shape[-2])
    for level in levels:
        earlier, later = _halves_met(key, read, level)
        _block(A, level).copy_(_met(later, level.read, level) @ _met(earlier, level.key, level).mT)
    return A


def read_sums(dA: Tensor, key: Tensor, levels: list[Level]) -> Tensor:
    """Return the gradient of the read, sum_{j<i} dA_ij y_j exp(sum_{j<t<i} w_t), [..., C R, K]. key: the y_j [..., C Y,
    K]."""
    dread = dA.new_zeros(*dA.shape[:-1], key.shape[-1])
    for level in levels:
        earlier, dlater = _halves_met(key, dread, level)
        _add(dlater, _block(dA, level) @ _met(earlier, level.key, level), level.read)
    return dread


def pair_grads(dA: Tensor, read: Tensor, key: Tensor, levels: list[Level], dread: Tensor, dkey: Tensor, dw: Tensor):
    """Add the gradients of read, key and decay through A to dread [..., C R, K], dkey [..., C Y, K] and dw [..., C, K].

    The previous contents of dread and dkey must come from tokens outside the chunk: they depend on every decay of the
    chunk before the read or after the key, and add to dw too. From the largest blocks to the smallest, the decays of a
    left half act on all reads of the right one, and those of a right half on all keys of the left one. So dw is a sum
    of terms that each carry their e^{w}; the usual difference of two running sums cancels.
    """
    for level in reversed(levels):
        earlier, later = _halves_met(key, read, level)
        dearlier, dlater = _halves_met(dkey, dread, level)
        dw_left, dw_right = halves(dw, level.s)
        dw_left += (later * dlater).sum(-2, keepdim=True)
        dw_right += (earlier * dearlier).sum(-2, keepdim=True)
        block = _block(dA, level)
        _add(dlater, block @ _met(earlier, level.key, level), level.read)
        _add(dearlier, block.mT @ _met(later, level.read, level), level.key)


def _halves_met(keys: Tensor, reads: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Return views of the left halves of keys [..., C Y, K] and the right halves of reads [..., C R, K] at a level.

    Y and R: the rows of keys and of reads that each of C tokens has, adjacent."""
    C = 2 * level.s * level.key.shape[-3]
    left, _ = halves(keys, level.s * keys.shape[-2] // C)
    _, right = halves(reads, level.s * reads.shape[-2] // C)
    return left, right


def _met(x: Tensor, weight: Tensor, level: Level) -> Tensor:
    """Return `weighed(x, weight)`; at level 1, where no decay lies between the rows of a pair, x itself."""
    return x if level.s == 1 else weighed(x, weight)


def _add(x: Tensor, y: Tensor, weight: Tensor) -> None:
    """Add `weighed(y, weight)` to x, which may be a view, in place."""
    n = (-1, x.shape[-2] // weight.shape[-2])
    x.unflatten(-2, n).addcmul_(y.unflatten(-2, n), weight[..., None, :])


def _block(A: Tensor, level: Level) -> Tensor:
    """Return the blocks of reads of right halves and keys of left ones in A, [..., C/(2s), s R, s Y], as a view."""
    C = 2 * level.s * level.key.shape[-3]
    return level_blocks(A, level.s * A.shape[-2] // C, width=level.s * A.shape[-1] // C)
