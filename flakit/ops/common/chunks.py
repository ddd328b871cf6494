"""The chunked form in plain PyTorch, what operators with a decay per channel share: tensors cut into chunks, states
carried between them, and the pairs of tokens inside them.

A read x_i meets a key y_j of an earlier token j < i through the decay strictly between the two, w_{j+1} … w_{i-1}:

    A_ij = sum_k x_i[k] y_j[k] exp(sum_{j<t<i} w_t[k])

Everything is built level by level from dyadic blocks (`common.decay`), so that no w <= 0 can overflow or cancel. A
token with itself carries no decay and is each operator's own affair.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .decay import dyadic_levels, halves, level_blocks, sum_after, sum_before


def split_chunks(x: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H, D] -> [B, H, N, C, D]; rows beyond T are zero: no decay, nothing read, nothing written."""
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -x.shape[1] % C))
    return rearrange(x, "b (n c) h d -> b h n c d", c=C)


def join_chunks(x: Tensor, T: int) -> Tensor:
    return rearrange(x, "b h n c d -> b (n c) h d")[:, :T]


def carry_states(decay: Tensor, written: Tensor, state: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """The state entering each chunk (reverse: the gradient leaving it) and the one left at the end.

    decay [B, H, N, K] and written [B, H, N, K, V] are each chunk's own; state [B, H, K, V] is where to begin.
    """
    B, H, N, K, V = written.shape
    state = written.new_zeros(B, H, K, V) if state is None else state.to(written.dtype)
    entering = torch.empty_like(written)
    for n in reversed(range(N)) if reverse else range(N):
        entering[:, :, n] = state
        state = decay[:, :, n, :, None] * state + written[:, :, n]
    return entering, state


def pair_scores(read: Tensor, key: Tensor, w: Tensor) -> Tensor:
    """A [..., C, C], strictly lower triangular; read [..., C, K], key and w the same or with leading axes of size 1."""
    A = read.new_zeros(*read.shape[:-1], read.shape[-2])
    for s, log_weight in dyadic_levels(w):
        weight = log_weight.exp()
        level_blocks(A, s).copy_(halves(read * weight, s)[1] @ halves(key * weight, s)[0].mT)
    return A


def read_sums(dA: Tensor, key: Tensor, w: Tensor) -> Tensor:
    """Gradient of the read, sum_{j<i} dA_ij y_j exp(sum_{j<t<i} w_t), [..., C, K]."""
    dread = dA.new_zeros(*dA.shape[:-1], key.shape[-1])
    for s, log_weight in dyadic_levels(w):
        weight = log_weight.exp()
        halves(dread, s)[1].add_(level_blocks(dA, s) @ halves(key * weight, s)[0] * halves(weight, s)[1])
    return dread


def pair_grads(dA: Tensor, read: Tensor, key: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the read, the key and the decay through A, [..., C, K] each, with every leading axis of dA.

    The decay at t is passed by the reads after t in its right half and by the keys before t in its left half: sums of
    terms that each carry their e^{w}, where the usual difference of two running sums cancels.
    """
    dread, dkey, dw = (dA.new_zeros(*dA.shape[:-1], key.shape[-1]) for _ in range(3))
    for s, log_weight in dyadic_levels(w):
        weight = log_weight.exp()
        block = level_blocks(dA, s)
        dread_right = block @ halves(key * weight, s)[0] * halves(weight, s)[1]
        dkey_left = block.mT @ halves(read * weight, s)[1] * halves(weight, s)[0]
        halves(dread, s)[1].add_(dread_right)
        halves(dkey, s)[0].add_(dkey_left)
        halves(dw, s)[1].add_(sum_after(halves(read, s)[1] * dread_right))
        halves(dw, s)[0].add_(sum_before(halves(key, s)[0] * dkey_left))
    return dread, dkey, dw
