"""Every notebook runs top to bottom, and where a notebook has run already."""

import pytest

from tests.notebooks.running import LESSONS, SOLUTIONS, name, run

pytestmark = pytest.mark.notebook


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_runs(path):
    run(path)


@pytest.mark.full
@pytest.mark.parametrize("solutions", SOLUTIONS, ids=name)
def test_solutions_run_and_the_lesson_again_after_them(solutions):
    run(solutions.parents[1] / solutions.name, before=solutions)
