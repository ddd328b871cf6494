"""Two models side by side: the first layer and token that part, what agrees, and what cannot be compared."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import flakit
from flakit.models import LanguageModel
from flakit.ops.rwkv6 import fused_recurrent_rwkv6
from tests.models.awake import awake

VOCAB, T = 11, 21


def model(mixer="rwkv6", **how):
    return awake(LanguageModel(VOCAB, dim=16, layers=2, mixer=mixer, head_size=8, **how))


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mixer", ["rwkv6", "rwkv7", "gsa", "attention"])
def test_a_model_agrees_with_itself_in_every_layer(mixer, tokens):
    one = model(mixer)
    found = flakit.compare(one, copy.deepcopy(one), tokens)
    assert found.first is None and found.parts == () and not found.skipped and found.chosen.all()
    assert all((x == 0).all() and x.shape == (T,) for x in found.errors.values()) and list(found.errors)[-1] == "logits"
    ran = set()
    for name, module in one.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    one(tokens)
    assert ran - {""} <= set(found.errors)
    states = {"gsa": ["state 1", "state 2"], "attention": []}.get(mixer, ["state"])
    assert [name.split(": ")[1] for name in found.errors if name.startswith("blocks.1.time: ")] == states
    assert "The models agree in" in found.words and found.words in str(found) and found.picture().png()


def test_two_right_operators_agree_within_rounding(tokens):
    found = flakit.compare(model(), model(operator=fused_recurrent_rwkv6), tokens)
    assert found.first is None and 0 < float(found.logits.max()) <= found.tolerance < 1e-4


def test_a_wrong_bonus_parts_behind_its_operator(tokens):
    """u is in the output and not in the state: the state agrees, the norm behind the operator is the first to part."""
    one = model()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.blocks[0].time.u.add_(0.5)
    found = flakit.compare(one, other, tokens)
    assert (found.first.layer, found.first.token) == ("blocks.0.time.norm", 0)
    assert [float(found.errors[f"blocks.{n}.time: state"].max()) > 0 for n in (0, 1)] == [False, True]
    for words in ("The first is blocks.0.time.norm at token 0", "The logits part from token 0 on"):
        assert words in found.words
    heard = []
    for each in (one, other):
        handle = each.blocks[0].time.norm.register_forward_hook(lambda *x: heard.append(x[2].double()))
        each(tokens)
        handle.remove()
    off = (heard[0] - heard[1]).transpose(0, 1).flatten(1).norm(dim=-1)
    size = torch.maximum(*(x.transpose(0, 1).flatten(1).norm(dim=-1) for x in heard))
    torch.testing.assert_close(found.errors["blocks.0.time.norm"], (off / size).detach())


def test_a_late_token_in_a_late_layer_is_named(tokens):
    one = model()
    other = copy.deepcopy(one)
    late = (torch.arange(T) >= 13)[:, None]
    other.blocks[1].channels.value.register_forward_hook(lambda module, x, y: torch.where(late, 1.01 * y, y))
    found = flakit.compare(one, other, tokens)
    assert (found.first.layer, found.first.token) == ("blocks.1.channels.value", 13)
    assert found.first.error == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert float(found.errors["blocks.1.time"].max()) == 0 and float(found.logits[:13].max()) == 0
    assert int((found.logits > found.tolerance).nonzero()[0]) == 13


def test_formats_are_compared_when_it_is_said_what_they_may_cost(tokens):
    one = model()
    coarse = copy.deepcopy(one).bfloat16()
    with pytest.raises(ValueError, match="model_b: expected float32 like model_a, got bfloat16; convert one of them"):
        flakit.compare(one, coarse, tokens)
    assert flakit.compare(coarse, copy.deepcopy(coarse), tokens).first is None
    assert flakit.compare(one, coarse, tokens, tolerance=1e-4).first.layer == "embedding"
    assert flakit.compare(one, coarse, tokens, tolerance=0.5).first is None
    of_bfloat16, of_float32 = (flakit.compare(x, copy.deepcopy(x), tokens).tolerance for x in (coarse, one))
    assert of_bfloat16 > 100 * of_float32


class Wrapped(nn.Module):
    """As Transformers' models answer: an object with logits, whose layers have other names."""

    def __init__(self, inner, answer=lambda logits: SimpleNamespace(logits=logits, loss=None)):
        super().__init__()
        self.backbone, self.answer = inner, answer

    def forward(self, input_ids):
        return self.answer(self.backbone(input_ids))


@pytest.mark.parametrize("answer", [lambda x: SimpleNamespace(logits=x), lambda x: {"logits": x}, lambda x: (x, None)])
def test_logits_may_come_in_an_object(answer, tokens):
    one, other = model(), Wrapped(model(seed=1), answer)
    with pytest.raises(
        ValueError, match="layers: expected names that both models have, got none; model_a has embedding"
    ):
        flakit.compare(one, other, tokens)
    alone = flakit.compare(one, other, tokens[0], layers={})
    assert list(alone.errors) == ["logits"] and alone.first.layer == "logits"
    named = {"embedding": "backbone.embedding", "blocks.1.time": "backbone.blocks.1.time"}
    assert list(flakit.compare(one, Wrapped(one, answer), tokens, layers=named).errors) == [
        "embedding", "blocks.1.time", "blocks.1.time: state", "logits",
    ]  # fmt: skip


class Stateful(nn.Module):
    """A layer that returns its last state beside its output."""

    def __init__(self, off=0.0):
        super().__init__()
        self.embedding, self.off = nn.Embedding(VOCAB, 4), off
        self.layer = self.Layer(off)
        nn.init.ones_(self.embedding.weight)

    class Layer(nn.Module):
        def __init__(self, off):
            super().__init__()
            self.off = off

        def forward(self, x):
            S = x.cumsum(1)
            return S, S[:, -1] * (1 + self.off)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))[0].repeat(1, 1, 2)


def test_a_state_that_a_layer_returns_is_compared_as_a_whole(tokens):
    found = flakit.compare(Stateful(), Stateful(0.1), tokens)
    assert set(found.whole) == {"layer[1]"} and found.first == found.parts[0]
    assert (found.first.layer, found.first.token) == ("layer[1]", None) and float(found.logits.max()) == 0
    assert found.first.error == pytest.approx(0.1 / 1.1, rel=1e-5) and "layer[1], by 9.1e-02" in found.words


def test_what_is_not_finite_agrees_only_with_the_same():
    class Ends(Stateful):
        def __init__(self, value, at):
            super().__init__()
            self.value, self.at = value, at

        def forward(self, tokens):
            x = super().forward(tokens)
            return torch.where(torch.arange(x.shape[1])[:, None] == self.at, self.value, x)

    seen = torch.zeros(5, dtype=torch.long)
    nan, inf = float("nan"), float("inf")
    assert flakit.compare(Ends(nan, 2), Ends(nan, 2), seen).first is None
    assert flakit.compare(Ends(inf, 2), Ends(-inf, 2), seen).first.token == 2
    found = flakit.compare(Ends(0.0, 9), Ends(nan, 3), seen)
    assert (found.first.layer, found.first.token, found.first.error) == ("logits", 3, inf)
    assert "not finite in one of them" in found.words and found.picture().png()


def test_models_are_left_as_they_were(tokens):
    one, other = model().train(), model()
    other.blocks[0].eval()
    operator = one.blocks[0].time.operator
    flakit.compare(one, other, tokens)
    with pytest.raises(ValueError, match="vocab"):
        flakit.compare(one, other, tokens + VOCAB)
    assert one.training and one.blocks[1].training and not other.blocks[0].training and other.blocks[1].training
    assert one.blocks[0].time.operator is operator
    assert not any(m._forward_hooks for each in (one, other) for m in each.modules())


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model_a": 3}, TypeError, "model_a: expected a torch.nn.Module, got 3"),
        ({"tokens": [1, 2]}, TypeError, r"tokens: expected a tensor of integers \[T\] or \[B, T\], got"),
        ({"tokens": torch.rand(3)}, TypeError, "tokens: expected a tensor of integers"),
        ({"tokens": torch.zeros(0, dtype=torch.long)}, ValueError, "tokens: expected .* at least one"),
        ({"model_b": LanguageModel(VOCAB + 1, dim=16, head_size=8)}, ValueError, "over 11 tokens like model_a, got 12"),
        ({"model_b": model().to("meta")}, ValueError, "model_b: expected device cpu like tokens, got meta"),
        ({"model_b": nn.Identity()}, ValueError, "model_b: expected a model with weights, got Identity without any"),
        ({"model_b": nn.Embedding(VOCAB, 3), "layers": {"blocks.7": "x"}}, ValueError, "names in model_a, such as"),
        ({"tolerance": -1}, ValueError, "tolerance: expected a relative error of 0 or more, got -1"),
        ({"layers": 3}, TypeError, "layers: expected {name in model_a: name in model_b}, got 3"),
        ({"model_b": Wrapped(model(), lambda x: None), "layers": {}}, TypeError, "model_b: expected logits, a tuple"),
        ({"model_b": Wrapped(model(), lambda x: x[:, 0]), "layers": {}}, ValueError, r"2, 21, vocab\], got \[2, 11\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(change, error, says, tokens):
    given = {"model_a": model(mixer="rwkv7"), "model_b": model(mixer="rwkv7"), "tokens": tokens} | change
    with pytest.raises(error, match=says):
        flakit.compare(**given)
