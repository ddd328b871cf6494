"""States rebuilt backwards by division: the law of their error, which gradients inherit it, and the right form."""

import math

import numpy as np
import pytest
import torch

from flakit.cases import backstepping as case
from flakit.cases.laws import Row
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import truth
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import operator


def shown(w=-1.0, chunk=16, op="rwkv7", rebuilt="by division", seed=0):
    return case.show(w=w, chunk=chunk, op=op, rebuilt=rebuilt, seed=seed)


@pytest.mark.parametrize("op", case.SUMS)
@pytest.mark.parametrize("w", [-0.1, -case.STRONGEST, -1.0, -1.5, -5.0])
def test_law_says_how_far_a_row_is_off(op, w):
    assert all(row.agrees is not False for row in case.show(w=w, op=op).rows)
    off, steps = shown(w, op=op).by_steps, range(1, 17)
    expected = torch.tensor([case.grown(w, n, op) for n in steps])
    beyond = expected > 1e-5
    ratios = (off[:, -1] / expected)[beyond]
    assert ((ratios > 0.5) & (ratios < 2)).all()


@pytest.mark.parametrize(("op", "chunk"), [("rwkv7", 4), ("rwkv6", 16), ("rwkv7", 32)])
def test_law_says_where_it_begins(op, chunk):
    assert case.onset(chunk, op) == pytest.approx(case.law(chunk, op), rel=0.05)


def test_the_bound_of_rwkv7_allows_sixteen_tokens_and_no_more():
    assert case.law(32) < case.STRONGEST < case.law(16)
    assert case.onset(32) < case.STRONGEST < case.onset(16)


WRONG_LAWS = {
    "a token more": lambda chunk: case.law(chunk + 2),
    "where float32 ends": lambda chunk: math.log(torch.finfo(torch.float32).max) / chunk,
    "no rounding is rounded": lambda chunk: math.log(case.ROUNDED / 2**-24) / chunk / 1.2,
    "one limit for all chunks": lambda chunk: case.law(16),
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    rows = [Row("", math.nan, WRONG_LAWS[wrong](chunk), case.onset(chunk), 0.05) for chunk in (8, 16)]
    assert not all(row.agrees for row in rows)


def test_states_are_those_of_numpy_in_float64_walked_back_without_an_error():
    """In float64 the walk back is right to 1e-6 even where float32 has not one digit: it is the rounding alone."""
    x = {name: y.double() for name, y in case.inputs(-1.5).items()}
    forward = list(operator("rwkv7").reference.steps(**x))
    after, before = case.states(x, forward, "rwkv7", 16, "by division")
    S = x["initial_state"].numpy()
    for t in range(x["w"].shape[1]):
        assert np.allclose(before[:, t], S, rtol=1e-4, atol=1e-5)
        r, w, k, v, a, b = (x[name][:, t].numpy() for name in ("r", "w", "k", "v", "a", "b"))
        S = np.exp(w)[..., None] * S + np.einsum("bhk,bhj,bhjv->bhkv", b, a, S) + k[..., None] * v[..., None, :]
        assert np.allclose(after[:, t], S, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", case.SUMS)
@pytest.mark.parametrize("T", [1, 37])
def test_forward_again_is_right_and_division_spoils_what_reads_states(op, T):
    x = inputs(op, T=T, H=2, K=5, V=7, decay=-2.0, initial_state=True)
    exact = truth(op, x, recurrence=True)
    right, found = (case.run(x, op, rebuilt=rebuilt) for rebuilt in ("forward again", "by division"))
    assert set(right) == set(found) == set(exact)
    for name, y in exact.items():
        assert right[name].isfinite().all() and relative_l2(right[name], y) < 1e-6, name
        read = name in case.READ[op] and T > 16
        assert (relative_l2(found[name], y) > 1) if read else (relative_l2(found[name], y) < 1e-5), name


def test_a_decay_that_forgets_all_divides_by_zero():
    x = inputs("rwkv6", T=20, H=1, K=4, V=4, decay=-110.0, initial_state=True)
    found = case.run(x, "rwkv6")
    assert found["o"].isfinite().all() and found["dk"].isfinite().all()
    assert not found["dr"].isfinite().all() and not found["dw"].isfinite().all()
