"""Launches kernels from memory: what Triton compiled for a kind of call is remembered for the next call of that kind.

At each launch Triton computes the specialization of the arguments in Python, which takes longer than all other host
work of a launch. Here a call describes its arguments once (`ahead_triton`), and gets the `Memory` of calls of its kind.
Of its launches only addresses and sizes are then looked at.
"""

import gc
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .dispatch import interpreted

RUN = JITFunction.run
"""Triton's own launch function; a tool that monitors launches replaces it in `JITFunction`."""
REMEMBERS = torch.version.hip is None
"""Whether launches are remembered: on AMD's GPUs Triton also specializes on a tensor's size."""

RESTS = 2_000_000_011
"""A threshold that the collector of cycles does not reach, and that nobody else sets."""

TURN = threading.RLock()
"""A lock that a thread holds while Triton translates a kernel in Python; `release_turn` releases it for LLVM's work.

Threads that compile at once would share Python's global lock here, and each would finish only when all do. One at a
time, the first kernel is with LLVM while the others wait. (Translation also sets warning filters, which threads share.)
"""


def release_turn() -> None:
    """Release `TURN`, the lock on translating kernels in Python, if this thread holds it."""
    with suppress(RuntimeError):
        TURN.release()


class Translated:
    """Mixin for Triton's kernel sources. Once a kernel is translated to Triton's IR, it releases `TURN` and starts the
    thread `launcher`, which builds the C function that launches the kernel while LLVM compiles the kernel.

    Meanwhile Python's collector of cycles rests: a translation makes many objects, which set it off a hundred times,
    for a tenth of the time, and hardly any of them are in cycles. A threshold stops it, since other threads may enable
    and disable it in between, and set thresholds of their own.
    """

    launcher: threading.Thread | None = None

    def make_ir(self, *args):
        thresholds = gc.get_threshold()
        gc.set_threshold(RESTS, *thresholds[1:])
        try:
            module = super().make_ir(*args)
        finally:
            if gc.get_threshold()[0] == RESTS:
                gc.set_threshold(*thresholds)
        release_turn()
        self.launcher = threading.Thread(target=self._build_launcher)
        self.launcher.start()
        return module

    def _build_launcher(self) -> None:
        """Put the kernel's launcher into Triton's cache: a C function, for which gcc takes a quarter of a second. Then
        Triton's constructor fails, since the kernel has no metadata yet. The launch raises errors that matter."""
        with suppress(Exception):
            driver.active.launcher_cls(self, None)


class _Source(Translated, ASTSource):
    """The source of a Triton kernel as Triton compiles it; a thread releases `TURN` once it is translated."""


class Part:
    """An argument of `Memory.launch`: `size` elements of a contiguous tensor from element `first` on, as another dtype.
    The view, which takes longer than all other work on an argument, is made only where its address does not suffice."""

    __slots__ = "whole", "first", "size", "dtype", "data_ptr"

    def __init__(self, whole: Tensor, first: int, size: int, dtype: torch.dtype):
        self.whole, self.first, self.size, self.dtype = whole, first, size, dtype
        # A method of an int, which returns it: called at each launch, a method in Python takes three times as long.
        self.data_ptr = (whole.data_ptr() + first * whole.itemsize).__int__

    def view(self) -> Tensor:
        return self.whole[self.first : self.first + self.size].view(self.dtype)


def parts(whole: Tensor, sizes: Iterable[int]) -> list[Part]:
    """Return consecutive parts of a tensor, of so many elements each."""
    found, first = [], 0
    for size in sizes:
        found.append(Part(whole, first, size, whole.dtype))
        first += size
    return found


class Kernel(JITFunction):
    """A Triton kernel. SOURCE: the class of Triton that holds the function's source and translates it."""

    SOURCE: type[ASTSource] = _Source

    def create_binder(self):
        binder = super().create_binder()
        self.ASTSource = self.SOURCE
        return binder


class Memory(dict):
    """What calls of one kind remember: launches by kernel and switches, and whatever they compute `once`.

    All calls with a memory have arguments of the same dtypes, heads of the same sizes, and the same options. device:
    the GPU of all their tensors; None: nothing is remembered, and launches take Triton's own path."""

    def __init__(self, device: int | None = None):
        super().__init__()
        self.device = device if REMEMBERS else None

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what make() returned at the first time that this key was asked for. Without a device keys may be
        symbolic numbers, which have no hash."""
        if self.device is None:
            return make()
        found = self.get(key)
        if found is None:
            found = self[key] = make()
        return found

    def launch(self, kernel, programs, args: Sequence, constants: Callable[[], dict], *kind, **flags) -> None:
        """Launch a `Kernel` or an interpreted one: as kernel[programs](*args, **constants(), **flags), in less time.

        programs: their number, or numbers along two axes. constants: a function that returns constants and options by
        name, the same ones for calls of one kind. flags: constants in which launches differ, on which the types of the
        arguments may depend; a tensor or None says whether it is there. kind: what else these types depend on. Triton
        must specialize the kernel on no whole number."""
        key = kernel.fn, *kind, *[getattr(x, "dtype", x) for x in flags.values()]
        known, (x, y) = self.get(key), (programs, 1) if type(programs) is int else programs
        if known is not None and not kernel.pre_run_hooks:
            pointers, numbers, run, function, metadata, rest = known
            if (values := _addressed(args, pointers, numbers)) is not None:
                stream = driver.active.get_current_stream(self.device)
                run(x, y, 1, stream, function, metadata, None, None, None, *values, *rest)  # without hooks
                return
        flags = {n: x is not None if x is None or isinstance(x, Tensor) else x for n, x in flags.items()}
        options = constants() | flags
        compiled = kernel[x, y](*[x.view() if type(x) is Part else x for x in args], **options)
        if self.device is None or compiled is None:
            return
        pointers = [n for n, x in enumerate(args) if isinstance(x, (Tensor, Part))]
        numbers = [n for n, x in enumerate(args) if isinstance(x, int)]
        if _addressed(args, pointers, numbers) is not None:
            rest = [options[name] for name in kernel.arg_names[len(args) :]]
            self[key] = pointers, numbers, compiled.run, compiled.function, compiled.packed_metadata, rest


def monitored() -> bool:
    """Whether Triton's launch hooks are set, each a chain, a function or None, or `JITFunction.run` is replaced."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return JITFunction.run is not RUN or bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def settings() -> tuple:
    """Return Triton's settings that change what it compiles."""
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode, knobs.runtime.add_stages_inspection_hook


def _addressed(args: Sequence, pointers: list[int], numbers: list[int]) -> list | None:
    """Return arguments with addresses in place of tensors, or None if one of these is no multiple of 16, or if a number
    is no whole one of 31 bits. pointers, numbers: the places of tensors and of whole numbers."""
    values, addresses, bits = [*args], 0, 0
    for n in pointers:
        values[n] = address = values[n].data_ptr()
        addresses |= address
    for n in numbers:
        bits |= values[n]
    return None if addresses % 16 or not 0 <= bits < 2**31 else values


def runs_gluon(*tensors: Tensor) -> bool:
    """Whether kernels in Gluon, Triton's language of explicit layouts, can be launched on these tensors.

    They are written for Hopper GPUs and for addresses that are multiples of 16. A tool that rewrites kernels does not
    know Gluon; while one is active, `JITFunction.run` has the attribute `rewrites`, and the result is False.
    """
    x = tensors[0]
    return (
        x.is_cuda
        and not interpreted()
        and _has_gluon(x.get_device())
        and not any(x.data_ptr() % 16 for x in tensors)
        and not getattr(JITFunction.run, "rewrites", False)
    )


@cache
def _has_gluon(device: int) -> bool:
    triton_version = tuple(map(int, triton.__version__.split(".")[:2]))
    return REMEMBERS and triton_version >= (3, 6) and torch.cuda.get_device_capability(device)[0] == 9


def launched(*do_not_specialize: str):
    """Return the decorator that makes a `Kernel` (interpreted: `triton.jit`), not specialized on these arguments."""
    if interpreted():
        return triton.jit(do_not_specialize=do_not_specialize)
    return partial(Kernel, do_not_specialize=do_not_specialize)
