"""Launches that together reach every row of GSA's launch table, and all else that changes its kernels' code."""

from dataclasses import dataclass

import torch

from flakit.ops.gsa import chunk_triton, recurrent_triton
from tests.ops.compiling import Configuration

chunk, recurrent = chunk_triton, recurrent_triton
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Launches(Configuration):
    M: int = 64
    group: int = 1

    def zeros(self):
        sizes = (self.H * self.group, self.K), (self.H, self.K), (self.H, self.V), (self.H, self.M)
        q, k, v, s = (torch.zeros(self.B, self.T, *size, dtype=self.dtype) for size in sizes)
        g, do = s.to(self.wide or self.dtype).clone(), q.new_zeros(*q.shape[:3], self.V)
        states = torch.zeros(self.N, self.H, self.K, self.M), torch.zeros(self.N, self.H, self.M, self.V)
        return (q, k, v, s, g), states, do

    @property
    def most_spilled(self):
        """7304 with 128 slots, all in registers, on the way for any gate: right, but slow."""
        return 7424


# The table's blocks are reached by K and V above them.
CONFIGURATIONS = {
    "bf16-K128-V128-M64": Launches(chunk, bf16, 128, 128, M=64),
    "bf16-K512-V512-M64": Launches(chunk, bf16, 512, 512, M=64),
    "bf16-gf32-K512-V100-M128-G4-packed-states": Launches(
        chunk, bf16, 512, 100, M=128, group=4, wide=f32, packed=True, states=True
    ),
    "bf16-K64-V64-M64-T2000-packed-states": Launches(
        chunk, bf16, 64, 64, M=64, T=2000, packed=True, states=True, only="stream"
    ),
    "bf16-gf32-K100-V16-M48-G2-packed-states": Launches(
        chunk, bf16, 100, 16, M=48, group=2, wide=f32, packed=True, states=True
    ),
    "bf16-K100-V100-M40-G2-packed-states": Launches(
        chunk, bf16, 100, 100, M=40, group=2, packed=True, states=True, only="pass_grads"
    ),
    "f32-K128-V128-M64": Launches(chunk, f32, 128, 128, M=64),
    "f32-K64-V64-M128": Launches(chunk, f32, 64, 64, M=128),
    "f32-K64-V64-M64-C32": Launches(chunk, f32, 64, 64, M=64, chunk_size=32),
    "f16-K24-V100-M20-G2-packed-states-C32": Launches(
        chunk, f16, 24, 100, M=20, group=2, packed=True, states=True, chunk_size=32
    ),
    "bf16-T1-H1-K16-V16-M16": Launches(chunk, bf16, 16, 16, M=16, T=1, H=1),
    "bf16-K128-V128-M64-recurrent": Launches(recurrent, bf16, 128, 128, M=64),
    "f16-gf32-K100-V512-M128-G4-packed-states-recurrent": Launches(
        recurrent, f16, 100, 512, M=128, group=4, wide=f32, packed=True, states=True
    ),
    "f32-K128-V128-M64-recurrent": Launches(recurrent, f32, 128, 128, M=64, only="pass_kernel"),
    "f32-T1-H1-K16-V16-M16-recurrent": Launches(recurrent, f32, 16, 16, M=16, T=1, H=1),
    "bf16-T1-K128-V128-M64-states-decode": Launches(recurrent, bf16, 128, 128, M=64, T=1, states=True, gradients=False),
    "f16-gf32-T1-K512-V512-M128-G4-decode": Launches(
        recurrent, f16, 512, 512, M=128, T=1, group=4, wide=f32, gradients=False
    ),
    "f32-T1-K100-V40-M20-states-decode": Launches(recurrent, f32, 100, 40, M=20, T=1, states=True, gradients=False),
}
