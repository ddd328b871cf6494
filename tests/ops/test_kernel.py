"""What a kernel launches from memory is what Triton would launch; nothing else than a known kind of launch is."""

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from flakit.bench.launches import watched
from flakit.ops.common import kernel_triton
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
    with absent_gpu(90):
        yield kernel_triton.launched("n")(copy_kernel)


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


@pytest.mark.parametrize("programs", [(3,), (3, 5), (2, 3, 4)], ids=len)
def test_what_is_launched_is_what_triton_would_launch(kernel, programs):
    for _ in range(3):
        for other in OTHERS:
            args, options = apart(USUAL | other)
            kernel[programs](*args, **options)
            expected = kernel.run(*args, grid=programs, warmup=True, **options)
            grid, launched = expected.launched.pop()
            assert grid == (*programs, 1, 1)[:3] and not expected.launched
            assert addresses(launched) == [*addresses(args), options["C"], options["WHOLE"]]


def test_a_known_kind_is_launched_without_triton_looking(kernel, monkeypatch):
    looked = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args, **more: looked.append(args) or run(*args, **more), raising=False)
    for n in (7, 8, 9):
        args, options = apart(USUAL | dict(n=n, scale=1.0 / n))
        kernel[(n,)](*args, **options)
    assert len(looked) == 1
    (compiled,) = {id(found): found for found, _ in kernel._compiled.values()}.values()
    assert [(grid, args[3]) for grid, args in compiled.launched] == [((n, 1, 1), n) for n in (7, 8, 9)]


def test_constants_of_many_launches_are_one_object(kernel, monkeypatch):
    args, options = apart(USUAL)
    once, other = kernel_triton.Options(options), kernel_triton.Options(options | dict(C=64))
    for n, constants in enumerate((once, once, other, once), 1):
        kernel_triton.launch(kernel, n, args, constants)
    found = {id(compiled): compiled for compiled, _ in kernel._compiled.values()}.values()
    launched = [[(grid[0], given[6]) for grid, given in compiled.launched] for compiled in found]
    assert launched == [[(1, 32), (2, 32), (4, 32)], [(3, 64)]]
    monkeypatch.setattr(kernel_triton, "RUN", None)  # as if a tool watched
    seen = []
    monkeypatch.setattr(kernel, "run", lambda *args, grid, warmup, **given: seen.append((args, given)), raising=False)
    kernel_triton.launch(kernel, 3, args, once)
    assert seen == [(tuple(args), options)]


def test_constants_are_equal_to_no_others():
    once, other = kernel_triton.Options(C=32), kernel_triton.Options(C=32)
    assert once == once and once != other and not once == other and not once != once


def remembered(kernel, given, *more):
    """Launch as a call does that remembers, one whose tensors differ in the dtype of x alone; return the memory."""
    args, options = apart(given)
    stream, known = kernel_triton.remembered(args[:1], *more)
    if "options" not in known:
        known["options"] = kernel_triton.Options(options)
    kernel_triton.launch(kernel, 3, args, known["options"], stream)
    return known


ALIKE = [
    {}, dict(x=torch.ones(64)), dict(n=16), dict(n=1), dict(x=torch.nn.Parameter(X)), dict(n=2**31 - 1), dict(x=X[4:]),
    dict(scale=2.0),
]  # fmt: skip
DIFFERENT = [dict(x=X.half()), dict(x=X[1:]), dict(n=2**31), dict(n=-1)]


@pytest.mark.parametrize("other", [*ALIKE, *DIFFERENT], ids=str)
def test_what_a_call_remembers_is_what_triton_would_launch(kernel, other):
    kernel_triton._memory.cache_clear()
    for given in (USUAL, USUAL, USUAL | other, USUAL):
        known = remembered(kernel, given)
        args, options = apart(given)
        expected = kernel.run(*args, grid=(3,), warmup=True, **options)
        ((grid, launched),) = expected.launched
        expected.launched.clear()
        assert grid == (3, 1, 1) and addresses(launched) == [*addresses(args), options["C"], options["WHOLE"]]
    compiled, _ = known["options"].compiled
    assert compiled is expected


def test_a_call_remembers_without_describing_its_arguments_again(kernel, monkeypatch):
    kernel_triton._memory.cache_clear()
    remembered(kernel, USUAL)
    monkeypatch.setattr(kernel_triton, "_signature", None)
    remembered(kernel, USUAL | dict(n=8))
    part = kernel_triton.Part(torch.zeros(80), 16, 64, torch.float32)
    remembered(kernel, USUAL | dict(y=part))
    compiled, _ = remembered(kernel, USUAL)["options"].compiled
    assert [args[3] for _, args in compiled.launched] == [7, 8, 7, 7]
    assert compiled.launched[2][1][1] == part.view().data_ptr() == part.whole[16:].data_ptr()


def test_calls_of_other_kinds_remember_apart(kernel, monkeypatch):
    kernel_triton._memory.cache_clear()
    memories = [remembered(kernel, USUAL), remembered(kernel, USUAL | dict(x=X.half())), remembered(kernel, USUAL, 1)]
    monkeypatch.setattr(knobs.runtime, "debug", True)
    memories.append(remembered(kernel, USUAL))
    assert len({id(known) for known in memories}) == 4


@pytest.mark.parametrize("watches", ["run", "launch_enter_hook", "launch_exit_hook", "pre_run_hook"])
def test_who_watches_sees_what_a_call_remembers(kernel, watches, monkeypatch):
    kernel_triton._memory.cache_clear()
    remembered(kernel, USUAL)
    seen, compiled = [], kernel._compiled
    if watches == "pre_run_hook":
        kernel.add_pre_run_hook(lambda *args, **options: seen.append(options["C"]))
    elif watches == "run":
        kernel_run = JITFunction.run
        monkeypatch.setattr(
            JITFunction, "run", lambda *args, **more: seen.append(more["C"]) or kernel_run(*args, **more)
        )
    else:
        monkeypatch.setattr(knobs.runtime, watches, lambda *_: None)
        monkeypatch.setattr(kernel, "run", lambda *args, **more: seen.append(more["C"]), raising=False)
    remembered(kernel, USUAL)
    assert seen == [32] and compiled


def test_tensors_of_two_devices_are_left_to_triton(kernel, monkeypatch):
    other = X.clone()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: -1 if x is other else 0)
    for tensors in ([other], [X, other], [other, X]):
        assert kernel_triton.remembered(tensors) == (None, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
def test_a_remembered_call_of_gsa_launches_what_the_first_does(kernel, dtype, packed, states, monkeypatch):
    from tests.ops.gsa.configurations import Launches, chunk

    def run(compiled, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        numbers = [x if x is None or isinstance(x, (float, str)) or x < 2**31 else "address" for x in addresses(args)]
        launched.append((id(compiled), (x, y, z), numbers))

    kernel_triton._memory.cache_clear()
    monkeypatch.setattr(Compiled, "run", run)
    calls = []
    for T in (100, 100, 90):
        launched = []
        Launches(chunk, dtype, 128, 128, T=T, packed=packed, states=states).run(90)
        calls.append(launched)
        monkeypatch.setattr(kernel_triton, "_signature", lambda *_: pytest.fail("described again"))
    first, again, shorter = calls
    assert first == again and len(first) >= 13
    assert [compiled for compiled, _, _ in shorter] == [compiled for compiled, _, _ in first] and shorter != first


def test_who_watches_sees_a_known_launch(kernel):
    args, options = apart(USUAL)
    kernel[(3,)](*args, **options)
    with watched(run=False) as found:
        kernel[(3,)](*args, **options)
    assert [launch.name for launch in found] == ["copy_kernel+WHOLE"]
    seen = []
    kernel.add_pre_run_hook(lambda *args, **options: seen.append(options["C"]))
    kernel[(3,)](*args, **options)
    assert seen == [32]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called_at_a_known_launch(kernel, name, monkeypatch):
    args, options = apart(USUAL)
    kernel[(3,)](*args, **options)
    (compiled,) = (found for found, _ in kernel._compiled.values())
    passed = []
    monkeypatch.setattr(compiled, "run", lambda *args: passed.append(args[6:9]))
    hook = getattr(knobs.runtime, name)
    kernel[(3,)](*args, **options)
    assert passed.pop() == (None, None, None)
    hook.add(print)
    try:
        kernel[(3,)](*args, **options)
    finally:
        hook.remove(print)
    assert hook in passed.pop()
    monkeypatch.setattr(knobs.runtime, name, print)
    kernel[(3,)](*args, **options)
    assert print in passed.pop()


def test_triton_refuses_a_tensor_on_the_cpu(kernel, monkeypatch):
    on_cpu = X.clone()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: -1 if x is on_cpu else 1)
    for other in ({}, dict(x=on_cpu), dict(y=on_cpu)):
        args, options = apart(USUAL | other)
        kernel[(3,)](*args, **options)
    assert [key[0] for key in kernel._compiled] == [1]


def test_triton_asked_to_debug_compiles_anew(kernel, monkeypatch):
    args, options = apart(USUAL)
    kernel[(3,)](*args, **options)
    monkeypatch.setattr(knobs.runtime, "debug", True)
    kernel[(3,)](*args, **options)
    assert len({id(found) for found, _ in kernel._compiled.values()}) == 2


def test_memory_ends(kernel, monkeypatch):
    monkeypatch.setattr(kernel_triton, "MAX_SIGNATURES", 3)
    for C in range(10):
        args, options = apart(USUAL | dict(C=C))
        kernel[(3,)](*args, **options)
        assert len(kernel._compiled) <= 3
