"""The kernels of an operator's first call, compiled beside each other.

Triton compiles a kernel when it is first launched, so that those of a call wait for one another, and a backward's for
the forward. Here a call of a new kind is rehearsed: all of it happens but the launches, which are listed, and the
kernels of the list are compiled in as many threads as there are processors. Then the call takes place as if nothing had
been, and finds its kernels. A forward that keeps something for its backward has that one rehearsed too, and does not
wait for it.

Nothing depends on what is compiled ahead: a kernel that was not is compiled when it is launched, and there its errors
are raised.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from types import ModuleType

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from . import kernel_triton
from .dispatch import interpreted, interpreted_alone
from .packed_triton import Packing

_LOCK = threading.Lock()
"""Of rehearsals, one at a time."""


class Kernels:
    """An operator's Triton code, one of its forms, whose kernels are compiled ahead; called as `Registered` says."""

    def __init__(self, module: ModuleType):
        self.module = module
        self._known: dict[tuple, list[Future]] = {}
        """What is compiled for each kind of call; nothing to wait for once it is."""
        if interpreted():  # there is nothing to compile
            self.forward, self.backward = map(interpreted_alone(), (self._keep_packing, self._run_backward))

    def meets(self, *tensors) -> bool:
        """Whether a state at which sequences begin, or a gradient at their ends, may be known later. It is a function
        then, of M and of the list of what the call makes of zeros, that sends these to other ranks; what it returns
        waits for theirs, and gives the list of the state's parts."""
        return hasattr(self.module, "meets") and self.module.meets(*tensors)

    def kept_shapes(self, *given) -> tuple[tuple[int, ...], ...]:
        *tensors, cu_seqlens, chunk_size = given
        return self.module.kept_shapes(*tensors, _packing(tensors, cu_seqlens), chunk_size)

    def forward(self, *given):
        *tensors, _, state, asked_for_state, cu_seqlens, chunk_size, keep = given
        key = "forward", asked_for_state, keep, *_kind(tensors, state, cu_seqlens, chunk_size)
        with _on_device_of(tensors[0]):
            if self._known.get(key, True):
                self._prepare(key, self._rehearse_forward, given)
            return self._keep_packing(*given)

    def backward(self, *given):
        *tensors, _, state, cu_seqlens, chunk_size, _, _, dfinal_state = given
        key = "backward", dfinal_state is None, *_kind(tensors, state, cu_seqlens, chunk_size)
        with _on_device_of(tensors[0]):
            if self._known.get(key, True):
                self._prepare(key, self._rehearse_backward, given)
            return self._run_backward(*given)

    def _keep_packing(self, *given):
        *tensors, scale, state, asked_for_state, cu_seqlens, chunk_size, keep = given
        packing = _packing(tensors, cu_seqlens)
        o, final, kept = self._run_forward(*tensors, scale, state, asked_for_state, packing, chunk_size, keep)
        return o, final, kept if kept is None or packing is None else (*kept, packing)

    def _run_forward(self, *given):
        *tensors, scale, state, asked_for_state, cu_seqlens, chunk_size, keep = given
        packing = _packing(tensors, cu_seqlens)
        o, final, kept = self.module.forward(*tensors, scale, state, asked_for_state, packing, chunk_size, keep)
        if packing is not None:
            packing.close([o], _parts(final))
        return o, final, kept

    def _run_backward(self, *given):
        *tensors, scale, state, cu_seqlens, chunk_size, kept, do, dfinal_state = given
        packing = _packing(tensors, cu_seqlens)
        *grads, dstate = self.module.backward(*tensors, scale, state, packing, chunk_size, kept, do, dfinal_state)
        if packing is not None:
            rows = [x for x in grads if x.ndim == do.ndim]  # weights have no time axis
            packing.close(rows, [x for x in grads if x.ndim != do.ndim] + _parts(dstate))
        return *grads, dstate

    def _prepare(self, key: tuple, rehearse: Callable, given: tuple) -> None:
        """Wait until what this kind of call launches is compiled, as far as that is known."""
        # Where somebody watches launches, or a stream is captured into a graph, nothing but the call should happen.
        if JITFunction.run is not kernel_triton.RUN or _captured():
            return
        with _LOCK:
            if key not in self._known:
                rehearse(key, given)
        wait(self._known[key])
        self._known[key] = []

    def _rehearse_forward(self, key: tuple, given: tuple) -> None:
        *tensors, scale, state, asked_for_state, cu_seqlens, chunk_size, keep = given
        given = *tensors, scale, _at_once(state), asked_for_state, cu_seqlens, chunk_size, keep
        with _listed() as forward:
            o, _, kept = self._run_forward(*given)
        backward: list[Callable] = []
        later = "backward", True, *_kind(tensors, state, cu_seqlens, chunk_size)
        if keep and not asked_for_state and later not in self._known:
            # What has no memory for its backward may yet have enough for itself.
            try:
                with _listed() as backward:
                    self._run_backward(*tensors, scale, state, cu_seqlens, chunk_size, kept, o, None)
            except torch.OutOfMemoryError:
                backward.clear()
        self._known[key], compiled_later = _begin(forward, backward)
        if backward:
            self._known[later] = compiled_later

    def _rehearse_backward(self, key: tuple, given: tuple) -> None:
        *tensors, scale, state, cu_seqlens, chunk_size, kept, do, dfinal_state = given
        if isinstance(cu_seqlens, Packing):  # whose launches do not happen here
            cu_seqlens = cu_seqlens.cu_seqlens
        with _listed() as backward:
            self._run_backward(*tensors, scale, state, cu_seqlens, chunk_size, kept, do, _at_once(dfinal_state))
        (self._known[key],) = _begin(backward)


def _at_once(state):
    """A state, but for one that is known later a function that asks nobody."""
    return (lambda factor, written: lambda: written) if callable(state) else state


def _packing(tensors, cu_seqlens: Tensor | Packing | None) -> Packing | None:
    return Packing(cu_seqlens, tensors[0].shape[1]) if isinstance(cu_seqlens, Tensor) else cu_seqlens


def _parts(state) -> list[Tensor]:
    """The parts of a state: a tensor, several, or None."""
    return [] if state is None else [state] if isinstance(state, Tensor) else list(state)


def _on_device_of(x: Tensor):
    """Triton launches on the current GPU, whichever the tensors are on."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _kind(tensors, state, cu_seqlens, chunk_size: int) -> tuple:
    """What a call's kernels depend on, or nearly so: of the length, into how many parts sequences are cut."""
    B, T, *_ = tensors[0].shape
    length = B, T.bit_length()
    packed = None if cu_seqlens is None else cu_seqlens.dtype
    return tensors[0].device, length, packed, state is None, chunk_size, *[(x.dtype, x.shape[2:]) for x in tensors]


def _captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Address:
    """All that Triton asks of a tensor to compile for it, without its memory."""

    def __init__(self, x: Tensor):
        self.dtype, self._address = x.dtype, x.data_ptr()

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def _listed() -> Iterator[list[Callable]]:
    """A list that fills with what this thread would launch inside: functions that compile it, and launch nothing."""
    found: list[Callable] = []
    here, device = threading.get_ident(), torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(kernel, *args, grid, warmup, **options):
        if threading.get_ident() != here:
            return kernel_triton.RUN(kernel, *args, grid=grid, warmup=warmup, **options)
        # Found here, since two threads that look at the same time for a function's key may find half of it.
        kernel.cache_key  # noqa: B018
        args = [_Address(x) if isinstance(x, Tensor) else x for x in args]

        def compile():
            with nullcontext() if device is None else torch.cuda.device(device):  # which is a thread's own
                kernel_triton.RUN(kernel, *args, grid=grid, warmup=True, **options)

        found.append(compile)

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = kernel_triton.RUN


def _begin(*lists: list[Callable]) -> list[list[Future]]:
    """Begin with all of each list, the first list first."""
    pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="flakit-compile")
    begun = [[pool.submit(compile) for compile in each] for each in lists]
    pool.shutdown(wait=False)
    return begun
