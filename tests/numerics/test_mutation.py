"""Who wrote to an input: changes are seen whatever PyTorch was told, and an output in an input's memory is named."""

from typing import NamedTuple

import pytest
import torch

from flakit.numerics.mutation import touched


class Out(NamedTuple):
    o: torch.Tensor
    state: tuple


def test_a_right_call_touches_nothing():
    (found,) = touched(lambda x: x * 2, {"x": torch.ones(3)})
    assert (found.name, found.changed, found.share, found.version, found.shared) == ("x", 0, 0.0, 0, ())


@pytest.mark.parametrize("told", [True, False], ids=["PyTorch told", "behind its back"])
def test_changes_are_seen_whatever_pytorch_was_told(told):
    def call(x, y):
        (y if told else y.data)[1] = 5.0

    x, y = touched(call, {"x": torch.zeros(4), "y": torch.zeros(4)})
    assert (x.changed, y.changed, y.share, y.version > 0) == (0, 1, 0.25, told)


def test_nan_that_stays_is_no_change_and_nan_that_comes_is():
    given = torch.tensor([float("nan"), 1.0])
    assert touched(lambda x: None, {"x": given})[0].changed == 0
    assert touched(lambda x: x.data.fill_(float("nan")), {"x": given})[0].changed == 1


def test_outputs_in_an_inputs_memory_are_named():
    state = torch.zeros(2, 3), torch.zeros(4)
    found = touched(lambda x, state: Out(x + 1, (state[0], state[1].clone())), {"x": torch.zeros(2), "state": state})
    assert {each.name: each.shared for each in found} == {
        "x": (),
        "state[0]": ("out.state[0]",),
        "state[1]": (),
    }


def test_neighbours_in_one_memory_do_not_overlap():
    whole = torch.zeros(2, 4)
    assert touched(lambda x: whole[1], {"x": whole[0]})[0].shared == ()
    assert touched(lambda x: whole[:, 1], {"x": whole[0]})[0].shared == ("out",)


def test_a_tensor_that_needs_a_gradient_can_be_looked_at():
    x = torch.ones(3, requires_grad=True)
    assert touched(lambda x: x.data.zero_(), {"x": x})[0].changed == 3
