"""Sequences cut into parts: what the kernels do where heads and sequences alone would leave a GPU idle.

That depends on sizes that no quick test has, so here the plan is told that a GPU wants more programs, and shorter ones.
"""

import pytest

from flakit.ops.common.dispatch import has_triton
from tests.ops.places import PLACES, of
from tests.ops.settings import Setting

if not has_triton():
    pytest.skip("needs Triton", allow_module_level=True)

from flakit.ops.common import bands_triton, packed_triton, plan_triton
from flakit.ops.common.kernel_triton import Memory

SETTING = Setting(T=85, H=1, K=24, V=40, decay="uniform", states="both")


@pytest.fixture
def cut(monkeypatch):
    """Short parts in every launch, which are there to be seen."""
    seen, plan = [], plan_triton.ChunkPlan.parts

    def watched(self, programs):
        found = plan(self, programs)
        seen.append(found[1] > self.N)
        return found

    monkeypatch.setattr(plan_triton, "FULL_GPU", 10**6)
    monkeypatch.setattr(plan_triton, "SHORTEST_PART", 2)
    monkeypatch.setattr(plan_triton.ChunkPlan, "parts", watched)
    yield
    assert seen and all(seen)


@pytest.mark.parametrize(("decay", "packing"), [("uniform", "none"), ("inf-spikes", "packed")])
@pytest.mark.parametrize("place", [place for place in PLACES if place.id != "torch"])
@pytest.mark.parametrize("op", ["rwkv6", "gsa"])
def test_cut_sequences_are_right(place, op, decay, packing, cut):
    dtype = str(place.dtypes[1]).removeprefix("torch.")
    setting = of(op, SETTING, decay=decay, packing=packing, dtype=dtype)
    made, arriving = place.make(setting, T=85 if packing == "none" else 150, H=1)
    if packing == "packed":
        lengths = made["cu_seqlens"].diff()
        assert lengths.min() < 32 < lengths.max()  # shorter and longer than a part
    place.check(made, arriving, "chunk", op, chunk_size=16)


@pytest.mark.parametrize("decay", ["model", "uniform", "inf-spikes"])
@pytest.mark.parametrize(("T", "packing"), [(85, "none"), (128, "none"), (170, "packed")])
@pytest.mark.parametrize("place", [place for place in PLACES if place.id != "torch"])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
def test_parts_of_whole_heads_are_right(op, place, T, packing, decay, monkeypatch):
    """One program a head in chunks of 16 tokens, where heads are few: each has a part of the sequence."""
    monkeypatch.setattr(bands_triton, "SHORTEST_FUSED_PART", 2)
    setting = of(op, SETTING, decay=decay, packing=packing, dtype=str(place.dtypes[1]).removeprefix("torch."))
    made, arriving = place.make(setting, T=T, H=2, K=64, V=40)
    offsets = made.get("cu_seqlens")
    packing = None if offsets is None else packed_triton.Packing(offsets, made["r"].shape[1])
    plan = bands_triton.Parts(Memory(), made["r"], made["v"], packing)
    assert plan.L == 4 and plan.several
    if packing == "packed":
        lengths = made["cu_seqlens"].diff()
        assert lengths.min() < 64 < lengths.max()  # shorter and longer than a part
    place.check(made, arriving, "chunk", op, chunk_size=16)
