"""Both forms over the covering sets, forward, every gradient and finiteness together. On a GPU: tests/gpu."""

import pytest

from tests.ops.checking import measured, walks
from tests.ops.settings import load

FULL = load("full")


@pytest.mark.parametrize("setting", FULL, ids=str)
def test_torch_chunk(setting):
    _, wrong = measured(setting, "chunk", "torch")
    assert not wrong


@pytest.mark.parametrize("setting", [s for s in FULL if walks(s)], ids=str)
def test_torch_recurrent(setting):
    _, wrong = measured(setting, "recurrent", "torch")
    assert not wrong


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("setting", load("small"), ids=str)
def test_interpreted_kernels(setting, form, poisoned_memory):
    _, wrong = measured(setting, form, "triton")
    assert not wrong
