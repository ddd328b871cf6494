"""The small cases: each law against measurement, and against planted wrong ones."""

import functools
import math

import pytest
import torch

from flakit.cases import blind_measure, clamping, future_anchor, masking, nan_guard, weak_test, wrong_head_anchor
from flakit.cases.laws import LN_MAX
from flakit.cases.registry import find
from flakit.numerics.errors import compare, relative_l2
from flakit.numerics.inputs import inputs as make_inputs
from flakit.ops.rwkv7 import reference

CASES = [blind_measure, clamping, future_anchor, nan_guard, weak_test, wrong_head_anchor]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.rpartition(".")[2])
def test_law_and_measurement_agree(case):
    rows = case.reproduce()
    assert any(row.agrees for row in rows)
    assert [row for row in rows if row.agrees is False] == []


# --- an error measure that cannot see ---


def accepted(truth, tolerance=blind_measure.TOLERANCE):
    return blind_measure.run(truth, blind_measure.ratios(truth.double().flatten()), tolerance)


def test_the_accepted_share_is_the_tolerance_squared():
    for tolerance in (0.005, 0.02, 0.1):
        truth = torch.randn(2**14, 64, generator=torch.Generator().manual_seed(0))
        found = accepted(truth, tolerance)
        assert found.share == pytest.approx(blind_measure.law(tolerance), rel=1.5 / math.sqrt(found.lost))
        assert found.share != pytest.approx(tolerance, rel=0.5)
        assert found.errors.l2 <= tolerance


def test_other_measures_see_a_single_lost_element():
    found = accepted(torch.ones(2**10, 64))
    assert (found.lost, found.errors.worst) == (1, 1.0) and found.errors.worst_row > 0.1


def test_the_law_is_of_many_elements():
    """Where it lets go of four, a first element of more than twice the RMS makes that none."""
    few = blind_measure.show(tolerance=0.016, size=2**14).rows
    assert 4 < blind_measure.law(0.016) * 2**14 < 5 and [row.agrees for row in few] == [None, None, None]
    assert 10 < blind_measure.law(0.026) * 2**14 < 12
    many = [blind_measure.show(tolerance=0.026, size=2**14, seed=seed).rows for seed in range(40)]
    assert sum(all(row.agrees for row in rows) for rows in many) >= 39


@pytest.mark.parametrize("tolerance", [0.005, 0.02, 0.3])
def test_a_blind_measure_shows_what_is_measured(tolerance):
    shown = blind_measure.show(tolerance=tolerance, size=2**14, seed=3)
    share, *seen = shown.rows
    lost, of_all, errors = shown.accepted
    assert of_all == share.measured and int(shown.lost.sum()) == lost
    assert torch.equal(shown.lost.flatten().nonzero().flatten(), torch.arange(lost))
    # The curves are `compare` of a tensor whose first n elements are 0.
    truth = torch.randn(2**8, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for at in range(0, len(shown.counts), 9):
        got = truth.flatten().clone()
        got[: shown.counts[at]] = 0
        found = compare(got.view(truth.shape), truth)
        three = [float(curve[at]) for curve in (shown.ratio, shown.worst_row, shown.worst)]
        assert three == pytest.approx([found.l2, found.worst_row, found.worst], rel=1e-12)


def test_a_measure_is_said_to_accept_where_the_law_lets_go_of_many():
    picture = find("blind_measure").picture.Picture(5.9)
    for tolerance in (0.002, 0.05, 0.3):
        said = picture.say(blind_measure.show(tolerance=tolerance, size=2**14))
        assert ("the test passes" in said) == (blind_measure.law(tolerance) * 2**14 > 10), tolerance
        assert ("none is accepted" in said) == (tolerance == 0.002), tolerance


# --- a guard that forgets ---


def lost(w, guard="d < 0"):
    """The number of pairs j < i whose weight is wrongly 0."""
    return int(((nan_guard.weights(w, guard) == 0) & (nan_guard.weights(w, "d <= 0") > 0)).sum())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("C", [1, 7, 64])
def test_law_counts_the_lost_pairs(C, share):
    w = nan_guard.chunk(C, share)
    assert lost(w) == nan_guard.law(w)
    assert lost(w, "d <= 0") == 0


def test_wrong_counts_are_rejected():
    w = nan_guard.chunk(64, 0.5)
    zeros = int((w == 0).sum())
    assert lost(w) not in (zeros, zeros * (zeros + 1) // 2, nan_guard.law(w.roll(1)), nan_guard.law(w[:32]))


def test_random_decays_hide_the_guard():
    w = -torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(nan_guard.weights(w), nan_guard.weights(w, "d <= 0"))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_guard_shows_what_is_measured(share):
    shown = nan_guard.show(C=48, share=share, w=-0.1, seed=3)
    pairs, off = (row.measured for row in shown.rows)
    assert torch.equal(shown.guarded, nan_guard.weights(shown.w)) and off == shown.off_by
    assert int((shown.right - shown.guarded > 0).sum()) == int(shown.lost.sum()) == pairs == lost(shown.w)
    assert torch.equal(shown.off > 0, shown.lost.any(-1))  # an output is off where one of its pairs is lost


def test_a_guard_is_said_to_forget_where_the_law_counts_pairs():
    picture, said = find("nan_guard").picture.Picture(9.4), {}
    for share in (0.0, 0.5, 1.0):
        shown = nan_guard.show(C=64, share=share, w=-0.1)
        said[nan_guard.law(shown.w)] = picture.say(shown)
    assert said[0].startswith("Something decays between any two tokens")
    assert said[71].startswith("Between 71 of 2016 pairs nothing decays")
    assert said[2016].startswith("Nothing decays anywhere")


# --- a clamp ---


read = pytest.mark.parametrize("exclusive", [True, False], ids=["read before the decay", "read after it"])


@read
@pytest.mark.parametrize("anchor", [0, 7, 16])
@pytest.mark.parametrize("w", [-0.1, -6.0, -8.0, -20.0, -200.0])
def test_law_predicts_the_error_of_a_clamp(w, anchor, exclusive):
    found, finite = clamping.show(w=w, anchor=anchor, exclusive=exclusive).rows
    assert found.agrees and finite.measured is True


@read
@pytest.mark.parametrize("anchor", [0, 1, 9])
def test_without_a_bound_the_weights_are_the_decays_between_two_tokens(anchor, exclusive):
    q, k = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = make_inputs("rwkv6", T=9, H=1, K=4, decay="logsigmoid", dtype=torch.float64)["w"][0, :, 0]
    true = masking.weights(w, "before", exclusive=exclusive)
    expected = torch.einsum("ic,jc,ijc->ij", q, k, true)
    for got in (
        clamping.exact(q, k, w, exclusive=exclusive),
        clamping.scores(q, k, w, anchor=anchor, exclusive=exclusive),
    ):
        torch.testing.assert_close(got, expected)


def test_a_clamp_begins_where_two_tokens_are_a_bound_apart():
    """Anchored before token 0 of 16, the last reader is 15 decays away, of itself or not."""
    for factor, off in ((0.999, False), (1.01, True)):
        assert (clamping.law(-factor * clamping.BOUND / 15) > 0) == off
        assert (clamping.show(w=-factor * clamping.BOUND / 15).rows[0].measured > 1e-12) == off


def test_another_bound_is_rejected():
    measured = clamping.show(w=-8.0).rows[0].measured
    for bound in (60.0, 95.0):
        assert measured != pytest.approx(clamping.law(-8.0, bound=bound), rel=0.1)
    assert measured != pytest.approx(clamping.law(-8.0, anchor=8), rel=0.1)


def test_an_error_below_rounding_is_none():
    """Of three tokens, one cut off: its weight is e^-87 instead of e^-100."""
    found, _ = clamping.show(w=-100.0, block=3, anchor=1).rows
    assert 0 < clamping.law(-100.0, block=3, anchor=1) < 1e-30 and found.agrees


def clamped(w, anchor=0, block=16, bound=clamping.BOUND):
    return clamping.show(w=w, block=block, anchor=anchor, bound=bound, K=64, seed=2)


@pytest.mark.parametrize(("w", "anchor"), [(-5.0, 0), (-8.0, 0), (-8.0, 15), (-50.0, 8)])
def test_a_clamp_shows_what_is_measured(w, anchor):
    shown = clamped(w, anchor)
    assert (shown.off, shown.finite) == tuple(row.measured for row in shown.rows)
    off = relative_l2(shown.computed, shown.right)  # with operands of size 1 that is the law itself
    assert off == pytest.approx(clamping.law(w, anchor=anchor), rel=1e-6, abs=1e-13)
    past = shown.exponents.sign() * (shown.exponents.abs() > shown.bound)
    # A key is written one place further on than its token reads, so that none stands before the first place.
    cut = [(i, place) for i in range(16) for place in range(1, i) if past[i] == past[place] != 0]
    assert [(i, j + 1) for i, j in shown.alike.nonzero().tolist()] == cut
    assert torch.equal(shown.alike, ((shown.computed - shown.right) > 0.9).tril(-1))


def test_a_clamp_is_said_to_harm_where_the_law_says_so():
    picture = find("clamping").picture.Picture(5.9)
    for w in (-1.0, -5.0, -5.9, -6.0, -6.4, -8.0, -100.0):
        said = picture.say(clamped(w))
        assert ("nothing is cut off" in said) == (clamping.law(w) == 0), w
        assert ("at full weight" in said) == (clamping.law(w) > 0.2), w
    assert "no score by more than rounding" in picture.say(clamped(-12.0, anchor=8))
    assert "come out too large" in picture.say(clamped(-5.9))
    assert "7 tokens on one side of the anchor, 6 on the other," in picture.say(clamped(-50.0, anchor=8))


# --- an anchor from the wrong head ---


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("H", [2, 3, 8])
def test_law_predicts_the_onset_of_a_wrong_head(H, spread):
    w = wrong_head_anchor.decays(16, H, spread=spread)
    found = wrong_head_anchor.onset(w)
    assert found == pytest.approx(wrong_head_anchor.law(w), rel=2e-3)
    assert found < wrong_head_anchor.onset(w, wrong=False) * 0.99
    assert found != pytest.approx(wrong_head_anchor.law(w, wrong=False), rel=0.01)


def test_one_head_hides_it_and_weak_decay_too():
    w = wrong_head_anchor.decays(16, 1)
    assert torch.equal(wrong_head_anchor.anchor(w.cumsum(0)), wrong_head_anchor.anchor(w.cumsum(0), wrong=False))
    assert wrong_head_anchor.show(H=4, w=-1.0).rows[-1].measured < 1e-6
    assert math.isinf(wrong_head_anchor.show(H=4, w=-8.0).rows[-1].measured)


def headed(w, H=4, block=16, spread=0.5):
    return wrong_head_anchor.show(H=H, block=block, spread=spread, w=w, seed=1)


@pytest.mark.parametrize("w", [-1.0, -4.0, -20.0])
@pytest.mark.parametrize("H", [1, 3, 5])
def test_an_anchor_of_another_head_shows_what_is_measured(H, w):
    shown = headed(w, H)
    logs = wrong_head_anchor.decays(16, H, spread=0.5) * -w
    q, k = torch.randn(2, *logs.shape, generator=torch.Generator().manual_seed(1))
    assert shown.rows[-1].measured == shown.off
    for wrong, each in ((True, shown.wrong), (False, shown.right)):
        made = wrong_head_anchor.scores(q, k, logs, wrong=wrong)
        assert torch.equal(each.scores.nan_to_num(), made.nan_to_num())
        # The places that are shown are those that are read.
        read = torch.stack([shown.g[token, head] for token, head in each.rows])
        assert torch.equal(read, wrong_head_anchor.anchor(logs.cumsum(0), wrong=wrong)[:, 0])
        assert torch.equal(each.exponents, shown.g - read)
        reach = float(each.exponents.abs().max())
        assert reach == pytest.approx(LN_MAX[torch.float32] / wrong_head_anchor.law(logs, wrong=wrong), rel=1e-6)


def test_the_wrong_anchor_is_said_to_break_where_the_law_says_so():
    picture, logs = find("wrong_head_anchor").picture.Picture(5.9), wrong_head_anchor.decays(16, 4)
    limit = wrong_head_anchor.law(logs)
    # The law is for operands of size 1; random ones of up to 4 move it by ln 4 of 88.
    assert "nothing shows" in picture.say(headed(-0.98 * limit, spread=0.0))
    broken = picture.say(headed(-1.02 * limit, spread=0.0))
    assert "scores are inf or NaN. With n as meant all are finite." in broken
    meant = wrong_head_anchor.law(logs, wrong=False)
    assert "With n as meant all are finite." in picture.say(headed(-0.98 * meant, spread=0.0))
    assert "all are finite" not in picture.say(headed(-1.02 * meant, spread=0.0))
    assert "the anchor is the right one" in picture.say(headed(-limit, H=1))


# --- an anchor from the future ---


def moved(anchor, P, T=16):
    """The largest change of an output before token P."""
    return future_anchor.show(anchor=anchor, P=P, T=T, block=16).largest


@pytest.mark.parametrize("anchor", future_anchor.ANCHORS)
@pytest.mark.parametrize("T", [6, 16])
def test_the_verdict_at_every_row(anchor, T):
    for P in range(T):
        change = moved(anchor, P, T)
        assert (change > 0) == future_anchor.law(anchor, P=P, T=T), P
        assert change < 1e-5


def test_a_law_for_another_row_is_rejected():
    verdicts = [moved("middle", P) > 0 for P in range(16)]
    assert verdicts != [future_anchor.law("middle", P=P, block=12) for P in range(16)]
    assert verdicts != [future_anchor.law("first", P=P) for P in range(16)]


@pytest.mark.parametrize(("anchor", "P", "T"), [("middle", 5, 16), ("middle", 8, 16), ("first", 5, 16), ("pair", 5, 6)])
def test_an_anchor_shows_what_is_measured(anchor, P, T):
    shown = future_anchor.show(anchor=anchor, P=P, T=T, block=16, seed=4)
    _, size = shown.rows
    assert shown.moved[:P].max().item() == size.measured == shown.largest
    assert (shown.moved[P:] > 0).all()
    assert (shown.w[0] != shown.w[1]).any(-1).nonzero().flatten().tolist() == [P]
    # A weight that moves before P is one that holds P's decays.
    assert (shown.own[0] != shown.own[1])[:P].any() == future_anchor.law(anchor, P=P, T=T)
    torch.testing.assert_close(torch.stack(shown.own), torch.ones(2, T, 32))


def test_the_past_is_said_to_move_where_the_law_says_so():
    picture = find("future_anchor").picture.Picture(5.9)
    for P in range(16):
        said = picture.say(future_anchor.show(anchor="middle", P=P, T=16, block=16))
        assert ("in rounding" in said) == future_anchor.law("middle", P=P), P
        assert ("same to the last bit" in said) == (P > 8), P


# --- a test that cannot fail ---


def forgotten(x, keep=3):
    return relative_l2(weak_test.forgetful(x, keep), reference.forward(**x)[0])


def test_a_forgetful_operator_passes_the_test_and_nothing_else():
    fast, real = (forgotten(weak_test.inputs(fast=which)) for which in (True, False))
    assert fast < weak_test.TOLERANCE < real / 10
    assert fast != pytest.approx(weak_test.law(2), rel=0.5) and fast != pytest.approx(weak_test.law(4), rel=0.5)


def test_keeping_every_token_is_right():
    x = weak_test.inputs(fast=False, T=12, K=8)
    torch.testing.assert_close(weak_test.forgetful(x, 12), reference.forward(**x)[0])
    assert forgotten(x, 11) > 0


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "real"])
def test_an_output_is_the_sum_of_what_comes_from_every_token(fast):
    x = weak_test.inputs(fast=fast, T=20, K=8)
    truth = reference.forward(**x)[0]
    for keep in (1, 3, 20):
        summed = torch.zeros_like(truth)
        for back, part in enumerate(weak_test.contributions(x, keep)):
            summed[:, back:] += part
        torch.testing.assert_close(summed, weak_test.forgetful(x, keep))
    only = {**x, "v": x["v"] * (torch.arange(20) == 15)[None, :, None, None]}
    part = weak_test.contributions(x, 5)[4][:, 15]  # of the output at 19, from 15
    torch.testing.assert_close(part, reference.forward(**only)[0][:, 19])


def test_a_weak_test_shows_what_is_measured():
    shown = weak_test.show(keep=2, K=16, T=64, seed=5)
    rows = weak_test.show(keep=2, K=16, T=64, seed=5).rows
    both = [weak_test.inputs(fast=fast, T=64, K=16, seed=5) for fast in (True, False)]
    assert shown.off == (rows[0].measured, rows[2].measured)
    assert shown.off == pytest.approx([forgotten(x, 2) for x in both], rel=1e-9)
    # Of the test's inputs all that is lost is nearly all of it the first token that is; of the model's it is not.
    assert shown.seen[0][2] == pytest.approx(shown.off[0], rel=0.05)
    assert shown.seen[1][2] < 0.8 * shown.off[1]


def test_the_test_is_said_to_pass_where_the_law_is_below_its_tolerance():
    picture = find("weak_test").picture.Picture(9.4)
    for keep in (1, 2, 3, 4):
        said = picture.say(weak_test.show(keep=keep, K=32, T=128))
        passes = weak_test.law(keep) < weak_test.TOLERANCE
        assert ("the test passes it" in said, "the test catches it" in said) == (passes, not passes)


@pytest.mark.parametrize("decay", ["rwkv7", "rwkv6-init", "uniform", "none", -0.01], ids=str)
def test_law_of_a_reset(decay):
    for every in (32, 64):
        x = make_inputs("rwkv7", T=192, K=32, decay=decay, dtype=torch.float64)
        off = relative_l2(weak_test.resetting(x, every), reference.forward(**x)[0])
        assert off == pytest.approx(weak_test.reset_law(x["w"], every), rel=0.15)
        assert off != pytest.approx(weak_test.reset_law(x["w"], 2 * every), rel=0.15)
        assert off != pytest.approx(weak_test.reset_law(2 * x["w"] - 0.02, every), rel=0.15)


# --- the kernels ---


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("H", [1, 3])
def test_wrong_head_kernel_and_twin_agree(H, spread):
    w = wrong_head_anchor.decays(16, H, spread=spread)
    for wrong in (True, False):
        limit = wrong_head_anchor.law(w, wrong=wrong)
        kernel = wrong_head_anchor.onset(w, wrong=wrong, tolerance=2e-2, backend="triton")
        assert kernel == pytest.approx(limit, rel=2e-2)
        q, k = torch.randn(2, *w.shape, generator=torch.Generator().manual_seed(0))
        twin, got = (wrong_head_anchor.scores(q, k, 2 * w, wrong=wrong, backend=name) for name in ("torch", "triton"))
        torch.testing.assert_close(got, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
@read
@pytest.mark.parametrize("anchor", [0, 8])
def test_clamping_kernel_and_twin_agree(anchor, exclusive):
    q, k = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    for w in (-0.5, -8.0, -50.0):
        decays = torch.full((16, 32), w)
        knobs = {"anchor": anchor, "exclusive": exclusive}
        twin, got = (clamping.scores(q, k, decays, **knobs, backend=name) for name in ("torch", "triton"))
        assert got.isfinite().all()
        torch.testing.assert_close(got, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("anchor", "P", "T"), [("middle", 5, 16), ("middle", 9, 16), ("middle", 5, 6), ("first", 5, 16)]
)
def test_future_anchor_kernel_and_law_agree(anchor, P, T, monkeypatch):
    monkeypatch.setattr(future_anchor, "outputs", functools.partial(future_anchor.outputs, backend="triton"))
    size = moved(anchor, P, T)
    assert (size > 0) == future_anchor.law(anchor, P=P, T=T) and size < 1e-5
