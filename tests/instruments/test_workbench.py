"""Lines of one's own in a given kernel: run in a process of their own, traced; a recording where there is no Triton."""

import inspect
import json
import math
import runpy

import numpy as np
import pytest
import torch

from flakit.instruments import workbench
from flakit.instruments.workbench import tl
from flakit.numerics.recorded import read
from flakit.ops.common.dispatch import has_triton, interpreted

LN_MAX = math.log(torch.finfo(torch.float32).max)
REACH = {"start": 64, "middle": 32, "blocks": 8}
"""The most tokens that one exponent of each way adds up."""

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")


def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
    return tl.dot(b_r * tl.exp(b_ge), tl.trans(b_k * tl.exp(-b_gi)), input_precision="ieee")


def unanswered():
    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        b_reads = ...
        return tl.dot(b_reads, tl.trans(b_k), input_precision="ieee")

    return scores


def without_decay():
    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        return tl.dot(b_r, tl.trans(b_k), input_precision="ieee")

    return scores


def of_the_wrong_shape():
    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        b_k = b_k * 2.0
        return tl.dot(b_r, b_k)

    return scores


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("way, decay", [("start", -1.3), ("middle", -2.5), ("blocks", -9.0), ("halves", -1000.0)])
def test_every_way_is_the_operator_up_to_its_end(way, decay):
    for each in (-0.01, -0.5, decay):
        made = workbench.run(each, way=way)
        # The two exponents of a factor of size 1 may be as large as ln(max), and rounded so.
        assert made.finite and made.error < 2 * LN_MAX * 2**-24, each
        assert made.expected.shape == made.o.shape == (128, 16) and np.isfinite(made.expected).all()


@needs_triton
@pytest.mark.parametrize("way", REACH)
def test_it_breaks_where_the_law_says(way):
    law, found = LN_MAX / REACH[way], workbench.onset(way=way)
    assert found["output"] == pytest.approx(law, rel=0.03) and found["tile"] <= found["output"]
    below, above = (workbench.run(-found["output"] * by, way=way) for by in (0.99, 1.01))
    assert below.finite and not above.finite


@needs_triton
def test_halves_never_break():
    assert workbench.onset(way="halves") == {"tile": math.inf, "output": math.inf}
    assert max(line.largest for line in workbench.traced(-1000.0, way="halves").headroom) == 0


@needs_triton
def test_the_first_bad_tile_is_the_last_key_and_a_mask_drops_it():
    made = workbench.run(-1.39, scores)
    site = made.trace.first
    assert made.finite and not site.stores
    tile, statement = site.first, inspect.getsource(scores).splitlines()[-1].strip()
    assert site.place.statement == statement and statement.startswith("return tl.dot(")
    assert (tile.program, tile.shape, tile.index, tile.inf) == ((3, 0, 0), (64, 16), (63, 0), 16)
    listed = {int(line[:3]): line[3:].strip() for line in workbench.listing(scores).splitlines()}
    assert listed[site.place.line] == site.place.statement
    assert [store.into for store in workbench.run(-1.5, scores).trace.first.stores] == ["o"]


@needs_triton
def test_answers_run_and_empty_ones_are_said_to_be_replaced():
    made = workbench.run(-0.5, scores)
    assert made.yours is made.o and made.said == "" and made.error < 1e-6
    empty = workbench.run(-0.5, unanswered(), way="middle")
    assert empty.yours is ... and empty.finite and "scores: nothing of yours so far, ours ran" in repr(empty)
    assert workbench.run(-0.5, without_decay()).error > 0.1
    for each in (made, empty):
        assert each.picture().png().startswith(b"\x89PNG") and each.compared().png().startswith(b"\x89PNG")


@needs_triton
def test_a_mistake_is_an_error_with_its_line():
    with pytest.raises(RuntimeError, match=r"kernel.py:8  return tl.dot\(b_r, b_k\)\n.*Error"):
        workbench.run(-0.5, of_the_wrong_shape())
    assert workbench.run(-0.5).finite  # and the next one runs


@needs_triton
@pytest.mark.full
def test_a_process_that_was_killed_is_started_again():
    assert workbench.run(-0.51).finite
    workbench._PROCESS._process.kill()
    workbench._PROCESS._process.wait()
    assert workbench.run(-0.52).finite


@pytest.mark.full
@pytest.mark.skipif(not has_triton() or interpreted(), reason="needs Triton, in a process without TRITON_INTERPRET")
@pytest.mark.parametrize("way", workbench.WAYS)
def test_the_file_is_a_kernel_for_a_gpu(way, tmp_path):
    """Compiled for an H100 on any machine: what a learner writes here would run there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (tmp_path / "kernel.py").write_text(workbench.source(way=way))
    kernel = runpy.run_path(str(tmp_path / "kernel.py"))["chunk_kernel"]
    sizes = {"H": len(workbench.PACES), "K": 16, "V": 16, "C": workbench.CHUNK}
    types = dict.fromkeys(("r", "k", "v", "w", "u", "o"), "*fp32") | {"scale": "fp32", "T": "i32"}
    asked = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    compiled = triton.compile(asked, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 232448


def test_what_is_asked_wrongly():
    with pytest.raises(ValueError, match="way: expected one of start, middle, blocks, halves, got 'end'"):
        workbench.run(-1.0, way="end")
    with pytest.raises(
        ValueError, match="lines: expected functions named scores, output, next_state, got 'unanswered'"
    ):
        workbench.run(-1.0, unanswered)
    with pytest.raises(ValueError, match="decay: expected a natural-log decay <= 0, got 1.0"):
        workbench.run(1.0)


def test_the_file_holds_one_way_and_ones_own_lines():
    text = workbench.source(without_decay(), way="blocks")
    assert text.count("def scores(") == 1 and "tl.dot(b_r, tl.trans(b_k)" in text and "static_range" not in text
    text = workbench.source(way="blocks")
    assert text.count("def scores(") == 1 and "static_range" in text and text.count("@triton.jit") == 4
    whole, part = workbench.listing(), workbench.listing(only="output").splitlines()
    assert all(line in whole for line in part) and part[1].split("  ", 1)[1].startswith("def output(")
    kernel = workbench.listing(only="chunk_kernel").splitlines()  # whose signature has several lines
    assert kernel[0].endswith("@triton.jit") and kernel[-1] == whole.splitlines()[-1]


# --- where there is no Triton ---------------------------------------------------------------------------------------


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(workbench, "has_triton", lambda: False)


def test_without_triton_the_recording_is_shown_and_said_to_be_one(no_triton):
    made = workbench.run(-0.5, scores)
    assert made.yours is ... and made.finite and made.error < 1e-6
    assert "there is no Triton on this machine: your lines were not run, and ours gave this, recorded on" in repr(made)
    assert not workbench.run(-1.5).finite and workbench.run(-1.39).trace.first.first.index == (63, 0)
    with pytest.raises(ValueError, match="no Triton here, and of 'middle' were recorded -2.5, -9; got -2"):
        workbench.run(-2.0, way="middle")
    assert workbench.traced(-2.0, way="middle").first is not None


@needs_triton
@pytest.mark.parametrize("way", workbench.WAYS)
def test_the_recording_is_what_runs_today(way):
    rows = read(workbench.RECORDING).select(way=way)
    assert {f"{name}_onset": size for name, size in workbench.onset(way=way).items()} == {
        name: pytest.approx(rows[0][name], rel=1e-2) for name in ("tile_onset", "output_onset")
    }
    for row in (rows[1], rows[-3], *(row for row in rows if row["digits"])):
        now = workbench.traced(row["decay"], way=way, digits=row["digits"], products=row["products"])
        kept, now = json.loads(row["trace"]), json.loads(json.dumps(now.to_dict()))
        assert ("digits" in kept) == row["digits"]
        if row["digits"]:
            for part in ("lines", "findings"):
                assert [x["place"] for x in _lines(kept, part)] == [x["place"] for x in _lines(now, part)]
        for part in ("sites", "headroom"):
            assert [_of(x) for x in kept[part]] == [_of(x) for x in now[part]]
            for was, made in zip(kept[part], now[part], strict=True):
                # In which order a product sums its terms is the processor's affair, and with terms near the largest
                # number it decides what is inf, what NaN, and at the edge what is finite.
                assert (_finite(was) == _finite(made)).mean() > 0.999
    with_output = [row for row in rows if row["o"]]
    for row in with_output:
        made = workbench.run(row["decay"], way=way, digits=row["digits"], products=row["products"])
        o = made.o
        assert np.allclose(np.reshape(row["o"], o.shape), o, rtol=1e-3, atol=1e-6, equal_nan=True)
        assert made.error != made.error or row["error"] == pytest.approx(made.error, rel=1)


def _of(x):
    """A site's or a line's place and what happened there."""
    place = x.get("place", x)
    return place["line"], place["statement"], x["operation"], x.get("how"), x["index"]


def _finite(x):
    """Which of a site's lanes are finite: they are kept as runs [what, how many] of 0, finite, 1, inf, or 2, NaN."""
    return np.concatenate([np.full(many, what == 0) for what, many in x.get("lanes") or [(0, 1)]])


def _lines(trace, part):
    """Of a trace with digits all lines, or those that are named."""
    digits = trace["digits"]
    return digits["lines"] if part == "lines" else [digits["lines"][found["line"]] for found in digits["findings"]]
