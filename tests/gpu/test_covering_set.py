"""Every operator over its whole covering set on a GPU. Properties on a GPU are in tests/ops with all others."""

from functools import lru_cache

import pytest

from flakit.numerics.operators import OPERATORS
from tests.gpu.covering import covering_set, kernels
from tests.ops.checking import measure, run, true_values
from tests.ops.settings import make, named, sampled

pytestmark = pytest.mark.gpu

SETTINGS = [setting for op in OPERATORS for setting in covering_set(op)]
FUSED = [setting for op in ("rwkv6", "rwkv7") for setting in covering_set(op, "fused")]


def beside_their_like(settings):
    """As parameters, a few for a quick run; those that share kernels are for one process."""
    rows = [(*row.values, row.marks) for row in sampled(settings, lambda x: 2**22 + x.elements)]
    return [
        pytest.param(setting, marks=[*marks, pytest.mark.together(*kernels(setting))], id=named(setting))
        for setting, marks in rows
    ]


@lru_cache(maxsize=1)
def prepared(setting):
    """The arguments, what arrives, and the truth, to which both forms of a setting are held, one after the other."""
    made, arriving = make(setting, "cuda")
    return made, arriving, true_values(made, arriving, setting.op)


def measured(setting, form):
    made, arriving, expected = prepared(setting)
    return measure(run(setting, made, arriving, form), expected, made)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("setting", beside_their_like(SETTINGS))
def test_covering_set(setting, form, report, poisoned_memory):
    errors, wrong = measured(setting, form)
    same = {"op": setting.op, "form": form, "dtype": setting.dtype, "setting": str(setting)}
    report(
        {**same, "output": name, "l2": e.l2, "worst": e.worst, "worst_row": e.worst_row} for name, e in errors.items()
    )
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("setting", beside_their_like(FUSED))
def test_fused_chunks(setting):
    errors, wrong = measured(setting, "chunk")
    assert errors and not wrong
