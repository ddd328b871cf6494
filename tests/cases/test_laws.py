"""The search for an onset, on sizes that are known."""

import math

import pytest
import torch

from flakit.cases.laws import LN_MAX, search


def test_search_finds_every_name_and_measures_once_for_all():
    limits = {"a": 1.386, "b": 88.72, "never": math.inf}
    sizes = []

    def finite(size):
        sizes.append(size)
        return {name: size < limit for name, limit in limits.items()}

    found = search(finite, tolerance=1e-4)
    assert found["never"] == math.inf
    for name in ("a", "b"):
        assert limits[name] <= found[name] <= limits[name] * 1.0002
    assert len(sizes) == len(set(sizes)) < 45


def test_the_limits_of_the_formats():
    for dtype, limit in LN_MAX.items():
        x = torch.tensor(limit, dtype=torch.float64)
        assert (x - 1e-3).exp().to(dtype).isfinite() and (x + 3e-3).exp().to(dtype).isinf()
    assert LN_MAX[torch.float32] == pytest.approx(88.7228, abs=1e-4)
    assert LN_MAX[torch.bfloat16] == pytest.approx(88.7189, abs=1e-4)
    assert LN_MAX[torch.float16] == pytest.approx(11.0899, abs=1e-4)
