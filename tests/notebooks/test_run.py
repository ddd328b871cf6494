"""Every notebook runs top to bottom; with --all-notebooks (`make test-all`) twice in one kernel, and the solutions."""

import pytest

from tests.notebooks.running import LESSONS, SOLUTIONS, name, read, run

pytestmark = pytest.mark.notebook


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--all-notebooks")
    metafunc.parametrize("path", [pytest.param(p, id=name(p)) for p in LESSONS + SOLUTIONS * everything])


def test_runs(path, pytestconfig):
    run(read(path), path, times=2 if pytestconfig.getoption("--all-notebooks") else 1)
