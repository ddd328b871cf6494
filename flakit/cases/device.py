"""The device on which cases and panels allocate their tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_cpu() -> AbstractContextManager:
    """Allocate tensors on the CPU inside the block, whatever `torch.set_default_device` says.

    If the CPU is the default this is a null context: PyTorch's context intercepts every call, which costs as much as a
    small operation.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
