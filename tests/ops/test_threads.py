"""Many threads at once: each gets the bits that it gets alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flakit
from flakit.numerics.operators import OPERATORS
from tests.ops.places import INTERPRETED, PLACES, of
from tests.ops.settings import Setting

THREADS = 8
SETTING = Setting(T=21, K=16, V=16, H=1, decay="rwkv6-init", states="both")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_threads_get_the_bits_that_one_gets_alone(place, op, form):
    calls = [place.make(of(op, SETTING), T=5 + i, H=1 + i % 2) for i in range(THREADS)]
    alone = [place.run(*call, form, op) for call in calls]
    together = threading.Barrier(THREADS)

    def run(call):
        together.wait(timeout=120)
        return place.run(*call, form, op)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(run, calls))
    for right, got in zip(alone, found, strict=True):
        assert not [name for name in right if not torch.equal(right[name], got[name])]


@pytest.mark.interpret
def test_a_traced_thread_is_no_other_threads_concern():
    """A trace and an operator's calls beside it: neither disturbs the other."""
    from flakit.cases.block_scores_triton import scores

    made, arriving = INTERPRETED.make(of("rwkv6", SETTING), T=8)
    alone = INTERPRETED.run(made, arriving, "recurrent")
    q = torch.ones(4, 1, 4)
    g = torch.tensor([0.0, -50.0, -100.0, -200.0]).view(4, 1, 1).expand(4, 1, 4).contiguous()
    together = threading.Barrier(2)

    def traced():
        together.wait(timeout=120)
        found = []
        for _ in range(6):
            with flakit.trace() as t:
                scores(q, q, g, anchor=0)
            found.append(f"{t.first.place}, {len(t.sites)}")
        return found

    def run():
        together.wait(timeout=120)
        return [INTERPRETED.run(made, arriving, "recurrent") for _ in range(6)]

    with ThreadPoolExecutor(3) as pool:
        (traces, beside) = (x.result() for x in [pool.submit(traced), pool.submit(run)])
    for got in beside:
        assert not [name for name in alone if not torch.equal(alone[name], got[name])]
    assert len(set(traces)) == 1 and "block_scores_kernel" in traces[0], traces


@pytest.mark.interpret
def test_traces_of_two_threads_wait_for_each_other():
    """Each finds its own fault, and what they replaced in the interpreter is as it was before."""
    from triton.runtime import interpreter

    from flakit.cases.block_scores_triton import scores

    before = dict(vars(interpreter.InterpreterBuilder)), interpreter.GridExecutor.__call__
    together = threading.Barrier(2)

    def traced(anchor):
        q = torch.ones(4, 1, 4)
        g = torch.tensor([0.0, -50.0, -100.0, -200.0]).view(4, 1, 1).expand(4, 1, 4).contiguous()
        together.wait(timeout=120)
        found = []
        for _ in range(6):
            with flakit.trace() as t:
                scores(q, q, g, anchor=anchor)
            found.append((str(t.first.place), len(t.sites)))
        return found

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(traced, (0, 3)))
    assert [len(set(found)) for found in both] == [1, 1] and both[0] != both[1], both
    assert before == (dict(vars(interpreter.InterpreterBuilder)), interpreter.GridExecutor.__call__)
