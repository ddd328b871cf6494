"""Gates that drift: the law names every lost step, the share grows, the projection brings it back, the right kernel."""

import gc
import math
from functools import partial

import pytest
import torch

from flakit.cases import gate_drift as case
from flakit.cases import padding
from flakit.cases.anchor.operators import OPERATORS
from flakit.models import Delay
from flakit.numerics import recorded
from flakit.numerics.inputs import inputs

run = partial(case.drift, progress=False)


def gates(op, exponent=case.LIMIT, seed=0):
    """One sequence with uneven log decays whose largest exponent is the one given."""
    x = inputs(op, T=case.T, H=1, K=4, **({"M": 4} if op == "gsa" else {}), decay=-1.0, seed=seed)
    name = OPERATORS[op].decay
    x[name] *= torch.rand(x[name].shape, generator=torch.Generator().manual_seed(seed))
    x[name] *= exponent / case.exponents(op, x[name]).max()
    return x, x[name]


def lost(op, x):
    x = {name: y.clone().requires_grad_() for name, y in x.items()}
    o = case.faulty(op)(*x.values()).o
    o.square().sum().backward()
    return not all(y.grad.isfinite().all() for y in x.values())


@pytest.mark.parametrize("op", ["gsa", "rwkv6"])
def test_the_law_names_the_lost_steps_and_a_wrong_one_would_not(op):
    sizes = [case.LIMIT * (0.9 + 0.02 * n) for n in range(11) if n != 5]
    found = [(size, lost(op, gates(op, size, seed)[0])) for seed, size in enumerate(sizes)]
    agrees = {limit: all((size > limit) == bad for size, bad in found) for limit in (case.LIMIT, 80.0, 97.0)}
    assert agrees == {case.LIMIT: True, 80.0: False, 97.0: False}


def test_the_exponents_are_those_of_the_padding_law():
    _, g = gates("gsa")
    assert case.exponents("gsa", torch.full_like(g, case.law("gsa"))).max().item() == pytest.approx(88.72, abs=0.01)
    assert case.law("gsa") == -padding.law(3000) and case.law("rwkv6") == pytest.approx(-88.72, abs=0.01)
    assert not case.exponents("gsa", torch.full((1, 64, 1, 1), -99.0)).any()  # whole chunks have no padding
    assert not case.exponents("rwkv6", torch.full((1, 16, 1, 1), -99.0)).any()


@pytest.fixture(scope="module")
def faulty():
    return run("gsa", "faulty", steps=240)


@pytest.mark.full
def test_lost_steps_begin_grow_and_are_foretold(faulty):
    _, found = faulty
    share = found.share(50)
    assert share[:2] == [0, 0] and share[-3] <= share[-2] < share[-1] and share[-1] > 0.5
    agree = sum(a == b for a, b in zip(found.lost, found.predicted, strict=True))
    assert agree >= len(found.lost) - 2  # in a sum of several large terms the last digit decides
    assert all(math.isfinite(loss) for loss in found.run.losses)  # the forward pass is fine


@pytest.mark.full
def test_the_right_kernel_and_attention_never_lose_a_step(faulty):
    _, found = run("gsa", "right", steps=240)
    assert not any(found.lost) and any(found.predicted)
    before = faulty[1].run.skipped[0]
    assert found.run.losses[:50] == pytest.approx(faulty[1].run.losses[:50], rel=1e-3) and before > 50
    assert not any(run("attention", steps=40)[1].lost)


def test_width_length_and_time_are_choices():
    model, found = run("gsa", "faulty", steps=10**6, seconds=0.5, dim=64, tokens=120)
    assert model.embedding.embedding_dim == 64 and 1 <= len(found.lost) == len(found.quantiles) < 10**4
    again = case.reinitialised(model, case.PROJECTION["gsa"])
    new = case.model(dim=64, seed=100)
    assert torch.equal(again.blocks[0].time.f_proj.weight, new.blocks[0].time.f_proj.weight)
    assert torch.equal(again.blocks[0].time.query.weight, model.blocks[0].time.query.weight)


def tensors_between_steps(op, kernel, monkeypatch):
    """How many are alive as each step begins, without Python's collector, which knows nothing of a GPU's memory."""
    counts = []

    class Counted(Delay):
        def batch(self, *how):
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
            return super().batch(*how)

    monkeypatch.setattr(case.delay, "Delay", Counted)
    gc.collect()
    gc.disable()
    try:
        run(op, kernel, steps=5)
    finally:
        gc.enable()
    return [n - counts[0] for n in counts]


@pytest.mark.full
@pytest.mark.parametrize("op", ["gsa", "rwkv6"])
def test_a_step_leaves_nothing_behind(op, monkeypatch):
    faulty, right = (tensors_between_steps(op, kernel, monkeypatch) for kernel in ("faulty", "right"))
    assert len(faulty) == 5 and faulty[1] > 0 and set(faulty[1:]) == {faulty[1]}  # AdamW's, and the last step's logits
    assert faulty == right


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gsa", "rwkv6"])
def test_a_gpu_loses_the_same_steps(op):
    rates = {"gsa": 0.05, "rwkv6": 0.03}
    here, there = (run(op, steps=120, seed=2, lr=rates[op], device=device)[1] for device in ("cpu", "cuda"))
    assert there.run.losses[:10] == pytest.approx(here.run.losses[:10], rel=1e-3)
    for found in (here, there):
        agree = sum(a == b for a, b in zip(found.lost, found.predicted, strict=True))
        assert any(found.lost) and agree >= len(found.lost) - 2


def share_lost(start, steps=8, **how):
    return sum(run(start=start, steps=steps, **how)[1].lost) / steps


@pytest.mark.full
def test_only_what_makes_the_gates_brings_it_back(faulty):
    model, part = faulty[0], case.PROJECTION["gsa"]
    before, after = (m.get_parameter(f"{part}.weight") for m in (model, case.reinitialised(model, part)))
    assert not torch.equal(before, after)
    assert share_lost(case.reinitialised(model, part)) == 0
    for other in ("blocks.0.time.query", "blocks.0.time.value"):
        assert share_lost(case.reinitialised(model, other)) > 0.5, other
    assert share_lost(model, kernel="right") == 0


@pytest.mark.full
@pytest.mark.parametrize("clip", [0.01, None])
def test_clipping_brings_nothing_back(faulty, clip):
    assert share_lost(faulty[0], clip=clip) > 0.5


@pytest.mark.full
def test_attempts_put_the_projection_first(faulty):
    rows = case.attempts(faulty[0], steps=2)
    assert {row.part for row in rows} == {"nothing", *case.parts(faulty[0])}
    first = min(rows, key=lambda row: row.exponent)
    assert first.part == case.PROJECTION["gsa"] and first.exponent < 20


def test_recorded_drift_at_usual_rates():
    table = recorded.read("h200_gate_drift")
    runs = {}
    for row in table.rows:
        runs.setdefault((row["kernel"], row["lr"], row["seed"]), []).append(row)
    assert runs.keys() == {(kernel, lr, 0) for kernel in ("faulty", "right") for lr in (0.002, 0.001)} | {
        ("faulty", lr, 1) for lr in (0.002, 0.001)
    }
    for (kernel, lr, _), rows in runs.items():
        whole = rows[:-1]  # the last row is of the steps that time was left for
        passed = next((n for n, row in enumerate(whole) if row["exponent_largest"] > case.LIMIT), len(whole))
        assert (passed < len(whole)) == (lr == 0.002)
        assert passed > 20 and all(row["lost"] == 0 for row in whole[:passed])
        assert all(math.isfinite(row["loss"]) for row in rows)
        if kernel == "faulty":
            assert all(row["as_predicted"] == 100 for row in whole)
            assert lr == 0.001 or min(row["lost"] for row in whole[-30:]) > 0.95
        else:
            assert not any(row["lost"] for row in rows)
            assert lr == 0.001 or whole[-1]["exponent_largest"] > 2 * case.LIMIT
