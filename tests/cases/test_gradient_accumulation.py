"""The factor is the accumulation, whoever mixes; each cure is one; the label count; clipping cures nothing."""

import math

import pytest
import torch

from flakit.cases import gradient_accumulation as case
from flakit.figures.canvas import Cell
from flakit.models.accumulation import check_gradient_accumulation, check_initial_loss
from tests.cases import drawing

WITHIN = 1e-4


def measured(contract, accumulation, mixer="rwkv7"):
    row = case.measured(contract, accumulation, mixer)
    assert row.rest < WITHIN  # a multiple of the right gradient, and nothing else
    return row


def agrees(law, row):
    return abs(row.loss_factor / law - 1) < WITHIN and abs(row.grad_factor / law - 1) < WITHIN


@pytest.mark.parametrize("mixer", ["rwkv7", "attention"])
@pytest.mark.parametrize("contract", case.CONTRACTS)
def test_law_and_measurement_agree(contract, mixer):
    for accumulation in (1, 4, 16):
        assert agrees(case.law(accumulation, contract), measured(contract, accumulation, mixer))


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2])
def test_law_and_measurement_agree_with_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            assert agrees(4, measured("takes **kwargs", 4))
    finally:
        torch.set_num_threads(before)


def test_a_wrong_law_would_be_rejected():
    row = measured("takes **kwargs", 4)
    batch = case.SEQUENCES // 4
    for planted in (batch * 4, 1, 1 / 4, 4 * 15 / 16):  # as reported; no fault; divided twice; counted too
        assert not agrees(planted, row)
    assert not agrees(1, measured("uses num_items_in_batch", 4))


def test_every_row_of_the_story_agrees_and_the_told_factor_does_not():
    rows = case.reproduce()
    assert all(row.agrees for row in rows)
    told = {row.what: row.recorded / row.measured for row in rows if not math.isnan(row.recorded)}
    off = {what for what, factor in told.items() if abs(factor - 1) > 2e-3}
    assert off == {"takes **kwargs, accumulation 4: loss, as reported"}


@pytest.mark.parametrize("contract", [name for name in case.CONTRACTS if name != "takes **kwargs"])
def test_the_check_passes_every_cure_and_rejects_the_fault(contract):
    check_gradient_accumulation(case.step(contract), (1, 4))
    with pytest.raises(AssertionError, match="accumulation 4: loss 4 times, gradient 4 times"):
        check_gradient_accumulation(case.step(), (1, 4))


def test_counting_shifted_labels_makes_the_contract_right():
    made, tokens = case.model("uses num_items_in_batch"), case.sequences()
    right = case.plain_step(made, tokens, 4)
    assert case.trainer_step(made, tokens, 4, shifted=True) == pytest.approx(right, rel=1e-5)
    tokens[:, 0] = case.IGNORED  # what a collator can do about it
    counted = tokens.ne(case.IGNORED).sum()
    assert counted == case.SEQUENCES * (case.T - 1)


def test_the_initial_loss_tells():
    check_initial_loss(case.step()(1)[0], case.VOCAB)
    with pytest.raises(AssertionError, match="got 4 times that"):
        check_initial_loss(case.step()(4)[0], case.VOCAB)


def test_clipping_spreads_a_nan_and_drops_what_an_inf_leaves():
    before, after = case.clipped(math.nan)
    assert before.isnan().sum() == 1 and after.isnan().all()
    before, after = case.clipped(math.inf)
    assert after.isnan().sum() == 1 and (after.nan_to_num() == 0).all()
    _, after = case.clipped(5.0)
    assert after.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_the_law_is_exact_at_one_setting_of_the_knobs():
    rows = case.show(accumulation=2, contract="uses num_items_in_batch", mixer="attention").rows
    assert [row.law for row in rows] == [15 / 16] * 2 and all(row.agrees for row in rows)


@pytest.mark.full
def test_adamw_does_not_see_the_factor_and_sgd_does():
    right, wrong = (case.training(contract, steps=6) for contract in ("plain forward", "takes **kwargs"))
    assert [step.loss for step in wrong] == pytest.approx([step.loss for step in right], rel=1e-3)
    assert [step.reported for step in wrong] == pytest.approx([4 * step.loss for step in right], rel=1e-3)
    right, wrong = (case.training(c, steps=3, optimizer="SGD") for c in ("plain forward", "takes **kwargs"))
    assert wrong[-1].loss < 0.9 * right[-1].loss  # at first a larger step is a better one
    hidden = case.training(steps=3, optimizer="SGD", clip=0.1)
    plain = case.training("plain forward", steps=3, optimizer="SGD", clip=0.1)
    assert [step.loss for step in hidden] == pytest.approx([step.loss for step in plain], rel=1e-3)


# --- the picture ----------------------------------------------------------------------------------------------------


def drawn(accumulation=4, contract="takes **kwargs", mixer="rwkv7"):
    return drawing.drawn(case, accumulation=accumulation, contract=contract, mixer=mixer)


@pytest.mark.parametrize("contract", case.CONTRACTS)
def test_it_shows_what_is_measured(contract):
    _, shown = drawn(4, contract)
    loss, gradient = case.show(accumulation=4, contract=contract).rows
    now = shown.cuts[4]
    assert (loss.measured, gradient.measured) == (now.loss_factor, now.grad_factor)
    assert loss.law == shown.laws[4] and now.loss / shown.plain == now.loss_factor
    assert len(shown.returned) == 4 and sum(shown.added) == pytest.approx(now.loss, rel=1e-6)
    plain, ours = shown.gradients
    assert torch.allclose(ours, shown.laws[4] * plain, rtol=1e-2, atol=1e-7) and plain.abs().max() > 1e-4


def test_the_picture_shows_the_law_for_every_number_of_parts():
    made, shown = drawn()
    assert made._slope.get_ydata()[0] == pytest.approx(4e-7)
    assert [made._law.get_ydata()[n] / shown.plain for n in range(5)] == pytest.approx(case.PARTS)
    assert made._borders.get_xdata().tolist()[::3] == [0.5, 1.5, 2.5]
    before = made.canvas.png()
    made.update(drawn(4, "plain forward")[1])
    assert made._law.get_ydata() == pytest.approx([shown.plain] * 5) and made.canvas.png() != before


def test_its_sentence_changes_with_the_law():
    for contract in case.CONTRACTS:
        for n in (1, 4):
            made, shown = drawn(n, contract)
            said, law = made.say(shown), case.law(n, contract)
            assert ("nobody divides" in said) == (law == n > 1)
            assert ("as the plain loop does" in said) == (law == 1)
            assert ("instead of" in said) == (law != 1)


def test_its_arithmetic():
    made, shown = drawn(4, "plain forward")
    assert made.arithmetic(shown, Cell("parts", 1, 2)) == (
        f"part 3: {shown.returned[2]:.4g} / 4 = {shown.returned[2] / 4:.4g} is added"
    )
    made, shown = drawn(4, "uses num_items_in_batch")
    assert "the sum of its 4 sequences' losses over all 256 labels" in made.arithmetic(shown, Cell("parts", 0, 0))
    assert "0.9375 times the plain loop's" in made.arithmetic(shown, Cell("in parts", 0, 1))
