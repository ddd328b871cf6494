"""The case `chunk_vs_recurrent`: its three causes and its story, each apart from the others."""

import importlib.machinery
import importlib.metadata
import math
import sys
import types

import pytest
import torch

import flakit
from flakit.cases import chunk_vs_recurrent as case
from flakit.cases import log_space
from flakit.cases.chunk_vs_recurrent.picture import Picture
from flakit.figures.canvas import Cell
from flakit.numerics import recorded

SMALL = {"B": 1, "T": 96, "H": 2, "K": 25, "V": 8}


@pytest.fixture(scope="module")
def small():
    return case.inputs(**SMALL)


@pytest.fixture(scope="module")
def story():
    return {row.what: row for row in case.reproduce()}


@pytest.mark.full
@pytest.mark.parametrize("name", case.REPORTED)
def test_the_scale_alone_gives_every_reported_difference(story, name):
    row = story[f"worst difference of {name}"]
    assert row.measured == pytest.approx(row.recorded, rel=0.35)  # extreme values: seeds differ by that much
    assert row.measured == pytest.approx(row.law, rel=0.01)
    assert row.measured != pytest.approx(2 * row.law, rel=0.35)


def test_what_the_repair_left_is_one_step_of_bfloat16(story):
    row = story["repaired: worst difference of the state's gradient"]
    assert row.measured == row.law == 2**-5 and f"{row.measured:.4f}" == f"{row.recorded:.4f}"
    assert row.measured not in (case.step_at(2.0), case.step_at(8.0))
    other = case.repaired(T=64, seed=0)
    assert other.worst == other.step == 2**-6 and 3.5 < other.largest < 4


def test_all_rows_of_the_story_agree(story):
    assert all(row.agrees is not False for row in story.values())
    assert story["aliasing: unexplained in o"].measured > 0.2
    assert 0.02 < story["precision: unexplained in dw"].measured < 0.06
    assert story["no cause: unexplained, the worst tensor"].measured < 1e-3


@pytest.mark.parametrize("precision", [False, True], ids=["", "precision"])
@pytest.mark.parametrize("aliasing", [False, True], ids=["", "aliasing"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_three_switches_are_told_apart(small, scale, aliasing, precision):
    kept = small["w"].clone()
    found = case.switches(small, scale=scale, aliasing=aliasing, precision=precision)
    assert small["w"].equal(kept)
    explained = {name for name, fit in found.items() if fit.unexplained < 6e-3}
    assert explained == set(found) - (set(found) - {"du"} if aliasing else set()) - ({"dw"} if precision else set())
    for name in explained:
        assert found[name].factor == pytest.approx(case.law(small, scale=scale), rel=2e-3), name
        assert found[name].factor != pytest.approx(case.law(small, scale=not scale), rel=2e-3), name


def test_four_anonymous_pairs_are_told_apart_by_what_a_factor_leaves():
    found = {
        letter: {name: case.ratio(one[name], other[name]) for name in case.REPORTED}
        for letter, (one, other) in case.anonymous().items()
    }
    left = {letter: {name for name, fit in fits.items() if fit.unexplained > 6e-3} for letter, fits in found.items()}
    assert left == {"A": {"dw"}, "B": set(), "C": set(), "D": set(case.REPORTED) - {"du"}}
    factors = {letter: fits["du"].factor for letter, fits in found.items()}
    assert factors == {letter: pytest.approx(8 if letter == "B" else 1, rel=2e-3) for letter in "ABCD"}


def test_a_setting():
    rows = case.show(scale=False, precision=True, T=256, K=32, V=8).rows
    assert all(row.agrees is not False for row in rows)
    assert [row.what for row in rows if row.measured is False] == ["dw: one factor explains it"]


CAUSES = [{}, {"scale": True}, {"aliasing": True}, {"precision": True}, {"scale": True, "precision": True}]


@pytest.mark.parametrize("causes", CAUSES, ids=lambda causes: "+".join(causes) or "none")
def test_shows_what_is_measured(causes):
    knobs = dict.fromkeys(("scale", "aliasing", "precision"), False) | causes | {"T": 80, "K": 16, "V": 8, "seed": 1}
    shown, picture = case.show(**knobs), Picture(6.0)
    x = case.inputs(B=1, T=80, H=2, K=16, V=8, seed=1)
    found = case.switches(x, **causes, seed=1)
    for row in shown.rows:
        name = row.what.split(":")[0]
        assert row.agrees is not False and found[name] == shown.fits[name]
        assert found[name] == case.ratio(shown.chunk[name], shown.recurrent[name])
        if row.what.endswith("factor"):
            assert row.measured == found[name].factor
    picture.update(shown)
    said = picture.say(shown)
    assert (" 4 times above" in said) == (shown.law > 1) == ("scale" in causes)
    explained = {row.what.split(":")[0] for row in shown.rows if row.measured is True}
    assert ("are clouds" in said) == ("o" not in explained) and ("dw leaves its line" in said) == (
        "precision" in causes
    )
    assert ("agree to rounding" in said) == (not causes)


def test_every_element_lies_in_its_cell():
    knobs = {"scale": True, "aliasing": True, "precision": False, "T": 32, "K": 8, "V": 8, "seed": 0}
    shown, picture = case.show(**knobs), Picture(9.4)
    picture.update(shown)
    for name in ("dw", "du"):
        rows, columns = picture.canvas.maps[name]
        counts = 0
        for row in range(rows):
            for column in range(columns):
                said = picture.arithmetic(shown, Cell(name, row, column))
                counts += 0 if "no element" in said else int(said.split()[1])
        assert counts == shown.chunk[name].numel(), name
    x, y = shown.recurrent["du"][0, 0].item(), shown.chunk["du"][0, 0].item()
    said = [picture.arithmetic(shown, Cell("du", row, column)) for row in range(rows) for column in range(columns)]
    assert any(f"h 0 k 0: chunk {y:.4g}, recurrent {x:.4g}, {y / x:.3g} times (law: 2.83)" in each for each in said)


@pytest.mark.parametrize("name", case.REPORTED)
def test_ratio_tells_a_scale_from_other_causes(small, name):
    one, default = (case.run(small, scale=scale)[name] for scale in (1.0, None))
    found = case.ratio(one, default)
    assert found.factor == pytest.approx(5, rel=1e-3)
    assert found.unexplained < 4e-3  # two roundings to bfloat16
    assert case.ratio(one, one.roll(1, 0).roll(1, -1)).unexplained > 0.2


def test_with_one_scale_the_forms_agree_to_rounding(small):
    chunk, recurrent = (case.run(small, form=form) for form in ("chunk", "recurrent"))
    for name in case.REPORTED:
        found = case.ratio(chunk[name], recurrent[name])
        assert found.factor == pytest.approx(1, abs=1e-4) and found.unexplained < 1e-3, name


@pytest.fixture
def fake_fla(monkeypatch):
    """A package with flash-linear-attention's names and defaults, whose chunk form forgets the scale in its dw."""

    class WithoutScale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, scale):
            ctx.scale = scale
            return w.clone()

        @staticmethod
        def backward(ctx, dw):
            return dw / ctx.scale, None

    def chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
        made = flakit.chunk_rwkv6(r, k, v, WithoutScale.apply(w, scale), u, scale, initial_state, output_final_state)
        return tuple(made)

    def fused_recurrent_rwkv6(r, k, v, w, u, scale=1.0, initial_state=None, output_final_state=False, reverse=False):
        return tuple(flakit.fused_recurrent_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state))

    module = types.ModuleType("fla.ops.rwkv6")
    module.chunk_rwkv6, module.fused_recurrent_rwkv6 = chunk_rwkv6, fused_recurrent_rwkv6
    for name, stands_in in (("fla", types.ModuleType("fla")), ("fla.ops", types.ModuleType("fla.ops"))):
        stands_in.__path__, stands_in.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, stands_in)
    monkeypatch.setitem(sys.modules, "fla.ops.rwkv6", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"fla-core": "0.6.0"}[name])


def test_published_forms_beside_ours(fake_fla, monkeypatch):
    x = case.inputs(**SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(case, "inputs", lambda device: x)
    label, rows = case.published("cpu")
    assert label == "measured here, flash-linear-attention 0.6.0"
    theirs, ours = (
        {row["tensor"]: row for row in rows if row["who"] == who} for who in ("flash-linear-attention", "flakit")
    )
    assert theirs.keys() == ours.keys() == case.REPORTED.keys()
    for name, row in ours.items():
        assert row["as_reported_factor"] == pytest.approx(5, rel=2e-3)
        assert row["as_reported_worst"] > 100 * row["one_scale_worst"]
        assert row["one_scale_factor"] == pytest.approx(1, abs=1e-3) and row["one_scale_unexplained"] < 2e-3
        assert max(row["chunk_error"], row["recurrent_error"]) < 2.5e-3
        if name != "dw":
            assert {**theirs[name], "who": ""} == {**row, "who": ""}
    assert theirs["dw"]["one_scale_factor"] == pytest.approx(5, rel=1e-2)
    assert theirs["dw"]["chunk_error"] == pytest.approx(4, rel=1e-2) and theirs["dw"]["recurrent_error"] < 2.5e-3


def test_published_forms_are_recorded_where_they_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("FLAKIT_DATA", str(tmp_path))
    label, rows = case.published()
    assert "no recording data/h200_published_forms.json" in label and rows == []
    found = [{"who": "flakit", **row} for row in case.side_by_side("rwkv6", case.inputs(**SMALL))]
    meta = dict.fromkeys(recorded.META, "here") | {"fla": "0.6.0"}
    recorded.write(tmp_path / f"{case.RECORDING}.json", meta, found)
    label, rows = case.published()
    assert label.startswith("recorded on here") and label.endswith("flash-linear-attention 0.6.0")
    assert [list(row) for row in rows] == [list(row) for row in found]


def test_the_recorded_forms_give_the_reported_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, rows = case.published()
    assert {row["who"] for row in rows} == {"flash-linear-attention", "flakit"}
    for row in rows:
        assert row["as_reported_worst"] == pytest.approx(row["reported"], rel=0.35), row
        assert row["as_reported_factor"] == pytest.approx(10, rel=0.01), row
        assert row["one_scale_factor"] == pytest.approx(1, rel=0.01), row
        if row["who"] == "flakit":
            assert max(row["chunk_error"], row["recurrent_error"]) < 2.5e-3, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overwriting_spoils_the_next_call_unseen(dtype):
    x = flakit.inputs("rwkv6", T=100, H=2, K=16, decay="logsigmoid", dtype=dtype)
    kept = x["w"].clone()
    right = flakit.fused_recurrent_rwkv6(**x).o
    with_clone = case.overwriting_chunk(**{**x, "w": x["w"].clone()}).o
    assert x["w"].equal(kept)
    first = case.overwriting_chunk(**x).o
    assert first.equal(with_clone) and case.ratio(first, right).unexplained < 4e-3  # the faulty call itself is right
    assert x["w"]._version == 0 and not x["w"].equal(kept)
    assert x["w"][:, :64].float().allclose(kept[:, :64].float().cumsum(1), rtol=1e-2)
    assert case.ratio(flakit.fused_recurrent_rwkv6(**x).o, right).unexplained > 0.2


@pytest.mark.parametrize("decay", ["logsigmoid", "rwkv6-wide", "none", "forget"])
def test_a_difference_of_states_never_grows(decay):
    measured, predicted = case.perturbed(flakit.inputs("rwkv6", T=48, H=2, K=8, decay=decay))
    assert (measured[1:] <= measured[:-1] * (1 + 1e-12) + 1e-12).all()  # plus rounding of the states themselves
    torch.testing.assert_close(measured, predicted, rtol=1e-6, atol=1e-9)


def test_a_positive_decay_makes_it_grow():
    measured, predicted = case.perturbed(log_space.inputs("sigmoid", B=1, T=48, H=1, K=8))
    torch.testing.assert_close(measured, predicted, rtol=1e-6, atol=0)
    assert math.log(measured[-1]) == pytest.approx(48 * 0.5, rel=0.3)
