"""A second way to every operator's float64 truth, which shares no line with the first.

Each recurrence is written down from its formula alone, one token at a time, and PyTorch differentiates it. Nothing here
looks at `reference.py`, `chunk_torch.py` or `flakit.numerics`: the default scales, the names of the results and what a
packed sequence is are said once more. Autograd keeps some matrices a token; where that were gigabytes, stretches of
tokens are computed again on the way back.
"""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MOST_KEPT = 2**24  # elements of the state, over all tokens, that autograd may keep at once: about half a gigabyte

Rows = Mapping[str, Tensor]
State = tuple[Tensor, ...]


def rwkv6(x: Rows, state: State) -> tuple[Tensor, State]:
    """o = r^T (S + diag(u) k v^T), then S <- diag(e^w) S + k v^T."""
    (S,) = state
    kv = x["k"] * x["v"]
    return x["r"] @ (S + x["u"] * kv), (x["e^w"] * S + kv,)


def rwkv7(x: Rows, state: State) -> tuple[Tensor, State]:
    """S <- diag(e^w) S + b (a^T S) + k v^T, then o = r^T S."""
    (S,) = state
    S = x["e^w"] * S + x["b"] * (x["a"] @ S) + x["k"] * x["v"]
    return x["r"] @ S, (S,)


def gsa(x: Rows, state: State) -> tuple[Tensor, State]:
    """hk <- hk diag(e^g) + k s^T, hv <- diag(e^g) hv + s v^T, then o = softmax(q^T hk)^T hv."""
    hk, hv = state
    hk = hk * x["e^g"] + x["k"] * x["s"]
    hv = hv * x["e^g"].mT + x["s"].mT * x["v"]
    HQ, H = x["q"].shape[1], x["k"].shape[1]
    owner = [head // (HQ // H) for head in range(HQ)]
    p = torch.softmax(x["q"] @ (hk[:, owner] if HQ > H else hk), -1)
    return p @ (hv[:, owner] if HQ > H else hv), (hk, hv)


RECURRENCE = {"rwkv6": rwkv6, "rwkv7": rwkv7, "gsa": gsa}
COLUMNS = {"rwkv6": ("k", "u", "e^w"), "rwkv7": ("k", "b", "e^w"), "gsa": ("k",)}
"""Vectors that stand upright in these formulas; the others lie."""
TENSORS = {
    "rwkv6": ("r", "k", "v", "w", "u"),
    "rwkv7": ("r", "w", "k", "v", "a", "b"),
    "gsa": ("q", "k", "v", "s", "g"),
}
STATES = {"rwkv6": ("state",), "rwkv7": ("state",), "gsa": ("hk", "hv")}


def oracle(op: str, inputs: Mapping[str, object], arriving: tuple) -> dict[str, Tensor]:
    """What `flakit.numerics.evaluate.truth` should give, under the same names.

    inputs: an operator's arguments, in any float dtypes; arriving: the gradients at o and (or None) at the final state.
    """
    given = {name: inputs[name] for name in TENSORS[op]}
    given |= {f"initial_{name}": x for name, x in zip(STATES[op], _parts(inputs.get("initial_state")), strict=False)}
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    found = outputs(op, leaves, inputs.get("scale"), inputs.get("cu_seqlens"))
    do, dstate = arriving
    arrives = [x.double() for x in (do, *_parts(dstate))]
    reached = list(found.values())[: len(arrives)]
    grads = torch.autograd.grad(reached, list(leaves.values()), arrives, materialize_grads=True)
    return {name: x.detach() for name, x in found.items()} | dict(zip((f"d{x}" for x in leaves), grads, strict=True))


def outputs(op: str, leaves: Rows, scale: float | None, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """o and the final state's parts, of the operator's float64 tensors and (or not) the initial state's parts."""
    k, v = leaves["k"], leaves["v"]
    (B, T, H, K), V = k.shape, v.shape[-1]
    scale = scale if scale is not None else 1.0 if op == "rwkv7" else 1 / K**0.5
    packed = cu_seqlens is not None
    runs = list(pairwise(int(x) for x in cu_seqlens)) if packed else [(0, T)]
    M = leaves["s"].shape[-1] if op == "gsa" else 0
    shapes = {"state": (K, V), "hk": (K, M), "hv": (M, V)}
    zeros = {x: k.new_zeros(len(runs) if packed else B, H, *shapes[x]) for x in STATES[op]}
    states = [leaves.get(f"initial_{x}", zeros[x]).split(1 if packed else B) for x in STATES[op]]

    first, decay = TENSORS[op][0], "g" if op == "gsa" else "w"
    rows = {name: x for name, x in leaves.items() if name != decay and not name.startswith("initial")}
    rows |= {f"e^{decay}": leaves[decay].exp(), first: scale * leaves[first]}
    rows = {name: x[..., None] if name in COLUMNS[op] else x[..., None, :] for name, x in rows.items()}
    whole = {"u": rows.pop("u")} if op == "rwkv6" else {}
    tokens = {name: x.unbind(1) for name, x in rows.items()}

    def stretch(times, *state):
        o = []
        for t in times:
            row, state = RECURRENCE[op]({name: x[t] for name, x in tokens.items()} | whole, state)
            o.append(row)
        return o, state

    at_once = max(1, MOST_KEPT * len(runs) // sum(x.numel() for x in zeros.values()))
    again = partial(checkpoint, use_reentrant=False)
    o, ended = [], []
    for (start, end), *state in zip(runs, *states, strict=True):
        for first in range(start, end, at_once):
            times = range(first, min(first + at_once, end))
            read, state = again(stretch, times, *state) if at_once < T else stretch(times, *state)
            o += read
        ended.append(state)
    finals = {f"final_{x}": torch.cat(parts) for x, parts in zip(STATES[op], zip(*ended, strict=True), strict=True)}
    read = torch.stack(o, 1)[..., 0, :]
    padding = torch.zeros_like(read[:, :1]).expand(-1, T - read.shape[1], -1, -1)
    return {"o": torch.cat((read, padding), 1), **finals}


def _parts(state: Tensor | tuple | None) -> tuple:
    return () if state is None else (state,) if isinstance(state, Tensor) else state
