"""Every operator over its whole covering set on a GPU. Properties on a GPU are in tests/ops with all others."""

from dataclasses import replace
from itertools import cycle, product

import pytest

from flakit.numerics.operators import OPERATORS
from tests.ops.checking import measured
from tests.ops.settings import covering_set, named, sampled

pytestmark = pytest.mark.gpu

SETTINGS = [setting for op in OPERATORS for setting in covering_set(op, "full")]
# All that fused chunks take: 16-bit heads of 33 to 64 channels.
FUSED = [
    replace(setting, K=K, V=V, dtype=dtype, chunk_size="16")
    for op in ("rwkv6", "rwkv7")
    for setting, ((K, V), dtype) in zip(
        covering_set(op, "full"), cycle(product([(64, 64), (40, 64), (64, 56)], ["bfloat16", "float16"])), strict=False
    )
]


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("setting", sampled(SETTINGS, lambda x: 2**22 + x.elements), ids=named)
def test_covering_set(setting, form, report, poisoned_memory):
    errors, wrong = measured(setting, form, device="cuda")
    same = {"op": setting.op, "form": form, "dtype": setting.dtype, "setting": str(setting)}
    report(
        {**same, "output": name, "l2": e.l2, "worst": e.worst, "worst_row": e.worst_row} for name, e in errors.items()
    )
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("setting", sampled(FUSED, lambda x: 2**22 + x.elements), ids=named)
def test_fused_chunks(setting):
    errors, wrong = measured(setting, "chunk", device="cuda")
    assert errors and not wrong
