"""A final state without a gradient: the backward pass ignores what arrives there, and no error is raised.

Some fused recurrent operators return a final state but start their backward pass with D_T = 0, where D_t is the
gradient of the state S_t. Gradients of a loss on the outputs alone are right, and so pass every test. A loss that also
uses the state, as in truncated backpropagation or a loss on a memory, loses part of the gradients of everything written
to the state. A loss on the state alone gives zeros, which look like a converged model.

`ignoring` gives this fault to any right operator. The `law` predicts the lost part from the decay alone: the
contribution of D_T to D_t shrinks by the decays after t; that of the outputs is a sum over all later reads.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.errors import relative_l2
from ...numerics.evaluate import cotangents, evaluate, truth
from ...numerics.inputs import DECAYS
from ...numerics.inputs import inputs as make_inputs
from ...numerics.operators import Operator, operator
from ...ops.common.decay import sum_after
from ..knobs import DECAY, Range
from ..laws import Measured, Row, gradient_variances, state_variances

ON = ("o", "state", "both")
GRAD_SEED = 1000  # unlike any input seed: the law assumes incoming gradients independent of the inputs


class _Ignored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx, dstate: Tensor) -> Tensor:
        return torch.zeros_like(dstate)


def ignoring(form: Callable) -> Callable:
    """Wrap an operator with the fault: the same results, but no gradient flows back from the final state."""

    def faulty(*args, **kwargs):
        out = form(*args, **kwargs)
        state = out.final_state
        if isinstance(state, Tensor):
            state = _Ignored.apply(state)
        elif state is not None:
            state = tuple(part if part is None else _Ignored.apply(part) for part in state)
        return out._replace(final_state=state)

    return faulty


def ignored(op: str | Operator = "rwkv6") -> Operator:
    """Return a copy of the operator in which every form has the fault of `ignoring`."""
    op = operator(op)
    return dataclasses.replace(op, forms={name: ignoring(form) for name, form in op.forms.items()})


def errors(
    inputs: Mapping[str, object], op: str | Operator = "rwkv6", *, on: str = "both", fault: bool = True
) -> dict[str, float]:
    """Return the relative L2 error of every gradient against float64, by the gradient's name.

    inputs: as from `flakit.inputs`. on: what the loss depends on, "o", "state" or "both"; its gradients there are
        standard normal. fault: False measures the right operator. Raises ValueError for another `on`.
    """
    computed, exact = _gradients(inputs, op, on, fault)
    return {name: relative_l2(computed[name], exact[name]) for name in computed}


def _gradients(
    inputs: Mapping[str, object], op: str | Operator, on: str, fault: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return every gradient by name as computed, and the same in float64; arguments as in `errors`."""
    one_of("on", on, ON)
    op = operator(op)
    do, dstate = cotangents(op, inputs, dfinal_state=True, grad_seed=GRAD_SEED)
    arriving = (torch.zeros_like(do) if on == "state" else do), (None if on == "o" else dstate)
    computed = evaluate(ignored(op) if fault else op, inputs, arriving=arriving)
    exact = truth(op, inputs, arriving=arriving)
    names = [name for name in computed if name not in op.outputs]
    return {name: computed[name] for name in names}, {name: exact[name] for name in names}


def law(inputs: Mapping[str, Tensor], *, on: str = "both", fault: bool = True) -> dict[str, float]:
    """Predict for RWKV6 the relative L2 error of dk, dv and dw, from w [B, T, H, K] and u [H, K] alone.

    D_t is the gradient of the state S_t. With r, k, v and the incoming gradients standard normal, row k of D_t has
    variance a from D_T and b from the reads. They start at 1 and 0 and become e^{2w} a and e^{2w} b + scale^2 with
    every token back. dk and dv depend on D_t and on a bonus of variance scale^2 u^2; dw on D_t times e^{w_t} S_{t-1}.
    dr and du do not depend on D_t and have no error. A loss on o alone has no gradient at D_T, one on the state alone
    has only that. NaN for dw if all of e^{w_t} is below the smallest normal number of w's dtype: dw is then 0.
    """
    one_of("on", on, ON)
    w, u = inputs["w"], inputs["u"].detach().double()
    scale = operator("rwkv6").scale(inputs)
    a, b, c = gradient_variances(w, 1.0, 0.0), gradient_variances(w, 0.0, scale**2), _carried(w)

    def share(lost: Tensor, rest: Tensor) -> float:
        if not fault or on == "o":
            return 0.0
        return (lost.sum() / (lost.sum() + (rest.sum() if on == "both" else 0.0))).sqrt().item()

    written = share(a, b + scale**2 * u**2)
    normal = inputs["w"].exp() >= torch.finfo(inputs["w"].dtype).tiny
    return {"dk": written, "dv": written, "dw": share(c * a, c * b) if normal.any() else math.nan}


def _carried(w: Tensor) -> Tensor:
    """Return the variance of the elements in each row of e^{w_t} S_{t-1}, [B, T, H, K] float64."""
    return (2 * w.detach().double()).exp() * state_variances(w)


WITHIN = {"dk": 0.1, "dv": 0.1, "dw": 0.2}
"""Relative tolerance of the law for random inputs; dw is a product of two random matrices."""


def within(inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the tolerance of `law`: `WITHIN`, or three standard deviations if few rows of the final state's gradient
    dominate: a sum of squares with shares p_i has relative deviation sqrt(2 sum p_i^2), its root half of that."""

    def scatter(p: Tensor) -> float:
        return 3 * ((p / p.sum()).square().sum() / 2).sqrt().nan_to_num(0).item()

    a = gradient_variances(inputs["w"], 1.0, 0.0)
    lost = {"dk": a, "dv": a, "dw": _carried(inputs["w"]) * a}
    return {name: max(WITHIN[name], scatter(p)) for name, p in lost.items()}


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, how much of the final state's gradient reaches each token, and the norm of each
    token's gradients, as computed and in float64."""

    on: str
    fault: bool
    reach: Tensor
    """The fraction of the final state's gradient that remains at each token, by row of one head's state, [T, K]."""
    computed: Mapping[str, Tensor]
    """The L2 norm of each token's gradient dr, dk, dv, dw, [T]."""
    true: Mapping[str, Tensor]
    """The norms of the same gradients in float64, [T]."""
    lost: Mapping[str, Tensor]
    """The relative L2 difference of a token's computed and true gradient, [T]; 0 if they are equal."""
    errors: Mapping[str, float]
    """Relative L2 error of every full gradient."""
    law: Mapping[str, float]


def show(
    *,
    decay: Annotated[str | float, DECAYS, DECAY] = "rwkv6-wide",
    T: Annotated[int, Range(8, 512, 8)] = 104,
    H: Annotated[int, Range(4, 32)] = 4,
    K: Annotated[int, Range(16, 64, 8)] = 32,
    on: Annotated[str, ON] = "both",
    fault: bool = True,
    seed: int = 0,
) -> Shown:
    """Return the error of each gradient of RWKV6 beside the prediction of `law`, and the gradients by token. decay: a
    profile of `flakit.inputs` or a natural log <= 0. on, fault: as in `errors`."""
    x = make_inputs("rwkv6", T=T, H=H, K=K, decay=decay, seed=seed)
    got, exact = _gradients(x, "rwkv6", on, fault)
    computed, true, difference = (
        {name: gradients[name].flatten(2).norm(dim=-1)[0] for name in got if got[name].dim() == 4}
        for gradients in (got, exact, {name: got[name] - exact[name] for name in got})
    )
    lost = {name: torch.where(y == 0, 0.0, y / true[name]) for name, y in difference.items()}
    errors = {name: relative_l2(got[name], exact[name]) for name in got}
    predicted, allowed = dict.fromkeys(errors, 0.0) | law(x, on=on, fault=fault), within(x)
    rows = [
        Row(f"{name} off by", math.nan, predicted[name], error, allowed.get(name, 0)) for name, error in errors.items()
    ]
    return Shown(rows, on, fault, sum_after(x["w"][0, :, 0]).exp(), computed, true, lost, errors, predicted)


def reproduce() -> list[Row]:
    """Return each gradient's recorded, predicted and measured error. The report loses 39-46% of dk, dv and dw for a
    loss on o and the state, and names no decay or length; "rwkv6-wide" over 104 tokens gives it. A loss on the state
    alone loses all."""
    x = make_inputs("rwkv6", T=104, H=16, K=32, decay="rwkv6-wide")
    both, state, predicted = errors(x), errors(x, on="state"), law(x)
    return [
        *(
            Row(f"loss on both (reported: 39-46%): {name} off by", 0.425, predicted[name], both[name], WITHIN[name])
            for name in predicted
        ),
        *(Row(f"loss on both: {name} off by", 0.0, 0.0, both[name]) for name in ("dr", "du")),
        *(Row(f"loss on the state alone: {name} off by", 1.0, 1.0, state[name]) for name in predicted),
    ]
