"""One maker of inputs: reproducible, private, rounded once, and clear about what it cannot make."""

import math

import pytest
import torch

from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import DECAYS, inputs

RANGES = {  # log decay per token: lowest and highest value a profile may reach
    "rwkv6-init": (-5.0, 0.0),
    "rwkv6-wide": (-math.exp(2.5), -math.exp(-6)),
    "rwkv7": (-math.exp(-0.5), 0.0),
    "gsa": (-1.0, 0.0),
    "mamba2": (-16.0, 0.0),
    "gla": (-0.5, 0.0),
    "logsigmoid": (-8.0, 0.0),
    "uniform": (-8.0, -1e-5),
    "none": (0.0, 0.0),
    "spikes": (-1e4, -0.01),
    "inf-spikes": (-math.inf, -0.01),
    "forget": (-math.inf, -math.inf),
}


def test_shapes_and_dtypes():
    x = inputs("rwkv6", B=2, T=5, H=3, K=4, V=7, dtype=torch.bfloat16, decay_dtype=torch.float32, initial_state=True)
    assert {name: tuple(t.shape) for name, t in x.items()} == {
        "r": (2, 5, 3, 4),
        "k": (2, 5, 3, 4),
        "v": (2, 5, 3, 7),
        "w": (2, 5, 3, 4),
        "u": (3, 4),
        "initial_state": (2, 3, 4, 7),
    }
    assert {name for name, t in x.items() if t.dtype == torch.float32} == {"w", "initial_state"}
    assert all(t.is_contiguous() for t in x.values())


@pytest.mark.parametrize("decay", [*DECAYS, -3.5], ids=str)
def test_every_profile_feeds_the_operator_and_keeps_its_range(decay):
    x = inputs("rwkv6", T=40, K=16, decay=decay)
    low, high = RANGES[decay] if isinstance(decay, str) else (decay, decay)
    assert x["w"].min() >= low * (1 + 1e-6) and x["w"].max() <= high
    assert all(y.isfinite().all() for y in evaluate("rwkv6", x).values())


def test_every_profile_has_a_range_here():
    assert set(RANGES) == set(DECAYS)


def test_fresh_model_spans_the_slow_and_the_fast():
    x = inputs("rwkv6", T=4000, H=2, K=32)["w"][0].flatten(1).neg().log().mean(0)  # mean of x per channel
    assert x[0] == pytest.approx(-6, abs=0.1) and x[-1] == pytest.approx(-1, abs=0.1)
    assert (x.diff() > -0.1).all()


def test_rare_spikes_are_five_percent():
    w = inputs("rwkv6", T=1000, H=2, K=32, decay="inf-spikes")["w"]
    assert w.isinf().double().mean().item() == pytest.approx(0.05, abs=0.005)
    assert (w[w.isfinite()] == torch.tensor(-0.01)).all()


def test_the_global_generators_stay_where_they_are():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = inputs("rwkv6", seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.randn(7)
    assert all(torch.equal(x, first[name]) for name, x in inputs("rwkv6", seed=5).items())
    assert not torch.equal(inputs("rwkv6", seed=6)["r"], first["r"])


def test_each_dtype_is_the_same_numbers_rounded_once():
    exact = inputs("rwkv6", dtype=torch.float64, initial_state=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = inputs("rwkv6", dtype=dtype, initial_state=True)
        assert all(torch.equal(x[name], exact[name].to(x[name].dtype)) for name in exact)


def test_another_decay_changes_the_decay_alone_and_a_longer_t_continues():
    short, long = inputs("rwkv6", T=13, B=2), inputs("rwkv6", T=64, B=2, decay="gla", initial_state=True)
    assert all(torch.equal(short[name], long[name][:, :13]) for name in "rkv")
    assert torch.equal(short["u"], long["u"]) and not torch.equal(short["w"], long["w"][:, :13])


def test_rwkv7_removes_and_writes_along_one_key_as_its_model_does():
    x = inputs("rwkv7", T=200, K=16)
    assert x["a"].norm(dim=-1).sub(1).abs().max() < 1e-6
    gate = -x["b"] / x["a"]
    assert 0 < gate.min() and gate.max() < 1
    product = (x["a"] * x["b"]).sum(-1)
    assert -1 < product.min() and product.max() < 0
    longer = inputs("rwkv7", T=300, K=16)
    assert all(torch.equal(x[name], longer[name][:, :200]) for name in x)


def test_gsa_has_slots_query_heads_and_a_pair_of_states():
    x = inputs("gsa", B=2, T=5, H=2, K=4, V=7, M=6, HQ=4, initial_state=True, dtype=torch.bfloat16)
    states = dict(zip(("hk", "hv"), x.pop("initial_state"), strict=True))
    assert {name: tuple(t.shape) for name, t in (x | states).items()} == {
        "q": (2, 5, 4, 4),
        "k": (2, 5, 2, 4),
        "v": (2, 5, 2, 7),
        "s": (2, 5, 2, 6),
        "g": (2, 5, 2, 6),
        "hk": (2, 2, 4, 6),
        "hv": (2, 2, 6, 7),
    }
    assert {name for name, t in (x | states).items() if t.dtype == torch.float32} == {"hk", "hv"}
    s = inputs("gsa", T=50)["s"]
    assert (s > 0).all() and s.sum(-1).sub(1).abs().max() < 1e-6


def test_a_tensor_is_taken_as_decay():
    w = -torch.rand(1, 6, 2, 8)
    assert torch.equal(inputs("rwkv6", T=6, K=8, decay=w)["w"], w)


def test_gradients_on_request():
    assert all(x.requires_grad and x.is_leaf for x in inputs("rwkv6", requires_grad=True, initial_state=True).values())


@pytest.mark.parametrize(
    "wrong, kind, message",
    [
        (dict(op="rwkv9"), ValueError, "op: expected one of rwkv6, rwkv7, gsa, .*, got 'rwkv9'"),
        (
            dict(decay="rwkv"),
            ValueError,
            "decay: expected one of rwkv6-init, rwkv6-wide, .*, a number <= 0 or a tensor",
        ),
        (dict(decay=0.5), ValueError, r"decay: expected natural-log decays <= 0, got 0\.5"),
        (dict(decay=math.nan), ValueError, "decay: expected natural-log decays <= 0, got NaN"),
        (dict(decay=[1]), TypeError, r"decay: expected a profile name, a number <= 0 or a tensor, got \[1\]"),
        (
            dict(decay=torch.zeros(3)),
            ValueError,
            r"decay: expected a tensor \[B, T, H, K\] = \[1, 64, 2, 32\], got \[3\]",
        ),
        (dict(T=0), ValueError, "T: expected a whole number of at least 1, got 0"),
        (dict(K=2.0), ValueError, r"K: expected a whole number of at least 1, got 2\.0"),
        (dict(M=8), ValueError, "M: expected None, RWKV6 has no such axis, got 8"),
        (dict(op="gsa", H=2, HQ=3), ValueError, "HQ: expected a multiple of H = 2, got 3"),
        (dict(op="gsa", M=0), ValueError, "M: expected a whole number of at least 1, got 0"),
        (dict(dtype=torch.int32), ValueError, "^dtype: expected torch.float64, float32, .*, got torch.int32"),
        (dict(decay_dtype="float32"), ValueError, "decay_dtype: expected torch.float64, .*, got 'float32'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_named(wrong, kind, message):
    with pytest.raises(kind, match=message):
        inputs(**wrong)
