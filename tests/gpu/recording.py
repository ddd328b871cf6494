"""A pytest plugin, loaded by `python -m tests.gpu`: leaves out what has passed already, keeps what comes of each test.

The folder that FLAKIT_GPU_RUN names says what is known (`run.json`). Every process that collects finds there which
tests to leave out; the first one leaves the names of all (`names.json`), by which the process that hears of outcomes,
xdist's controller or the only one there is, knows each one's place. It writes the results every few seconds and at the
end, so that whoever ends it loses no more than that.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu import results

EVERY = 2.0  # seconds
FOLDER = Path(os.environ["FLAKIT_GPU_RUN"])
RUN = json.loads((FOLDER / "run.json").read_text())
ROOT = Path(RUN["root"])
NOT_COLLECTED = "the file itself, which pytest cannot collect"


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper(), "flakit-gpu-results")
    if config.getoption("numprocesses", None) in (None, 0) or hasattr(config, "workerinput"):
        config.pluginmanager.register(Timer(), "flakit-gpu-compiling")
        _share_processors(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    names, wanted = {file: [] for file in RUN["files"]}, []
    for item in items:
        if item.get_closest_marker("gpu"):
            file = item.path.relative_to(ROOT).as_posix()
            known, place = RUN["known"].get(file, ""), len(names[file])
            names[file].append(name(item.nodeid))
            if known[place : place + 1] != results.PASSED:
                wanted.append(item)
    if not (FOLDER / "names.json").exists():
        own = FOLDER / f"names.{os.getpid()}"
        own.write_text(json.dumps(names))
        os.replace(own, FOLDER / "names.json")
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


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


class Timer:
    """How long each test compiled kernels, added up over its threads."""

    def __init__(self):
        self.seconds = 0.0
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self._compiled

    def _compiled(self, *, times, cache_hit, **_):
        self.seconds += 0.0 if cache_hit else times.total / 1e6

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.compiling, self.seconds = self.seconds, 0.0
        return report


class Keeper:
    """What came of each test, written down."""

    def __init__(self):
        self.rows = {(row["card"], row["file"]): row for row in RUN["rows"]}
        self.places, self.each, self.names = {}, {}, {}
        self.written = 0.0
        self.broken = set()
        self.spent, self.compiling = Counter(), Counter()

    def pytest_runtest_logreport(self, report):
        file, test = report.nodeid.partition("::")[0], name(report.nodeid)
        self._look()
        self.spent[file] += getattr(report, "duration", 0.0)
        self.compiling[file] += getattr(report, "compiling", 0.0)
        place = self.places.get((file, test))
        if place is None:
            return
        each = self.each[file]
        if report.failed:
            each[place] = results.FAILED
        elif report.when == "call" or report.skipped:
            passed = report.passed or hasattr(report, "wasxfail")
            each[place] = results.PASSED if passed else results.SKIPPED
        if time.monotonic() - self.written > EVERY:
            self.write()

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.add(report.nodeid)

    def pytest_sessionfinish(self):
        self._look()
        self.write()

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("seconds of all processes together, and of these compiling, of all their threads")
        for file, seconds in self.spent.most_common():
            terminalreporter.line(f"{seconds:8.0f} {self.compiling[file]:8.0f}  {file}")

    def _look(self) -> None:
        """At the names, once they are there; what was run of a file that has changed since counts no more."""
        if self.names or not (FOLDER / "names.json").exists():
            return
        self.names = json.loads((FOLDER / "names.json").read_text())
        for file, names in self.names.items():
            known = RUN["known"].get(file, "")
            self.each[file] = list(known) if len(known) == len(names) else [results.NOT_RUN] * len(names)
            self.places |= {(file, test): place for place, test in enumerate(names)}

    def write(self) -> None:
        ran, keys = RUN["ran"], RUN["keys"]
        for file, names in self.names.items():
            each = results.FAILED if file in self.broken else "".join(self.each[file])
            names = [NOT_COLLECTED] if file in self.broken else names
            failing = [test for test, letter in zip(names, each, strict=True) if letter == results.FAILED]
            self.rows[ran["card"], file] = results.row(ran, file, keys[file], each, failing)
        if self.rows:
            results.write(RUN["out"], RUN["meta"], self.rows.values())
        self.written = time.monotonic()
