"""GSA as a recurrence: the code to read first, and the reference for all other implementations.

The recurrence of "Gated Slot Attention for Efficient Linear-Time Sequence Modeling" (Zhang et al., 2024,
arXiv:2409.07146, section 3), with the gate as a natural logarithm g <= 0 and the write strength s as a separate input
(the paper uses 1 - e^g). A memory of M slots holds a key and a value each; token t writes into slot m with strength
s_t[m], after the slot has decayed by e^{g_t[m]}:

    hk_t = hk_{t-1} diag(e^{g_t}) + k_t s_t^T          the slots' keys, [K, M]
    hv_t = diag(e^{g_t}) hv_{t-1} + s_t v_t^T          the slots' values, [M, V]
    p_t  = softmax over m of (scale * q_t^T hk_t)      the query's weights of the slots
    o_t  = p_t^T hv_t

Two passes of linear attention joined by a softmax; both read *after* token t is written, and the scale is on the first
pass only.

Symbols: B batch, T time, H heads, K key channels, V value channels, M slots. q is [B, T, HQ, K] with HQ a multiple of
H: query head h reads the memory of head h // (HQ / H). k is [B, T, H, K], v [B, T, H, V], s and g are [B, T, H, M].
Dk_t and Dv_t are the gradients of the loss with respect to hk_t and hv_t, the read at t included.

A group of queries forms the rows of a matrix, [..., HQ / H, K], which reads its head's memory in one product.

Nothing is checked here: a positive g makes the memory grow, as some lessons require.
Arithmetic is float64 for float64 inputs and float32 for all others.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

States = tuple[Tensor, Tensor]
"""The memory (hk [B, H, K, M], hv [B, H, M, V]), or its gradient."""


class ForwardStep(NamedTuple):
    """One time step of the forward pass; rows are [B, H, *], those of queries [B, HQ, *]."""

    t: int
    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    g: Tensor
    decay: Tensor  # e^{g_t}, the factor on each slot
    ks: Tensor  # k_t s_t^T, the write into the keys, [B, H, K, M]
    hk_before: Tensor  # hk_{t-1}
    hk: Tensor
    scores: Tensor  # scale * q_t^T hk_t, [B, HQ, M]
    p: Tensor  # their softmax
    sv: Tensor  # s_t v_t^T, the write into the values, [B, H, M, V]
    hv_before: Tensor  # hv_{t-1}
    hv: Tensor
    o: Tensor


class BackwardStep(NamedTuple):
    """One time step of the backward pass, from the last t to the first; shapes as in `ForwardStep`."""

    t: int
    do: Tensor
    dhv: Tensor  # Dv_t, the gradient from tokens after t plus p_t do_t^T
    dhv_before: Tensor  # diag(e^{g_t}) Dv_t, passed on to t-1
    dp: Tensor
    dscores: Tensor  # p (dp - <p, dp>)
    dhk: Tensor  # Dk_t, the gradient from tokens after t plus scale q_t dscores_t^T
    dhk_before: Tensor  # Dk_t diag(e^{g_t})
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds: Tensor
    dg: Tensor


def steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: States | None = None,
    do: Tensor | None = None,
    dfinal_state: States | None = None,
) -> Iterator[ForwardStep | BackwardStep]:
    """Yield every intermediate of the forward pass and, when `do` [B, T, HQ, V] is given, of the backward pass.

    First T `ForwardStep`s with t = 0 … T-1, then T `BackwardStep`s with t = T-1 … 0.
    scale defaults to K^-0.5; initial_state and dfinal_state are pairs (hk, hv) and default to zero.

    >>> for step in steps(q, k, v, s, g, do=torch.ones_like(v)):
    ...     print(step.t, type(step).__name__)
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, s, g = (x.to(dtype) for x in (q, k, v, s, g))
    B, T, H, K = k.shape
    M, V = s.shape[-1], v.shape[-1]
    scale = K**-0.5 if scale is None else scale
    hk, hv = k.new_zeros(B, H, K, M), k.new_zeros(B, H, M, V)
    if initial_state is not None:
        hk, hv = hk + initial_state[0], hv + initial_state[1]

    def grouped(x: Tensor) -> Tensor:
        """Return rows of all queries [B, HQ, *] as a group for each head, [B, H, HQ / H, *]."""
        return x.unflatten(1, (H, -1))

    forward = []
    for t in range(T):
        decay = g[:, t].exp()
        ks = k[:, t, :, :, None] * s[:, t, :, None, :]
        sv = s[:, t, :, :, None] * v[:, t, :, None, :]
        hk_before, hk = hk, hk * decay[..., None, :] + ks
        hv_before, hv = hv, decay[..., None] * hv + sv
        scores = scale * (grouped(q[:, t]) @ hk).flatten(1, 2)
        p = scores.softmax(-1)
        o = (grouped(p) @ hv).flatten(1, 2)
        rows = (x[:, t] for x in (q, k, v, s, g))
        step = ForwardStep(t, *rows, decay, ks, hk_before, hk, scores, p, sv, hv_before, hv, o)
        if do is not None:
            forward.append(step)
        yield step

    if do is None:
        return
    do = do.to(dtype)
    dhk, dhv = (torch.zeros_like(x) for x in (hk, hv)) if dfinal_state is None else (x.to(dtype) for x in dfinal_state)
    for f in reversed(forward):
        do_t = do[:, f.t]
        dhv = dhv + grouped(f.p).mT @ grouped(do_t)
        dp = (grouped(do_t) @ f.hv.mT).flatten(1, 2)
        dscores = f.p * (dp - (f.p * dp).sum(-1, keepdim=True))
        dhk = dhk + scale * grouped(f.q).mT @ grouped(dscores)
        dq = scale * (grouped(dscores) @ f.hk.mT).flatten(1, 2)
        dk = (dhk * f.s[..., None, :]).sum(-1)
        dv = (dhv * f.s[..., None]).sum(-2)
        ds = (dhk * f.k[..., None]).sum(-2) + (dhv * f.v[..., None, :]).sum(-1)
        dg = f.decay * ((f.hk_before * dhk).sum(-2) + (f.hv_before * dhv).sum(-1))
        dhk_before, dhv_before = dhk * f.decay[..., None, :], f.decay[..., None] * dhv
        yield BackwardStep(f.t, do_t, dhv, dhv_before, dp, dscores, dhk, dhk_before, dq, dk, dv, ds, dg)
        dhk, dhv = dhk_before, dhv_before


def forward(q, k, v, s, g, scale=None, initial_state=None) -> tuple[Tensor, States]:
    """Run the recurrence on q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V] and s, g [B, T, H, M], g <= 0 a natural-log
    decay; return o [B, T, HQ, V] and (hk_T, hv_T), in float32 or float64."""
    o = []
    for step in steps(q, k, v, s, g, scale, initial_state):
        o.append(step.o)
    return torch.stack(o, 1), (step.hk, step.hv)


def backward(q, k, v, s, g, scale, initial_state, do, dfinal_state) -> tuple:
    """Run the hand-written backward pass: dq [B, T, HQ, K], dk, dv, ds, dg [B, T, H, *] and (dhk_0, dhv_0).

    dg_t = e^{g_t} (sum_k hk_{t-1} Dk_t + sum_v hv_{t-1} Dv_t): every term carries its decay, nothing is subtracted.

    T is cut into segments of about sqrt(T) tokens, as in `rwkv6.reference.backward`, to hold fewer states in memory.
    """
    length = math.isqrt(q.shape[1])
    entering = [(x.hk_before, x.hv_before) for x in steps(q, k, v, s, g, scale, initial_state) if x.t % length == 0]
    grads, dstates = [], dfinal_state
    for n, states in reversed(list(enumerate(entering))):
        part = slice(n * length, (n + 1) * length)
        for x in steps(*(row[:, part] for row in (q, k, v, s, g)), scale, states, do[:, part], dstates):
            if isinstance(x, BackwardStep):
                grads.append((x.dq, x.dk, x.dv, x.ds, x.dg))
                dstates = x.dhk_before, x.dhv_before
    return (*(torch.stack(rows[::-1], 1) for rows in zip(*grads, strict=True)), dstates)
