"""Where cases and panels make their tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_cpu() -> AbstractContextManager:
    """Tensors are made on the CPU inside, whatever `torch.set_default_device` says.

    Where nothing says otherwise nothing is entered: PyTorch's context sees every call, which costs as much as a small
    operation itself.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
