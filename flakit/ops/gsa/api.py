"""GSA's public functions: check the arguments, choose a backend, register with PyTorch. No maths here."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import ranks
from ..common import validation as check
from ..common.dispatch import autocast, check_chunk_size, choose_backend
from ..common.registration import Registered, plain_eager
from .abc import slots_and_gates

CHUNK_SIZES = (32, 64)
"""Chunk lengths of the kernels, in tokens."""


class GSAOutput(NamedTuple):
    """The result of GSA's functions, also a tuple (o, final_state)."""

    o: Tensor
    """[B, T, HQ, V], in the dtype of q."""
    final_state: tuple[Tensor | None, Tensor | None]
    """(hk [N, H, K, M], hv [N, H, M, V]), float32 (float64 for float64 inputs); (None, None) unless requested."""


torch.serialization.add_safe_globals([GSAOutput])  # a saved result can be loaded with weights_only=True


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
    head_first: bool = False,
    reverse: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> GSAOutput:
    """GSA in chunked form: parallel over T, one memory per chunk. Finite and accurate for every g <= 0.

        hk_t = hk_{t-1} diag(e^{g_t}) + k_t s_t^T
        hv_t = diag(e^{g_t}) hv_{t-1} + s_t v_t^T
        o_t  = softmax(scale * q_t^T hk_t) hv_t

    Gated slot attention, arXiv:2409.07146. Every tensor argument has a gradient, the states included.

    In the recurrence, a NaN or an infinity in an input affects no earlier token. Here, where one product serves a whole
    chunk, it may affect earlier tokens of its chunk too, since 0 * NaN is NaN: fill padding with zeros, `torch.empty`
    holds anything. `flakit.checked()` names the first such value.

    Args:
        q: query, [B, T, HQ, K], HQ a multiple of H: query head h reads the memory of head h // (HQ / H). float64,
            float32, bfloat16 or float16.
        k: key, [B, T, H, K], dtype of q.
        v: value, [B, T, H, V], dtype of q.
        s: strength of the write into each of M slots, [B, T, H, M], dtype of q.
        g: natural-log decay per token and slot, [B, T, H, M], <= 0; 0 keeps everything, -inf forgets everything. Dtype
            of q, or float32 (float64 beside float64). None is ABC: each slot is a running mean over its sequence,
            weighted by e^s, and s has to be finite; there is no initial state then.
        scale: factor on the scores, default K^-0.5.
        initial_state: (hk [N, H, K, M], hv [N, H, M, V]) in any float dtype, computed in float32 (float64 for float64
            inputs); their gradients have their own dtypes. N is B, or the number of packed sequences. (None, None) is
            no state, as a call without output_final_state returns it.
        output_final_state: return the memory after the last token too.
        checkpoint_level: accepted for compatibility, without effect.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one, int32 or int64: from 0,
            non-decreasing, at most T. A sequence of length zero returns its initial state. Rows past the last offset
            are padding: their inputs are not read, their outputs and gradients are zero. Invalid offsets raise a
            ValueError; where values are not checked (see Raises), every output and gradient is NaN.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, whose values are checked without waiting for a GPU.
        chunk_size: tokens a chunk, a power of two up to 256, or None for the backend's own choice. The kernels take the
            nearest of 32 and 64, 64 only for bfloat16 and float32 with 33 to 64 slots and as many queries as heads. It
            affects rounding and speed only.
        head_first, reverse: accepted as False only: [B, T, H, ...] is the only layout, and time runs forwards.
        backend: "triton" (default on CUDA; on CPU under TRITON_INTERPRET=1), "torch" (default elsewhere) or
            "reference" (the recurrence, step by step).
        group: a process group of torch.distributed whose ranks share the sequences: each holds a slice of T, in rank
            order, of any length including 0; o and the gradients are those of the slice. All ranks must call, and all
            or none differentiate. cu_seqlens span all slices, are the same on every rank, and are read on the host.
            initial_state is read on the rank where a sequence begins (of a batch: the first) and final_state is
            returned where it ends, zeros elsewhere: sums over ranks equal the result of one process.
            A call that differs between ranks raises the same ValueError on all of them: on a GPU at the first call of
            its shapes, with cu_seqlens, and under `flakit.checked()`. So do invalid arguments on one rank, but on a
            GPU at the operator's first call in the group only: later the other ranks wait until the group's timeout.
            No torch.compile, no ABC. flash-linear-attention's cp_context, of layout "contiguous", is accepted in place
            of the group and cu_seqlens.

    Returns:
        GSAOutput(o, final_state). Under autocast q, k, v and s are cast to autocast's dtype, which o has too.

    Raises:
        TypeError, ValueError: with the argument's name, the expected value and the actual one. Values on a GPU are
            checked only under `flakit.checked()`.

    >>> o, (hk, hv) = chunk_gsa(q, k, v, s, logsigmoid(x) / 8, output_final_state=True)
    """
    check.check_unused(head_first=head_first, reverse=reverse, checkpoint_level=checkpoint_level)
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "chunk", (q, k, v, s, g), *rest)


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
    checkpoint_level: int = 2,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
    head_first: bool = False,
    backend: str | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> GSAOutput:
    """GSA token by token: the form for decoding and for checking the chunked one.

    Formula, arguments, result and errors as in `chunk_gsa`; chunk_size has no effect. Here the "torch" and
    "reference" backends are the same step-by-step recurrence in float64, rounded once at the end, since in float32
    thousands of products with the same rounded decay accumulate its error; "triton" holds the memory in registers, in
    float32, and a slow decay as two numbers.
    """
    check.check_unused(head_first=head_first, reverse=reverse, checkpoint_level=checkpoint_level)
    rest = scale, initial_state, output_final_state, (cu_seqlens, cu_seqlens_cpu), chunk_size, backend, group
    return ranks.called(_registered, _run, "recurrent", (q, k, v, s, g), *rest)


def _run(
    form, tensors, scale, initial_state, output_final_state, offsets: check.Offsets, chunk_size, backend, over=None
) -> GSAOutput:
    raw_s, (hk, hv) = tensors[3], _pair(initial_state)
    q, k, v, s, g, hk, hv, *_ = _checked(*tensors, hk, hv, *offsets)
    output_final_state = check.check_flag("output_final_state", output_final_state)
    if g is None and over is not None:
        raise ValueError("g: expected a tensor beside group, got None; ABC's normaliser is of one process")
    check.refuse_forward_mode(q=q, k=k, v=v, s=s, g=g, initial_state=hk)
    check.refuse_forward_mode(initial_state=hv)

    K, V, M = q.shape[-1], v.shape[-1], s.shape[-1]
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
        if check.looks_at_values(raw_s) and plain_eager([raw_s]):  # a compiler or transform cannot read values
            check.check_finite("s", check.without_padding(raw_s, offsets[0]), "with g=None")
        slots, g = slots_and_gates(raw_s, offsets[0])
        s = slots.to(q.dtype)
    o, (last_hk, last_hv) = _registered(
        (q, k, v, s, g), (hk, hv), *offsets, scale, form, backend, chunk_size, output_final_state, over
    )
    return GSAOutput(o, (last_hk, last_hv))


@check.Once
def _checked(q, k, v, s, g, hk, hv, cu_seqlens, cu_seqlens_cpu) -> list[Tensor | None]:
    """Check all arguments; return them with q, k, v, s in autocast's dtype and the state in float32 or float64. Raises
    TypeError or ValueError."""
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
    N = check.check_packing(cu_seqlens, cu_seqlens_cpu, B, q.device, "q")
    if g is None and hk is not None:
        raise ValueError(
            "initial_state: expected None with g=None, got a pair; ABC's normaliser begins anew in every call, so that "
            "a memory cannot be carried on. Give g explicitly to chain calls"
        )

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
        hk = check.check_state("initial_state[0]", hk, dict(N=N, H=H, K=K, M=M), packed, q, "q")
        hv = check.check_state("initial_state[1]", hv, dict(N=N, H=H, M=M, V=V), packed, q, "q")
    return [q, k, v, s, g, hk, hv, cu_seqlens, cu_seqlens_cpu]


def _pair(initial_state) -> tuple[Tensor | None, Tensor | None]:
    if initial_state is None:
        return None, None
    if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
        got = f"{len(initial_state)} of them" if isinstance(initial_state, (tuple, list)) else None
        raise TypeError(f"initial_state: expected a pair (hk, hv), got {got or type(initial_state).__name__}")
    if (initial_state[0] is None) != (initial_state[1] is None):
        raise TypeError("initial_state: expected both hk and hv or neither, got one of them")
    hk, hv = initial_state
    return hk, hv


def _shapes(q, k, v, s, g, N):
    H, M = s.shape[2:]
    return (*q.shape[:3], v.shape[3]), ((N, H, k.shape[3], M), (N, H, M, v.shape[3]))


_registered = Registered(
    "gsa",
    __package__,
    sequences="qkvsg",
    decay="g",
    states=("initial_hk", "initial_hv"),
    saved=3,
    shapes=_shapes,
    linear_map=ranks.decay_map(4, -1, -2),
)
