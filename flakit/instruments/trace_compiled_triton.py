"""Compiled kernels: where there is no GPU to run them on, say what to do instead."""

from collections.abc import Iterator
from contextlib import contextmanager

from triton.runtime.jit import JITFunction

from .trace_record import Trace


@contextmanager
def watch_compiled(trace: Trace, instead: str) -> Iterator[None]:
    original = JITFunction.run

    def run(kernel, *args, grid, warmup, **kwargs):
        if warmup:
            return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        raise RuntimeError(f"trace: kernel {kernel.__name__} is compiled in this process: {instead}")

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original
