"""Which way a kernel takes through a chunk: the mild one up to its limits, the one for any decay at them and beyond.

A chunk is mild where no channel decays by e^55 over either half of it and no token by e^4; in chunks of 32 RWKV7 looks
at tokens alone, each of which has to stay within its share of the first limit. A fused chunk is mild if no token decays
by e^6. GSA cuts any other chunk into blocks of 16 rows, for which e^6 replaces e^4, or, where these are not mild
either, into single rows; for float32 inputs its limits are e^8 over a half and e^3 a token. On either side of each
limit the way is watched and the results are held against float64.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from flakit.numerics.operators import OPERATORS
from flakit.ops.common.dispatch import has_triton
from flakit.ops.common.launch import CHUNK_SIZE
from tests.ops.places import PLACES, of
from tests.ops.settings import Setting

if has_triton():
    from flakit.ops.common import plan_triton

C = CHUNK_SIZE
TRITON = pytest.mark.parametrize("place", [p for p in PLACES if p.id != "torch"])
SETTING = Setting(T=2 * C, K=16, V=16, H=1, decay="none", dtype="float16", decay_dtype="float32")

# (decay of one channel over the chunk, of one token of another channel, mild). All are exact in float32, sums too.
CHANNELS = [(-109.5, 0, True), (-110, 0, False), (-3000, 0, False), (-torch.inf, 0, False)]
TOKENS = [(0, -3.96875, True), (0, -4, False), (0, -80, False), (0, -torch.inf, False)]
SHARES = [(0, -3.421875, True), (0, -3.4375, False), (0, -80, False), (0, -torch.inf, False)]
LIMITS = [(op, *limit) for op, tokens in (("rwkv6", TOKENS), ("rwkv7", SHARES)) for limit in CHANNELS + tokens]

# Likewise for GSA, with the flag: 2 for a mild chunk, 1 for mild blocks, 0 for single rows.
GSA_LIMITS = [
    *((-109.5, 0, 2), (-110, 0, 1), (-190, 0, 1), (-192, 0, 0), (-3000, 0, 0), (-torch.inf, 0, 0)),
    *((0, -3.96875, 2), (0, -4, 1), (0, -5.96875, 1), (0, -6, 0), (0, -80, 0), (0, -torch.inf, 0)),
]
GSA_FLOAT32 = [(-15.9375, 0, 2), (-16, 0, 1), (-31.75, 0, 1), (-32, 0, 0), (0, -2.96875, 2), (0, -3, 0), (0, -80, 0)]


def made_of(place, op, total, token, dtype="float16"):
    """Two chunks, the second with these decays: what is decided of it must not depend on the first."""
    made, arriving = place.make(of(op, SETTING), T=SETTING.T, H=1, dtype=dtype)
    w = torch.zeros_like(made[OPERATORS[op].decay])
    w[0, C:, 0, 3] = total / C
    w[0, C + 5, 0, 7] = token
    return made | {OPERATORS[op].decay: w}, arriving


class OneWay:
    """A kernel whose other launches are left out, so that what it would write stays unwritten."""

    def __init__(self, kernel, mild):
        self.kernel, self.mild = kernel, mild
        self.arg_names, self.pre_run_hooks = kernel.arg_names, []
        self.fn = self  # in no memory of launches

    def __getitem__(self, grid):
        def launch(*given, **options):
            return self.kernel[grid](*given, **options) if options["MILD"] == self.mild else None

        return launch


def chunks_taken(monkeypatch, place, op, made, mild, size=C):
    """Of each chunk, whether the launch for mild chunks (or the other) writes what it makes: all of it, or nothing."""
    kernels, name = import_module(f"flakit.ops.{op}.chunk_triton"), "output_kernel"
    with monkeypatch.context() as patch:
        patch.setattr(kernels, name, OneWay(getattr(kernels, name), mild))
        found = OPERATORS[op].forms["chunk"](**made, backend=place.backend, chunk_size=size).o
    written = found.isfinite().unflatten(1, (2, size)).movedim(1, 0).flatten(1)
    assert (written.all(1) == written.any(1)).all()
    return written.all(1).tolist()


@TRITON
@pytest.mark.parametrize("op, total, token, mild", LIMITS, ids=str)
def test_the_way_through_a_chunk(place, op, total, token, mild, monkeypatch, poisoned_memory):
    made, arriving = made_of(place, op, total, token)
    assert chunks_taken(monkeypatch, place, op, made, 1) == [True, mild]
    assert chunks_taken(monkeypatch, place, op, made, 0) == [False, not mild]
    place.check(made, arriving, "chunk", op, chunk_size=C)


@TRITON
@pytest.mark.parametrize(("token", "mild"), [(-5.96875, True), (-6, False), (-80, False), (-torch.inf, False)])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
def test_the_way_of_a_fused_chunk(place, op, token, mild, monkeypatch, poisoned_memory):
    """One token decides, for its head's chunk alone; the others of that head stay mild."""
    dtype = "bfloat16" if place.device == "cuda" else "float16"
    made, arriving = place.make(of(op, SETTING), T=40, H=2, K=64, V=40, dtype=dtype)
    made |= {"w": torch.full_like(made["w"], -0.5)}
    made["w"][0, 21, 1, 3] = token
    kernels = import_module(f"flakit.ops.{op}.fused_chunk_triton")
    forward, flags = kernels.forward, []

    def watched(*given):
        o, state, kept = forward(*given)
        flags.append(kept[-1].flatten()[-6:].view(3, 2).tolist())  # one for each chunk and head
        return o, state, kept

    monkeypatch.setattr(kernels, "forward", watched)
    place.check(made, arriving, "chunk", op, chunk_size=16)
    assert flags[-1] == [[1.0, 1.0], [1.0, float(mild)], [1.0, 1.0]]  # on a GPU a call before it only compiles


@pytest.fixture
def gsa_flags(monkeypatch):
    """The flags of the chunks in GSA's latest forward of one sequence and head."""
    plan, flags = import_module("flakit.ops.gsa.chunk_triton")._Plan, []
    states = plan.states

    def watched(*args, **options):
        stored, mild = states(*args, **options)
        if not options["reverse"]:
            flags[:] = mild.view().tolist()
        return stored, mild

    monkeypatch.setattr(plan, "states", watched)
    return flags


@TRITON
@pytest.mark.parametrize(
    "dtype, total, token, flag",
    [("float16", *limit) for limit in GSA_LIMITS] + [("float32", *limit) for limit in GSA_FLOAT32],
    ids=str,
)
def test_the_blocks_of_a_gsa_chunk(place, dtype, total, token, flag, gsa_flags, poisoned_memory):
    made, arriving = made_of(place, "gsa", total, token, dtype)
    place.check(made, arriving, "chunk", "gsa", chunk_size=C)
    assert gsa_flags == [2, flag]


@TRITON
@pytest.mark.parametrize("late", [False, True], ids=["first half", "second half"])
@pytest.mark.parametrize("tokens, flag", [(13, 2), (14, 1), (27, 1)])
def test_a_steep_half_is_not_mild_however_flat_the_other_is(place, tokens, flag, late, gsa_flags, poisoned_memory):
    """In chunks of 64: 27 tokens of e^-4 in one half would be a factor of e^108 about the middle."""
    size = 64
    dtype = "bfloat16" if place.device == "cuda" else "float16"  # which stands in for it in the interpreter
    setting = replace(of("gsa", SETTING), M=size, group=1)
    made, arriving = place.make(setting, T=2 * size, H=1, K=size, V=size, dtype=dtype)
    made["g"] = torch.zeros_like(made["g"])
    made["g"][0, slice(-tokens, None) if late else slice(size, size + tokens), 0, 3] = -3.96875
    place.check(made, arriving, "chunk", "gsa", chunk_size=size)
    assert gsa_flags == [2, flag]


@TRITON
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
def test_float32_never_takes_the_mild_way(place, op, monkeypatch, poisoned_memory):
    made, _ = made_of(place, op, 0, 0, dtype="float32")
    assert chunks_taken(monkeypatch, place, op, made, 1) == [False, False]
    assert chunks_taken(monkeypatch, place, op, made, 0) == [True, True]


@TRITON
@pytest.mark.parametrize("packing", ["none", "packed"])
@pytest.mark.parametrize(
    "op, K, V, G, width",
    [
        *(("rwkv6", 32, 64, 1, "16-bit"), ("rwkv6", 80, 16, 1, "16-bit")),
        *(("gsa", 64, 64, 1, "16-bit"), ("gsa", 16, 40, 2, "16-bit"), ("gsa", 16, 40, 1, "float32")),
    ],
)
def test_one_program_looks_at_several_chunks(place, op, K, V, G, width, packing, monkeypatch, poisoned_memory):
    """Chunks of three heads, some of them mild: of those that a program looks at, it computes what is not."""
    monkeypatch.setattr("flakit.ops.common.plan_triton.FULL_GPU", 2)
    looked_at = []
    flattened = plan_triton.ChunkPlan.flattened
    monkeypatch.setattr(
        plan_triton.ChunkPlan,
        "flattened",
        lambda plan, *given, **named: looked_at.append(plan.at_once) or flattened(plan, *given, **named),
    )
    dtype = width if width == "float32" else "bfloat16" if place.device == "cuda" else "float16"
    setting = replace(of(op, SETTING), group=G, packing=packing)
    made, arriving = place.make(setting, T=5 * 64 - 20, H=3, K=K, V=V, dtype=dtype)
    w = torch.full_like(made[OPERATORS[op].decay], -0.01)
    w[:, 32:64, 0], w[:, 64:96, 0], w[:, 128:, 1] = -5.0, -7.0, -70.0
    place.check(made | {OPERATORS[op].decay: w}, arriving, "chunk", op, chunk_size=C)
    assert min(looked_at) >= 4
