"""A transposed mask: the count and the map of wrong entries against the kernel, and the compiler that finds it."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from flakit.cases import transposed_mask as case
from flakit.figures.canvas import Cell
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import truth
from flakit.ops.common.dispatch import has_triton
from tests.cases import drawing

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpret)]
SIZES = [(64, 64), (100, 120), (40, 64), (40, 40), (20, 20), (33, 31), (1, 1), (15, 65)]


def measured(K, V, B, backend="torch"):
    x = case.inputs(K, V, T=1)
    return (case.run(x, B, B, backend=backend).seen != x["initial_state"])[0, 0]


def wrong(K, V, B):
    """The entries that are read as zero, [K, V]. Entry (k, v) lies in column y, row x of its tile, and the transposed
    mask tests whether its mirror image is inside the state."""
    k, v = torch.arange(K)[:, None], torch.arange(V)[None, :]
    y, x = k % B, v % B
    return (k - y + x >= K) | (v - x + y >= V)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("B", [16, 32])
@pytest.mark.parametrize(("K", "V"), SIZES)
def test_law_counts_the_wrong_entries(K, V, B, backend):
    found = measured(K, V, B, backend)
    assert torch.equal(found, wrong(K, V, B))
    assert found.sum() == case.law(K, V, B, B)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_the_story(backend, monkeypatch):
    monkeypatch.setattr(case, "kernel_place", lambda: ("cpu", backend))
    rows = case.reproduce()
    assert [row.recorded for row in rows] == [0, 992, 384]
    assert all(row.recorded == row.law == row.measured for row in rows)


WRONG_LAWS = {
    "without the corner": lambda K, V, B: (K // B) * (V % B) * (B - V % B) + (V // B) * (K % B) * (B - K % B),
    "another tile": lambda K, V, B: case.law(K, V, 2 * B, 2 * B),
    "K and V alike": lambda K, V, B: case.law(K, K, B, B),
    "all of every cut tile": lambda K, V, B: K * V - (K // B) * (V // B) * B * B,
}


@pytest.mark.parametrize("planted", WRONG_LAWS)
def test_a_wrong_law_is_rejected(planted):
    agree = [WRONG_LAWS[planted](K, V, 32) == measured(K, V, 32).sum() for K, V in case.STORY]
    assert not all(agree)
    assert not torch.equal(measured(100, 120, 32), wrong(100, 120, 16))


def test_law_over_every_size_of_one_tile_and_two():
    K, V = torch.arange(1, 17)[:, None], torch.arange(1, 17)[None, :]
    counted = torch.tensor([[int(wrong(int(k), int(v), 8).sum()) for v in V[0]] for k in K[:, 0]])
    assert torch.equal(case.law(K, V, 8, 8), counted)


def test_sizes_that_hide_it():
    assert case.law(128, 64) == case.law(20, 20) == case.law(16, 16) == 0
    assert min(case.law(40, 40), case.law(20, 21), case.law(64, 65)) > 0


@pytest.mark.parametrize(("K", "V"), SIZES)
def test_as_many_entries_are_loaded_from_outside_as_are_missing(K, V):
    mask = case.tiles(K, V)
    outside = mask.clone()
    outside[:K, :V] = False
    assert outside.sum() == case.law(K, V)
    right = case.tiles(K, V, transposed=False)
    assert right[:K, :V].all() and right.sum() == K * V


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("BK", "BV"), [(32, 32), (16, 64)])
def test_the_right_mask_is_right_in_any_tile(BK, BV, backend):
    x = case.inputs(100, 40, B=2, H=2)
    found = case.run(x, BK, BV, transposed=False, backend=backend)
    assert torch.equal(found.seen, x["initial_state"])
    assert relative_l2(found.dr, truth("rwkv6", x)["dr"]) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_r_is_wrong_too(backend):
    x = case.inputs(100, 120, H=2)
    found = case.run(x, backend=backend)
    assert found.dr.isfinite().all() and 0.05 < relative_l2(found.dr, truth("rwkv6", x)["dr"]) < 0.3
    hidden = case.inputs(64, 64, H=2)
    assert relative_l2(case.run(hidden, backend=backend).dr, truth("rwkv6", hidden)["dr"]) < 1e-6


@pytest.mark.interpret
def test_kernel_and_twin_agree():
    x = case.inputs(40, 20, B=2, H=2)
    twin, kernel = (case.run(x, 16, 16, backend=backend) for backend in ("torch", "triton"))
    assert torch.equal(twin.seen, kernel.seen)
    torch.testing.assert_close(twin.dr, kernel.dr)


@pytest.mark.interpret
def test_the_interpreter_refuses_a_rectangular_tile():
    with pytest.raises(Exception, match="incompatible dimensions at index 0: 64 and 16"):
        case.run(case.inputs(100, 120, T=1), 16, 64, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_other_error_is_taken_for_the_compilers(backend, monkeypatch):
    (row,) = case.show(BK=16, BV=64).rows
    assert row.law == row.measured == "does not compile"

    def fails(*_, **__):
        raise MemoryError("no room for the state")

    where = "flakit.cases.transposed_mask" + (".kernel_triton.read_grads" if backend == "triton" else ".tiles")
    monkeypatch.setattr(where, fails)
    with pytest.raises(MemoryError, match="no room"):
        case.show(BK=16, BV=64)


@pytest.mark.interpret
def test_nor_is_another_error_of_the_kernel(monkeypatch):
    def fails(*_, **__):
        raise MemoryError("no room for a tile")

    monkeypatch.setattr("flakit.cases.transposed_mask.kernel_triton.tl.program_id", fails)
    with pytest.raises(Exception, match="no room for a tile"):  # as Triton hands it on
        case.show(BK=16, BV=64)


@pytest.mark.full
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_compiled_without_a_gpu():
    label, rows = case.compile_table([(16, 16), (64, 16)])
    assert label.startswith("compiled here with Triton")
    verdicts = {(row["tile"], row["mask"]): (row["sm_80"], row["sm_90"]) for row in rows}
    refused = verdicts.pop(("64 x 16", "transposed"))
    assert refused[0] == refused[1] and refused[0].endswith("incompatible dimensions at index 0: 16 and 64")
    assert len(verdicts) == 3 and set(verdicts.values()) == {("compiles", "compiles")}
    assert rows[-1]["line"] == case.RECORDED["line"]


def test_the_recorded_verdict_stands_in_where_there_is_no_triton(monkeypatch):
    monkeypatch.setattr(case, "has_triton", lambda: False)
    monkeypatch.setattr("flakit.ops.common.dispatch.has_triton", lambda: False)
    label, rows = case.compile_table()
    assert label == "recorded with Triton 3.7.1"
    assert [row["sm_90"] for row in rows] == ["compiles"] * 3 + [case.RECORDED["error"]]
    with pytest.raises(ValueError, match="backend: 'triton' is not installed here"):
        case.run(case.inputs(8, 8, T=1), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [(64, 64), (100, 120), (40, 64)])
def test_on_a_gpu(K, V):
    x = case.inputs(K, V, B=2, H=2, device="cuda")
    twin, kernel = (case.run(x, backend=backend) for backend in ("torch", "triton"))
    assert torch.equal(twin.seen, kernel.seen)
    torch.testing.assert_close(twin.dr, kernel.dr, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_the_case_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; from flakit.cases import transposed_mask as m; m.reproduce()"
    assert subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL).returncode == 0


def knobs(K=100, V=120, BK=32, BV=32, transposed=True):
    return {"K": K, "V": V, "BK": BK, "BV": BV, "transposed": transposed}


def drawn(**how):
    return drawing.drawn(case, 6.0, **knobs(**how))


SETTINGS = [{}, {"K": 40, "V": 64}, {"K": 64, "V": 64}, {"K": 20, "V": 20}, {"transposed": False}, {"BK": 16, "BV": 64}]


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_shows_what_is_measured(how):
    picture, shown = drawn(**how)
    (row,) = shown.rows
    said = picture.say(shown)
    assert row.agrees
    if row.law == "does not compile":
        assert shown.seen is None and "the compiler refuses the kernel" in said
        return
    assert (shown.seen != shown.state).sum() == row.measured
    assert (f"{row.measured} entries of the state are not loaded" in said) == (row.law > 0)
    assert (shown.dr < 1e-6) == (row.law == 0)
    assert ("A test with these sizes sees nothing" in said) == (row.law == 0 and shown.transposed)


def hatched(picture):
    """How many entries are missing, how many from beyond."""
    patches = [kind._patch for kind in (picture._missing, picture._outside)]
    corners = [patch.get_path().vertices.reshape(-1, 5, 2)[:, :4] for patch in patches]
    areas = [np.ptp(x, axis=1).prod(1).sum() for x in corners]
    return [area if patch.get_visible() else 0 for patch, area in zip(patches, areas, strict=True)]


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_hatched_areas_are_the_law(how):
    picture, shown = drawn(**how)
    wrong = 0 if shown.seen is None or not shown.transposed else case.law(*shown.state.shape, *shown.tile)
    assert hatched(picture) == [wrong, wrong]
    assert picture._here[0].get_visible() == (shown.seen is not None)


def test_edges_of_tiles():
    x, y = drawn(K=40, V=33)[0]._edges.get_data()
    assert np.isfinite(x).sum() == 4 and {31.5} == set(np.array(y)[:2]) == set(np.array(x)[3:5])


def test_a_new_size_is_drawn_as_by_a_fresh_picture():
    picture, _ = drawn()
    picture.canvas.rgba()
    picture.update(case.show(**knobs(K=40, V=20, BK=16, BV=16)))
    fresh, _ = drawn(K=40, V=20, BK=16, BV=16)
    assert (picture.canvas.rgba() == fresh.canvas.rgba()).all()


def test_a_cell_lights_its_mirror_image():
    picture, shown = drawn()
    cell = Cell("state", 25, 97)
    assert picture.beside(shown, cell) == [("state", 1, 121)]
    said = picture.arithmetic(shown, cell)
    assert "not loaded, read as 0 (true: " in said and "key 1, value 121, which lies beyond the state" in said
    assert picture.beside(shown, Cell("sizes", 1, 2)) == []
    right, shown = drawn(transposed=False)
    assert right.beside(shown, cell) == [] and "loaded as" in right.arithmetic(shown, cell)
    refused, shown = drawn(BK=16, BV=64)
    assert refused.beside(shown, cell) == []


@pytest.mark.interpret
@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_the_kernel_itself_is_shown_where_it_runs(how):
    test_shows_what_is_measured(how)
