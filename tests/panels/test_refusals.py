"""Panels refuse settings that they cannot have, and say which knob that is, what it expected and what it got."""

import pytest
import torch

from flakit.panels import case, decay_explorer, gradient_comparer, headroom, infinity, sketch, state_stepper

REFUSALS = [
    (lambda: state_stepper(profile="fast"), ValueError, "profile: expected one of constant"),
    (lambda: state_stepper(speed=3), TypeError, "no knob named speed"),
    (lambda: state_stepper("rwkv5"), ValueError, "op: expected one of rwkv6, rwkv7, gsa, got 'rwkv5'"),
    (lambda: gradient_comparer(dtype="int8"), ValueError,
     "dtype: expected one of float32, float16, bfloat16, got 'int8'"),
    (lambda: gradient_comparer("rwkv5"), ValueError, "op: expected one of rwkv6, rwkv7, gsa, linear_attn, .*'rwkv5'"),
    (lambda: decay_explorer("gla"), ValueError, "op: expected one of rwkv6, rwkv7, gsa, got 'gla'"),
    (lambda: decay_explorer(scheme="last-row"), ValueError,
     "scheme: expected one of none, first-row, .*, got 'last-row'"),
    (lambda: decay_explorer(decays=-1), TypeError, "no knob named decays"),
    (lambda: infinity(decay=-17.0), ValueError, "^decay: expected"),
    (lambda: infinity(step=0), ValueError, "^step: expected"),
    (lambda: infinity(step=10), ValueError, "^step: expected"),
    (lambda: case("masking", w=1.0), ValueError, "^w: expected a natural-log decay <= 0, got 1.0"),
    (lambda: case("masking", chunk=1), ValueError, "^chunk: expected a whole number from 2 to 128, got 1"),
    (lambda: case("masking", mask="after"), ValueError, "^mask: expected one of none, multiply"),
    (lambda: case("maskin"), ValueError, "did you mean masking"),
    (lambda: headroom(torch.ones(1, 120, 2, 4)), ValueError, "w: expected natural-log decays <= 0"),
    (lambda: sketch("writing"), ValueError, "name: expected one of .*broken, .*, got 'writing'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "says"), REFUSALS, ids=[says for _, _, says in REFUSALS])
def test_a_panel_says_what_it_cannot_be_set_to(make, error, says):
    with pytest.raises(error, match=says):
        make()
