"""Every operator over its covering set, forward, every gradient and finiteness together. On a GPU: tests/gpu."""

from dataclasses import replace
from itertools import cycle

import pytest

from flakit.numerics.evaluate import LONGEST_NOT_FINITE, truth
from flakit.numerics.operators import OPERATORS
from tests.ops.checking import measure, measured, run, true_values
from tests.ops.settings import covering_set, make, named, programs, sampled

AFFORDABLE = 2**25  # state elements visited; the few settings above take minutes on a CPU, and seconds on a GPU
WALKED = 2**24  # of states that are walked through one after another: some seconds
FULL = [setting for op in OPERATORS for setting in covering_set(op, "full") if setting.elements <= AFFORDABLE]
SMALL = [setting for op in OPERATORS for setting in covering_set(op, "small")]

# What fused chunks take: heads of 33 to 64 channels, here nothing packed.
FUSED = [
    replace(setting, K=K, V=V, dtype=dtype, chunk_size="16")
    for op in ("rwkv6", "rwkv7")
    for setting, (K, V, dtype) in zip(
        (x for x in SMALL if x.op == op and x.packing == "none"),
        cycle([(64, 40, "float16"), (33, 64, "float16"), (64, 40, "float32"), (33, 64, "float32")]),
        strict=False,
    )
]


def test_most_settings_are_affordable_and_the_longest_among_them():
    for op in OPERATORS:
        assert sum(s.op == op for s in FULL) > 50 and any(s.op == op and s.T == 4096 for s in FULL)


@pytest.mark.parametrize("setting", sampled(FULL, lambda x: 300 + x.T + x.elements / 1e4), ids=named)
def test_torch(setting):
    """Both forms; and both ways to the truth that GPU kernels are held to, in float64."""
    op = OPERATORS[setting.op]
    made, arriving = make(setting)
    exact = op.arguments({name: x.double() for name, x in op.leaves(made).items()}, made)
    expected = true_values(made, arriving, op)
    walked = setting.elements <= WALKED
    wrong = {
        form: measure(run(setting, made, arriving, form, "torch"), expected, made)[1]
        for form in ["chunk"] + ["recurrent"] * walked
    }
    for recurrence in [False] + [True] * (walked and setting.T <= LONGEST_NOT_FINITE):
        found = truth(op, made, arriving=arriving, recurrence=recurrence)
        wrong[f"truth, {recurrence=}"] = measure(found, expected, exact)[1]
    assert not any(wrong.values()), wrong


@pytest.mark.interpret
@pytest.mark.parametrize("setting", sampled(SMALL, programs), ids=named)
def test_interpreted_chunk_kernels(setting, poisoned_memory):
    _, wrong = measured(setting, "chunk", "triton")
    assert not wrong


@pytest.mark.interpret
@pytest.mark.parametrize("setting", sampled(FUSED, programs), ids=named)
def test_interpreted_fused_chunk_kernels(setting, poisoned_memory):
    _, wrong = measured(setting, "chunk", "triton")
    assert not wrong


@pytest.mark.interpret
@pytest.mark.parametrize("setting", sampled(SMALL[::2], programs), ids=named)
def test_interpreted_recurrent_kernels(setting, poisoned_memory):
    # They have one way through everything: every second setting, for the interpreter is slow.
    _, wrong = measured(setting, "recurrent", "triton")
    assert not wrong
