"""A pytest plugin, loaded by `python -m tests.gpu`: leaves out what has passed already, keeps what comes of each test.

The folder that FLAKIT_GPU_RUN names says what is known (`run.json`). Every process that collects finds there which
tests to leave out; the first one leaves the names of all (`names.json`), by which the process that hears of outcomes,
xdist's controller or the only one there is, knows each one's place. It writes the results every few seconds and at the
end, so that whoever ends it loses no more than that.

What has failed runs first, then what was not run, then what has passed; of each the tests that took longest first,
where that is known, if only of older code or of another card. Tests that are marked `together`, because their kernels
are the same, go to one process in one piece, and of a function's other tests a few at a time. No two processes compile
the same kernel at once: the second waits for the first.
"""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from tests.gpu import results

EVERY = 2.0  # seconds
FOLDER = Path(os.environ["FLAKIT_GPU_RUN"])
RUN = json.loads((FOLDER / "run.json").read_text())
ROOT = Path(RUN["root"])
NOT_COLLECTED = "the file itself, which pytest cannot collect"
AT_ONCE = 4
"""Tests of a function that a process takes at once: they share kernels, as a rule."""


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper(), "flakit-gpu-results")
    if config.getoption("numprocesses", None) in (None, 0) or hasattr(config, "workerinput"):
        _compile_once()
        _share_processors(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    names, wanted, numbers = {file: [] for file in RUN["files"]}, {}, Counter()
    for item in items:
        if item.get_closest_marker("gpu"):
            file = item.path.relative_to(ROOT).as_posix()
            place = len(names[file])
            names[file].append(name(item.nodeid))
            letter = RUN["known"].get(file, "")[place : place + 1]
            if RUN["again"] or letter != results.PASSED:
                seconds = RUN["expected"].get(file, [])[place : place + 1]
                wanted.setdefault(_piece(item, numbers), []).append((item, letter, seconds[0] if seconds else None))
    # Pieces whole: the first in need of a run, then the longest; what has no time yet counts as long.
    ordered = sorted(wanted.items(), key=lambda piece: (min(_turn(x[1]) for x in piece[1]), -_length(piece[1])))
    chosen = [item for _, tests in ordered for item, _, _ in tests]
    pieces = {item.nodeid: piece for piece, tests in ordered for item, _, _ in tests}
    if not (FOLDER / "names.json").exists():
        own = FOLDER / f"names.{os.getpid()}"
        own.write_text(json.dumps({"names": names, "pieces": pieces}))
        os.replace(own, FOLDER / "names.json")
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _piece(item: pytest.Item, numbers: Counter) -> str:
    """What a test is given to a process with. numbers: of the tests of each function so far."""
    test = item.nodeid.partition("[")[0]
    if marked := item.get_closest_marker("together"):
        return f"{test} {marked.args}"
    numbers[test] += 1
    return f"{test} {(numbers[test] - 1) // AT_ONCE}"


def _turn(letter: str) -> int:
    return {results.FAILED: 0, results.PASSED: 2}.get(letter, 1)


def _length(tests: list[tuple]) -> float:
    return sum(float("inf") if seconds is None else seconds for _, _, seconds in tests)


def name(nodeid: str) -> str:
    """Of a test, without its file's."""
    return nodeid.partition("::")[2]


def _share_processors(processes: int) -> None:
    """Compile ahead in this process's share of the threads: every process has work for all of them."""
    try:
        from flakit.ops.common import ahead_triton
    except ImportError:
        return
    pool = ahead_triton.ThreadPoolExecutor
    ahead_triton.ThreadPoolExecutor = lambda threads, **how: pool(max(1, 2 * threads // processes), **how)


def _compile_once() -> None:
    """Who compiles a kernel holds a lock of its name; who waited for that finds it in Triton's cache."""
    try:
        from triton import compiler
    except ImportError:
        return
    compile = compiler.compile

    def compile_alone(src, target=None, options=None, **more):
        source = src if isinstance(src, str) else src.hash()
        call = f"{source} {target} {sorted((options or {}).items())}"
        with (FOLDER / hashlib.sha256(call.encode()).hexdigest()).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if kernels := sys.modules.get("flakit.ops.common.kernel_triton"):
                    kernels.release_turn()  # other threads need not wait until another process is done
                fcntl.flock(lock, fcntl.LOCK_EX)
            return compile(src, target=target, options=options, **more)

    compiler.compile = compile_alone


class Keeper:
    """What came of each test, written down."""

    def __init__(self):
        self.rows = {(results.place(row), row["file"]): row for row in RUN["rows"]}
        self.places, self.each, self.names, self.seconds, self.pieces = {}, {}, {}, {}, {}
        self.written = 0.0
        self.broken = set()

    def pytest_runtest_logreport(self, report):
        file, test = report.nodeid.partition("::")[0], name(report.nodeid)
        self._look()
        place = self.places.get((file, test))
        if place is None:
            return
        each, seconds = self.each[file], self.seconds[file]
        before = 0.0 if report.when == "setup" else seconds[place] or 0.0
        seconds[place] = round(before + getattr(report, "duration", 0.0), 2)
        if report.failed:
            each[place] = results.FAILED
        elif report.when == "call" or report.skipped:
            if report.passed or hasattr(report, "wasxfail"):
                each[place] = results.PASSED
            elif each[place] != results.PASSED:  # which two GPUs have shown, one need not take back
                each[place] = results.SKIPPED
        if time.monotonic() - self.written > EVERY:
            self.write()

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.add(report.nodeid)

    def pytest_sessionfinish(self):
        self._look()
        self.write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        """In the order of the tests, a piece at a time."""
        from xdist.scheduler import LoadScopeScheduling

        keeper, alone = self, count()

        class Pieces(LoadScopeScheduling):
            def _split_scope(self, nodeid):
                keeper._look()
                return keeper.pieces.setdefault(nodeid, f"alone {next(alone)}")

            def remove_node(self, node):
                """A test in which a process ended has failed, and does not run again; xdist gives it to the next."""
                pieces = self.assigned_work[node]
                ended_in = next((test for tests in pieces.values() for test, done in tests.items() if not done), None)
                for piece, tests in list(pieces.items()):
                    if ended_in in tests:
                        tests[ended_in] = True
                    if all(tests.values()):
                        del pieces[piece]
                super().remove_node(node)
                return ended_in

        config.option.loadscopereorder = False
        return Pieces(config, log)

    def _look(self) -> None:
        """At the names, once they are there; what was run of a file that has changed since counts no more."""
        if self.names or not (FOLDER / "names.json").exists():
            return
        collected = json.loads((FOLDER / "names.json").read_text())
        self.names, self.pieces = collected["names"], collected["pieces"]
        for file, names in self.names.items():
            known = RUN["known"].get(file, "")
            self.each[file] = list(known) if len(known) == len(names) else [results.NOT_RUN] * len(names)
            seconds = RUN["seconds"].get(file, [])
            self.seconds[file] = list(seconds) if len(known) == len(names) == len(seconds) else [None] * len(names)
            self.places |= {(file, test): place for place, test in enumerate(names)}

    def write(self) -> None:
        ran, keys = RUN["ran"], RUN["keys"]
        for file, names in self.names.items():
            each, seconds = "".join(self.each[file]), self.seconds[file]
            if file in self.broken:
                each, seconds, names = results.FAILED, [None], [NOT_COLLECTED]
            failing = [test for test, letter in zip(names, each, strict=True) if letter == results.FAILED]
            self.rows[results.place(ran), file] = results.row(ran, file, keys[file], each, failing, seconds)
        if self.rows:
            results.write(RUN["out"], RUN["meta"], self.rows.values())
        self.written = time.monotonic()
