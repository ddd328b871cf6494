"""The kernels the stories are about: flash-linear-attention's RWKV6, where it is installed beside a GPU."""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch

from ..numerics.operators import Operator, operator
from ..ops.rwkv6 import RWKV6Output

FUNCTIONS = {"chunk": "chunk_rwkv6", "recurrent": "fused_recurrent_rwkv6"}


def published_rwkv6() -> tuple[str, Operator] | None:
    """Its version, and RWKV6 with its two forms in the place of ours, for `evaluate`; None where they cannot run.

    Whoever calls them should name the scale: in some versions the two forms differ in their default.
    """
    if not (torch.cuda.is_available() and importlib.util.find_spec("fla")):
        return None
    module = importlib.import_module("fla.ops.rwkv6")

    def form(function: Callable) -> Callable:
        return lambda **given: RWKV6Output(*function(**given))

    forms = {name: form(getattr(module, function)) for name, function in FUNCTIONS.items()}
    version = importlib.metadata.version("fla-core")
    return version, dataclasses.replace(operator("rwkv6"), forms=forms)
