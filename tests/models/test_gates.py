"""Models at the ends of their dtypes: gates that decay totally, and tokens that are zero."""

import pytest
import torch

from flakit.models import MIXERS, LanguageModel, loss, train


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_token_of_zeros_is_a_token(mixer, dtype):
    model = LanguageModel(vocab=11, dim=32, layers=2, mixer=mixer, head_size=16, initialisation="normal").to(dtype)
    with torch.no_grad():
        model.embedding.weight[0] = 0
    tokens = torch.tensor(
        [[0, 0, 3, 0, 5, 0, 0, 7, 1, 0]]
    )  # the first with nothing before it, one with zeros before it
    logits = model(tokens)
    made, found = gradients(model, tokens)
    assert logits.isfinite().all() and made.isfinite()
    assert not [name for name, x in found.items() if not x.isfinite().all()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_in_16_bits_steps_where_a_gradient_is_zero(dtype):
    """An optimizer's own epsilon, too: 0 / (sqrt(0) + 1e-8) is 0 / 0 in float16."""
    model = LanguageModel(vocab=11, dim=32, layers=1, mixer="rwkv7", head_size=16, initialisation="normal").to(dtype)

    def batch(size, T, generator):
        tokens = torch.randint(0, 5, (size, T), generator=generator)  # six embeddings have no gradient
        return tokens, tokens

    run = train(model, batch, steps=4, size=2, T=8, progress=False)
    assert not run.skipped and not [name for name, p in model.named_parameters() if not p.isfinite().all()]
