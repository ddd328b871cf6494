"""What a kernel launches from memory is what Triton would launch; nothing else than a known kind of launch is."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from flakit.ops.common import ahead_triton, bands_triton, kernel_triton
from flakit.ops.common.ahead_triton import Kernels
from flakit.ops.common.kernel_triton import Kernel, Memory, Part
from flakit.ops.common.launch import SHARED_MEMORY, TABLE, Chip
from flakit.ops.rwkv6 import chunk_triton as rwkv6
from tests.ops.compiling import absent_gpu


def copy_kernel(x, y, more, n, m, scale, C: tl.constexpr, WHOLE: tl.constexpr):
    tl.store(y, tl.load(x))


class Compiled:
    """In place of what Triton compiles; launched: the grids and the arguments."""

    def __init__(self):
        self.launched = []

    def launch_metadata(self, *given):
        return None

    function = packed_metadata = None

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        self.launched.append(((x, y, z), args))


@pytest.fixture
def kernel(monkeypatch):
    def compile(self, key, signature, device, *given):
        return self.device_caches[device][0].setdefault(key, Compiled())

    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    with absent_gpu(90, object()):  # for which nothing is compiled yet
        yield kernel_triton.launched("n", "m")(copy_kernel)


X = torch.zeros(64)
USUAL = dict(x=X, y=X, more=None, n=7, m=7, scale=0.5, C=32, WHOLE=True, num_warps=4)
OTHERS = [
    {}, dict(x=X[1:]), dict(y=X[4:]), dict(x=X.half()), dict(x=torch.nn.Parameter(X)), dict(more=X), dict(more=X[3:]),
    dict(n=1), dict(n=16), dict(n=2**31), dict(n=2**40), dict(n=-1), dict(m=0), dict(m=1), dict(m=2), dict(m=48),
    dict(m=2**31 - 1), dict(m=2**31), dict(m=2**31 + 16), dict(m=-16), dict(m=True), dict(scale=2.0), dict(scale=1),
    dict(C=64), dict(WHOLE=False), dict(num_warps=8), dict(num_stages=2),
]  # fmt: skip


def addresses(args):
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]


def apart(given):
    names = "x", "y", "more", "n", "m", "scale"
    return [given[name] for name in names], {name: x for name, x in given.items() if name not in names}


def call(kernel, given, memory, programs=3):
    """Launch as a call does whose arguments differ from others of its kind as `given` may from `USUAL`."""
    args, options = apart(given)
    kinds = [getattr(x, "dtype", type(x)) for x in args]
    memory.launch(kernel, programs, args, lambda: options, *kinds, *options.items())


def launched(kernel, given, programs=(3, 1)):
    """Return what Triton compiles for a launch, and remove from it the one launch that it made meanwhile."""
    args, options = apart(given)
    expected = kernel.run(*args, grid=programs, warmup=True, **options)
    ((grid, values),) = expected.launched
    expected.launched.clear()
    assert grid == (*programs, 1) and addresses(values) == [*addresses(args), options["C"], options["WHOLE"]]
    return expected


@pytest.mark.parametrize("programs", [3, (3, 5)], ids=str)
def test_what_is_launched_is_what_triton_would_launch(kernel, programs):
    memory = Memory(0)
    for _ in range(3):
        for other in OTHERS:
            call(kernel, USUAL | other, memory, programs)
            launched(kernel, USUAL | other, (3, 1) if programs == 3 else programs)


def test_a_known_kind_is_launched_without_triton_looking(kernel, monkeypatch):
    memory, looked, run = Memory(0), [], kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args, **more: looked.append(run(*args, **more)) or looked[-1])
    part = Part(torch.zeros(80), 16, 64, torch.float32)
    alike = {}, dict(n=8), dict(n=1, m=16), dict(scale=2.0), dict(x=X[4:]), dict(x=torch.nn.Parameter(X)), dict(y=part)
    for n, other in enumerate(alike):
        args, options = apart(USUAL | other)
        memory.launch(kernel, n, args, lambda: options)  # noqa: B023
    (compiled,) = looked
    assert [grid[0] for grid, _ in compiled.launched] == [*range(7)]
    assert [args[3] for _, args in compiled.launched] == [7, 8, 1, 7, 7, 7, 7]
    assert compiled.launched[-1][1][1] == part.view().data_ptr() == part.whole[16:].data_ptr()


@pytest.mark.parametrize("other", [dict(x=X[1:]), dict(n=2**31), dict(m=2**40), dict(y=X[4:][1:])], ids=str)
def test_what_triton_would_compile_anew_is_left_to_it(kernel, other):
    """The kinds of arguments are the same, and the memory has them: addresses and sizes are looked at each time."""
    first, memory = {}, Memory(0)
    for given in (USUAL | other, USUAL, USUAL, USUAL | other, USUAL):
        call(kernel, given, memory)
        compiled = launched(kernel, given)
        assert first.setdefault(given is USUAL, compiled) is compiled
    assert first[True] is not first[False]


def test_without_a_device_nothing_is_remembered(kernel, monkeypatch):
    for memory in (Memory(), Memory(None)):
        call(kernel, USUAL, memory)
        assert not memory
    monkeypatch.setattr(kernel_triton, "REMEMBERS", False)
    memory = Memory(0)
    call(kernel, USUAL, memory)
    assert not memory


def test_what_is_made_once_is_made_once():
    memory, made = Memory(0), []
    for n in range(3):
        assert memory.once("a", lambda n=n: made.append(n) or (n,)) == (0,)
    assert memory.once("b", lambda: (7,)) == (7,) and made == [0]
    assert [Memory().once([], lambda n=n: n) for n in range(3)] == [0, 1, 2]


def test_a_hook_of_the_kernel_sees_a_known_launch(kernel):
    memory, seen = Memory(0), []
    call(kernel, USUAL, memory)
    kernel.add_pre_run_hook(lambda *args, **options: seen.append(options["C"]))
    call(kernel, USUAL, memory)
    assert seen == [32]


class Checked:
    """In place of `Memory.launch`: each launch is what Triton would launch. fresh: of each, whether it was in no
    memory."""

    def __init__(self, monkeypatch):
        self.fresh, launch = [], Memory.launch

        def checking(memory, kernel, programs, args, constants, *kind, **flags):
            known = len(memory)
            launch(memory, kernel, programs, args, constants, *kind, **flags)
            if memory.device is None:
                return
            self.fresh.append(len(memory) > known)
            grid, options = (programs, 1) if isinstance(programs, int) else programs, constants()
            options |= {n: x is not None if x is None or isinstance(x, torch.Tensor) else x for n, x in flags.items()}
            args = [x.view() if isinstance(x, Part) else x for x in args]
            expected = kernel.run(*args, grid=grid, warmup=True, **options)
            (((*there, one), values),) = expected.launched
            expected.launched.clear()
            constant = [options[name] for name in kernel.arg_names[len(args) :]]
            assert (*there, one) == (*grid, 1) and addresses(values) == [*addresses(args), *constant]

        monkeypatch.setattr(Memory, "launch", checking)


CONFIGURATIONS = {
    f"{op}-{name}": x
    for op in ("rwkv6", "rwkv7", "gsa")
    for name, x in import_module(f"tests.ops.{op}.configurations").CONFIGURATIONS.items()
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_an_operator_launches_from_memory_what_triton_would(kernel, configuration, monkeypatch):
    """Also with other lengths, and other numbers of sequences, that are no part of a call's kind."""
    counts, kernels, fresh = Checked(monkeypatch), Kernels(configuration.module), []
    monkeypatch.setattr(ahead_triton, "_begin", lambda *jobs: [[] for _ in jobs])  # nothing is compiled ahead
    monkeypatch.setattr(bands_triton, "runs_gluon", lambda *tensors: configuration.hopper)
    monkeypatch.setattr(configuration.module, "chip_of", lambda x: Chip("", 90, SHARED_MEMORY[90]), raising=False)
    shortest = 1 << (configuration.T.bit_length() - 1)
    for T, sequences in ((configuration.T, 3), (configuration.T, 3), (shortest, 1), (configuration.T - 1, 9)):
        call, before = replace(configuration, T=max(T, 1)), len(counts.fresh)
        tensors, state, do = call.zeros()
        packed = torch.arange(sequences + 1, dtype=torch.int32) * T // sequences if call.packed else None
        if packed is not None:
            state = [x.new_zeros(sequences, *x.shape[1:]) for x in ahead_triton._parts(state)]
            state = state[0] if len(state) == 1 else tuple(state)
        state = state if call.states else None
        found = kernels.forward(*tensors, 0.5, state, call.states, packed, call.chunk_size, call.gradients)[2]
        if call.gradients:
            kept, packing = (found[:-1], found[-1]) if call.packed else (found, None)
            kernels.backward(*tensors, 0.5, state, packing, call.chunk_size, kept, do, state)
        fresh.append(sum(counts.fresh[before:]))
    assert fresh[0] and not fresh[1]


@pytest.mark.parametrize("watches", ["run", "launch_enter_hook", "launch_exit_hook"])
def test_who_watches_sees_what_an_operator_remembers(kernel, watches, monkeypatch):
    monkeypatch.setattr(ahead_triton, "_begin", lambda *jobs: [[] for _ in jobs])
    x = torch.zeros(1, 40, 2, 16, dtype=torch.bfloat16)
    kernels, seen, run = Kernels(rwkv6), [], JITFunction.run
    given = x, x, x, x, x[0, 0], 0.5, None, False, None, 0, False
    kernels.forward(*given)
    if watches != "run":
        monkeypatch.setattr(knobs.runtime, watches, lambda *_: None)
    watched = Kernel if watches != "run" else JITFunction
    monkeypatch.setattr(watched, "run", lambda *args, **more: seen.append(args[0]) or run(*args, **more))
    kernels.forward(*given)
    assert len(seen) == 3


def test_calls_of_other_kinds_remember_apart(kernel, monkeypatch):
    monkeypatch.setattr(ahead_triton, "_begin", lambda *jobs: [[] for _ in jobs])
    x, u, kernels = torch.zeros(1, 40, 2, 16), torch.zeros(2, 16), Kernels(rwkv6)
    usual = dict(r=x, k=x, v=x, w=x, u=u, scale=0.5, state=None, final=False, cu_seqlens=None, chunk_size=0, keep=False)
    offsets, state = torch.tensor([0, 40]), torch.zeros(1, 2, 16, 16)
    others = [
        {}, dict(w=x.half()), dict(u=u.half()), dict(v=torch.zeros(1, 40, 2, 32)), dict(keep=True), dict(final=True),
        dict(cu_seqlens=offsets), dict(cu_seqlens=offsets.int()), dict(state=state), dict(state=state.half()),
    ]  # fmt: skip
    for kinds, other in enumerate(others, 1):
        for _ in range(2):
            kernels.forward(*(usual | other).values())
            assert len({id(kind.memory) for key, kind in kernels._known.items() if key[1] == "forward"}) == kinds
    monkeypatch.setattr(knobs.runtime, "debug", True)
    kernels.forward(*usual.values())
    with TABLE.using({}):
        kernels.forward(*usual.values())
    assert len([key for key in kernels._known if key[1] == "forward"]) == len(others) + 2
    monkeypatch.setattr(torch.Tensor, "get_device", lambda y: -1 if y is u else 0)
    kernels.forward(*usual.values())
    assert len([key for key in kernels._known if key[1] == "forward"]) == len(others) + 2


def test_memory_ends(kernel, monkeypatch):
    monkeypatch.setattr(ahead_triton, "_begin", lambda *jobs: [[] for _ in jobs])
    monkeypatch.setattr(ahead_triton, "MAX_KINDS", 3)
    kernels = Kernels(rwkv6)
    for B in range(1, 10):
        x = torch.zeros(B, 40, 2, 16)
        kernels.forward(x, x, x, x, x[0, 0], 0.5, None, False, None, 0, False)
        assert len(kernels._known) <= 4
