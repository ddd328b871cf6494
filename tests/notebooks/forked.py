"""Kernels that start at once: forks of one process that has imported what every lesson imports of others.

Importing torch and matplotlib takes a kernel some four seconds of a core, a third of what a lesson takes. Of flakit
nothing is imported before: a lesson that uses what it has not imported fails here as in a kernel of its own. Triton's
interpreter, where kernels are interpreted, is made to hurry, which changes no bit.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

ROOT = Path(__file__).parents[2]
_FORKING = """
import gc, importlib.util, json, os, signal, sys
import hypothesis, ipykernel.kernelapp, ipywidgets, matplotlib.backends.backend_agg, matplotlib.figure, torch._dynamo
from tests.roomy import roomy

if os.environ.get("TRITON_INTERPRET") and importlib.util.find_spec("triton"):
    from tests.interpreter import hurry
    hurry()

def become_kernel(argv, cwd, env):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [*argv, f"--IPKernelApp.parent_handle={os.getppid()}"]  # whose end it does not survive
    roomy(ipykernel.kernelapp.launch_new_instance)()

gc.collect()
gc.freeze()  # a kernel's collections need not look through all that was imported: a tenth of a lesson's time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a kernel that has ended
for asked in iter(sys.stdin.readline, ""):
    if (pid := os.fork()) == 0:
        sys.exit(become_kernel(**json.loads(asked)))
    print(pid, flush=True)
"""


class _Fork:
    """What jupyter_client asks of a process that it has started."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        try:
            self.send_signal(0)
        except ProcessLookupError:
            return 0
        return None

    wait = poll  # which it calls when it has seen the end

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forking(LocalProvisioner):
    async def launch_kernel(self, cmd, *, cwd=None, env=None, **_):
        """`cmd` is `python -m ipykernel_launcher` and its arguments."""
        self.process = _fork(cmd[2:], cwd or os.getcwd(), env or dict(os.environ))
        self.pid = self.pgid = self.process.pid
        return self.connection_info


@cache
def _imported(interprets: str | None) -> subprocess.Popen:
    """The process to fork. interprets: TRITON_INTERPRET, which counts when Triton is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": interprets} if interprets else {}
    env["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as every kernel has it, before matplotlib
    command = [sys.executable, "-c", _FORKING]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


_turn = threading.Lock()


def _fork(argv: list[str], cwd: str, env: dict[str, str]) -> _Fork:
    with _turn:  # lessons of the site run two at a time
        process = _imported(env.get("TRITON_INTERPRET"))
        process.stdin.write(json.dumps({"argv": argv, "cwd": cwd, "env": env}) + "\n")
        process.stdin.flush()
        return _Fork(int(process.stdout.readline()))


class Forks:
    """Starts a kernel as a fork, on Linux: what macOS imports does not survive one, and Windows has none."""

    def __init__(self, **options):
        super().__init__(**options)
        if sys.platform == "linux":
            self.provisioner = _Forking(kernel_id=self.kernel_id, kernel_spec=self.kernel_spec, parent=self)


class ForkedKernels(Forks, AsyncKernelManager):
    """For nbclient. JupyterLab's are in tests/browser/kernels.py."""
