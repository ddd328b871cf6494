"""Shapes, dtypes and devices are looked at once for each kind of arguments, and every other kind is still looked at."""

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.validation import Once


@pytest.fixture
def asked():
    return []


@pytest.fixture
def once(asked):
    def check(*given):
        asked.append(given)
        if given[0].ndim != 1:
            raise ValueError("one axis")
        return [x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x for x in given]

    return Once(check)


def test_a_kind_is_asked_about_once(once, asked):
    for n in range(3):
        x, y = torch.full([4], n), torch.nn.Parameter(torch.ones(2))
        found = once(x, None, y)
        assert found[0] is x and found[1] is None and found[2] is y and len(found) == 3
    assert len(asked) == 1
    x, y = torch.zeros(4, dtype=torch.int64), torch.ones(2)
    others = (x.int(), None, y), (x[:3], None, y), (x.to("meta"), None, y), (x, y, None), (x, None, y.half()), (x, y, y)
    for n, other in enumerate(others):
        once(*other)
        assert len(asked) == n + 2


def test_what_is_refused_or_changed_is_asked_about_each_time(once, asked):
    for n in range(3):
        with pytest.raises(ValueError, match="one axis"):
            once(torch.zeros(2, 2))
        assert once(torch.zeros(3, dtype=torch.float64))[0].dtype == torch.float32
        assert len(asked) == 2 * n + 2


def test_autocast_and_tensors_of_another_kind_are_asked_about(once, asked):
    class Own(torch.Tensor):
        pass

    x = torch.zeros(4)
    once(x)
    with torch.autocast("cpu"):
        once(x), once(x)
    once(x.as_subclass(Own)), once(x.as_subclass(Own))
    once(x)
    assert len(asked) == 5


def test_memory_ends(once, monkeypatch):
    monkeypatch.setattr(Once, "MAX_SIGNATURES", 3)
    for n in range(10):
        once(torch.zeros(n))
        assert len(once.passed) <= 3


@pytest.mark.parametrize("op", list(OPERATORS))
def test_an_operator_refuses_after_it_took_the_like(op):
    x = inputs(op, B=1, T=5, H=2, K=16, V=24, M=16) if op == "gsa" else inputs(op, B=1, T=5, H=2, K=16, V=24)
    run, offsets = OPERATORS[op].forms["chunk"], torch.tensor([0, 2, 5])
    for more in ({}, dict(cu_seqlens=offsets), dict(cu_seqlens=offsets, cu_seqlens_cpu=offsets.int())):
        for _ in range(2):
            run(**x, **more)
    with pytest.raises(ValueError, match="v: expected"):
        run(**x | {"v": x["v"][:, :4]})
    with pytest.raises(TypeError, match="v: expected"):
        run(**x | {"v": x["v"].half()})
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected None without"):
        run(**x, cu_seqlens_cpu=offsets)
    with pytest.raises(TypeError, match="cu_seqlens: expected int32 or int64"):
        run(**x, cu_seqlens=offsets.short())
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets up to"):
        run(**x, cu_seqlens=torch.tensor([0, 2, 6]))
    with pytest.raises(TypeError, match="output_final_state: expected True or False"):
        run(**x, output_final_state=1)
