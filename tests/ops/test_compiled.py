"""Every kernel in every launch configuration, compiled for real GPUs on any machine: shapes, shared memory, spills.

What the ledger (ledger.py) has of a kernel as it is now is not compiled again.
"""

import math
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from flakit.numerics.operators import OPERATORS
from flakit.ops.common.dispatch import has_triton, interpreted
from flakit.ops.common.launch import (
    CHUNK_SIZE,
    LONG_CHUNK_SIZE,
    NARROWEST,
    RUN_ON,
    SHARED_MEMORY,
    TABLE,
    TWO_STAGES,
    Chip,
    rows_for,
)

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton
import triton.language as tl

from flakit.ops.common.packed_triton import Packing
from flakit.ops.common.recurrence_triton import relayout
from tests.ops import ledger, record_compiled
from tests.ops.compiling import BLOCKS, compile_for, compiled_for, described, launches, ptx, shifted_out, tile
from tests.ops.ledger import needs
from tests.quick import each_value_once

CONFIGURED = {op: import_module(f"tests.ops.{op}.configurations") for op in OPERATORS}
(FOUND_ON,) = RUN_ON
MOST_TWICE = 0.25
"""The part of its numbers that a kernel may compute a second time: what is cheaper made again than moved."""
RAN_ON = ("3.6.0",)
"""The Triton with which the whole GPU suite ran, where that is not the pinned one."""
PINNED = f"triton=={triton.__version__};" in (Path(__file__).parents[2] / "constraints.txt").read_text()


def planned():
    """For the chip that the rows were found on: each kernel's smallest launch, and in the full run the cheapest of the
    others in which every row, switch, size and type of an argument occurs; (configuration, launch), with an id."""
    for op, module in CONFIGURED.items():
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
                    marks=() if n == 0 else pytest.mark.full,
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
    used = needs(launch, FOUND_ON)
    assert used.shared <= SHARED_MEMORY[FOUND_ON]
    assert used.spilled <= configuration.most_spilled
    assert used.twice <= MOST_TWICE


@pytest.mark.parametrize("configuration, launch", PLANNED)
def test_no_length_makes_another_kernel(configuration, launch):
    """Triton compiles once more for an integer that is 1 and for a multiple of 16, unless it is told not to."""
    looked_at = [p.name for p, x in zip(launch.kernel.params, launch.args, strict=False) if type(x) is int]
    assert not [p.name for p in launch.kernel.params if p.name in looked_at and not p.do_not_specialize]


@pytest.mark.parametrize("op", OPERATORS)
def test_no_tile_of_long_chunks_is_narrow(op):
    found = [x for c in CONFIGURED[op].CONFIGURATIONS.values() for x in c.kernels()]
    long = [x for x in found if x.options.get("C") == LONG_CHUNK_SIZE]
    assert bool(long) == (op != "rwkv7")
    for launch in long:
        narrow = {n: x for n, x in launch.options.items() if n in BLOCKS and x < NARROWEST}
        assert not narrow, launch.name


# --- chips that the rows were not found on ---------------------------------------------------------------------------

SAME_PTX = {86: 80, 89: 80}
"""Chips for which Triton writes the same PTX as for another, but for the target's name: a test compares them."""
OWN = {chip: rows_for(Chip("absent", chip, shared)) for chip, shared in SHARED_MEMORY.items()}
LIKE = {chip: like for chip, like in SAME_PTX.items() if OWN[chip] == OWN[like]}
"""Chips that another stands for, since Triton writes the same for both, as a test shows."""
ELSEWHERE = [chip for chip in SHARED_MEMORY if chip != FOUND_ON and chip not in LIKE]
SPILLED_ELSEWHERE = {"scan": 0, "rwkv6": 1024, "rwkv7": 6656, "gsa": 1536, "gsa128": 2560}
"""Bytes that a thread may keep in local memory there: right, but slow. They are at most a third more than
data/compiled.json has, for other versions of Triton."""


def rows(chip):
    """For every row that a chip gets, the cheapest launch among those with the largest block of a usual chunk."""
    with TABLE.using(OWN[chip]):
        found = [launch for m in CONFIGURED.values() for c in m.CONFIGURATIONS.values() for launch in c.kernels(chip)]
    usual = {"16-bit": LONG_CHUNK_SIZE, "float32": CHUNK_SIZE}
    found = [launch for launch in found if launch.options.get("C", 0) <= usual[launch.row[1]]]
    largest = defaultdict(int)
    for launch in found:
        largest[launch.row] = max(largest[launch.row], tile(launch))
    found = [launch for launch in found if tile(launch) == largest[launch.row]]
    return {launch.row: launch for launch in sorted(found, key=_sizes, reverse=True)}


def _sizes(launch):
    """Larger ones, for the same block, are the same code in loops."""
    return math.prod(launch.options.get(name) or 1 for name in ("K", "V", "D"))


ROWS = {chip: rows(chip) for chip in ELSEWHERE}


def fits(launch, chip):
    """What a launch needs on a chip, in words; it has to be there."""
    used = needs(launch, chip)
    stands_for = [chip, *(other for other, like in LIKE.items() if like == chip)]
    assert used.shared <= min(SHARED_MEMORY[each] for each in stands_for), chip
    assert used.registers * 32 * launch.options["num_warps"] <= 65536, chip  # a multiprocessor's
    assert used.spilled <= SPILLED_ELSEWHERE.get(launch.row[0].partition(".")[0], 0), chip
    return f"sm_{chip}: {used.registers}, {used.spilled}, {used.shared}"


@pytest.mark.full
@pytest.mark.parametrize("row", TABLE, ids=" ".join)
def test_every_row_fits_every_chip(row, record_property):
    told = [fits(ROWS[chip][row], chip) for chip in ELSEWHERE]
    record_property("registers, bytes spilled, shared memory", "; ".join(told))


(WIDE,) = (launch for launch in CONFIGURED["rwkv7"].WIDE.kernels() if launch.options["MILD"])


@pytest.mark.full
@pytest.mark.parametrize("chip", ELSEWHERE)
def test_gradients_of_rwkv7s_wide_heads_fit_every_chip(chip):
    """Once a loop over blocks of K kept what each of them uses in shared memory of its own: 120 KB on the mild way."""
    fits(WIDE, chip)


def of_two_forms(op):
    """A launch of the output's kernel and one of the stream's."""
    return [ROWS[80][next(row for row in TABLE if row[0].startswith(f"{op}.{name}"))] for name in ("output", "stream")]


@pytest.mark.full
@pytest.mark.parametrize("chip, like", SAME_PTX.items())
@pytest.mark.parametrize("op", OPERATORS)
def test_of_ampere_and_ada_one_stands_for_the_others(op, chip, like):
    for launch in of_two_forms(op):
        assert needs(launch, chip).instructions == needs(launch, like).instructions
        fits(launch, chip)


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_gsa_takes_two_stages_where_two_programs_fit_and_heads_have_several_blocks(chip):
    def in_two_stages(configuration):
        inside = (launch for launch in configuration.kernels(chip) if "LEVELS" in launch.options)
        stages = {launch.kernel.fn.__name__: launch.options["num_stages"] for launch in inside}
        return {name for name, n in stages.items() if n == 2} - {"softmax_grads_kernel"}  # everywhere two, by its row

    of_512 = CONFIGURED["gsa"].CONFIGURATIONS["bf16-K512-V512-M64"]
    roomy = SHARED_MEMORY[chip] >= TWO_STAGES
    assert in_two_stages(of_512) == ({"output_kernel", "pass_grads_kernel"} if roomy else set())
    assert roomy == (chip in (90, 100, 103))
    others = (replace(of_512, **other) for other in (dict(K=128, V=128), dict(M=128), dict(dtype=torch.float32)))
    assert not any(in_two_stages(other) for other in others)


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_launches_of_gsas_results_overlap_from_hopper_on(chip):
    """The second of each pair, and no other launch, begins before the one before it has ended."""
    for name, overlaps in ("bf16-K128-V128-M64", chip >= 90), ("f32-K128-V128-M64", False):
        found = CONFIGURED["gsa"].CONFIGURATIONS[name].kernels(chip)
        pairs = [launch for launch in found if "MILD" in launch.options]
        assert len(pairs) == 10 and {launch.options["OVERLAPS"] for launch in pairs} == {overlaps}
        for launch in found:
            second = not launch.options.get("MILD", True)
            assert launch.options.get("launch_pdl", False) == (overlaps and second)


def test_every_row_of_the_launch_table_is_compiled():
    assert {parameters.values[1].row for parameters in PLANNED} == TABLE.keys()
    assert all(found.keys() == TABLE.keys() for found in ROWS.values())


# --- the ledger ------------------------------------------------------------------------------------------------------


def smallest(op, kernel):
    of_the_operator = (parameters.values[1] for parameters in PLANNED if parameters.id.startswith(op))
    return min((x for x in of_the_operator if x.kernel.fn.__name__ == kernel), key=tile)


def packing_kernels():
    """Of packed sequences; they have no row in the launch table."""
    packing = Packing(torch.tensor([0, 7, 7, 100]), 100)

    def lay_out_and_close():
        packing.pieces(16)
        packing.close([torch.zeros(1, 100, 2, 16, dtype=torch.bfloat16)] * 6, [torch.zeros(3, 2, 16, 16)] * 3)

    return launches(lay_out_and_close)


@pytest.mark.parametrize("chip", SHARED_MEMORY)
@pytest.mark.parametrize("launch", packing_kernels(), ids=lambda launch: launch.name)
def test_kernels_of_packed_sequences(launch, chip):
    assert launch.row is None
    used = compile_for(launch, chip)
    assert used.spilled == 0 and used.shared <= 4096 and used.registers <= 64


SMALL = [
    smallest("rwkv6", "scan_kernel"),
    smallest("rwkv6", "key_grads_kernel"),
    smallest("rwkv7", "output_kernel"),
    smallest("rwkv7", "recurrent_grads_kernel"),
    smallest("gsa", "stream_kernel"),
]


def asked_for():
    """Every launch that the tests of this file ask for, with its chip: what the ledger has."""
    yield from ((parameters.values[1], FOUND_ON) for parameters in PLANNED)
    yield from ((ROWS[chip][row], chip) for row in TABLE for chip in ELSEWHERE)
    yield from ((WIDE, chip) for chip in ELSEWHERE)
    alike = {*SAME_PTX, *SAME_PTX.values()}
    yield from ((launch, chip) for op in OPERATORS for launch in of_two_forms(op) for chip in alike)
    yield from ((launch, chip) for launch in SMALL for chip in SHARED_MEMORY)


@pytest.mark.parametrize("chip", SHARED_MEMORY)
@pytest.mark.parametrize("launch", SMALL, ids=lambda launch: launch.name)
def test_the_ledger_says_what_compiling_says(launch, chip):
    """Small ones of several kernels, which are always compiled."""
    compiled = compile_for(launch, chip)
    assert ledger.read().get(ledger.key(launch, chip), compiled) == compiled


@pytest.mark.full
@pytest.mark.skipif(not PINNED, reason="the ledger is of the Triton that constraints.txt pins")
def test_the_ledger_has_every_launch_as_it_is_now():
    """Here alone: whoever is at work on a kernel goes on without, and what the ledger lacks is compiled."""
    wanted, there = {ledger.key(*each) for each in asked_for()}, ledger.read().keys()
    if wanted != there:
        lacks, needless = len(wanted - there), len(there - wanted)
        pytest.fail(f"it lacks {lacks} launches of {len(wanted)} and has {needless} of others: {ledger.COMMAND}")


@pytest.mark.full
@pytest.mark.skipif(not PINNED, reason="the ledger is of the Triton that constraints.txt pins")
def test_the_triton_that_gpus_ran_on_compiled_the_same_launches_and_they_fit():
    """Its keys only it can say; that it was asked for every launch of today shows in the launches' words."""
    others = ledger.of_other_tritons()
    if {row["triton"] for row in others} != {*RAN_ON}:
        pytest.fail(f"expected rows of triton {', '.join(RAN_ON)} for sm_{FOUND_ON}: see {ledger.COMMAND} --help")
    words = {record_compiled.words(*each) for each in asked_for() if each[1] == FOUND_ON}
    assert {(row["row"], row["kernel"], row["constants"], row["chip"]) for row in others} == words
    for row in others:
        assert row["shared"] <= SHARED_MEMORY[FOUND_ON] and row["twice"] <= MOST_TWICE, row


@triton.jit
def greedy_kernel(x, y, N: tl.constexpr):
    p = tl.arange(0, N)
    a = tl.load(x + p)
    tl.store(y + p, a - tl.sum(a))  # every thread keeps N / 32 numbers until the sum is known


@pytest.mark.full
def test_a_kernel_that_needs_too_much_is_seen():
    x = torch.zeros(2**17)
    (launch,) = launches(lambda: greedy_kernel[(1,)](x, x, N=2**17, num_warps=1))
    limits = {c.most_spilled for module in CONFIGURED.values() for c in module.CONFIGURATIONS.values()}
    assert compile_for(launch, 90).spilled > max(limits - {math.inf})


@triton.jit
def state_kernel(x, y, states, T, BY_MEMORY: tl.constexpr):
    o_k, o_v = tl.arange(0, 64), tl.arange(0, 16)
    p_S = states + o_k[:, None] * 16 + o_v[None, :]
    b_S = tl.zeros([64, 16], dtype=tl.float32)
    if BY_MEMORY:
        b_S = relayout(p_S, b_S, True)
    for t in range(T):
        tl.store(p_S + t * 64 * 16, b_S)
        b_S = 0.5 * b_S + tl.load(x + t * 64 + o_k)[:, None]
        tl.store(y + t * 16 + o_v, tl.sum(b_S, 0))


@pytest.mark.parametrize("by_memory", [False, True])
def test_a_state_that_is_carried_in_two_ways_is_seen(by_memory):
    """Zeros lie any way, and what is stored lies as memory is best written: Triton carries a state both ways."""
    x = torch.zeros(64)
    (launch,) = launches(lambda: state_kernel[(1,)](x, x, x, 8, BY_MEMORY=by_memory, num_warps=2))
    assert (compile_for(launch, FOUND_ON).twice > MOST_TWICE) != by_memory


def exchanges(op, states):
    """How often the threads of an operator's recurrence exchange anything, forward and without gradients."""
    size = 128 if op == "gsa" else 64
    configured = CONFIGURED[op].Launches(
        import_module(f"flakit.ops.{op}.recurrent_triton"), torch.bfloat16, size, size, states=states, gradients=False
    )
    codes = [ptx(compiled_for(launch, FOUND_ON)) for launch in configured.kernels()]
    return [{what: code.count(what) for what in ("shfl.sync", "bar.sync")} for code in codes]


@pytest.mark.parametrize("op", OPERATORS)
def test_a_recurrence_without_states_exchanges_no_more(op):
    """Its state begins as zeros, which might lie any way: RWKV6's once took twice the time."""
    assert exchanges(op, states=False) == exchanges(op, states=True)


VECTOR = "define void @k() {\n  %4 = shl nuw nsw <2 x i32> %3, <i32 28, i32 1>, !dbg !9\n  %5 = USE, !dbg !9\n}\n"


@pytest.mark.parametrize(
    "use, is_wrong",
    [
        ("or disjoint <2 x i32> %4, %3", True),
        ("extractelement <2 x i32> %4, i64 0", True),
        ("extractelement <2 x i32> %4, i64 1", False),
        ("shufflevector <2 x i32> %3, <2 x i32> %4, <4 x i32> <i32 0, i32 3, i32 poison, i32 3>", False),
        ("shufflevector <2 x i32> %3, <2 x i32> %4, <2 x i32> <i32 0, i32 2>", True),
        ("shufflevector <2 x i32> %4, <2 x i32> poison, <2 x i32> zeroinitializer", True),
        ("or disjoint <2 x i32> %44, %3", False),
    ],
)
def test_a_number_of_a_thread_that_is_shifted_out_is_seen_where_something_is_made_of_it(use, is_wrong):
    assert (shifted_out(VECTOR.replace("USE", use)) is not None) == is_wrong
    assert shifted_out(VECTOR.replace("USE", use).replace("i32 28", "i32 4")) is None
