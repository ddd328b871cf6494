"""What anomaly detection says of a NaN, and what it does not.

`torch.autograd.detect_anomaly` checks the outputs of every node of the backward pass and stops at the first NaN. As
reported (flash-linear-attention issue #77): it names output 3 of GSA's backward pass, so the fault is where that
gradient is computed. As measured, with the fault of `padding`: it does name output 3, the gradient of s, the key that
padding reaches. That is right, but it is all it reports:
- one node and one number. An operator written as one autograd.Function is one node, whatever happens inside; only its
  first output with a NaN is named, not the token, the block or the operation.
- NaN only. Infinite gradients pass silently: with `anchor`'s bug A in one channel and constant decays, dr and dv are
  infinite, the output is NaN, and nothing is reported.
- the backward pass only. A NaN in the forward pass is not checked.

A dispatch mode sees inside a node: `first_operation` names the operation that produces the first infinity or NaN from
finite numbers, forward or backward; for both faults it is the exponential.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...ops.common.chunks import split_chunks
from .. import anchor, padding
from ..anchor.operators import OPERATORS
from ..anchor.schemes import Products
from ..knobs import FINITE_DECAY, Range
from ..laws import Measured, Row

NOTHING = "says nothing"


def operator(op: str, products: Callable[..., Products], chunk: int = 64) -> Callable[..., Tensor]:
    """Return RWKV6, RWKV7 or GSA in chunks as one autograd.Function: f(*tensors in the operator's order) -> o [B, T, H,
    V]. products(w, inclusive=…) -> the `anchor.schemes.Products` of all chunks. A second backward raises RuntimeError.
    """
    of = OPERATORS[op]

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors: Tensor) -> Tensor:
            inputs = dict(zip(of.names, tensors, strict=True))
            ctx.chunked = of(inputs, lambda w, inclusive: products(w, inclusive=inclusive), chunk)
            # Remove o: o owns ctx, so a reference back would be a cycle that holds GPU memory until garbage collection.
            return ctx.chunked.outputs.pop("o")

        @staticmethod
        def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
            if ctx.chunked is None:
                raise RuntimeError("backward: expected one for each forward, got a second")
            # Free it, as autograd frees its saved tensors; otherwise it would live, with the loss, into the next step.
            chunked, ctx.chunked = ctx.chunked, None
            gradients = chunked.backward(split_chunks(do, chunk, torch.float32))
            wanted = zip(of.names, ctx.needs_input_grad, strict=True)
            return tuple(gradients[f"d{name}"] if needed else None for name, needed in wanted)

    return Chunked.apply


class Report(NamedTuple):
    """Anomaly detection's report (`words`: "output 3, ds", or `NOTHING`), and the actual gradients and output."""

    words: str
    grads: dict[str, Tensor]
    o: Tensor


def report(call: Callable[..., Tensor], inputs: Mapping[str, Tensor], *, trained: str | None = None) -> Report:
    """Run call(*inputs) and its backward from do = 1 under anomaly detection, and again without it. inputs: tensors by
    name, each name one letter. trained: the letters of those that require a gradient; default all."""
    names = list(inputs)
    trained = "".join(names) if trained is None else trained

    def backward() -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: x.detach().clone().requires_grad_(name in trained) for name, x in inputs.items()}
        o = call(*leaves.values())
        o.backward(torch.ones_like(o))
        return o.detach(), {f"d{name}": leaves[name].grad for name in names if name in trained}

    words = NOTHING
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its cost, and the traceback of the forward
        try:
            with torch.autograd.detect_anomaly():
                backward()
        except RuntimeError as error:
            match = re.search(r"returned nan values in its (\d+)th output", str(error))
            if match is None:
                raise
            words = f"output {match[1]}, d{names[int(match[1])]}"
    o, grads = backward()
    return Report(words, grads, o)


class Operation(NamedTuple):
    """One ATen operation: its name, what its result contains ("finite", "inf" or "NaN"), and its pass."""

    name: str
    kind: str
    made: bool
    """Whether the result has inf or NaN and the operands had neither."""
    backward: bool


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[Operation] = []
        self.backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if "empty" in name:  # uninitialised memory may hold NaN
            out.zero_()
        kind = _kind(out)
        made = kind != "finite" and _kind((args, kwargs)) == "finite"
        self.seen.append(Operation(name, kind, made, self.backward))
        return out


def _kind(tree: object) -> str:
    floating = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
    if any(x.isnan().any() for x in floating):
        return "NaN"
    return "inf" if any(x.isposinf().any() for x in floating) else "finite"  # masks use -inf


def operations(call: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> list[Operation]:
    """Return every ATen operation of call(*inputs) and of its backward from do = 1, in order."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
    with _Watch() as watch:
        o = call(*leaves)
        watch.backward = True
        o.backward(torch.ones_like(o))
    return watch.seen


def first_operation(call: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> str:
    """Return the name of the first operation of `operations` that makes +inf or NaN from operands that have neither."""
    return _first(operations(call, inputs))


def _first(seen: list[Operation]) -> str:
    return next((operation.name for operation in seen if operation.made), NOTHING)


def law(T: int, gate: float, *, op: str = "gsa", form: str = "chunk") -> str:
    """Predict what anomaly detection reports with the fault of `padding`, for T tokens of log decay `gate` <= 0:
    "output n, ds" (or dk), n the gradient's position, or `NOTHING`. form: one of `padding.FORMS`."""
    if -gate <= padding.law(T, form):
        return NOTHING
    name = padding.KEY_GRADIENT[op]
    n = OPERATORS[op].names.index(name[1:])
    return f"output {n}, {name}"


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the report of anomaly detection, every operation, and the fraction of each
    token's output and gradients that is NaN or infinite."""

    words: str
    """The report of anomaly detection."""
    operations: list[Operation]
    """The operations inside the node, which anomaly detection does not check."""
    nan: Mapping[str, Tensor]
    inf: Mapping[str, Tensor]
    """The fraction of each token's values that are NaN or inf, [T], for o and the gradients in the node's order."""


def show(
    *,
    T: Annotated[int, Range(1, 320)] = 120,
    gate: Annotated[float, FINITE_DECAY] = -1.86,
    op: Annotated[str, padding.KEY_GRADIENT] = "gsa",
    form: Annotated[str, padding.FORMS] = "chunk",
) -> Shown:
    """Run an operator with the fault of `padding` under anomaly detection, for T tokens of log decay `gate` <= 0.
    Return its report beside the prediction of `law`, and what is NaN or infinite. form: one of `padding.FORMS`."""
    x, call = padding.inputs(T, gate, op=op, K=4, M=4), operator(op, padding.products(T, form))
    result = report(call, x)
    tensors = {"o": result.o} | {name: grad for name, grad in result.grads.items() if grad.ndim == 4}
    nan, inf = (
        {name: kind(y)[0].flatten(1).double().mean(1) for name, y in tensors.items()}
        for kind in (torch.isnan, torch.isinf)
    )
    seen, what = operations(call, x), f"{op}, padding {form}, T = {T}, {gate:g}"
    rows = [
        Row(f"{what}: anomaly detection", math.nan, law(T, gate, op=op, form=form), result.words),
        Row(f"{what}: first bad operation", math.nan, math.nan, _first(seen)),
        Row(f"{what}: o finite", math.nan, True, not (nan["o"] + inf["o"]).any()),
    ]
    return Shown(rows, result.words, seen, nan, inf)


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured reports of anomaly detection on faults of `padding` and `anchor`."""
    padded, first, _ = show().rows
    others = [show(gate=-1.84).rows[0], show(form="right", gate=-50.0).rows[0]]
    call = operator("rwkv6", partial(Products, scheme="first-row"))
    x = anchor.spike(16, 0.0, K=8)
    x["w"][:, 16, :, 0] = -89.0
    trained, fixed = report(call, x), report(call, x, trained="rkvu")
    infinite = [name for name, grad in fixed.grads.items() if grad.isinf().any()]
    return [
        padded._replace(recorded="output 3, ds"),
        *others,
        Row("bug A: anomaly detection", math.nan, "output 3, dw", trained.words),
        Row("bug A, w not trained: anomaly detection", math.nan, NOTHING, fixed.words),
        Row("bug A, w not trained: infinite gradients", math.nan, "dr, dv", ", ".join(infinite)),
        Row("bug A: o finite", math.nan, False, bool(fixed.o.isfinite().all())),
        Row("bug A: first bad operation", math.nan, "exp", first_operation(call, x)),
        Row("padding: first bad operation", math.nan, "exp", first.measured),
    ]
