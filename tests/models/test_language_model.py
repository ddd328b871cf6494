"""The language models: shapes, seeds, causality, an untrained loss of ln(vocab), a gradient in every parameter."""

import math

import pytest
import torch
from torch import nn

import flakit
from flakit.models import MIXERS, LanguageModel, loss
from flakit.models.attention import rotate
from flakit.models.language_model import INITIALISATIONS
from flakit.models.stream import WHOLE
from flakit.ops.rwkv6 import fused_recurrent_rwkv6
from flakit.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
from tests.models.awake import awake

VOCAB = 11


@pytest.fixture(params=MIXERS)
def mixer(request):
    return request.param


@pytest.fixture(params=INITIALISATIONS)
def initialisation(request):
    return request.param


def tokens(B=2, T=21, seed=0):
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


def small(mixer="rwkv7", **options):
    return LanguageModel(VOCAB, dim=16, layers=2, mixer=mixer, **{"head_size": 8} | options)


def test_logits_have_the_shape_of_the_tokens(mixer, initialisation):
    for T in (1, 2, 21):
        assert small(mixer, initialisation=initialisation)(tokens(T=T)).shape == (2, T, VOCAB)


def test_an_untrained_model_knows_nothing(mixer, initialisation):
    untrained = loss(small(mixer, initialisation=initialisation)(tokens(B=64)), tokens(B=64, seed=1))
    assert untrained.item() == pytest.approx(math.log(VOCAB), abs=0.15)


def test_a_seed_makes_the_weights_and_leaves_the_global_random_state(mixer, initialisation):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, same, other = (small(mixer, seed=seed, initialisation=initialisation) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


def test_the_initialisations_differ_in_their_matrices_only(mixer):
    published, normal = (dict(small(mixer, initialisation=name).named_parameters()) for name in INITIALISATIONS)
    changed = {name for name in published if not torch.equal(published[name], normal[name])}
    model = small(mixer)
    matrices = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    assert changed == matrices
    assert normal["blocks.1.channels.key.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert published["blocks.1.time.output.weight"].abs().max() == 0


def test_a_position_sees_no_later_token(mixer):
    model, seen = awake(small(mixer)), tokens()
    changed = seen.clone()
    changed[:, 12] = (changed[:, 12] + 1) % VOCAB
    differ = (model(seen) - model(changed)).abs().amax((0, 2))
    assert differ[:12].max() == 0
    assert (differ[12:] > 1e-6).all()


def test_a_gradient_reaches_every_parameter(mixer, initialisation):
    model = awake(small(mixer, initialisation=initialisation))
    loss(model(tokens()), tokens(seed=1)).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("mixer", "other"), [("rwkv7", fused_recurrent_rwkv7), ("rwkv6", fused_recurrent_rwkv6)], ids=["rwkv7", "rwkv6"]
)
def test_the_operator_is_a_choice(mixer, other):
    chunked, recurrent = (awake(small(mixer, **option)) for option in ({}, {"operator": other}))
    assert torch.allclose(chunked(tokens()), recurrent(tokens()), atol=1e-4)


@pytest.mark.parametrize("edit", [1.0, 2.0])
def test_rwkv7_feeds_its_operator_what_the_paper_says(edit):
    fed = {}

    def operator(r, w, k, v, a, b):
        fed.update(w=w, a=a, b=b)
        return chunk_rwkv7(r, w, k, v, a, b)

    awake(small(edit=edit, operator=operator))(tokens(B=8))
    assert (fed["w"] < 0).all() and (fed["w"] > -0.6066).all()
    assert torch.allclose(fed["a"].norm(dim=-1), torch.ones(()), atol=1e-5)
    share = -fed["b"] / fed["a"]
    assert (share > 0).all() and (share < edit).all()
    assert share.mean().item() == pytest.approx(edit / 2, rel=0.2)


def test_shift_gives_the_token_before():
    x = torch.arange(6.0).view(1, 3, 2)
    assert WHOLE.shift(x).tolist() == [[[0, 0], [0, 1], [2, 3]]]


def test_rotary_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    turned = rotate(q.expand(9, 8)) @ rotate(k.expand(9, 8)).T
    assert torch.allclose(turned[1:, 1:], turned[:-1, :-1], atol=1e-6)
    assert turned[0, 0].item() == pytest.approx((q @ k.T).item(), abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mixer": "rwkv5"}, "mixer: expected one of rwkv7, rwkv6, gsa, attention, got 'rwkv5'"),
        ({"initialisation": "zero"}, "initialisation: expected one of published, normal, got 'zero'"),
        ({"vocab": 0}, "vocab: expected a whole number of at least 1, got 0"),
        ({"vocab": True}, "vocab: expected a whole number of at least 1, got True"),
        ({"dim": 40}, "dim: expected a multiple of head_size = 32, got 40"),
        ({"head_size": 0}, "head_size: expected a whole number of at least 1, got 0"),
        (
            {"mixer": "attention", "dim": 9, "head_size": 3},
            "head_size: expected an even number, whose pairs of channels are turned, got 3",
        ),
    ],
    ids=lambda x: " ".join(map(str, x.items())) if isinstance(x, dict) else "",
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError) as error:
        LanguageModel(**{"vocab": 8} | arguments)
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ([[1, 2]], TypeError, "tokens: expected an integer tensor [B, T], got list"),
        (torch.zeros(1, 4), TypeError, "tokens: expected int64 or int32, got float32"),
        (torch.zeros(1, 4, dtype=torch.bool), TypeError, "tokens: expected int64 or int32, got bool"),
        (torch.zeros(4, dtype=int), ValueError, "tokens: expected [B, T], got [4]; of one sequence make tokens[None]"),
        (torch.zeros(1, 4, 1, dtype=int), ValueError, "tokens: expected [B, T], got [1, 4, 1]"),
        (torch.zeros(1, 0, dtype=int), ValueError, "tokens: expected B and T of at least 1, got [1, 0]"),
        (
            torch.zeros(1, 4, dtype=int, device="meta"),
            ValueError,
            "tokens: expected device cpu like the model, got meta",
        ),
        (
            torch.tensor([[0, 1], [2, VOCAB]]),
            ValueError,
            f"tokens: expected 0 to {VOCAB - 1}, as vocab = {VOCAB}, got {VOCAB} at [1, 1]",
        ),
        (
            torch.tensor([[0, -100]]),
            ValueError,
            f"tokens: expected 0 to {VOCAB - 1}, as vocab = {VOCAB}, got -100 at [0, 1]",
        ),
    ],
)
def test_wrong_tokens_are_named(given, error, says):
    with pytest.raises(error) as raised:
        small("attention")(given)
    assert str(raised.value) == says


def test_short_integers_are_tokens():
    model = small("attention")
    assert torch.equal(model(tokens().int()), model(tokens()))


def test_tokens_are_checked_without_breaking_a_compiled_graph_or_a_transform():
    model, seen = small("attention"), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(seen), model(seen))
    torch.testing.assert_close(torch.vmap(model)(seen[:, None])[:, 0], model(seen))
    with pytest.raises(ValueError, match=r"tokens: expected \[B, T\], got \[21\]"):
        torch.compile(model, backend="eager")(seen[0])


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_not_looked_at_unless_asked():
    model, seen = small("attention").cuda(), tokens().cuda()
    model(seen)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with flakit.checked(), pytest.raises(ValueError, match="tokens: expected 0 to 10, as vocab = 11, got 11 at"):
        model(seen.fill_(VOCAB))
