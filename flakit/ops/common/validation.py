"""Checks of every operator's arguments. Each error names the argument, the expected value and the actual one.

Shapes and dtypes are always checked; that costs nothing. Values (a decay above zero, unordered offsets) are checked on
a CPU; on a GPU reading them synchronizes, so there they are checked under `checked()` or with FLAKIT_CHECK=1 only. That
all inputs are finite is checked under `checked()` only, on a CPU too.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LARGEST = sys.float_info.max

Offsets = tuple[Tensor | None, Tensor | None]
"""cu_seqlens [N + 1] of packed sequences and its copy on the CPU; either may be None."""

_checked: ContextVar[bool] = ContextVar("flakit_checked", default=os.environ.get("FLAKIT_CHECK", "0") not in ("", "0"))

_nan_decays_pass: ContextVar[bool] = ContextVar("flakit_nan_decays_pass", default=False)


@contextmanager
def checked() -> Iterator[None]:
    """In the `with` block, check values on the GPU too, for a few synchronizations a call.

    There, and on a CPU too, a NaN or an infinity in any input (except -inf in the decay) raises a ValueError with the
    argument's name and the first index. Unchecked, it enters the computation, and in a chunked form reaches earlier
    tokens.
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


@contextmanager
def nan_decays_pass() -> Iterator[None]:
    """In the `with` block, accept NaN decays on a CPU too, as on a GPU; not under `checked()`. A training step then
    ends with a NaN loss, which can be counted, and all ranks finish the step."""
    token = _nan_decays_pass.set(True)
    try:
        yield
    finally:
        _nan_decays_pass.reset(token)


def is_checked() -> bool:
    """Return whether values are checked on a GPU too: under `checked()`, or with FLAKIT_CHECK=1."""
    # torch.compile cannot trace a context variable; the operator it calls reads the variable when it runs.
    return not torch.compiler.is_compiling() and _checked.get()


def looks_at_values(x: Tensor) -> bool:
    """Return whether the values of x are checked: always on a CPU, on a GPU only if `is_checked`."""
    return x.is_cpu or is_checked()


class Once:
    """A decorator that runs a check of tensors once for each combination of their shapes, dtypes and devices.

    `check(*args)` must depend on these alone, not on values or settings. It returns the list of args, perhaps converted
    to other dtypes. Arguments that passed unconverted are not checked again: a decode step takes a few microseconds, of
    which the check would be a visible part. args: tensors and None; calls with anything else are always checked.
    """

    MAX_SIGNATURES = 4096
    """Signatures in the cache before it is cleared: lengths may differ from call to call."""

    def __init__(self, check: Callable[..., list]):
        self.check, self.passed = check, set()

    def __call__(self, *args: object) -> list:
        signature = _signature(args)
        if signature is not None and signature in self.passed:
            return list(args)
        results = self.check(*args)
        if signature is not None and all(x is y for x, y in zip(args, results, strict=True)):
            if len(self.passed) >= self.MAX_SIGNATURES:
                self.passed.clear()
            self.passed.add(signature)
        return results


def _signature(args: tuple) -> tuple | None:
    """Return shape, dtype and device of each argument; None under torch.compile or autocast, or where an argument is
    neither None nor a plain tensor."""
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        return None
    signature = []
    for x in args:
        if x is None:
            signature.append(None)
        elif type(x) is Tensor or type(x) is Parameter:
            signature += x.shape, x.dtype, x.device
        else:
            return None
    return tuple(signature)


def check_tensor(name: str, x: object, shape: Mapping[str, int | None], like: str = "") -> None:
    """Check that x is a floating tensor of `shape`, which maps axis names to sizes in order (None: any size >= 1).
    Raises TypeError or ValueError. like: ends the expected shape in the message, " like r" for example."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    sizes = x.shape
    if len(sizes) != len(shape) or not _fits(sizes, shape):
        raise ValueError(f"{name}: expected {_axes(shape)}{like}, got {list(sizes)}")
    if 0 in sizes:
        raise ValueError(f"{name}: expected every axis of {_axes(shape)}{like} to be at least 1, got {list(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {dtype_name(x.dtype)}")


def _fits(sizes: torch.Size, shape: Mapping[str, int | None]) -> bool:
    for got, size in zip(sizes, shape.values(), strict=True):  # called often: a loop takes half the time of any()
        if size is not None and size != got:
            return False
    return True


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype) without its microsecond where x has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)


def check_dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...], r: Tensor, like: str = "r") -> None:
    """Raise TypeError unless x has an allowed dtype. r, like: the tensor that determines them, and its name."""
    if x.dtype not in allowed:
        expected = " or ".join(dict.fromkeys(map(dtype_name, allowed)))
        raise TypeError(f"{name}: expected {expected} beside {dtype_name(r.dtype)} {like}, got {dtype_name(x.dtype)}")


def check_device(name: str, x: Tensor, device: torch.device, like: str = "r") -> None:
    """Raise ValueError unless x is on `device`. like: the argument that is there."""
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} like {like}, got {x.device}")


def check_number(name: str, x: object) -> float:
    """Return a finite number, Python's or numpy's, as a float. Raises TypeError or ValueError for anything else."""
    x = x.item() if isinstance(x, (np.integer, np.floating)) else x
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: expected a number or None, got {type(x).__name__}")
    if not -LARGEST <= x <= LARGEST:  # NaN too; math.isfinite cannot be traced by torch.compile
        got = x if isinstance(x, float) else f"a whole number of {x.bit_length()} bits"
        raise ValueError(f"{name}: expected a finite number, got {got}")
    return float(x)


def check_scale(scale: object, default: float) -> float:
    return default if scale is None else check_number("scale", scale)


def without_padding(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the rows of x [B, T, ...] up to the last offset; synchronizes with a GPU."""
    return x if cu_seqlens is None else x[:, : max(0, int(cu_seqlens[-1]))]


def check_decay(name: str, w: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """Raise ValueError if a log decay in w [B, T, H, *] is above 0 or NaN, where `looks_at_values` holds."""
    if not looks_at_values(w):
        return
    w = without_padding(w, cu_seqlens)
    if not (w <= 0).all():
        at = torch.unravel_index(w.detach().argmax(), w.shape)  # the first NaN, if there is one
        value = w[at].item()
        if math.isnan(value):
            if _nan_decays_pass.get() and not is_checked():
                return
            why = f"A NaN is no missing logarithm, it comes from upstream: from the weights or inputs that made {name}"
        else:
            why = "A factor in (0, 1) has to become its logarithm: logsigmoid(x) or flakit.log_decay(x)"
        raise ValueError(f"{name}: expected a natural-log decay <= 0, got {value:.4g} at {[int(i) for i in at]}. {why}")


def check_finite(name: str, x: Tensor, where: str = "under flakit.checked()") -> None:
    """Raise ValueError, with the first index, unless all of x is finite. where: ends the expectation in its message."""
    if not x.isfinite().all():
        at = (~x.isfinite()).nonzero()[0]
        raise ValueError(f"{name}: expected finite values {where}, got {x[tuple(at)].item():.4g} at {at.tolist()}")


def check_cu_seqlens(x: object, B: int, device: torch.device, like: str = "r", name: str = "cu_seqlens") -> None:
    """Check shape, dtype and device of the offsets of packed sequences; `check_offsets` checks their values. Raises
    TypeError or ValueError. B: the batch, which must be 1. like: the argument whose device is expected."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {dtype_name(x.dtype)}")
    if x.ndim != 1 or len(x) < 2:
        raise ValueError(f"{name}: expected [N + 1] with N >= 1, got {list(x.shape)}")
    if B != 1:
        raise ValueError(f"{name}: expected a batch of 1 with packed sequences, got B = {B}")
    check_device(name, x, device, like)


def check_packing(cu_seqlens: object, cu_seqlens_cpu: object, B: int, device: torch.device, like: str = "r") -> int:
    """Check both forms of the offsets, each a tensor [N + 1] or None; return N, the number of sequences, B if unpacked.
    Raises TypeError or ValueError, as `check_cu_seqlens`."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError(
                "cu_seqlens_cpu: expected None without cu_seqlens, of which it is a copy on the CPU; "
                "give cu_seqlens, and this one beside it if you like"
            )
        return B
    check_cu_seqlens(cu_seqlens, B, device, like)
    if cu_seqlens_cpu is not None:
        check_cu_seqlens(cu_seqlens_cpu, B, torch.device("cpu"), "its name", "cu_seqlens_cpu")
        if cu_seqlens_cpu.shape != cu_seqlens.shape:
            expected, got = list(cu_seqlens.shape), list(cu_seqlens_cpu.shape)
            raise ValueError(f"cu_seqlens_cpu: expected {expected} like cu_seqlens, got {got}")
    return len(cu_seqlens) - 1


def check_state(
    name: str, state: object, shape: Mapping[str, int], packed: bool, first: Tensor, like: str = "r"
) -> Tensor:
    """Return a state in the dtype of the computation, float32 or float64. Raises TypeError or ValueError unless it is a
    floating tensor of this shape on the device of `first`.

    shape: axis names and sizes, N first. first: the operator's first tensor. PyTorch differentiates the conversion, so
    the state's gradient has the state's own dtype.
    """
    check_tensor(name, state, shape, f" (N = {shape['N']} {'packed sequences' if packed else 'like B'})")
    check_device(name, state, first.device, like)
    return in_dtype(state, torch.promote_types(first.dtype, torch.float32))


def check_flag(name: str, flag: object) -> bool:
    """Return a flag, Python's or numpy's, as a bool, None as False; raises TypeError for anything else."""
    if flag is True or flag is False:
        return flag
    if flag is not None and not isinstance(flag, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {type(flag).__name__}")
    return bool(flag)


def check_unused(
    *,
    head_first: object = False,
    safe_gate: object = False,
    disable_recompute: object = False,
    lower_bound: object = None,
    checkpoint_level: object = 0,
    reverse: object = False,
) -> None:
    """Check flash-linear-attention's keywords without effect here; raises ValueError or TypeError for other values."""
    if check_flag("head_first", head_first):
        raise ValueError("head_first: expected False, got True; give [B, T, H, ...], x.transpose(1, 2), instead")
    if check_flag("reverse", reverse):
        raise ValueError("reverse: expected False, got True; flip the inputs along T and the output back instead")
    check_flag("safe_gate", safe_gate)
    check_flag("disable_recompute", disable_recompute)
    if lower_bound is not None and check_number("lower_bound", lower_bound) >= 0:
        raise ValueError(f"lower_bound: expected a natural-log decay below 0 or None, got {lower_bound}")
    if isinstance(checkpoint_level, bool) or not isinstance(checkpoint_level, (int, np.integer)):
        raise TypeError(f"checkpoint_level: expected a whole number, got {type(checkpoint_level).__name__}")


def check_offsets(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, T: int, reads_values: bool = False) -> None:
    """Check the values of the offsets, and that both agree, where reading them does not synchronize with a GPU.
    reads_values: whether the backend reads them anyway. Raises ValueError unless they ascend from 0 to T at most."""
    for name, x in (("cu_seqlens_cpu", cu_seqlens_cpu), ("cu_seqlens", cu_seqlens)):
        if x is None or not (reads_values or looks_at_values(x)):
            continue
        offsets = x.tolist()
        if offsets[0] != 0:
            raise ValueError(f"{name}: expected offsets from 0, got {offsets[0]} at index 0")
        for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            if end < start:
                raise ValueError(f"{name}: expected non-decreasing offsets, got {start} then {end} at index {n + 1}")
        if offsets[-1] > T:
            raise ValueError(f"{name}: expected offsets up to T = {T} at most, got {offsets[-1]} at the end")
        if name == "cu_seqlens" and cu_seqlens_cpu is not None and offsets != cu_seqlens_cpu.tolist():
            raise ValueError(f"cu_seqlens_cpu: expected {offsets} like cu_seqlens, got {cu_seqlens_cpu.tolist()}")


def refuse_forward_mode(**tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent, which a custom operator would silently drop."""
    if forward_ad._current_level < 0:
        return  # no tangents exist
    message = "forward-mode differentiation is not supported, use reverse mode"
    if torch.compiler.is_compiling():
        # Compiled code cannot see a tangent, only whether one may exist: torch.compile guards on the level.
        raise NotImplementedError(f"{message}, or compile outside of torch.autograd.forward_ad.dual_level")
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: {message}")


def _axes(shape: Mapping[str, int | None]) -> str:
    return "[" + ", ".join(axis if size is None else str(size) for axis, size in shape.items()) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
