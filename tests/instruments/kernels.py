"""Kernels to audit: right ones of odd style, wrong ones with one small fault each. RWKV6 unless the name says more."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch

from flakit.numerics.operators import OPERATORS, Operator, operator, state_dtype
from flakit.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6


class Result(NamedTuple):
    o: torch.Tensor
    final_state: torch.Tensor | None


# --- right ---------------------------------------------------------------------------------------------------------


def over_time(*tensors):
    """Their tokens, one after the other: differentiated as a whole, where each x[:, t] makes zeros of x's size."""
    return zip(*(x.unbind(1) for x in tensors), strict=True)


def naive(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, *, dtype=torch.float32):
    """The recurrence, token after token, gradients by automatic differentiation."""
    out = r.dtype
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    S = r.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    o = []
    for r_t, k_t, v_t, kept in over_time(scale * r, k, v, w.exp()):
        kv = k_t[..., None] * v_t[..., None, :]
        o.append((r_t[..., None, :] @ (S + u[..., None] * kv)).squeeze(-2))
        S = kept[..., None] * S + kv
    return torch.stack(o, 1).to(out), S if output_final_state else None


def naive64(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return naive(r, k, v, w, u, scale, initial_state, output_final_state, dtype=torch.float64)


def naive_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False):
    out = r.dtype
    r, w, k, v, a, b = (x.float() for x in (r, w, k, v, a, b))
    S = r.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state.float()
    o = []
    for r_t, kept, k_t, v_t, a_t, b_t in over_time(scale * r, w.exp(), k, v, a, b):
        found = a_t[..., None, :] @ S
        S = kept[..., None] * S + b_t[..., None] * found + k_t[..., None] * v_t[..., None, :]
        o.append((r_t[..., None, :] @ S).squeeze(-2))
    return torch.stack(o, 1).to(out), S if output_final_state else None


def naive_gsa(q, k, v, s, g, scale=None, initial_state=None, output_final_state=False):
    out = q.dtype
    q, k, v, s, g = (x.float() for x in (q, k, v, s, g))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, _, H, K = k.shape
    hk, hv = (k.new_zeros(B, H, K, s.shape[-1]), k.new_zeros(B, H, s.shape[-1], v.shape[-1]))
    if initial_state is not None:
        hk, hv = (x.float() for x in initial_state)
    o = []
    for q_t, k_t, v_t, s_t, kept in over_time(scale * q, k, v, s, g.exp()):
        hk = hk * kept[..., None, :] + k_t[..., None] * s_t[..., None, :]
        hv = hv * kept[..., None] + s_t[..., None] * v_t[..., None, :]
        o.append(((q_t[..., None, :] @ hk).softmax(-1) @ hv).squeeze(-2))
    return torch.stack(o, 1).to(out), (hk, hv) if output_final_state else None


def slow(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """Loops over everything but V."""
    B, T, H, K = r.shape
    scale = K**-0.5 if scale is None else scale
    states, rows = [], []
    for b in range(B):
        for h in range(H):
            S = [
                torch.zeros(v.shape[-1], device=v.device) if initial_state is None else initial_state[b, h, i].float()
                for i in range(K)
            ]
            o = []
            for r_t, k_t, v_t, kept in over_time(*(x[b : b + 1, :, h].float() for x in (r, k, v, w))):
                row = 0
                for i, (r_i, k_i, u_i, kept_i) in enumerate(
                    zip(r_t[0], k_t[0], u[h].float(), kept[0].exp(), strict=True)
                ):
                    kv = k_i * v_t[0]
                    row = row + scale * r_i * (S[i] + u_i * kv)
                    S[i] = kept_i * S[i] + kv
                o.append(row)
            rows.append(torch.stack(o))
            states.append(torch.stack(S))
    o = torch.stack(rows).view(B, H, T, -1).transpose(1, 2).to(r.dtype)
    return o, torch.stack(states).view(B, H, K, -1) if output_final_state else None


def only_o(q, k, v, w, u, scale=None):
    """Other names, o alone, no state goes in or out."""
    return naive(q, k, v, w, u, scale)[0]


@torch.no_grad()
def forward_only(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return naive(r, k, v, w, u, scale, initial_state, output_final_state)


def named(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return Result(*naive(r, k, v, w, u, scale, initial_state, output_final_state))


def in_a_dict(u, w, v, k, r, initial_state=None, scale=None):
    """Another order; a dict; the state always."""
    o, state = naive(r, k, v, w, u, scale, initial_state, True)
    return {"o": o, "final_state": state}


def picky(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """Refuses what many kernels refuse: 16 bits, lengths that are no multiple of 16, K other than V."""
    assert r.dtype == torch.float32 and r.shape[1] % 16 == 0 and r.shape[-1] == v.shape[-1]
    return naive(r, k, v, w, u, scale, initial_state, output_final_state)


RIGHT: dict[str, tuple[str, Callable]] = {
    "naive float32": ("rwkv6", naive),
    "naive float64": ("rwkv6", naive64),
    "naive rwkv7": ("rwkv7", naive_rwkv7),
    "naive gsa": ("gsa", naive_gsa),
    "slow loops": ("rwkv6", slow),
    "only o": ("rwkv6", only_o),
    "forward only": ("rwkv6", forward_only),
    "named tuple": ("rwkv6", named),
    "dict, other order": ("rwkv6", in_a_dict),
    "picky": ("rwkv6", picky),
    "reference rwkv6": ("rwkv6", functools.partial(chunk_rwkv6, backend="reference")),
    "recurrent rwkv6": ("rwkv6", fused_recurrent_rwkv6),
    **{
        f"chunks of {C} {op}": (op, functools.partial(of.forms["chunk"], chunk_size=C))
        for op, of in OPERATORS.items()
        for C in {"rwkv6": (8, 64, 128), "gsa": (16, 128)}.get(op, (16, 64))
    },
}


# --- wrong ---------------------------------------------------------------------------------------------------------


def tampered(op: str, outputs: Callable | None = None, grads: Callable | None = None) -> Callable:
    """The right recurrence of an operator, with `outputs(o, states, given)` and `grads(found, given)` put between.

    given: the tensors by name, "scale", "do" and the states' parts.
    """
    of = operator(op)
    tensors, states = of.tensors, of.states

    class Tampered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scale, *given):
            x = [y.double() for y in given]
            ctx.save_for_backward(*given)
            ctx.scale = scale
            o, final = of.chunked.forward(*x[: len(tensors)], scale, of.state(x[len(tensors) :]), 64)
            found = [o, *of.parts(final)]
            if outputs is not None:
                found = outputs(found, dict(zip((*tensors, *states), x, strict=True)) | {"scale": scale})
            return found[0].to(given[0].dtype), *(y.to(state_dtype(given[0].dtype)) for y in found[1:])

        @staticmethod
        def backward(ctx, do, *dstates):
            x = [y.double() for y in ctx.saved_tensors]
            arriving = [y.double() for y in dstates]
            *found, dinitial = of.chunked.backward(
                *x[: len(tensors)], ctx.scale, of.state(x[len(tensors) :]), do.double(), of.state(arriving), 64
            )
            names = (*tensors, *states)
            made = dict(zip(names, [*found, *of.parts(dinitial)], strict=True))
            if grads is not None:
                given = dict(zip(names, x, strict=True)) | {"scale": ctx.scale, "do": do.double(), "dstates": arriving}
                made = grads(made, given)
            return None, *(
                None if made[name] is None else made[name].to(y.dtype)
                for name, y in zip(names, ctx.saved_tensors, strict=True)
            )

    return with_signature_of(of, lambda scale, given: Tampered.apply(scale, *given))


def with_signature_of(of: Operator, apply: Callable) -> Callable:
    """A function with an operator's arguments, from `apply(scale, tensors and the states' parts)`."""
    options = {"scale": None, "initial_state": None, "output_final_state": False}

    def call(*args, scale=None, initial_state=None, output_final_state=False, **named):
        x = dict(zip(of.tensors, args, strict=False)) | named
        given = [x[name] for name in of.tensors]
        size = of.size(dict(zip(of.tensors, given, strict=True)))
        parts = of.parts(initial_state) or [
            given[0].new_zeros([size[axis] for axis in of.axes[name].split()], dtype=state_dtype(given[0].dtype))
            for name in of.states
        ]
        o, *final = apply(size["K"] ** of.scale_exponent if scale is None else scale, [*given, *parts])
        return o, of.state(final) if output_final_state else None

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind) for name in of.tensors]
        + [inspect.Parameter(name, kind, default=x) for name, x in options.items()]
    )
    return call


def edited(op: str, name: str, change: Callable) -> tuple[str, Callable]:
    """The operator's name, and its recurrence with the gradient of one argument changed, change(gradient, given)."""
    return op, tampered(op, grads=lambda found, given: found | {name: change(found[name], given)})


def _drop_bonus(found, x, token=29):
    o, *states = found
    if o.shape[1] > token:
        r, k, v = (x[name][:, token] for name in "rkv")
        o[:, token] -= x["scale"] * (r * x["u"] * k).sum(-1, keepdim=True) * v
    return [o, *states]


def _last_decay(found, x):
    o, S = found
    kv = x["k"][:, -1, ..., None] * x["v"][:, -1, :, None]
    return [o, (S - kv) / x["w"][:, -1].exp()[..., None] + kv]


def _state_term(dw, x):
    """dw without <S_T, dht>, which reaches every token."""
    (dS,) = x["dstates"]
    left = x["w"].flip(1).cumsum(1).flip(1).exp()
    return dw - left * (x["initial_state"] * dS).sum(-1)[:, None]


def inclusive(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """The decay of the token itself counted in."""
    o, S = naive(r * w.exp(), k, v, w, u * (-w).exp().mean((0, 1)), scale, initial_state, output_final_state)
    return o, S


def bfloat16_state(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return naive(r, k, v, w, u, scale, initial_state, output_final_state, dtype=r.dtype)


def no_time_zero(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """The initial state is not decayed by the first token."""
    w = torch.cat((torch.zeros_like(w[:, :1]), w[:, 1:]), 1) if initial_state is not None else w
    return naive(r, k, v, w, u, scale, initial_state, output_final_state)


def detached_state(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    o, S = naive(r, k, v, w, u, scale, initial_state, output_final_state)
    return o, None if S is None else S.detach()


def no_bonus_gradient(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return naive(r, k, v, w, u.detach(), scale, initial_state, output_final_state)


def ignores_scale(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    return naive(r, k, v, w, u, None, initial_state, output_final_state)


def forgets_scale(r, k, v, w, u):
    return naive(r, k, v, w, u, 1.0)[0]


def long_only(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """The fourth chunk of 64 begins with an empty state."""
    if r.shape[1] <= 192:
        return naive(r, k, v, w, u, scale, initial_state, output_final_state)
    first, second = ([x[:, part] for x in (r, k, v, w)] for part in (slice(0, 192), slice(192, None)))
    a, _ = naive(*first, u, scale, initial_state)
    b, S = naive(*second, u, scale, None, output_final_state)
    return torch.cat((a, b), 1), S


def odd_channel(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """With K no multiple of 8 the last channels are not written."""
    K = r.shape[-1]
    mask = (torch.arange(K) < K // 8 * 8).to(k) if K % 8 else 1.0
    return naive(r, k * mask, v, w, u, scale, initial_state, output_final_state)


WRONG: dict[str, tuple[str, Callable]] = {
    "bonus dropped on one token": ("rwkv6", tampered("rwkv6", _drop_bonus)),
    "last token's decay missing in the state": ("rwkv6", tampered("rwkv6", _last_decay)),
    "dr without scale": edited("rwkv6", "r", lambda d, x: d / x["scale"]),
    "dw without the final state's term": edited("rwkv6", "w", _state_term),
    "du of the first batch alone": edited(
        "rwkv6", "u", lambda d, x: (x["scale"] * x["r"] * x["k"] * (x["v"] * x["do"]).sum(-1, keepdim=True))[0].sum(0)
    ),
    "dk without the bonus": edited(
        "rwkv6", "k", lambda d, x: d - x["scale"] * x["r"] * x["u"] * (x["v"] * x["do"]).sum(-1, keepdim=True)
    ),
    "dinitial off by the first decay": edited("rwkv6", "initial_state", lambda d, x: d * x["w"][:, 0].exp()[..., None]),
    "one element of dv lost": edited(
        "rwkv6", "v", lambda d, x: d.index_fill(-1, torch.tensor([0]), 0) if d.shape[1] > 90 else d
    ),
    "dw clamped": edited("rwkv6", "w", lambda d, x: d.clamp(-3, 3)),
    "dv off by 0.1%": edited("rwkv6", "v", lambda d, x: d * 1.001),
    "no du": edited("rwkv6", "u", lambda d, x: None),
    "inclusive decay": ("rwkv6", inclusive),
    "the first token does not decay": ("rwkv6", no_time_zero),
    "state in bfloat16": ("rwkv6", bfloat16_state),
    "final state detached": ("rwkv6", detached_state),
    "bonus detached": ("rwkv6", no_bonus_gradient),
    "scale ignored": ("rwkv6", ignores_scale),
    "scale forgotten": ("rwkv6", forgets_scale),
    "fourth chunk forgets": ("rwkv6", long_only),
    "last channels lost": ("rwkv6", odd_channel),
    "dw a token late, rwkv7": edited("rwkv7", "w", lambda d, x: d.roll(1, 1)),
    "da without its sign, rwkv7": edited("rwkv7", "a", lambda d, x: -d),
    "dg of one pass, gsa": edited("gsa", "g", lambda d, x: d / 2),
    "dq without scale, gsa": edited("gsa", "q", lambda d, x: d / x["scale"]),
}
