"""Packed sequences: N sequences laid end to end in a batch of one, with offsets cu_seqlens [N + 1]."""

import torch
from torch import Tensor


def to_batch(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1, T, ...] -> [N, longest, ...]. The rows added are zero: log decay 0, nothing read, nothing written."""
    lengths = cu_seqlens.diff().tolist()
    out = x.new_zeros(len(lengths), max(lengths), *x.shape[2:])
    for n, sequence in enumerate(x[0].split(lengths)):
        out[n, : lengths[n]] = sequence
    return out


def from_batch(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, longest, ...] -> [1, T, ...], the inverse of `to_batch`."""
    return torch.cat([x[n, :length] for n, length in enumerate(cu_seqlens.diff().tolist())])[None]


def chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Number of chunks before each sequence, int32 [N + 1]; computed where cu_seqlens lives, without waiting for it."""
    chunks = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    return torch.cat((chunks.new_zeros(1), chunks.cumsum(0))).to(torch.int32)


def max_chunks(T: int, N: int, chunk_size: int) -> int:
    """An upper bound on the chunks of N sequences of T tokens together, known without reading the offsets."""
    return T // chunk_size + N
