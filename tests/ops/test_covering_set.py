"""Every operator over its covering set, forward, every gradient and finiteness together. On a GPU: tests/gpu."""

import pytest

from flakit.numerics.operators import OPERATORS
from tests.ops.checking import measured, walks
from tests.ops.settings import covering_set, named

AFFORDABLE = 2**25  # state elements visited; the few settings above take minutes on a CPU, and seconds on a GPU
FULL = [setting for op in OPERATORS for setting in covering_set(op, "full") if setting.elements <= AFFORDABLE]
SMALL = [setting for op in OPERATORS for setting in covering_set(op, "small")]


def test_most_settings_are_affordable_and_the_longest_among_them():
    for op in OPERATORS:
        assert sum(s.op == op for s in FULL) > 50 and any(s.op == op and s.T == 4096 for s in FULL)


@pytest.mark.parametrize("setting", FULL, ids=named)
def test_torch_chunk(setting):
    _, wrong = measured(setting, "chunk", "torch")
    assert not wrong


@pytest.mark.parametrize("setting", [s for s in FULL if walks(s)], ids=named)
def test_torch_recurrent(setting):
    _, wrong = measured(setting, "recurrent", "torch")
    assert not wrong


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("form", "setting"),
    # A recurrent kernel has one way through everything: every second setting, for the interpreter is slow.
    [("chunk", x) for x in SMALL] + [("recurrent", x) for x in SMALL[::2]],
    ids=lambda x: x if isinstance(x, str) else named(x),
)
def test_interpreted_kernels(setting, form, poisoned_memory):
    _, wrong = measured(setting, form, "triton")
    assert not wrong
