"""Padding behind packed sequences that nobody writes: the law of the weight's gradient, the cure, our operators."""

import math

import pytest
import torch

from flakit.cases import unwritten_rows as case
from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs

SIZES = [(100, 28), (400, 112), (60, 196)]  # tokens, padding


def error(**knobs):
    (row,) = case.show(**knobs).rows
    return row


@pytest.mark.parametrize(("tokens", "padding"), SIZES)
@pytest.mark.parametrize("times", [0.1, 1.0, 1e4])
def test_law_predicts_the_error_of_the_weight_gradient(tokens, padding, times):
    rows = [error(tokens=tokens, padding=padding, times=times, seed=seed) for seed in range(4)]
    mean = math.exp(sum(math.log(row.measured) for row in rows) / len(rows))
    assert mean == pytest.approx(case.law(tokens, padding, "an earlier tensor", times), rel=0.15)
    assert all(row.agrees for row in rows)


WRONG_LAWS = {
    "the share of rows": lambda tokens, padding: padding / tokens,
    "the number of rows": lambda tokens, padding: padding**0.5,
    "no rows": lambda tokens, padding: 0.0,
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    rows = [error(tokens=t, padding=p)._replace(law=WRONG_LAWS[wrong](t, p)) for t, p in SIZES]
    assert not all(row.agrees for row in rows)


def test_only_the_padding_is_wrong_and_zeros_repair_it():
    shown = case.show(tokens=60, padding=20, memory="NaN", times=1.0, zeroed=False, seed=0)
    assert shown.lost[60:].all() and not shown.lost[:60].any()
    assert torch.equal(shown.dk[:60], case.written(60)) and shown.computed.isnan().all()
    repaired = case.show(tokens=60, padding=20, memory="NaN", times=1.0, zeroed=True, seed=0)
    assert torch.equal(repaired.computed, repaired.true) and not repaired.lost.any()


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_our_operators_make_the_true_weight_gradient(form):
    x = inputs("rwkv6", T=60, H=1, K=case.CHANNELS, cu_seqlens=[0, 20, 47])
    dk = evaluate("rwkv6", x, form=form)["dk"][0, :, 0]
    assert torch.equal(case.weight_gradient(dk), case.weight_gradient(torch.cat((dk[:47], torch.zeros(13, 16)))))
    assert dk[:47].any()
