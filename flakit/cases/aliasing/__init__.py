"""A result that lives in an input's memory: the call is right, and everything after it is wrong.

As told (flash-linear-attention issue #36): two forms disagreed because they shared the tensor w, and `w.clone()` cured
it. As measured, that report has another cause (see `chunk_vs_recurrent`), and no published version overwrote w. So
`overwrite` is a constructed example of what the story describes: w becomes its running sum within each chunk.

The real one is in the decoding of GSA (pull request #1191): for a single token without gradients the final state was
given the memory of the caller's initial state. Whoever continues one prompt twice, to sample two answers or to search,
finds the second answer written after the first. Longer inputs took another way, so no test of states saw it.

A kernel writes to an address and PyTorch is not told: `_version` stands still, autograd raises no error. Comparing with
a clone finds it (`flakit.numerics.mutation`). With the fault, the n-th call with the same arguments returns what the
recurrence returns after n equal tokens: that is the `law`.
"""

import functools
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
from ..laws import Row, kernel_place

CHUNK = 64


def overwrite(w: Tensor, chunk: int = CHUNK, *, backend: str | None = None) -> None:
    """The constructed fault: w [B, T, H, K], contiguous, becomes its running sum within each chunk; no one is told.

    backend: "triton" does it with a kernel, on a GPU or interpreted; "torch" behind autograd's back as well.
    """
    if choose_backend(backend, w) == "triton":
        from .kernel_triton import overwrite as in_place

        in_place(w.detach(), chunk)
    else:
        w.data.copy_(join_chunks(split_chunks(w.detach(), chunk, torch.float32).cumsum(-2), w.shape[1]))


def overwritten(T: int, chunk: int = CHUNK) -> float:
    """The law of `overwrite`: the share of w that is another number afterwards; each chunk's first token stays."""
    return (T - -(-T // chunk)) / T


def inputs(*, B: int = 1, H: int = 2, K: int = 16, V: int = 16, M: int = 8, device: str = "cpu", seed: int = 0) -> dict:
    """One token of GSA and the state it continues from, a pair (hk [B, H, K, M], hv [B, H, M, V])."""
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
    """One token of GSA without gradients, float32, no grouped queries: o [B, 1, H, V] and the final state, a pair.

    in_place: the fault, the final state in the memory of `initial_state`; without it, in memory of its own.
    backend: "triton" is the kernel, on a GPU or interpreted; "torch" its twin.
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
    """What the same call returned again and again, and what the first one did to its inputs."""

    o: Tensor  # [calls, B, H, V]
    states: Tensor  # what the memory of hk holds before each call, [calls, B, H, K, M]
    touched: dict[str, Touched]


def repeated(inputs: Mapping, calls: int = 3, *, in_place: bool = True, backend: str | None = None) -> Calls:
    """Call `decode` with the same arguments, a state of their own to begin with."""
    x = {**inputs, "initial_state": tuple(state.clone() for state in inputs["initial_state"])}
    returned, states = [], []

    def call(**given):
        states.append(given["initial_state"][0].clone())
        returned.append(decode(**given, in_place=in_place, backend=backend))
        return returned[-1]

    first = touched(call, x)
    for _ in range(1, calls):
        call(**x)
    return Calls(torch.stack([o[:, 0] for o, _ in returned]), torch.stack(states), {each.name: each for each in first})


def law(inputs: Mapping, calls: int = 3, *, in_place: bool = True) -> Tensor:
    """What each of the calls returns, o [calls, B, H, V]: with the fault, that of a sequence of equal tokens."""
    tokens = calls if in_place else 1
    x = {name: inputs[name].expand(-1, tokens, -1, -1) for name in ("q", "k", "v", "s", "g")}
    o, _ = reference.forward(**x, initial_state=inputs["initial_state"])
    return o.transpose(0, 1).expand(calls, -1, -1, -1)


def at(
    *,
    in_place: bool = True,
    calls: Annotated[int, Range(1, 16)] = 3,
    K: Annotated[int, Range(1, 64)] = 16,
    V: Annotated[int, Range(1, 64)] = 16,
    M: Annotated[int, Range(1, 64)] = 8,
    seed: int = 0,
) -> list[Row]:
    """GSA's decoding of one token, called several times with the same arguments."""
    x, found = _called(in_place, calls, K, V, M, seed)
    return _rows(found, law(x, calls, in_place=in_place), in_place, f"in_place {in_place}")


@functools.lru_cache(maxsize=1)
def _called(in_place: bool, calls: int, K: int, V: int, M: int, seed: int) -> tuple[Mapping, Calls]:
    """The inputs, and what the calls do with them."""
    device, backend = kernel_place()
    x = inputs(K=K, V=V, M=M, device=device, seed=seed)
    return x, repeated(x, calls, in_place=in_place, backend=backend)


def _rows(found: Calls, predicted: Tensor, in_place: bool, words: str) -> list[Row]:
    state, nan, calls = found.touched["initial_state[0]"], float("nan"), len(found.o)
    off, law_off = (_off(o)[-1].item() for o in (found.o, predicted))
    return [
        Row(f"GSA, one token, {words}: share of the initial state changed", nan, float(in_place), state.share),
        Row(f"GSA, one token, {words}: in-place operations PyTorch counted", nan, 0, state.version),
        Row(f"GSA, one token, {words}: equal call {calls}, o off by", nan, law_off, off),
    ]


def _off(o: Tensor) -> Tensor:
    """By how much each call's o differs from the first one's, relative L2, [calls]."""
    return (o - o[0]).flatten(1).norm(dim=1) / o[0].norm()


@dataclass(frozen=True)
class Shown:
    """Of one head, call by call."""

    in_place: bool
    states: Tensor
    """What the memory of the caller's initial state holds before each call, [calls, K, M]."""
    o: Tensor
    """What each call returns, [calls, V]."""
    off: Tensor
    """By how much it differs from the first, over all heads, [calls]."""
    law: Tensor
    """The same as the law has it."""
    counted: int
    """In-place operations that PyTorch counted on that memory."""


def show(*, in_place: bool, calls: int, K: int, V: int, M: int, seed: int) -> Shown:
    """What `at` measures, of its first head."""
    x, found = _called(in_place, calls, K, V, M, seed)
    predicted = law(x, calls, in_place=in_place)
    counted = found.touched["initial_state[0]"].version
    parts = (found.states[:, 0, 0], found.o[:, 0, 0], _off(found.o), _off(predicted))
    return Shown(in_place, *(part.cpu() for part in parts), counted)


def reproduce(backend: str | None = None) -> list[Row]:
    """Before and after: what a faulty and a right call change, what PyTorch counts, and what the next call returns.

    backend: default the kernel where this process can run it, else its twin.
    """
    device, able = kernel_place()
    backend, nan = backend or able, float("nan")
    x = inputs(device=device)
    rows = []
    for words, in_place in (("as it was", True), ("right", False)):
        found = repeated(x, in_place=in_place, backend=backend)
        rows += _rows(found, law(x, in_place=in_place), in_place, words)
    T = 100
    w = make_inputs("rwkv6", T=T, H=1, K=16, decay="logsigmoid", device=device)["w"]
    (seen,) = touched(lambda w: overwrite(w, backend=backend), {"w": w})
    return [
        *rows,
        Row(f"constructed, T = {T}: share of w changed", nan, overwritten(T), seen.share),
        Row(f"constructed, T = {T}: in-place operations PyTorch counted", nan, 0, seen.version),
    ]
