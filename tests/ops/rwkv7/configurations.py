"""Launches that together reach every row of RWKV7's launch table, and all else that changes its kernels' code."""

from dataclasses import dataclass

import torch

from flakit.ops.rwkv7 import chunk_triton, fused_chunk_triton, recurrent_triton
from tests.ops.compiling import Configuration

chunk, fused, recurrent = chunk_triton, fused_chunk_triton, recurrent_triton
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Launches(Configuration):
    def zeros(self):
        r, k = (torch.zeros(self.B, self.T, self.H, self.K, dtype=self.dtype) for _ in range(2))
        w, a, b = (r.to(self.wide or self.dtype).clone() for _ in range(3))
        v = r.new_zeros(self.B, self.T, self.H, self.V)
        return (r, w, k, v, a, b), torch.zeros(self.N, self.H, self.K, self.V), torch.zeros_like(v)

    @property
    def most_spilled(self):
        """float32's stream at K = 256 comes to 9184 on sm_80, its gradients of keys at K = 64 to 5576: right, but
        slow."""
        return 9216


# Every row of the table, then what else changes the code: sizes, packing, states, float32 beside 16 bits,
# T = 1 (of which Triton makes a constant). Kernels that work inside chunks are slow to compile and alike there, the
# stream holds all of K: `only` it, for the large ones.
CONFIGURATIONS = {
    "f16-K80-V80": Launches(chunk, f16, 80, 80),
    "f32-K64-V64": Launches(chunk, f32, 64, 64),
    "f32-K64-V64-C32": Launches(chunk, f32, 64, 64, chunk_size=32, only="key_grads"),
    "f16-wf32-K24-V40-packed-states-C16": Launches(
        chunk, f16, 24, 40, wide=f32, chunk_size=16, packed=True, states=True
    ),
    "bf16-T1-H1-K16-V16": Launches(chunk, bf16, 16, 16, T=1, H=1, only="MILD"),
    "bf16-K128-V100-packed-states": Launches(chunk, bf16, 128, 100, packed=True, states=True, only="MILD"),
    "bf16-K256-V256-states": Launches(chunk, bf16, 256, 256, states=True, only="stream"),
    "f32-K256-V128-packed": Launches(chunk, f32, 256, 128, packed=True, only="stream"),
    "bf16-K64-V64-fused": Launches(fused, bf16, 64, 64, chunk_size=16),
    "f16-wf32-K40-V56-states-fused": Launches(fused, f16, 40, 56, wide=f32, states=True, chunk_size=16),
    "bf16-K64-V56-packed-states-fused": Launches(fused, bf16, 64, 56, packed=True, states=True, chunk_size=16),
    "bf16-T4096-H1-K64-V64-fused": Launches(fused, bf16, 64, 64, T=4096, H=1, chunk_size=16),  # in parts
    "f16-wf32-T600-K40-V56-states-fused": Launches(fused, f16, 40, 56, T=600, wide=f32, states=True, chunk_size=16),
    "f32-K64-V64-states-fused": Launches(fused, f32, 64, 64, states=True, chunk_size=16),
    "f32-T4096-H1-K64-V64-fused": Launches(fused, f32, 64, 64, T=4096, H=1, chunk_size=16),
    "bf16-K64-V64-gluon": Launches(fused, bf16, 64, 64, hopper=True),
    "bf16-K64-V64-packed-states-gluon": Launches(fused, bf16, 64, 64, packed=True, states=True, hopper=True),
    "bf16-T4096-H1-K64-V64-gluon": Launches(fused, bf16, 64, 64, T=4096, H=1, only="chain", hopper=True),  # in parts
    "bf16-K64-V64-packed-states-recurrent": Launches(recurrent, bf16, 64, 64, packed=True, states=True),
    "f16-wf32-K100-V40-recurrent": Launches(recurrent, f16, 100, 40, wide=f32),
    "f32-K256-V16-states-recurrent": Launches(recurrent, f32, 256, 16, states=True),
    "f32-T1-H1-K16-V16-recurrent": Launches(recurrent, f32, 16, 16, T=1, H=1),
}

WIDE = Launches(chunk, bf16, 128, 128, packed=True, only="key_grads")
"""Heads of more channels than a block has."""
