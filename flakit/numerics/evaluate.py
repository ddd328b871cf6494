"""One run of an operator, forward and every gradient, and the same in float64: `evaluate` and `truth`.

Both use the same cotangents (the gradients arriving at the outputs), drawn from a private generator and rounded to the
outputs' dtype, and the truth starts from the rounded inputs: what differs is the operator's arithmetic alone.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .operators import Operator, operator

# Above this many tokens the truth comes from the chunked form in float64: it agrees with the recurrence to rounding
# (a test holds it to that) and neither walks T in Python nor keeps every state.
LONGEST_RECURRENCE = 256


def cotangents(
    op: str | Operator, inputs: Mapping[str, Tensor], *, grad_seed: int = 1, dfinal_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The fixed gradients that arrive at o and, when `dfinal_state`, at the final state: standard normal, else None."""
    op = operator(op)
    r, v, cu_seqlens = inputs["r"], inputs["v"], inputs.get("cu_seqlens")
    B, _, H, K = r.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    shapes = (tuple(v.shape), v.dtype), ((N, H, K, v.shape[-1]), torch.promote_types(v.dtype, torch.float32))
    do, dstate = (
        torch.from_numpy(np.random.default_rng([grad_seed, stream]).standard_normal(shape)).to(dtype).to(v.device)
        for stream, (shape, dtype) in enumerate(shapes)
    )
    return do, dstate if dfinal_state else None


def evaluate(
    op: str | Operator,
    inputs: Mapping[str, Tensor],
    *,
    form: str = "chunk",
    backend: str | None = None,
    chunk_size: int | None = None,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: tuple[Tensor, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Run an operator forward and backward.

    inputs: as `flakit.inputs` makes them; further arguments of the operator (scale, cu_seqlens) may be among them.
    form: "chunk" or "recurrent"; backend and chunk_size as the operator takes them.
    dfinal_state: let a gradient arrive at the final state as well.
    arriving: the gradients at o and (or None) at the final state, instead of `cotangents`.
    Returns o, final_state, the gradient of every input ("d" + its name) and dinitial_state where a state was given.
    """
    op = operator(op)
    if form not in op.forms:
        raise ValueError(f"form: expected one of {', '.join(op.forms)}, got {form!r}")
    given = {name: x for name, x in (("backend", backend), ("chunk_size", chunk_size)) if x is not None}
    leaves = {name: inputs[name].detach().requires_grad_() for name in _leaves(op, inputs)}
    out = op.forms[form](**{**inputs, **leaves}, output_final_state=True, **given)
    do, dstate = arriving or cotangents(op, inputs, grad_seed=grad_seed, dfinal_state=dfinal_state)
    reached, arrives = ((out.o,), (do,)) if dstate is None else ((out.o, out.final_state), (do, dstate))
    grads = torch.autograd.grad(reached, tuple(leaves.values()), arrives)
    found = {"o": out.o.detach(), "final_state": out.final_state.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def truth(
    op: str | Operator,
    inputs: Mapping[str, Tensor],
    *,
    grad_seed: int = 1,
    dfinal_state: bool = False,
    arriving: tuple[Tensor, Tensor | None] | None = None,
    recurrence: bool | None = None,
) -> dict[str, Tensor]:
    """What `evaluate` should give, in float64, on the inputs' device.

    inputs, grad_seed, dfinal_state, arriving: as for `evaluate`; nothing is validated, so that w may be positive.
    recurrence: walk the recurrence (True), use the chunked form in float64 (False), or choose by length (None).
    """
    op = operator(op)
    names = _leaves(op, inputs)
    do, dstate = arriving or cotangents(op, inputs, grad_seed=grad_seed, dfinal_state=dfinal_state)
    exact = {name: inputs[name].detach().double() for name in names}
    scale = inputs.get("scale")
    scale = inputs["r"].shape[-1] ** -0.5 if scale is None else scale
    u, do = exact["u"], do.double()

    parts = []
    for time, which in _sequences(inputs):
        r, k, v, w = (exact[name][:, time] for name in ("r", "k", "v", "w"))
        state = exact["initial_state"][which] if "initial_state" in exact else None
        walk = r.shape[1] <= LONGEST_RECURRENCE if recurrence is None else recurrence
        module, extra = (op.reference, ()) if walk and r.shape[1] else (op.chunked, (64,))
        arrives = do[:, time], None if dstate is None else dstate[which].double()
        parts.append(
            module.forward(r, k, v, w, u, scale, state, *extra)
            + module.backward(r, k, v, w, u, scale, state, *arrives, *extra)
        )

    o, final_state, dr, dk, dv, dw, du, dinitial = zip(*parts, strict=True)
    found = {"o": torch.cat(o, 1), "final_state": torch.cat(final_state)}
    found |= {name: torch.cat(x, 1) for name, x in zip(("dr", "dk", "dv", "dw"), (dr, dk, dv, dw), strict=True)}
    found["du"] = sum(du)
    if "initial_state" in exact:
        found["dinitial_state"] = torch.cat(dinitial)
    return found


def _leaves(op: Operator, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    missing = [name for name in op.tensors if name not in inputs]
    if missing:
        raise ValueError(f"inputs: expected {', '.join(op.tensors)}, got none for {', '.join(missing)}")
    return op.tensors + tuple(name for name in op.states if inputs.get(name) is not None)


def _sequences(inputs: Mapping[str, Tensor]) -> list[tuple[slice, slice]]:
    """Each independent run over time as (its tokens, its states): the whole batch at once, or one packed sequence."""
    if inputs.get("cu_seqlens") is None:
        return [(slice(None), slice(None))]
    ends = inputs["cu_seqlens"].tolist()
    return [(slice(*ends[n : n + 2]), slice(n, n + 1)) for n in range(len(ends) - 1)]
