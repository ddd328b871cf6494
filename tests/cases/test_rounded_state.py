"""A state in 16 bits between tokens: where it stops counting, that random writes hide it, an operator that does so."""

import pytest
import torch

from flakit.cases import rounded_state as case
from flakit.ops.rwkv6 import fused_recurrent_rwkv6


def last(tokens, dtype="bfloat16", **knobs):
    (row,) = case.show(tokens=tokens, dtype=dtype, **knobs).rows
    assert row.agrees, row
    return row.measured


@pytest.mark.parametrize("dtype", case.BITS)
def test_it_counts_to_two_to_its_bits(dtype):
    end = 2 ** case.BITS[dtype]
    assert end * torch.finfo(getattr(torch, dtype)).eps == 2
    assert [last(tokens, dtype) for tokens in (end - 1, end, end + 1, 2 * end)] == [end - 1, end, end, end]
    assert case.show(tokens=2 * end, dtype=dtype, writes="all equal", between=True, seed=0).stopped == end
    assert last(2 * end, dtype, between=False) == 2 * end


@pytest.mark.parametrize("wrong", [lambda n: n, lambda n: min(n, 128), lambda n: min(n, 512)])
def test_other_laws_fail(wrong):
    assert not all(last(tokens) == wrong(tokens) for tokens in (100, 200, 300, 1024))


def test_random_writes_hide_it():
    shown = case.show(tokens=1024, dtype="bfloat16", writes="at random", between=True, seed=0)
    assert shown.stopped is None and shown.lost < 0.05
    assert case.show(tokens=1024, dtype="bfloat16", writes="all equal", between=True, seed=0).lost == 0.75


def test_an_operator_that_hands_its_state_on_so_stops_as_well():
    x = torch.ones(1, 300, 1, 1)
    state = torch.zeros(1, 1, 1, 1)
    for t in range(300):
        one = x[:, t : t + 1]
        state = fused_recurrent_rwkv6(
            one, one, one, 0 * one, one[0, 0], initial_state=state.bfloat16().float(), output_final_state=True
        ).final_state
    assert state.bfloat16().item() == case.run(case.written(300), "bfloat16")[-1] == 256
    whole = fused_recurrent_rwkv6(x, x, x, 0 * x, x[0, 0], output_final_state=True).final_state
    assert whole.item() == 300
