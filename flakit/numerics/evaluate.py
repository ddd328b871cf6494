"""Runs an operator forward and backward: `evaluate`; in float64: `truth`; token by token in float32: `recurrence`.

All use the same cotangents (the gradients with respect to the outputs), drawn from a private generator and rounded to
the outputs' dtype, and the truth starts from the rounded inputs: only the operator's arithmetic differs.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import flag, one_of, shown, whole_number
from .operators import Operator, operator, state_dtype

# Above this many tokens the truth comes from the chunked form in float64: it agrees with the recurrence up to rounding
# (tests compare both with a third implementation, tests/ops/oracle.py) and takes a tenth of a Python loop over T.
LONGEST_RECURRENCE = 16
# Non-finite values spread over their chunk. Up to this many tokens the recurrence then locates their beginning.
LONGEST_NOT_FINITE = 256


Arriving = tuple[Tensor, Tensor | tuple[Tensor, ...] | None]
"""The gradients with respect to o and, unless None, to the final state (a tuple if the state has several parts)."""


_THREADS_OF_THE_PROCESS = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch's CPU operations on one thread: a second one gains nothing for small tensors, and where other
    processes (a browser, say) use the cores, threads wait for each other until seconds become minutes."""
    with _THREADS_OF_THE_PROCESS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def cotangents(
    op: str | Operator, inputs: Mapping[str, Any], *, grad_seed: int = 1, dfinal_state: bool = False
) -> Arriving:
    """Draw the gradients with respect to o and, if `dfinal_state`, to the final state (else None), standard normal.
    inputs: determine shapes, dtypes and device. Equal seeds give equal numbers. Raises ValueError for wrong inputs."""
    op, grad_seed = operator(op), whole_number("grad_seed", grad_seed, least=0)
    dfinal_state = flag("dfinal_state", dfinal_state, "; gradients of your own go into `arriving`")
    leaves = op.leaves(inputs)
    first, size = leaves[op.tensors[0]], op.size(leaves, inputs.get("cu_seqlens"))
    drawn = []
    for stream, name in enumerate(op.outputs, start=100):  # distinct from the streams of `inputs` with this seed
        shape = tuple(size[axis] for axis in op.axes[name].split())
        x = torch.from_numpy(np.random.default_rng([grad_seed, stream]).standard_normal(shape))
        drawn.append(x.to(first.dtype if name == "o" else state_dtype(first.dtype)).to(first.device))
    do, *parts = drawn
    return do, op.state(parts) if dfinal_state else None


def _arriving(op: Operator, inputs: Mapping[str, Any], arriving: Arriving | None, **drawn) -> Arriving:
    """Return `arriving`, after checking its shapes; if None, the cotangents. Raises TypeError or ValueError."""
    if arriving is None:
        return cotangents(op, inputs, **drawn)
    if not isinstance(arriving, (tuple, list)) or len(arriving) != 2:
        raise TypeError(f"arriving: expected a pair, gradients at o and (or None) the state, got {shown(arriving)}")
    do, dstate = arriving
    size = op.size(op.leaves(inputs), inputs.get("cu_seqlens"))
    op.check_shape("o", do, size, "arriving[0]")
    return do, op.state(op.checked_parts("arriving[1]", dstate, size))


def evaluate(
    op: str | Operator,
    inputs: Mapping[str, Any],
    *,
    form: str = "chunk",
    backend: str | None = None,
    chunk_size: int | None = None,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: Arriving | None = None,
) -> dict[str, Tensor]:
    """Run an operator forward and backward; return its outputs and gradients by name.

    inputs: as from `flakit.inputs`, possibly with further arguments of the operator (scale, cu_seqlens).
    form: "chunk" or "recurrent"; backend, chunk_size: passed to the operator.
    dfinal_state: also use a gradient with respect to the final state.
    arriving: the gradients with respect to o and (or None) to the final state, instead of `cotangents`.

    Names are those of o and the final state's parts, and "d" + name for the gradient of every input and of the initial
    state's parts, if there is one ("dinitial_state"; GSA: "dinitial_hk", "dinitial_hv"). Raises ValueError, TypeError.
    """
    op = operator(op)
    run = op.forms[one_of("form", form, op.forms)]
    do, dstate = _arriving(op, inputs, arriving, grad_seed=grad_seed, dfinal_state=dfinal_state)
    options = {name: x for name, x in (("backend", backend), ("chunk_size", chunk_size)) if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in op.leaves(inputs).items()}
    out = run(**{**op.arguments(leaves, inputs), "output_final_state": True, **options})
    outputs = (out.o, *op.parts(out.final_state))
    arrives = (do, *op.parts(dstate))
    grads = torch.autograd.grad(outputs[: len(arrives)], tuple(leaves.values()), arrives)
    results = {name: x.detach() for name, x in zip(op.outputs, outputs, strict=True)}
    return results | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def truth(
    op: str | Operator,
    inputs: Mapping[str, Any],
    *,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: Arriving | None = None,
    recurrence: bool | None = None,
) -> dict[str, Tensor]:
    """Compute the true results of `evaluate`, by the same names, in float64, on the inputs' device.

    inputs, grad_seed, dfinal_state, arriving: as for `evaluate`; nothing is validated, so that a decay may be positive.
    recurrence: use the recurrence (True), chunks in float64 (False), or either by length and finiteness (None).
    """
    op, walk = operator(op), None if recurrence is None else flag("recurrence", recurrence, " or None")
    arriving = _arriving(op, inputs, arriving, grad_seed=grad_seed, dfinal_state=dfinal_state)
    return _by_reference(op, inputs, torch.float64, walk, arriving)


def recurrence(
    op: str | Operator,
    inputs: Mapping[str, Any],
    *,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: Arriving | None = None,
) -> dict[str, Tensor]:
    """Compute the results of `evaluate` token by token in float32 (float64 for float64 inputs), rounding every step.

    The recurrent Triton kernels round likewise, except that they hold a slow decay as two numbers. Without them,
    form="recurrent" of `evaluate` computes in float64 and rounds once (see `ops.common.plain`), which does not show how
    a recurrence rounds. Arguments as for `evaluate`.
    """
    op = operator(op)
    leaves = op.leaves(inputs)
    arithmetic = state_dtype(leaves[op.tensors[0]].dtype)
    arriving = _arriving(op, inputs, arriving, grad_seed=grad_seed, dfinal_state=dfinal_state)
    results = _by_reference(op, inputs, arithmetic, True, arriving)
    stored = {f"d{name}": x.dtype for name, x in leaves.items()} | {"o": leaves[op.tensors[0]].dtype}
    return {name: x.to(stored.get(name, arithmetic)) for name, x in results.items()}


def _by_reference(
    op: Operator, inputs: Mapping[str, Any], dtype: torch.dtype, walk: bool | None, arriving: Arriving
) -> dict[str, Tensor]:
    """Return outputs and gradients by name, computed in a dtype by the operator's reference (walk: True), by its
    chunked form (False), or by a suitable one (None)."""
    do, dstate = arriving
    exact = {name: x.detach().to(dtype) for name, x in op.leaves(inputs).items()}
    do, dparts, scale = do.to(dtype), [x.to(dtype) for x in op.parts(dstate)], op.scale(inputs)

    runs = []
    for time, which in _sequences(inputs):
        rows = [exact[name][:, time] if name in op.sequences else exact[name] for name in op.tensors]
        state = op.state([exact[name][which] for name in op.states if name in exact])
        arrives = do[:, time], op.state([x[which] for x in dparts])
        length = do[:, time].shape[1]

        def run(walk, rows=rows, state=state, arrives=arrives):
            if op.chunked is None:
                o, final, (*grads, dinitial) = op.reference.both(*rows, scale, state, *arrives)
            else:
                module, extra = (op.reference, ()) if walk else (op.chunked, (64,))
                o, final = module.forward(*rows, scale, state, *extra)
                *grads, dinitial = module.backward(*rows, scale, state, *arrives, *extra)
            return o, *op.parts(final), *grads, *op.parts(dinitial)

        parts = run(bool(length) and (length <= LONGEST_RECURRENCE if walk is None else walk))
        if walk is None and op.chunked is not None and LONGEST_RECURRENCE < length <= LONGEST_NOT_FINITE:
            if not all(x.isfinite().all() for x in parts):
                parts = run(True)
        runs.append(parts)

    names = (*op.outputs, *(f"d{name}" for name in (*op.tensors, *op.states)))
    results = {}
    for name, parts in zip(names, zip(*runs, strict=True), strict=True):
        if name == "o" or name.removeprefix("d") in op.sequences:
            joined = torch.cat(parts, 1)
            empty = do.shape[1] - joined.shape[1]  # rows of no sequence
            results[name] = F.pad(joined, (*[0] * (2 * joined.ndim - 3), empty))
        elif name.removeprefix("d") in op.tensors:
            results[name] = sum(parts)
        elif name in op.outputs or name.removeprefix("d") in exact:
            results[name] = torch.cat(parts)
    return results


def _sequences(inputs: Mapping[str, Tensor]) -> list[tuple[slice, slice]]:
    """Return each independent run as (slice of T, slice of N): the whole batch, or one for each packed sequence."""
    if inputs.get("cu_seqlens") is None:
        return [(slice(None), slice(None))]
    ends = inputs["cu_seqlens"].tolist()
    return [(slice(*ends[n : n + 2]), slice(n, n + 1)) for n in range(len(ends) - 1)]
