"""How kernels are launched: what Triton compiled for a kind of arguments is remembered by them.

At each launch Triton works out anew, in Python, for which arguments it is to compile, and that takes longer than all
else the host does to issue a kernel: 7 microseconds for 14 arguments and 15 for 36, where the short look here takes
1 and 3. What is new to this look goes Triton's own way, and so does every launch while somebody watches them.
"""

from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime.jit import JITFunction

from .dispatch import interpreted

RUN = JITFunction.run
"""Another one is in its place while somebody watches launches."""
REMEMBERED = torch.version.hip is None
"""On AMD's GPUs Triton looks at how large a tensor is, too."""
MOST_KINDS = 4096
"""Of arguments that a kernel remembers, before it begins anew."""


class Kernel(JITFunction):
    """A kernel; `kernel[(programs,)](*arguments, **constants_and_options)` launches it."""

    def __init__(self, function, do_not_specialize: tuple[str, ...]):
        super().__init__(function, do_not_specialize=do_not_specialize)
        self._compiled: dict[tuple, tuple] = {}

    def __getitem__(self, grid: tuple[int]):
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *args, **options) -> None:
        kind = None if JITFunction.run is not RUN or self.pre_run_hooks or not REMEMBERED else _kind(args, options)
        if kind is not None and (found := self._compiled.get(kind)) is not None:
            compiled, constants = found
            compiled[grid[0], 1, 1](*args, *constants)
            return
        compiled = self.run(*args, grid=grid, warmup=False, **options)
        constants = self.arg_names[len(args) :]
        if kind is not None and compiled is not None and all(name in options for name in constants):
            if len(self._compiled) >= MOST_KINDS:
                self._compiled.clear()
            self._compiled[kind] = compiled, [options[name] for name in constants]


def _kind(args: tuple, options: dict) -> tuple | None:
    """What Triton compiles for, or finer; None of arguments that it may look at in another way.

    Of tensors these are the dtype and whether the address is a multiple of 16, of whole numbers their width, and
    whether they are 1 or multiples of 16.
    """
    hook = getattr(knobs.runtime, "add_stages_inspection_hook", None)
    device, addresses = -1, 0
    kind = [knobs.runtime.debug, knobs.compilation.instrumentation_mode, hook, *options, *options.values()]
    for x in args:
        of = type(x)
        if of is Tensor or of is Parameter:
            device = x.get_device()
            addresses |= x.data_ptr()
            kind.append(x.dtype)
        elif of is int:
            if not 0 <= x < 2**31:
                return None
            kind.append(16 if x % 16 == 0 else min(x, 2))
        elif x is None or of is float:
            kind.append(of)
        else:
            return None
    return None if addresses % 16 else (device, *kind)


def launched(*do_not_specialize: str):
    """A decorator for what is launched; `do_not_specialize` as of `triton.jit`."""
    if interpreted():
        return triton.jit(do_not_specialize=do_not_specialize)
    return partial(Kernel, do_not_specialize=do_not_specialize)
