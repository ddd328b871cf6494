"""Every notebook runs top to bottom, its prose says what its cells computed, and it runs where one has run already."""

import pytest

from tests.notebooks.claims import broken, with_probes
from tests.notebooks.running import LESSONS, SOLUTIONS, name, run

pytestmark = pytest.mark.notebook


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_runs_and_says_what_it_computed(path):
    assert broken(run(path, change=with_probes)) == []


@pytest.mark.full
@pytest.mark.parametrize("solutions", SOLUTIONS, ids=name)
def test_solutions_run_and_the_lesson_again_after_them(solutions):
    run(solutions.parents[1] / solutions.name, before=solutions)
