"""Both forms over the covering sets, forward, every gradient and finiteness together. On a GPU: tests/gpu."""

import pytest

from tests.ops.checking import run, walks
from tests.ops.settings import load

FULL = load("full")


@pytest.mark.parametrize("setting", FULL, ids=str)
def test_torch_chunk(setting):
    run(setting, "chunk", "torch")


@pytest.mark.parametrize("setting", [s for s in FULL if walks(s)], ids=str)
def test_torch_recurrent(setting):
    run(setting, "recurrent", "torch")


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("setting", load("small"), ids=str)
def test_interpreted_kernels(setting, form, poisoned_memory):
    run(setting, form, "triton")
