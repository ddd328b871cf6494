"""flakit's operators in the layers and models of an installed flash-linear-attention: `flakit.in_place_of_fla()`."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from torch import Tensor

from .ops import rwkv7
from .ops.gsa import chunk_gsa, fused_recurrent_gsa
from .ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from .ops.rwkv7 import RWKV7Output, chunk_rwkv7, fused_mul_recurrent_rwkv7

TESTED = ("0.6.0",)
"""Versions of flash-linear-attention whose layers were run with these operators in them."""


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> RWKV7Output:
    """`flakit.ops.rwkv7.fused_recurrent_rwkv7` with flash-linear-attention's defaults: K^-0.5, and the final state."""
    return rwkv7.fused_recurrent_rwkv7(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


REPLACEMENTS: Mapping[str, tuple[Callable, ...]] = {
    "fla.ops.rwkv6": (chunk_rwkv6, fused_recurrent_rwkv6),
    "fla.ops.rwkv7": (chunk_rwkv7, fused_recurrent_rwkv7, fused_mul_recurrent_rwkv7),
    "fla.ops.gsa": (chunk_gsa, fused_recurrent_gsa),
}
"""flakit's functions by the package whose functions of the same names they replace, wherever a fla module holds
them."""


class InPlaceOfFLA:
    """The result of `in_place_of_fla`. Print it to see every name that was replaced; `undo` puts the originals back."""

    def __init__(self, version: str, originals: Mapping[Callable, Callable]):
        """Replace the functions. originals: flash-linear-attention's function for each of ours."""
        self.version = version
        self._originals = originals
        self._blocks, self._stays = 0, False
        self.replaced = _swap({original: ours for ours, original in originals.items()})
        """What stands in each place now: {"fla.layers.rwkv7.chunk_rwkv7": "flakit.ops.rwkv7.chunk_rwkv7", ...}"""

    def undo(self) -> None:
        """Put the originals back, including in modules imported since; a second call changes nothing."""
        global _now
        if _now is self:
            _now = None
            _swap(self._originals)

    def __enter__(self) -> "InPlaceOfFLA":
        if _now is not self:
            raise RuntimeError("this replacement was undone: call flakit.in_place_of_fla() again")
        self._blocks += 1
        return self

    def __exit__(self, *_) -> None:
        self._blocks -= 1
        if not self._blocks and not self._stays:
            self.undo()

    def __repr__(self) -> str:
        width = max(map(len, self.replaced))
        places = (f"  {place:{width}}  {ours}" for place, ours in self.replaced.items())
        state = "in place of" if _now is self else "no longer in place of"
        return "\n".join([f"flakit {state} flash-linear-attention {self.version}:", *places])


_now: InPlaceOfFLA | None = None


def in_place_of_fla(*, version: str | None = None) -> InPlaceOfFLA:
    """Put flakit's operators where an installed flash-linear-attention's layers and models look theirs up.

    For this process: every attribute of a `fla` module that is one of the seven functions of `REPLACEMENTS` becomes
    flakit's function of that name, in its layers, in `fla.ops` and in what is imported from there later. Nothing else
    of it changes. A name that other code imported from `fla` before stays what it was: call this first.

    As a plain call it holds until `undo`; as a context manager until the block ends. Calls may be nested and repeated:
    the originals return when the outermost block ends, or not before `undo` where a plain call stands around it.

    Args:
        version: a version of flash-linear-attention beside those of `TESTED` that you want to try.

    Returns:
        InPlaceOfFLA, which prints as the list of what it replaced.

    Raises:
        ImportError: flash-linear-attention is not installed.
        RuntimeError: it is of a version that was not tested, or one of its functions takes other arguments than ours.

    >>> print(flakit.in_place_of_fla())
    >>> with flakit.in_place_of_fla():
    ...     loss = model(tokens, labels=tokens).loss
    """
    global _now
    if _now is None:
        _now = InPlaceOfFLA(*_found(version))
    else:
        _now._stays |= not _now._blocks  # called plainly before: no block that begins now may end it
    return _now


def _found(version: str | None) -> tuple[str, dict[Callable, Callable]]:
    """Return the installed version of flash-linear-attention, and its function for each of ours; raise as
    `in_place_of_fla`."""
    try:
        installed = getattr(importlib.import_module("fla"), "__version__", "unknown")
    except ModuleNotFoundError as error:
        if error.name != "fla":
            raise
        raise ImportError(
            f"flash-linear-attention is not installed here: pip install flash-linear-attention=={TESTED[-1]}"
        ) from error
    if installed not in (*TESTED, version):
        raise RuntimeError(
            f"flash-linear-attention: expected version {' or '.join(TESTED)}, got {installed}. Install a tested one, "
            f"or try this one: flakit.in_place_of_fla(version={installed!r}) replaces its functions if they take the "
            f"same arguments; whether they still mean the same is not known"
        )
    originals = {}
    for package, functions in REPLACEMENTS.items():
        module = importlib.import_module(package)
        for ours in functions:
            original = getattr(module, ours.__name__, None)
            wrong = "is not there" if original is None else _differs(original, ours)
            if wrong:
                raise RuntimeError(f"flash-linear-attention {installed}: {package}.{ours.__name__} {wrong}")
            originals[ours] = original
    return installed, originals


def _differs(original: Callable, ours: Callable) -> str | None:
    """Return how the signatures differ in what a call of the original could pass to ours; None if they agree."""
    takes = list(inspect.signature(ours).parameters.values())
    for place, argument in enumerate(inspect.signature(original).parameters.values()):
        if argument.kind is argument.VAR_KEYWORD:
            continue  # names nothing: what it may hold is refused or taken by name when it comes
        mine = takes[place] if place < len(takes) else None
        if mine is None or (mine.name, mine.kind, mine.default) != (argument.name, argument.kind, argument.default):
            ours, theirs = (f"{x} ({x.kind.description})" if x else "none" for x in (mine, argument))
            return f"takes other arguments: expected argument {place + 1} to be {ours}, got {theirs}"
    return None


def _swap(functions: Mapping[Callable, Callable]) -> dict[str, str]:
    """Replace every attribute of a fla module that is one of the keys by its value; return {place: name of the new
    function}."""
    new = {id(old): new for old, new in functions.items()}
    swapped = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "fla" and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if id(value) in new:
                    function = new[id(value)]
                    setattr(module, attribute, function)
                    swapped[f"{name}.{attribute}"] = f"{function.__module__.removesuffix('.api')}.{function.__name__}"
    return swapped
