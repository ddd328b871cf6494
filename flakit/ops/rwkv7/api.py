"""RWKV7's public functions: check the arguments, choose the code that runs, register it with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import plain
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend

CHUNK_SIZES = (16, 32)
"""Of the kernels. 64 tokens need more shared memory than there is in the way for any decay, and came out wrong on sm_90
where they fit."""


class RWKV7Output(NamedTuple):
    o: Tensor
    """[B, T, H, V], in the dtype of r."""
    final_state: Tensor | None
    """[N, H, K, V], float32 (float64 for float64 inputs); None unless asked for."""


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    *,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: None = None,
    lower_bound: float | None = None,
    backend: str | None = None,
) -> RWKV7Output:
    """RWKV7 computed in chunks: parallel over T but a light stream of states. Finite and accurate for every w <= 0.

        S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
        o_t = scale * r_t^T S_t

    The generalised delta rule of arXiv:2503.14456. Every tensor argument has a gradient, the states included. In the
    model a = -κ̂ and b = κ̂ * α with κ̂ of length one a head and α a sigmoid: a step does not grow the state where
    sum(κ̂^2 α / (1 + e^w)) <= 1. Beyond that it may grow, and errors with it.

    Args:
        r: receptance (query), [B, T, H, K]; float64, float32, bfloat16 or float16.
        w: natural-log decay per token and channel, [B, T, H, K], <= 0; 0 keeps everything, -inf forgets everything.
            Dtype of r, or float32 (float64 beside float64).
        k: key, [B, T, H, K], dtype of r.
        v: value, [B, T, H, V], dtype of r.
        a: what is looked up in the state before it decays, [B, T, H, K]; dtypes as w.
        b: where what a finds is added, [B, T, H, K]; dtypes as w.
        scale: factor on the read, default 1.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs); N is B, or the number of packed sequences.
        output_final_state: return S_T too.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64. A sequence of length
            zero hands its initial state on.
        cu_seqlens_cpu: accepted for compatibility; changes nothing except that its values are checked without waiting.
        safe_gate, disable_recompute, lower_bound: accepted for compatibility; they change nothing, any w <= 0 is safe.
        chunk_size: tokens a chunk, a power of two; default chosen by the backend.
        cp_context: accepted as None only.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1; K up to 256), "torch" (default elsewhere)
            or "reference" (the recurrence, step by step).

    Returns:
        RWKV7Output(o, final_state).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. Values on a GPU are looked at
            only under `flakit.checked()`.

    >>> o, state = chunk_rwkv7(r, -0.6065 * torch.sigmoid(x), k, v, -kk, kk * a, output_final_state=True)
    """
    if cp_context is not None:
        raise ValueError(f"cp_context: expected None, got {type(cp_context).__name__}; a sequence cannot be split here")
    return _call(
        "chunk",
        r,
        w,
        k,
        v,
        a,
        b,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        chunk_size,
        backend,
    )


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
) -> RWKV7Output:
    """RWKV7 one token after another: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_rwkv7`. The "torch" and "reference" backends are the same
    step-by-step recurrence here; "triton" keeps the state in registers.
    """
    return _call(
        "recurrent",
        r,
        w,
        k,
        v,
        a,
        b,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        None,
        None,
        backend,
    )


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
) -> RWKV7Output:
    """`fused_recurrent_rwkv7` with a_t = -kk_t and b_t = kk_t * a_t, as the model has them.

    The product is formed in float32 (float64 for float64 inputs), so that 16-bit inputs lose nothing by it.

    Args:
        kk: the key whose memory is edited, of length one a head in the model, [B, T, H, K]; dtypes as w.
        a: how much of what stands under kk is removed, [B, T, H, K], in (0, 1) in the model; dtypes as w.
        reverse: accepted as False only.

    All other arguments, the result and the errors are those of `chunk_rwkv7`.
    """
    if reverse:
        raise ValueError("reverse: expected False, got True; flip the inputs along T and the output back instead")
    check.check_tensor("r", r, dict(B=None, T=None, H=None, K=None))
    (computed,) = autocast(r)
    for name, x in (("kk", kk), ("a", a)):
        check.check_tensor(name, x, dict(zip("BTHK", r.shape, strict=True)), " like r")
        check.check_dtype(name, x, (computed.dtype, torch.float32), computed)
        check.check_device(name, x, r.device)
    check.refuse_forward_mode(kk=kk, a=a)
    wide = torch.promote_types(computed.dtype, torch.float32)
    return fused_recurrent_rwkv7(
        r,
        w,
        k,
        v,
        -kk,
        kk.to(wide) * a.to(wide),
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        backend=backend,
    )


def _call(
    form, r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, chunk_size, backend
) -> RWKV7Output:
    check.check_tensor("r", r, dict(B=None, T=None, H=None, K=None))
    B, T, H, K = r.shape
    for name, x in (("w", w), ("k", k), ("a", a), ("b", b)):
        check.check_tensor(name, x, dict(B=B, T=T, H=H, K=K), " like r")
    check.check_tensor("v", v, dict(B=B, T=T, H=H, V=None))
    V = v.shape[-1]

    r, k, v = autocast(r, k, v)
    for name, x in (("k", k), ("v", v)):
        check.check_dtype(name, x, (r.dtype,), r)
    for name, x in (("w", w), ("a", a), ("b", b)):
        check.check_dtype(name, x, (r.dtype, torch.float32), r)
    for name, x in (("w", w), ("k", k), ("v", v), ("a", a), ("b", b)):
        check.check_device(name, x, r.device)

    N = check.check_packing(cu_seqlens, cu_seqlens_cpu, B, T, r.device)
    if initial_state is not None:
        packed = cu_seqlens is not None
        check.check_state("initial_state", initial_state, dict(N=N, H=H, K=K, V=V), packed, r)
    check.check_flag("output_final_state", output_final_state)
    check.refuse_forward_mode(r=r, w=w, k=k, v=v, a=a, b=b, initial_state=initial_state)

    scale = check.check_scale(scale, 1.0)
    backend = choose_backend(backend, r)
    chunk_size = check_chunk_size(chunk_size, backend, CHUNK_SIZES)
    differentiable = (r, w, k, v, a, b) if initial_state is None else (r, w, k, v, a, b, initial_state)
    keep_states = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    o, final_state, *_ = _forward_op(
        r, w, k, v, a, b, initial_state, cu_seqlens, scale, output_final_state, form, backend, chunk_size, keep_states
    )
    return RWKV7Output(o, final_state if output_final_state else None)


@torch.library.custom_op("flakit::rwkv7", mutates_args=())
def _forward_op(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    form: str,
    backend: str,
    chunk_size: int,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state (empty unless asked for), and what the kernels keep for the backward (`kept_shapes`)."""
    check.check_decay("w", w)
    if cu_seqlens is not None:
        check.check_offsets(cu_seqlens, r.shape[1])
    if backend == "triton":
        return plain.kernels(__package__, form).forward(
            r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep_states
        )
    given = (r, w, k, v, a, b), (scale, initial_state), cu_seqlens
    o, final_state = plain.forward(__package__, form, backend, chunk_size, *given)
    final_state = final_state.to(torch.promote_types(r.dtype, torch.float32)).contiguous()
    final_state = final_state if output_final_state else final_state.new_empty(0)
    return o.to(r.dtype).contiguous(), final_state, *(final_state.new_empty(0) for _ in range(3))


@torch.library.custom_op("flakit::rwkv7_backward", mutates_args=())
def _backward_op(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    found: Tensor,
    inverse: Tensor,
    do: Tensor,
    dfinal_state: Tensor | None,
    scale: float,
    form: str,
    backend: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dr, dw, dk, dv, da, db and dinitial_state (empty without an initial state), each in its input's dtype."""
    if backend == "triton":
        grads = plain.kernels(__package__, form).backward(
            r, w, k, v, a, b, scale, initial_state, cu_seqlens, chunk_size, states, found, inverse, do, dfinal_state
        )
    else:
        given = (r, w, k, v, a, b), (scale, initial_state), cu_seqlens
        grads = plain.backward(__package__, form, backend, chunk_size, *given, do, dfinal_state)
    dtypes = (*(x.dtype for x in (r, w, k, v, a, b)), torch.promote_types(r.dtype, torch.float32))
    *grads, dstate = (g.to(dtype).contiguous() for g, dtype in zip(grads, dtypes, strict=True))
    return (*grads, dstate if initial_state is not None else dstate.new_empty(0))


def _states_shape(r: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    N = r.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return N, r.shape[2], r.shape[3], v.shape[3]


@_forward_op.register_fake
def _(r, w, k, v, a, b, initial_state, cu_seqlens, scale, output_final_state, form, backend, chunk_size, keep_states):
    wide = torch.promote_types(r.dtype, torch.float32)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = r.new_empty(_states_shape(r, v, cu_seqlens) if output_final_state else (0,), dtype=wide)
    shapes = ((0,),) * 3
    if backend == "triton" and keep_states:
        shapes = plain.kernels(__package__, form).kept_shapes(r, v, cu_seqlens, chunk_size)
    return o, final_state, *(r.new_empty(shape, dtype=wide) for shape in shapes)


@_backward_op.register_fake
def _(r, w, k, v, a, b, initial_state, cu_seqlens, *_):
    wide = torch.promote_types(r.dtype, torch.float32)
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (r, w, k, v, a, b))
    return (*grads, r.new_empty(_states_shape(r, v, cu_seqlens) if initial_state is not None else (0,), dtype=wide))


def _save(ctx, inputs, output):
    *tensors, scale, output_final_state, form, backend, chunk_size, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)  # half a gigabyte of zeros for states that nobody differentiates
    ctx.asked_for_state, ctx.settings = output_final_state, (scale, form, backend, chunk_size)


def _differentiate(ctx, do, dfinal_state, *_):
    dfinal_state = dfinal_state if ctx.asked_for_state else None
    saved = ctx.saved_tensors  # activation checkpointing allows one look
    do = torch.zeros_like(saved[3]) if do is None else do
    *grads, dstate = _backward_op(*saved, do, dfinal_state, *ctx.settings)
    has_state = saved[6] is not None
    return (*grads, dstate if has_state else None, *(None,) * 7)


def _refuse_double_backward(ctx, *_):
    raise RuntimeError("flakit::rwkv7: double backward is not supported; its gradient is not differentiable again")


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(_refuse_double_backward)
