"""The recurrent gradients with more columns of v than a program takes: partial sums of dr, dk and dw."""

from dataclasses import replace

import pytest
import torch

from flakit.ops.common.launch import TABLE
from tests.ops.checking import measured
from tests.ops.settings import Setting

SETTING = Setting(T=5, K=20, V=530, H=2, B=1, decay="uniform", states="both")


@pytest.mark.interpret
@pytest.mark.parametrize("packing", ["none", "ragged"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_than_512_columns(packing, dtype):
    _, wrong = measured(replace(SETTING, packing=packing, dtype=dtype), "recurrent", "triton")
    assert wrong == []


def test_no_row_of_the_table_takes_more_warps_than_a_program_can_have():
    from flakit.ops.rwkv6 import recurrent_triton
    from tests.ops.rwkv6.configurations import Launches

    key = "rwkv6.recurrent_grads", "float32"
    with TABLE.using({key: TABLE[key]._replace(num_warps=8)}):
        launched = Launches(recurrent_triton, torch.float32, 16, 530).kernels()
    assert {x.options["num_warps"] for x in launched if x.options.get("BV") == 512} == {16}
