"""RWKV6's public functions: check the arguments, choose a backend, register with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import ranks
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend
from ..common.registration import Registered

CHUNK_SIZES = (32,)
"""Chunk lengths of the kernels, in tokens; the kernels of `fused_chunk_triton` have 16."""


class RWKV6Output(NamedTuple):
    """The result of RWKV6's functions, also a tuple (o, final_state)."""

    o: Tensor
    """[B, T, H, V], in the dtype of r."""
    final_state: Tensor | None
    """[N, H, K, V] of N sequences, float32 (float64 for float64 inputs); None unless requested."""


torch.serialization.add_safe_globals([RWKV6Output])  # a saved result can be loaded with weights_only=True


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
    head_first: bool = False,
    reverse: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> RWKV6Output:
    """RWKV6 in chunked form: products of whole chunks instead of single steps. Finite and accurate for every w <= 0.

        o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T)
        S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T

    Equations (19)-(20) of arXiv:2404.05892. Every tensor argument has a gradient, the states included.

    In the recurrence, a NaN or an infinity in an input affects no earlier token. Here, where one product serves a whole
    chunk, it may affect earlier tokens of its chunk too, since 0 * NaN is NaN: fill padding with zeros, `torch.empty`
    holds anything. `flakit.checked()` names the first such value.

    Args:
        r: receptance (query), [B, T, H, K]; float64, float32, bfloat16 or float16.
        k: key, [B, T, H, K], dtype of r.
        v: value, [B, T, H, V], dtype of r.
        w: natural-log decay per token and channel, [B, T, H, K], <= 0; 0 keeps everything, -inf forgets everything.
            Dtype of r, or float32 (float64 beside float64).
        u: bonus of the current token, [H, K]; dtypes as w.
        scale: factor on the read, default K^-0.5.
        initial_state: [N, H, K, V] in any float dtype, computed in float32 (float64 for float64 inputs); its gradient
            has its own dtype. N is B, or the number of packed sequences.
        output_final_state: return S_T too.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64: from 0,
            non-decreasing, at most T. A sequence of length zero returns its initial state. Rows past the last offset
            are padding: their inputs are not read, their outputs and gradients are zero. Invalid offsets raise a
            ValueError; where values are not checked (see Raises), every output and gradient is NaN.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, whose values are checked without waiting for a GPU.
        chunk_size: tokens a chunk, a power of two up to 256, or None for the backend's own choice. The kernels have one
            size: 16 for heads of 33 to 64 channels, 32 for all others. It affects rounding and speed only.
        head_first, reverse: accepted as False only: [B, T, H, ...] is the only layout, and time runs forwards.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1), "torch" (default elsewhere) or
            "reference" (the recurrence, step by step).
        group: a process group of torch.distributed whose ranks share the sequences: each holds a slice of T, in rank
            order, of any length including 0; o and the gradients are those of the slice. All ranks must call, and all
            or none differentiate. cu_seqlens span all slices, are the same on every rank, and are read on the host.
            initial_state is read on the rank where a sequence begins (of a batch: the first) and final_state is
            returned where it ends, zeros elsewhere: sums over ranks equal the result of one process, u's gradient too.
            A call that differs between ranks raises the same ValueError on all of them: on a GPU at the first call of
            its shapes, with cu_seqlens, and under `flakit.checked()`. So do invalid arguments on one rank, but on a
            GPU at the operator's first call in the group only: later the other ranks wait until the group's timeout.
            No torch.compile. flash-linear-attention's cp_context, of layout "contiguous", is accepted in place of the
            group and cu_seqlens.

    Returns:
        RWKV6Output(o, final_state). Under autocast r, k and v are cast to autocast's dtype, which o has too.

    Raises:
        TypeError, ValueError: with the argument's name, the expected value and the actual one. Values on a GPU are
            checked only under `flakit.checked()`.

    >>> o, state = chunk_rwkv6(r, k, v, flakit.log_decay(x), u, output_final_state=True)
    """
    check.check_unused(head_first=head_first, reverse=reverse)
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "chunk", (r, k, v, w, u), *rest)


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
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
    head_first: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> RWKV6Output:
    """RWKV6 token by token: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_rwkv6`; chunk_size has no effect. Here the "torch" and
    "reference" backends are the same step-by-step recurrence in float64, rounded once at the end, since in float32
    thousands of products with the same rounded decay accumulate its error; "triton" holds the state in registers, in
    float32, and a slow decay as two numbers.
    """
    check.check_unused(head_first=head_first, reverse=reverse)
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "recurrent", (r, k, v, w, u), *rest)


def _run(
    form, tensors, scale, initial_state, output_final_state, offsets: check.Offsets, chunk_size, backend, over=None
) -> RWKV6Output:
    *tensors, initial_state = _checked(*tensors, initial_state, *offsets)[:-2]
    r, k, v, w, u = tensors
    output_final_state = check.check_flag("output_final_state", output_final_state)
    check.refuse_forward_mode(r=r, k=k, v=v, w=w, u=u, initial_state=initial_state)

    scale = check.check_scale(scale, r.shape[-1] ** -0.5)
    backend = choose_backend(backend, r)
    chunk_size = check_chunk_size(chunk_size, backend, CHUNK_SIZES)
    o, (final_state,) = _registered(
        tensors, (initial_state,), *offsets, scale, form, backend, chunk_size, output_final_state, over
    )
    return RWKV6Output(o, final_state)


@check.Once
def _checked(r, k, v, w, u, initial_state, cu_seqlens, cu_seqlens_cpu) -> list[Tensor | None]:
    """Check all arguments; return them with r, k, v in autocast's dtype and the state in float32 or float64. Raises
    TypeError or ValueError."""
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

    N = check.check_packing(cu_seqlens, cu_seqlens_cpu, B, r.device)
    if initial_state is not None:
        packed = cu_seqlens is not None
        initial_state = check.check_state("initial_state", initial_state, dict(N=N, H=H, K=K, V=V), packed, r)
    return [r, k, v, w, u, initial_state, cu_seqlens, cu_seqlens_cpu]


def _shapes(r, k, v, w, u, N):
    return v.shape, ((N, *r.shape[2:], v.shape[3]),)


_registered = Registered(
    "rwkv6",
    __package__,
    sequences="rkvw",
    weights="u",
    decay="w",
    saved=2,
    fused=True,
    shapes=_shapes,
    linear_map=ranks.decay_map(3, -2),
)
