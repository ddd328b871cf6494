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
from .packed_triton import Packing

_LOCK = threading.Lock()
"""Serializes rehearsals."""


class Kernels:
    """One form of an operator: calls the functions of `module`, which launch kernels, and compiles these ahead.
    `forward`, `backward` and `saved_shapes` take the arguments that `Registered` lists."""

    def __init__(self, module: ModuleType):
        self.module = module
        self.accepts_functions = getattr(module, "ACCEPTS_FUNCTIONS", False)
        """Whether an initial state, or a final state's gradient, may be a function. It receives M and N of
        the map M S + N by which this call changes a state S, N as the list of its parts, and sends them to other ranks;
        it returns a function that waits for theirs and returns the list of the parts of S."""
        self._known: dict[tuple, list[Future]] = {}
        """Compilations for each signature of calls; empty once they are done."""
        if interpreted():  # no compilation
            self.forward, self.backward = map(interpreted_alone(), (self._run_forward, self._run_backward))

    def saved_shapes(self, *args) -> tuple[tuple[int, ...], ...]:
        *tensors, cu_seqlens, chunk_size = args
        return self.module.saved_shapes(*tensors, _packing(tensors, cu_seqlens), chunk_size)

    def forward(self, *args):
        *tensors, _, state, wants_final, cu_seqlens, chunk_size, keep = args
        returned = isinstance(cu_seqlens, Packing) and cu_seqlens.returned
        key = "forward", wants_final, keep, returned, *_signature(tensors, state, cu_seqlens, chunk_size)
        with _on_device_of(tensors[0]):
            if self._known.get(key, True):
                self._prepare(key, self._rehearse_forward, args)
            return self._run_forward(*args)

    def backward(self, *args):
        *tensors, _, state, cu_seqlens, chunk_size, _, _, dfinal_state = args
        key = "backward", dfinal_state is None, *_signature(tensors, state, cu_seqlens, chunk_size)
        with _on_device_of(tensors[0]):
            if self._known.get(key, True):
                self._prepare(key, self._rehearse_backward, args)
            return self._run_backward(*args)

    def packing(self, tensors, cu_seqlens: Tensor) -> Packing:
        """Return what replaces cu_seqlens where an operator returns the saved tensors (`Packing.returned`)."""
        return Packing(cu_seqlens, tensors[0].shape[1], returned=True)

    def _run_forward(self, *args):
        *tensors, scale, state, wants_final, cu_seqlens, chunk_size, keep = args
        packing = _packing(tensors, cu_seqlens)
        o, final, saved = self.module.forward(*tensors, scale, state, wants_final, packing, chunk_size, keep)
        if packing is not None:
            packing.close([o], _parts(final))
            saved = saved and (*saved, packing)
        return o, final, saved

    def _run_backward(self, *args):
        *tensors, scale, state, cu_seqlens, chunk_size, saved, do, dfinal_state = args
        packing = _packing(tensors, cu_seqlens)
        *grads, dstate = self.module.backward(*tensors, scale, state, packing, chunk_size, saved, do, dfinal_state)
        if packing is not None:
            rows = [x for x in grads if x.ndim == do.ndim]  # weights have no time axis
            packing.close(rows, [x for x in grads if x.ndim != do.ndim] + _parts(dstate))
        return *grads, dstate

    def _prepare(self, key: tuple, rehearse: Callable, args: tuple) -> None:
        """Compile the kernels of calls with signature `key`, by rehearse(key, args) unless that ran, and wait."""
        # While launches are monitored, or a stream is captured into a graph, only the call itself should run.
        captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if captured or JITFunction.run is not kernel_triton.RUN:
            return
        with _LOCK:
            if key not in self._known:
                rehearse(key, args)
        wait(self._known[key])
        self._known[key] = []

    def _rehearse_forward(self, key: tuple, args: tuple) -> None:
        *tensors, scale, state, wants_final, cu_seqlens, chunk_size, keep = args
        # Without a layout, which is not launched.
        packing = cu_seqlens.anew() if isinstance(cu_seqlens, Packing) else cu_seqlens
        args = *tensors, scale, _immediate(state), wants_final, packing, chunk_size, keep
        cu_seqlens = _offsets(cu_seqlens)
        with _listed() as forward:
            o, _, saved = self._run_forward(*args)
        if keep and cu_seqlens is not None:
            *saved, _ = saved  # without the packing, whose layout was not launched
        backward: list[_Job] = []
        later = "backward", True, *_signature(tensors, state, cu_seqlens, chunk_size)
        if keep and not wants_final and later not in self._known:
            # The backward may run out of memory where the forward does not.
            try:
                with _listed() as backward:
                    self._run_backward(*tensors, scale, state, cu_seqlens, chunk_size, saved, o, None)
            except torch.OutOfMemoryError:
                backward.clear()
        self._known[key], compiled_later = _begin(forward, backward)
        if backward:
            self._known[later] = compiled_later

    def _rehearse_backward(self, key: tuple, args: tuple) -> None:
        *tensors, scale, state, cu_seqlens, chunk_size, saved, do, dfinal_state = args
        args = *tensors, scale, state, _offsets(cu_seqlens), chunk_size, saved, do, _immediate(dfinal_state)
        with _listed() as backward:
            self._run_backward(*args)
        (self._known[key],) = _begin(backward)


def _immediate(state):
    """Return `state`; in place of a function that exchanges results with ranks, one that returns those for zeros."""
    return (lambda factor, written: lambda: written) if callable(state) else state


def _packing(tensors, cu_seqlens: Tensor | Packing | None) -> Packing | None:
    return Packing(cu_seqlens, tensors[0].shape[1]) if isinstance(cu_seqlens, Tensor) else cu_seqlens


def _offsets(cu_seqlens: Tensor | Packing | None) -> Tensor | None:
    """Return the offsets alone for a rehearsal, in which no layout is launched."""
    return cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Packing) else cu_seqlens


def _parts(state) -> list[Tensor]:
    """Return the parts of a state as a list: a tensor is one part, None has none."""
    return [] if state is None else [state] if isinstance(state, Tensor) else list(state)


def _on_device_of(x: Tensor):
    """Return a context in which x's GPU is the current one: Triton launches on that GPU, wherever the tensors are."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _signature(tensors, state, cu_seqlens, chunk_size: int) -> tuple:
    """Return nearly all that a call's kernels depend on: device, sizes, dtypes; of T only its number of bits."""
    (B, T, *head), device = tensors[0].shape, tensors[0].get_device()
    columns = tensors[2].shape[-1], tensors[3].shape[-1]  # V is one of them, and the slots of GSA
    packed = None if cu_seqlens is None else cu_seqlens.dtype
    return device, B, T.bit_length(), *head, *columns, packed, state is None, chunk_size, *[x.dtype for x in tensors]


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
