"""Launches that together reach every row of RWKV6's launch table, and all else that changes its kernels' code."""

import math
from dataclasses import dataclass

import torch

from flakit.ops.rwkv6 import chunk_triton, fused_chunk_triton, recurrent_triton
from tests.ops.compiling import Configuration

chunk, fused, recurrent = chunk_triton, fused_chunk_triton, recurrent_triton
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Launches(Configuration):
    def zeros(self):
        r, k, w = (torch.zeros(self.B, self.T, self.H, self.K, dtype=self.dtype) for _ in range(3))
        v, w = r.new_zeros(self.B, self.T, self.H, self.V), w.to(self.wide or self.dtype)
        return (r, k, v, w, w[0, 0].clone()), torch.zeros(self.N, self.H, self.K, self.V), torch.zeros_like(v)

    @property
    def most_spilled(self):
        """float32 makes three TF32 products of each and keeps more. A chunk size of the caller's may be slow."""
        return math.inf if self.chunk_size else 3072 if self.dtype == f32 else 1024


# The table's blocks are reached by a K and V above them; smaller sizes take smaller blocks. T = 1 is a case of its own
# because Triton makes a constant of it.
CONFIGURATIONS = {
    "bf16-K128-V128-packed-states": Launches(chunk, bf16, 128, 128, packed=True, states=True),
    "bf16-K128-V128-T2000-packed-states": Launches(
        chunk, bf16, 128, 128, T=2000, packed=True, states=True, only="stream"
    ),
    "f32-K128-V128": Launches(chunk, f32, 128, 128),
    "f32-K128-V128-T2000": Launches(chunk, f32, 128, 128, T=2000, only="stream"),
    "f32-K100-V40-states-C32": Launches(chunk, f32, 100, 40, chunk_size=32, states=True),
    "f16-wf32-K24-V100-packed-C32": Launches(chunk, f16, 24, 100, wide=f32, chunk_size=32, packed=True),
    "bf16-T1-H1-K16-V16": Launches(chunk, bf16, 16, 16, T=1, H=1),
    "bf16-wf32-K64-V100": Launches(chunk, bf16, 64, 100, wide=f32, only="mild"),
    "f32-K64-V64-C64": Launches(chunk, f32, 64, 64, chunk_size=64),
    "bf16-K64-V64-fused": Launches(fused, bf16, 64, 64, chunk_size=16),
    "f16-wf32-K40-V56-states-fused": Launches(fused, f16, 40, 56, wide=f32, states=True, chunk_size=16),
    "f32-K64-V64-states-fused": Launches(fused, f32, 64, 64, states=True, chunk_size=16),
    "bf16-K64-V56-packed-states-fused": Launches(fused, bf16, 64, 56, packed=True, states=True, chunk_size=16),
    "bf16-T4096-H1-K64-V64-fused": Launches(fused, bf16, 64, 64, T=4096, H=1, chunk_size=16),  # in parts
    "bf16-K64-V64-gluon": Launches(fused, bf16, 64, 64, hopper=True, chunk_size=16),
    "bf16-K64-V64-packed-states-gluon": Launches(
        fused, bf16, 64, 64, packed=True, states=True, hopper=True, chunk_size=16
    ),
    "bf16-K64-V64-packed-states": Launches(recurrent, bf16, 64, 64, packed=True, states=True),
    "f16-wf32-K100-V40": Launches(recurrent, f16, 100, 40, wide=f32),
    "f32-K256-V16-states": Launches(recurrent, f32, 256, 16, states=True),
    "f32-K512-V64-packed": Launches(recurrent, f32, 512, 64, packed=True),
    "bf16-K16-V600-recurrent": Launches(recurrent, bf16, 16, 600, only="grads"),
    "f32-T1-H1-K16-V16": Launches(recurrent, f32, 16, 16, T=1, H=1),
}
