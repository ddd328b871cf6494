"""`flakit.trace` finds where values stop being finite, in Triton kernels and in PyTorch code, forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..ops.common.dispatch import has_triton, interpreted, interpreted_too_late
from .trace_record import Access, Headroom, Operand, Place, Site, Tile, Trace
from .trace_torch import TorchWatch

__all__ = ["Access", "Headroom", "Operand", "Place", "Site", "Tile", "Trace", "trace"]

INSTEAD = "run `flakit trace script.py` instead, or start the process with TRITON_INTERPRET=1"


@contextmanager
def trace(digits: bool = False) -> Iterator[Trace]:
    """Watch the code of the `with` block, and find the first non-finite value and everything that follows from it.

        with flakit.trace() as t:
            kernel[grid](…)
        print(t)

    Triton kernels are watched tile by tile in Triton's interpreter (in a process started with TRITON_INTERPRET=1), or
    compiled on a GPU, after their source is rewritten. PyTorch code is watched operation by operation, including
    gradients and the inside of custom operators and their backwards. `Trace` describes the result.

    -inf from a constant, a mask or memory is no fault; a NaN is, and so is an infinity computed from finite numbers.
    While traced, a load out of bounds gives NaN (0 for integers), and a store out of bounds does nothing.
    digits: also repeat every operation in float64, and report in `Trace.digits` which lines lost digits; see `Digits`.
    A compiled kernel is interpreted as well, and its stores are compared.
    Raises RuntimeError, with the command to use instead, if a kernel cannot be watched or this Triton is not supported.
    """
    result = Trace()
    tiles, tensors = _shadows(result) if digits else (None, None)
    with watching(result, tiles, tensors):
        yield result
    if tensors is not None:
        tensors.judge()


def _shadows(result: Trace) -> tuple:
    """Return the observers that measure lost digits: of tiles, None without Triton, and of PyTorch's tensors."""
    from .digits import Digits
    from .digits_shadow import Ledger
    from .digits_torch import Memory, TorchDigits

    result.digits = Digits()
    shared = result.digits, Ledger(result.digits), Memory()
    if not has_triton():
        return None, TorchDigits(*shared)
    if interpreted():
        from .digits_triton import TileDigits

        return TileDigits(*shared), TorchDigits(*shared)
    from .digits_compiled_triton import StoredDigits

    return StoredDigits(*shared[:2]), TorchDigits(*shared)


@contextmanager
def watching(result: Trace, tiles=None, tensors=None) -> Iterator[None]:
    """Record in `result` what runs in the `with` block; call the observers `tiles` and `tensors` for every operation.
    Raises RuntimeError if TRITON_INTERPRET=1 was set only after Triton had been imported."""
    with ExitStack() as stack:
        memory: dict[int, list[Site]] = {}
        busy: Callable[[], bool] = lambda: False  # noqa: E731
        if has_triton() and interpreted():
            if interpreted_too_late():
                raise RuntimeError(
                    "trace: TRITON_INTERPRET=1 was set after triton had been imported, which decides then how kernels "
                    "run; set it before Python starts (in a notebook: restart the kernel), or run `flakit trace "
                    "script.py`"
                )
            from .trace_triton import watch_interpreter

            busy = stack.enter_context(watch_interpreter(result, memory, tiles)).running
        elif has_triton():
            from .trace_compiled_triton import watch_compiled

            busy = stack.enter_context(watch_compiled(result, memory, INSTEAD))
            if result.digits is not None and torch.cuda.is_available():  # elsewhere it refuses to launch them
                from .digits_compiled_triton import compare_compiled

                # It copies arguments; these copies are no operations of the script.
                watched, compared = busy, stack.enter_context(compare_compiled(result, tiles, tensors.memory))
                busy = lambda: watched() or compared.running()  # noqa: E731
        stack.enter_context(TorchWatch(result, memory, busy, tensors))
        yield
