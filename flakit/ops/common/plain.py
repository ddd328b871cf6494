"""The backends "torch" and "reference": run an operator's plain PyTorch code, and handle dtypes and packed sequences.

`package` is the operator's package; its `chunk_torch` and `reference` have `forward(*sequences, *rest)` and
`backward(*sequences, *rest, do, dfinal_state)`; `chunk_torch` takes the chunk size as a last argument. The initial
state is the last of `rest`, its gradient the last result of `backward`: a tensor or a pair of tensors.
"""

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from .packed import buckets, joined_rows, joined_states

CHUNK_SIZE = 32  # on a CPU: half of the scores of 64, while states still cost less than the rest


def _call(direction: str, package: str, form: str, backend: str, chunk_size: int, sequences, *rest) -> tuple:
    """Call "forward" or "backward", the `direction`, of the operator's `chunk_torch` or `reference`; return its
    results."""
    first, *others = sequences
    if form == "chunk" and backend == "torch":
        shortest = 1 << (first.shape[1] - 1).bit_length()  # a short sequence would be mostly padding
        module, rest = import_module(".chunk_torch", package), (*rest, chunk_size or min(CHUNK_SIZE, shortest))
    else:
        # Thousands of products with the same rounded e^w accumulate its error: 2e-5 at w = -1e-4, T = 4096 in float32.
        module, first = import_module(".reference", package), first.double()
    return getattr(module, direction)(first, *others, *rest)


def run(
    direction: str,
    package: str,
    form: str,
    backend: str,
    chunk_size: int,
    sequences: tuple[Tensor, ...],
    rest: tuple,
    cu_seqlens: Tensor | None,
    *arriving,
) -> tuple:
    """Run the operator's "forward" or "backward", the `direction`, in float32 or float64. Return o [B, T, H, V] and the
    final state; of a backward, the gradients of `sequences`, then those of the tensors in `rest`, the state's last.

    sequences: the tensors [B, T, H, *]. rest: weights, the scale and the initial state. arriving: of a backward, the
    gradients of o and of the final state.
    """
    call = partial(_call, direction, package, form, backend, chunk_size)
    with torch.autocast(sequences[0].device.type, enabled=False):
        if cu_seqlens is None:
            return call(sequences, *rest, *arriving)
        *shared, state = rest
        batches, results = buckets(cu_seqlens), []
        for x in batches:
            grads = (x.rows(arriving[0]), x.states(arriving[1])) if arriving else ()
            results.append(call([x.rows(y) for y in sequences], *shared, x.states(state), *grads))
        *parts, states = zip(*results, strict=True)
        rows, weights = parts[: len(sequences)], parts[len(sequences) :]
        T = sequences[0].shape[1]
        return (
            *(joined_rows(batches, x, T) for x in rows),
            *(sum(x) for x in weights),
            joined_states(batches, states),
        )
