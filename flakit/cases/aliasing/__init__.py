"""A result that lives in an input's memory: the call is right, and everything after it is wrong.

As reported (flash-linear-attention issue #36): the chunked and the recurrent form disagreed because they shared the
tensor w, and `w.clone()` cured it. As measured, that report has another cause (see `chunk_vs_recurrent`), and no
published version overwrote w. `overwrite` is therefore a constructed example of the reported fault: w becomes its
running sum within each chunk.

The real fault is in the decoding of GSA (pull request #1191): for a single token without gradients, the final state was
written to the memory of the caller's initial state. If one prompt is continued twice, to sample two answers or to
search, the second answer continues the first. Longer inputs take another code path, so no test of states caught it.

A kernel writes to an address without PyTorch's knowledge: `_version` does not change, and autograd raises no error.
Comparing each input with a clone made before the call detects it (`flakit.numerics.mutation`). The `law`: with the
fault, the n-th call with the same arguments returns what the recurrence returns after n equal tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.inputs import inputs as make_inputs
from ...numerics.mutation import Touched, touched
from ...ops.common.chunks import join_chunks, split_chunks
from ...ops.common.dispatch import choose_backend
from ...ops.gsa import reference
from ..knobs import Range
from ..laws import Measured, Row, kernel_place

CHUNK = 64


def overwrite(w: Tensor, chunk: int = CHUNK, *, backend: str | None = None) -> None:
    """Apply the constructed fault: overwrite contiguous w [B, T, H, K] with its running sum within each chunk. backend:
    "triton" uses a kernel, on a GPU or interpreted; "torch" writes to w.data. Neither changes `_version`."""
    if choose_backend(backend, w) == "triton":
        from .kernel_triton import overwrite as in_place

        in_place(w.detach(), chunk)
    else:
        w.data.copy_(join_chunks(split_chunks(w.detach(), chunk, torch.float32).cumsum(-2), w.shape[1]))


def overwritten(T: int, chunk: int = CHUNK) -> float:
    """Predict the fraction of w's elements that `overwrite` changes, for T tokens: all but each chunk's first."""
    return (T - -(-T // chunk)) / T


def inputs(*, B: int = 1, H: int = 2, K: int = 16, V: int = 16, M: int = 8, device: str = "cpu", seed: int = 0) -> dict:
    """Draw float32 inputs of GSA, one token, and its initial state, a pair (hk [B, H, K, M], hv [B, H, M, V])."""
    return make_inputs("gsa", B=B, T=1, H=H, K=K, V=V, M=M, initial_state=True, device=device, seed=seed)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    initial_state: tuple[Tensor, Tensor],
    *,
    in_place: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Decode one token of GSA without gradients, as many q heads as k heads. Return o [B, 1, H, V] and the final state,
    a pair (hk [B, H, K, M], hv [B, H, M, V]), all float32.

    in_place: True for the fault, which writes the final state to the memory of `initial_state`; False for new memory.
    backend: "triton" for the kernel, on a GPU or interpreted; "torch" for the same in PyTorch.
    Raises ValueError for more than one token, or if q has more heads than k.
    """
    if q.shape[1] != 1 or q.shape[2] != k.shape[2]:
        raise ValueError(f"q: expected one token [B, 1, H, K] with k's {k.shape[2]} heads, got {list(q.shape)}")
    if choose_backend(backend, q) == "triton":
        from .kernel_triton import decode as kernel

        contiguous = (x.detach().contiguous() for x in (q, k, v, s, g, *initial_state))
        return kernel(*contiguous, q.shape[-1] ** -0.5, in_place)
    with torch.no_grad():
        o, final_state = reference.forward(q, k, v, s, g, None, initial_state)
    if in_place:
        for state, new in zip(initial_state, final_state, strict=True):
            state.data.copy_(new)
        final_state = tuple(initial_state)
    return o, final_state


class Calls(NamedTuple):
    """The result of `repeated`: o [calls, B, H, V], the caller's hk before each call as states [calls, B, H, K, M], and
    touched, by the input's name: how the first call changed it."""

    o: Tensor
    states: Tensor
    touched: dict[str, Touched]


def repeated(inputs: Mapping, calls: int = 3, *, in_place: bool = True, backend: str | None = None) -> Calls:
    """Call `decode` `calls` times on the same tensors. All calls share one copy of the initial state in `inputs`."""
    x = {**inputs, "initial_state": tuple(state.clone() for state in inputs["initial_state"])}
    returned, states = [], []

    def call(**args):
        states.append(args["initial_state"][0].clone())
        returned.append(decode(**args, in_place=in_place, backend=backend))
        return returned[-1]

    first = touched(call, x)
    for _ in range(1, calls):
        call(**x)
    return Calls(torch.stack([o[:, 0] for o, _ in returned]), torch.stack(states), {each.name: each for each in first})


def law(inputs: Mapping, calls: int = 3, *, in_place: bool = True) -> Tensor:
    """Predict o of each call, [calls, B, H, V]. in_place: o of the n-th equal token in call n; else of the first."""
    tokens = calls if in_place else 1
    x = {name: inputs[name].expand(-1, tokens, -1, -1) for name in ("q", "k", "v", "s", "g")}
    o, _ = reference.forward(**x, initial_state=inputs["initial_state"])
    return o.transpose(0, 1).expand(calls, -1, -1, -1)


def _rows(measured: Calls, predicted: Tensor, in_place: bool, label: str) -> list[Row]:
    state, nan, calls = measured.touched["initial_state[0]"], float("nan"), len(measured.o)
    error, law_error = (_difference(o)[-1].item() for o in (measured.o, predicted))
    return [
        Row(f"GSA, one token, {label}: share of the initial state changed", nan, float(in_place), state.share),
        Row(f"GSA, one token, {label}: in-place operations PyTorch counted", nan, 0, state.version),
        Row(f"GSA, one token, {label}: equal call {calls}, o off by", nan, law_error, error),
    ]


def _difference(o: Tensor) -> Tensor:
    """Return the relative L2 difference of each call's o from the first call's, [calls]."""
    return (o - o[0]).flatten(1).norm(dim=1) / o[0].norm()


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: rows; for one batch element and head, the caller's state and the result by call."""

    in_place: bool
    states: Tensor
    """Contents of the caller's initial state before each call, [calls, K, M]."""
    o: Tensor
    """Each call's result, [calls, V]."""
    off: Tensor
    """The relative L2 difference of each call's result from the first call's, over all heads, [calls]."""
    law: Tensor
    """The prediction of `off`."""
    counted: int
    """In-place operations that PyTorch counted on the initial state (`_version`)."""


def show(
    *,
    in_place: bool = True,
    calls: Annotated[int, Range(1, 16)] = 3,
    K: Annotated[int, Range(1, 64)] = 16,
    V: Annotated[int, Range(1, 64)] = 16,
    M: Annotated[int, Range(1, 64)] = 8,
    seed: int = 0,
) -> Shown:
    """Call GSA's decoding of one token `calls` times with equal arguments. Return rows on what the calls change and how
    far the last is off, beside the prediction of `law`, and the picture's arrays. in_place: the fault."""
    device, backend = kernel_place()
    x = inputs(K=K, V=V, M=M, device=device, seed=seed)
    measured, predicted = repeated(x, calls, in_place=in_place, backend=backend), law(x, calls, in_place=in_place)
    rows = _rows(measured, predicted, in_place, f"in_place {in_place}")
    parts = (measured.states[:, 0, 0], measured.o[:, 0, 0], _difference(measured.o), _difference(predicted))
    return Shown(rows, in_place, *(part.cpu() for part in parts), measured.touched["initial_state[0]"].version)


def reproduce() -> list[Row]:
    """Return predicted and measured rows on decoding, faulty and right, and on `overwrite`: what a call changes, what
    PyTorch counts of it, and for decoding how far the third call is off."""
    (device, backend), nan = kernel_place(), float("nan")
    x, rows = inputs(device=device), []
    for label, in_place in (("as it was", True), ("right", False)):
        measured = repeated(x, in_place=in_place, backend=backend)
        rows += _rows(measured, law(x, in_place=in_place), in_place, label)
    T = 100
    w = make_inputs("rwkv6", T=T, H=1, K=16, decay="logsigmoid", device=device)["w"]
    (change,) = touched(lambda w: overwrite(w, backend=backend), {"w": w})
    return [
        *rows,
        Row(f"constructed, T = {T}: share of w changed", nan, overwritten(T), change.share),
        Row(f"constructed, T = {T}: in-place operations PyTorch counted", nan, 0, change.version),
    ]
