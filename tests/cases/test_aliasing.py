"""Aliasing: what a faulty call changes, what the next one returns, and that PyTorch counts nothing of it."""

import pytest
import torch

from flakit.cases import aliasing as case
from flakit.cases.aliasing.picture import Picture
from flakit.numerics.inputs import inputs as make_inputs
from flakit.numerics.mutation import touched

BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.interpret)])
SIZES = {"small": {}, "odd": {"B": 2, "H": 3, "K": 10, "V": 7, "M": 5}}


@BACKENDS
@pytest.mark.parametrize("in_place", [True, False], ids=["as it was", "right"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_law_predicts_every_call(sizes, in_place, backend):
    x = case.inputs(**sizes)
    found = case.repeated(x, 4, in_place=in_place, backend=backend)
    torch.testing.assert_close(found.o, case.law(x, 4, in_place=in_place), rtol=1e-5, atol=1e-6)


@BACKENDS
def test_a_wrong_law_is_rejected(backend):
    x = case.inputs()
    found = case.repeated(x, 3, backend=backend).o
    planted = {
        "nothing happens": case.law(x, 3, in_place=False),
        "a token more": case.law(x, 4)[1:],
        "only the values' memory": case.law({**x, "k": 0 * x["k"]}, 3),
    }
    for words, law in planted.items():
        assert not torch.allclose(found, law, rtol=1e-2), words


@BACKENDS
def test_only_a_clone_tells(backend):
    before, after = (case.repeated(case.inputs(), in_place=fault, backend=backend).touched for fault in (True, False))
    for name, out in (("initial_state[0]", "out[1][0]"), ("initial_state[1]", "out[1][1]")):
        assert (before[name].share, before[name].version, before[name].shared) == (1.0, 0, (out,))
        assert (after[name].share, after[name].version, after[name].shared) == (0.0, 0, ())
    assert all(before[name].changed == 0 for name in "qkvsg")


def test_the_faulty_call_itself_is_right():
    x = case.inputs()
    right = case.law(x, 1)
    assert torch.equal(case.repeated(x, 1).o, right) and torch.equal(case.repeated(x, 1, in_place=False).o, right)


@BACKENDS
@pytest.mark.parametrize("T", [1, 63, 64, 100, 129])
def test_overwrite_changes_all_but_each_chunks_first_token(T, backend):
    w = make_inputs("rwkv6", B=2, T=T, H=2, K=5, decay="logsigmoid")["w"]
    kept = w.clone()
    (found,) = touched(lambda w: case.overwrite(w, backend=backend), {"w": w})
    assert found.share == pytest.approx(case.overwritten(T)) and found.version == 0
    assert T == 1 or found.share != pytest.approx(case.overwritten(T, 32)) or T <= 32
    sums = torch.cat([part.cumsum(1) for part in kept.split(64, 1)], 1)
    torch.testing.assert_close(w, sums, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_reproduce(backend, monkeypatch):
    monkeypatch.setattr(case, "kernel_place", lambda: ("cpu", backend))
    rows = {row.what: row for row in case.reproduce()}
    assert all(row.measured == pytest.approx(row.law, rel=1e-5, abs=1e-6) for row in rows.values())
    off = [row.measured for what, row in rows.items() if what.endswith("o off by")]
    assert off[0] > 0.1 and off[1] == 0


@pytest.mark.parametrize("in_place", [True, False], ids=["as it was", "right"])
def test_shows_what_is_measured(in_place):
    knobs = {"in_place": in_place, "calls": 4, "K": 5, "V": 3, "M": 2, "seed": 1}
    shown = case.show(**knobs)
    changed, counted, off = shown.rows
    assert shown.off[-1].item() == off.measured and shown.law[-1].item() == off.law
    assert shown.counted == counted.measured == 0
    assert torch.equal(shown.states[0], case.inputs(K=5, V=3, M=2, seed=1)["initial_state"][0][0, 0])
    before_second = (shown.states[1] != shown.states[0]).double().mean()
    assert before_second == changed.measured == (1 if in_place else 0)
    assert torch.equal(shown.o[1], shown.o[0]) == (not in_place)


def test_the_sentence_follows_the_law():
    knobs = {"K": 5, "V": 3, "M": 2, "seed": 0}
    for in_place in (True, False):
        for calls in (1, 3):
            shown = case.show(in_place=in_place, calls=calls, **knobs)
            said = Picture(6.0).say(shown)
            assert ("returns what 3 equal tokens would" in said) == (shown.law[-1] > 0)
            assert ("lies where the caller" in said) == (in_place and calls == 1)


@pytest.mark.gpu
def test_on_a_gpu():
    x = case.inputs(device="cuda")
    found = case.repeated(x)
    torch.testing.assert_close(found.o, case.law(x), rtol=1e-4, atol=1e-5)
    assert found.touched["initial_state[0]"].version == 0


def test_more_than_one_token_is_refused():
    x = case.inputs()
    x["q"] = x["q"].expand(-1, 2, -1, -1)
    with pytest.raises(ValueError, match=r"q: expected one token \[B, 1, H, K\] with k's 2 heads, got \[1, 2, 2, 16\]"):
        case.decode(**x)
