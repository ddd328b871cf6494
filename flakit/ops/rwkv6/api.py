"""RWKV6's public functions: check the arguments, choose the code that runs, register it with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import plain
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend

CHUNK_SIZES = (16, 32, 64)
"""Of the kernels."""


class RWKV6Output(NamedTuple):
    o: Tensor
    """[B, T, H, V], in the dtype of r."""
    final_state: Tensor | None
    """[N, H, K, V], float32 (float64 for float64 inputs); None unless asked for."""


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> RWKV6Output:
    """RWKV6 computed in chunks: parallel over T, one state per chunk. Finite and accurate for every w <= 0.

        o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T)
        S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T

    Equations (19)-(20) of arXiv:2404.05892. Every tensor argument has a gradient, the states included.

    Args:
        r: receptance (query), [B, T, H, K]; float64, float32, bfloat16 or float16.
        k: key, [B, T, H, K], dtype of r.
        v: value, [B, T, H, V], dtype of r.
        w: natural-log decay per token and channel, [B, T, H, K], <= 0; 0 keeps everything, -inf forgets everything.
            Dtype of r, or float32 (float64 beside float64).
        u: bonus of the current token, [H, K]; dtypes as w.
        scale: factor on the read, default K^-0.5.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs); N is B, or the number of packed sequences.
        output_final_state: return S_T too.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64. A sequence of length
            zero hands its initial state on.
        cu_seqlens_cpu: accepted for compatibility; changes nothing except that its values are checked without waiting.
        chunk_size: tokens a chunk, a power of two; default chosen by the backend.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1), "torch" (default elsewhere) or
            "reference" (the recurrence, step by step).

    Returns:
        RWKV6Output(o, final_state).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. Values on a GPU are looked at
            only under `flakit.checked()`.

    >>> o, state = chunk_rwkv6(r, k, v, -torch.exp(x), u, output_final_state=True)
    """
    return _call(
        "chunk",
        r,
        k,
        v,
        w,
        u,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        chunk_size,
        backend,
    )


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
) -> RWKV6Output:
    """RWKV6 one token after another: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_rwkv6`. `reverse` is accepted as False only. The "torch" and
    "reference" backends are the same step-by-step recurrence here; "triton" keeps the state in registers.
    """
    if reverse:
        raise ValueError("reverse: expected False, got True; flip the inputs along T and the output back instead")
    return _call("recurrent", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, None, None, backend)


def _call(
    form, r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, chunk_size, backend
) -> RWKV6Output:
    check.check_tensor("r", r, dict(B=None, T=None, H=None, K=None))
    B, T, H, K = r.shape
    check.check_tensor("k", k, dict(B=B, T=T, H=H, K=K), " like r")
    check.check_tensor("v", v, dict(B=B, T=T, H=H, V=None))
    check.check_tensor("w", w, dict(B=B, T=T, H=H, K=K), " like r")
    check.check_tensor("u", u, dict(H=H, K=K))
    V = v.shape[-1]

    r, k, v = autocast(r, k, v)
    for name, x in (("k", k), ("v", v)):
        check.check_dtype(name, x, (r.dtype,), r)
    for name, x in (("w", w), ("u", u)):
        check.check_dtype(name, x, (r.dtype, torch.float32), r)
    for name, x in (("k", k), ("v", v), ("w", w), ("u", u)):
        check.check_device(name, x, r.device)

    N = check.check_packing(cu_seqlens, cu_seqlens_cpu, B, T, r.device)
    if initial_state is not None:
        packed = cu_seqlens is not None
        check.check_state("initial_state", initial_state, dict(N=N, H=H, K=K, V=V), packed, r)
    check.check_flag("output_final_state", output_final_state)
    check.refuse_forward_mode(r=r, k=k, v=v, w=w, u=u, initial_state=initial_state)

    scale = check.check_scale(scale, K**-0.5)
    backend = choose_backend(backend, r)
    chunk_size = check_chunk_size(chunk_size, backend, CHUNK_SIZES)
    differentiable = (r, k, v, w, u) if initial_state is None else (r, k, v, w, u, initial_state)
    keep_states = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    o, final_state, _ = _forward_op(
        r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, form, backend, chunk_size, keep_states
    )
    return RWKV6Output(o, final_state if output_final_state else None)


@torch.library.custom_op("flakit::rwkv6", mutates_args=())
def _forward_op(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    form: str,
    backend: str,
    chunk_size: int,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state (empty unless asked for) and the kernels' state checkpoints (empty unless kept)."""
    check.check_decay("w", w)
    if cu_seqlens is not None:
        check.check_offsets(cu_seqlens, r.shape[1])
    if backend == "triton":
        return plain.kernels(__package__, form).forward(
            r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep_states
        )
    given = (r, k, v, w), (u, scale, initial_state), cu_seqlens
    o, final_state = plain.forward(__package__, form, backend, chunk_size, *given)
    final_state = final_state.to(torch.promote_types(r.dtype, torch.float32)).contiguous()
    empty = final_state.new_empty(0)
    return o.to(r.dtype).contiguous(), final_state if output_final_state else empty, empty.clone()


@torch.library.custom_op("flakit::rwkv6_backward", mutates_args=())
def _backward_op(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    do: Tensor,
    dfinal_state: Tensor | None,
    scale: float,
    form: str,
    backend: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dr, dk, dv, dw, du and dinitial_state (empty without an initial state), each in its input's dtype."""
    if backend == "triton":
        grads = plain.kernels(__package__, form).backward(
            r, k, v, w, u, scale, initial_state, cu_seqlens, chunk_size, states, do, dfinal_state
        )
    else:
        given = (r, k, v, w), (u, scale, initial_state), cu_seqlens
        grads = plain.backward(__package__, form, backend, chunk_size, *given, do, dfinal_state)
    dtypes = (*(x.dtype for x in (r, k, v, w, u)), torch.promote_types(r.dtype, torch.float32))
    *grads, dstate = (g.to(dtype).contiguous() for g, dtype in zip(grads, dtypes, strict=True))
    return (*grads, dstate if initial_state is not None else dstate.new_empty(0))


def _states_shape(r: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    N = r.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return N, r.shape[2], r.shape[3], v.shape[3]


@_forward_op.register_fake
def _(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, form, backend, chunk_size, keep_states):
    wide = torch.float64 if r.dtype == torch.float64 else torch.float32
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = r.new_empty(_states_shape(r, v, cu_seqlens) if output_final_state else (0,), dtype=wide)
    shape = (0,)
    if backend == "triton" and keep_states:
        shape = plain.kernels(__package__, form).checkpoint_shape(r, v, cu_seqlens, chunk_size)
    return o, final_state, r.new_empty(shape, dtype=wide)


@_backward_op.register_fake
def _(r, k, v, w, u, initial_state, cu_seqlens, states, do, dfinal_state, scale, form, backend, chunk_size):
    wide = torch.float64 if r.dtype == torch.float64 else torch.float32
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (r, k, v, w, u))
    return (*grads, r.new_empty(_states_shape(r, v, cu_seqlens) if initial_state is not None else (0,), dtype=wide))


def _save(ctx, inputs, output):
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, form, backend, chunk_size, _ = inputs
    ctx.save_for_backward(r, k, v, w, u, initial_state, cu_seqlens, output[2])
    ctx.set_materialize_grads(False)  # half a gigabyte of zeros for states that nobody differentiates
    ctx.asked_for_state, ctx.settings = output_final_state, (scale, form, backend, chunk_size)


def _differentiate(ctx, do, dfinal_state, _):
    dfinal_state = dfinal_state if ctx.asked_for_state else None
    saved = ctx.saved_tensors  # activation checkpointing allows one look
    do = torch.zeros_like(saved[2]) if do is None else do
    *grads, dstate = _backward_op(*saved, do, dfinal_state, *ctx.settings)
    has_state = saved[5] is not None
    return (*grads, dstate if has_state else None, *(None,) * 7)


def _refuse_double_backward(ctx, *_):
    raise RuntimeError("flakit::rwkv6: double backward is not supported; its gradient is not differentiable again")


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(_refuse_double_backward)
