"""The recurrent gradients with more columns of v than a program takes: partial sums of dr, dk and dw."""

from dataclasses import replace

import pytest

from tests.ops.checking import measured
from tests.ops.settings import Setting

SETTING = Setting(T=5, K=20, V=530, H=2, B=1, decay="uniform", states="both")


@pytest.mark.interpret
@pytest.mark.parametrize("packing", ["none", "ragged"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_than_512_columns(packing, dtype):
    _, wrong = measured(replace(SETTING, packing=packing, dtype=dtype), "recurrent", "triton")
    assert wrong == []
