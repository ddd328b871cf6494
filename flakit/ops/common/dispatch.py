"""Chooses a backend, "triton" kernels, "torch" on any device or the "reference" recurrence, and imports its kernels."""

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

BACKENDS = ("triton", "torch", "reference")
CHUNK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FUSED_CHANNELS = 33, 64
"""The fewest and the most channels of a head that the fused kernels take."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # once, since torch.compile cannot trace the lookup


def has_triton() -> bool:
    return _HAS_TRITON


def interpreted() -> bool:
    """Whether this process uses Triton's interpreter, which runs kernels on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_LAUNCHES = threading.RLock()


@contextmanager
def interpreted_alone() -> Iterator[None]:
    """Serialize launches across threads where kernels are interpreted: Triton's interpreter keeps the current program
    and its patches of `triton.language` in globals. A context manager or a decorator."""
    with _LAUNCHES if interpreted() else nullcontext():
        yield


def interpreted_too_late() -> bool:
    """Whether TRITON_INTERPRET was set after `import triton`, so that `triton.language` has compiled functions."""
    language = sys.modules.get("triton.language")
    return interpreted() and language is not None and type(language.sum).__name__ != "InterpretedFunction"


def choose_backend(backend: str | None, x: Tensor) -> str:
    """Return the backend; default: triton on CUDA (float64: torch), torch elsewhere. x: the operator's first tensor.
    Raises ValueError, TypeError or RuntimeError, with the remedy, if `backend` is unknown or cannot run."""
    if backend is None:
        return "triton" if x.is_cuda and x.dtype != torch.float64 and has_triton() else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if backend == "triton":
        if not has_triton():
            raise ValueError("backend: 'triton' is not installed here (it exists for Linux only), use 'torch'")
        if x.dtype == torch.float64:
            raise TypeError("backend: 'triton' computes in float32, got float64 inputs, use 'torch' or 'reference'")
        if not x.is_cuda and not interpreted():
            raise ValueError(
                f"backend: 'triton' needs CUDA tensors, got a tensor on {x.device}; on a CPU start the process with "
                f"TRITON_INTERPRET=1 or use 'torch'"
            )
        if not x.is_cuda and interpreted_too_late():
            raise RuntimeError(
                "backend: TRITON_INTERPRET=1 was set after triton had been imported, which decides then how kernels "
                "run; set it before Python starts (in a notebook: restart the kernel) or use 'torch'"
            )
        if not x.is_cuda and x.dtype == torch.bfloat16:
            raise TypeError(
                "backend: Triton's interpreter computes wrongly with bfloat16, use float32 inputs or 'torch'"
            )
    return backend


def fits_fused(x: Tensor, v: Tensor) -> bool:
    """Whether the fused kernels serve these heads: x [..., K] and v [..., V] of 33 to 64 channels."""
    least, most = FUSED_CHANNELS
    return least <= x.shape[-1] <= most and least <= v.shape[-1] <= most


@cache
def kernels(package: str, form: str):
    """Return the `ahead_triton.Kernels` of an operator's form, imported here, so that `import flakit` works without
    Triton. package: "flakit.ops.rwkv6" for example. form: "chunk", "recurrent", or "fused_chunk" for heads that
    `fits_fused`, where the operator has such kernels."""
    from .ahead_triton import Kernels

    return Kernels(import_module(f".{form}_triton", package))


def check_chunk_size(chunk_size: int | None, backend: str, kernels: tuple[int, ...]) -> int:
    """Return `chunk_size`, a power of two up to 256; on Triton the nearest of `kernels`, the lengths that its kernels
    take, in ascending order; 0, the backend's own choice, for None. Raises ValueError for any other `chunk_size`."""
    if chunk_size is None:
        return 0
    whole = isinstance(chunk_size, (int, np.integer)) and not isinstance(chunk_size, bool)
    if not whole or chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected one of {CHUNK_SIZES} or None, got {chunk_size!r}")
    return min(max(chunk_size, kernels[0]), kernels[-1]) if backend == "triton" else int(chunk_size)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in autocast's dtype if it is enabled for their device; float64 stays, as in PyTorch's own."""
    device = tensors[0].device.type
    # Querying autocast for meta tensors raises. `is_autocast_available` would tell, but PyTorch 2.11 cannot compile it.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
