"""Watches every operation of PyTorch for `flakit.trace`: forward, backward and inside custom operators.

A dispatch mode sees each operation with its operands and its result. If autograd calls the operation, no Python line
does; its node knows the line of the forward pass to which it belongs.
"""

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .source import expression_at, operand_names, outside
from .trace_record import DIGITS, LN_BASE, Headroom, How, Operand, Place, Site, Tile, Trace

if TYPE_CHECKING:
    from .digits_rounding import TorchRounding
    from .digits_torch import TorchDigits

_FOLDERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(contextlib.__file__)), __file__, DIGITS)


class TorchWatch(TorchDispatchMode):
    """Records in a trace where PyTorch computes values that are not finite. memory: sites by a storage's address.

    busy: whether an interpreted kernel is running; copies to the host are then the interpreter's. digits: an observer
    of every operation, which may replace its result.
    """

    def __init__(
        self,
        trace: Trace,
        memory: dict[int, list[Site]],
        busy: Callable[[], object] = lambda: False,
        digits: "TorchDigits | TorchRounding | None" = None,
    ):
        super().__init__()
        self.trace, self.memory, self.busy, self.digits = trace, memory, busy, digits
        self._sites: dict = {}
        self._places: dict = {}
        self._anomaly: list[tuple[bool, bool]] = []

    def __enter__(self):
        # In anomaly mode, autograd nodes record the lines that created them; its own check for NaN is not needed.
        self._anomaly.append((torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()))
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        return super().__enter__()

    def __exit__(self, *error):
        torch.autograd.set_detect_anomaly(*self._anomaly.pop())
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.busy():
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        operands = [x for x in tree_leaves((args, kwargs)) if _floating(x)]
        if name.endswith("_like") or name.startswith("new_"):
            operands = []  # only their shapes matter
        before = [_bad(x) for x in operands] if func._schema.is_mutable else None
        custom = func.namespace not in ("aten", "prims", "prim")
        known = self.digits.before(func, operands) if self.digits is not None else None
        out = (self._within(func) if custom else func)(*args, **kwargs)
        results = [x for x in tree_leaves(out) if _floating(x)]
        if self.digits is not None:
            self.digits.ran(func, name, args, kwargs, operands, known, results, out, custom, self._place)
        self.trace.operations += bool(results)
        if name in LN_BASE and operands:
            self._headroom(name, operands[0])
        for x in results:
            if custom and self.memory.get(_storage(x)):
                continue  # its inside was watched
            self._made(name, func, operands, before, x, args, kwargs)
        return out

    def _within(self, func) -> Callable:
        """Return a function that runs a custom operator's kernel under this mode, so that its inside is watched."""
        keys, Key = torch._C.DispatchKeySet, torch._C.DispatchKey

        def call(*args, **kwargs):
            device = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "")
            key = {"cpu": Key.CPU, "cuda": Key.CUDA}.get(device)
            if key is None or not any(
                func.has_kernel_for_dispatch_key(x) for x in (key, Key.CompositeExplicitAutograd)
            ):
                return func(*args, **kwargs)
            with self:
                return func.redispatch(keys(key), *args, **kwargs)

        return call

    def _made(
        self, name: str, func, operands: list[Tensor], before: list[bool] | None, x: Tensor, args, kwargs
    ) -> None:
        storage = _storage(x)
        shares = any(_storage(y) == storage for y in operands)
        if shares and not func._schema.is_mutable:
            return  # a view: its memory does not change
        name = name.rstrip("_")
        if not _bad(x):
            for y, was in zip(operands, before if before else [None] * len(operands), strict=True):
                sites = self.memory.get(_storage(y), ())
                if sites and (was if was is not None else _bad(y)):
                    lanes = sites[-1].first.bad if was is not None else int((~y.isfinite()).sum())
                    sites[-1].masked[self._place()[1], name] += lanes
            if x.numel() * x.element_size() >= x.untyped_storage().nbytes():
                self.memory.pop(storage, None)
            return
        if name == "abs" and self._place()[1].expression.endswith((".isfinite()", ".isinf()")):
            return  # both are computed with abs
        if "empty" in name:
            self.memory.pop(storage, None)
            return  # uninitialised memory
        scalars = any(isinstance(y, float) and not math.isfinite(y) for y in tree_leaves((args, kwargs)))
        written = x if before is not None and shares else None
        wrong = [
            y for i, y in enumerate(operands)
            if (before[i] if written is not None and before is not None else _bad(y))
        ]  # fmt: skip
        known = [site for y in wrong for site in self.memory.get(_storage(y), ())]
        nan = bool(x.isnan().any())
        deliberate = [y for y in wrong if not self.memory.get(_storage(y)) and not _worse(y)]
        if not known and not nan and (scalars or deliberate) and len(deliberate) == len(wrong):
            return  # infinite because of a constant or a mask
        parents = list(known)
        for y in wrong:
            if not self.memory.get(_storage(y)) and _worse(y) and y is not written:
                parents.append(self._found("given", How.GIVEN, y, []))
                self.memory[_storage(y)] = parents[-1:]
        if not wrong and not operands:
            if not _worse(x):
                return
            how = How.GIVEN
        elif not wrong:
            how = How.BORN
        elif nan and not any(y.isnan().any() for y in wrong):
            how = How.BECAME_NAN
        else:
            how = How.CARRIED
        site = self._found(name, how, x, operands if written is None else [y for y in operands if y is not written])
        for parent in parents:
            site.descends_from(parent)
        whole = x.numel() * x.element_size() >= x.untyped_storage().nbytes()
        here = [] if whole else self.memory.get(storage, [])
        self.memory[storage] = [*[s for s in here if s is not site], site]

    def _place(self) -> tuple[tuple, Place]:
        node = torch._C._current_autograd_node()
        frame = outside(sys._getframe(1), _FOLDERS)
        inside = frame is not None and node is not None and _called_by_autograd(frame)
        if node is not None and not inside:
            file, line = _forward_line(node)
            if file:
                forward = (file, line, node.name())
                if forward not in self._places:
                    self._places[forward] = Place(file, line, backward=node.name())
                return forward, self._places[forward]
        if frame is None:
            return ("",), Place("", 0)
        key = (frame.f_code, frame.f_lasti, node.name() if node is not None else "")
        if key not in self._places:
            text = expression_at(frame.f_code, frame.f_lasti)
            self._places[key] = Place(frame.f_code.co_filename, frame.f_lineno, text, backward=key[2])
        return key, self._places[key]

    def _found(self, operation: str, how: str, x: Tensor, operands: list[Tensor]) -> Site:
        key, place = self._place()
        site = self._sites.get((key, operation))
        nan = int(x.isnan().sum())
        inf = int(x.isinf().sum())
        if site is None:
            tile = _tile(x, nan, inf, operands, operation, place)
            site = self._sites[key, operation] = self.trace.add(Site(place, operation, how, tile))
        site.count(nan, inf)
        return site

    def _headroom(self, name: str, x: Tensor) -> None:
        if not x.numel() or x.is_complex():
            return
        largest = x.masked_fill(x.isnan(), -math.inf).max().item()
        key, place = self._place()
        known = self.trace._headroom.get(key)
        if known is not None and largest <= known.largest:
            return
        room = math.log(torch.finfo(x.dtype).max) - largest * LN_BASE[name]
        index = _index(x == largest) if largest > -math.inf else ()
        self.trace._headroom[key] = Headroom(place, name, largest, room, None, index, tuple(x.shape))


def _floating(x: object) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.device.type != "meta"


def _bad(x: Tensor) -> bool:
    return bool(x.numel()) and not x.isfinite().all()


def _worse(x: Tensor) -> bool:
    """Whether x has a bad value other than the -inf of masks."""
    return bool((x.isnan() | (x == math.inf)).any())


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _index(bad: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(bad.to(torch.uint8).flatten().argmax(), bad.shape))


def _called_by_autograd(frame) -> bool:
    """Whether the frame is in a custom backward: PyTorch's call of it lies between the frame and the engine's start."""
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(_FOLDERS[0]):
            if frame.f_code.co_filename.endswith(os.path.join("autograd", "function.py")) and name == "apply":
                return True
            if name in ("_engine_run_backward", "backward") and "autograd" in frame.f_code.co_filename:
                return False
        frame = frame.f_back
    return False


_FILE = re.compile(r'File "([^"]+)", line (\d+), in \S+\n')


def _forward_line(node) -> tuple[str, int]:
    """Return the file and line of the forward pass that created an autograd node; ("", 0) if unknown."""
    for entry in reversed(node.metadata.get("traceback_", ())):
        match = _FILE.search(entry)
        if match and not match[1].startswith(_FOLDERS):
            return match[1], int(match[2])
    return "", 0


def _tile(x: Tensor, nan: int, inf: int, operands: list[Tensor], operation: str, place: Place) -> Tile:
    bad = ~x.isfinite()
    index = _index(bad) if x.dim() else ()
    names = operand_names(place.expression, operation, len(operands)) if operands else ()
    shown = tuple(
        _operand(name or f"operand {i + 1}, {list(y.shape)}", y, index, x.shape)
        for i, (name, y) in enumerate(zip(names, operands, strict=True))
        if not y.is_complex()
    )
    lanes = (bad.to(torch.int8) + x.isnan()).cpu().numpy() if bad.numel() <= 1 << 20 else None
    return Tile(None, tuple(x.shape), str(x.dtype).removeprefix("torch."), index, nan, inf, shown, lanes)


def _operand(name: str, x: Tensor, index: tuple[int, ...], shape: torch.Size) -> Operand:
    finite = x[x.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (math.inf, -math.inf)
    at = x[index].item() if x.shape == shape and x.dim() else None
    return Operand(name, low, high, int(x.isnan().sum()), int(x.isinf().sum()), at)
