"""The hurried interpreter of these tests computes what Triton's own does."""

import os
import subprocess
import sys

import pytest

from flakit.numerics.operators import OPERATORS

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
    said = [
        subprocess.run(
            [sys.executable, "-c", CODE, how, *OPERATORS], capture_output=True, text=True, check=True, env=os.environ
        ).stdout
        for how in ("hurried", "as it is")
    ]
    assert said[0] == said[1] and len(said[0].splitlines()) == 3 * len(OPERATORS)
