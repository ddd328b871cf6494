"""A mask after the exponential: a right output, a gradient of NaN, and the decay at which that begins."""

import math

import numpy as np
import pytest
import torch

from flakit.cases import laws, masking
from flakit.cases.masking import MASKS, TENSORS, law, onset, run, show, weights
from flakit.cases.masking.picture import Picture
from flakit.numerics.errors import compare
from flakit.numerics.inputs import inputs

STEP = 0.01


def chunk_of(C, decay):
    return inputs("rwkv6", T=C, H=1, K=4, decay=decay, dtype=torch.float64)


@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize("mask", ["multiply", "where", "before"])
def test_weights_are_the_decay_between_two_tokens(mask, exclusive):
    w = chunk_of(9, "logsigmoid")["w"][:, :, 0]
    got = weights(w, mask, exclusive=exclusive)[0]
    for i in range(9):
        for j in range(9):
            between = w[0, j + 1 : i + (not exclusive)].sum(0).exp() if j < i + (not exclusive) else torch.zeros(4)
            assert torch.allclose(got[i, j], between.double(), atol=1e-14)


@pytest.mark.parametrize("mask", ["multiply", "where"])
def test_all_masks_agree_at_mild_decay(mask):
    x = chunk_of(32, "logsigmoid")
    right, other = run(x, "before"), run(x, mask)
    assert all(compare(other[name], right[name]).l2 < 1e-14 for name in TENSORS)


def test_without_a_mask_the_output_is_another():
    x = chunk_of(32, "gla")
    assert compare(run(x, "none")["o"], run(x, "before")["o"]).l2 > 0.1


def test_beyond_the_onset_the_output_is_right_and_the_gradient_nan():
    x = inputs("rwkv6", T=32, H=2, K=8, decay=-2.8)
    right, faulty = run(x, "before"), run(x, "where")
    assert all(y.isfinite().all() for y in right.values())
    assert {name for name, y in faulty.items() if not y.isfinite().all()} == {"dw"}
    assert faulty["dw"].isnan().any()
    assert all(torch.equal(faulty[name], right[name]) for name in ("o", "dr", "dk", "dv"))
    assert all(y.isfinite().all() for y in run(x | {"w": x["w"] * 2.75 / 2.8}, "where").values())


def first_bad(mask, C, exclusive, tensor):
    """The first |w| of a sweep at which the tensor is not finite."""
    x = inputs("rwkv6", T=C, H=1, K=1, decay=-1.0)
    x |= {name: x[name].sign() for name in "rkv"}
    n = 88.7 / C
    for w in np.arange(0.8 * n, 1.3 * n, STEP):
        if not run({**x, "w": x["w"] * w}, mask, exclusive=exclusive)[tensor].isfinite().all():
            return w
    return math.inf


def agree(predicted, measured):
    return predicted == measured if math.inf in (predicted, measured) else -1e-4 <= measured - predicted <= STEP


@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("mask", MASKS)
def test_law_predicts_the_onset_to_one_step(mask, C, exclusive):
    for tensor in ("o", "dw"):
        predicted = law(mask, tensor=tensor, chunk=C, exclusive=exclusive)
        assert agree(predicted, first_bad(mask, C, exclusive, tensor)), tensor


def test_a_law_with_a_wrong_constant_is_rejected(monkeypatch):
    measured = first_bad("where", 32, True, "dw")
    assert agree(law("where"), measured)
    assert not agree(law("where", chunk=33), measured) and not agree(law("where", chunk=31), measured)
    monkeypatch.setitem(laws.LN_MAX, torch.float32, 87.34)  # where exp begins to be subnormal
    assert not agree(law("where"), measured)


def test_reproduce():
    rows = {row.what: row for row in masking.reproduce()}
    assert len(rows) == 12
    for row in rows.values():
        assert row.measured == pytest.approx(row.law, rel=2e-3), row
        assert math.isnan(row.recorded) or row.law == pytest.approx(row.recorded, rel=1e-3), row
    assert rows["C = 32, where, after exp: dw"].measured == pytest.approx(88.72 / 32, rel=2e-3)
    told = rows["C = 32, where, after exp: dw, read after the decay"]
    assert (told.recorded, told.measured) == pytest.approx((88.72 / 31, 88.72 / 31), rel=2e-3)


def test_onset_is_measured_for_every_tensor():
    assert onset("before") == dict.fromkeys(TENSORS, math.inf)
    assert {name for name, at in onset("where", chunk=16).items() if at < math.inf} == {"dw"}
    assert {name for name, at in onset("multiply", chunk=16).items() if at < math.inf} == set(TENSORS)


@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize("w", [-0.5, -2.9])
@pytest.mark.parametrize("mask", MASKS)
def test_shows_what_is_measured(mask, w, exclusive):
    """The weights and their gradient, summed over outputs less over keys, are the decay's gradient that `run` finds."""
    shown = show(w=w, chunk=32, mask=mask, exclusive=exclusive)
    x = inputs("rwkv6", T=32, H=1, K=1, decay=w)
    x |= {name: x[name].sign() for name in "rkv"}
    found = run(x, mask, exclusive=exclusive)
    assert torch.equal(
        weights(x["w"][0, :, 0], mask, exclusive=exclusive)[..., 0].nan_to_num(), shown.kept.nan_to_num()
    )
    assert shown.finite == {name: bool(y.isfinite().all()) for name, y in found.items()}
    assert shown.finite["dw"] == bool(shown.gradient.isfinite().all()) == (-w < law(mask, exclusive=exclusive))
    if shown.finite["dw"]:
        of_output, of_key = shown.gradient.sum(1), shown.gradient.sum(0)
        later = of_output.flip(0).cumsum(0).flip(0)
        dw = (torch.cat((later[1:], later[:1] * 0)) if exclusive else later) - of_key.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(found["dw"][0, :, 0, 0], dw, rtol=1e-4, atol=1e-4 * float(dw.abs().max()))


def test_the_sentence_changes_sides_where_the_law_says():
    picture, limit = Picture(9.4), law("where")
    said = {
        (mask, factor): picture.say(show(w=-factor * limit, chunk=32, mask=mask))
        for mask in MASKS
        for factor in (0.99, 1.01)
    }
    assert said["where", 0.99].startswith("All is finite") and "dw is lost" in said["where", 1.01]
    assert said["multiply", 0.99].startswith("All is finite") and "the output is lost" in said["multiply", 1.01]
    assert "sees the future" in said["none", 0.99] and "the output is lost" in said["none", 1.01]
    assert said["before", 1.01].startswith("The mask comes first")
