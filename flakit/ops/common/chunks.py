"""Chunks of C tokens with plain PyTorch: cutting, joining, and the state carried from one to the next."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


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
