"""A final state without a gradient: the backward pass ignores what arrives there, and no error is raised.

Some fused recurrent operators return a final state but begin their backward walk with D_T = 0. A loss on the outputs
alone is right, so is every test of it. A loss that uses the state as well, as truncated backpropagation or a loss on a
memory does, loses a share of the gradients of whatever was written into the state; a loss on the state alone gives
zeros, which look like a converged model.

`ignoring` makes such an operator of any right one. The `law` predicts the lost share from the decay alone: what D_T
contributes to D_t fades by the decays after t, what the outputs contribute is a sum over all later reads.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...numerics.evaluate import cotangents, evaluate, truth
from ...numerics.inputs import DECAYS
from ...numerics.inputs import inputs as make_inputs
from ...numerics.operators import Operator, operator
from ...ops.common.decay import sum_after
from ..knobs import DECAY, Range
from ..laws import Row, kept_in_gradients, kept_in_states

ON = ("o", "state", "both")
GRAD_SEED = 1000  # other numbers than the inputs of any seed in use: the law needs what arrives to be independent


class _Ignored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx, dstate: Tensor) -> Tensor:
        return torch.zeros_like(dstate)


def ignoring(form: Callable) -> Callable:
    """The operator with the fault: the same results, and no gradient from the final state."""

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
    """The operator, all of whose forms have the fault."""
    op = operator(op)
    return dataclasses.replace(op, forms={name: ignoring(form) for name, form in op.forms.items()})


def errors(
    inputs: Mapping[str, object], op: str | Operator = "rwkv6", *, on: str = "both", fault: bool = True
) -> dict[str, float]:
    """Relative L2 error of every gradient, against float64.

    inputs: as `flakit.inputs` makes them. on: what the loss reads, "o", "state" or "both"; the gradients that arrive
    there are standard normal. fault: without it, those of the right operator.
    """
    found, exact = _gradients(inputs, op, on, fault)
    return {name: relative_l2(found[name], exact[name]) for name in found}


def _gradients(
    inputs: Mapping[str, object], op: str | Operator, on: str, fault: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every gradient, as computed and in float64."""
    _check(on)
    op = operator(op)
    do, dstate = cotangents(op, inputs, dfinal_state=True, grad_seed=GRAD_SEED)
    arriving = (torch.zeros_like(do) if on == "state" else do), (None if on == "o" else dstate)
    found = evaluate(ignored(op) if fault else op, inputs, arriving=arriving)
    exact = truth(op, inputs, arriving=arriving)
    names = [name for name in found if name not in op.outputs]
    return {name: found[name] for name in names}, {name: exact[name] for name in names}


def _check(on: str) -> None:
    if on not in ON:
        raise ValueError(f"on: expected one of {', '.join(ON)}, got {on!r}")


def law(inputs: Mapping[str, Tensor], *, on: str = "both", fault: bool = True) -> dict[str, float]:
    """For RWKV6: the share (L2) that is missing from dk, dv and dw, from w and u alone.

    With r, k, v and what arrives standard normal, row k of D_t has a variance of a from D_T and of b from the reads,
    and they fade as the state does: a, b start at 1 and 0 and become e^{2w} a and e^{2w} b + scale^2 with every token
    walked back. dk and dv see D_t beside a bonus of variance scale^2 u^2; dw sees it through e^{w_t} S_{t-1}. dr and du
    meet no D_t and lose nothing. A loss on o alone sends nothing to D_T, one on the state alone nothing else.
    NaN for dw where all of e^{w_t} is below the smallest normal number of w's dtype: nothing is left to be measured.
    """
    _check(on)
    w, u = inputs["w"], inputs["u"].detach().double()
    scale = operator("rwkv6").scale(inputs)
    a, b, c = kept_in_gradients(w, 1.0, 0.0), kept_in_gradients(w, 0.0, scale**2), _carried(w)

    def share(lost: Tensor, rest: Tensor) -> float:
        if not fault or on == "o":
            return 0.0
        return (lost.sum() / (lost.sum() + (rest.sum() if on == "both" else 0.0))).sqrt().item()

    written = share(a, b + scale**2 * u**2)
    normal = inputs["w"].exp() >= torch.finfo(inputs["w"].dtype).tiny
    return {"dk": written, "dv": written, "dw": share(c * a, c * b) if normal.any() else math.nan}


def _carried(w: Tensor) -> Tensor:
    """The variance of a row of e^{w_t} S_{t-1}."""
    return (2 * w.detach().double()).exp() * kept_in_states(w)


WITHIN = {"dk": 0.1, "dv": 0.1, "dw": 0.2}
"""How far the law may be off for random inputs; dw is a product of two random matrices."""


def within(inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """`WITHIN`, or three standard deviations where little of D_T is left to be lost and the law's averages scatter.

    With p_i the share that row i has of what is lost, a sum of squares scatters by sqrt(2 sum p_i^2), its root by half.
    """

    def scatter(p: Tensor) -> float:
        return 3 * ((p / p.sum()).square().sum() / 2).sqrt().nan_to_num(0).item()

    a = kept_in_gradients(inputs["w"], 1.0, 0.0)
    lost = {"dk": a, "dv": a, "dw": _carried(inputs["w"]) * a}
    return {name: max(WITHIN[name], scatter(p)) for name, p in lost.items()}


def at(
    *,
    decay: Annotated[str | float, DECAYS, DECAY] = "rwkv6-wide",
    T: Annotated[int, Range(8, 512, 8)] = 104,
    H: Annotated[int, Range(4, 32)] = 4,
    K: Annotated[int, Range(16, 64, 8)] = 32,
    on: Annotated[str, ON] = "both",
    fault: bool = True,
    seed: int = 0,
) -> list[Row]:
    """One decay, a profile or a number, length, and what the loss reads: the share of each gradient that is lost."""
    shown = show(decay=decay, T=T, H=H, K=K, on=on, fault=fault, seed=seed)
    return [
        Row(f"{name} off by", math.nan, shown.law[name], off, shown.within.get(name, 0))
        for name, off in shown.errors.items()
    ]


@dataclass(frozen=True)
class Shown:
    """What does not reach the tokens, and what that costs them."""

    on: str
    fault: bool
    reach: Tensor
    """How much of what arrives at the final state is left at each token, by row of one head's state, [T, K]."""
    computed: Mapping[str, Tensor]
    """The size (L2) of each token's gradient: dr, dk, dv, dw, [T]."""
    true: Mapping[str, Tensor]
    """The same in float64."""
    lost: Mapping[str, Tensor]
    """Their relative difference (L2), [T]; 0 where there is none."""
    errors: Mapping[str, float]
    """Relative L2 error of every whole gradient."""
    law: Mapping[str, float]
    within: Mapping[str, float]


def show(*, decay: str | float, T: int, H: int, K: int, on: str, fault: bool, seed: int) -> Shown:
    """What `at` measures, token by token."""
    x, found, exact = _measured(decay, T, H, K, on, fault, seed)
    computed, true, off = (
        {name: gradients[name].flatten(2).norm(dim=-1)[0] for name in found if found[name].dim() == 4}
        for gradients in (found, exact, {name: found[name] - exact[name] for name in found})
    )
    lost = {name: torch.where(off[name] == 0, 0.0, off[name] / true[name]) for name in off}
    errors = {name: relative_l2(found[name], exact[name]) for name in found}
    predicted = dict.fromkeys(errors, 0.0) | law(x, on=on, fault=fault)
    reach = sum_after(x["w"][0, :, 0]).exp()
    return Shown(on, fault, reach, computed, true, lost, errors, predicted, within(x))


@functools.lru_cache(maxsize=1)
def _measured(decay: str | float, T: int, H: int, K: int, on: str, fault: bool, seed: int) -> tuple[Mapping, ...]:
    """The inputs, and every gradient as computed and in float64."""
    x = make_inputs("rwkv6", T=T, H=H, K=K, decay=decay, seed=seed)
    return x, *_gradients(x, "rwkv6", on, fault)


def reproduce(seed: int = 0) -> list[Row]:
    """The lost share of each gradient. Told: 39-46% of dk, dv and dw for a loss on both, without saying at which decay
    and length; "rwkv6-wide" over 104 tokens, here, is a setting that gives it. On the state alone, all is lost.
    """
    x = make_inputs("rwkv6", T=104, H=16, K=32, decay="rwkv6-wide", seed=seed)
    both, state, predicted = errors(x), errors(x, on="state"), law(x)
    return [
        *(
            Row(f"loss on both (told: 39-46%): {name} off by", 0.425, predicted[name], both[name], WITHIN[name])
            for name in predicted
        ),
        *(Row(f"loss on both: {name} off by", 0.0, 0.0, both[name]) for name in ("dr", "du")),
        *(Row(f"loss on the state alone: {name} off by", 1.0, 1.0, state[name]) for name in predicted),
    ]
