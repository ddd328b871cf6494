"""Both forms of RWKV6 over the whole covering set on a GPU. Properties on a GPU are in tests/ops with all others."""

import pytest

from tests.ops.checking import measured
from tests.ops.settings import load

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("setting", load("full"), ids=str)
def test_covering_set(setting, form, report, poisoned_memory):
    errors, wrong = measured(setting, form, device="cuda")
    same = {"form": form, "dtype": setting.dtype, "setting": str(setting)}
    report(
        {**same, "output": name, "l2": e.l2, "worst": e.worst, "worst_row": e.worst_row} for name, e in errors.items()
    )
    assert not wrong
