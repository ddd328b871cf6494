"""What flash-linear-attention's layers need to run on a CPU: its helper kernels and its recurrences in plain PyTorch.

The recurrences are written from the formulas, apart from flakit's own references, one token after another. They take
the arguments of flash-linear-attention's functions by name, compute in the dtype of their inputs and leave gradients to
autograd, so that a layer in float64 with them in it says what the layer means.
"""

import contextlib
import functools
import sys
from itertools import pairwise

import torch
import torch.nn.functional as F

# --- recurrences --------------------------------------------------------------------------------------------------


def recur(step, tensors, states, cu_seqlens):
    """`step(states, *token) -> o, states` over the tokens of a batch, or of each sequence packed in a batch of one."""
    outputs = []
    if cu_seqlens is None:
        for token in zip(*(x.unbind(1) for x in tensors), strict=True):
            o, states = step(states, *token)
            outputs.append(o)
        return torch.stack(outputs, 1), states
    finals = []
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        o, final = recur(step, [x[:, start:end] for x in tensors], [S[n : n + 1] for S in states], None)
        outputs.append(o)
        finals.append(final)
    return torch.cat(outputs, 1), [torch.cat(x) for x in zip(*finals, strict=True)]


def initial(state, like, cu_seqlens, *shapes):
    """The parts of an initial state in the dtype of the inputs; zeros of these shapes where there is none."""
    if state is None:
        N = like.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        return [like.new_zeros(N, *shape) for shape in shapes]
    return [part.to(like.dtype) for part in (state if isinstance(state, (tuple, list)) else [state])]


def rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    scale = r.shape[-1] ** -0.5 if scale is None else scale

    def step(states, r, k, v, w):
        (S,), new = states, k[..., None] * v[..., None, :]
        o = scale * ((S + u[..., None] * new) * r[..., None]).sum(-2)
        return o, [w.exp()[..., None] * S + new]

    states = initial(initial_state, r, cu_seqlens, (*k.shape[2:], v.shape[3]))
    o, (S,) = recur(step, (r, k, v, w), states, cu_seqlens)
    return o, S if output_final_state else None


def rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None, **_):
    scale = r.shape[-1] ** -0.5 if scale is None else scale

    def step(states, r, w, k, v, a, b):
        (S,) = states
        read = (S * a[..., None]).sum(-2, keepdim=True)
        S = w.exp()[..., None] * S + b[..., None] * read + k[..., None] * v[..., None, :]
        return scale * (S * r[..., None]).sum(-2), [S]

    states = initial(initial_state, r, cu_seqlens, (*k.shape[2:], v.shape[3]))
    o, (S,) = recur(step, (r, w, k, v, a, b), states, cu_seqlens)
    return o, S if output_final_state else None


def mul_rwkv7(r, w, k, v, kk, a, **more):
    return rwkv7(r, w, k, v, -kk, kk * a, **more)


def gsa(q, k, v, s, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def step(states, q, k, v, s, g):
        hk, hv = states
        hk = hk * g.exp()[..., None, :] + k[..., None] * s[..., None, :]
        hv = hv * g.exp()[..., None] + s[..., None] * v[..., None, :]
        p = (scale * (hk * q[..., None]).sum(-2)).softmax(-1)
        return (hv * p[..., None]).sum(-2), [hk, hv]

    states = initial(initial_state, q, cu_seqlens, (*k.shape[2:], s.shape[3]), (*s.shape[2:], v.shape[3]))
    o, states = recur(step, (q, k, v, s, g), states, cu_seqlens)
    return o, states if output_final_state else [None, None]


RECURRENCES = {
    "chunk_rwkv6": rwkv6,
    "fused_recurrent_rwkv6": rwkv6,
    "chunk_rwkv7": rwkv7,
    "fused_recurrent_rwkv7": rwkv7,
    "fused_mul_recurrent_rwkv7": mul_rwkv7,
    "chunk_gsa": gsa,
    "fused_recurrent_gsa": gsa,
}
"""By the name of flash-linear-attention's function."""


@contextlib.contextmanager
def recurrences_in_place():
    """These instead of flash-linear-attention's own operators, where its layers look them up."""
    import fla.ops.gsa
    import fla.ops.rwkv6
    import fla.ops.rwkv7

    modules = fla.ops.rwkv6, fla.ops.rwkv7, fla.ops.gsa
    originals = [getattr(module, name) for module in modules for name in RECURRENCES if hasattr(module, name)]
    with swapped({original: _signed_as(original, RECURRENCES[original.__name__]) for original in originals}):
        yield


def _signed_as(original, recurrence):
    return functools.wraps(original)(lambda *args, **named: recurrence(*args, **named))


@contextlib.contextmanager
def swapped(functions):
    """Each key replaced by its value wherever a fla module holds it, until the block ends."""
    places = [
        (module, attribute, value)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "fla"
        for attribute, value in list(vars(module).items())
        if any(value is old for old in functions)
    ]
    assert places
    by_id = {id(old): new for old, new in functions.items()}
    for module, attribute, value in places:
        setattr(module, attribute, by_id[id(value)])
    try:
        yield
    finally:
        for module, attribute, value in places:
            setattr(module, attribute, value)


# --- helper kernels -----------------------------------------------------------------------------------------------


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None):
    """What stood one token before, minus what stands here."""
    before = initial(cache, x, cu_seqlens, x.shape[-1:])
    delta, (last,) = recur(lambda states, x: (states[0] - x, [x]), [x], before, cu_seqlens)
    return (delta, last) if output_cache else delta


def norm(
    x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=False, num_groups=1
):
    if residual is not None:
        x = x + residual
    y = x.unflatten(-1, (num_groups, -1))
    y = y if is_rms_norm else y - y.mean(-1, keepdim=True)
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y, x) if prenorm else y


rms_norm = functools.partial(norm, is_rms_norm=True)


def rms_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, **_):
    return F.linear(rms_norm(x, norm_weight, norm_bias, residual, eps), linear_weight, linear_bias)


def l2_norm(x, eps=1e-6, output_dtype=None):
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def swiglu_linear(x, y, weight, bias):
    return F.linear(F.silu(x) * y, weight, bias)


def sqrelu(x):
    return F.relu(x).square()


def fused_addcmul_rwkv7(x, delta, *weights):
    return tuple(x + delta * weight for weight in weights)


def fused_k_rwkv7(k, a, ka, **_):
    return k * (1 + (a - 1) * ka)


def gate_output_correction(o, r, k, r_k, v, g):
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g


@contextlib.contextmanager
def helper_kernels_in_torch():
    """flash-linear-attention's norms, token shift, activations and RWKV7's small kernels, all in plain PyTorch."""
    import fla.modules.activations.ops as activations
    import fla.modules.norm.l2norm as l2norm
    import fla.modules.norm.layernorm as layernorm
    import fla.modules.token_shift as shift
    import fla.ops.rwkv7.fused_addcmul as addcmul
    import fla.ops.rwkv7.fused_k_update as k_update
    import fla.ops.rwkv7.gate_output_correction as correction

    functions = {
        shift.token_shift: token_shift,
        layernorm.layer_norm: norm,
        layernorm.group_norm: norm,
        layernorm.rms_norm: rms_norm,
        layernorm.rms_norm_linear: rms_norm_linear,
        l2norm.l2_norm: l2_norm,
        activations.swish: F.silu,
        activations.swiglu_linear: swiglu_linear,
        activations.sqrelu: sqrelu,
        addcmul.fused_addcmul_rwkv7: fused_addcmul_rwkv7,
        k_update.fused_k_rwkv7: fused_k_rwkv7,
        correction.gate_output_correction: gate_output_correction,
    }
    named = dict(activations.ACT2FN)
    activations.ACT2FN.update({name: functions.get(function, function) for name, function in named.items()})
    try:
        with swapped(functions):
            yield
    finally:
        activations.ACT2FN.update(named)
