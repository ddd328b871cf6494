"""RWKV7's public functions: check the arguments, choose a backend, register with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import ranks
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend
from ..common.registration import Registered, plain_eager

CHUNK_SIZES = (16, 32)
"""Chunk lengths of the kernels, in tokens."""


class RWKV7Output(NamedTuple):
    """The result of RWKV7's functions, also a tuple (o, final_state)."""

    o: Tensor
    """[B, T, H, V], in the dtype of r."""
    final_state: Tensor | None
    """[N, H, K, V] of N sequences, float32 (float64 for float64 inputs); None unless requested."""


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
    """RWKV7 in chunked form: products of whole chunks instead of single steps. Finite and accurate for every w <= 0.

        S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
        o_t = scale * r_t^T S_t

    The generalised delta rule of arXiv:2503.14456. Every tensor argument has a gradient, the states included. In the
    model a = -κ̂ and b = κ̂ * α with κ̂ of length one a head and α a sigmoid: a step does not grow the state where
    sum(κ̂^2 α / (1 + e^w)) <= 1. Beyond that it may grow, and errors with it.

    In the recurrence, a NaN or an infinity in an input affects no earlier token. Here, where one product serves a whole
    chunk, it may affect earlier tokens of its chunk too, since 0 * NaN is NaN: fill padding with zeros, `torch.empty`
    holds anything. `flakit.checked()` names the first such value.

    Args:
        r: receptance (query), [B, T, H, K]; float64, float32, bfloat16 or float16.
        w: natural-log decay per token and channel, [B, T, H, K], <= 0; 0 keeps everything, -inf forgets everything.
            Dtype of r, or float32 (float64 beside float64).
        k: key, [B, T, H, K], dtype of r.
        v: value, [B, T, H, V], dtype of r.
        a: read from the state before it decays, [B, T, H, K]; dtypes as w.
        b: key under which a's read is added, [B, T, H, K]; dtypes as w.
        scale: factor on the read, default 1; None is K^-0.5.
        initial_state: [N, H, K, V] in any float dtype, computed in float32 (float64 for float64 inputs); its gradient
            has its own dtype. N is B, or the number of packed sequences.
        output_final_state: return S_T too.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64: from 0,
            non-decreasing, at most T. A sequence of length zero returns its initial state. Rows past the last offset
            are padding: their inputs are not read, their outputs and gradients are zero. Invalid offsets raise a
            ValueError; where values are not checked (see Raises), every output and gradient is NaN.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, whose values are checked without waiting for a GPU.
        safe_gate, disable_recompute, lower_bound: accepted for compatibility, without effect; any w <= 0 is safe.
        chunk_size: tokens a chunk, a power of two up to 256, or None for the backend's own choice. The kernels take the
            nearest of 16 and 32, for heads of 33 to 64 channels always 16. The default for all others is 32, in
            float32 16. It affects rounding and speed only.
        cp_context: flash-linear-attention's, in place of group and cu_seqlens; of layout "contiguous".
        head_first, reverse: accepted as False only: [B, T, H, ...] is the only layout, and time runs forwards.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1; K up to 256), "torch" (default elsewhere)
            or "reference" (the recurrence, step by step).
        group: a process group of torch.distributed whose ranks share the sequences: each holds a slice of T, in rank
            order, of any length including 0; o and the gradients are those of the slice. All ranks must call, and all
            or none differentiate. cu_seqlens span all slices, are the same on every rank, and are read on the host.
            initial_state is read on the rank where a sequence begins (of a batch: the first) and final_state is
            returned where it ends, zeros elsewhere: sums over ranks equal the result of one process.
            A call that differs between ranks raises the same ValueError on all of them: on a GPU at the first call of
            its shapes, with cu_seqlens, and under `flakit.checked()`. So do invalid arguments on one rank, but on a
            GPU at the operator's first call in the group only: later the other ranks wait until the group's timeout.
            No torch.compile.

    Returns:
        RWKV7Output(o, final_state). Under autocast r, k and v are cast to autocast's dtype, which o has too.

    Raises:
        TypeError, ValueError: with the argument's name, the expected value and the actual one. Values on a GPU are
            checked only under `flakit.checked()`.

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
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "chunk", (r, w, k, v, a, b), *rest)


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
    """RWKV7 token by token: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_rwkv7`; chunk_size has no effect. Here the "torch" and
    "reference" backends are the same step-by-step recurrence in float64, rounded once at the end, since in float32
    thousands of products with the same rounded decay accumulate its error; "triton" holds the state in registers, in
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
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "recurrent", (r, w, k, v, a, b), *rest)


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
    """`fused_recurrent_rwkv7` with a_t = -kk_t and b_t = kk_t * a_t, as in the model.

    The product is computed in float32 (float64 for float64 inputs), exactly for 16-bit inputs.

    Args:
        kk: the key whose memory is edited, of length one a head in the model, [B, T, H, K]; dtypes as w.
        a: fraction of the value under kk to remove, [B, T, H, K], in (0, 1) in the model; dtypes as w.

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
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run_product, "recurrent", (r, w, k, v, kk, a), *rest)


def _run_product(form, tensors, *rest, **options) -> RWKV7Output:
    r, w, k, v, kk, a = tensors
    check.check_tensor("r", r, dict(B=None, T=None, H=None, K=None))
    (computed,) = autocast(r)
    for name, x in (("kk", kk), ("a", a)):
        check.check_tensor(name, x, dict(zip("BTHK", r.shape, strict=True)), " like r")
        check.check_dtype(name, x, (computed.dtype, torch.float32), computed)
        check.check_device(name, x, r.device)
        if check.is_checked() and plain_eager([x]):  # a compiler or transform cannot read values
            check.check_finite(name, x)
    check.refuse_forward_mode(kk=kk, a=a)
    wide = torch.promote_types(computed.dtype, torch.float32)
    return _run(form, (r, w, k, v, -kk, kk.to(wide) * a.to(wide)), *rest, **options)


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
    """Check all arguments; return them with r, k, v in autocast's dtype and the state in float32 or float64. Raises
    TypeError or ValueError."""
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


def _map_shape(tensors):
    B, _, H, K = tensors[0].shape
    return B, H, K, K


def _map(operator, tensors, settings):
    """Return M [B, H, K, K] of a slice, its map of the state: the final state of the identity when nothing is
    written."""
    r, w, k, _, a, b = tensors
    B, _, H, K = r.shape
    unit = torch.eye(K, dtype=torch.promote_types(r.dtype, torch.float32), device=r.device).expand(B, H, K, K)
    zeros = torch.zeros_like(k)
    _, M, *_ = operator.run_forward(zeros, w, zeros, zeros, a, b, unit, None, None, *settings, True, False)
    return M


def _apply_map(M, parts, transposed):
    """Return M S or, if transposed, M^T S for each part S of a state, in float64, for which PyTorch uses no TF32."""
    return [(M.mT if transposed else M).double() @ x.double() for x in parts]


_registered = Registered(
    "rwkv7",
    __package__,
    sequences="rwkvab",
    decay="w",
    saved=4,
    fused=True,
    shapes=_shapes,
    linear_map=ranks.LinearMap(_map_shape, _map, _apply_map),
)
