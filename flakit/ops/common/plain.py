"""The backends "torch" and "reference": an operator's plain PyTorch code, with dtypes and packed sequences around it.

`package` is the operator's own; its `chunk_torch` and `reference` have `forward(*sequences, *rest)` and
`backward(*sequences, *rest, do, dfinal_state)`, `chunk_torch` with the chunk size as a last argument.
"""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from .packed import from_batch, to_batch

CHUNK_SIZE = 64


def kernels(package: str, form: str) -> ModuleType:
    """The operator's Triton code, imported on first use: `import flakit` works where Triton does not exist."""
    return import_module(f".{form}_triton", package)


def _implementation(package: str, form: str, backend: str, chunk_size: int, first: Tensor):
    """The code that runs, the first sequence in the dtype it is to compute in, and extra arguments."""
    if form == "chunk" and backend == "torch":
        shortest = 1 << (first.shape[1] - 1).bit_length()  # a short sequence would be padding for the most part
        return import_module(".chunk_torch", package), first, (chunk_size or min(CHUNK_SIZE, shortest),)
    # Thousands of products with the same rounded e^w add its error up: 2e-5 at w = -1e-4, T = 4096 in float32.
    return import_module(".reference", package), first.double(), ()


def forward(
    package: str,
    form: str,
    backend: str,
    chunk_size: int,
    sequences: tuple[Tensor, ...],
    rest: tuple,
    cu_seqlens: Tensor | None,
) -> tuple:
    """o and the final state, in the dtype they were computed in."""
    module, first, extra = _implementation(package, form, backend, chunk_size, sequences[0])
    sequences = first, *sequences[1:]
    with torch.autocast(first.device.type, enabled=False):
        if cu_seqlens is None:
            return module.forward(*sequences, *rest, *extra)
        o, final_state = module.forward(*(to_batch(x, cu_seqlens) for x in sequences), *rest, *extra)
        return from_batch(o, cu_seqlens), final_state


def backward(
    package: str,
    form: str,
    backend: str,
    chunk_size: int,
    sequences: tuple[Tensor, ...],
    rest: tuple,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dfinal_state,
) -> tuple:
    """What the operator's `backward` returns: first the gradients of the sequences."""
    module, first, extra = _implementation(package, form, backend, chunk_size, sequences[0])
    sequences = first, *sequences[1:]
    with torch.autocast(first.device.type, enabled=False):
        if cu_seqlens is None:
            return module.backward(*sequences, *rest, do, dfinal_state, *extra)
        *batched, do = (to_batch(x, cu_seqlens) for x in (*sequences, do))
        grads = module.backward(*batched, *rest, do, dfinal_state, *extra)
        rows, others = grads[: len(sequences)], grads[len(sequences) :]
        return (*(from_batch(x, cu_seqlens) for x in rows), *others)
