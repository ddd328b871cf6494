"""Padding that forgets nothing: right where it is finite, and lost where the law says, row by row and slot by slot."""

import math

import numpy as np
import pytest
import torch

from flakit.cases import padding as case
from flakit.cases.laws import LN_MAX
from flakit.figures.canvas import Cell
from flakit.numerics.errors import compare
from flakit.numerics.evaluate import truth
from flakit.numerics.inputs import inputs
from tests.cases import drawing

OPS = list(case.KEY_GRADIENT)
LAST = {"gsa": "dg", "rwkv6": "dw"}  # from running sums: noise at strong decay, whatever the padding
FLOAT32 = 2e-6


def errors(x, form, op):
    exact, found = truth(op, x), case.run(x, form, op=op)
    return {name: compare(found[name], exact[name]).l2 for name in found}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 15, 20, 63, 64, 76, 100])
@pytest.mark.parametrize("form", case.FORMS)
def test_every_form_is_right_at_mild_gates(form, T, op):
    found = errors(inputs(op, T=T, H=2, K=8), form, op)
    if T == 1:  # nothing to forget: the truth is 0, and the difference of two equal sums need not be
        del found[LAST[op]]
    assert max(found.values()) < FLOAT32


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [12, 40, 100, 120])
def test_the_right_form_needs_no_limit(T, op):
    found = errors(case.inputs(T, -20.0, op=op), "right", op)
    assert max(error for name, error in found.items() if name != LAST[op]) < FLOAT32
    assert found[LAST[op]] < math.inf


# --- the law --------------------------------------------------------------------------------------------------------


def finite(T, gate, form, op="gsa"):
    x = case.inputs(T, -gate, op=op, K=2, M=2)
    return bool(case.run(x, form, op=op)[case.KEY_GRADIENT[op]].isfinite().all())


@pytest.mark.parametrize("form", ["chunk", "blocks"])
@pytest.mark.parametrize("op", OPS)
def test_law_holds_for_every_length_of_the_last_chunk(op, form):
    for R in range(0, 64, 1 if op == "gsa" else 5):
        limit = case.law(64 + R, form)
        if limit == math.inf:
            assert finite(64 + R, 1e4, form, op), R
        else:
            assert finite(64 + R, 0.999 * limit, form, op) and not finite(64 + R, 1.001 * limit, form, op), R


def test_law_in_numbers():
    assert [case.law(T) for T in (64, 128, 3072, 24000)] == [math.inf] * 4
    assert case.law(3000) == pytest.approx(88.72 / 48, abs=1e-3)
    assert case.law(12000) == pytest.approx(88.72 / 32, abs=1e-3)
    for R in range(17, 64):
        assert case.law(640 + R) == pytest.approx(88.7228 / min(R, 48), abs=1e-3)
    for R in range(1, 17):
        assert case.law(640 + R) >= 5.5 and case.law(640 + R, "blocks") == math.inf
    assert case.law(100, chunk=32, block=8) == pytest.approx(88.7228 / 4, abs=1e-3)


WRONG_LAWS = {
    "87.34 for 88.72": lambda R: 87.34 / min(R, 48),
    "the whole tail": lambda R: 88.72 / R,
    "whole blocks": lambda R: 88.72 / min(48, 16 * math.ceil(R / 16)),
    "never up to 16": lambda R: math.inf if R <= 16 else 88.72 / min(R, 48),
}


@pytest.mark.parametrize("planted", WRONG_LAWS)
def test_a_wrong_law_is_rejected(planted):
    def agrees(law):
        measured = {R: case.onset(64 + R, tolerance=1e-3) for R in (8, 20, 56)}
        return all(law(R) == pytest.approx(at, rel=2e-3) for R, at in measured.items())

    assert agrees(lambda R: case.law(64 + R))
    assert not agrees(WRONG_LAWS[planted])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", case.FORMS)
@pytest.mark.parametrize("T", [20, 76, 104, 120, 128])
def test_law_says_which_element_is_lost_with_uneven_gates(T, form, op):
    for seed, size in ((0, 1.0), (1, 2.0), (2, 4.0), (3, 8.0)):
        x = inputs(op, T=T, H=2, K=8, decay="logsigmoid", seed=seed)
        decay = "g" if op == "gsa" else "w"
        x[decay] = x[decay] * size * torch.linspace(0.1, 1.5, x[decay].shape[-1])
        expected = case.predicted(x, form, op=op)
        assert torch.equal(~case.run(x, form, op=op)[case.KEY_GRADIENT[op]].isfinite(), expected), size
    assert expected.any() == (form == "chunk" and T != 128 or form == "blocks" and T not in (76, 128))
    assert not expected.all()


def test_only_the_slots_that_forget_are_lost():
    lost = ~case.run(case.inputs(120, -2.0, uneven=0.25))["ds"].isfinite()
    assert lost[0, 96:112, 0, :4].all() and lost.sum() == 16 * 4


def test_the_forward_pass_and_the_other_gradients_stay_finite():
    for op, safe in (
        ("gsa", {"o", "dq", "dk", "dv", "final_hk", "final_hv"}),
        ("rwkv6", {"o", "dr", "dv", "du", "final_state"}),
    ):
        found = case.run(case.inputs(120, -5.6, op=op), op=op)
        assert {name for name, x in found.items() if x.isfinite().all()} == safe
        assert found[case.KEY_GRADIENT[op]].isnan().any()


def test_the_story():
    rows = case.reproduce()
    lost = [row for row in rows if row.what.endswith("tokens lost")]
    assert all(row.law == row.measured and row.recorded in (row.measured, "NaN") for row in lost), lost
    assert {row.measured for row in lost if "T = 24000" in row.what} == {"none"}
    for T, gates in case.RECORDED.items():
        for gate in gates:
            found = case.run(case.inputs(T, gate, K=4, M=4), "right")
            assert all(x.isfinite().all() for x in found.values()), (T, gate)


# --- the stop-gap ---------------------------------------------------------------------------------------------------


def test_the_clamps_are_no_bound():
    assert case.bound() == pytest.approx(-2.5, abs=1e-6) and case.bound("rwkv6") == -12.0
    for op in OPS:
        assert -case.bound(op) > case.law(3000)
        assert not case.clamped(case.inputs(120, -50.0, op=op), case.bound(op), op=op).finite
    assert case.clamped(case.inputs(120, -50.0), -1.84).finite


def test_what_the_clamp_costs():
    x = case.inputs(100, -8.0)
    costs = [case.clamped(x, at, "right") for at in (-8.0, -2.5, -1.8, -0.5)]
    assert costs[0].error < FLOAT32 and 0.05 < costs[1].error < costs[2].error < costs[3].error
    assert costs[1].kept == pytest.approx(0.082, abs=1e-3)


# --- the kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.parametrize("form", case.FORMS)
@pytest.mark.parametrize(("T", "op"), [(20, "gsa"), (120, "gsa"), (104, "rwkv6")])
def test_kernel_and_twin_agree_number_for_number(T, op, form):
    for gate in (-0.3, -8.0):
        x = case.inputs(T, gate, op=op, uneven=0.5, K=8, M=8)
        twin, kernel = (case.run(x, form, op=op, backend=backend) for backend in ("torch", "triton"))
        assert torch.equal(~kernel[case.KEY_GRADIENT[op]].isfinite(), case.predicted(x, form, op=op))
        for name, y in twin.items():
            assert torch.equal(kernel[name].isfinite(), y.isfinite()), name
            assert compare(kernel[name].nan_to_num(), y.nan_to_num()).l2 < FLOAT32, name


def test_the_limit_is_that_of_the_format():
    assert case.law(3000, dtype=torch.float16) == pytest.approx(LN_MAX[torch.float16] / 48)


# --- the picture ----------------------------------------------------------------------------------------------------

STORY = dict(T=120, gate=-1.88, form="chunk", op="gsa", uneven=1.0, chunk=64, block=16)


def drawn(**setting):
    return drawing.drawn(case, **STORY | setting)


def test_it_shows_what_is_measured():
    for setting in ({}, {"op": "rwkv6", "T": 76, "gate": -9.0}, {"form": "blocks", "T": 100, "block": 8}):
        lost, begins, *_ = case.show(**STORY | setting).rows
        _, shown = drawn(**setting)
        gone = (~shown.gradient.isfinite()).any(0).nonzero()[:, 0] + shown.first
        assert lost.measured == (f"{gone[0]} … {gone[-1]}" if len(gone) else "none")
        assert begins.law == shown.limits[shown.real - 1] and begins.measured == shown.onset
        op = {**STORY, **setting}["op"]
        assert shown.finite["o"] and shown.finite[case.KEY_GRADIENT[op]] == (len(gone) == 0)


def test_the_exponent_of_an_empty_row_is_that_of_the_law():
    _, shown = drawn()
    assert shown.real == 56 and shown.first == 64
    assert shown.gates[:56] == pytest.approx(-1.88 * np.arange(1, 57), rel=1e-5) and not shown.gates[56:].any()
    assert shown.exponents[2, 56:] == pytest.approx(48 * 1.88) and shown.exponents[:, :56].nan_to_num().max() <= 0
    empty = [drawn(form=form)[1].gates[57:] for form in ("blocks", "right")]
    assert not empty[0][:7].any() and (empty[1] == -math.inf).all()
    assert drawn(form="blocks", T=100)[1].gates[48:].isnan().all()


def test_the_picture_leads_from_the_infinite_rows_to_the_lost_tokens():
    fine, _ = drawn(gate=-1.84)
    assert not any(arrow.get_visible() for arrow in fine._arrows)
    first, shown = drawn()
    arrow, *others = [arrow for arrow in first._arrows if arrow.get_visible()]
    assert not others and arrow.xy1 == (59.5, 2) and arrow.xy2 == (39.5, -0.5)
    assert shown.gradient[:, 32:48].isnan().all() and shown.gradient.isnan().sum() == 16 * 16
    assert first._words.get_text() == "$e^{90.2}$ = inf" and fine._words.get_text() == "$e^{88.3}$ = 2.3e+38"
    assert sum(arrow.get_visible() for arrow in drawn(gate=-5.6)[0]._arrows) == 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", case.FORMS)
def test_its_sentence_changes_with_the_law(form, op):
    name = case.KEY_GRADIENT[op]
    for T in (20, 76, 120, 128):
        limit = case.law(T, form)
        if limit == math.inf:
            made, shown = drawn(T=T, form=form, op=op, gate=-900.0)
            assert "lost" in made.say(shown) and "above" not in made.say(shown)
        else:
            before, after = (drawn(T=T, form=form, op=op, gate=-limit * by) for by in (0.999, 1.001))
            assert "nothing is lost" in before[0].say(before[1])
            assert f"Lost: {name}, {LAST[op]}; the output is finite." in after[0].say(after[1])


def test_its_arithmetic():
    made, shown = drawn()
    assert made.arithmetic(shown, Cell("factors", 2, 60)) == (
        "row 124, behind the end, for keys 96 … 111: 0 · e^90.24 = 0 · inf = NaN (true: 0)"
    )
    assert "0 · e^60.16 = 0 · 1.34e+26 = 0" in made.arithmetic(shown, Cell("factors", 1, 60))
    assert "token 113 for keys 96 … 111: e^(gi - n) = e^-3.76 = 0.02328" in made.arithmetic(
        shown, Cell("factors", 2, 49)
    )
    lost, right = made.arithmetic(shown, Cell("gradient", 3, 40)), case.run(case.inputs(120, -1.88), "right")["ds"]
    assert lost == f"ds of token 104, slot 3: NaN (true: {float(right[0, 104, 0, 3]):.4g})"
    assert "finite up to |gate| = 1.848" in made.arithmetic(shown, Cell("limits", 0, 55))
