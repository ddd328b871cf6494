"""The models on a GPU and under autocast: logits and every gradient as in float64 on a CPU, and a loss that falls.

Weights, tokens and text are drawn from seeds: no training, whose last digits every machine has its own way with, and
nothing of the running Python. What an error may be is the model's own affair, and measured: its *condition*, how far
the logits and each gradient go, in float64, when every weight and all that enters and leaves the operators, gradients
too, moves at random by up to one rounding.
"""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from flakit.models import MIXERS, LanguageModel, train
from flakit.models.corpus import Corpus
from flakit.numerics.errors import relative_l2
from tests.models.awake import awake
from tests.passing import passing, tf32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB, SPREAD, DRAWS = 64, 0.05, 8
ROUNDING = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.bfloat16)}
BUDGET = {torch.bfloat16: 2, torch.float32: 100}
"""Conditions. bfloat16: autocast rounds what the condition moves and about as much again, by 0.42 of a rounding (RMS)
where the condition moves by 0.58: as far as that, and twice that is allowed. float32: a gradient goes through some ten
products, one after another, sums of up to 256 terms and a rounding each: √2560 = 50, and twice that."""


def made(mixer, device="cpu", dtype=torch.float32):
    """A model in which no layer is silent, as the published weights make every layer in the beginning."""
    options = {"slots": 32} if mixer == "gsa" else {}
    model = LanguageModel(VOCAB, dim=64, layers=2, mixer=mixer, head_size=32, **options)
    return awake(model, SPREAD, generator=1).to(device, dtype)


def computed(model, autocast=None):
    """Logits and the gradient of each parameter, in float64 on the CPU."""
    device = model.head.weight.device
    x, y = torch.randint(VOCAB, (2, 2, 100), generator=torch.Generator().manual_seed(5)).to(device)
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        logits = model(x)
    F.cross_entropy(logits.to(model.head.weight.dtype).flatten(0, 1), y.flatten()).backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
    found = {"logits": logits} | {name: p.grad for name, p in model.named_parameters()}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def moved(x, draw):
    return x * (1 + ROUNDING[torch.bfloat16] * (2 * torch.rand(x.shape, generator=draw, dtype=x.dtype) - 1))


def around(time, entering=lambda x: x, leaving=lambda o: o):
    """Let a mixer's operator take entering(x) of each argument and give leaving(o); softmax attention has none."""
    if hasattr(time, "operator"):
        operator = time.operator
        time.operator = lambda *x: (out := operator(*map(entering, x)))._replace(o=leaving(out.o))


@cache
def truth(mixer):
    return computed(made(mixer, dtype=torch.float64))


@cache
def condition(mixer):
    """Of the logits and of each gradient: the relative L2 distance in roundings, the RMS of a few draws."""
    squares = dict.fromkeys(truth(mixer), 0.0)
    for seed in range(DRAWS):
        model, draw = made(mixer, dtype=torch.float64), torch.Generator().manual_seed(seed)

        def move(x, draw=draw):
            return passing(x, lambda y: moved(y, draw), lambda y: moved(y, draw))

        with torch.no_grad():
            for p in model.parameters():
                p.copy_(moved(p, draw))
        for block in model.blocks:
            around(block.time, move, move)
        for name, x in computed(model).items():
            squares[name] += (relative_l2(x, truth(mixer)[name]) / ROUNDING[torch.bfloat16]) ** 2
    return {name: (x / DRAWS) ** 0.5 for name, x in squares.items()}


def conditions(mixer, model, dtype):
    """The errors of a model's logits and gradients, computed in that dtype, in conditions; the largest first."""
    found = computed(model, dtype if dtype == torch.bfloat16 else None)
    errors = {name: relative_l2(x, truth(mixer)[name]) / ROUNDING[dtype] for name, x in found.items()}
    return dict(sorted(((name, x / condition(mixer)[name]) for name, x in errors.items()), key=lambda item: -item[1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_autocast_rounds_and_does_nothing_else(mixer, device, record_property):
    found = conditions(mixer, made(mixer, device), torch.bfloat16)
    record_property("conditions", {name: round(x, 2) for name, x in list(found.items())[:3]})
    assert all(x < BUDGET[torch.bfloat16] for x in found.values()), found
    assert all(x > 0.1 for x in found.values()), found  # it was on


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_float32_sums_in_an_order_of_its_own_and_does_nothing_else(mixer, device, record_property):
    found = conditions(mixer, made(mixer, device), torch.float32)
    record_property("conditions", {name: round(x, 1) for name, x in list(found.items())[:3]})
    assert all(x < BUDGET[torch.float32] for x in found.values()), found


def test_models_are_well_conditioned():
    """An ill-conditioned gradient would excuse any error."""
    assert max(max(condition(mixer).values()) for mixer in MIXERS) < 8


def largest(mixer, dtype, **how):
    model = made(mixer)
    around(model.blocks[1].time, **how)
    return max(conditions(mixer, model, dtype).values())


ARGUMENTS = {"rwkv7": 6, "rwkv6": 5, "gsa": 5}


@pytest.mark.parametrize("mixer", ARGUMENTS)
def test_planted_errors_are_noticed(mixer):
    def scaled(x, by):
        return passing(x, back=lambda grad: by * grad)

    def in_tf32(x):
        return passing(x, tf32, tf32)

    allowed = BUDGET[torch.bfloat16]
    assert largest(mixer, torch.bfloat16, entering=torch.clone) < allowed
    assert largest(mixer, torch.bfloat16, entering=lambda x: scaled(x, 1.05)) > allowed  # one operator, every gradient
    for wrong in range(ARGUMENTS[mixer]):  # the gradient of one argument
        factors = iter(1.1 if n == wrong else 1.0 for n in range(ARGUMENTS[mixer]))
        worst = largest(mixer, torch.bfloat16, entering=lambda x, by=factors: scaled(x, next(by)))
        assert worst > allowed, wrong
    assert largest(mixer, torch.float32, entering=in_tf32, leaving=in_tf32) > BUDGET[torch.float32]


LETTERS = 26


@cache
def corpus():
    """Words of five letters, 32 different ones."""
    draw = torch.Generator().manual_seed(0)
    words = ord("a") + torch.randint(LETTERS, (32, 5), generator=draw, dtype=torch.uint8)
    return Corpus(words[torch.randint(32, (4000,), generator=draw)].flatten())


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_training_under_autocast_lowers_the_loss(mixer, device):
    model = LanguageModel(Corpus.vocab, dim=32, layers=2, mixer=mixer, head_size=16).to(device)
    how = {"size": 4, "T": 64, "lr": 1e-2, "progress": False}
    run = train(model, corpus().batch, steps=20, autocast=torch.bfloat16, **how)
    assert run.skipped == [] and len(run.losses) == 20
    assert run.losses[0] > 5 and sum(run.losses[-3:]) / 3 < math.log(LETTERS)  # more than which letters there are
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["rwkv6", "rwkv7", "gsa"])
def test_gradients_of_many_tokens_have_the_same_bits_every_time(mixer):
    """nn.Embedding's have not: of 135 gradients of RWKV7 on an H100 its own alone differed, by 1e-7."""
    model = made(mixer, "cuda")
    x, y = torch.randint(VOCAB, (2, 8, 1024), generator=torch.Generator().manual_seed(5)).to("cuda")
    found = []
    for _ in range(4):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for again in found[1:]:
        assert not [name for name, x in again.items() if not torch.equal(x, found[0][name])]
