"""The trace names the line, the tile and the lane where a value stops being finite, and follows what comes of it."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

import flakit
from flakit import trace
from flakit.cases import anchor, anomaly, masking, padding
from flakit.cases.anchor.schemes import Products
from flakit.instruments.trace import Trace
from flakit.numerics.inputs import inputs

LN_MAX = 88.72283905206835


def marked(words, file=None):
    """The line of a file whose comment is these words."""
    lines = Path(file or Path(__file__).with_name("faulty_triton.py")).read_text().splitlines()
    (line,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {words}")]
    return line


def line_of(file, text):
    """The lines of a source that hold a text."""
    return [i for i, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line]


ANCHORED = [
    (marked("born"), "exp", "born"), (marked("born"), "multiply", "carried"),
    (marked("turns NaN"), "dot", "became NaN"), (marked("drops some"), "where", "carried"),
    (marked("stored"), "store", "stored"),
]  # fmt: skip
"""What becomes of the infinity in `anchored_at_the_start`: line, operation and how."""


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("tests.instruments.faulty_triton")


# --- kernels, interpreted -------------------------------------------------------------------------------------------


@pytest.mark.interpret
def test_line_tile_and_lane_of_an_overflow_and_what_comes_of_it(kernels):
    N, T, D = 3, 64, 16
    g = torch.zeros(N, T, D)
    g[1, 10:, 5] = -2.0  # 2 (t - 9) e-folds in one channel: beyond ln(max) from t = 54 on
    r, k, A = torch.ones(N, T, D), torch.ones(N, T, D), torch.zeros(N, T, T)
    with trace() as t:
        kernels.anchored_at_the_start[(N,)](r, k, g, A, T=T, D=D)
    site = t.first
    assert (site.place.kernel, site.place.line) == ("anchored_at_the_start", marked("born"))
    assert site.place.expression in ("tl.exp(-b_g)", "") and site.operation == "exp" and site.how == "born"
    tile = site.first
    assert tile.program == (1, 0, 0) and tile.shape == (T, D) and tile.dtype == "float32"
    assert tile.index == (54, 5) and (tile.nan, tile.inf) == (0, 10)
    assert torch.equal(torch.from_numpy(tile.lanes).nonzero()[:, 0], torch.arange(54, 64))
    (operand,) = tile.operands
    assert (operand.low, operand.high, operand.at) == (0.0, 108.0, 90.0)
    assert [(s.place.line, s.operation, s.how) for s in t.sites] == ANCHORED
    assert [s.parents for s in t.sites[1:]] == [[s] for s in t.sites[:-1]]
    assert [s.into for s in site.stores] == ["A"] and "reaches A" in site.fate
    assert site.stores[0].nan == int(A.isnan().sum()) and site.stores[0].inf == int(A.isinf().sum())
    (dropped,) = site.dropped.items()
    assert (dropped[0][0].line, dropped[0][1]) == (marked("drops some"), "where")
    bad_columns = int((~A[1].isfinite()).any(0).sum())
    assert dropped[1] == sum(range(54, 64)) and bad_columns == 10  # keys 54 … 63, for the reads before each


@pytest.mark.interpret
def test_headroom_of_every_exponential(kernels):
    T, D = 64, 16
    g = torch.full((1, T, D), -1.0)
    x = torch.ones(1, T, D)
    with trace() as t:
        kernels.anchored_at_the_start[(1,)](x, x, g, torch.zeros(1, T, T), T=T, D=D)
    assert t.finite and t.first is None
    tight, loose = t.headroom
    assert tight.place.line == marked("born") and tight.room == pytest.approx(LN_MAX - 64, abs=1e-4)
    assert (tight.largest, tight.index, tight.program) == (64.0, (63, 0), (0, 0, 0))
    assert loose.room == pytest.approx(LN_MAX + 1, abs=1e-4)


@pytest.mark.interpret
def test_a_helper_in_a_loop_is_named_with_its_caller(kernels):
    x = torch.zeros(5, 8)
    x[3, 2] = 100.0
    with trace() as t:
        kernels.in_a_loop_with_a_helper[(2,)](x, torch.zeros(2, 8), 5, D=8)
    site = t.first
    assert site.place.line == marked("in a helper")
    assert site.place.via == (("in_a_loop_with_a_helper", marked("called here")),)
    assert (site.tiles, len(site.programs)) == (2, 2) and site.first.index == (2,)
    carried = [s for s in t.sites if s.place.line == marked("called here")]
    assert {s.tiles for s in carried} == {4, 2}  # b_S + e^x in two rounds of two programs, 2 b_S in one


@pytest.mark.interpret
@pytest.mark.parametrize("kernel, line, by", [
    ("masked_after_exp", "masked away", "where"), ("masked_by_the_store", "the mask of a store", "the store's mask"),
])  # fmt: skip
def test_lanes_that_are_masked_away_later(kernels, kernel, line, by):
    x = torch.full((16,), -1.0)
    x[12:] = 90.0
    o = torch.zeros(16)
    with trace() as t:
        getattr(kernels, kernel)[(1,)](x, o, *([12] if "store" in kernel else []), D=16)
    assert o.isfinite().all() and t.first.operation == "exp" and t.first.stores == []
    assert [(place.line, how, lanes) for (place, how), lanes in t.first.dropped.items()] == [(marked(line), by, 4)]
    assert "no store was reached" in t.first.fate


@pytest.mark.interpret
@pytest.mark.parametrize("n", [5, 1])
def test_the_infinity_of_a_mask_is_no_fault_until_it_makes_a_nan(kernels, n):
    o = torch.zeros(8)
    with trace() as t:
        kernels.softmax_with_infinite_masks[(1,)](torch.ones(8), o, n, D=8)
    if n > 1:
        assert t.finite and o[:n].isfinite().all()
    else:
        assert (t.first.how, t.first.place.line) == ("became NaN", marked("NaN where all is masked"))
        assert t.first.operation == "subtract"


@pytest.mark.interpret
def test_loads_and_stores_out_of_bounds(kernels):
    memory = torch.full((64,), 7.0)
    x, o = memory[:20], torch.zeros(20)
    beside = torch.zeros(64)[30:50].clone()
    with trace() as t:
        kernels.without_a_mask[(2,)](beside, o, 20, D=16)
    read, written = t.accesses
    assert (read.operation, read.place.line, read.into) == ("load", marked("reads beyond"), "x")
    assert (written.operation, written.place.line, written.into) == ("store", marked("writes beyond"), "o")
    assert (read.program, read.index, read.beyond, read.lanes, read.within) == ((1, 0, 0), (4,), 12, 12, False)
    assert t.first.how == "out of bounds" and t.first.first.bad == 12 and not t.finite
    assert "12 elements past its end" in str(t)
    with trace() as t:
        kernels.without_a_mask[(2,)](x, torch.zeros(32), 20, D=16)
    assert [(a.operation, a.within, a.beyond) for a in t.accesses] == [("load", True, 12)]
    assert t.first is None  # what lies there is memory of the same tensor


@pytest.mark.interpret
@pytest.mark.parametrize("further", [0, 3])
def test_pointers_that_are_one_of_two(kernels, further):
    """Each lane belongs to the tensor in which it lies; only what lies in neither is out of bounds."""
    x, y, o, p = torch.arange(8.0), torch.arange(8.0), torch.zeros(8), torch.zeros(8)
    y[5] = torch.inf
    with trace() as t:
        kernels.one_of_two[(1,)](x, y, o, p, D=8, FURTHER=further)
    loads = [(a.operation, a.into, a.within, a.lanes) for a in t.accesses]
    assert loads == ([("load", "y", False, 3)] if further else [])
    read, *_, stored = t.sites
    assert read.into == "y" and stored.into == "p" and stored.nan + stored.inf == 1 + further
    assert torch.equal(o, 2 * x)


@pytest.mark.interpret
def test_our_kernels_with_two_rows_in_a_tile_are_followed():
    made = inputs("rwkv7", T=40, H=1, K=40, V=40, dtype=torch.float16, requires_grad=True)

    def call():
        flakit.chunk_rwkv7(**made, chunk_size=16, backend="triton")[0].float().sum().backward()

    with trace() as t:
        call()
    assert t.finite and not t.accesses
    made["k"].data[0, 20, 0, 3] = torch.inf
    with trace() as t:
        call()
    assert not t.accesses and t.first.into == "k" and t.first.inf == 1
    assert {"o", "dr", "da", "dk", "db"} <= {site.into for site in t.sites}


@pytest.mark.interpret
def test_what_one_kernel_stores_another_reads(kernels):
    x, between, o = torch.full((16,), -100.0), torch.zeros(16), torch.zeros(16)
    x[3] = 100.0
    with trace() as t:
        kernels.masked_by_the_store[(1,)](x, between, 16, D=16)
        kernels.halve[(1,)](between, o, D=16)
    assert [(s.place.kernel, s.operation) for s in t.sites] == [
        ("masked_by_the_store", "exp"), ("masked_by_the_store", "store"),
        ("halve", "load"), ("halve", "multiply"), ("halve", "store"),
    ]  # fmt: skip
    assert t.roots == [t.first] and [s.into for s in t.first.stores] == ["o", "o"]


@pytest.mark.interpret
@pytest.mark.parametrize("descriptor", [False, True])
def test_block_pointers_and_descriptors(kernels, descriptor):
    x = torch.zeros(24, 16)
    x[20, 3] = 90.0
    with trace() as t:
        kernels.through_blocks[(2,)](x, torch.zeros(24, 16), 24, D=16, C=16, DESCRIPTOR=descriptor)
    assert t.first.place.line == marked("by descriptor" if descriptor else "by block")
    assert (t.first.first.program, t.first.first.index) == ((1, 0, 0), (4, 3)) and not t.accesses
    assert [site.into for site in t.first.stores] == ["o"]


@pytest.mark.interpret
def test_atomic_sums(kernels):
    x = torch.zeros(16)
    x[[3, 14]] = 90.0
    with trace() as t:
        kernels.summed[(1,)](x, torch.zeros(16), 12, D=16)
    (store,) = t.first.stores
    assert (store.operation, store.place.line, store.inf) == ("atomic", marked("added"), 1)
    with trace() as t:
        kernels.summed[(1,)](x, torch.zeros(8), 12, D=16)
    assert [(a.operation, a.into, a.lanes) for a in t.accesses] == [("atomic", "o", 4)]


@pytest.mark.interpret
def test_a_nan_among_the_inputs_is_named_as_read(kernels):
    x = torch.zeros(16)
    x[5], x[7] = math.nan, -math.inf
    with trace() as t:
        kernels.halve[(1,)](x, torch.zeros(16), D=16)
    assert (t.first.how, t.first.into, t.first.first.index) == ("read", "x", (5,))


@pytest.mark.interpret
def test_bfloat16_is_said_to_be_wrong_in_the_interpreter(kernels):
    x = torch.ones(16, dtype=torch.bfloat16)
    with trace() as t:
        kernels.in_bfloat16[(1,)](x, torch.zeros_like(x), D=16)
    assert any("bfloat16" in words for words in t.notes)


@pytest.mark.interpret
def test_the_interpreter_is_left_as_it_was_also_after_an_error(kernels):
    from triton.runtime import interpreter

    before = dict(interpreter.InterpreterBuilder.__dict__)
    with pytest.raises(ZeroDivisionError), trace():
        raise ZeroDivisionError
    assert dict(interpreter.InterpreterBuilder.__dict__) == before
    o = torch.zeros(16)
    kernels.halve[(1,)](torch.ones(16), o, D=16)
    assert torch.equal(o, torch.full((16,), 0.5))


@pytest.mark.interpret
def test_an_unknown_interpreter_is_refused_by_name(monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter, "ReduceScanOpInterface")
    with (
        pytest.raises(RuntimeError, match=r"trace: .*3\.6 and 3\.7.*; Triton \d+\.\d+.*ReduceScanOpInterface"),
        trace(),
    ):
        pass


# --- the casebook's kernels -----------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.parametrize("gate, bad", [(-1.84, False), (-1.86, True)])
def test_padding(gate, bad):
    x = padding.inputs(120, gate, K=8, M=8)
    with trace() as t:
        found = padding.run(x, backend="triton")
    assert found["ds"].isfinite().all() != bad
    if not bad:
        assert t.finite and 0 < t.headroom[0].room < 1
        return
    first = t.first_in("key_grads_kernel")
    assert first.place.line in line_of(first.place.file, "tl.exp(b_seen - b_n[None, :])") and first.operation == "exp"
    assert first.first.program == (6, 0, 0) and first.first.index == (8, 0)  # block 6 of 8, its ninth row: t = 120
    (store,) = first.stores
    assert store.into == "d" and store.programs == {(6, 0, 0)} and store.first.nan == 16 * 8


@pytest.mark.interpret
@pytest.mark.parametrize("w, bad", [(-88.7, False), (-88.8, True)])
def test_anchor(w, bad):
    x = anchor.spike(16, w)
    with trace() as t:
        found = anchor.run(x, "first-row", backend="triton")
    assert found.tensors["o"].isfinite().all() != bad
    assert t.headroom[0].room == pytest.approx(LN_MAX + w, abs=1e-4)
    if bad:
        source = t.first.place.file
        assert t.first.place.line in line_of(source, "b_q = b_q * tl.exp(") and t.first.operation == "exp"
        assert (t.first.first.program, t.first.first.index, t.first.first.inf) == ((1, 0, 0), (0, 0), 64)
        assert {site.into for site in t.first.stores} >= {"A"}
    else:
        assert t.first is None


@pytest.mark.interpret
def test_wrong_head_anchor_and_clamping_and_future_anchor_share_a_kernel():
    from flakit.cases.block_scores_triton import scores

    T, H, K = 32, 3, 16
    g = torch.full((T, H, K), -6.0).cumsum(0)
    ones = torch.ones(T, H, K)
    with trace() as t:
        A = scores(ones, ones, g, anchor=16, short=True)
    assert not A.isfinite().all()
    assert t.first.operation == "exp" and t.first.place.kernel == "block_scores_kernel"
    assert t.first.place.line in line_of(t.first.place.file, "tl.exp(")
    with trace() as t:
        scores(ones, ones, g, anchor=16, bound=40.0)
    assert t.finite and t.headroom[0].room == pytest.approx(LN_MAX - 40, abs=1e-4)


@pytest.mark.interpret
def test_strided_offsets_read_beyond_their_table():
    from flakit.cases.strided_offsets.kernel_triton import run_packed

    table = torch.tensor([[0, 900], [10, 901], [32, 902]])
    x = [torch.ones(1, 32, 1, 16) for _ in range(4)]
    for raw in (False, True):
        with trace() as t:
            run_packed(*x, torch.zeros(1, 32, 1, 16), table[:, 0], raw)
        assert t.finite  # a wrong table, no wrong memory: the kernel masks what it finds


@pytest.mark.interpret
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_our_own_kernels_are_finite_with_headroom(op):
    from flakit.numerics.evaluate import evaluate

    x = inputs(op, T=70, H=1, K=16, **({"M": 16} if op == "gsa" else {}), decay=-8.0, seed=1)
    with trace() as t:
        evaluate(op, x, form="chunk", backend="triton")
    assert t.finite and all(line.room > 80 for line in t.headroom if line.place.kernel)


# --- PyTorch code ---------------------------------------------------------------------------------------------------


def test_the_mask_after_exp_is_found_in_the_backward_pass():
    x = inputs("rwkv6", T=32, H=1, K=4, decay=-3.0)
    with trace() as t:
        found = masking.run(x, "where")
    assert found["o"].isfinite().all() and not found["dw"].isfinite().all()
    (line,) = line_of(t.first.place.file, "exponentials = exponents.exp()")
    assert (t.first.place.line, t.first.operation, t.first.how) == (line, "exp", "born")
    # 30, 31 and 32 decays: 3 + 2 + 1 pairs of 4 channels
    assert (t.first.place.backward, t.first.first.inf) == ("", 24)
    turned = next(site for site in t.sites if site.how == "became NaN")
    assert turned.place.backward == "ExpBackward0" and turned.place.line == line and turned.parents == [t.first]
    assert t.first.family()[-1].place.backward and {by for _, by in t.first.dropped} == {"where"}


@pytest.mark.parametrize("mask", ["before", "where"])
def test_minus_infinity_before_the_exponential_is_no_fault(mask):
    x = inputs("rwkv6", T=32, H=1, K=4, decay=-3.0 if mask == "before" else -2.7)
    with trace() as t:
        masking.run(x, mask)
    assert t.finite


def test_inside_a_custom_backward_infinities_too():
    x = anchor.spike(16, 0.0, K=8)
    x["w"][:, 16, :, 0] = -89.0
    call = anomaly.operator("rwkv6", partial(Products, scheme="first-row"))
    leaves = [y.requires_grad_() for y in x.values()]
    with trace() as t:
        o = call(*leaves)
        o.backward(torch.ones_like(o))
    assert (t.first.operation, t.first.place.expression) in (("exp", "on_query.exp()"), ("exp", ""))
    assert t.first.first.index == (0, 0, 0, 0, 0) and t.first.first.operands[0].at == 89.0
    backward = [site for site in t.sites if site.how == "born" and site.place.backward]
    assert [site.place.backward for site in backward] == ["ChunkedBackward"]
    assert backward[0].place.line in line_of(backward[0].place.file, "on_query.exp()")


def test_inside_a_registered_operator_and_a_value_given_from_outside():
    x = inputs("rwkv6", T=40, H=1, K=4, decay=-0.1)
    x["v"][0, 25, 0, 3] = math.nan
    with trace() as t:
        flakit.chunk_rwkv6(*x.values())
    assert t.first.how == "given" and t.first.first.nan == 1
    assert {site.place.file for site in t.sites} <= {str(p) for p in Path(flakit.__file__).parent.rglob("*.py")}


def test_in_place_operations_and_uninitialised_memory():
    with trace() as t:
        x = torch.empty(8)
        x.zero_()
        x += 1.0
        x[2:4] /= torch.tensor([0.0, 1.0])
        y = x - x.sum()
    assert [(s.operation, s.how, s.place.line - t.first.place.line) for s in t.sites if s.how != "carried"] == [
        ("div", "born", 0), ("sub", "became NaN", 1)
    ]  # fmt: skip
    assert t.first.first.index == (0,) and y.isnan().any()


def test_a_kernel_that_can_be_watched_in_neither_way_is_refused_with_the_command(kernels):
    from flakit.ops.common.dispatch import interpreted

    if interpreted() or torch.cuda.is_available():
        pytest.skip("needs a process without GPU and without TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match=r"kernel halve is compiled .*`flakit trace script.py`"), trace():
        kernels.halve[(1,)](torch.ones(16), torch.zeros(16), D=16)


# --- what is said ---------------------------------------------------------------------------------------------------


def test_the_words_and_the_dict_of_a_trace():
    with trace() as t:
        x = torch.tensor([1.0, 100.0])
        y = x.exp() - x.exp()
    said = str(t)
    assert "First non-finite tile: inf born of finite numbers" in said and "operand" in said
    assert "1 … 100; 100 there" in said and "NaN made of infinities" in said and "Headroom" in said
    plain = t.to_dict()
    assert plain["sites"][0]["index"] == [1] and plain["sites"][0]["how"] == "born"
    assert plain["sites"][-1]["parents"] and plain["headroom"][0]["room"] == pytest.approx(LN_MAX - 100, abs=1e-4)
    assert y.isnan().sum() == 1


def test_a_trace_comes_back_from_its_dict_as_it_was():
    with trace() as t:
        x = torch.tensor([[1.0, 100.0, 2.0], [3.0, 4.0, math.nan]])
        y = torch.where(x > 50, 0.0, x.exp()) - x.exp()
    again = Trace.from_dict(json.loads(json.dumps(t.to_dict())))
    assert str(again) == str(t) and again.picture().png() == t.picture().png()
    assert again.to_dict() == t.to_dict() and y.isnan().any()


@pytest.mark.interpret
def test_a_kernels_trace_comes_back_with_programs_masks_and_lanes(kernels):
    N, T, D = 3, 64, 16
    g, one = torch.full((N, T, D), -1.5), torch.ones(N, T, D)
    g[0] = 0.0
    with trace() as t:
        kernels.anchored_at_the_start[(N,)](one, one, g, torch.zeros(N, T, T), T=T, D=D)
    again = Trace.from_dict(json.loads(json.dumps(t.to_dict())))
    assert str(again) == str(t) and again.picture().png() == t.picture().png() and again.to_dict() == t.to_dict()
    first, same = t.first, again.first
    assert (same.programs, same.dropped, same.fate) == ({(1, 0, 0), (2, 0, 0)}, first.dropped, first.fate)
    assert (same.first.lanes == first.first.lanes).all() and same.place.statement == first.place.statement


def test_a_picture_of_headroom_where_all_is_finite():
    with trace() as t:
        torch.tensor([1.0, 80.0]).exp()
    assert t.finite and t.picture().png().startswith(b"\x89PNG")
    with trace() as t:
        torch.tensor([1.0, 80.0]) * 2
    with pytest.raises(
        ValueError, match="picture: expected a value that is not finite or an exponential, found neither"
    ):
        t.picture()
