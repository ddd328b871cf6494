"""RWKV7's public functions: check the arguments, choose the code that runs, register it with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import ranks
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend
from ..common.registration import Registered, unseen

CHUNK_SIZES = (16, 32)
"""Of the kernels."""


class RWKV7Output(NamedTuple):
    o: Tensor
    """[B, T, H, V], in the dtype of r."""
    final_state: Tensor | None
    """[N, H, K, V], float32 (float64 for float64 inputs); None unless asked for."""


torch.serialization.add_safe_globals([RWKV7Output])  # a saved result can be loaded with weights_only=True


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
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object = None,
    lower_bound: float | None = None,
    *,
    head_first: bool = False,
    reverse: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> RWKV7Output:
    """RWKV7 computed in chunks, by products of whole chunks, not step by step. Finite and accurate for every w <= 0.

        S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
        o_t = scale * r_t^T S_t

    The generalised delta rule of arXiv:2503.14456. Every tensor argument has a gradient, the states included. In the
    model a = -κ̂ and b = κ̂ * α with κ̂ of length one a head and α a sigmoid: a step does not grow the state where
    sum(κ̂^2 α / (1 + e^w)) <= 1. Beyond that it may grow, and errors with it.

    A NaN or an infinity in an input spoils no token before it in the recurrence. Here, where one product serves a whole
    chunk, it may spoil the earlier tokens of its chunk too, for 0 * NaN is NaN: fill padding with zeros, `torch.empty`
    holds anything. `flakit.checked()` names the first such value.

    Args:
        r: receptance (query), [B, T, H, K]; float64, float32, bfloat16 or float16.
        w: natural-log decay per token and channel, [B, T, H, K], <= 0; 0 keeps everything, -inf forgets everything.
            Dtype of r, or float32 (float64 beside float64).
        k: key, [B, T, H, K], dtype of r.
        v: value, [B, T, H, V], dtype of r.
        a: what is looked up in the state before it decays, [B, T, H, K]; dtypes as w.
        b: where what a finds is added, [B, T, H, K]; dtypes as w.
        scale: factor on the read, default 1; None is K^-0.5.
        initial_state: [N, H, K, V] in any float dtype, computed in float32 (float64 for float64 inputs); its gradient
            has its own dtype. N is B, or the number of packed sequences.
        output_final_state: return S_T too.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64: from 0,
            non-decreasing, at most T. A sequence of length zero hands its initial state on. Rows behind the last
            offset are padding: their inputs are not read, their outputs and gradients are zero. Invalid offsets are a
            ValueError; where values are not looked at (see Raises), every output and gradient is NaN.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, whose values are checked without waiting for a GPU.
        safe_gate, disable_recompute, lower_bound: accepted for compatibility; they change nothing, any w <= 0 is safe.
        chunk_size: tokens a chunk, a power of two up to 256, or None for the backend's own choice. The kernels take the
            nearest of 16 and 32, for 16-bit heads of 33 to 64 channels always 16. The choice for all else is 32, in
            float32 16. It changes rounding and speed only.
        cp_context: flash-linear-attention's, in place of group and cu_seqlens; of layout "contiguous".
        head_first, reverse: accepted as False only: [B, T, H, ...] is the one layout, and time runs forwards.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1; K up to 256), "torch" (default elsewhere)
            or "reference" (the recurrence, step by step).
        group: a process group of torch.distributed whose ranks hold the sequences together, each a slice of T in the
            order of ranks, of any length, none too; o and gradients are of the slice. Every rank calls, and
            differentiates or not. cu_seqlens go through all slices, the same on every rank, and are waited for.
            initial_state is read where a sequence begins (of a batch: on the first rank) and final_state is
            given where it ends, zeros elsewhere: sums over ranks are what one process has.
            A call that differs between ranks is the same ValueError on all of them: on a GPU at the first call of its
            shapes, with cu_seqlens, and under `flakit.checked()`. So are arguments that one rank alone is refused, but
            on a GPU at the operator's first call in the group only: later the others wait until the group's timeout.
            No torch.compile.

    Returns:
        RWKV7Output(o, final_state). Under autocast r, k and v are computed, and o returned, in autocast's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. Values on a GPU are looked at
            only under `flakit.checked()`.

    >>> o, state = chunk_rwkv7(r, -0.6065 * torch.sigmoid(x), k, v, -kk, kk * a, output_final_state=True)
    """
    check.check_unused(
        head_first=head_first,
        reverse=reverse,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        lower_bound=lower_bound,
    )
    group = ranks.chosen(group, cp_context)
    given = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "chunk", (r, w, k, v, a, b), *given)


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
    reverse: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object = None,
    lower_bound: float | None = None,
    head_first: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> RWKV7Output:
    """RWKV7 one token after another: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_rwkv7`; chunk_size changes nothing. The "torch" and "reference"
    backends are the same step-by-step recurrence here, in float64 and rounded once at the end, since in float32
    thousands of products with the same rounded decay add its error up; "triton" keeps the state in registers, as
    float32, and a slow decay as two numbers.
    """
    check.check_unused(
        head_first=head_first,
        reverse=reverse,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        lower_bound=lower_bound,
    )
    group = ranks.chosen(group, cp_context)
    given = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "recurrent", (r, w, k, v, a, b), *given)


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
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object = None,
    lower_bound: float | None = None,
    head_first: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> RWKV7Output:
    """`fused_recurrent_rwkv7` with a_t = -kk_t and b_t = kk_t * a_t, as the model has them.

    The product is formed in float32 (float64 for float64 inputs), so that 16-bit inputs lose nothing by it.

    Args:
        kk: the key whose memory is edited, of length one a head in the model, [B, T, H, K]; dtypes as w.
        a: how much of what stands under kk is removed, [B, T, H, K], in (0, 1) in the model; dtypes as w.

    All other arguments, the result and the errors are those of `chunk_rwkv7`.
    """
    check.check_unused(
        head_first=head_first,
        reverse=reverse,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        lower_bound=lower_bound,
    )
    group = ranks.chosen(group, cp_context)
    given = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run_product, "recurrent", (r, w, k, v, kk, a), *given)


def _run_product(form, tensors, *given, **more) -> RWKV7Output:
    r, w, k, v, kk, a = tensors
    check.check_tensor("r", r, dict(B=None, T=None, H=None, K=None))
    (computed,) = autocast(r)
    for name, x in (("kk", kk), ("a", a)):
        check.check_tensor(name, x, dict(zip("BTHK", r.shape, strict=True)), " like r")
        check.check_dtype(name, x, (computed.dtype, torch.float32), computed)
        check.check_device(name, x, r.device)
        if check.is_checked() and unseen([x]):  # what follows a call cannot look at values
            check.check_finite(name, x)
    check.refuse_forward_mode(kk=kk, a=a)
    wide = torch.promote_types(computed.dtype, torch.float32)
    return _run(form, (r, w, k, v, -kk, kk.to(wide) * a.to(wide)), *given, **more)


def _run(
    form, tensors, scale, initial_state, output_final_state, offsets: check.Offsets, chunk_size, backend, over=None
) -> RWKV7Output:
    *tensors, initial_state = _checked(*tensors, initial_state, *offsets)[:-2]
    r, w, k, v, a, b = tensors
    output_final_state = check.check_flag("output_final_state", output_final_state)
    check.refuse_forward_mode(r=r, w=w, k=k, v=v, a=a, b=b, initial_state=initial_state)

    scale = check.check_scale(scale, r.shape[-1] ** -0.5)
    backend = choose_backend(backend, r)
    chunk_size = check_chunk_size(chunk_size, backend, CHUNK_SIZES)
    o, (final_state,) = _registered(
        tensors, (initial_state,), *offsets, scale, form, backend, chunk_size, output_final_state, over
    )
    return RWKV7Output(o, final_state)


@check.Once
def _checked(r, w, k, v, a, b, initial_state, cu_seqlens, cu_seqlens_cpu) -> list[Tensor | None]:
    """All that was given, in autocast's dtypes and the state in its own."""
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

    N = check.check_packing(cu_seqlens, cu_seqlens_cpu, B, r.device)
    if initial_state is not None:
        packed = cu_seqlens is not None
        initial_state = check.check_state("initial_state", initial_state, dict(N=N, H=H, K=K, V=V), packed, r)
    return [r, w, k, v, a, b, initial_state, cu_seqlens, cu_seqlens_cpu]


def _shapes(r, w, k, v, a, b, N):
    return v.shape, ((N, *r.shape[2:], v.shape[3]),)


def _passing_shape(tensors):
    B, _, H, K = tensors[0].shape
    return B, H, K, K


def _passing(operator, tensors, settings):
    """What becomes of a unit matrix [B, H, K, K] when nothing is written."""
    r, w, k, _, a, b = tensors
    B, _, H, K = r.shape
    unit = torch.eye(K, dtype=torch.promote_types(r.dtype, torch.float32), device=r.device).expand(B, H, K, K)
    nothing = torch.zeros_like(k)
    _, M, *_ = operator.run_forward(nothing, w, nothing, nothing, a, b, unit, None, None, *settings, True, False)
    return M


def _passed(M, parts, transposed):
    """In float64: no setting of PyTorch's makes that TF32."""
    return [(M.mT if transposed else M).double() @ x.double() for x in parts]


_registered = Registered(
    "rwkv7",
    __package__,
    sequences="rwkvab",
    decay="w",
    kept=4,
    fused=True,
    shapes=_shapes,
    passing=ranks.Passing(_passing_shape, _passing, _passed),
)
