"""A decay fed as a number between 0 and 1: growth, its onset, and which tensors survive."""

import math

import numpy as np
import pytest
import torch

from flakit import chunk_rwkv6
from flakit.cases import log_space
from flakit.cases.log_space import FED, GRADIENTS, inputs, law, picture, run, show
from flakit.figures.canvas import Cell
from flakit.figures.style import NAN
from tests.figures.test_plots import has_colour

SMALL = dict(T=190, V=8)  # the onset is a matter of rows, so that few columns do


@pytest.fixture(scope="module")
def grown():
    """Six seeds of the story, (law, run)."""
    made = [inputs("sigmoid", seed=seed, **SMALL) for seed in range(6)]
    return [(law(x["w"]), run(x)) for x in made]


def agree(predicted, measured):
    return abs(predicted - measured) <= 3


def test_law_predicts_the_onset_to_three_tokens(grown):
    for predicted, found in grown:
        assert agree(predicted, found.onset)
        assert 157 <= found.onset <= 164


def test_a_law_with_a_wrong_constant_is_rejected(grown):
    for (_, found), seed in zip(grown, range(6), strict=True):
        w = inputs("sigmoid", seed=seed, **SMALL)["w"]
        assert not agree(88.72 / w.mean().item(), found.onset)  # the mean row instead of the largest
        assert not agree(law(w * 88.72 / 80), found.onset)  # overflow at e^80
        assert not agree(law(w[..., :1]), found.onset)  # one row instead of all


def test_only_the_bonus_has_a_sane_gradient():
    found = run(inputs("sigmoid", T=256, V=8))
    assert found.finite["du"] == 1.0 and found.nan["dw"] > 0.99
    assert all(0.5 < found.finite[name] < 0.9 for name in ("o", "dr", "dk", "dv"))
    assert not found.state[found.onset :].isfinite().any() and found.state[: found.onset].isfinite().all()


def test_sizes_of_the_story():
    found = run(inputs("sigmoid", T=151))
    for t, size in ((50, 1e12), (100, 8e23), (150, 2e35)):
        assert found.output[t].log10().item() == pytest.approx(math.log10(size), abs=0.5)


def test_float64_only_postpones_it():
    x = inputs("sigmoid", T=256, B=1, H=2, V=8)
    found = run(x, torch.float64)
    assert found.onset is None and law(x["w"], torch.float64) is None
    assert all(share == 1.0 for share in found.finite.values())
    assert 58 < found.state[-1].log10() < 64
    assert 1200 < law(x["w"].repeat(1, 8, 1, 1), torch.float64) < 1420


@pytest.mark.parametrize("fed", ["logsigmoid", "-exp"])
def test_the_cures_stay_finite(fed):
    x = inputs(fed, T=256, B=1, H=2, V=8)
    found = run(x)
    assert law(x["w"]) is None and found.onset is None
    assert set(found.finite.values()) == {1.0} and found.state.max() < 100
    assert chunk_rwkv6(**x).o.isfinite().all()


def test_the_operator_refuses_the_fault():
    with pytest.raises(ValueError, match="w: "):
        chunk_rwkv6(**inputs("sigmoid", T=8, B=1, H=1, K=8))
    assert not log_space.refused(torch.zeros(1, 2, 1, 4))


def test_reproduce():
    rows = {row.what: row for row in log_space.reproduce()}
    state = rows["first t with a non-finite state"]
    assert abs(state.measured - state.law) <= 3 and abs(state.measured - state.recorded) <= 3
    late = rows["an estimate of it that comes late: 88.72 / mean of w"]
    assert late.measured == pytest.approx(late.recorded, abs=1) and 1.07 < late.measured / state.measured < 1.13
    assert rows["the script: share of dw that is NaN"].measured == 255 / 256
    assert rows["the script: share of du that is finite"].measured == 1.0
    assert all(rows[f"first t, fed {fed}"].measured == math.inf for fed in FED if fed != "sigmoid")
    assert all(row.agrees is not False for row in rows.values())


def test_the_script_leaves_the_last_token_of_dw_alone():
    found = log_space.script()
    assert found["dw"][:, :, -1].eq(0).all() and found["dw"][:, :, :-1].isnan().all()
    assert found["du"].isfinite().all() and not found["o"].isfinite().all()
    assert log_space.script("logsigmoid", T=200)["dw"].isfinite().all()


def test_a_setting():
    rows = {row.what: row for row in log_space.show(fed="sigmoid", bias=1.0, T=128).rows}
    onset = rows["first t with a non-finite state"]
    assert onset.agrees and onset.law < 130 and rows["refused by flakit's operators"].measured
    assert not onset._replace(law=onset.law + 5).agrees
    assert all(row.agrees is not False for row in log_space.show(fed="-exp", T=40).rows)


def test_inputs():
    x = inputs("-exp", B=1, T=5, H=2, K=3, V=4)
    shapes = dict.fromkeys("rkw", (1, 5, 2, 3)) | {"v": (1, 5, 2, 4), "u": (2, 3)}
    assert {name: tuple(t.shape) for name, t in x.items()} == shapes
    other = inputs("logsigmoid", B=1, T=5, H=2, K=3, V=4)
    assert torch.equal(x["r"], other["r"])
    assert torch.allclose(other["w"], torch.nn.functional.logsigmoid((-x["w"]).log()), atol=1e-5)
    assert set(run(x).finite) == {"o", *GRADIENTS}


# --- the picture ----------------------------------------------------------------------------------------------------

SETTING = dict(fed="sigmoid", bias=0.5, T=160, K=8, dtype="float32", seed=3)


def test_it_shows_what_is_measured():
    shown = show(**SETTING)
    rows = {row.what: row for row in shown.rows}
    assert rows["first t with a non-finite state"][2:4] == (shown.law, shown.onset)
    assert all(rows[f"share of {name} that is finite"].measured == share for name, share in shown.finite.items())
    found = run(inputs("sigmoid", bias=0.5, B=1, T=160, H=2, K=8, seed=3))
    assert shown.sizes.shape == shown.sums.shape == (160, 16)
    assert torch.equal(shown.sizes.amax(1), found.state) and not shown.sizes[shown.onset].isfinite().all()
    assert (shown.sums[-1].diff() <= 0).all()
    assert shown.sums[shown.law].max() > 88.72 > shown.sums[shown.law - 1].max()


def test_a_row_of_the_state_grows_like_its_sum_of_w():
    shown = show(**SETTING | {"dtype": "float64"})
    between = shown.sizes[-1].log() - shown.sums[-1]
    assert between.abs().max() < 4 and shown.sums[-1].max() - shown.sums[-1].min() > 8


def test_the_picture_marks_what_overflowed():
    drawn = picture.Picture(9.4)
    drawn.update(shown := show(**SETTING))
    assert drawn._lost.get_visible() and drawn._lost.get_x() == shown.onset - 0.5
    assert np.isnan(drawn._line.get_ydata()).sum() == 160 - shown.onset
    assert has_colour(drawn.canvas, NAN["facecolor"])
    broken = drawn.canvas.png()
    drawn.update(show(**SETTING | {"T": 40}))
    assert not drawn._lost.get_visible() and drawn._ax.get_xlim() == (-0.5, 39.5) and drawn.canvas.png() != broken
    drawn.update(show(**SETTING | {"dtype": "float64"}))
    assert "float64" in drawn._end_words.get_text() and drawn._ax.get_ylim()[1] > 308


def test_its_sentence_changes_with_the_law():
    def said(**setting):
        return picture.Picture(6.0).say(show(**SETTING | setting))

    end = law(inputs("sigmoid", bias=0.5, B=1, T=160, H=2, K=8, seed=3)["w"])
    assert f"Nothing has overflowed in {end - 4} tokens" in said(T=end - 4)
    assert "Only du, which never meets it, is finite as a whole" in said()
    assert "Finite as a whole: dk, dv, du." in said(T=end + 5)
    assert "multiplies the rows" in said(T=9) and "what was written fades" in said(fed="-exp")


def test_its_arithmetic():
    drawn, shown = picture.Picture(9.4), show(**SETTING)
    end = drawn.arithmetic(shown, Cell("size", 0, shown.onset))
    assert "the largest number in the state: inf (above 3.403e+38, where float32 ends)" in end
    one = float(shown.sums[1, 2])
    assert f"row 3 of 16 (the quickest first), token 1: e^(sum of w) = e^{one:.4g} = {math.exp(one):.1e}" in (
        drawn.arithmetic(shown, Cell("rows", 2, 1))
    )
    assert drawn.arithmetic(shown, Cell("shares", 5, 0)) == "du: 100% finite, 0% NaN, 0% infinite"
