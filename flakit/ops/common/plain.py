"""The backends "torch" and "reference": run an operator's plain PyTorch code, and handle dtypes and packed sequences.

`package` is the operator's package; its `chunk_torch` and `reference` have `forward(*sequences, *rest)` and
`backward(*sequences, *rest, do, dfinal_state)`; `chunk_torch` takes the chunk size as a last argument. The initial
state is the last of `rest`, its gradient the last result of `backward`: a tensor or a pair of tensors.
"""

from importlib import import_module

import torch
from torch import Tensor

from .packed import buckets, joined_rows, joined_states

CHUNK_SIZE = 32  # on a CPU: half of the scores of 64, while states still cost less than the rest


def _implementation(package: str, form: str, backend: str, chunk_size: int, first: Tensor):
    """Return the module that runs, the first sequence in the dtype to compute in, and extra arguments."""
    if form == "chunk" and backend == "torch":
        shortest = 1 << (first.shape[1] - 1).bit_length()  # a short sequence would be mostly padding
        return import_module(".chunk_torch", package), first, (chunk_size or min(CHUNK_SIZE, shortest),)
    # Thousands of products with the same rounded e^w accumulate its error: 2e-5 at w = -1e-4, T = 4096 in float32.
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
    """Return o and the final state, in the dtype they were computed in."""

    def run(sequences, rest):
        module, first, extra = _implementation(package, form, backend, chunk_size, sequences[0])
        return module.forward(first, *sequences[1:], *rest, *extra)

    with torch.autocast(sequences[0].device.type, enabled=False):
        if cu_seqlens is None:
            return run(sequences, rest)
        *shared, state = rest
        batches = buckets(cu_seqlens)
        results = [run([x.rows(y) for y in sequences], (*shared, x.states(state))) for x in batches]
        o, states = zip(*results, strict=True)
        return joined_rows(batches, o, sequences[0].shape[1]), joined_states(batches, states)


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
    """Return the results of the operator's `backward`: first the gradients of the sequences."""

    def run(sequences, rest, do, dfinal_state):
        module, first, extra = _implementation(package, form, backend, chunk_size, sequences[0])
        return module.backward(first, *sequences[1:], *rest, do, dfinal_state, *extra)

    with torch.autocast(do.device.type, enabled=False):
        if cu_seqlens is None:
            return run(sequences, rest, do, dfinal_state)
        *shared, state = rest
        batches = buckets(cu_seqlens)
        results = [
            run([x.rows(y) for y in sequences], (*shared, x.states(state)), x.rows(do), x.states(dfinal_state))
            for x in batches
        ]
        *grads, dstates = zip(*results, strict=True)
        rows, dshared = grads[: len(sequences)], grads[len(sequences) :]
        return (
            *(joined_rows(batches, x, do.shape[1]) for x in rows),
            *(sum(x) for x in dshared),
            joined_states(batches, dstates),
        )
