"""What every operator asks of its arguments. Each error names the argument, what was expected and what came.

Shapes and dtypes are always checked, they cost nothing. Values (a decay above zero, disordered offsets) are checked on
CPU; on a GPU looking means waiting for it, so there they are checked under `checked()` or with FLAKIT_CHECK=1.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_checked: ContextVar[bool] = ContextVar("flakit_checked", default=os.environ.get("FLAKIT_CHECK", "0") not in ("", "0"))


@contextmanager
def checked() -> Iterator[None]:
    """Look at values on the GPU too, at the price of a synchronisation a call: `with flakit.checked(): ...`."""
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def looks_at_values(x: Tensor) -> bool:
    return x.device.type == "cpu" or _checked.get()


def check_tensor(name: str, x: object, shape: Mapping[str, int | None], like: str = "") -> None:
    """x is a floating tensor of `shape`, an ordered mapping of axis names to sizes (None: any size of at least 1)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.ndim != len(shape) or any(size not in (None, got) for size, got in zip(shape.values(), x.shape, strict=True)):
        raise ValueError(f"{name}: expected {_axes(shape)}{like}, got {list(x.shape)}")
    if 0 in x.shape:
        raise ValueError(f"{name}: expected every axis of {_axes(shape)}{like} to be at least 1, got {list(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {_name(x.dtype)}")


def check_dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...], r: Tensor, like: str = "r") -> None:
    if x.dtype not in allowed:
        expected = " or ".join(dict.fromkeys(map(_name, allowed)))
        raise TypeError(f"{name}: expected {expected} beside {_name(r.dtype)} {like}, got {_name(x.dtype)}")


def check_device(name: str, x: Tensor, device: torch.device, like: str = "r") -> None:
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} like {like}, got {x.device}")


def check_scale(scale: object, default: float) -> float:
    if scale is None:
        return default
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:  # NaN too; math.isfinite cannot be traced by torch.compile
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)


def check_decay(name: str, w: Tensor) -> None:
    if looks_at_values(w) and not (w <= 0).all():
        at = torch.unravel_index(w.detach().argmax(), w.shape)  # the first NaN, if there is one
        raise ValueError(
            f"{name}: expected a natural-log decay <= 0, got {w[at].item():.4g} at {[int(i) for i in at]}. "
            f"A factor in (0, 1) has to become its logarithm: logsigmoid(x) or -exp(x)"
        )


def check_cu_seqlens(cu_seqlens: object, B: int, device: torch.device, like: str = "r") -> None:
    """Shape and kind of the offsets of packed sequences; `check_offsets` looks at their values."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an integer tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {_name(cu_seqlens.dtype)}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected [N + 1] with N >= 1, got {list(cu_seqlens.shape)}")
    if B != 1:
        raise ValueError(f"cu_seqlens: expected a batch of 1 with packed sequences, got B = {B}")
    check_device("cu_seqlens", cu_seqlens, device, like)


def check_packing(
    cu_seqlens: object, cu_seqlens_cpu: object, B: int, T: int, device: torch.device, like: str = "r"
) -> int:
    """Both forms of the offsets, either of which may be None; returns N, the number of sequences."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, device, like)
    if cu_seqlens_cpu is not None:
        check_cu_seqlens(cu_seqlens_cpu, B, torch.device("cpu"))
        check_offsets(cu_seqlens_cpu, T)
    return B if cu_seqlens is None else len(cu_seqlens) - 1


def check_state(
    name: str, state: object, shape: Mapping[str, int], packed: bool, first: Tensor, like: str = "r"
) -> None:
    """A state of `shape`, whose first axis is N, beside the operator's first sequence."""
    check_tensor(name, state, shape, f" (N = {shape['N']} {'packed sequences' if packed else 'like B'})")
    check_dtype(name, state, (torch.promote_types(first.dtype, torch.float32),), first, like)
    check_device(name, state, first.device, like)


def check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected True or False, got {type(flag).__name__}")


def check_offsets(cu_seqlens: Tensor, T: int) -> None:
    if not looks_at_values(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != T:
        raise ValueError(f"cu_seqlens: expected to start at 0 and end at T = {T}, got {offsets[0]} … {offsets[-1]}")
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if end < start:
            raise ValueError(f"cu_seqlens: expected non-decreasing offsets, got {start} then {end} at index {n + 1}")


def refuse_forward_mode(**tensors: Tensor | None) -> None:
    """A custom operator silently drops forward-mode tangents; say so instead of returning zeros."""
    if torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: forward-mode differentiation is not supported, use reverse mode")


def _axes(shape: Mapping[str, int | None]) -> str:
    return "[" + ", ".join(axis if size is None else str(size) for axis, size in shape.items()) + "]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
