"""Build an operator from the forward and backward of one chunk of one head: loops over sequences, heads and chunks.

    operator = assembled(chunk_forward, chunk_backward)
    o, final_state = operator(r, k, v, w, u, output_final_state=True)

It adds no arithmetic except the scale and dtype conversions. The two functions determine the results, and the decay at
which these become non-finite.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64
"""Tokens per chunk; the last chunk of a sequence may be shorter."""


def assembled(forward: Callable, backward: Callable) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Build an operator like `flakit.chunk_rwkv6` from two functions of one chunk and one head.

    forward(r, k, v, w, u, S) returns o and the final state. backward(r, k, v, w, u, S, do, D), with D the gradient of
    the final state, returns dr, dk, dv, dw, du and dS. Shapes: r, k, w [C, K], v, o, do [C, V], u [K], S, D [K, V], all
    float32; w is a natural-log decay <= 0. Both use the scale K^-0.5.

    The operator takes r, k, w [B, T, H, K], v [B, T, H, V], u [H, K], and scale (default K^-0.5), initial_state [B, H,
    K, V] and output_final_state. It returns o [B, T, H, V] in r's dtype and the final state, float32 or None."""

    class OneHead(torch.autograd.Function):
        @staticmethod
        def forward(ctx, r, k, v, w, u, S):
            outputs, states = [], []
            for part in _parts(r, k, v, w):
                states.append(S)
                o, S = forward(*part, u, S)
                outputs.append(o)
            ctx.save_for_backward(r, k, v, w, u, *states)
            return torch.cat(outputs), S

        @staticmethod
        @once_differentiable
        def backward(ctx, do, D):
            r, k, v, w, u, *states = ctx.saved_tensors
            gradients, du = [], torch.zeros_like(u)
            for part, S in zip(reversed(_parts(r, k, v, w, do)), reversed(states), strict=True):
                *of_tokens, of_u, D = backward(*part[:4], u, S, part[4], D)
                gradients.append(of_tokens)
                du = du + of_u
            return *(torch.cat(each[::-1]) for each in zip(*gradients, strict=True)), du, D

    def operator(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
        B, _, H, K = r.shape
        dtype, V = r.dtype, v.shape[-1]
        r, k, v, w, u = (x.float() for x in (r, k, v, w, u))
        r = r if scale is None else r * (scale * K**0.5)
        S = r.new_zeros(B, H, K, V) if initial_state is None else initial_state.float()
        heads = [(b, h) for b in range(B) for h in range(H)]
        results = [OneHead.apply(*(x[b, :, h] for x in (r, k, v, w)), u[h], S[b, h]) for b, h in heads]
        o, states = (torch.stack(each).unflatten(0, (B, H)) for each in zip(*results, strict=True))
        return o.transpose(1, 2).to(dtype), states if output_final_state else None

    return operator


def _parts(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(CHUNK) for x in tensors), strict=True))
