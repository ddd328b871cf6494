"""Launches kernels with a cache of compiled code by signature of arguments.

At each launch Triton computes the specialization of the arguments in Python, which takes longer than all other host
work of a launch: 7 microseconds for 14 arguments and 15 for 36, where the signature here takes 1 and 3. New signatures
take Triton's own path, and so do all launches while Triton's launch hooks are set or `JITFunction.run` is replaced.

A call of many launches describes its arguments once (`remembered`). Of its launches only addresses are then looked at.
"""

import gc
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .dispatch import interpreted

RUN = JITFunction.run
"""Triton's own launch function; a tool that monitors launches replaces it in `JITFunction`."""
CACHED = torch.version.hip is None
"""Whether to cache: on AMD's GPUs Triton also specializes on a tensor's size."""
MAX_SIGNATURES = 4096
"""Signatures in a kernel's cache before it is cleared."""

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


class Options(dict):
    """Constants and options of launches by name, which do not change. A launch's signature has this object for all its
    names and values: to collect, to hash and to compare twenty of each takes a third of a launch's time."""

    __hash__, __eq__, __ne__ = object.__hash__, object.__eq__, object.__ne__
    compiled: tuple | None = None
    """The kernel that `launch` found for them in a remembered call, and the values of its constants."""


class Part(NamedTuple):
    """An argument of `launch`: `size` elements of a contiguous tensor from element `first` on, as another dtype. The
    view, which takes longer than all other work on an argument, is made only where its address does not suffice."""

    whole: Tensor
    first: int
    size: int
    dtype: torch.dtype

    def view(self) -> Tensor:
        return self.whole[self.first : self.first + self.size].view(self.dtype)


class Kernel(JITFunction):
    """A Triton kernel, launched by `kernel[grid](*arguments, **constants_and_options)`, or by `launch`. grid: programs
    along 1 to 3 axes. SOURCE: the class of Triton that holds the function's source and translates it."""

    SOURCE: type[ASTSource] = _Source

    def __init__(self, function, do_not_specialize: tuple[str, ...]):
        super().__init__(function, do_not_specialize=do_not_specialize)
        self._compiled: dict[tuple, tuple] = {}

    def create_binder(self):
        binder = super().create_binder()
        self.ASTSource = self.SOURCE
        return binder

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self.launch(grid, args, options)

    def launch(self, grid: tuple[int, ...], args: Sequence, options: dict) -> tuple | None:
        """Launch the kernel; return what Triton compiled and the values of the constants, if that is remembered."""
        monitored = _monitored() or self.pre_run_hooks
        signature, values = (None, None) if monitored or not CACHED else _signature(args, options)
        if (entry := self._compiled.get(signature)) is not None:
            _run(entry, (*grid, 1, 1)[:3], driver.active.get_current_stream(signature[0]), values)
            return entry
        compiled = self.run(*args, grid=grid, warmup=False, **options)
        constants = self.arg_names[len(args) :]
        if signature is not None and compiled is not None and all(name in options for name in constants):
            if len(self._compiled) >= MAX_SIGNATURES:
                self._compiled.clear()
            entry = self._compiled[signature] = compiled, [options[name] for name in constants]
        return entry


def launch(kernel, programs: int, args: Sequence, options: Options, stream: int | None = None) -> None:
    """Launch a `Kernel` or an interpreted one: as kernel[(programs,)](*args, **options), in less time.

    stream: from `remembered`, whose memory has the options. All launches with them then have the same kernel and
    arguments of the same types and dtypes, on one GPU, and Triton specializes it on none of the whole numbers."""
    if stream is not None and options.compiled is not None and not kernel.pre_run_hooks:
        values = _addressed(args)
        if values is not None:
            _run(options.compiled, (programs, 1, 1), stream, values)
            return
    args = [x.view() if type(x) is Part else x for x in args]
    if not isinstance(kernel, Kernel):
        kernel[(programs,)](*args, **options)
    elif (entry := kernel.launch((programs,), args, options)) and stream is not None:
        options.compiled = entry


def remembered(tensors: Sequence[Tensor], *more) -> tuple[int | None, dict]:
    """Return the current stream of the tensors' GPU, for `launch`, and the memory that calls with tensors of the same
    dtypes, and with equal `more`, share: a dict. Where launches must take Triton's path: None and an empty dict."""
    device, dtypes = tensors[0].get_device(), []
    for x in tensors:
        if x.get_device() != device:
            return None, {}
        dtypes.append(x.dtype)
    if device < 0 or not CACHED or _monitored():
        return None, {}
    return driver.active.get_current_stream(device), _memory(device, *_settings(), *more, *dtypes)


@lru_cache(MAX_SIGNATURES)
def _memory(*key) -> dict:
    return {}


def _monitored() -> bool:
    """Whether Triton's launch hooks are set, each a chain, a function or None, or `JITFunction.run` is replaced."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return JITFunction.run is not RUN or bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _settings() -> tuple:
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode, knobs.runtime.add_stages_inspection_hook


def _run(entry: tuple, grid: tuple[int, int, int], stream: int, values: list) -> None:
    compiled, constants = entry
    compiled.run(
        *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants
    )  # without hooks


def _addressed(args: Sequence) -> list | None:
    """Return arguments with addresses in place of tensors, or None if one is no multiple of 16, or if a number may not
    be a whole one of 32 bits."""
    addresses, numbers, values = 0, 0, []
    for x in args:
        of = type(x)
        if of is Tensor or of is Parameter:
            x = x.data_ptr()
            addresses |= x
        elif of is Part:
            x = x.whole.data_ptr() + x.first * x.whole.itemsize
            addresses |= x
        elif of is int:
            numbers |= x
        values.append(x)
    return None if addresses % 16 or not 0 <= numbers < 2**31 else values


def _signature(args: Sequence, options: dict) -> tuple[tuple | None, list]:
    """Return a cache key and the launch's arguments, with addresses in place of tensors.

    The key is at least as fine as Triton's specialization, or None where Triton may use other properties. It begins
    with the device of the tensors and has their dtypes; none may be on the CPU (device -1), and their addresses must be
    multiples of 16. Of integers below 2^31 it has whether they are 1 or multiples of 16.
    """
    device, addresses, values = 0, 0, []
    names = [options] if type(options) is Options else [*options, *options.values()]
    signature = [*_settings(), *names]
    for x in args:
        of = type(x)
        if of is Tensor or of is Parameter:
            device |= x.get_device()
            signature.append(x.dtype)
            x = x.data_ptr()
            addresses |= x
        elif of is int:
            if not 0 <= x < 2**31:
                return None, values
            signature.append(16 if x % 16 == 0 else min(x, 2))
        elif x is None or of is float:
            signature.append(of)
        else:
            return None, values
        values.append(x)
    return None if addresses % 16 or device < 0 else (device, *signature), values


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
    return CACHED and triton_version >= (3, 6) and torch.cuda.get_device_capability(device)[0] == 9


def launched(*do_not_specialize: str):
    """Return the decorator that makes a `Kernel` (interpreted: `triton.jit`), not specialized on these arguments."""
    if interpreted():
        return triton.jit(do_not_specialize=do_not_specialize)
    return partial(Kernel, do_not_specialize=do_not_specialize)
