"""Offsets read without their stride: law and kernel token by token, and what our operators make of such offsets."""

import pytest
import torch

from flakit import chunk_rwkv6
from flakit.cases import strided_offsets as case
from flakit.cases.strided_offsets.picture import Picture

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpret)]
LENGTHS = [(5, 15, 7), (4,), (1, 1, 1, 1), (9, 2, 12, 3, 8), (3, 0, 6)]


def starts(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def found(offsets, name, *, raw=True, backend="torch"):
    T = int(offsets[-1])
    return case.measured(case.inputs(T), case.layout(offsets, name), raw=raw, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", case.LAYOUTS)
def test_law_predicts_the_wrong_and_the_missing_tokens(name, lengths, backend):
    offsets = starts(lengths)
    law = case.law(offsets.tolist(), case.in_memory(offsets.tolist(), name))
    assert found(offsets, name, backend=backend) == pytest.approx(law)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", case.LAYOUTS)
def test_nothing_is_wrong_where_the_stride_is_asked_for(name, backend):
    assert found(starts((9, 2, 12)), name, raw=False, backend=backend) == (0, 0)


@pytest.mark.parametrize("name", case.LAYOUTS)
def test_layouts_hold_the_same_offsets_and_the_numbers_said_to_follow(name):
    offsets = case.offsets(5, 20)
    laid_out = case.layout(offsets, name)
    assert torch.equal(laid_out, offsets) and laid_out.is_contiguous() == (name == "contiguous")
    memory = torch.tensor([], dtype=torch.int64).set_(laid_out.untyped_storage())[laid_out.storage_offset() :]
    assert memory[: len(offsets)].tolist() == case.in_memory(offsets.tolist(), name)


def test_beside_the_ends_the_first_half_is_right_and_the_rest_is_missing():
    """A test that looks at the first sequences sees nothing."""
    offsets = starts((5, 15, 7, 3))
    o = case.run(case.inputs(30), case.layout(offsets, "column of (begin, end)"), backend="torch")
    exact = case.truth(case.inputs(30), offsets)
    torch.testing.assert_close(o[:, :20].double(), exact[:, :20], rtol=1e-4, atol=1e-5)
    assert o[:, 20:].isnan().all()


WRONG_LAWS = {
    "a piece that begins inside its sequence is right": lambda c, m: 1 - len({*_tokens(m)} & {*_tokens(c)}) / c[-1],
    "one half, whatever the lengths": lambda c, m: 0.5,
    "only whole sequences": lambda c, m: 1 - sum(b - a for a, b in _pairs(m) if (a, b) in _pairs(c)) / c[-1],
}


def _pairs(offsets):
    return list(zip(offsets, offsets[1:], strict=False))


def _tokens(offsets):
    return [t for piece in _pairs(offsets) for t in range(*piece)]


@pytest.mark.parametrize("planted", WRONG_LAWS)
def test_a_wrong_law_is_rejected(planted):
    agree = []
    for name in list(case.LAYOUTS)[1:]:
        for lengths in LENGTHS[:1] + LENGTHS[3:]:
            c = starts(lengths).tolist()
            law = WRONG_LAWS[planted](c, case.in_memory(c, name))
            agree.append(law == pytest.approx(found(torch.tensor(c), name).wrong))
    assert not all(agree)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_the_story(backend, monkeypatch):
    monkeypatch.setattr(case, "kernel_place", lambda: ("cpu", backend))
    rows = case.reproduce()
    assert all(row.agrees for row in rows)
    assert [row.measured for row in rows[-2:]] == pytest.approx([15 / 20, 11 / 20])
    assert [row.measured for row in rows if "asked for" in row.what] == [0, 0]


@pytest.mark.interpret
def test_kernel_and_twin_agree():
    offsets = case.layout(case.offsets(4, 10), "every second of the halves")
    x = case.inputs(int(offsets[-1]))
    twin, kernel = (case.run(x, offsets, backend=backend) for backend in ("torch", "triton"))
    torch.testing.assert_close(twin, kernel, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", case.LAYOUTS)
def test_on_a_gpu(name):
    offsets = case.layout(case.offsets(5, 20).cuda(), name)
    x = case.inputs(int(offsets[-1]), device="cuda")
    twin, kernel = (case.run(x, offsets, backend=backend) for backend in ("torch", "triton"))
    torch.testing.assert_close(twin, kernel, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", case.LAYOUTS)
def test_ours_are_right(name, backend):
    offsets = starts((5, 15, 7))
    x = case.inputs(27, K=16, V=16)
    o = chunk_rwkv6(**x, cu_seqlens=case.layout(offsets, name), backend=backend).o
    torch.testing.assert_close(o.double(), case.truth(x, offsets), rtol=1e-4, atol=1e-5)


SETTINGS = [(name, raw) for name in case.LAYOUTS for raw in (True, False)]


@pytest.mark.parametrize(("name", "raw"), SETTINGS)
def test_shows_what_is_measured(name, raw):
    knobs = {"layout": name, "raw": raw, "sequences": 6, "length": 9, "seed": 1}
    shown = case.show(**knobs)
    wrong, missing = shown.rows
    assert shown.wrong.double().mean() == wrong.measured and shown.errors.isnan().double().mean() == missing.measured
    offsets = case.offsets(6, 9, seed=1).tolist()
    assert shown.offsets == offsets and shown.read == (case.in_memory(offsets, name) if raw else offsets)
    share = case.law(shown.offsets, shown.read)
    assert ("very output is right" in Picture(6.0).say(shown)) == (share.wrong == 0)
