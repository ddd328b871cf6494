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
from flakit.ops.rwkv7 import chunk_triton, recurrent_triton
from tests.ops.compiling import SHARED_MEMORY, Launch, compile_for, launches

SPILLED = 9216
"""Most bytes a thread may spill. float32's stream at K = 256 comes to 9184 on sm_80, its gradients of keys at K = 64 to
5576: right, but slow."""


@dataclass(frozen=True)
class Configuration:
    module: ModuleType
    dtype: torch.dtype
    K: int
    V: int
    T: int = 100
    H: int = 2
    wide: torch.dtype | None = None  # of w, a and b
    chunk_size: int = 0
    packed: bool = False
    states: bool = False
    only: str = ""  # in the names of the kernels to compile

    def run(self):
        B = 1 if self.packed or self.T == 1 else 2
        N = 3 if self.packed else B
        r, k = (torch.zeros(B, self.T, self.H, self.K, dtype=self.dtype) for _ in range(2))
        w, a, b = (r.to(self.wide or self.dtype).clone() for _ in range(3))
        v = r.new_zeros(B, self.T, self.H, self.V)
        state = torch.zeros(N, self.H, self.K, self.V) if self.states else None
        cu_seqlens = torch.tensor([0, 7, 7, self.T], dtype=torch.int32) if self.packed else None
        given = r, w, k, v, a, b, 0.5, state
        _, _, *kept = self.module.forward(*given, self.states, cu_seqlens, self.chunk_size, True)
        self.module.backward(*given, cu_seqlens, self.chunk_size, *kept, torch.zeros_like(v), state)


chunk, recurrent = chunk_triton, recurrent_triton
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# Every row of the table on both chips, then what else changes the code: sizes, packing, states, float32 beside 16 bits,
# T = 1 (of which Triton makes a constant). Kernels that work inside chunks are slow to compile and alike there, the
# stream holds all of K: `only` it, for the large ones.
CONFIGURATIONS = {
    "bf16-K64-V64": (Configuration(chunk, bf16, 64, 64), (80, 90)),
    "f32-K64-V64": (Configuration(chunk, f32, 64, 64), (80, 90)),
    "f16-wf32-K24-V40-packed-states-C16": (
        Configuration(chunk, f16, 24, 40, wide=f32, chunk_size=16, packed=True, states=True),
        (90,),
    ),
    "bf16-T1-H1-K16-V16": (Configuration(chunk, bf16, 16, 16, T=1, H=1, only="MILD"), (90,)),
    "bf16-K128-V100-packed-states": (
        Configuration(chunk, bf16, 128, 100, packed=True, states=True, only="MILD"),
        (90,),
    ),
    "bf16-K256-V256-states": (Configuration(chunk, bf16, 256, 256, states=True, only="stream"), (80, 90)),
    "f32-K256-V128-packed": (Configuration(chunk, f32, 256, 128, packed=True, only="stream"), (80, 90)),
    "bf16-K64-V64-packed-states-recurrent": (
        Configuration(recurrent, bf16, 64, 64, packed=True, states=True),
        (80, 90),
    ),
    "f16-wf32-K100-V40-recurrent": (Configuration(recurrent, f16, 100, 40, wide=f32), (80, 90)),
    "f32-K256-V16-states-recurrent": (Configuration(recurrent, f32, 256, 16, states=True), (80, 90)),
    "f32-T1-H1-K16-V16-recurrent": (Configuration(recurrent, f32, 16, 16, T=1, H=1), (80, 90)),
}


def planned() -> list:
    """One test a kernel, chip and configuration; the same kernel with the same arguments is compiled once."""
    tests = []
    for name, (configuration, capabilities) in CONFIGURATIONS.items():
        recorded = {x.name: x for x in launches(configuration.run) if configuration.only in x.name}
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


def test_every_row_of_the_launch_table_is_compiled(monkeypatch):
    looked_up = set()

    class Watched(dict):
        def __getitem__(self, key):
            looked_up.add(key)
            return super().__getitem__(key)

    for module in (chunks_triton, recurrence_triton, chunk_triton):
        monkeypatch.setattr(module, "TABLE", Watched(TABLE))
    for configuration, _ in CONFIGURATIONS.values():
        launches(configuration.run)
    assert looked_up == {key for key in TABLE if key[0].startswith("rwkv7.")}
