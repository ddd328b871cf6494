"""Every kernel in every launch configuration, compiled for real GPUs on any machine: shapes, shared memory, spills."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.common.launch import TABLE

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton
import triton.language as tl

from flakit.ops.common import chunks_triton, recurrence_triton
from flakit.ops.rwkv6 import chunk_triton, recurrent_triton
from tests.ops.compiling import SHARED_MEMORY, Launch, compile_for, launches

SPILLED = {torch.bfloat16: 1024, torch.float16: 1024, torch.float32: 3072}
"""Most bytes a thread may spill at the default chunk size. float32 makes three TF32 products of each and keeps more."""


@dataclass(frozen=True)
class Configuration:
    module: ModuleType
    dtype: torch.dtype
    K: int
    V: int
    T: int = 100
    H: int = 2
    decay_dtype: torch.dtype | None = None
    chunk_size: int = 0
    packed: bool = False
    states: bool = False
    only: str = ""  # the kernels to compile, by a part of their name; default all

    def run(self):
        B = 1 if self.packed or self.T == 1 else 2
        N = 3 if self.packed else B
        r, k, w = (torch.zeros(B, self.T, self.H, self.K, dtype=self.dtype) for _ in range(3))
        v, w = r.new_zeros(B, self.T, self.H, self.V), w.to(self.decay_dtype or self.dtype)
        state = torch.zeros(N, self.H, self.K, self.V) if self.states else None
        cu_seqlens = torch.tensor([0, 7, 7, self.T], dtype=torch.int32) if self.packed else None
        given = r, k, v, w, w[0, 0], 0.5, state
        *_, kept = self.module.forward(*given, self.states, cu_seqlens, self.chunk_size, True)
        self.module.backward(*given, cu_seqlens, self.chunk_size, kept, torch.zeros_like(v), state)


chunk, recurrent = chunk_triton, recurrent_triton
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# The table's blocks are reached by a K and V above them; smaller sizes take smaller blocks. T = 1 is a case of its own
# because Triton makes a constant of it. Chunks of 64 are nowhere the default and slow to compile: one chip is enough.
CONFIGURATIONS = {
    "bf16-K128-V128-packed-states": (Configuration(chunk, bf16, 128, 128, packed=True, states=True), (80, 90)),
    "bf16-K128-V128-T2000-packed-states": (
        Configuration(chunk, bf16, 128, 128, T=2000, packed=True, states=True, only="stream"),
        (80, 90),
    ),
    "f32-K128-V128": (Configuration(chunk, f32, 128, 128), (80, 90)),
    "f32-K128-V128-T2000": (Configuration(chunk, f32, 128, 128, T=2000, only="stream"), (90,)),
    "f32-K100-V40-states-C16": (Configuration(chunk, f32, 100, 40, chunk_size=16, states=True), (80, 90)),
    "f16-wf32-K24-V100-packed-C16": (
        Configuration(chunk, f16, 24, 100, decay_dtype=f32, chunk_size=16, packed=True),
        (80, 90),
    ),
    "bf16-T1-H1-K16-V16": (Configuration(chunk, bf16, 16, 16, T=1, H=1), (80, 90)),
    "bf16-wf32-K64-V64-C64": (Configuration(chunk, bf16, 64, 64, decay_dtype=f32, chunk_size=64), (90,)),
    "f32-K64-V64-C64": (Configuration(chunk, f32, 64, 64, chunk_size=64), (90,)),
    "bf16-K64-V64-packed-states": (Configuration(recurrent, bf16, 64, 64, packed=True, states=True), (80, 90)),
    "f16-wf32-K100-V40": (Configuration(recurrent, f16, 100, 40, decay_dtype=f32), (80, 90)),
    "f32-K256-V16-states": (Configuration(recurrent, f32, 256, 16, states=True), (80, 90)),
    "f32-K512-V64-packed": (Configuration(recurrent, f32, 512, 64, packed=True), (80, 90)),
    "f32-T1-H1-K16-V16": (Configuration(recurrent, f32, 16, 16, T=1, H=1), (80, 90)),
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
    if configuration.chunk_size == 0:
        assert used.spilled <= SPILLED[configuration.dtype]


def test_every_row_of_the_launch_table_is_compiled(monkeypatch):
    looked_up = set()

    class Watched(dict):
        def __getitem__(self, key):
            looked_up.add(key)
            return super().__getitem__(key)

    for module in (chunks_triton, recurrence_triton):
        monkeypatch.setattr(module, "TABLE", Watched(TABLE))
    for configuration, _ in CONFIGURATIONS.values():
        launches(configuration.run)
    assert looked_up == {key for key in TABLE if key[0] == "scan" or key[0].startswith("rwkv6.")}


@triton.jit
def greedy_kernel(x, y, N: tl.constexpr):
    p = tl.arange(0, N)
    a = tl.load(x + p)
    tl.store(y + p, a - tl.sum(a))  # every thread keeps N / 32 numbers until the sum is known


def test_a_kernel_that_needs_too_much_is_seen():
    x = torch.zeros(2**15)
    (launch,) = launches(lambda: greedy_kernel[(1,)](x, x, N=2**15, num_warps=1))
    assert compile_for(launch, 90).spilled > max(SPILLED.values())
