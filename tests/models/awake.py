"""Models in which no layer is silent, as the published weights make every layer in the beginning."""

import torch


def awake(model, spread=0.1, generator=5, dtype=None):
    """The model with random numbers of this spread added to its parameters. generator: or a seed."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(spread * torch.randn(p.shape, generator=generator, dtype=dtype))
    return model
