"""Packed sequences: cut into few batches of similar lengths in plain PyTorch, and into pieces for the kernels."""

from itertools import accumulate
from math import log2

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.packed import (
    buckets,
    joined_rows,
    joined_states,
    positions,
)
from tests.ops.checking import check, true_values
from tests.ops.memory import peak
from tests.ops.settings import Setting, make

OPS = pytest.mark.parametrize("op", list(OPERATORS))
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=40).filter(any)


def offsets(lengths):
    return torch.tensor(list(accumulate(lengths, initial=0)))


@settings(deadline=None)
@given(lengths=LENGTHS)
@example(lengths=[1] * 30 + [1000] + [1] * 30)
@example(lengths=[0, 0, 1, 0])
@example(lengths=[2**n for n in range(12)])
@example(lengths=[2**n - 1 for n in range(12)])
def test_buckets_hold_everything_once_and_little_else(lengths):
    T, N = sum(lengths), len(lengths)
    found = buckets(offsets(lengths))
    assert len(found) <= 2 + log2(T)
    assert sum(x.tokens.numel() for x in found) <= 2 * T + lengths.count(0)

    rows, states = torch.randn(1, T, 2, 3), torch.randn(N, 2)
    for bucket in found:
        held = bucket.rows(rows)
        for n, row in zip(bucket.members.tolist(), held, strict=True):
            start, end = offsets(lengths)[n : n + 2].tolist()
            assert torch.equal(row[: end - start], rows[0, start:end]) and not row[end - start :].any()
    assert torch.equal(joined_rows(found, [x.rows(rows) for x in found], T), rows)
    for state in (states, (states, -states)):
        for part, whole in zip(joined_states(found, [x.states(state) for x in found]), state, strict=True):
            assert torch.equal(part, whole)


DTYPES, STRIDES = st.sampled_from([torch.int32, torch.int64]), st.sampled_from([1, 2])


@settings(deadline=None)
@given(lengths=LENGTHS, dtype=DTYPES, stride=STRIDES)
def test_positions(lengths, dtype, stride):
    given = torch.stack([offsets(lengths).to(dtype)] * stride, 1)[:, 0]
    assert positions(given, sum(lengths)).tolist() == [t for length in lengths for t in range(length)]


@OPS
@FORMS
@pytest.mark.parametrize("decay", ["uniform", "inf-spikes"])
def test_sequences_of_very_different_lengths(op, form, decay, monkeypatch):
    lengths = [1, 0, 40, 3, 1, 1, 1, 0, 1, 17, 1, 2, 1, 1, 1, 1, 1]
    assert len(buckets(offsets(lengths))) >= 3
    monkeypatch.setattr(Setting, "lengths", lengths)
    more = {"M": 24, "group": 2} if op == "gsa" else {}
    setting = Setting(op=op, T=sum(lengths) + 5, H=2, K=24, V=40, decay=decay, states="both", packing="ragged", **more)
    made, arriving = make(setting)
    assert made["cu_seqlens"].diff().tolist() == lengths
    found = evaluate(op, made, form=form, backend="torch", arriving=arriving)
    check(found, true_values(made, arriving, op=op), made)


@pytest.mark.full
@OPS
@FORMS
def test_one_long_sequence_does_not_pad_the_short_ones(op, form, record_property):
    def used(B, T, **packing):
        made = inputs(op, B=B, T=T, H=1, K=16, V=16) | packing
        evaluate(op, made, form=form)  # what the first call alone allocates
        return peak(lambda: evaluate(op, made, form=form))

    apart = used(B=1, T=250) + used(B=100, T=1)
    together = used(B=1, T=350, cu_seqlens=offsets([250] + [1] * 100))
    record_property("peak memory, packed / long and short apart", f"{together / apart:.2f}")
    assert together <= 2 * apart
