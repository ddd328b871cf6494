"""Measures the settings of a sweep in this process, in worker processes or on Ray, and stores the results in a file.

If a worker dies, another repeats its one measurement; if a sweep dies, its store remains.
"""

import hashlib
import inspect
import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch

from .arguments import shown

Measured = dict[str, tuple[dict[str, float], tuple[int, ...] | None]]
"""For each name: numbers, and the index of the first non-finite value."""


@dataclass(frozen=True)
class Raised:
    """The error message of a failed measurement, in place of its results."""

    message: str


Results = Generator[tuple[int, Measured | Raised], None, None]
"""The index of each setting and its measurement, in any order."""

_TRIES = 3
"""Deaths of a process during a setting after which the setting is considered the cause."""


def in_words(x: object):
    """Return a setting's value in the form for JSON and tables: a number, a string, a bool or None."""
    return x if isinstance(x, (int, float, str, bool, type(None))) else str(x).removeprefix("torch.")


def fingerprint(subject: Any, like: str | None, fixed: Mapping[str, object]) -> dict:
    """Return what a store and a sweep must share for stored results to be valid: name, source, fixed settings."""
    name = getattr(subject, "name", None) or getattr(subject, "__qualname__", None) or str(subject)
    try:
        source = hashlib.sha256(inspect.getsource(subject).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        source = ""
    constant = {key: in_words(x) for key, x in fixed.items()}
    return {"subject": name, "like": like, "source": source, "fixed": constant}


class Store:
    """Measurements in a file, one JSON object a line; in a folder, the file sweep.jsonl.

    The first line is the `fingerprint`; the constructor raises ValueError if it is not `expected`. An incomplete last
    line, of a process that died, is dropped.
    """

    def __init__(self, path: str | os.PathLike, expected: dict):
        path = Path(path)
        self.path = path / "sweep.jsonl" if path.is_dir() or not path.suffix else path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Measured] = {}
        complete = 0  # bytes of complete lines
        if self.path.exists():
            text = self.path.read_bytes()
            complete = text.rfind(b"\n") + 1
            head, *lines = text[:complete].splitlines() or [b""]
            if head:
                self._check(json.loads(head), expected)
            for line in lines:
                entry = json.loads(line)
                self._known[_key(entry["setting"])] = {
                    name: (numbers, None if first is None else tuple(first))
                    for name, (numbers, first) in entry["measured"].items()
                }
        self._file = self.path.open("ab")
        self._file.truncate(complete)
        if not complete:
            self._write(expected)

    def _check(self, stored: dict, expected: dict) -> None:
        wrong = [name for name in expected if json.loads(json.dumps(expected[name])) != stored.get(name)]
        if wrong:
            was = ", ".join(f"{name} {shown(stored.get(name))}" for name in wrong)
            now = ", ".join(shown(expected[name]) for name in wrong)
            raise ValueError(f"store: {self.path} holds a sweep with {was}, got {now}; name another or delete it")

    def get(self, setting: Mapping[str, object]) -> Measured | None:
        """Return the stored measurement of a setting, None if there is none."""
        return self._known.get(_key({name: in_words(x) for name, x in setting.items()}))

    def put(self, setting: Mapping[str, object], measured: Measured) -> None:
        """Append a measurement to the file and flush it to disk."""
        self._write({"setting": {name: in_words(x) for name, x in setting.items()}, "measured": measured})

    def _write(self, entry: dict) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _key(setting: Mapping[str, object]) -> str:
    return json.dumps(setting, sort_keys=True)


_MEASURE: Callable | None = None


def _begin(pickled: bytes, counter) -> None:
    """Initialize a worker process: load the measuring function; use one thread and the next GPU by `counter`."""
    global _MEASURE
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        with counter.get_lock():
            torch.cuda.set_device(counter.value % torch.cuda.device_count())
            counter.value += 1
    try:
        make, arguments = pickle.loads(pickled)
        _MEASURE = make(*arguments)
    except Exception as error:
        refusal = Raised(f"subject: a worker could not load it: {type(error).__name__}: {error}")
        _MEASURE = lambda setting: refusal  # noqa: E731


def end_with_parent() -> None:
    """Exit when the parent process ends; a worker of a killed parent would otherwise wait forever. Runs in a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # in a worker
    wait_for([parent.sentinel])
    os._exit(1)


def _measure(setting: dict) -> Measured | Raised:
    assert _MEASURE is not None  # `_begin` has set it
    return _MEASURE(setting)


def here(measure: Callable[[dict], Measured | Raised], settings: Sequence[dict]) -> Results:
    """Yield the index of each setting and its measurement, in order, measured in this process."""
    for i, setting in enumerate(settings):
        yield i, measure(setting)


def in_processes(make: Callable, arguments: tuple, settings: Sequence[dict], workers: int) -> Results:
    """Yield as `here`, but from worker processes, in any order. make(*arguments) returns each one's measuring function.

    A process that dies (killed, out of memory, a fault in a kernel) is replaced, and its setting is measured again; a
    setting running at three deaths is considered their cause, and `Raised`. ValueError: `make` is not picklable.
    """
    try:
        pickled = pickle.dumps((make, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "subject: expected a function that another process can import, at the top level of a module, with workers="
            f"{workers}; or a string, 'file.py:function' ({error})"
        ) from error
    waiting, deaths = list(range(len(settings)))[::-1], [0] * len(settings)
    while waiting:
        pool = _pool(pickled, workers)
        running: dict[Future, int] = {}
        try:
            while waiting or running:
                # Submit only as many as are measured at once, so that few are suspected after a death.
                while waiting and len(running) < workers:
                    running[pool.submit(_measure, settings[waiting[-1]])] = waiting[-1]
                    waiting.pop()
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    measured = future.result()
                    yield running.pop(future), measured
        except BrokenProcessPool:
            for future, i in running.items():
                if future.done() and future.exception() is None:
                    yield i, future.result()
                    continue
                deaths[i] += 1
                if deaths[i] == _TRIES:
                    guard = "a script that starts workers needs `if __name__ == '__main__':` around what it runs"
                    yield i, Raised(f"its process died, {_TRIES} times ({guard})")
                else:
                    waiting.append(i)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool(pickled: bytes, workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a fork would copy PyTorch's threads and a GPU's context
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(pickled, context.Value("i", 0)))


def on_ray(make: Callable, arguments: tuple, settings: Sequence[dict], workers: int) -> Results:
    """Measure as `in_processes` does, on Ray: on a connected cluster or that of RAY_ADDRESS, else on `workers` cores. A
    task takes one core, and one GPU if the cluster has any. Raises ImportError without Ray."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("engine: 'ray' needs Ray (pip install 'flakit[ray]')") from error
    ours = not ray.is_initialized()
    if ours:
        local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else local))
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        shared = ray.put((make, arguments))
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_TRIES - 1)(_measure_on_ray)
        waiting = list(range(len(settings)))[::-1]
        running: dict = {}
        at_once = 2 * int(ray.cluster_resources().get("CPU", workers))
        while waiting or running:
            while waiting and len(running) < at_once:
                i = waiting.pop()
                running[task.remote(shared, settings[i])] = i
            (done,), _ = ray.wait(list(running), num_returns=1)
            i = running.pop(done)
            try:
                yield i, ray.get(done)
            except ray.exceptions.WorkerCrashedError:
                yield i, Raised(f"its process died, {_TRIES} times")
            except ray.exceptions.RayTaskError as error:
                yield i, Raised(f"subject: a worker could not load it: {error.cause}")
    finally:
        if ours:
            ray.shutdown()


def _measure_on_ray(shared: tuple, setting: dict) -> Measured | Raised:
    torch.set_num_threads(1)
    make, arguments = shared
    return make(*arguments)(setting)
