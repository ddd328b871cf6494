"""The trace on a GPU: kernels compiled in their rewritten form, at real sizes and in bfloat16, and what that costs."""

import time

import pytest
import torch

import flakit
from flakit import trace
from flakit.cases import anchor, padding
from flakit.numerics.inputs import inputs
from flakit.ops.common.dispatch import has_triton
from tests.instruments.test_trace import ANCHORED, line_of

if not has_triton():
    pytest.skip("needs Triton", allow_module_level=True)

from flakit.instruments import trace_compiled_triton as compiled
from tests.instruments import faulty_triton as faulty

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def cuda(x):
    return {name: y.cuda() if isinstance(y, torch.Tensor) else y for name, y in x.items()}


@DTYPES
def test_line_program_count_and_first_lane(dtype):
    N, T, D = 300, 64, 16
    g = torch.zeros(N, T, D, device="cuda")
    g[7, 10:, 5], g[299, 10:, 5] = -2.0, -3.0
    r = torch.ones(N, T, D, device="cuda", dtype=dtype)
    A, plain = torch.zeros(N, T, T, device="cuda"), torch.zeros(N, T, T, device="cuda")
    faulty.anchored_at_the_start[(N,)](r, r, g, plain, T=T, D=D)
    with trace() as t:
        faulty.anchored_at_the_start[(N,)](r, r, g, A, T=T, D=D)
    sites = [s for s in t.sites if s.place.kernel]
    assert [(s.place.line, s.operation, s.how) for s in sites] == ANCHORED
    tile = sites[0].first
    assert (tile.program, tile.shape, tile.index, tile.nan, tile.inf) == ((7, 0, 0), (T, D), (54, 5), 0, 10)
    assert sites[0].programs == {(7, 0, 0), (299, 0, 0)} and sites[0].inf == 35
    assert sites[-1].nan == int(A.isnan().sum()) and sites[-1].into == "A"
    assert torch.equal(A.isnan(), plain.isnan()) and torch.equal(A.nan_to_num(), plain.nan_to_num())


@pytest.mark.parametrize("w, bad", [(-88.7, False), (-88.8, True)])
def test_anchor(w, bad):
    x = cuda(anchor.spike(16, w))
    with trace() as t:
        found = anchor.run(x, "first-row", backend="triton")
    assert found.tensors["o"].isfinite().all() != bad
    first = t.first_in("scores_kernel")
    if not bad:
        assert t.first is None
        return
    assert first.place.line in line_of(first.place.file, "b_q = b_q * tl.exp(") and first.operation == "exp"
    assert (first.first.program, first.first.index, first.first.inf) == ((1, 0, 0), (0, 0), 64)
    assert {site.into for site in first.stores} >= {"A"}


def test_anchor_in_bfloat16_at_a_real_size():
    from flakit.cases.anchor import tiles_triton

    B, N, C, K = 8, 64, 64, 64
    w = torch.full((B, 1, N, C, K), -0.01, device="cuda")
    w[3, 0, 40, 16] = -90.0
    gi = w.cumsum(-2)
    q = torch.ones(B, 1, N, C, K, device="cuda", dtype=torch.bfloat16)
    with trace() as t:
        A = tiles_triton.scores(q, q, gi - w, gi, 16, 0, False)
    first = t.first_in("scores_kernel")
    assert not A.isfinite().all()
    assert first.place.line in line_of(first.place.file, "b_q = b_q * tl.exp(") and first.operation == "exp"
    assert (first.first.program, first.first.index, first.first.inf) == ((1, 40, 3), (0, 0), 64)


@DTYPES
def test_padding(dtype):
    from flakit.cases.padding import kernel_triton

    if dtype == torch.float32:
        x = cuda(padding.inputs(120, -1.86, K=8, M=8))
        with trace() as t:
            found = padding.run(x, backend="triton")
        assert not found["ds"].isfinite().all()
    else:
        g = torch.full((4, 2, 2, 64, 32), -1.86, device="cuda").cumsum(-2)
        x = torch.ones(4, 2, 2, 64, 32, device="cuda", dtype=dtype)
        A = torch.ones(4, 2, 2, 64, 64, device="cuda")
        with trace() as t:
            kernel_triton.key_grads(A, x, g, g, 120, 16, "chunk")
    first = t.first_in("key_grads_kernel")
    assert first.place.line in line_of(first.place.file, "tl.exp(b_seen - b_n[None, :])") and first.operation == "exp"
    assert first.first.program == (6, 0, 0) and first.first.index == (8, 0)
    (store,) = first.stores
    assert store.into == "d"


@DTYPES
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_our_own_operators_are_finite_and_compute_the_same(op, dtype, record_property, monkeypatch):
    x = cuda(inputs(op, B=2, T=1000, H=4, K=64, dtype=dtype, decay=-0.5, seed=0))
    call = getattr(flakit, f"chunk_{op}")
    launches = []  # of each that is watched: made, and its checks' parts that were right and that were not

    def watch_parts(made, *more):
        settled, not_measured = watched(made, *more)
        launches.append((made, list(settled), list(not_measured)))
        return settled, not_measured

    watched = compiled.watch_parts
    monkeypatch.setattr(compiled, "watch_parts", watch_parts)
    with monkeypatch.context() as patch:
        patch.setattr(
            "flakit.ops.common.bands_triton.runs_gluon", lambda *tensors: False
        )  # as under a trace, in Triton
        plain = call(*x.values()).o
    start = time.perf_counter()
    with trace() as t:
        traced = call(*x.values()).o
    torch.cuda.synchronize()
    record_property("seconds, compiling included", round(time.perf_counter() - start, 1))
    assert t.finite, str(t)  # no line is reported that is not wrong
    assert torch.equal(plain, traced)
    assert launches
    places = set()
    for made, right, not_measured in launches:
        lost = [i for i in range(len(made.checks)) if any(i % n == j for j, n in not_measured)]
        covered = [i for i in range(len(made.checks)) for j, n in right if i % n == j]
        assert sorted([*covered, *lost]) == list(range(len(made.checks)))  # each check once
        assert len(lost) == len(not_measured), str(t)  # down to single checks, and right without any
        places |= {made.checks[i].place.short for i in lost}
        if len(right) > 1 or lost:
            words = f"{len(right)}, {len(lost)} of {len(made.checks)}"
            record_property(f"{made.plain.__name__}: parts, and checks not measured", words)
    named = {place for words in t.notes for place in words.partition(" not measured: ")[2].split(", ")}
    assert named == places and bool(t.notes) == bool(places), str(t)


def _milliseconds(run, rounds=20):
    run(), run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[rounds // 2]


@DTYPES
def test_overhead_of_the_checks(dtype, record_property):
    """Kernel alone: the launch table, buffers and their reading left out."""
    from flakit.instruments.trace_rewrite_triton import rewritten

    N, T, D = 4096, 64, 64
    g = torch.full((N, T, D), -0.01, device="cuda")
    r, A = torch.ones(N, T, D, device="cuda", dtype=dtype), torch.zeros(N, T, T, device="cuda")
    made = rewritten(faulty.anchored_at_the_start)
    seen = made.buffer((N,), torch.device("cuda"))
    plain = _milliseconds(lambda: faulty.anchored_at_the_start[(N,)](r, r, g, A, T=T, D=D))
    checked = _milliseconds(lambda: made.kernel[(N,)](seen, r, r, g, A, T=T, D=D))
    assert not seen.any()
    record_property("kernel, ms", f"{plain:.3f} plain, {checked:.3f} checked: {checked / plain:.1f}x")
    g[:, 10:] = -2.0
    bad = _milliseconds(lambda: made.kernel[(N,)](seen, r, r, g, A, T=T, D=D))
    assert seen.any()
    record_property("kernel, all programs bad, ms", f"{bad:.3f}: {bad / plain:.1f}x")
