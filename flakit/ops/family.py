"""The family: references of further linear-attention operators, each the recurrence of its formula, token by token.

An audit compares a user's kernel with them; flakit has no kernels for them. Names, order and layouts of the arguments
are flash-linear-attention's, and so is the default of the scale, K^-0.5:

    q, k [B, T, H, K]    v [B, T, H, V]    states [N, H, K, V]    cu_seqlens [N + 1], of N packed sequences, B = 1

A decay is a natural logarithm <= 0. In the gated delta rule and KDA v, the decay, beta and the states have HV heads, a
multiple of H: each head of q and k serves HV / H adjacent ones.

All have one form, in which q reads the state after its own token is written:

    S_t = keep_t S_{t-1} + what is written        o_t = scale S_t^T q_t

Each returns o in v's dtype and the final state, None unless requested. Arithmetic is float64 for float64 inputs and
float32 for all others; gradients come from automatic differentiation. Arguments are not checked.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from .common.packed import one_by_one


def reference(recurrence: Callable) -> Callable:
    """Decorate a recurrence, so that it takes any float dtype and packed sequences (`cu_seqlens`)."""
    signature = inspect.signature(recurrence)

    @functools.wraps(recurrence)
    def call(*args, cu_seqlens: Tensor | None = None, **named):
        arguments = signature.bind(*args, **named).arguments
        dtype = arguments["v"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        state, wants_final = arguments.pop("initial_state", None), arguments.pop("output_final_state", False)
        state = None if state is None else state.to(wide)
        rows = {name: x.to(wide) for name, x in arguments.items() if isinstance(x, Tensor)}
        rest = {name: x for name, x in arguments.items() if name not in rows}

        def run(rows, state):
            return recurrence(**rows, **rest, initial_state=state, output_final_state=True)

        def zeros():
            return rows["v"].new_zeros(1, rows["v"].shape[2], rows["k"].shape[-1], rows["v"].shape[-1])

        o, final = run(rows, state) if cu_seqlens is None else one_by_one(run, rows, state, cu_seqlens, zeros)
        return o.to(dtype), final if wants_final else None

    more = inspect.Parameter("cu_seqlens", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])
    return call


@reference
def naive_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False):
    """Linear attention, without normalizer or decay: S_t = S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

    q, k [B, T, H, K], v [B, T, H, V]. Equations (16)-(20), without their denominator, of "Transformers are RNNs"
    (Katharopoulos et al., 2020, arXiv:2006.16236). flash-linear-attention's `chunk_linear_attn` computes this with
    normalize=False.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        S = S + k_t[..., None] * v_t[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_retention(q, k, v, scale=None, initial_state=None, output_final_state=False):
    """Retention: S_t = gamma_h S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, gamma_h = 1 - 2^{-5-h} for head h = 0 … H-1.

    q, k [B, T, H, K], v [B, T, H, V]. "Retentive Network" (Sun et al., 2023, arXiv:2307.08621), without rotations and
    the norm.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    gamma = 1 - 2.0 ** (-5 - torch.arange(k.shape[2], dtype=k.dtype, device=k.device))
    o = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        S = gamma[:, None, None] * S + k_t[..., None] * v_t[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False):
    """Lightning attention: S_t = e^{-s_h} S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, a slope s_h a head and layer.

    q, k [B, T, H, K], v [B, T, H, V]. s_h = 8 h / H (1 - layer_idx / num_layers), h = 0 … H-1: the first head does not
    decay, and later layers decay less. The decays of "Lightning Attention-2" (Qin et al., 2024, arXiv:2401.04658), with
    flash-linear-attention's slopes.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    H = k.shape[2]
    slope = 8 / H * (1 - layer_idx / num_layers) * torch.arange(H, dtype=k.dtype, device=k.device)
    o = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        S = (-slope).exp()[:, None, None] * S + k_t[..., None] * v_t[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_simple_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    """Simple GLA, and Mamba-2's SSD: S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, one decay a head.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H]: natural logs <= 0. "Transformers are SSMs" (Dao and Gu, 2024,
    arXiv:2405.21060): there q is C, k is B, v is Δ x and g is Δ A, and the scale is 1.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t, g_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), strict=True):
        S = g_t.exp()[..., None, None] * S + k_t[..., None] * v_t[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    """Gated linear attention: S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, a decay a row.

    q, k, g [B, T, H, K], v [B, T, H, V]; g: natural logs <= 0. "Gated Linear Attention Transformers with
    Hardware-Efficient Training" (Yang et al., 2023, arXiv:2312.06635). HGRN2 (Qin et al., 2024, arXiv:2404.07904) is
    the same with k_t = 1 - e^{g_t}.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t, g_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), strict=True):
        S = g_t.exp()[..., None] * S + k_t[..., None] * v_t[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
    """The delta rule: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t, without a decay.

    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (Yang et al., 2024, arXiv:2406.06484).
    q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H]; in models q and k have length 1 and beta lies in (0, 1) or (0,
    2).
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t, beta_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):
        read = (k_t[..., None] * S).sum(-2)
        S = S + k_t[..., None] * (beta_t[..., None] * (v_t - read))[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """The gated delta rule: S' = e^{g_t} S_{t-1}, S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, o_t = scale S_t^T q_t.

    Equation (10) of "Gated Delta Networks" (Yang et al., 2025, arXiv:2412.06464): k reads the decayed state. q, k [B,
    T, H, K], v [B, T, HV, V], g (natural logs <= 0) and beta [B, T, HV].
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        S = g_t.exp()[..., None, None] * S
        read = (k_t[..., None] * S).sum(-2)
        S = S + k_t[..., None] * (beta_t[..., None] * (v_t - read))[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """KDA: S' = diag(e^{g_t}) S_{t-1}, S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, o_t = scale S_t^T q_t.

    Kimi delta attention, "Kimi Linear" (Kimi Team, 2025, arXiv:2510.26692): the gated delta rule with a decay a row. q,
    k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] (natural logs <= 0), beta [B, T, HV].
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        S = g_t.exp()[..., None] * S
        read = (k_t[..., None] * S).sum(-2)
        S = S + k_t[..., None] * (beta_t[..., None] * (v_t - read))[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


@reference
def naive_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False):
    """Diagonal plus low rank: S_t = diag(e^{gk_t}) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T, o_t = scale S_t^T q_t.

    a reads the state before it decays, and the read is added under the key b: with a = -κ, b = η κ it is erased. v is
    [B, T, H, V], all others [B, T, H, K]; gk: natural logs <= 0. RWKV7 is the same with scale 1: "RWKV-7 Goose" (Peng
    et al., 2025, arXiv:2503.14456).
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q_t, k_t, v_t, a_t, b_t, g_t in zip(*(x.unbind(1) for x in (q, k, v, a, b, gk)), strict=True):
        read = (a_t[..., None] * S).sum(-2)
        S = g_t.exp()[..., None] * S + b_t[..., None] * read[..., None, :] + k_t[..., None] * v_t[..., None, :]
        o.append(scale * (q_t[..., None] * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None
