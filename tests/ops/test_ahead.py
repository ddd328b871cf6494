"""Kernels of a first call are compiled beside each other, and nothing else changes. On a GPU: `flakit bench`."""

import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flakit.bench.launches import watched
from flakit.numerics.operators import OPERATORS
from flakit.ops.common import ahead_triton, kernel_triton
from flakit.ops.common.ahead_triton import Kernels
from flakit.ops.common.kernel_triton import Memory, launched
from flakit.ops.common.stream_triton import scan_kernel
from tests.ops.compiling import absent_gpu

CALLS = {
    f"{op}-{form}": module.Launches(getattr(module, form), torch.float32, 16, 16)
    for op, module in ((op, import_module(f"tests.ops.{op}.configurations")) for op in OPERATORS)
    for form in ("chunk", "recurrent")
}
CALL = CALLS["rwkv6-chunk"]
EVERY = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


class Run:
    """In place of what Triton does: `compiled` and `launched` are the kernels' names and switches, in any order, and
    `launchers` the names of kernels whose launcher was prepared."""

    def __init__(self, monkeypatch):
        self.compiled, self.launchers, self.launched, self.fails = [], [], [], ""

        def run(kernel, *args, grid, warmup, **options):
            name = kernel.fn.__name__
            if name == self.fails:
                raise ValueError(f"{name} cannot be compiled")
            pointers = [hasattr(x, "data_ptr") and (x.dtype, x.data_ptr() % 16) for x in args]
            (self.compiled if warmup else self.launched).append((name, *sorted(map(str, options.items())), *pointers))
            return SimpleNamespace(src=name, metadata=None) if warmup else None

        launcher = SimpleNamespace(launcher_cls=lambda src, metadata: self.launchers.append(src))
        monkeypatch.setattr(driver, "_active", launcher)
        monkeypatch.setattr(kernel_triton, "RUN", run)
        monkeypatch.setattr(JITFunction, "run", run)


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def forward(kernels, call, keep=True):
    tensors, _, do = call.zeros()
    return tensors, do, kernels.forward(*tensors, 0.5, None, False, None, 0, keep)[2]


def backward(kernels, tensors, do, kept):
    kernels.backward(*tensors, 0.5, None, None, 0, kept, do, None)


@EVERY
def test_all_of_a_first_call_is_compiled_before_it_is_launched(call, run):
    kernels = Kernels(call.module)
    forward(kernels, call, keep=False)
    assert run.launched and sorted(run.compiled) == sorted(run.launched)
    assert sorted(run.launchers) == sorted(name for name, *_ in run.launched)
    forward(kernels, call, keep=False)
    assert len(run.launched) == 2 * len(run.compiled)


@EVERY
def test_a_forward_has_its_backward_compiled_too(call, run):
    kernels = Kernels(call.module)
    given = forward(kernels, call)
    backward(kernels, *given)
    assert sorted(run.compiled) == sorted(run.launched)
    backward(kernels, *forward(kernels, call))
    assert len(run.launched) == 2 * len(run.compiled)


@pytest.mark.parametrize("call", [CALLS["rwkv6-chunk"], CALLS["gsa-chunk"]], ids=["rwkv6", "gsa"])
def test_what_an_operator_returns_is_completed_by_a_kernel_compiled_before(call, run):
    """Of packed sequences; a call that autograd alone keeps completes fewer tensors, by another kernel."""
    kernels, call = Kernels(call.module), replace(call, packed=True)
    tensors, _, _ = call.zeros()
    for packing in (call.cu_seqlens, kernels.packing(tensors, call.cu_seqlens)):
        run.compiled.clear(), run.launched.clear()
        kernels.forward(*tensors, 0.5, None, False, packing, 0, True)
        assert run.launched and set(run.launched) <= set(run.compiled)


def test_large_kernels_are_compiled_first(run, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    call = CALLS["rwkv6-recurrent"]
    kernels = Kernels(call.module)
    backward(kernels, *forward(kernels, call))
    assert [name for name, *_ in run.launched] == ["recurrent_kernel", "recurrent_grads_kernel"]
    assert [name for name, *_ in run.compiled] == ["recurrent_grads_kernel", "recurrent_kernel"]


def test_one_kernel_at_a_time_is_translated_and_several_are_compiled(monkeypatch):
    def copy_kernel(x, y, C: tl.constexpr):
        tl.store(y, tl.load(x) + C)

    kernel, x = launched()(copy_kernel), torch.zeros(64)
    translating, both = threading.Lock(), threading.Barrier(2, timeout=60)
    translate = ASTSource.make_ir

    def make_ir(*args):
        assert translating.acquire(blocking=False), "two kernels are translated at once"
        time.sleep(0.1)
        translating.release()
        return translate(*args)

    def compile(module, *args):
        both.wait()  # until the other thread compiles too
        raise ValueError("not compiled here")

    monkeypatch.setattr(ASTSource, "make_ir", make_ir)
    monkeypatch.setattr(CUDABackend, "make_ttir", staticmethod(compile))
    jobs = [ahead_triton._Job(kernel, [x, x], {"C": C}, None) for C in (1, 2)]
    with absent_gpu(90, "translated"):
        (futures,) = ahead_triton._begin(jobs)
        for future in futures:
            with pytest.raises(ValueError, match="not compiled here"):
                future.result(timeout=60)


@pytest.mark.parametrize("changed", [None, "disabled", "threshold"])
def test_no_cycles_are_collected_during_a_translation(changed, monkeypatch):
    """Nor is undone what another thread does to the collector in between."""

    def copy_kernel(x, y):
        tl.store(y, tl.load(x))

    def make_ir(*args):
        before = gc.get_stats()[0]["collections"]
        kept = [[] for _ in range(10_000)]
        collected.append(gc.get_stats()[0]["collections"] - before)
        del kept
        if changed == "disabled":
            gc.disable()
        elif changed == "threshold":
            gc.set_threshold(123, 4, 5)
        raise ValueError("not translated here")

    kernel, x, collected, thresholds = launched()(copy_kernel), torch.zeros(64), [], gc.get_threshold()
    monkeypatch.setattr(ASTSource, "make_ir", make_ir)
    try:
        with absent_gpu(90, "uncollected"), pytest.raises(ValueError, match="not translated here"):
            ahead_triton._Job(kernel, [x, x], {}, None).run()
        assert collected == [0]
        assert gc.get_threshold() == ((123, 4, 5) if changed == "threshold" else thresholds)
        assert gc.isenabled() == (changed != "disabled")
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_kernels_of_most_arguments_are_compiled_first_and_of_one_kernel_the_last(run, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(ahead_triton, "triton_key", lambda: None)
    tensor = ahead_triton._Address(torch.zeros(1))
    # Kernels, how many tensors they have, how many could be none, and how many lengths.
    launches = (
        ("a", 2, 2, 0),
        ("b", 4, 4, 0),
        ("c", 2, 2, 9),
        ("a", 2, 2, 0),
        ("c", 2, 2, 9),
        ("d", 1, 3, 0),
        ("e", 2, 3, 0),
    )
    jobs = [
        ahead_triton._Job(kernel, [n, *[tensor] * there, *[None] * (all - there), *[1] * lengths], {}, None)
        for n, (kernel, there, all, lengths) in enumerate(launches)
    ]
    order = []
    monkeypatch.setattr(ahead_triton._Job, "run", lambda job: order.append(job.args[0]))
    for futures in ahead_triton._begin(jobs[:3], jobs[3:]):
        ahead_triton.wait(futures)
    assert order == [1, 6, 5, 3, 0, 4, 2]


def test_a_launcher_is_built_while_its_kernel_is_compiled(monkeypatch):
    def copy_kernel(x, y):
        tl.store(y, tl.load(x))

    def compile(module, *args):
        assert built.wait(60)
        raise ValueError("not compiled here")

    kernel, x, built = launched()(copy_kernel), torch.zeros(64), threading.Event()
    monkeypatch.setattr(CUDABackend, "make_ttir", staticmethod(compile))
    with absent_gpu(90, "launcher"):
        monkeypatch.setattr(driver.active, "launcher_cls", lambda src, metadata: built.set(), raising=False)
        with pytest.raises(ValueError, match="not compiled here"):
            ahead_triton._Job(kernel, [x, x], {}, None).run()


def test_a_backward_that_nobody_announced_is_compiled_when_it_is_called(run):
    given = forward(Kernels(CALL.module), CALL, keep=False)
    run.compiled.clear(), run.launched.clear()
    backward(Kernels(CALL.module), *given)
    assert run.launched and sorted(run.compiled) == sorted(run.launched)


def test_what_cannot_be_compiled_says_so_when_it_is_launched(run):
    kernels, run.fails = Kernels(CALL.module), "key_grads_kernel"
    given = forward(kernels, CALL)
    for _ in range(2):
        with pytest.raises(ValueError, match="key_grads_kernel cannot be compiled"):
            backward(kernels, *given)


def test_launches_of_another_thread_take_place(run):
    kernels, module = Kernels(CALL.module), CALL.module
    tensors, _, _ = CALL.zeros()
    given = *tensors, 0.5, None, False, None, 0, False
    alone = Memory(), *given
    with ahead_triton._listed() as mine:
        thread = threading.Thread(target=module.forward, args=alone)
        thread.start(), thread.join()
        assert run.launched and not mine
        module.forward(*alone)
    assert len(mine) == len(run.launched)
    run.launched.clear()
    threads = [threading.Thread(target=kernels.forward, args=given) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run.compiled) == len(mine) and len(run.launched) == 4 * len(mine)


def test_who_watches_launches_sees_those_of_the_call_alone(run, monkeypatch):
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: seen.append(options["warmup"]))
    forward(Kernels(CALL.module), CALL)
    assert seen and not any(seen) and not run.compiled


def test_lengths_are_of_one_kind_where_their_code_is(run):
    kernels = Kernels(CALL.module)
    for T, kinds in ((100, 1), (101, 1), (96, 1), (127, 1), (1000, 2)):
        tensors = [x[:, :1].expand(-1, T, *x.shape[2:]).contiguous() for x in CALL.zeros()[0][:4]]
        kernels.forward(*tensors, CALL.zeros()[0][4], 0.5, None, False, None, 0, False)
        assert len(kernels._known) == kinds


def test_a_backward_takes_the_pieces_that_its_forward_found():
    kernels, call = Kernels(CALL.module), replace(CALL, packed=True)
    tensors, _, do = call.zeros()
    with watched(run=False) as found:
        *kept, packing = kernels.forward(*tensors, 0.5, None, False, call.cu_seqlens, 0, True)[2]
        forward = [launch.name for launch in found]
        kernels.backward(*tensors, 0.5, None, packing, 0, kept, do, None)
        backward = [launch.name for launch in found[len(forward) :]]
        kernels.backward(*tensors, 0.5, None, call.cu_seqlens, 0, kept, do, None)
        alone = [launch.name for launch in found[len(forward) + len(backward) :]]
    gone, gc_was_on = weakref.ref(packing), gc.isenabled()
    gc.disable()
    del packing
    assert gone() is None  # its memory is free at once, without the collector of cycles
    if gc_was_on:
        gc.enable()
    assert forward[0] == "layout_kernel" and forward.count("layout_kernel") == 1
    assert alone == ["layout_kernel", *backward] and "layout_kernel" not in backward


def test_a_thread_compiles_for_the_gpu_of_the_calls_tensors(monkeypatch, run):
    """In a new thread the first GPU is the current one, whichever it is where the call is made."""
    current, found = threading.local(), []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.index = self.index

        def __exit__(self, *error):
            del current.index

    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_initialized", lambda: True)
        there.setattr(torch.cuda, "current_device", lambda: 1)
        with ahead_triton._listed() as jobs:
            JITFunction.run(scan_kernel, torch.zeros(1), grid=None, warmup=False)

    def noting(*args, **options):
        found.append((threading.get_ident(), getattr(current, "index", None)))
        return SimpleNamespace(src=None, metadata=None)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(kernel_triton, "RUN", noting)
    ((future,),) = ahead_triton._begin(jobs)
    future.result(timeout=60)
    ((thread, index),) = found
    assert thread != threading.get_ident() and index == 1
