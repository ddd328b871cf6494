"""The case `decay_gradient`: dw by four formulas against float64, and the law of the digits that the identity loses."""

import math

import pytest
import torch

import flakit
from flakit.cases import decay_gradient as case
from flakit.cases.decay_gradient.picture import Picture
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import cotangents
from flakit.numerics.gradients import gradient_rows
from flakit.numerics.operators import operator
from flakit.ops.rwkv6 import reference


@pytest.fixture(scope="module")
def rows():
    return {row.what: row for row in case.reproduce()}


@pytest.mark.parametrize("T", [256, 1024, 4096])
def test_rounded_identity_gets_worse_with_length_and_direct_does_not(rows, T):
    rounded = rows[f"bfloat16, logsigmoid, T = {T}: identity-rounded"]
    assert rounded.measured == pytest.approx(rounded.recorded, rel=0.35)  # seeds differ by that much
    assert rounded.measured == pytest.approx(rounded.law, rel=0.1)
    assert rounded.measured != pytest.approx(case.law(-0.81, T), rel=0.1)  # the mean decay at every token
    direct = rows[f"bfloat16, logsigmoid, T = {T}: direct"]
    assert direct.measured == pytest.approx(direct.law, rel=0.05)
    assert direct.measured == pytest.approx(direct.recorded, rel=0.05)


def test_all_rows_of_the_story_agree(rows):
    assert all(row.agrees is not False for row in rows.values())
    for rounding in ("float16", "float32"):
        by_formula = [rows[f"{rounding}, logsigmoid, T = 1024: {name}"].measured for name in list(case.FORMULAS)[:3]]
        assert by_formula[0] < min(by_formula[1:]) * 1.01 and by_formula[2] > 10 * by_formula[0]


@pytest.mark.parametrize("setting", [("rwkv6-wide", 256), ("gsa", 256), ("rwkv6-init", 512)], ids=str)
def test_law_for_any_decay(setting):
    decay, T = setting
    row = next(row for row in case.show(decay=decay, T=T).rows if row.what.endswith("identity-rounded"))
    assert row.agrees and not row._replace(law=2 * row.law).agrees
    w = flakit.inputs("rwkv6", T=T, H=2, K=64, decay=decay)["w"]
    assert case.law_for(torch.full_like(w, -1.0)) == pytest.approx(case.law(-1.0, T), rel=0.02)


def test_unrounded_dr_and_dk_would_have_done_at_mild_decay():
    found = case.errors(T=1024)
    assert found["identity"] < 1.05 * found["direct"] < found["identity-rounded"] / 10


@pytest.mark.parametrize("w", [-8.0, -20.0, -50.0])
def test_law_predicts_the_noise_at_constant_decay(rows, w):
    tf32, float32 = (rows[f"float32, decay {w:g}, T = 256: dr, dk in {name}"] for name in ("tf32", "float32"))
    assert tf32.measured == pytest.approx(tf32.law, rel=0.35)
    assert tf32.measured != pytest.approx(2 * tf32.law, rel=0.35)  # one digit off would be seen
    assert 1 < float32.measured / float32.law < 4  # the running sums round too
    # Published recurrent kernels are as noisy as float32 makes them, published chunk kernels lie between.
    assert 0.5 < float32.recorded / float32.measured < 2
    assert float32.measured < tf32.recorded < tf32.measured


@pytest.mark.parametrize("w, T", [(-0.05, 128), (-0.5, 512), (-3.0, 128)])
def test_law_predicts_bfloat16(w, T):
    measured = case.errors(T=T, decay=w, seed=1)["identity-rounded"]
    assert measured == pytest.approx(math.hypot(case.law(w, T), 1.6e-3), rel=0.35)


@pytest.mark.parametrize("T", [256, 2048])
@pytest.mark.parametrize("w", [-0.1, -1.0, -2.5])
def test_the_same_rounded_operands_cancel_exactly(w, T):
    found = case.errors(T=T, decay=w, rounding="tf32")
    assert list(found) == list(case.FORMULAS)
    assert found["identity-same-operands"] < 2 * 2.0**-11  # one rounding of each operand, whatever T and w
    assert found["identity-rounded"] == pytest.approx(case.law(w, T, "tf32"), rel=0.35)
    assert found["identity-rounded"] > 3 * found["identity-same-operands"]


def test_operands_rounded_apart_do_not_cancel():
    x = flakit.inputs("rwkv6", T=256, K=64, decay=-2.5)
    do = cotangents("rwkv6", x)[0]
    r, k, v, w = (x[name] for name in "rkvw")
    exact = case.dw_by_formula(*(y.double() for y in (r, k, v, w, do)))["direct"]
    same, apart = (
        relative_l2(case.in_chunks(r, k, v, w, do, rounding="tf32", same=same), exact) for same in (True, False)
    )
    assert same < 1e-3 and apart > 10 * same
    # What is left to disagree is float32 accumulation, a few roundings of it amplified by e^|w|.
    assert relative_l2(case.in_chunks(r, k, v, w, do, rounding="float32"), exact) < 16 * math.exp(2.5) * 2.0**-24


def test_the_same_operands_are_for_mild_decay_only():
    assert case.errors(decay=-8.0, rounding="tf32")["identity-same-operands"] == math.inf


def test_published_kernels_are_recorded_or_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert case.published() == ("recorded on an H200, flash-linear-attention 0.6.0", case.PUBLISHED)
    monkeypatch.setattr(case, "published_rwkv6", lambda: ("0.6.0", operator("rwkv6")))
    label, found = case.published("cpu")
    assert label == "measured here, flash-linear-attention 0.6.0" and found.keys() == case.PUBLISHED.keys()
    assert max(error for errors in found.values() for error in errors.values()) < 1e-6  # ours have no such noise


@pytest.mark.parametrize("w", [-8.0, -20.0, -50.0])
def test_direct_loses_nothing(w):
    assert case.errors(decay=w, rounding="float32")["direct"] < 1e-6


def test_law_at_the_edges():
    assert case.law(-math.inf, 64) == math.inf
    assert case.law(-1e4, 64, "float32") == math.inf
    assert case.law(-1e-8, 64) < 1e-5


@pytest.mark.parametrize("state", [False, True], ids=["no state", "states"])
def test_all_formulas_are_the_same_in_exact_arithmetic(state):
    generator = torch.Generator().manual_seed(0)
    B, T, H, K, V = 2, 37, 2, 8, 5
    r, k, x = (torch.randn(B, T, H, K, generator=generator, dtype=torch.float64) for _ in range(3))
    v, do = (torch.randn(B, T, H, V, generator=generator, dtype=torch.float64) for _ in range(2))
    S0, dS = (torch.randn(B, H, K, V, generator=generator, dtype=torch.float64) if state else None for _ in range(2))
    w = -x.exp()
    got = case.dw_by_formula(r, k, v, w, do, initial_state=S0, dfinal_state=dS, rounding="float32")
    dw = reference.backward(r, k, v, w, torch.randn(H, K, dtype=torch.float64), None, S0, do, dS)[3]
    torch.testing.assert_close(got["direct"], dw)
    torch.testing.assert_close(got["identity"], dw)
    for chunk in () if state else (8, 64):
        torch.testing.assert_close(case.in_chunks(r, k, v, w, do, rounding="float64", chunk=chunk), dw)
    torch.testing.assert_close(got["identity-rounded"], dw, rtol=1e-3, atol=1e-4)


def test_everything_forgotten_leaves_no_gradient_but_noise():
    r, k, v, do = torch.randn(4, 1, 64, 1, 16, generator=torch.Generator().manual_seed(0))
    got = case.dw_by_formula(r, k, v, torch.full_like(r, -math.inf), do)
    assert got["direct"].eq(0).all()
    assert got["identity-rounded"].abs().max() > 1e-3


def test_round_to_tf32_keeps_eleven_digits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -3e38, 0.0, math.inf])
    expected = torch.tensor([1 + 2**-10, 1.0, 1 + 2**-9, x[3], 0.0, math.inf])
    expected[3] = case.round_to(x, "tf32")[3]
    assert case.round_to(x, "tf32").equal(expected)
    assert abs(case.round_to(x, "tf32")[3] / x[3] - 1) < 2**-11


def test_running_sums_beside_the_operators_own_dw():
    rows = gradient_rows(
        "rwkv6", others={"running sums": case.running_sums}, T=256, H=1, K=32, decay=-4.0, dtype=torch.bfloat16
    )
    errors = {row["form"]: row["l2"] for row in rows if row["tensor"] == "dw"}
    assert errors["chunk"] < 2.5e-3 and errors["recurrent"] < 2.5e-3
    assert errors["running sums"] == pytest.approx(case.law(-4.0, 256), rel=0.3)


@pytest.mark.parametrize(
    "how",
    [("logsigmoid", "bfloat16"), (-2.5, "tf32"), (-8.0, "bfloat16"), ("forget", "bfloat16"), (-4.0, "float32")],
    ids=str,
)
def test_shows_what_is_measured(how):
    decay, rounding = how
    knobs = {"decay": decay, "rounding": rounding, "T": 128, "seed": 1}
    shown = case.show(**knobs)
    for row in shown.rows:
        name = row.what.split(": ")[1]
        assert shown.errors[name] == row.measured
        assert shown.laws.get(name, math.nan) == pytest.approx(row.law, nan_ok=True)
    assert shown.noise.isnan().all() == (rounding == "float32")
    size = shown.read.abs().max()
    torch.testing.assert_close(shown.read - shown.written, shown.rounded, rtol=2e-2, atol=1e-6 * size.item())
    assert Picture(6.0).say(shown).startswith(("The sums reach", "Everything is forgotten"))


@pytest.mark.parametrize("decay", ["logsigmoid", -2.5, -6.0])
def test_the_noise_band_is_the_size_of_the_noise(decay):
    """Of one channel in a walk of few steps: to a factor of two over all seeds, not token by token."""
    made = [case.show(decay=decay, rounding="tf32", T=256, seed=seed) for seed in range(6)]
    measured, law = (
        torch.stack(lines).square().mean().sqrt().item()
        for lines in ([x.rounded - x.true for x in made], [x.noise for x in made])
    )
    assert 0.5 < measured / law < 2


def test_the_sentence_follows_the_law():
    for decay in (-1.0, -2.5, -5.0):
        for rounding in ("bfloat16", "tf32"):
            shown = case.show(decay=decay, rounding=rounding, T=256, seed=0)
            said, law = Picture(6.0).say(shown), shown.laws["identity-rounded"]
            assert ("dw is noise" in said) == (law >= 1)
            assert ("and still dw is right" in said) == (law < 0.01)
    shown = case.show(decay="forget", rounding="bfloat16", T=64, seed=0)
    assert "dw is 0" in Picture(6.0).say(shown) and shown.laws["identity-rounded"] == math.inf
