"""float32 chunks keep their digits: bounds of about twice what is measured, where `checking`'s budget hides the loss of
a digit, as by a sum of products whose largest comes first (data/tuning.md)."""

import pytest

from flakit.numerics.operators import OPERATORS
from tests.ops.checking import check, true_values
from tests.ops.places import PLACES
from tests.ops.settings import Setting

MOST = {"o": 8e-7}
"""Most relative L2 error; of gradients and final states `MOST_GRADIENT`."""
MOST_GRADIENT = 2e-6


@pytest.mark.parametrize("decay", ["none", "model", "-0.9", "-5", "spikes"])
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("place", PLACES)
def test_float32_chunks_keep_their_digits(place, op, decay):
    # On a CPU, of GSA, whose chunks have 64 tokens, two whole ones and a part.
    tokens = 200 if place.device == "cuda" else 140 if op == "gsa" else 37
    slots = {"M": 64} if op == "gsa" else {}
    setting = Setting(T=tokens, K=64, V=64, H=2, B=1, decay=decay, states="both", op=op, **slots)
    made, arriving = place.make(setting, T=tokens)
    found = place.run(made, arriving, "chunk", op, chunk_size=None)
    errors = check(found, true_values(made, arriving, op=op), made)
    assert {name: x.l2 for name, x in errors.items() if not x.l2 <= MOST.get(name, MOST_GRADIENT)} == {}
