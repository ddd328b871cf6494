"""What an operator launches: each kernel with its arguments, and the row of the launch table that it was given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triton.runtime.jit import JITFunction

from ..ops.common import packed_triton
from ..ops.common.launch import Table


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel with its arguments."""

    kernel: JITFunction
    args: tuple
    options: dict
    row: tuple[str, str] | None
    """The key of its row in the launch table; None of the kernels for packed sequences, which have none."""

    @property
    def name(self) -> str:
        """The kernel's name and the switches it was launched with."""
        switches = [name for name, value in self.options.items() if value is True or (name == "MILD" and value)]
        return "+".join([self.kernel.fn.__name__, *switches])


@contextmanager
def watched(*, run: bool = True) -> Iterator[list[Launch]]:
    """A list that fills with what is launched inside, in any thread. run: False launches nothing."""
    found: list[Launch] = []
    looked_up: list[tuple[str, str]] = []
    launch, look_up = JITFunction.run, Table.__getitem__

    def watching_run(kernel, *args, grid, warmup, **options):
        found.append(Launch(kernel, args, options, _row(kernel, looked_up)))
        if run:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)

    def watching_look_up(table, key):
        looked_up.append(key)
        return look_up(table, key)

    JITFunction.run, Table.__getitem__ = watching_run, watching_look_up
    try:
        yield found
    finally:
        JITFunction.run, Table.__getitem__ = launch, look_up


def _row(kernel: JITFunction, looked_up: list[tuple[str, str]]) -> tuple[str, str] | None:
    """A row is looked up before its kernel is launched. Between two launches of a stream there may be a scan."""
    if kernel.fn.__module__ == packed_triton.__name__:
        return None
    scans = kernel.fn.__name__ == "scan_kernel"
    return next((key for key in reversed(looked_up) if (key[0] == "scan") == scans), None)
