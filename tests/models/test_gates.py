"""Models at the ends of their dtypes: gates that decay totally, and tokens that are zero."""

import copy
import math

import pytest
import torch

from flakit.models import IGNORED, MIXERS, LanguageModel, loss, train
from flakit.models.layers import unit

ROUNDINGS = 32
"""That a gradient passes on its way through two layers, each of eps of what is there."""


def gradients(model, tokens):
    made = loss(model(tokens), tokens.roll(-1, 1))
    made.backward()
    return made, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, 88.8), (torch.float32, 1e4), (torch.float16, 11.2)])
def test_a_gate_beyond_the_end_of_exp_costs_no_gradient(dtype, bias):
    model = LanguageModel(vocab=11, dim=32, layers=2, mixer="rwkv6", head_size=16, initialisation="normal").to(dtype)
    with torch.no_grad():
        for block in model.blocks:
            block.time.w.bias[::3] = bias
    made, found = gradients(model, torch.arange(22).view(2, 11) % 11)
    assert made.isfinite() and not [name for name, x in found.items() if not x.isfinite().all()]
    assert found["blocks.0.time.w.bias"].any()  # of the channels that keep something
    assert not found["blocks.0.time.w.bias"][::3].any()


def whole(model):
    tokens = torch.tensor([[0, 0, 3, 0, 5, 0, 0, 7, 1, 0]])  # the first has nothing before it, one has zeros
    return model(tokens), tokens.roll(-1, 1)


def in_parts_with_padding(model):
    tokens = torch.tensor([[9, 0, 0, 0, 5, 0, 0, 7, 0, 0], [4, 0, 0, 2, 7, 0, 0, 9, 9, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    logits, state = [], None
    for part, there in zip(tokens.split([1, 1, 5, 3], 1), mask.split([1, 1, 5, 3], 1), strict=True):
        made, state = model(part, mask=there, initial_state=state, output_final_state=True)
        logits.append(made)
    return torch.cat(logits, 1), tokens.roll(-1, 1).masked_fill(~mask, IGNORED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", [whole, in_parts_with_padding])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_token_of_zeros_is_a_token(mixer, call, dtype):
    """Every gradient is float64's.

    A norm multiplies the gradient of a row of zeros by 1 / sqrt(eps), and what it comes to at the embedding is more
    than float16 holds: the loss is scaled until the largest is in range, as whoever trains in float16 does it. Through
    two layers of GSA it comes to 5e7, some 10^10 times the smallest gradients: no scale brings both into float16.
    """
    layers = 1 if mixer == "gsa" else 2
    model = LanguageModel(vocab=11, dim=32, layers=layers, mixer=mixer, head_size=16, initialisation="normal").to(dtype)
    with torch.no_grad():
        model.embedding.weight[0] = 0
    exact = copy.deepcopy(model).double()
    loss(*call(exact)).backward()
    truth = {name: p.grad for name, p in exact.named_parameters()}
    largest = max(x.abs().max() for x in truth.values()).item()
    scale = 2.0 ** (14 - math.ceil(math.log2(largest)))

    logits, targets = call(model)
    made = loss(logits, targets)
    (made * scale).backward()
    assert logits.isfinite().all() and made.isfinite()
    numbers = torch.finfo(dtype)
    for name, p in model.named_parameters():
        wanted = scale * truth[name]
        wrong = (p.grad.double() - wanted).norm()
        allowed = ROUNDINGS * numbers.eps * (wanted.norm() + numbers.smallest_normal * wanted.numel() ** 0.5)
        assert wrong <= allowed, (name, (wrong / allowed).item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_short_key_has_length_one_in_every_dtype(dtype):
    """Where the least length was the dtype's eps, a key of 1e-3 asked with an eighth of its strength in bfloat16."""
    keys = torch.tensor([[3e-4, -4e-4], [0, 0], [300, 400]], dtype=dtype, requires_grad=True)
    found = unit(keys)
    expected = torch.tensor([[0.6, -0.8], [0, 0], [0.6, 0.8]], dtype=torch.float64)
    assert (found - expected).abs().max() < 2 * torch.finfo(dtype).eps
    found.sum().backward()
    assert keys.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_in_16_bits_steps_where_a_gradient_is_zero(dtype):
    """An optimizer's own epsilon, too: 0 / (sqrt(0) + 1e-8) is 0 / 0 in float16."""
    model = LanguageModel(vocab=11, dim=32, layers=1, mixer="rwkv7", head_size=16, initialisation="normal").to(dtype)

    def batch(size, T, generator):
        tokens = torch.randint(0, 5, (size, T), generator=generator)  # six embeddings have no gradient
        return tokens, tokens

    run = train(model, batch, steps=4, size=2, T=8, progress=False)
    assert not run.skipped and not [name for name, p in model.named_parameters() if not p.isfinite().all()]
