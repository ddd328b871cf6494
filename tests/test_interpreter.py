"""The hurried interpreter of these tests computes what Triton's own does."""

import sys

import pytest

from flakit.numerics.operators import OPERATORS
from tests import interpreter, roomy
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


def test_a_triton_of_another_version_is_left_alone(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "4.0.0")
    monkeypatch.setattr("tests.interpreter._replace_once", lambda *_: pytest.fail("replaced"))
    interpreter.hurry()
    monkeypatch.setattr(triton, "__version__", "3.7.9")
    with pytest.raises(pytest.fail.Exception, match="replaced"):
        interpreter.hurry()


@pytest.mark.parametrize("has_room", [True, False])
def test_frames_have_room_in_the_versions_of_python_that_were_measured(monkeypatch, has_room):
    def function():
        return "result"

    monkeypatch.setattr(roomy, "VERSIONS", (sys.version_info[:2],) if has_room else ())
    with_room = roomy.roomy(function)
    assert (with_room is not function) == has_room and with_room() == "result"
    assert (with_room.__code__.co_stacksize >= roomy.HALF) == has_room
