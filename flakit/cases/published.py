"""flash-linear-attention's RWKV6 kernels, on which the cases report, if it is installed and there is a GPU."""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch

from ..numerics.operators import Operator, operator
from ..ops.rwkv6 import RWKV6Output


def published_rwkv6() -> tuple[str, Operator] | None:
    """Return (version of fla-core, RWKV6 operator for `evaluate` with fla's forms "chunk" and "recurrent"); None if
    they cannot run. Pass the scale explicitly: in some versions the two forms have different defaults."""
    if not (torch.cuda.is_available() and importlib.util.find_spec("fla")):
        return None
    module = importlib.import_module("fla.ops.rwkv6")

    def form(function: Callable) -> Callable:
        return lambda **inputs: RWKV6Output(*function(**inputs))

    forms = {"chunk": form(module.chunk_rwkv6), "recurrent": form(module.fused_recurrent_rwkv6)}
    version = importlib.metadata.version("fla-core")
    return version, dataclasses.replace(operator("rwkv6"), forms=forms)
