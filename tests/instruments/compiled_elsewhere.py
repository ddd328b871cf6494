"""Stand-ins for what compiling makes of a kernel, on a machine without a GPU: launches of `@triton.jit` kernels on CPU
tensors, by Triton's interpreter, which may be given other inputs than the kernel was.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.runtime.jit import JITFunction

from flakit.instruments.digits import Digits
from flakit.instruments.digits_compiled_triton import interpret
from flakit.instruments.digits_shadow import Ledger
from flakit.instruments.digits_torch import Memory
from flakit.instruments.digits_triton import TileDigits, to_tf32
from flakit.instruments.trace_record import Trace
from flakit.instruments.trace_triton import InterpreterWatch, private_names


def as_written(kernel, arguments: dict, grid) -> None:
    """What an exact compiler makes of it, bfloat16's arithmetic among it."""
    digits = Digits()
    watch = InterpreterWatch(Trace(), {}, private_names(), TileDigits(digits, Ledger(digits), Memory()))
    watch.install()
    try:
        interpret(kernel, arguments, grid)
    finally:
        watch.remove()


def in_tf32(*names: str) -> Callable:
    """Of a compiler that rounds arguments to TF32."""

    def run(kernel, arguments: dict, grid) -> None:
        rounded = {name: torch.from_numpy(to_tf32(arguments[name].numpy())) for name in names if name in arguments}
        as_written(kernel, arguments | rounded, grid)

    return run


@contextmanager
def compiled_by(stand_in: Callable) -> Iterator[list[str]]:
    """Launches of kernels are `stand_in`'s, and PyTorch says that there is a GPU. A list of what is launched."""
    launched: list[str] = []

    def run(kernel, *args, grid, warmup, **kwargs):
        if warmup:
            return
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*args, **{name: x for name, x in kwargs.items() if name in signature.parameters})
        bound.apply_defaults()
        launched.append(kernel.__name__)
        stand_in(kernel, dict(bound.arguments), grid(bound.arguments) if callable(grid) else grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        yield launched
