"""RWKV7 as a recurrence: the code to read first, and the reference for all other implementations.

The generalised delta rule of "RWKV-7 'Goose' with Expressive Dynamic State Evolution" (Peng et al., 2025,
arXiv:2503.14456), with a scale on the read and the decay as a natural logarithm w <= 0:

    S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
    o_t = scale * r_t^T S_t

The state is a memory of values v under keys k, and a token edits it: a_t reads the memory *before* it decays
(`removed`), b_t removes that value or adds it under another key (`edit`), and then the token's own value is written.
In the model a = -κ̂ and b = κ̂ * sigmoid(·), κ̂ of length one a head: a fraction of the value under κ̂ is erased.
The output at t reads the state *after* token t is written.

Symbols: B batch, T time, H heads, K rows of the state (keys), V columns (values). r, w, k, a, b are [B, T, H, K], v is
[B, T, H, V], a state is [B, H, K, V]. D_t is the gradient of the loss with respect to S_t.

For products with a matrix, a row of keys becomes a column, x[..., None]; a row of values stays a row, x[..., None, :].

Nothing is checked here: with w > 0, or a and b that do not shrink it, the state grows, as some lessons require.
Arithmetic is float64 for float64 inputs and float32 for all others.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class ForwardStep(NamedTuple):
    """One time step of the forward pass; rows are [B, H, K] or [B, H, V], matrices [B, H, K, V]."""

    t: int
    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    decay: Tensor  # e^{w_t}, the factor on each row
    removed: Tensor  # a_t^T S_{t-1}, the read of a_t
    edit: Tensor  # b_t removed^T, the resulting change
    kv: Tensor  # k_t v_t^T, the write
    state_before: Tensor  # S_{t-1}
    o: Tensor
    state: Tensor  # S_t


class BackwardStep(NamedTuple):
    """One time step of the backward pass, from the last t to the first; shapes as in `ForwardStep`."""

    t: int
    do: Tensor
    dstate: Tensor  # D_t, from the read at t and all tokens after t
    dstate_before: Tensor  # the gradient that reaches S_{t-1}: diag(e^{w_t}) D_t + a_t (b_t^T D_t)
    dr: Tensor
    dw: Tensor
    dk: Tensor
    dv: Tensor
    da: Tensor
    db: Tensor


def steps(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    do: Tensor | None = None,
    dfinal_state: Tensor | None = None,
) -> Iterator[ForwardStep | BackwardStep]:
    """Yield every intermediate of the forward pass and, when `do` [B, T, H, V] is given, of the backward pass.

    First T `ForwardStep`s with t = 0 … T-1, then T `BackwardStep`s with t = T-1 … 0.
    scale defaults to 1; initial_state and dfinal_state are [B, H, K, V] and default to zero.

    >>> for step in steps(r, w, k, v, a, b, do=torch.ones_like(v)):
    ...     print(step.t, type(step).__name__)
    """
    dtype = torch.promote_types(r.dtype, torch.float32)
    r, w, k, v, a, b = (x.to(dtype) for x in (r, w, k, v, a, b))
    scale = 1.0 if scale is None else scale
    B, T, H, K = r.shape
    S = torch.zeros(B, H, K, v.shape[-1], dtype=dtype, device=r.device)
    S = S if initial_state is None else S + initial_state

    forward = []
    for t in range(T):
        decay = w[:, t].exp()
        removed = (a[:, t, :, :, None] * S).sum(-2)
        edit = b[:, t, :, :, None] * removed[..., None, :]
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        before, S = S, decay[..., None] * S + edit + kv
        o = scale * (r[:, t, :, :, None] * S).sum(-2)
        rows = (x[:, t] for x in (r, w, k, v, a, b))
        step = ForwardStep(t, *rows, decay, removed, edit, kv, before, o, S)
        if do is not None:
            forward.append(step)
        yield step

    if do is None:
        return
    do = do.to(dtype)
    D = torch.zeros_like(S) if dfinal_state is None else dfinal_state.to(dtype)
    for f in reversed(forward):
        do_t = do[:, f.t]
        dr = scale * (f.state * do_t[..., None, :]).sum(-1)
        D = D + scale * f.r[..., None] * do_t[..., None, :]
        dremoved = (D * f.b[..., None]).sum(-2)
        dk = (D * f.v[..., None, :]).sum(-1)
        dv = (D * f.k[..., None]).sum(-2)
        da = (f.state_before * dremoved[..., None, :]).sum(-1)
        db = (D * f.removed[..., None, :]).sum(-1)
        dw = f.decay * (f.state_before * D).sum(-1)
        at_t, D = D, f.decay[..., None] * D + f.a[..., None] * dremoved[..., None, :]
        yield BackwardStep(f.t, do_t, at_t, D, dr, dw, dk, dv, da, db)


def forward(r, w, k, v, a, b, scale=None, initial_state=None) -> tuple[Tensor, Tensor]:
    """Run the recurrence on r, w, k, a, b [B, T, H, K] and v [B, T, H, V], w <= 0 a natural-log decay; return o [B, T,
    H, V] and S_T [B, H, K, V], in float32 or float64."""
    o = []
    for step in steps(r, w, k, v, a, b, scale, initial_state):
        o.append(step.o)
    return torch.stack(o, 1), step.state


def backward(r, w, k, v, a, b, scale, initial_state, do, dfinal_state) -> tuple[Tensor, ...]:
    """Run the hand-written backward pass: dr, dw, dk, dv, da, db [B, T, H, *] and dinitial_state [B, H, K, V].

    dw_t = sum_v e^{w_t} S_{t-1} * D_t uses the states themselves: every term carries its decay, nothing is subtracted.

    T is cut into segments of about sqrt(T) tokens, as in `rwkv6.reference.backward`, to hold fewer states in memory.
    """
    length = math.isqrt(r.shape[1])
    entering = [x.state_before for x in steps(r, w, k, v, a, b, scale, initial_state) if x.t % length == 0]
    grads, D = [], dfinal_state
    for n, S in reversed(list(enumerate(entering))):
        part = slice(n * length, (n + 1) * length)
        for x in steps(*(row[:, part] for row in (r, w, k, v, a, b)), scale, S, do[:, part], D):
            if isinstance(x, BackwardStep):
                grads.append((x.dr, x.dw, x.dk, x.dv, x.da, x.db))
                D = x.dstate_before
    return (*(torch.stack(rows[::-1], 1) for rows in zip(*grads, strict=True)), D)
