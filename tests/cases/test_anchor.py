"""Every anchor scheme against float64 where it is finite, and its law against the measured onset where it ends."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flakit.cases import anchor
from flakit.cases.anchor import SCHEMES, exponents, law, limits, onset, run
from flakit.cases.laws import LN_MAX
from flakit.cases.masking import MASKS
from flakit.figures.canvas import Cell
from flakit.numerics.errors import compare
from flakit.numerics.evaluate import cotangents, truth
from flakit.numerics.inputs import inputs
from flakit.numerics.sweep import sweep
from tests.cases import drawing

ALL = list(SCHEMES)
ANCHORED = [name for name in ALL if name != "dyadic"]
FLOAT32 = 1e-6


def errors(x, scheme, **knobs):
    exact = truth("rwkv6", x)
    found = run(x, scheme, **knobs).tensors
    assert found.keys() == exact.keys()
    return {name: compare(found[name], exact[name]).l2 for name in exact}


# --- right where it is finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 15, 64, 65, 100])
@pytest.mark.parametrize("scheme", ALL)
def test_all_schemes_agree_with_float64_at_mild_decay(scheme, T):
    x = inputs("rwkv6", B=2, T=T, H=1, K=8, V=12, initial_state=True)
    assert max(errors(x, scheme).values()) < FLOAT32
    assert max(errors(x | {"scale": 1.0}, scheme, chunk=32, block=8).values()) < FLOAT32


@pytest.mark.parametrize("decay", [-8.0, -50.0, "spikes", "inf-spikes", "forget"], ids=str)
def test_dyadic_is_right_for_every_decay(decay):
    assert max(errors(inputs("rwkv6", T=100, H=1, K=16, decay=decay), "dyadic").values()) < FLOAT32


@pytest.mark.parametrize("scheme", ["previous-row", "pairwise"])
def test_right_anchors_are_finite_at_every_uniform_decay_but_their_dw_is_noise(scheme):
    found = errors(inputs("rwkv6", T=100, H=1, K=16, decay=-50.0), scheme)
    assert max(found[name] for name in ("o", "dr", "dk", "dv", "du")) < FLOAT32
    assert 1e6 < found["dw"] < math.inf


@pytest.mark.parametrize("scheme", ANCHORED)
def test_differences_of_cumulative_sums_do_not_survive_minus_infinity(scheme):
    x = inputs("rwkv6", T=64, H=1, K=16, decay="inf-spikes")
    assert not run(x, scheme).finite["o"] and limits(scheme, x)["o"] == 0.0


def test_differences_of_large_sums_lose_digits_that_local_products_keep():
    x = inputs("rwkv6", T=64, H=1, K=16, decay="spikes")
    assert 1e-5 < errors(x, "pairwise")["o"] < 1e-1
    assert errors(x, "dyadic")["o"] < FLOAT32


# --- bug A and its first repair -------------------------------------------------------------------------------------


def one_token(T, row, value, channel=slice(None)):
    x = inputs("rwkv6", T=T, H=1, K=64, decay=-0.01)
    x["w"][:, row, :, channel] = value
    return x


@pytest.mark.parametrize(
    ("scheme", "T", "row", "w"),
    [
        ("first-row", 64, 16, -88.7),  # just below the limit of bug A
        *(("first-row", T, row, -500.0) for T, row in ((64, 17), (64, 15), (64, 0), (128, 64))),
        *((scheme, 64, 16, -500.0) for scheme in ("previous-row", "pairwise", "dyadic")),
    ],
)
def test_one_token_that_an_anchor_survives(scheme, T, row, w):
    assert all(run(one_token(T, row, w), scheme).finite.values())


def test_bug_a_just_above_its_limit():
    found = run(one_token(64, 16, -88.8, channel=0), "first-row")
    assert {name for name, ok in found.finite.items() if not ok} == {"o", "dr", "dv", "dw"}
    assert found.tensors["o"][:, 16].isnan().all() and found.tensors["o"][:, 17:].isfinite().all()
    assert found.non_finite["o"].nonzero()[:, 1].unique().tolist() == [16]
    assert found.tensors["dr"].isinf().nonzero().tolist() == [[0, 16, 0, 0]] and not found.tensors["dr"].isnan().any()
    assert found.non_finite["dv"].nonzero()[:, 1].unique().tolist() == list(range(16))
    assert not found.tensors["dv"].isnan().any()
    assert found.tensors["dw"][0, 16, 0, 0].isnan()


@pytest.mark.parametrize("row", [16, 32, 48, 80])
def test_bug_a_minds_the_first_row_of_every_block_but_a_chunks_first(row):
    assert run(one_token(128, row, -88.8), "first-row").non_finite["o"].nonzero()[:, 1].unique().tolist() == [row]


def test_the_first_repair_failed_across_chunks_and_only_in_the_backward_pass():
    fine, broken = (run(inputs("rwkv6", T=128, H=1, K=64, decay=w), "previous-row-across") for w in (-1.38, -1.40))
    assert all(fine.finite.values())
    assert {name for name, ok in broken.finite.items() if not ok} == {"dr", "dw"}
    assert broken.tensors["dr"][:, 64].isnan().all()
    assert all(run(inputs("rwkv6", T=64, H=1, K=64, decay=-1.40), "previous-row-across").finite.values())


# --- the law against the measurement --------------------------------------------------------------------------------

STEP = 0.01  # of |w|, in units of the interval that is swept

SWEPT = {  # setting: (scheme, knobs, T, the interval of |w| that is swept)
    "start anchor": ("none", {}, 64, (1.2, 1.6)),
    "start anchor, T = 100": ("none", {}, 100, (1.2, 1.6)),
    "start anchor, T = 40": ("none", {}, 40, (2.0, 2.4)),
    "start anchor, C = 32": ("none", {"chunk": 32}, 64, (2.5, 3.0)),
    "start anchor, bfloat16": ("none", {"dtype": torch.bfloat16}, 64, (1.2, 1.6)),
    "start anchor, float16": ("none", {"dtype": torch.float16}, 64, (0.14, 0.20)),
    "start anchor, multiply": ("none", {"mask": "multiply"}, 64, (1.2, 1.6)),
    "bug A": ("first-row", {}, 64, (88.0, 89.0)),
    "bad repair": ("previous-row-across", {}, 128, (1.2, 1.6)),
    "bad repair, C = 32": ("previous-row-across", {"chunk": 32}, 64, (2.5, 3.0)),
    "first row on the diagonal": ("block-start", {}, 64, (5.4, 6.6)),
    "first row on the diagonal, 8 rows": ("block-start", {"block": 8}, 64, (11.5, 16.0)),
    "first row on the diagonal, float16": ("block-start", {"dtype": torch.float16}, 64, (0.6, 0.8)),
    "middle": ("middle", {}, 64, (9.4, 11.4)),
    "middle, row 7": ("middle", {"row": 7}, 64, (10.6, 13.0)),
    "middle, row 12": ("middle", {"row": 12}, 64, (6.0, 8.0)),
    "pairwise, masked after exp": ("pairwise", {"mask": "where"}, 64, (1.2, 1.6)),
    "pairwise, multiplied": ("pairwise", {"mask": "multiply"}, 64, (1.2, 1.6)),
    "row before, masked after exp": ("previous-row", {"mask": "where"}, 64, (5.2, 5.8)),
}


def agree(predicted: float, measured: float, step: float) -> bool:
    """The first bad point of a sweep lies at the law or at most one step beyond it."""
    return (
        predicted == measured if math.inf in (predicted, measured) else 0 <= measured - predicted + 1e-4 <= step + 2e-4
    )


def measure(scheme, knobs, T, low, high):
    x = inputs("rwkv6", T=T, H=1, K=16, decay=-1.0)
    step = STEP * (high - low)
    found = sweep(lambda w: run(x | {"w": w * x["w"]}, scheme, **knobs).tensors, over={"w": np.arange(low, high, step)})
    return x, step, {name: float(np.nan_to_num(found.onset("w", name), nan=math.inf)) for name in found.tensors}


@pytest.mark.parametrize("setting", SWEPT)
def test_law_predicts_every_tensors_onset_to_one_step(setting):
    scheme, knobs, T, (low, high) = SWEPT[setting]
    x, step, measured = measure(scheme, knobs, T, low, high)
    predicted = {name: limit if limit < high else math.inf for name, limit in limits(scheme, x, **knobs).items()}
    assert any(limit < math.inf for limit in predicted.values())
    for name in predicted:
        assert agree(predicted[name], measured[name], step), (name, predicted[name], measured[name])


@pytest.mark.parametrize("planted", ["87.34 for 88.72", "one token too few", "one token too many", "no operand"])
def test_a_law_with_a_wrong_constant_is_rejected(planted, monkeypatch):
    x, step, measured = measure("middle", {}, 64, 9.4, 11.4)
    assert agree(law("middle", x, tensor="dr"), measured["dr"], step)
    tensor, scheme = "dr", "middle"
    if planted == "87.34 for 88.72":  # where exp begins to be subnormal, not where it overflows
        monkeypatch.setitem(LN_MAX, torch.float32, 87.34)
    elif planted == "no operand":
        x, tensor = {**x, "r": x["r"].sign(), "k": x["k"].sign()}, "dk"
    else:
        scheme = replace(SCHEMES["middle"], diagonal=7 if planted == "one token too few" else 9)
    assert not agree(law(scheme, x, tensor=tensor), measured[tensor], step)


@pytest.mark.parametrize("decay", ["rwkv6-wide", "logsigmoid", "uniform"])
@pytest.mark.parametrize("scheme", ["none", "first-row", "block-start", "middle"])
def test_law_predicts_the_onset_of_any_decay(scheme, decay):
    for seed in range(3):
        x = inputs("rwkv6", T=100, H=2, K=16, decay=decay, seed=seed)
        predicted, measured = limits(scheme, x), onset(x, scheme)
        for name, limit in predicted.items():
            assert measured[name] == limit == math.inf or 0.99 < measured[name] / limit < 1.002, (name, seed)


@pytest.mark.parametrize("mask", ["multiply", "none"])
def test_law_is_good_to_a_few_percent_where_the_future_is_multiplied(mask):
    x = inputs("rwkv6", T=100, H=2, K=16, decay=-1.0)
    predicted, measured = limits("middle", x, mask=mask), onset(x, "middle", mask=mask)
    assert predicted["o"] < 0.6 * limits("middle", x)["o"]
    assert measured == pytest.approx(predicted, rel=0.03)


def test_laws_in_numbers():
    """The table of the definitions: ln(max) over the longest run of tokens in one exponent, operands of order 1."""
    assert law("none", tensor="dk") == pytest.approx(88.7228 / 64, abs=1e-3)
    assert law("none", tensor="o") == pytest.approx(88.7228 / 63, abs=1e-3)
    assert law("block-start") == pytest.approx(88.7228 / 15, abs=1e-3)
    assert law("middle", row=7) == pytest.approx(88.7228 / 8, abs=1e-3)
    assert law("middle", row=8, tensor="dr") == pytest.approx(88.7228 / 9, abs=1e-3)
    assert law("middle", row=8, tensor="o") == pytest.approx(88.7228 / 8, abs=1e-3)
    assert law("first-row") == pytest.approx(88.7228, abs=1e-3)
    assert law("block-start", dtype=torch.float16) == pytest.approx(11.0899 / 15, abs=1e-3)
    assert law("previous-row-across", tensor="dr") == pytest.approx(88.7228 / 64, abs=1e-3)
    assert law("pairwise") == law("dyadic") == law("previous-row") == math.inf
    assert law("none", T=40, tensor="o") == pytest.approx(88.7228 / 39, abs=1e-3)
    assert law("none", tensor="du") == law("none", tensor="final_state") == math.inf


def test_reproduce_agrees_with_its_law_and_with_the_case_file():
    for row in anchor.reproduce():
        assert row.measured == pytest.approx(row.law, rel=2e-3), row
        assert row.measured == pytest.approx(row.recorded, rel=5e-3), row  # operands differ with seed and size


# --- RWKV7 and GSA --------------------------------------------------------------------------------------------------

OTHERS = ["rwkv7", "gsa"]
UNREACHED = {"rwkv7": set(), "gsa": {"final_hk", "final_hv"}}


@pytest.mark.parametrize("op", OTHERS)
@pytest.mark.parametrize("scheme", ALL)
def test_all_schemes_serve_all_operators(scheme, op):
    for T in (15, 100):
        x = inputs(op, T=T, H=2, K=8, V=12, initial_state=True)
        exact, found = truth(op, x), run(x, scheme, op=op).tensors
        assert found.keys() == exact.keys()
        assert max(compare(found[name], exact[name]).l2 for name in exact) < 2 * FLOAT32


@pytest.mark.parametrize("op", OTHERS)
@pytest.mark.parametrize("scheme", ANCHORED)
def test_law_predicts_their_onsets(scheme, op):
    for T, dtype in ((64, torch.float32), (100, torch.float32), (40, torch.float16)):
        x = inputs(op, T=T, H=2, K=16, decay=-1.0)
        # The law takes GSA's p as it is at strong decay. Some percent of an operand are nothing beside the 88.72 of
        # float32, and more than half a percent of the 11.09 of float16.
        late = 1.007 if (op, dtype) == ("gsa", torch.float16) else 1.002
        for mask in {SCHEMES[scheme].masks[0], "where"}:
            how = {"op": op, "mask": mask, "dtype": dtype}
            predicted, measured = limits(scheme, x, **how), onset(x, scheme, **how)
            assert predicted.keys() == measured.keys()
            for name, limit in predicted.items():
                same = measured[name] == limit == math.inf or 0.993 < measured[name] / limit < late
                assert same, (T, dtype, mask, name, limit, measured[name])
            if scheme == "none":
                assert {name for name, limit in predicted.items() if limit == math.inf} == UNREACHED[op]


@pytest.mark.parametrize(("op", "scheme", "tensor"), [("rwkv7", "none", "o"), ("gsa", "pairwise", "dq")])
def test_a_law_that_takes_their_reads_for_the_other_kind_is_rejected(op, scheme, tensor, monkeypatch):
    x = inputs(op, T=64, H=1, K=16, decay=-1.0)
    how = {"op": op, "mask": "where"}
    measured = onset(x, scheme, tolerance=1e-4, **how)[tensor]
    assert measured == pytest.approx(law(scheme, x, tensor=tensor, **how), rel=2e-3)
    monkeypatch.setattr(anchor.OPERATORS[op], "meets", (False,) * len(anchor.OPERATORS[op].meets))
    assert measured != pytest.approx(law(scheme, x, tensor=tensor, **how), rel=2e-3)


@pytest.mark.parametrize("row", [16, 48])
def test_bug_a_by_what_reads(row):
    """GSA's reads are inclusive and immune; RWKV7's r is, its a is not, and what a finds goes into everything."""
    lost = {}
    for op, decay in (("rwkv7", "w"), ("gsa", "g")):
        x = inputs(op, T=64, H=1, K=16, decay=-0.01)
        x[decay][:, row] = -88.7
        assert all(run(x, "first-row", op=op).finite.values())
        x[decay][:, row] = -89.0
        lost[op] = {name for name, ok in run(x, "first-row", op=op).finite.items() if not ok}
        x[decay][:, row] = -500.0
        assert all(run(x, "previous-row", op=op).finite.values())
    assert lost["gsa"] == set() and {"o", "final_state", "da", "db"} <= lost["rwkv7"]
    x = inputs("rwkv7", T=64, H=1, K=4, decay=-0.01)
    x["w"][:, row] = -500.0
    largest = {query: exponents(x, "first-row", op="rwkv7", query=query)[0].nan_to_num(0.0).max() for query in "ra"}
    assert largest["r"] <= 0 and largest["a"] == 500.0


def test_a_bounded_decay_is_safe_in_float32_and_overflows_float16_after_18_tokens():
    bound = -0.6065306597
    for scheme in ALL:
        x = inputs("rwkv7", T=100, H=1, K=16, decay=bound)
        assert all(run(x, scheme, op="rwkv7").finite.values()) and law(scheme, x, op="rwkv7") > 2.2
    for T, fits in ((18, True), (19, False)):
        x = inputs("rwkv7", T=T, H=1, K=16, decay=bound)
        x |= {name: x[name].sign() for name in "rk"}
        assert run(x, "none", op="rwkv7", dtype=torch.float16).finite["o"] is fits
        assert (law("none", x, op="rwkv7", dtype=torch.float16) > 1) is fits


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme, mask",
    [
        (scheme, mask)
        for scheme in ("none", "middle", "pairwise", "previous-row")
        for mask in SCHEMES[scheme].masks
        if mask != "none"
    ],
)
def test_masks_agree_where_all_is_finite(scheme, mask):
    assert max(errors(inputs("rwkv6", T=50, H=1, K=8), scheme, mask=mask).values()) < FLOAT32


def test_without_a_mask_the_future_is_seen():
    x = inputs("rwkv6", T=64, H=1, K=8)
    changed = x | {"v": torch.cat((x["v"][:, :40], -x["v"][:, 40:]), 1)}
    for mask, sees in (("none", True), ("where", False)):
        past, other = (run(y, "none", mask=mask).tensors["o"][:, :40] for y in (x, changed))
        assert (not torch.equal(past, other)) is sees


def test_masked_after_exp_only_the_gradients_are_lost():
    found = run(inputs("rwkv6", T=64, H=1, K=8, decay=-3.0), "pairwise", mask="where")
    assert {name for name, ok in found.finite.items() if not ok} == {"dr", "dk", "dw"}
    assert all(run(inputs("rwkv6", T=64, H=1, K=8, decay=-3.0), "pairwise", mask="before").finite.values())


# --- the pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ALL)
def test_the_two_exponents_of_a_pair_add_up_to_its_decay(scheme):
    x = inputs("rwkv6", T=100, H=2, K=4)
    query, key = exponents(x, scheme, head=1, index=1, channel=2)
    w = torch.nn.functional.pad(x["w"][0, 64:, 1, 2], (0, 28)).double()
    for i in range(64):
        for j in range(i):
            assert (query[i, j] + key[i, j]).item() == pytest.approx(w[j + 1 : i].sum().item(), abs=1e-5)


def test_what_the_exponents_show():
    x = inputs("rwkv6", T=64, H=1, K=4, decay=-2.0)
    query, key = exponents(x, "first-row")
    assert query[16, 0] == query[48, 40] == 2.0  # one token's decay, the wrong way round
    assert query[17, 0] == 0.0 and (key.nan_to_num(-1.0) <= 0).all()
    assert query[0:16, 16:].isnan().all() and query[3, 5].isnan()  # blocks of the future are never computed
    query, key = exponents(x, "none")
    assert key[0, 63] == 128.0 and query.max() == 0.0
    for scheme in ("previous-row", "pairwise", "dyadic"):
        assert all((picture.nan_to_num(0.0) <= 0).all() for picture in exponents(x, scheme))
    assert exponents(x, "pairwise", mask="where")[0][0, 63] == 128.0


def test_every_mask_is_offered_somewhere():
    assert {mask for scheme in SCHEMES.values() for mask in scheme.masks} == set(MASKS)


# --- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("scheme", "op"),
    [*((name, "rwkv6") for name in anchor.KERNEL_ANCHORS), ("first-row", "rwkv7"), ("first-row", "gsa")],
)
def test_kernel_and_twin_agree_element_by_element(scheme, op):
    mild, strong = inputs(op, T=70, H=2, K=8, V=12), inputs(op, T=128, H=1, K=8, decay=-1.4)
    for x in (mild, strong, anchor.spike(16, -88.7, op=op, K=8), anchor.spike(16, -89.0, op=op, K=8)):
        twin, kernel = (run(x, scheme, op=op, backend=backend) for backend in ("torch", "triton"))
        for name, y in twin.tensors.items():
            assert torch.equal(kernel.non_finite[name], twin.non_finite[name]), name
            assert compare(kernel.tensors[name].nan_to_num(), y.nan_to_num()).l2 < 2 * FLOAT32, name


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bug_a_and_its_repair_in_the_kernel_begin_where_the_law_says():
    rows = [row for row in anchor.reproduce() if row.what.startswith("the kernel")]
    assert len(rows) == 2 and all(row.agrees for row in rows)


@pytest.mark.gpu
def test_bug_a_on_a_gpu():
    for w, fine in ((-88.7, True), (-89.0, False)):
        x = {name: y.cuda() for name, y in anchor.spike(16, w, K=16).items()}
        assert run(x, "first-row", backend="triton").finite["o"] is fine
        assert run(x, "previous-row", backend="triton").finite["o"]


# --- one setting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "lost"),
    [
        ({}, {"o", "dr", "dv", "dw"}),
        ({"w": -88.7}, set()),
        ({"row": 17, "w": -500.0}, set()),
        ({"scheme": "previous-row", "w": -500.0}, set()),
        ({"scheme": "previous-row-across", "row": None, "w": -1.4, "T": 128}, {"dr", "dw"}),
        ({"op": "gsa"}, set()),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else " ".join(sorted(x)) or "none",
)
def test_one_setting(knobs, lost):
    rows = anchor.show(**knobs).rows
    assert all(row.agrees for row in rows)
    assert {row.what.split()[0] for row in rows if row.measured is False} == lost
    planted = [row._replace(law=row.law * 87.34 / 88.72) for row in rows if row.what.endswith("|w|")]
    assert not any(row.agrees for row in planted if row.law < math.inf)


def test_no_decay_at_all_loses_nothing():
    assert all(row.agrees and row.measured for row in anchor.show(w=0.0).rows if " finite at " in row.what)


# --- the picture ----------------------------------------------------------------------------------------------------

BUG = dict(w=-88.8, row=16, scheme="first-row", op="rwkv6", T=64, chunk=64, block=16)
REPAIR = dict(w=-1.4, row=None, scheme="previous-row-across", op="rwkv6", T=128, chunk=64, block=16)


def drawn(**setting):
    return drawing.drawn(anchor, **BUG | setting)


@pytest.mark.parametrize("setting", [{}, REPAIR, {"scheme": "none", "row": None, "w": -1.4}, {"op": "rwkv7"}], ids=str)
def test_it_shows_what_is_measured(setting):
    _, shown = drawn(**setting)
    said = {row.what.split()[0]: row.measured for row in anchor.show(**BUG | setting).rows if " finite at " in row.what}
    assert said == shown.finite
    for name, finite in shown.finite.items():
        if name in shown.nan:
            assert bool((shown.nan[name] + shown.inf[name]).any()) != finite or setting.get("T") == 128, name


def test_the_anchor_as_read_and_as_meant():
    _, shown = drawn()
    read, meant = shown.as_read[0], shown.as_meant[0]
    assert (read.rows, read.row, meant.row) == (range(16, 32), 16, 15)
    assert read.n == pytest.approx(-88.8) and meant.n == 0
    fatal = shown.weights.isinf()
    assert fatal[16, :16].all() and fatal.sum() == 16 and (shown.true[16, :16] == 1).all()
    assert shown.read[16, :16] == pytest.approx(88.8) and shown.key[16, :16] == pytest.approx(-88.8)
    repaired = drawn(scheme="previous-row")[1]
    assert repaired.as_read == repaired.as_meant and max(repaired.read.nan_to_num(0).max(), 0) == 0
    _, across = drawn(**REPAIR)
    assert across.first == 64 and across.as_read[0].n == pytest.approx(-89.6, rel=1e-5) and across.as_meant[0].n == 0
    assert across.alone[0] == pytest.approx(89.6, rel=1e-5)


def test_the_picture_points_at_the_fatal_row_and_at_what_it_costs():
    made, shown = drawn()
    assert [list(arrow.get_ydata()) for arrow in made._arrows.values()] == [[16], [16], [], [16]]
    lost = {name: (shown.nan[name] + shown.inf[name]).nonzero()[:, 0].tolist() for name in shown.nan}
    assert lost == {"o": [16], "dr": [16], "dk": [], "dv": list(range(16)), "dw": list(range(17))}
    fine, _ = drawn(w=-88.7)
    assert not any(len(arrow.get_ydata()) for arrow in fine._arrows.values())
    assert fine.canvas.png() != made.canvas.png()


@pytest.mark.parametrize("scheme", ["none", "first-row", "block-start"])
def test_its_sentence_changes_with_the_law(scheme):
    row = 16 if scheme == "first-row" else None
    end = 88.7228 / {"none": 64, "first-row": 1, "block-start": 15}[scheme]
    for side, words in ((0.999, "every factor is finite"), (1.001, "it is infinite, though no weight is above 1")):
        made, shown = drawn(scheme=scheme, row=row, w=-end * side)
        assert words in made.say(shown)
    for scheme in ("previous-row", "pairwise", "dyadic"):
        made, shown = drawn(scheme=scheme, row=None, w=-500.0)
        assert "No exponent is above 0" in made.say(shown) and all(shown.finite.values())


def test_its_arithmetic():
    made, shown = drawn()
    assert made.arithmetic(shown, Cell("weights", 16, 3)) == (
        "output 16, key 3: e^88.8 · e^-88.8 = inf · 2.72e-39 = inf (true: 1)"
    )
    assert made.arithmetic(shown, Cell("read", 20, 3)).startswith("output 20, key 3: e^0 · e^-88.8 = 1 · 2.72")
    assert made.arithmetic(shown, Cell("sums", 16, 0)).endswith("as read the anchor of rows 16 … 31")
    assert made.arithmetic(shown, Cell("sums", 15, 0)).endswith("as meant the anchor of rows 16 … 31")
    assert made.arithmetic(shown, Cell("lost", 3, 3)) == "dv of token 3: 100% NaN, 0% infinite"
    assert "masked afterwards" in made.arithmetic(drawn(scheme="none")[1], Cell("read", 3, 9))
    assert "0 · inf = NaN" in made.arithmetic(drawn(**REPAIR)[1], Cell("alone", 0, 0))


# --- as pages compute it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("op", anchor.TENSORS)
def test_rows_beyond_a_length_are_padding(op, scheme):
    x, length = inputs(op, T=100, H=1, K=16, decay=-1.5), 100
    arriving = cotangents(op, x)[0]
    found = run(x, scheme, op=op).tensors
    padded = {name: F.pad(y, (0, 0, 0, 0, 0, 28)) if y.ndim == 4 else y for name, y in x.items()}
    padded["length"] = torch.tensor(length)
    again = run(padded, scheme, op=op, arriving=F.pad(arriving, (0, 0, 0, 0, 0, 28))).tensors
    for name, expected in found.items():
        got = again[name][:, :length] if expected.ndim == 4 and expected.shape[1] == length else again[name]
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
