"""Kernels of the family in plain PyTorch, in chunks: right ones, and ones with a fault that real kernels had.

They are written from the formulas of `flakit.ops.family`, with matrices over a chunk instead of a walk over tokens.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 16


def _chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, N, C, ...], the end filled with zeros."""
    B, T, H, *rest = x.shape
    x = torch.cat((x, x.new_zeros(B, -T % C, H, *rest)), 1)
    return x.view(B, -1, C, H, *rest).transpose(2, 3).transpose(1, 2)


def _unchunked(x: Tensor, T: int) -> Tensor:
    return x.transpose(1, 2).transpose(2, 3).flatten(1, 2)[:, :T]


def between(g: Tensor) -> Tensor:
    """The log decays summed over the tokens behind j up to and with i, [..., C, K] -> [..., i, j, K]; -inf for i < j.

    Every sum is one of decays alone: no difference of running sums, which leaves noise, and NaN of -inf.
    """
    i, j, u = (torch.arange(CHUNK, device=g.device).view(shape) for shape in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    behind = ((j < u) & (u <= i))[..., None]
    sums = torch.where(behind, g[..., None, None, :, :], 0.0).sum(-2)
    return sums.masked_fill((i < j)[..., 0, None], -math.inf)


def exact(g: Tensor) -> Tensor:
    """e^(the decays between), of which none is above 1."""
    return between(g).exp()


def from_the_start(g: Tensor) -> Tensor:
    """As two factors from the chunk's start: e^(G_i) · e^(-G_j), of which the second overflows."""
    total = g.cumsum(-2)
    return total.exp()[..., :, None, :] * (-total).exp()[..., None, :, :]


def by_differences(g: Tensor) -> Tensor:
    """As differences of running sums, e^(G_i - G_j): digits are lost, and -inf minus -inf is NaN."""
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    total = g.cumsum(-2)
    return (total[..., :, None, :] - total[..., None, :, :]).masked_fill(~past[..., None], -math.inf).exp()


def delta_in_chunks(pairs_of, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """Gated delta rule and KDA in chunks of 16; pairs_of: decays [..., C, K] -> those between tokens [..., C, C, K]."""
    T, dtype = v.shape[1], v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    q, k, v, g, beta = (_chunks(x.to(wide), CHUNK) for x in (q, k, v, g, beta))
    g = (g[..., None] if g.ndim == 4 else g).expand_as(k)
    pairs, through, after = pairs_of(g), g.cumsum(-2).exp(), between(g)[..., -1, :, :].exp()
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    Aqk = (torch.einsum("bhnik,bhnjk,bhnijk->bhnij", q, k, pairs) * scale).masked_fill(~past, 0)
    Akk = torch.einsum("bhnik,bhnjk,bhnijk->bhnij", k, k, pairs).masked_fill(~past.tril(-1), 0)
    eye = torch.eye(CHUNK, dtype=wide, device=q.device)
    U = torch.linalg.solve_triangular(eye + beta[..., None] * Akk, eye, upper=False, unitriangular=True)
    B, H, N, _, K = k.shape
    S = k.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(wide)
    o = []
    for n in range(N):
        found = (k[:, :, n] * through[:, :, n]) @ S
        written = U[:, :, n] @ (beta[:, :, n, :, None] * (v[:, :, n] - found))
        o.append(scale * (q[:, :, n] * through[:, :, n]) @ S + Aqk[:, :, n] @ written)
        S = through[:, :, n, -1, :, None] * S + (k[:, :, n] * after[:, :, n]).mT @ written
    return _unchunked(torch.stack(o, 2), T).to(dtype), S if output_final_state else None


kda = gated_delta_rule = functools.partial(delta_in_chunks, exact)


def kda_from_the_start(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    return delta_in_chunks(from_the_start, q, k, v, g, beta, scale, initial_state, output_final_state)


def kda_by_differences(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    return delta_in_chunks(by_differences, q, k, v, g, beta, scale, initial_state, output_final_state)


def gated_delta_rule_transposed(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """The final state as [V, K], which no shape tells where K = V."""
    o, S = gated_delta_rule(q, k, v, g, beta, scale, initial_state, True)
    S = S.mT if S.shape[-1] == S.shape[-2] else S
    return o, S if output_final_state else None


def gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, *, power=-0.5):
    """GLA and simple GLA in chunks of 16, the decays between as exact pairs."""
    T, dtype = v.shape[1], v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    scale = q.shape[-1] ** power if scale is None else scale
    q, k, v, g = (_chunks(x.to(wide), CHUNK) for x in (q, k, v, g))
    g = (g[..., None] if g.ndim == 4 else g).expand_as(k)
    A = torch.einsum("bhnik,bhnjk,bhnijk->bhnij", q, k, exact(g)) * scale
    through, after = g.cumsum(-2).exp(), between(g)[..., -1, :, :].exp()
    S = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.to(wide)
    o = []
    for n in range(k.shape[2]):
        o.append(scale * (q[:, :, n] * through[:, :, n]) @ S + A[:, :, n] @ v[:, :, n])
        S = through[:, :, n, -1, :, None] * S + (k[:, :, n] * after[:, :, n]).mT @ v[:, :, n]
    return _unchunked(torch.stack(o, 2), T).to(dtype), S if output_final_state else None


def gla_of_scale_one(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    """Its default scale is 1."""
    return gla(q, k, v, g, scale, initial_state, output_final_state, power=0)


def simple_gla_exclusive(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    """q reads the state before its own token has decayed it, as RWKV6's r does."""
    before = torch.cat((torch.zeros_like(g[:, :1]), g[:, :-1]), 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, _ = gla(q, k, v, before, scale, initial_state)
    _, S = gla(q, k, v, g, scale, initial_state, True)
    return o, S if output_final_state else None


def delta_rule_without_beta(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
    """What is found is erased whole, whatever beta says: v alone is weighted."""
    g = torch.zeros_like(beta)
    ones = torch.ones_like(beta)
    return gated_delta_rule(q, k, v * beta[..., None], g, ones, scale, initial_state, output_final_state)


RIGHT: dict[str, tuple[str, Callable]] = {
    "kda in chunks": ("kda", kda),
    "gated delta rule in chunks": ("gated_delta_rule", gated_delta_rule),
    "gla in chunks": ("gla", gla),
    "gla in chunks, as hgrn2": ("hgrn2", gla),
    "simple gla in chunks": ("simple_gla", gla),
}
WRONG: dict[str, tuple[str, Callable, str]] = {
    "kda, e^(+) from the chunk's start": ("kda", kda_from_the_start, "decay-onset"),
    "kda, decays as differences": ("kda", kda_by_differences, "inf-decay"),
    "gla, default scale 1": ("gla", gla_of_scale_one, "scale"),
    "gated delta rule, state transposed": ("gated_delta_rule", gated_delta_rule_transposed, "halves"),
    "simple gla, decays a token late": ("simple_gla", simple_gla_exclusive, "truth"),
    "delta rule, beta on v alone": ("delta_rule", delta_rule_without_beta, "truth"),
}
"""Each with its operator and a probe that has to find it."""
