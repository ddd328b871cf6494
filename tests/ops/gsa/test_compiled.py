"""Every kernel in every launch configuration, compiled for real GPUs on any machine: shapes, shared memory, spills."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.common.launch import TABLE

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

from flakit.ops.common import chunks_triton, recurrence_triton
from flakit.ops.gsa import chunk_triton, recurrent_triton
from tests.ops.compiling import SHARED_MEMORY, Launch, compile_for, launches

SPILLED = 7424
"""Most bytes a thread may spill: 7304 with 128 slots, all in registers, on the way for any gate: right, but slow."""


@dataclass(frozen=True)
class Configuration:
    module: ModuleType
    dtype: torch.dtype
    K: int
    V: int
    M: int
    T: int = 100
    H: int = 2
    group: int = 1
    gate_dtype: torch.dtype | None = None
    chunk_size: int = 0
    packed: bool = False
    states: bool = False
    only: str = ""  # the kernels to compile, by a part of their name; default all

    def run(self):
        B = 1 if self.packed or self.T == 1 else 2
        N = 3 if self.packed else B
        sizes = (self.H * self.group, self.K), (self.H, self.K), (self.H, self.V), (self.H, self.M)
        q, k, v, s = (torch.zeros(B, self.T, *size, dtype=self.dtype) for size in sizes)
        g, do = s.to(self.gate_dtype or self.dtype).clone(), q.new_zeros(*q.shape[:3], self.V)
        state = (torch.zeros(N, self.H, self.K, self.M), torch.zeros(N, self.H, self.M, self.V))
        state = state if self.states else None
        cu_seqlens = torch.tensor([0, 7, 7, self.T], dtype=torch.int32) if self.packed else None
        given = q, k, v, s, g, 0.5, state
        _, _, _, *kept = self.module.forward(*given, self.states, cu_seqlens, self.chunk_size, True)
        self.module.backward(*given, cu_seqlens, self.chunk_size, kept, do, state)


chunk, recurrent = chunk_triton, recurrent_triton
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# The table's blocks are reached by K and V above them.
CONFIGURATIONS = {
    "bf16-K128-V128-M64": (Configuration(chunk, bf16, 128, 128, 64), (80, 90)),
    "bf16-gf32-K512-V100-M128-G4-packed-states": (
        Configuration(chunk, bf16, 512, 100, 128, group=4, gate_dtype=f32, packed=True, states=True),
        (90,),
    ),
    "bf16-K64-V64-M64-T2000-packed-states": (
        Configuration(chunk, bf16, 64, 64, 64, T=2000, packed=True, states=True, only="stream"),
        (90,),
    ),
    "f32-K64-V64-M128": (Configuration(chunk, f32, 64, 64, 128), (90,)),
    "f32-K64-V64-M64-C16": (Configuration(chunk, f32, 64, 64, 64, chunk_size=16), (90,)),
    "f16-K24-V100-M20-G2-packed-states-C16": (
        Configuration(chunk, f16, 24, 100, 20, group=2, packed=True, states=True, chunk_size=16),
        (90,),
    ),
    "bf16-T1-H1-K16-V16-M16": (Configuration(chunk, bf16, 16, 16, 16, T=1, H=1), (90,)),
    "bf16-K128-V128-M64-recurrent": (Configuration(recurrent, bf16, 128, 128, 64), (90,)),
    "f16-gf32-K100-V512-M128-G4-packed-states-recurrent": (
        Configuration(recurrent, f16, 100, 512, 128, group=4, gate_dtype=f32, packed=True, states=True),
        (80, 90),
    ),
    "f32-T1-H1-K16-V16-M16-recurrent": (Configuration(recurrent, f32, 16, 16, 16, T=1, H=1), (90,)),
}


def planned() -> list:
    """One test a kernel, chip and configuration; the same kernel with the same arguments is compiled once."""
    tests = []
    for name, (configuration, capabilities) in CONFIGURATIONS.items():
        recorded = {launch.name: launch for launch in launches(configuration.run) if configuration.only in launch.name}
        for capability in capabilities:
            for launch in recorded.values():
                tests.append(
                    pytest.param(configuration, launch, capability, id=f"{name}-sm_{capability}-{launch.name}")
                )
    return tests


@pytest.mark.parametrize("configuration, launch, capability", planned())
def test_compiles_and_fits(configuration, launch: Launch, capability):
    used = compile_for(launch, capability)
    assert used.shared <= SHARED_MEMORY[capability]
    assert used.spilled <= SPILLED


def test_every_row_of_the_launch_table_is_launched(monkeypatch):
    looked_up = set()

    class Watched(dict):
        def __getitem__(self, key):
            looked_up.add(key)
            return super().__getitem__(key)

    for module in (chunks_triton, recurrence_triton, chunk_triton):
        monkeypatch.setattr(module, "TABLE", Watched(TABLE))
    for configuration, _ in CONFIGURATIONS.values():
        launches(configuration.run)
    assert looked_up >= {key for key in TABLE if key[0].startswith("gsa")}
