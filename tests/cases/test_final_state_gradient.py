"""A final state without a gradient: the lost share against its law, for every operator, with no error raised."""

import pytest

from flakit.cases import final_state_gradient as case
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS

SETTINGS = [("rwkv6-wide", 100), ("logsigmoid", 64), (-0.1, 100), ("none", 64)]


@pytest.fixture(scope="module")
def measured():
    """[(inputs, lost share of each gradient)]"""
    made = [inputs("rwkv6", T=T, H=4, K=32, decay=decay) for decay, T in SETTINGS]
    return [(x, case.errors(x)) for x in made]


def agree(predicted, found):
    tolerance = {"dk": 0.1, "dv": 0.1, "dw": 0.2}  # dw is a product of two random matrices
    return all(found[name] == pytest.approx(predicted[name], rel=tolerance[name]) for name in tolerance)


def test_law_predicts_the_lost_share(measured):
    for x, found in measured:
        assert agree(case.law(x), found)
        assert max(found["dr"], found["du"]) < 1e-6


def test_a_wrong_law_is_rejected(measured):
    for words, change in {
        "another scale": lambda x: x | {"scale": 1.0},
        "twice the scale": lambda x: x | {"scale": 2 * 32**-0.5},
        "half the length": lambda x: x | {"w": x["w"][:, :50]},
    }.items():
        assert not all(agree(case.law(change(x)), found) for x, found in measured), words


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_can_lose_it_and_says_nothing(op):
    x = inputs(op, T=20, K=8, initial_state=True)
    right, lost = (case.errors(x, op, on="state", fault=fault) for fault in (False, True))
    assert max(right.values()) < 1e-5
    assert {round(error, 6) for name, error in lost.items() if name not in ("dr", "du", "dq")} == {1.0}
    assert max(case.errors(x, op, on="o").values()) < 1e-5
    assert max(case.errors(x, op, on="both").values()) > 0.1


def test_a_loss_on_the_state_gives_zeros():
    x = inputs("rwkv6", T=5, K=4, requires_grad=True)
    case.ignoring(OPERATORS["rwkv6"].forms["recurrent"])(**x, output_final_state=True).final_state.sum().backward()
    assert all(not tensor.grad.any() for tensor in x.values())
    assert case.ignoring(OPERATORS["rwkv6"].forms["recurrent"])(**x).final_state is None


def test_reproduce():
    rows = {row.what: row for row in case.reproduce()}
    for name in ("dk", "dv", "dw"):
        assert 0.39 <= rows[f"loss on both (told: 39-46%): {name} off by"].measured <= 0.46
        assert rows[f"loss on the state alone: {name} off by"].measured == 1.0


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="on: expected one of o, state, both, got 'final'"):
        case.errors(inputs("rwkv6", T=2, K=2), on="final")
