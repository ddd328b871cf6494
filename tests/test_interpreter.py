"""The hurried interpreter of these tests computes what Triton's own does."""

import sys

import pytest

from flakit.numerics.operators import OPERATORS
from tests.commands import completed

CODE = """
import hashlib, sys, torch
from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
if sys.argv[1] == "hurried":
    from tests.interpreter import hurry
    hurry()
for op in sys.argv[2:]:
    for form, dtype in (("chunk", torch.float32), ("chunk", torch.float16), ("recurrent", torch.float32)):
        made = inputs(op, T=18, H=1, K=16, V=24, initial_state=True, dtype=dtype)
        found = evaluate(op, made, form=form, backend="triton", dfinal_state=True)
        print(op, form, dtype, *(hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in found.values()))
"""


@pytest.mark.full
@pytest.mark.interpret
def test_to_the_same_bits():
    hurried, own = (
        completed(sys.executable, "-c", CODE, how, *OPERATORS, check=True).stdout for how in ("hurried", "as it is")
    )
    assert hurried == own and len(own.splitlines()) == 3 * len(OPERATORS)
