"""One run of an operator, forward and every gradient, by `evaluate`; the same in float64 by `truth`, and token by token
in float32 by `recurrence`.

All use the same cotangents (the gradients arriving at the outputs), drawn from a private generator and rounded to the
outputs' dtype, and the truth starts from the rounded inputs: what differs is the operator's arithmetic alone.
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

# Above this many tokens the truth comes from the chunked form in float64: it agrees with the recurrence to rounding
# (tests hold both to a third way, tests/ops/oracle.py) and does not walk T in Python, which takes ten times as long.
LONGEST_RECURRENCE = 16
# What is not finite spreads over its chunk. So up to this many tokens the recurrence then says where it begins.
LONGEST_NOT_FINITE = 256


Arriving = tuple[Tensor, Tensor | tuple[Tensor, ...] | None]
"""The gradients arriving at o and, unless None, at the final state (a tuple of parts where the state has several)."""


_THREADS_OF_THE_PROCESS = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operations on a CPU use one thread: to small tensors a second one brings nothing, and where cores are
    taken (by a browser, say) threads wait for each other so long that seconds become minutes."""
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
    """The fixed gradients that arrive at o and, when `dfinal_state`, at the final state: standard normal, else None."""
    op, grad_seed = operator(op), whole_number("grad_seed", grad_seed, least=0)
    dfinal_state = flag("dfinal_state", dfinal_state, "; gradients of your own go into `arriving`")
    leaves = op.leaves(inputs)
    first, size = leaves[op.tensors[0]], op.size(leaves, inputs.get("cu_seqlens"))
    drawn = []
    for stream, name in enumerate(op.outputs, start=100):  # other streams than those of `inputs` with this seed
        shape = tuple(size[axis] for axis in op.axes[name].split())
        x = torch.from_numpy(np.random.default_rng([grad_seed, stream]).standard_normal(shape))
        drawn.append(x.to(first.dtype if name == "o" else state_dtype(first.dtype)).to(first.device))
    do, *parts = drawn
    return do, op.state(parts) if dfinal_state else None


def _arriving(op: Operator, inputs: Mapping[str, Any], arriving: Arriving | None, **drawn) -> Arriving:
    """`arriving`, which must have the shapes of the outputs, or the cotangents."""
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
    """Run an operator forward and backward.

    inputs: as `flakit.inputs` makes them; further arguments of the operator (scale, cu_seqlens) may be among them.
    form: "chunk" or "recurrent"; backend and chunk_size as the operator takes them.
    dfinal_state: let a gradient arrive at the final state as well.
    arriving: the gradients at o and (or None) at the final state, instead of `cotangents`.
    Returns the operator's outputs (o and the final state's parts), the gradient of every input ("d" + its name) and of
    the initial state's parts where one was given ("dinitial_state"; GSA: "dinitial_hk", "dinitial_hv").
    """
    op = operator(op)
    run = op.forms[one_of("form", form, op.forms)]
    do, dstate = _arriving(op, inputs, arriving, grad_seed=grad_seed, dfinal_state=dfinal_state)
    given = {name: x for name, x in (("backend", backend), ("chunk_size", chunk_size)) if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in op.leaves(inputs).items()}
    out = run(**{**op.arguments(leaves, inputs), "output_final_state": True, **given})
    outputs = (out.o, *op.parts(out.final_state))
    arrives = (do, *op.parts(dstate))
    grads = torch.autograd.grad(outputs[: len(arrives)], tuple(leaves.values()), arrives)
    found = {name: x.detach() for name, x in zip(op.outputs, outputs, strict=True)}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def truth(
    op: str | Operator,
    inputs: Mapping[str, Any],
    *,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: Arriving | None = None,
    recurrence: bool | None = None,
) -> dict[str, Tensor]:
    """What `evaluate` should give, in float64, on the inputs' device.

    inputs, grad_seed, dfinal_state, arriving: as for `evaluate`; nothing is validated, so that a decay may be positive.
    recurrence: walk the recurrence (True), use the chunked form in float64 (False), or choose (None): by length, and
        by whether everything is finite.
    """
    walk = None if recurrence is None else flag("recurrence", recurrence, " or None")
    drawn = {"grad_seed": grad_seed, "dfinal_state": dfinal_state}
    return _by_the_text(operator(op), inputs, torch.float64, walk, arriving, drawn)


def recurrence(
    op: str | Operator,
    inputs: Mapping[str, Any],
    *,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: Arriving | None = None,
) -> dict[str, Tensor]:
    """What `evaluate` finds, token by token in float32 (float64 for float64 inputs), every product and sum rounded.

    A plain one: the recurrent Triton kernels round so too, but keep a slow decay as two numbers. Without them,
    form="recurrent" of `evaluate` walks in float64 and rounds once (`ops.common.plain` says why), which says nothing of
    how a recurrence rounds. Arguments as for `evaluate`.
    """
    op = operator(op)
    leaves, drawn = op.leaves(inputs), {"grad_seed": grad_seed, "dfinal_state": dfinal_state}
    arithmetic = state_dtype(leaves[op.tensors[0]].dtype)
    found = _by_the_text(op, inputs, arithmetic, True, arriving, drawn)
    stored = {f"d{name}": x.dtype for name, x in leaves.items()} | {"o": leaves[op.tensors[0]].dtype}
    return {name: x.to(stored.get(name, arithmetic)) for name, x in found.items()}


def _by_the_text(
    op: Operator,
    inputs: Mapping[str, Any],
    dtype: torch.dtype,
    walk: bool | None,
    arriving: Arriving | None,
    drawn: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Outputs and gradients by the operator's reference (walk), by its chunked form, or by what suits, in a dtype."""
    do, dstate = _arriving(op, inputs, arriving, **drawn)
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

        found = run(bool(length) and (length <= LONGEST_RECURRENCE if walk is None else walk))
        if walk is None and op.chunked is not None and LONGEST_RECURRENCE < length <= LONGEST_NOT_FINITE:
            if not all(x.isfinite().all() for x in found):
                found = run(True)
        runs.append(found)

    names = (*op.outputs, *(f"d{name}" for name in (*op.tensors, *op.states)))
    found = {}
    for name, parts in zip(names, zip(*runs, strict=True), strict=True):
        if name == "o" or name.removeprefix("d") in op.sequences:
            joined = torch.cat(parts, 1)
            empty = do.shape[1] - joined.shape[1]  # rows of no sequence
            found[name] = F.pad(joined, (*[0] * (2 * joined.ndim - 3), empty))
        elif name.removeprefix("d") in op.tensors:
            found[name] = sum(parts)
        elif name in op.outputs or name.removeprefix("d") in exact:
            found[name] = torch.cat(parts)
    return found


def _sequences(inputs: Mapping[str, Tensor]) -> list[tuple[slice, slice]]:
    """Each independent run over time as (its tokens, its states): the whole batch at once, or one packed sequence."""
    if inputs.get("cu_seqlens") is None:
        return [(slice(None), slice(None))]
    ends = inputs["cu_seqlens"].tolist()
    return [(slice(*ends[n : n + 2]), slice(n, n + 1)) for n in range(len(ends) - 1)]
