"""A kernel rewritten: it computes what it did, reports where it turns bad, compiles for GPUs that are not here."""

import math
import re

import pytest
import torch

from flakit import trace
from flakit.cases import anchor, padding
from flakit.instruments.trace_record import Trace
from flakit.ops.common.dispatch import has_triton, interpreted
from tests.instruments.test_trace import ANCHORED, line_of, marked

if not has_triton():
    pytest.skip("needs Triton", allow_module_level=True)

from flakit.instruments import trace_compiled_triton as compiled
from flakit.instruments.trace_rewrite_triton import ALL, NONE, rewritten
from tests.instruments import faulty_triton as faulty


class Watched:
    """A kernel that is launched rewritten, and what it then reports."""

    def __init__(self, kernel):
        self.made, self.kernel, self.trace, self.memory = rewritten(kernel), kernel, Trace(), {}

    def __getitem__(self, grid):
        import inspect

        def launch(*args, **kwargs):
            given = inspect.signature(self.kernel.fn).bind(*args, **kwargs).arguments
            seen = self.made.buffer(grid, torch.device("cpu"))
            self.made.kernel[grid](seen, *args, **kwargs)
            compiled.read(self.trace, self.made, seen, grid, given, self.memory)

        return launch


@pytest.fixture
def watch(monkeypatch):
    """Launch a module's kernel rewritten from now on."""

    def replace(module, name):
        watched = Watched(getattr(module, name))
        monkeypatch.setattr(module, name, watched)
        return watched

    return replace


# --- interpreted: what it reports -----------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_lines_lanes_and_parents_of_an_overflow():
    N, T, D = 3, 64, 16
    g = torch.zeros(N, T, D)
    g[1, 10:, 5], g[2, 10:, 5] = -2.0, -3.0
    r, k, A, plain = torch.ones(N, T, D), torch.ones(N, T, D), torch.zeros(N, T, T), torch.zeros(N, T, T)
    faulty.anchored_at_the_start[(N,)](r, k, g, plain, T=T, D=D)
    kernel = Watched(faulty.anchored_at_the_start)
    kernel[(N,)](r, k, g, A, T=T, D=D)
    assert torch.equal(A.nan_to_num(), plain.nan_to_num()) and torch.equal(A.isnan(), plain.isnan())
    t = kernel.trace
    assert [(s.place.line, s.operation, s.how) for s in t.sites] == ANCHORED
    assert [s.parents for s in t.sites[1:]] == [[s] for s in t.sites[:-1]]
    tile = t.first.first
    assert (tile.program, tile.shape, tile.dtype, tile.index) == ((1, 0, 0), (T, D), "float32", (54, 5))
    assert (tile.nan, tile.inf) == (0, 10) and t.first.inf == 10 + 64 - 39
    assert t.first.programs == {(1, 0, 0), (2, 0, 0)} and t.first.tiles == 2
    assert t.sites[-1].into == "A" and t.sites[-1].nan == int(A.isnan().sum()) and "reaches A" in t.first.fate


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_loads_in_conditions_and_a_local_name_that_is_an_arguments():
    flag, n, y, o = torch.tensor([0, 2]), torch.tensor([1, 1]), torch.full((2, 8), 100.0), torch.zeros(2, 8)
    y[1, 3] = math.inf
    kernel = Watched(faulty.where_a_flag_says_so)
    kernel[(2,)](flag, n, y, o, D=8)
    assert not o[0].any() and o[1].isinf().all()
    read, *_, stored = kernel.trace.sites
    assert (read.operation, read.how, read.into) == ("load", "read", "y") and (read.inf, read.nan) == (1, 0)
    assert (stored.operation, stored.into, stored.inf) == ("store", "o", 8)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_helper_in_a_loop():
    x = torch.zeros(5, 8)
    x[3, 2] = 100.0
    kernel = Watched(faulty.in_a_loop_with_a_helper)
    kernel[(2,)](x, torch.zeros(2, 8), 5, D=8)
    lines = [(s.place.line, s.tiles) for s in kernel.trace.sites]
    assert lines[:2] == [(marked("in a helper"), 2), (marked("called here"), 4)]
    assert kernel.trace.sites[1].parents == [kernel.trace.first]


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masks_read_values_and_finite_kernels():
    x = torch.full((16,), -1.0)
    x[12:] = 90.0
    kernel = Watched(faulty.masked_by_the_store)
    kernel[(1,)](x, torch.zeros(16), 12, D=16)
    assert [s.operation for s in kernel.trace.sites] == ["exp"] and "No store" in kernel.trace.first.fate
    kernel = Watched(faulty.softmax_with_infinite_masks)
    kernel[(1,)](torch.ones(8), torch.zeros(8), 5, D=8)
    assert kernel.trace.finite
    x[3] = math.nan
    kernel = Watched(faulty.halve)
    kernel[(1,)](x, torch.zeros(16), D=16)
    assert [(s.how, s.into) for s in kernel.trace.sites] == [("read", "x"), ("carried", ""), ("stored", "o")]
    assert kernel.trace.first.first.index == (3,)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_it_names_what_the_interpreters_trace_names_in_the_casebook(watch):
    from flakit.cases.anchor import tiles_triton
    from flakit.cases.padding import kernel_triton

    cases = [
        (tiles_triton, "scores_kernel", lambda: anchor.run(anchor.spike(16, -88.8), "first-row", backend="triton")),
        (kernel_triton, "key_grads_kernel", lambda: padding.run(padding.inputs(120, -1.9, K=8, M=8), backend="triton")),
    ]
    for module, name, run in cases:
        with trace() as t:
            run()
        kernel = watch(module, name)
        run()
        first, again = t.first_in(name), kernel.trace.first
        assert (again.place.line, again.operation) == (first.place.line, first.operation)
        assert (again.first.program, again.first.index, again.first.inf) == (
            first.first.program, first.first.index, first.first.inf,
        )  # fmt: skip
        assert [s.into for s in again.stores] == [s.into for s in first.stores]


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_parts_of_the_checks_see_together_what_all_see():
    g, r = torch.full((2, 64, 16), -3.0), torch.ones(2, 64, 16)
    x = torch.zeros(5, 8)
    x[3, 2] = 100.0
    for kernel, grid, args, sizes in [
        (faulty.anchored_at_the_start, (2,), (r, r, g, torch.zeros(2, 64, 64)), {"T": 64, "D": 16}),
        (faulty.in_a_loop_with_a_helper, (2,), (x, torch.zeros(2, 8), 5), {"D": 8}),
    ]:
        made = rewritten(kernel)

        def seen_by(part, made=made, grid=grid, args=args, sizes=sizes):
            seen = made.buffer(grid, torch.device("cpu"))
            made.with_part(part).kernel[grid](seen, *args, **sizes)
            return seen

        parts = [finer for part in made.smaller(ALL) for finer in made.smaller(part) or [part]]
        seen = [seen_by(part) for part in parts]
        together = seen_by(ALL)
        assert together.any() and not any(torch.equal(x, together) for x in seen)
        assert torch.equal(made.merged(seen), together) and torch.equal(made.merged(seen[::-1]), together)
        assert not seen_by(NONE).any()


# --- compiled ahead of time -----------------------------------------------------------------------------------------


def launched(dtype):
    """The launches of the faulty kernels and of the casebook's, with tensors of one dtype."""
    from flakit.cases.anchor import tiles_triton
    from flakit.cases.padding import kernel_triton
    from tests.ops.compiling import launches

    x, g = torch.zeros(2, 64, 16, dtype=dtype), torch.zeros(2, 64, 16)
    tile, A = torch.zeros(1, 1, 2, 64, 32, dtype=dtype), torch.zeros(1, 1, 2, 64, 64, dtype=dtype)

    def run():
        faulty.anchored_at_the_start[(2,)](x, x, g, torch.zeros(2, 64, 64, dtype=dtype), T=64, D=16)
        faulty.in_a_loop_with_a_helper[(2,)](x, x, 5, D=8)
        faulty.masked_by_the_store[(1,)](x, x, 8, D=16)
        faulty.softmax_with_infinite_masks[(1,)](g, x, 8, D=16)
        faulty.in_bfloat16[(1,)](x, x, D=16)
        if dtype == torch.float32:
            tiles_triton.scores(tile, tile, tile, tile, 16, 0, False)
            tiles_triton.read(A, tile, tile, tile, 16, 0, False)
            kernel_triton.key_grads(A, tile, tile, tile, 120, 16, "chunk")

    return launches(run)


@pytest.mark.skipif(interpreted(), reason="needs a process without TRITON_INTERPRET")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rewritten_kernels_compile_for_a_gpu(dtype):
    from tests.ops.compiling import Launch, compile_for

    for launch in launched(dtype):
        made = rewritten(launch.kernel)
        seen = made.buffer((4,), torch.device("cpu"))
        used = compile_for(Launch(made.kernel, (seen, *launch.args), launch.options, launch.row), 90)
        assert used.registers > compile_for(launch, 90).registers  # the checks are there


@pytest.mark.skipif(interpreted(), reason="needs a process without TRITON_INTERPRET")
def test_a_part_of_the_checks_compiles_to_its_checks_alone():
    from tests.ops.compiling import Launch, compiled_for, ptx

    (launch,) = [x for x in launched(torch.bfloat16) if x.kernel is faulty.softmax_with_infinite_masks]
    made = rewritten(launch.kernel)

    def left(part):
        args = made.buffer((4,), torch.device("cpu")), *launch.args
        kernel = compiled_for(Launch(made.with_part(part).kernel, args, launch.options, launch.row), 90)
        return ptx(kernel).count("atom.")

    parts = [left(part) for part in made.smaller(ALL)]
    assert left(NONE) == 0 and all(parts) and sum(parts) == left(ALL)


def operators():
    from tests.ops.gsa import configurations as gsa
    from tests.ops.rwkv6 import configurations as rwkv6
    from tests.ops.rwkv7 import configurations as rwkv7

    return {"rwkv6": rwkv6, "rwkv7": rwkv7, "gsa": gsa}


@pytest.mark.full
@pytest.mark.skipif(interpreted(), reason="needs a process without TRITON_INTERPRET")
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_a_kernel_of_each_form_compiles_rewritten(op, form):
    from tests.ops.compiling import Launch, compiled_for, ptx, tile

    kernel = "stream_kernel" if form == "chunk" else "pass_kernel" if op == "gsa" else "recurrent_kernel"
    found = [x for c in operators()[op].CONFIGURATIONS.values() for x in c.kernels() if x.kernel.fn.__name__ == kernel]
    launch = min(found, key=lambda x: (len(x.name), tile(x)))  # with fewest switches, since checks take long to compile
    made = rewritten(launch.kernel)
    seen = made.buffer((4,), torch.device("cpu"))
    checked = compiled_for(Launch(made.kernel, (seen, *launch.args), launch.options, launch.row), 90)
    assert len(ptx(checked)) > len(ptx(compiled_for(launch, 90)))  # the checks are there


def test_every_check_knows_its_line():
    checks = rewritten(faulty.anchored_at_the_start).checks
    (exp,) = [check for check in checks if check.place.expression == "tl.exp(-b_g)"]
    assert exp.place.line == marked("born") == line_of(exp.place.file, "# born")[0]


@pytest.fixture
def launched_here(monkeypatch):
    """What would be launched, on a GPU that is not there: (kernel, arguments, grid, options); `.does` acts on them.

    `.compiled`: the kernels that would only be compiled.
    """
    from triton.runtime.jit import JITFunction

    class Launched(list):
        does = staticmethod(lambda kernel, args: None)
        compiled = []

        def launch(self, kernel, *args, grid, warmup, **kwargs):
            if warmup:
                self.compiled.append(kernel)
                return
            self.append((kernel, args, grid, kwargs))
            self.does(kernel, args)

    found = Launched()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **more: found.launch(kernel, *args, **more))
    return found


COMPILED = pytest.mark.skipif(interpreted(), reason="needs a process without TRITON_INTERPRET")


@COMPILED
def test_on_a_gpu_a_launch_is_the_kernel_and_on_copies_the_rewritten_one_with_a_buffer(launched_here):
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    x, o = torch.ones(64), torch.zeros(64)
    with trace() as t:
        faulty.halve[lambda meta: (meta["x"].numel() // meta["D"], 3)](x, o, D=16, num_warps=2)
    (plain, args, grid, kwargs), (kernel, (seen, *copies), *rest) = launched_here
    made = rewritten(faulty.halve)
    assert plain is faulty.halve and args[0] is x and args[1] is o and kwargs == {"D": 16, "num_warps": 2}
    assert kernel is made.kernel and rest == [grid, kwargs] and grid == (4, 3)
    assert [y.tolist() for y in copies] == [x.tolist(), o.tolist()]
    assert not {y.data_ptr() for y in copies} & {x.data_ptr(), o.data_ptr()}
    assert seen.numel() == len(made.checks) * 8 + 12 * (len(made.checks) + 1)
    assert t.grids == {"halve": (4, 3, 1)} and t.finite and not t.notes and JITFunction.run is before


@COMPILED
@pytest.mark.parametrize("off, told", [(2**-9, False), (0.1, True), (math.nan, True)])
def test_a_rewritten_kernel_that_computes_something_else_is_told_and_changes_nothing(launched_here, off, told):
    def does(kernel, args):
        *_, x, o = args
        o.copy_(x / 2)
        if kernel is not faulty.halve:
            o[5] += off

    launched_here.does = does
    both = torch.rand(100)  # one memory, in which the two stand
    x, o = both[:40], both[50:90]
    with trace() as t:
        faulty.halve[(4,)](x, o, D=10)
    assert torch.equal(o, x / 2) and t.finite  # what the trace itself computes is no part of it
    assert [("computes something else (o)" in words) for words in t.notes] == [True] * told


MADE = rewritten(faulty.anchored_at_the_start)
SITES = frozenset(range(len(MADE.checks)))


def sites_of(kernel):
    """The checks in a rewritten kernel's source."""
    return {int(site) for site in re.findall(r"flakit_seen, (\d+), flakit_sites", kernel.src)}


@COMPILED
@pytest.mark.parametrize(
    "wrong, lost, parts",
    [
        ([], [], 1),
        ([{2, 3}], [], 4),  # together in no quarter
        ([{1, 5}], [], 5),  # together in a quarter, in no eighth
        ([{6}], [6], 5),  # quarters 0, 1, 3; of quarter 2 the check 2 (and 10), and 6 by itself
        ([{0, 8}, {7}, {3, 4}], [7], 6),
        ([set()], SITES, 0),  # wrong without a check: nothing to be gained by smaller parts
    ],
    ids=["never", "two", "two in a quarter", "one", "several", "always"],
)
def test_checks_that_make_a_kernel_compute_something_else_are_kept_apart(launched_here, wrong, lost, parts):
    """A compiler that is wrong where all checks of one of the sets `wrong` are in a kernel."""

    def does(kernel, args):
        *_, A = args
        A += 1.0  # so that a launch on what another left is found out
        if kernel is not faulty.anchored_at_the_start:
            own = sites_of(kernel)
            if any(apart <= own for apart in wrong):
                A[0, 3, 4] += 0.5
                own = SITES  # what it says is wrong, too
            seen, programs = args[0], args[0][len(SITES) * 8 :].view(-1, len(SITES) + 1)
            for site in sorted(own):
                seen[site * 8 : site * 8 + 4] = torch.tensor([3, 2, 1, 32])
                programs[1, site + 1] = 1 << 21
                programs[1, 0] = programs[1, 0] or site + 1

    launched_here.does = does
    MADE.settled.clear()
    x = torch.ones(2, 64, 16)
    for again in (False, True):
        A = torch.zeros(2, 64, 64)
        launched_here.clear()
        with trace() as t:
            faulty.anchored_at_the_start[(2,)](x, x, x, A, T=64, D=16)
        assert torch.equal(A, torch.ones(2, 64, 64))  # the program's own is the plain kernel's
        places = [MADE.checks[site].place for site in sorted(SITES - set(lost))]
        assert sorted((s.place.line, s.tiles, s.nan, s.inf) for s in t.sites) == sorted(
            (p.line, 3, 2, 1) for p in places
        )
        assert all(s.programs == {(1, 0, 0)} for s in t.sites) and [s.place for s in t.sites][:1] == places[:1]
        not_measured = sorted({MADE.checks[site].place.line for site in lost})
        (words,) = t.notes or [""]
        assert [int(line) for line in re.findall(r"faulty_triton.py:(\d+)", words)] == not_measured
        assert bool(words) == ("computes something else (A)" in words) == ("not measured" in words) == bool(lost)
        assert ("Every value that was measured was finite" in str(t)) == (not places)
        if again:  # what is right is launched at once, and what no part can check is tried again
            tried = [sites_of(kernel) for kernel, *_ in launched_here[1:]]
            right = [own for own in tried if not any(apart <= own for apart in wrong)]
            assert len(right) == parts and sorted(site for own in right for site in own) == sorted(SITES - set(lost))
            assert len(tried) - parts == (2 if lost is SITES else len(lost))


@COMPILED
def test_many_checks_begin_in_parts(launched_here, monkeypatch):
    from flakit.instruments import trace_rewrite_triton

    monkeypatch.setattr(trace_rewrite_triton, "MOST_CHECKS", 2)
    MADE.settled.clear()
    x = torch.ones(2, 64, 16)
    launched_here.clear()
    with trace() as t:
        faulty.anchored_at_the_start[(2,)](x, x, x, torch.zeros(2, 64, 64), T=64, D=16)
    tried = [sites_of(kernel) for kernel, *_ in launched_here[1:]]
    assert max(map(len, tried)) == 2 and sorted(site for own in tried for site in own) == sorted(SITES)
    assert not t.notes
    MADE.settled.clear()


@COMPILED
def test_parts_are_compiled_beside_each_other_before_they_are_launched(launched_here):
    seen_then = []

    def does(kernel, args):
        seen_then.append((kernel, list(launched_here.compiled)))
        if kernel is MADE.kernel:
            args[-1].add_(1.0)

    launched_here.does = does
    launched_here.compiled.clear()
    MADE.settled.clear()
    x = torch.ones(2, 64, 16)
    with trace() as t:
        faulty.anchored_at_the_start[(2,)](x, x, x, torch.zeros(2, 64, 64), T=64, D=16)
    quarters = [MADE.with_part(part).kernel for part in MADE.smaller(ALL)]
    plain, whole, none = seen_then[:3]
    assert (plain[0], whole[0], none[0]) == (
        faulty.anchored_at_the_start,
        MADE.kernel,
        MADE.with_part(NONE).kernel,
    )
    assert not none[1] and [kernel for kernel, _ in seen_then[3:]] == quarters
    assert all(set(before) == set(quarters) for _, before in seen_then[3:]) and not t.notes
