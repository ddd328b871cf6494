"""Parallel compilation of the kernels of an operator's first call.

Triton compiles a kernel at its first launch, so the kernels of a call wait for one another, and those of a backward for
the forward. Here a call of a new signature is rehearsed: everything runs but the launches, which are recorded, and the
recorded kernels are compiled in as many threads as there are processors, the largest first. Then the call itself runs
with compiled kernels. A forward that saves tensors for its backward rehearses the backward too, without waiting for its
kernels.

Correctness does not depend on this: a kernel that was not compiled ahead is compiled at its launch, which also raises
its errors.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from . import kernel_triton
from .dispatch import interpreted, interpreted_alone
from .kernel_triton import Memory
from .launch import TABLE
from .packed_triton import Packing

_LOCK = threading.Lock()
"""Serializes rehearsals."""
MAX_KINDS = 4096
"""Kinds of calls that a form of an operator remembers before it forgets all."""


class Kernels:
    """One form of an operator: calls the functions of `module`, which launch kernels, and compiles these ahead.
    `forward`, `backward` and `saved_shapes` take the arguments that `Registered` lists."""

    def __init__(self, module: ModuleType):
        self.module = module
        self.accepts_functions = getattr(module, "ACCEPTS_FUNCTIONS", False)
        """Whether an initial state, or a final state's gradient, may be a function. It receives M and N of
        the map M S + N by which this call changes a state S, N as the list of its parts, and sends them to other ranks;
        it returns a function that waits for theirs and returns the list of the parts of S."""
        self._known: dict[tuple, _Kind] = {}
        if interpreted():  # no compilation
            self.forward, self.backward = (
                interpreted_alone()(lambda *args, run=run: run(Memory(), *args))
                for run in (self._run_forward, self._run_backward)
            )

    def saved_shapes(self, *args) -> tuple[tuple[int, ...], ...]:
        *tensors, cu_seqlens, chunk_size = args
        return self.module.saved_shapes(*tensors, _packing(tensors, cu_seqlens, Memory()), chunk_size)

    def forward(self, *args):
        *tensors, _, state, wants_final, cu_seqlens, chunk_size, keep = args
        returned = isinstance(cu_seqlens, Packing) and cu_seqlens.returned
        key = _key("forward", tensors, state, None, cu_seqlens, chunk_size, wants_final, keep, returned)
        with _on_device_of(tensors[0]):
            return self._run_forward(self._memory(key, self._rehearse_forward, args), *args)

    def backward(self, *args):
        *tensors, _, state, cu_seqlens, chunk_size, saved, do, dfinal_state = args
        key = _key("backward", (*tensors, do, *saved), state, dfinal_state, cu_seqlens, chunk_size)
        with _on_device_of(tensors[0]):
            return self._run_backward(self._memory(key, self._rehearse_backward, args), *args)

    def packing(self, tensors, cu_seqlens: Tensor) -> Packing:
        """Return what replaces cu_seqlens where an operator returns the saved tensors (`Packing.returned`)."""
        return Packing(cu_seqlens, tensors[0].shape[1], returned=True)

    def _run_forward(self, memory: Memory, *args):
        *tensors, scale, state, wants_final, cu_seqlens, chunk_size, keep = args
        packing = _packing(tensors, cu_seqlens, memory)
        o, final, saved = self.module.forward(memory, *tensors, scale, state, wants_final, packing, chunk_size, keep)
        if packing is not None:
            packing.close([o], _parts(final))
            saved = saved and (*saved, packing)
        return o, final, saved

    def _run_backward(self, memory: Memory, *args):
        *tensors, scale, state, cu_seqlens, chunk_size, saved, do, dfinal_state = args
        packing, more = _packing(tensors, cu_seqlens, memory), (chunk_size, saved, do, dfinal_state)
        *grads, dstate = self.module.backward(memory, *tensors, scale, state, packing, *more)
        if packing is not None:
            rows = [x for x in grads if x.ndim == do.ndim]  # weights have no time axis
            packing.close(rows, [x for x in grads if x.ndim != do.ndim] + _parts(dstate))
        return *grads, dstate

    def _memory(self, key: tuple | None, rehearse: Callable, args: tuple) -> Memory:
        """Return the memory of calls with this key, whose kernels are compiled: by rehearse(key, args), at first."""
        if key is None or kernel_triton.monitored():
            return Memory()
        kind = self._known.get(key)
        if kind is None or kind.compiled:
            # While a stream is captured into a graph, only the call itself should run.
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                return Memory()
            with _LOCK:
                if key not in self._known:
                    if len(self._known) >= MAX_KINDS:
                        self._known.clear()
                    rehearse(key, args)
                kind = self._known[key]
            wait(kind.compiled)
            kind.compiled = []
        return kind.memory

    def _rehearse_forward(self, key: tuple, args: tuple) -> None:
        *tensors, scale, state, wants_final, cu_seqlens, chunk_size, keep = args
        # Without a layout, which is not launched.
        packing = cu_seqlens.anew() if isinstance(cu_seqlens, Packing) else cu_seqlens
        args = *tensors, scale, _immediate(state), wants_final, packing, chunk_size, keep
        cu_seqlens = _offsets(cu_seqlens)
        with _listed() as forward:
            o, _, saved = self._run_forward(Memory(), *args)
        if keep and cu_seqlens is not None:
            *saved, _ = saved  # without the packing, whose layout was not launched
        backward: list[_Job] = []
        call = state, None, cu_seqlens, chunk_size
        later = _key("backward", (*tensors, o, *saved), *call) if keep and not wants_final else None
        if later and later not in self._known:
            # The backward may run out of memory where the forward does not.
            try:
                with _listed() as backward:
                    self._run_backward(Memory(), *tensors, scale, state, cu_seqlens, chunk_size, saved, o, None)
            except torch.OutOfMemoryError:
                backward.clear()
        compiled, compiled_later = _begin(forward, backward)
        self._known[key] = _Kind(key, compiled)
        if backward:
            self._known[later] = _Kind(later, compiled_later)

    def _rehearse_backward(self, key: tuple, args: tuple) -> None:
        *tensors, scale, state, cu_seqlens, chunk_size, saved, do, dfinal_state = args
        args = *tensors, scale, state, _offsets(cu_seqlens), chunk_size, saved, do, _immediate(dfinal_state)
        with _listed() as backward:
            self._run_backward(Memory(), *args)
        (compiled,) = _begin(backward)
        self._known[key] = _Kind(key, compiled)


def _immediate(state):
    """Return `state`; in place of a function that exchanges results with ranks, one that returns those for zeros."""
    return (lambda factor, written: lambda: written) if callable(state) else state


def _packing(tensors, cu_seqlens: Tensor | Packing | None, memory: Memory) -> Packing | None:
    packing = Packing(cu_seqlens, tensors[0].shape[1]) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if packing is not None:
        packing.memory = memory
    return packing


def _offsets(cu_seqlens: Tensor | Packing | None) -> Tensor | None:
    """Return the offsets alone for a rehearsal, in which no layout is launched."""
    return cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Packing) else cu_seqlens


def _parts(state) -> list[Tensor]:
    """Return the parts of a state as a list: a tensor is one part, None and a function have none."""
    return [state] if isinstance(state, Tensor) else list(state) if isinstance(state, (tuple, list)) else []


def _on_device_of(x: Tensor):
    """Return a context in which x's GPU is the current one: Triton launches on that GPU, wherever the tensors are."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class _Kind:
    """What is known of calls of one kind: their memory, and the compilations of their kernels, empty once done."""

    def __init__(self, key: tuple, compiled: list[Future]):
        device, *_ = key
        self.memory, self.compiled = Memory(device if device >= 0 else None), compiled


def _key(form: str, tensors, state, arriving, cu_seqlens, chunk_size: int, *more) -> tuple | None:
    """Return all that a call's kernels depend on, but of T only its number of bits, and of packed sequences not their
    number. tensors: the operator's, then others; arriving: the final state's gradient or None; more: other settings.
    The device comes first; None if the tensors are on several."""
    first, second, third, fourth, *_ = tensors
    (B, T, *head), device, dtypes = first.shape, first.get_device(), []
    for x in (*tensors, *_parts(state), *_parts(arriving), *_parts(_offsets(cu_seqlens))):
        if x is not None and x.get_device() != device:
            return None
        dtypes.append(x if x is None else x.dtype)
    sizes = *head, second.shape[2], third.shape[-1], fourth.shape[-1]  # V, and GSA's heads of k and slots, too
    kinds = type(state), type(arriving), cu_seqlens is None, TABLE.version, *kernel_triton.settings()
    return device, form, B, T.bit_length(), *sizes, chunk_size, *kinds, *more, *dtypes


class _Address:
    """A stand-in for a tensor, with the dtype and address for which Triton compiles, but without its memory."""

    def __init__(self, x: Tensor):
        self.dtype, self._address = x.dtype, x.data_ptr()

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True)
class _Job:
    """A recorded launch, on GPU `device` (None: without CUDA). `run` compiles its kernel and may run in any thread."""

    kernel: JITFunction
    args: list
    options: dict
    device: int | None

    @property
    def size(self) -> tuple[int, int]:
        """How many arguments are no lengths, and how many of them are tensors."""
        return sum(type(x) is not int for x in self.args), sum(type(x) is _Address for x in self.args)

    def run(self) -> None:
        with nullcontext() if self.device is None else torch.cuda.device(self.device):  # it is current in one thread
            kernel_triton.TURN.acquire()
            try:
                compiled = kernel_triton.RUN(self.kernel, *self.args, grid=None, warmup=True, **self.options)
            finally:
                kernel_triton.release_turn()
            if launcher := getattr(compiled.src, "launcher", None):
                launcher.join()  # not to build it twice
            driver.active.launcher_cls(compiled.src, compiled.metadata)


@contextmanager
def _listed() -> Iterator[list[_Job]]:
    """Collect this thread's launches in the `with` block as jobs that compile the kernels, and launch nothing."""
    jobs: list[_Job] = []
    here, device = threading.get_ident(), torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(kernel, *args, grid, warmup, **options):
        if threading.get_ident() != here:
            return kernel_triton.RUN(kernel, *args, grid=grid, warmup=warmup, **options)
        # Computed here, since two threads that compute a function's key at once may see half of it.
        kernel.cache_key  # noqa: B018
        jobs.append(_Job(kernel, [_Address(x) if isinstance(x, Tensor) else x for x in args], options, device))

    JITFunction.run = run
    try:
        yield jobs
    finally:
        JITFunction.run = kernel_triton.RUN


def _begin(*lists: list[_Job]) -> list[list[Future]]:
    """Start all jobs in threads and return lists of futures. First come those that take longest, as a rule: of most
    arguments but for lengths, then of most tensors among these. Others come in the order of launches, but of one kernel
    the last first, since its other form follows its mild one."""
    pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="flakit-compile")
    pool.submit(triton_key)  # it hashes and remembers 400 MB of Triton, while the first job's thread starts the driver
    every = [job for jobs in lists for job in jobs]
    kernels = list({job.kernel: None for job in every})[::-1]
    order = sorted(every, key=lambda job: (job.size, kernels.index(job.kernel)))[::-1]
    futures = {id(job): pool.submit(job.run) for job in order}
    pool.shutdown(wait=False)
    return [[futures[id(job)] for job in jobs] for jobs in lists]
