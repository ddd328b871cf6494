"""Runs a subject over two processes of one process group, each with a slice of every sequence.

Starting a process takes seconds, for it imports PyTorch and the subject. So `Pair` starts both at the first setting
with slices, and they serve all others: a process receives a task over a pipe (its slices of the inputs and of the
arriving gradients) and sends back its `Ran`. A process that raises leaves the other one waiting in a collective; one
that dies or hangs sends nothing. Then the pair ends both, and the next setting starts new ones, `STARTS` times at most.
"""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..numerics.evaluate import Arriving
from ..numerics.family import FAMILY
from ..numerics.operators import OPERATORS, Operator
from ..numerics.sweep_workers import end_with_parent
from ..ops.common.dispatch import interpreted
from .call import Ran, forward_backward
from .setting import Setting
from .subject import BackwardBroken, Broken, Refused, Stopped, Subject, words_of

RANKS = 2
STARTS = 3
STARTING = 180.0
"""Time limit in seconds for both processes to import the subject and join the group."""
PATIENCE, PATIENCE_WITH_KERNELS = 60.0, 300.0
"""Time limits in seconds for an answer; the second one if kernels are compiled or interpreted."""
GRACE = 3.0
"""Seconds that the other process gets once one has raised."""


def unsupported(subject: Subject) -> str | None:
    """Return why a subject cannot be called over ranks, None if it can; it may lack `group` or not be importable."""
    if "group" not in subject.taken:
        return "its signature does not name group"
    if not dist.is_available() or not dist.is_gloo_available():
        return "PyTorch has no torch.distributed with gloo here"
    if getattr(subject.original, "__module__", "") == "__main__":
        return "its two processes cannot import it from the script or notebook that runs: put it into a module"
    try:
        _pickled(subject)
    except Exception as error:
        return f"its two processes cannot import it: {words_of(error)}"
    return None


def ranks_device(device: str) -> str:
    """Return the device type of the two ranks: "cuda" if `device` is a GPU and there is one for each, else "cpu"."""
    several = device.startswith("cuda") and torch.cuda.device_count() >= RANKS and dist.is_nccl_available()
    return "cuda" if several else "cpu"


def _pickled(subject: Subject) -> bytes:
    op = subject.op
    like: str | Operator = op.name
    if (OPERATORS | FAMILY).get(op.name) is not op:  # a user's own: looked up nowhere, drawn nowhere
        like = replace(op, forms={}, draws={}, profiles={}, fixed_decay=None)
    return pickle.dumps((subject.original, subject.adapter, like))


class Pair:
    """Two processes of one group that run a subject over slices of sequences. device: their device type. stopped:
    called while waiting for an answer, which raises `Stopped` once it returns true."""

    def __init__(self, subject: Subject, device: str, stopped: Callable[[], bool] = lambda: False):
        self.subject, self.device, self.stopped = subject, device, stopped
        self.starts = 0
        self.processes: list[BaseProcess] = []
        self.ends: list[connection.Connection] = []
        self.folder: tempfile.TemporaryDirectory | None = None

    def run(self, setting: Setting, x: Mapping, arriving: Arriving, backward: bool) -> Ran:
        """Run a setting over both ranks; return what one process would: slices concatenated, everything else summed. x,
        arriving: arguments and arriving gradients of the full sequences. Raises as `forward_backward` does."""
        assert setting.slices is not None
        op, ends = self.subject.op, list(accumulate(setting.slices))
        tasks = []
        for length, end in zip(setting.slices, ends, strict=True):
            own = slice(end - length, end)
            do, dstate = arriving
            inputs = {name: _copy_for_rank(y, own if name in op.sequences else None) for name, y in x.items()}
            tasks.append((setting, inputs, (_copy_for_rank(do, own), _copy_for_rank(dstate)), backward))
        return _join(op, setting, self._request("run", tasks))

    def shows(self, script: str, error: type[Exception]) -> bool:
        """Whether a script, run by both ranks, ends with an error of this type on one of them."""
        try:
            return any(self._request("shows", [(script, error)] * RANKS, some=True))
        except (Refused, Broken):
            return False

    def close(self) -> None:
        """Kill both processes and release their pipes and files."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for end in self.ends:
            end.close()
        self.processes, self.ends = [], []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def _request(self, what: str, tasks: Sequence[tuple], some: bool = False) -> list:
        """Send each rank its task and return their answers. what: "run" or "shows". some: as in `_receive`."""
        if not self.processes:
            self._start()
        for end, task in zip(self.ends, tasks, strict=True):
            with contextlib.suppress(OSError):  # of a dead process `_receive` hears
                end.send_bytes(pickle.dumps((what, task)))
        slow = self.device != "cpu" or interpreted()
        return self._receive(PATIENCE_WITH_KERNELS if slow else PATIENCE, some)

    def _start(self) -> None:
        if self.starts == STARTS:
            raise Refused(f"its processes were started {STARTS} times already")
        self.starts += 1
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        context, pickled = get_context("spawn"), _pickled(self.subject)
        try:
            with _without_main():
                for rank in range(RANKS):
                    own, theirs = context.Pipe()
                    arguments = (rank, self.folder.name, self.device, pickled, theirs)
                    process = context.Process(target=_serve, args=arguments, daemon=True)
                    self.ends.append(own)
                    process.start()
                    self.processes.append(process)
                    theirs.close()
            self._receive(STARTING)
        except (Broken, OSError, AssertionError) as error:
            self.close()
            raise Refused(f"two processes of it could not be started: {words_of(error)}") from error
        except BaseException:
            self.close()
            raise

    def _receive(self, seconds: float, some: bool = False) -> list:
        """Return the answer of each rank, within a time limit. some: one true answer suffices; others may be None."""
        answers: dict[int, tuple] = {}
        limit = time.monotonic() + seconds
        while len(answers) < RANKS:
            if self.stopped():
                self.close()
                raise Stopped
            waiting = {end: rank for rank, end in enumerate(self.ends) if rank not in answers}
            left = limit - time.monotonic()
            ready: list[Any] = connection.wait(list(waiting), timeout=max(0.0, min(left, 0.1)))
            for end in ready:
                try:
                    answers[waiting[end]] = pickle.loads(end.recv_bytes())
                except (EOFError, OSError):
                    self._fail_dead(waiting[end])
                if answers[waiting[end]][0] != "done" or some and answers[waiting[end]][1]:
                    limit = min(limit, time.monotonic() + GRACE)
            if left <= 0:
                break
        silent = [rank for rank in range(RANKS) if rank not in answers]
        errors = {rank: answer for rank, answer in sorted(answers.items()) if answer[0] != "done"}
        if silent or any(kind == "broken" for kind, _ in errors.values()):
            self.close()
        for kind, error in errors.values():
            if kind == "refused":
                raise Refused(error)
        for rank, (_, (backward, words)) in errors.items():
            raise (BackwardBroken if backward else Broken)(f"on rank {rank} of {RANKS}, {words}")
        if silent and not (some and answers):
            who = " and ".join(map(str, silent))
            raise Broken(f"no answer of rank {who} of {RANKS} in {seconds:.0f} s")
        return [answers[rank][1] if rank in answers else None for rank in range(RANKS)]

    def _fail_dead(self, rank: int) -> None:
        """Close the pair and raise Broken for a rank whose process has ended."""
        process = self.processes[rank]
        process.join(GRACE)
        code = process.exitcode
        self.close()
        raise Broken(f"the process of rank {rank} of {RANKS} ended, exit code {code}")


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """While this context is active, hide the running script from processes that start, which would run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _copy_for_rank(x: Any, own: slice | None = None) -> Any:
    """Return a copy of x, tensors nested in any way, on the CPU. own: the rank's slice along time, None for all."""

    def copy(y: Tensor) -> Tensor:
        return (y if own is None else y[:, own]).detach().cpu().clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, x)


def _join(op: Operator, setting: Setting, runs: Sequence[Ran]) -> Ran:
    """Return the results of all ranks as one process would compute them: slices end to end, sums of everything else."""
    assert setting.slices is not None
    values: dict[str, Tensor | None] = {}
    sliced = {"o", *(f"d{name}" for name in op.sequences)}
    for name in dict.fromkeys(name for ran in runs for name in ran.values):
        parts = [ran.values.get(name) for ran in runs]
        present = [y for y in parts if y is not None]
        if not present:
            values[name] = None
        elif name in sliced:
            shape = present[0].shape
            whole = [
                present[0].new_zeros(shape[0], length, *shape[2:]) if y is None else y
                for y, length in zip(parts, setting.slices, strict=True)
            ]
            values[name] = torch.cat(whole, 1)
        else:
            values[name] = torch.stack([y.double() for y in present]).sum(0).to(present[0].dtype)
    cut_off = tuple(name for name in runs[0].cut_off if all(name in ran.cut_off for ran in runs))
    return Ran(values, cut_off, all(ran.missing_state for ran in runs))


# --- in the process of a rank ----------------------------------------------------------------------------------------


def _serve(rank: int, folder: str, device: str, pickled: bytes, end: connection.Connection) -> None:
    """The main function of a rank's process: join the group, then answer tasks from the pipe until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent ends this one
    threading.Thread(target=end_with_parent, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # gloo prints about its connections
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    try:
        function, adapter, like = pickle.loads(pickled)
        subject = Subject(function, like, adapter=adapter)
        subject.patient = False
        if device == "cpu":
            name = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
            if name:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the machine's own name may have no address
        else:
            torch.cuda.set_device(rank)
        store = dist.FileStore(f"{folder}/store", RANKS)
        late = timedelta(seconds=STARTING + PATIENCE_WITH_KERNELS)  # the parent gives up before that
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=RANKS, timeout=late
        )
    except (Exception, SystemExit) as error:
        end.send_bytes(pickle.dumps(("broken", (False, f"it raised {words_of(error)}"))))
        return
    end.send_bytes(pickle.dumps(("done", True)))
    while True:
        try:
            asked, task = pickle.loads(end.recv_bytes())
        except (EOFError, OSError):
            return
        end.send_bytes(pickle.dumps(_answer(subject, device, asked, task)))


def _answer(subject: Subject, device: str, asked: str, task: tuple) -> tuple:
    """Do a task, "run" or "shows"; return ("done", result), ("refused", words) or ("broken", (in backward?, words))."""
    try:
        if asked == "shows":
            from .repro import ending

            script, error = task
            return "done", isinstance(ending(script, subject), error)
        setting, x, arriving, backward = task
        if device != "cpu":
            x, arriving = tree_map_only(Tensor, lambda y: y.to(device), (x, arriving))
        ran = forward_backward(subject, setting, x | {"group": dist.group.WORLD}, arriving, backward=backward)
        ran.values = {name: y if y is None else y.detach().cpu() for name, y in ran.values.items()}
        return "done", ran
    except Refused as error:
        return "refused", str(error)
    except Broken as error:
        return "broken", (isinstance(error, BackwardBroken), str(error))
    except (Exception, SystemExit) as error:
        return "broken", (False, f"it raised {words_of(error)}")
