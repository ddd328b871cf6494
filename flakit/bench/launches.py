"""Record the kernels that an operator launches, with their arguments and their rows of the launch table."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from triton.runtime.jit import JITFunction

from ..ops.common import packed_triton
from ..ops.common.launch import Table


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel: its positional arguments, and its options by name."""

    kernel: JITFunction
    args: tuple
    options: dict
    row: tuple[str, str] | None
    """The key of its row in the launch table; None for the kernels of packed sequences, which have no row."""

    @property
    def name(self) -> str:
        """The kernel's name with the boolean options that were True."""
        switches = [name for name, value in self.options.items() if value is True or (name == "MILD" and value)]
        return "+".join([self.kernel.fn.__name__, *switches])


@contextmanager
def watched(*, run: bool = True) -> Iterator[list[Launch]]:
    """Yield a list to which every launch inside the block is added, in any thread. run: False skips the launches
    themselves."""
    launches: list[Launch] = []
    looked_up: list[tuple[str, str]] = []
    launch, look_up = JITFunction.run, Table.__getitem__

    def recording_run(kernel, *args, grid, warmup, **options):
        launches.append(Launch(kernel, args, options, _row(kernel, looked_up)))
        if run:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)

    def recording_look_up(table, key):
        looked_up.append(key)
        return look_up(table, key)

    with patch.object(JITFunction, "run", recording_run), patch.object(Table, "__getitem__", recording_look_up):
        yield launches


def _row(kernel: JITFunction, looked_up: list[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the launch table's key for a kernel about to be launched; None for a kernel without a row. looked_up: all
    keys looked up so far. A scan takes the latest scan key, any other kernel the latest other key, since a scan may
    run between two launches of a stream."""
    if kernel.fn.__module__ == packed_triton.__name__:
        return None
    scans = kernel.fn.__name__ == "scan_kernel"
    return next((key for key in reversed(looked_up) if (key[0] == "scan") == scans), None)
