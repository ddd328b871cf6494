"""Every kernel in every launch configuration, compiled for real GPUs on any machine: shapes, shared memory, spills."""

import math
from collections import defaultdict

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.common.launch import RUN_ON, SHARED_MEMORY, TABLE, Chip, rows_for

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton
import triton.language as tl

from tests.ops.compiling import SAME_PTX, compile_for, compiled_for, described, launches, tile
from tests.ops.gsa import configurations as gsa
from tests.ops.rwkv6 import configurations as rwkv6
from tests.ops.rwkv7 import configurations as rwkv7
from tests.quick import each_value_once

OPERATORS = {"rwkv6": rwkv6, "rwkv7": rwkv7, "gsa": gsa}
(FOUND_ON,) = RUN_ON


def planned():
    """For the chip that the rows were found on: each kernel's smallest launch, and in the full run the cheapest of the
    others in which every row, switch, size and type of an argument occurs. (configuration, launch), with an id."""
    for op, module in OPERATORS.items():
        kernels = defaultdict(list)
        for name, configuration in sorted(module.CONFIGURATIONS.items(), key=_size):
            for launch in configuration.kernels():
                kernels[launch.kernel].append((name, configuration, launch))
        for found in kernels.values():
            told = [described(launch) for _, _, launch in found]
            names = set().union(*told)
            rows = [{name: each.get(name) for name in names} for each in told]
            chosen = each_value_once(rows, [_cost(launch) for _, _, launch in found])
            for n in sorted({0, *chosen}):
                name, configuration, launch = found[n]
                yield pytest.param(
                    configuration,
                    launch,
                    id=f"{op}-{name}-{launch.name}",
                    marks=pytest.mark.full if n else (),
                )


def _size(named):
    _, configuration = named
    return configuration.T == 1, configuration.K * configuration.V  # T = 1 is no usual call


def _cost(launch):
    """Roughly, of compiling it."""
    return (
        tile(launch)
        * (1 if launch.options.get("MILD") else 2)
        * (3 if launch.options.get("PRECISION") == "tf32x3" else 1)
    )


PLANNED = list(planned())


@pytest.mark.parametrize("configuration, launch", PLANNED)
def test_compiles_and_fits(configuration, launch):
    used = compile_for(launch, FOUND_ON)
    assert used.shared <= SHARED_MEMORY[FOUND_ON]
    assert used.spilled <= configuration.most_spilled


def rows(chip):
    """For every row that a chip gets, the cheapest launch among those with the largest block."""
    with TABLE.using(rows_for(Chip("absent", chip, SHARED_MEMORY[chip]))):
        found = [launch for m in OPERATORS.values() for c in m.CONFIGURATIONS.values() for launch in c.kernels()]
    largest = defaultdict(int)
    for launch in found:
        largest[launch.row] = max(largest[launch.row], tile(launch))
    found = [launch for launch in found if tile(launch) == largest[launch.row]]
    return {launch.row: launch for launch in sorted(found, key=_tokens, reverse=True)}


def _tokens(launch):
    """Larger sizes, for the same block, are the same code in loops."""
    return math.prod(launch.options.get(name) or 1 for name in ("K", "V", "D"))


ELSEWHERE = [chip for chip in SHARED_MEMORY if chip != FOUND_ON]
ROWS = {chip: rows(chip) for chip in ELSEWHERE}
SPILLED_ELSEWHERE = {"scan": 0, "rwkv6": 3072, "rwkv7": 9216, "gsa": 1024, "gsa128": 14848}
"""Bytes that a thread may keep in local memory on chips that the rows were not found on: right, but slow there."""


@pytest.mark.full
@pytest.mark.parametrize("row", TABLE, ids=" ".join)
def test_every_row_fits_every_chip(row, record_property):
    for chip in ELSEWHERE:
        used = compile_for(ROWS[chip][row], chip)
        record_property(f"sm_{chip}", f"{used.registers} registers, {used.spilled} spilled, {used.shared} shared")
        assert used.shared <= SHARED_MEMORY[chip], chip
        assert used.registers <= 255 and used.spilled <= SPILLED_ELSEWHERE[row[0].partition(".")[0]], chip


@pytest.mark.full
@pytest.mark.parametrize("op", OPERATORS)
def test_ptx_of_ampere_and_ada_differs_in_the_target_only(op):
    row = next(key for key in ROWS[80] if key[0].startswith(f"{op}.output.mild"))
    ptx = {chip: compiled_for(ROWS[80][row], chip).asm["ptx"] for chip in (80, *SAME_PTX)}
    for chip, like in SAME_PTX.items():
        assert ptx[chip] == ptx[like].replace(f".target sm_{like}", f".target sm_{chip}")


def test_every_row_of_the_launch_table_is_compiled():
    assert {parameters.values[1].row for parameters in PLANNED} == TABLE.keys()
    assert all(found.keys() == TABLE.keys() for found in ROWS.values())


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
