"""`make test`, `make test-rest` and `make test-all`: the tests this machine can run, in the processes each kind needs.

Triton decides once, when it is imported, whether kernels are interpreted or compiled, so interpreted kernels cannot
share a process with compiled ones; and some tests in a browser measure time, so that nothing may run beside them.
Each step is one pytest call; arguments are passed on to all of them (`python tests/run.py -k rwkv6 -x`).
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_WORKERS = 8  # each one imports torch and, on a GPU, holds a CUDA context


QUICK, REST, ALL = "not full", "full", "not in_site"
WITHOUT_KERNELS = (
    "bench",
    "browser",
    "data",
    "figures",
    "language",
    "models",
    "notebooks",
    "panels",
    "site",
)
"""Folders with no interpreted test, which so are not even imported."""


def steps(workers, which):
    """(title, markers, environment, options of pytest)"""
    parallel = ["-n", str(workers), "--dist=worksteal"]
    yield (
        "operators, instruments, panels, notebooks; kernels compiled ahead of time; GPU where there is one",
        "not interpret and not timed",
        {},
        parallel,
    )
    beside = [f"--ignore=tests/{folder}" for folder in WITHOUT_KERNELS]
    yield "kernels, interpreted", "interpret", {"TRITON_INTERPRET": "1"}, [*parallel, *beside]
    if which != QUICK:
        yield "JupyterLab in a browser, timed", "timed", {}, ["tests/browser"]


def cores():
    """Those this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def main():
    parser = argparse.ArgumentParser(description="Run the tests that a change needs, or every one this machine can.")
    parser.add_argument("--workers", type=int, default=min(cores(), MAX_WORKERS))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_const", dest="which", const=ALL, help="every test")
    which.add_argument("--rest", action="store_const", dest="which", const=REST, help="those of --all left out without")
    parser.set_defaults(which=QUICK)
    parser.add_argument("-m", dest="markers", help="narrows the selection of each step, as pytest's own")
    own, pytest_args = parser.parse_known_args()

    # Hundreds of processes are started, kernels of notebooks and commands: they compile what they import once.
    left_out = ("TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the few tests with two threads share their cores with other tests
    pytest_args = ["--durations=10", "--durations-min=1", *pytest_args]  # of two, pytest takes the last
    results = []
    planned = list(steps(own.workers, own.which))
    for number, (title, markers, extra_env, options) in enumerate(planned, 1):
        print(f"\n== {number}/{len(planned)} {title}", flush=True)
        start = time.monotonic()
        selection = " and ".join(f"({part})" for part in (markers, own.which, own.markers) if part)
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-m", selection, *options, *pytest_args],
            cwd=ROOT,
            env=env | extra_env,
            stdin=subprocess.DEVNULL,
        )
        results.append((title, code, time.monotonic() - start))
        if code == pytest.ExitCode.INTERRUPTED:
            break

    print("\n== summary")
    for title, code, seconds in results:
        verdict = {pytest.ExitCode.OK: "passed", pytest.ExitCode.NO_TESTS_COLLECTED: "no test selected"}
        print(f"  {verdict.get(code, 'FAILED'):16} {seconds:5.0f} s  {title}")
    failed = [code for _, code, _ in results if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)]
    nothing_ran = all(code == pytest.ExitCode.NO_TESTS_COLLECTED for _, code, _ in results)
    return 1 if failed or nothing_ran else 0


if __name__ == "__main__":
    sys.exit(main())
