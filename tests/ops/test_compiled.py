"""Every kernel in every launch configuration, compiled for real GPUs on any machine: shapes, shared memory, spills."""

import math

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.common.launch import SHARED_MEMORY, TABLE

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton
import triton.language as tl

from flakit.ops.common import chunks_triton, recurrence_triton
from tests.ops.compiling import compile_for, launches
from tests.ops.gsa import configurations as gsa
from tests.ops.rwkv6 import configurations as rwkv6
from tests.ops.rwkv7 import configurations as rwkv7

OPERATORS = {"rwkv6": rwkv6, "rwkv7": rwkv7, "gsa": gsa}


def planned():
    """One test a kernel, chip and configuration; of each kernel all but the smallest on one chip in the full run."""
    for op, module in OPERATORS.items():
        seen = set()
        for name, configuration in sorted(module.CONFIGURATIONS.items(), key=_size):
            for launch in configuration.kernels():
                kernel = configuration.module, launch.kernel
                for chip in configuration.chips:
                    first = chip == 90 and kernel not in seen
                    seen |= {kernel} if first else set()
                    yield pytest.param(
                        configuration,
                        launch,
                        chip,
                        id=f"{op}-{name}-sm_{chip}-{launch.name}",
                        marks=() if first else pytest.mark.full,
                    )


def _size(named):
    _, configuration = named
    return configuration.T == 1, configuration.K * configuration.V  # T = 1 is no usual call


@pytest.mark.parametrize("configuration, launch, chip", list(planned()))
def test_compiles_and_fits(configuration, launch, chip):
    used = compile_for(launch, chip)
    assert used.shared <= SHARED_MEMORY[chip]
    assert used.spilled <= configuration.most_spilled


def test_every_row_of_the_launch_table_is_compiled(monkeypatch):
    looked_up = set()

    class Watched(dict):
        def __getitem__(self, key):
            looked_up.add(key)
            return super().__getitem__(key)

    for module in (chunks_triton, recurrence_triton, rwkv7.chunk_triton, gsa.chunk_triton):
        monkeypatch.setattr(module, "TABLE", Watched(TABLE))
    for op, module in OPERATORS.items():
        for configuration in module.CONFIGURATIONS.values():
            launches(configuration.run)
        assert {key for key in TABLE if key[0].startswith(op)} <= looked_up
    assert looked_up == TABLE.keys()


@triton.jit
def greedy_kernel(x, y, N: tl.constexpr):
    p = tl.arange(0, N)
    a = tl.load(x + p)
    tl.store(y + p, a - tl.sum(a))  # every thread keeps N / 32 numbers until the sum is known


@pytest.mark.full
def test_a_kernel_that_needs_too_much_is_seen():
    x = torch.zeros(2**17)
    (launch,) = launches(lambda: greedy_kernel[(1,)](x, x, N=2**17, num_warps=1))
    limits = {c.most_spilled for module in OPERATORS.values() for c in module.CONFIGURATIONS.values()}
    assert compile_for(launch, 90).spilled > max(limits - {math.inf})
