"""Processes of the start method "spawn" that start at once: forks of one server that has imported PyTorch and flakit.

Importing them takes three seconds of a core, in each of a hundred processes: ranks, workers of a sweep, the pair of an
audit. The server runs nothing and has no threads; what it forks unpickles its work, and imports the rest, as a spawned
process does. Processes that a test starts by a command are not reached.
"""

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess

IMPORTED = ["torch._dynamo", "flakit.instruments.audit"]


class _Process(ForkServerProcess):
    """A fork of the server, with the environment of its parent as it is now."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def spawn_by_forking() -> None:
    """Replace "spawn" in this process, on Linux: what macOS imports does not survive a fork, and Windows has none."""
    if sys.platform == "linux":
        context = _Context()
        context.set_forkserver_preload(IMPORTED)
        multiprocessing.context._concrete_contexts["spawn"] = context
