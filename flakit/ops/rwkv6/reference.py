"""RWKV6 as a recurrence: the code to read first, and the reference for all other implementations.

Equations (19)-(20) of "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (Peng et al., 2024,
arXiv:2404.05892), with a scale on the read and the decay as a natural logarithm w <= 0:

    o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T)
    S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T

The output at t reads the state *before* token t is written; the token's own contribution passes through the bonus u.

Symbols: B batch, T time, H heads, K rows of the state (keys), V columns (values). r, k, w are [B, T, H, K], v is
[B, T, H, V], u is [H, K], a state is [B, H, K, V]. D_t is the gradient of the loss with respect to S_t.

For products with a matrix, a row of keys becomes a column, x[..., None]; a row of values stays a row, x[..., None, :].

Nothing is checked here: a positive w makes the state grow, as some lessons require.
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
    k: Tensor
    v: Tensor
    w: Tensor
    decay: Tensor  # e^{w_t}, the factor on each row
    kv: Tensor  # k_t v_t^T, the write
    state_before: Tensor  # S_{t-1}
    read: Tensor  # S_{t-1} + diag(u) k_t v_t^T, which r_t reads
    o: Tensor
    state: Tensor  # S_t


class BackwardStep(NamedTuple):
    """One time step of the backward pass, from the last t to the first; shapes as in `ForwardStep`."""

    t: int
    do: Tensor
    dstate: Tensor  # D_t, from all tokens after t
    dstate_before: Tensor  # D_{t-1} = diag(e^{w_t}) D_t + scale r_t do_t^T
    dr: Tensor
    dk: Tensor
    dv: Tensor
    dw: Tensor
    du: Tensor  # this step's part of du, [B, H, K]


def steps(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    do: Tensor | None = None,
    dfinal_state: Tensor | None = None,
) -> Iterator[ForwardStep | BackwardStep]:
    """Yield every intermediate of the forward pass and, when `do` [B, T, H, V] is given, of the backward pass.

    First T `ForwardStep`s with t = 0 … T-1, then T `BackwardStep`s with t = T-1 … 0.
    scale defaults to K^-0.5; initial_state and dfinal_state are [B, H, K, V] and default to zero.

    >>> for step in steps(r, k, v, w, u, do=torch.ones_like(v)):
    ...     print(step.t, type(step).__name__)
    """
    dtype = torch.promote_types(r.dtype, torch.float32)
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    B, T, H, K = r.shape
    S = torch.zeros(B, H, K, v.shape[-1], dtype=dtype, device=r.device)
    S = S if initial_state is None else S + initial_state

    forward = []
    for t in range(T):
        decay = w[:, t].exp()
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        read = S + u[..., None] * kv
        o = scale * (r[:, t, :, :, None] * read).sum(-2)
        before, S = S, decay[..., None] * S + kv
        step = ForwardStep(t, r[:, t], k[:, t], v[:, t], w[:, t], decay, kv, before, read, o, S)
        if do is not None:
            forward.append(step)
        yield step

    if do is None:
        return
    do = do.to(dtype)
    D = torch.zeros_like(S) if dfinal_state is None else dfinal_state.to(dtype)
    for f in reversed(forward):
        do_t = do[:, f.t]
        v_do = (f.v * do_t).sum(-1, keepdim=True)
        dr = scale * (f.read * do_t[..., None, :]).sum(-1)
        dk = (D * f.v[..., None, :]).sum(-1) + scale * f.r * u * v_do
        dv = (D * f.k[..., None]).sum(-2) + scale * (f.r * u * f.k).sum(-1, keepdim=True) * do_t
        dw = f.decay * (f.state_before * D).sum(-1)
        du = scale * f.r * f.k * v_do
        after, D = D, f.decay[..., None] * D + scale * f.r[..., None] * do_t[..., None, :]
        yield BackwardStep(f.t, do_t, after, D, dr, dk, dv, dw, du)


def forward(r, k, v, w, u, scale=None, initial_state=None) -> tuple[Tensor, Tensor]:
    """Run the recurrence on r, k, w [B, T, H, K], v [B, T, H, V] and u [H, K], w <= 0 a natural-log decay; return o [B,
    T, H, V] and S_T [B, H, K, V], in float32 or float64."""
    o = []
    for step in steps(r, k, v, w, u, scale, initial_state):
        o.append(step.o)
    return torch.stack(o, 1), step.state


def backward(r, k, v, w, u, scale, initial_state, do, dfinal_state) -> tuple[Tensor, ...]:
    """Run the hand-written backward pass: dr, dk, dv, dw [B, T, H, *], du [H, K], dinitial_state [B, H, K, V].

    dw_t = sum_v e^{w_t} S_{t-1} * D_t uses the states themselves: every term carries its decay, nothing is subtracted.

    `steps` holds all intermediates of T steps for its backward pass. Here T is cut into segments of about sqrt(T)
    tokens: memory holds the state entering each segment, and the steps of one segment, recomputed from there. The
    results are the same, for one more forward pass and about 4 sqrt(T) states in memory, besides rows, instead of 4 T.
    """
    length = math.isqrt(r.shape[1])
    entering = [x.state_before for x in steps(r, k, v, w, u, scale, initial_state) if x.t % length == 0]
    grads, D = [], dfinal_state
    for n, S in reversed(list(enumerate(entering))):
        part = slice(n * length, (n + 1) * length)
        for x in steps(r[:, part], k[:, part], v[:, part], w[:, part], u, scale, S, do[:, part], D):
            if isinstance(x, BackwardStep):
                grads.append((x.dr, x.dk, x.dv, x.dw, x.du))
                D = x.dstate_before
    dr, dk, dv, dw, du = (torch.stack(rows[::-1], 1) for rows in zip(*grads, strict=True))
    return dr, dk, dv, dw, du.sum((0, 1)), D
