"""Where values stop being finite, in Triton kernels and in PyTorch code, forward and backward."""

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
    """Watch what runs in the `with` block, and find the first value that is not finite, and all that came of it.

        with flakit.trace() as t:
            kernel[grid](…)
        print(t)

    Triton kernels are watched in Triton's interpreter (a process started with TRITON_INTERPRET=1), tile by tile, or
    compiled on a GPU, where their source is rewritten first; PyTorch code is watched operation by operation, gradients
    and what custom operators and backwards do among it. See `Trace` for what is found.

    -inf that comes from a constant, a mask or memory is no fault; a NaN is, and an infinity made of finite numbers.
    A load out of bounds gives NaN while traced (0 for integers), a store out of bounds does nothing.
    digits: also compute everything once more in float64, and say in `Trace.digits` which lines lost digits; see
    `Digits`. A compiled kernel is interpreted besides, and what it stored is compared.
    Raises RuntimeError where a kernel can be watched in neither way, with the command to use instead, and for a Triton
    whose interpreter is another than it knows.
    """
    found = Trace()
    tiles, tensors = _shadows(found) if digits else (None, None)
    with watching(found, tiles, tensors):
        yield found
    if tensors is not None:
        tensors.judge()


def _shadows(found: Trace) -> tuple:
    """What tells of the digits of tiles, None where there is no Triton, and of tensors."""
    from .digits import Digits
    from .digits_shadow import Ledger
    from .digits_torch import Memory, TorchDigits

    found.digits = Digits()
    told = found.digits, Ledger(found.digits), Memory()
    if not has_triton():
        return None, TorchDigits(*told)
    if interpreted():
        from .digits_triton import TileDigits

        return TileDigits(*told), TorchDigits(*told)
    from .digits_compiled_triton import StoredDigits

    return StoredDigits(*told[:2]), TorchDigits(*told)


@contextmanager
def watching(found: Trace, tiles=None, tensors=None) -> Iterator[None]:
    """Record in `found` what runs meanwhile; tiles and tensors are told of every operation besides."""
    with ExitStack() as stack:
        memory: dict[int, list[Site]] = {}
        busy: Callable[[], bool] = _no_kernel_runs
        if has_triton() and interpreted():
            if interpreted_too_late():
                raise RuntimeError(
                    "trace: TRITON_INTERPRET=1 was set after triton had been imported, which decides then how kernels "
                    "run; set it before Python starts (in a notebook: restart the kernel), or run `flakit trace "
                    "script.py`"
                )
            from .trace_triton import watch_interpreter

            busy = stack.enter_context(watch_interpreter(found, memory, tiles)).running
        elif has_triton():
            from .trace_compiled_triton import watch_compiled

            busy = stack.enter_context(watch_compiled(found, memory, INSTEAD))
            if found.digits is not None and torch.cuda.is_available():  # elsewhere it refuses to launch them
                from .digits_compiled_triton import compare_compiled

                # It copies arguments, which is none of the script's operations either.
                watched, compared = busy, stack.enter_context(compare_compiled(found, tiles, tensors.memory))
                busy = lambda: watched() or compared.running()  # noqa: E731
        stack.enter_context(TorchWatch(found, memory, busy, tensors))
        yield


def _no_kernel_runs() -> bool:
    return False
