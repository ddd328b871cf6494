"""GSA's public functions: check the arguments, choose the code that runs, register it with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import plain
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend
from .abc import slots_and_gates

CHUNK_SIZES = (16, 32)
"""Of the kernels. In chunks of 64 the way for any gate took a minute to compile, and its dv was wrong on sm_90."""


class GSAOutput(NamedTuple):
    o: Tensor
    """[B, T, HQ, V], in the dtype of q."""
    final_state: tuple[Tensor | None, Tensor | None]
    """(hk [N, H, K, M], hv [N, H, M, V]), float32 (float64 for float64 inputs); (None, None) unless asked for."""


def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> GSAOutput:
    """GSA computed in chunks: parallel over T, one memory per chunk. Finite and accurate for every g <= 0.

        hk_t = hk_{t-1} diag(e^{g_t}) + k_t s_t^T
        hv_t = diag(e^{g_t}) hv_{t-1} + s_t v_t^T
        o_t  = softmax(scale * q_t^T hk_t) hv_t

    Gated slot attention, arXiv:2409.07146. Every tensor argument has a gradient, the states included.

    Args:
        q: query, [B, T, HQ, K], HQ a multiple of H: query head h reads the memory of head h // (HQ / H). float64,
            float32, bfloat16 or float16.
        k: key, [B, T, H, K], dtype of q.
        v: value, [B, T, H, V], dtype of q.
        s: how strongly each of M slots is written, [B, T, H, M], dtype of q.
        g: natural-log decay per token and slot, [B, T, H, M], <= 0; 0 keeps everything, -inf forgets everything. Dtype
            of q, or float32 (float64 beside float64). None is ABC: each slot is a running mean over its sequence,
            weighted by e^s, and s has to be finite; there is no initial state then.
        scale: factor on the scores, default K^-0.5.
        initial_state: (hk [N, H, K, M], hv [N, H, M, V]), float32 (float64 for float64 inputs); N is B, or the number
            of packed sequences. (None, None) is no state, as a call returns it that was not asked for one.
        output_final_state: return the memory after the last token too.
        checkpoint_level: accepted for compatibility; changes nothing.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64. A sequence of length
            zero hands its initial state on.
        cu_seqlens_cpu: accepted for compatibility; changes nothing except that its values are checked without waiting.
        chunk_size: tokens a chunk, a power of two; default chosen by the backend.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1), "torch" (default elsewhere) or
            "reference" (the recurrence, step by step).

    Returns:
        GSAOutput(o, final_state).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. Values on a GPU are looked at
            only under `flakit.checked()`.

    >>> o, (hk, hv) = chunk_gsa(q, k, v, s, logsigmoid(x) / 8, output_final_state=True)
    """
    return _call(
        "chunk",
        q,
        k,
        v,
        s,
        g,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        chunk_size,
        backend,
    )


def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
) -> GSAOutput:
    """GSA one token after another: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_gsa`. `reverse` is accepted as False only. The "torch" and
    "reference" backends are the same step-by-step recurrence here; "triton" keeps the memory in registers.
    """
    if reverse:
        raise ValueError("reverse: expected False, got True; flip the inputs along T and the output back instead")
    return _call("recurrent", q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, None, None, backend)


def _call(
    form, q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, chunk_size, backend
) -> GSAOutput:
    check.check_tensor("q", q, dict(B=None, T=None, HQ=None, K=None))
    B, T, HQ, K = q.shape
    check.check_tensor("k", k, dict(B=B, T=T, H=None, K=K))
    H = k.shape[2]
    if HQ % H:
        raise ValueError(f"q: expected HQ to be a multiple of k's H = {H}, got HQ = {HQ}")
    check.check_tensor("v", v, dict(B=B, T=T, H=H, V=None))
    check.check_tensor("s", s, dict(B=B, T=T, H=H, M=None))
    M, V = s.shape[-1], v.shape[-1]
    if g is not None:
        check.check_tensor("g", g, dict(B=B, T=T, H=H, M=M), " like s")

    check.check_flag("output_final_state", output_final_state)
    N = check.check_packing(cu_seqlens, cu_seqlens_cpu, B, T, q.device, "q")
    hk, hv = _pair(initial_state)
    if g is None and hk is not None:
        raise ValueError(
            "initial_state: expected None with g=None, got a pair; ABC's normaliser begins anew in every call, so that "
            "a memory cannot be carried on. Give g explicitly to chain calls"
        )

    raw_s = s
    q, k, v, s = autocast(q, k, v, s)
    for name, x in (("k", k), ("v", v), ("s", s)):
        check.check_dtype(name, x, (q.dtype,), q, "q")
    if g is not None:
        check.check_dtype("g", g, (q.dtype, torch.float32), q, "q")
    for name, x in (("k", k), ("v", v), ("s", s), ("g", g)):
        if x is not None:
            check.check_device(name, x, q.device, "q")
    if hk is not None:
        packed = cu_seqlens is not None
        check.check_state("initial_state[0]", hk, dict(N=N, H=H, K=K, M=M), packed, q, "q")
        check.check_state("initial_state[1]", hv, dict(N=N, H=H, M=M, V=V), packed, q, "q")
    check.refuse_forward_mode(q=q, k=k, v=v, s=s, g=g, initial_state=hk)
    check.refuse_forward_mode(initial_state=hv)

    scale = check.check_scale(scale, K**-0.5)
    backend = choose_backend(backend, q)
    chunk_size = check_chunk_size(chunk_size, backend, CHUNK_SIZES)
    if backend == "triton":
        for name, axis, size, most in (("q", "K", K, 512), ("v", "V", V, 512), ("s", "M", M, 128)):
            if size > most:
                raise ValueError(
                    f"{name}: expected {axis} <= {most} for backend 'triton', got {axis} = {size}; use backend='torch'"
                )
    if g is None:
        if cu_seqlens is not None:
            check.check_offsets(cu_seqlens, T)
        slots, g = slots_and_gates(raw_s, cu_seqlens)
        s = slots.to(q.dtype)
    keep_states = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, s, g, hk, hv))
    o, *final_state, _, _, _ = _forward_op(
        q, k, v, s, g, hk, hv, cu_seqlens, scale, output_final_state, form, backend, chunk_size, keep_states
    )
    return GSAOutput(o, tuple(final_state) if output_final_state else (None, None))


def _pair(initial_state) -> tuple[Tensor | None, Tensor | None]:
    if initial_state is None:
        return None, None
    if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
        came = f"{len(initial_state)} of them" if isinstance(initial_state, (tuple, list)) else None
        raise TypeError(f"initial_state: expected a pair (hk, hv), got {came or type(initial_state).__name__}")
    if (initial_state[0] is None) != (initial_state[1] is None):
        raise TypeError("initial_state: expected both hk and hv or neither, got one of them")
    return tuple(initial_state)


def _states(hk: Tensor | None, hv: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if hk is None else (hk, hv)


@torch.library.custom_op("flakit::gsa", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    hk: Tensor | None,
    hv: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    form: str,
    backend: str,
    chunk_size: int,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, both final states (empty unless asked for); p and both states' checkpoints, of kernels (empty unless kept)."""
    check.check_decay("g", g)
    if cu_seqlens is not None:
        check.check_offsets(cu_seqlens, q.shape[1])
    if backend == "triton":
        return plain.kernels(__package__, form).forward(
            q, k, v, s, g, scale, _states(hk, hv), output_final_state, cu_seqlens, chunk_size, keep_states
        )
    given = (q, k, v, s, g), (scale, _states(hk, hv)), cu_seqlens
    o, final_state = plain.forward(__package__, form, backend, chunk_size, *given)
    o = o.to(q.dtype).contiguous()
    wide = torch.promote_types(q.dtype, torch.float32)
    empty = o.new_empty(0, dtype=wide).clone
    final_state = (x.to(wide).contiguous() if output_final_state else empty() for x in final_state)
    return o, *final_state, empty(), empty(), empty()


@torch.library.custom_op("flakit::gsa_backward", mutates_args=())
def _backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    hk: Tensor | None,
    hv: Tensor | None,
    cu_seqlens: Tensor | None,
    kept_p: Tensor,
    kept_hk: Tensor,
    kept_hv: Tensor,
    do: Tensor,
    dhk: Tensor | None,
    dhv: Tensor | None,
    scale: float,
    form: str,
    backend: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, ds, dg and both states' gradients (empty without initial states), each in its input's dtype."""
    if backend == "triton":
        kept = kept_p, kept_hk, kept_hv
        *grads, dstates = plain.kernels(__package__, form).backward(
            q, k, v, s, g, scale, _states(hk, hv), cu_seqlens, chunk_size, kept, do, _states(dhk, dhv)
        )
    else:
        given = (q, k, v, s, g), (scale, _states(hk, hv)), cu_seqlens
        *grads, dstates = plain.backward(__package__, form, backend, chunk_size, *given, do, _states(dhk, dhv))
    wide = torch.promote_types(q.dtype, torch.float32)
    dtypes = (*(x.dtype for x in (q, k, v, s, g)), wide, wide)
    grads = [x.to(dtype).contiguous() for x, dtype in zip((*grads, *dstates), dtypes, strict=True)]
    return tuple(grads) if hk is not None else (*grads[:5], *(q.new_empty(0, dtype=wide) for _ in range(2)))


def _state_shapes(q: Tensor, k: Tensor, v: Tensor, s: Tensor, cu_seqlens: Tensor | None) -> tuple:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, M = s.shape[2:]
    return (N, H, k.shape[3], M), (N, H, M, v.shape[3])


@_forward_op.register_fake
def _(q, k, v, s, g, hk, hv, cu_seqlens, scale, output_final_state, form, backend, chunk_size, keep_states):
    wide = torch.promote_types(q.dtype, torch.float32)
    o = q.new_empty(*q.shape[:3], v.shape[3])
    final = _state_shapes(q, k, v, s, cu_seqlens) if output_final_state else ((0,), (0,))
    kept = (0,), (0,), (0,)
    if backend == "triton" and keep_states:
        kept = plain.kernels(__package__, form).checkpoint_shapes(q, k, v, s, cu_seqlens, chunk_size)
    return o, *(q.new_empty(shape, dtype=wide) for shape in (*final, *kept))


@_backward_op.register_fake
def _(q, k, v, s, g, hk, hv, cu_seqlens, kept_p, kept_hk, kept_hv, do, dhk, dhv, scale, form, backend, chunk_size):
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, s, g))
    states = _state_shapes(q, k, v, s, cu_seqlens) if hk is not None else ((0,), (0,))
    return (*grads, *(q.new_empty(shape, dtype=wide) for shape in states))


def _save(ctx, inputs, output):
    *tensors, scale, output_final_state, form, backend, chunk_size, _ = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.set_materialize_grads(False)  # half a gigabyte of zeros for checkpoints that nobody differentiates
    ctx.asked_for_state, ctx.settings = output_final_state, (scale, form, backend, chunk_size)


def _differentiate(ctx, do, dhk, dhv, *_):
    saved = ctx.saved_tensors  # activation checkpointing allows one look
    q, k, v, s, *_, cu_seqlens, _, _, _ = saved
    do = q.new_zeros(*q.shape[:3], v.shape[3]) if do is None else do
    dstates = None, None
    if ctx.asked_for_state and not (dhk is None and dhv is None):
        shapes = _state_shapes(q, k, v, s, cu_seqlens)
        wide = torch.promote_types(q.dtype, torch.float32)
        pairs = zip((dhk, dhv), shapes, strict=True)
        dstates = (q.new_zeros(shape, dtype=wide) if x is None else x for x, shape in pairs)
    *grads, dhk, dhv = _backward_op(*saved, do, *dstates, *ctx.settings)
    dstates = (dhk, dhv) if saved[5] is not None else (None, None)
    return (*grads, *dstates, *(None,) * 7)


def _refuse_double_backward(ctx, *_):
    raise RuntimeError("flakit::gsa: double backward is not supported; its gradient is not differentiable again")


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(_refuse_double_backward)
