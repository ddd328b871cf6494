"""What every test directory shares: which markers can run in this process, and showing what tests measured."""

import gc
import os
import sys
import tempfile

import pytest
import torch
from _pytest import runner

from flakit.ops.common.dispatch import has_triton, interpreted
from tests.interpreter import hurry
from tests.quick import left_out
from tests.roomy import roomy
from tests.spawning import spawn_by_forking

# jsonschema, with which notebooks are read, builds a parser of web addresses when it is imported: two seconds of every
# process for a check that no notebook asks for. It does without where there is none.
sys.modules.setdefault("rfc3987_syntax", None)

# Figures and panels are made by the thousand, and looking through all that is alive for cycles took a quarter of their
# tests' time, and of collecting the tests. All of it is looked through at the end of a file that made panels.
gc.set_threshold(10_000, 20, 100)

# The learner's files, which lessons and `flakit lab` write: not into the checkout's notebooks.
os.environ.setdefault("FLAKIT_MINE", tempfile.mkdtemp(prefix="flakit-mine-"))

# Notebooks that tests run, and the site that they build, have kernels that start at once.
os.environ.setdefault("FLAKIT_KERNELS", "tests.notebooks.forked:ForkedKernels")

RUNS_HERE = {
    "gpu": (torch.cuda.is_available() and not interpreted(), "needs a CUDA device and no TRITON_INTERPRET"),
    "interpret": (
        has_triton() and interpreted(),
        "needs Triton, in a process with TRITON_INTERPRET=1: pytest -m interpret (make test runs both kinds)",
    ),
}


def pytest_configure(config):
    # The tensors here are small. Two OpenMP threads bring them nothing, and where cores are taken they wait for each
    # other so long that a file of 6 s takes minutes. Set before xdist starts its workers, which inherit it.
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    if has_triton() and interpreted():
        hurry()
    if not torch.cuda.is_available():  # which a fork of the process that asked cannot use
        spawn_by_forking()
    if os.environ.get("FLAKIT_REPORT"):
        config.pluginmanager.import_plugin("tests.gpu.report")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    # After an illegal access to a GPU's memory every later call fails in a process. One of xdist's workers ends then:
    # that test is said to have crashed, and another worker takes those that are left.
    report = yield
    if call.excinfo and "CUDA error" in str(call.excinfo.value) and hasattr(item.config, "workerinput"):
        print(f"{item.nodeid}: {call.excinfo.value}", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report


@pytest.fixture(autouse=True)
def interpreter_as_it_was():
    """A command that a test runs in this process may switch Triton's interpreter on: not for the tests after it."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(scope="module", autouse=True)
def panels_are_freed():
    """ipywidgets keeps every widget until it is closed: some 20 MB a panel."""
    yield
    if "ipywidgets" in sys.modules:
        sys.modules["ipywidgets"].Widget.close_all()
        gc.collect()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    for item in left_out(items):
        item.add_marker(pytest.mark.full)
    for item in items:
        for marker, (runs, reason) in RUNS_HERE.items():
            if not runs and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    # One process builds the site and takes minutes: first of all, so that the other has work of its own meanwhile and
    # finds it built, instead of waiting for it.
    items.sort(key=lambda item: item.path.parent.name != "site")


def pytest_collection_finish():
    """What is there before the first test stays, and need not be looked through for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    return roomy(runner.pytest_runtest_protocol)(item, nextitem)


def pytest_runtest_teardown(item):
    """A kernel that writes out of bounds breaks every later one in its process: leave, and let xdist start another."""
    if item.get_closest_marker("gpu") and torch.cuda.is_available() and os.environ.get("PYTEST_XDIST_WORKER"):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_terminal_summary(terminalreporter):
    """`record_property` alone would be seen in a JUnit file only."""
    reports = [report for report in terminalreporter.getreports("passed") if report.user_properties]
    if reports:
        terminalreporter.section("measured")
    for report in reports:
        for name, value in report.user_properties:
            terminalreporter.line(f"{report.nodeid}  {name}: {value}")
