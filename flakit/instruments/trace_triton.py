"""Watches Triton's interpreter for `flakit.trace`: every tile that it computes, every address that it accesses.

The interpreter is numpy behind `InterpreterBuilder.create_*`. Wrappers around these show each operation with its
operands and its result for the time of a trace, and Python's frames name the line that called it. None of this is
public: `private_names` alone accesses it, and reports a Triton that differs.
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton

from ..ops.common.dispatch import interpreted_alone
from .digits_triton import Observer
from .source import expression_at, operand_names, outside
from .trace_record import DIGITS, DTYPES, LN_BASE, Access, Headroom, How, Place, Site, Tile, Trace, operand

KNOWN = "3.6 and 3.7"
_MOVES = ("splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "bitcast", "int_to_ptr", "ptr_to_int")
_WORDS = {
    "fadd": "add", "fsub": "subtract", "fmul": "multiply", "fdiv": "divide", "precise_divf": "divide", "frem": "modulo",
    "select": "where", "fp_trunc": "to", "fp_ext": "to", "fp_to_fp": "to", "minimumf": "minimum", "minnumf": "minimum",
    "maximumf": "maximum", "maxnumf": "maximum", "clampf": "clamp", "precise_sqrt": "sqrt", "fabs": "abs",
}  # fmt: skip
_COMBINED = {"_sum_combine": "sum", "_elementwise_max": "max", "_elementwise_min": "min", "_prod_combine": "prod"}
_ACROSS = ("dot", "sum", "max", "min", "prod", "cumsum", "cumprod", "reduce", "gather", "cat", "join", "split")
"""Operations whose result mixes or moves lanes of their operands."""

_ONE_TRACE = threading.RLock()
"""Serialises threads: the trace that patched the interpreter last has to restore it first."""


def private_names() -> SimpleNamespace:
    """Return the private names of the interpreter that a trace needs. Raises RuntimeError if one is missing."""
    import triton.language as tl

    try:
        from triton.runtime import interpreter as it

        names = SimpleNamespace(
            builder=it.interpreter_builder, Builder=it.InterpreterBuilder, Handle=it.TensorHandle, Grid=it.GridExecutor,
            Reduction=it.ReduceScanOpInterface, Function=it.InterpretedFunction,
            Rewriter=it.FunctionRewriter, bfloat16=tl.bfloat16, module=it,
            language=tl,
            int1=tl.int1, int32=tl.int32, float32=tl.float32, float64=tl.float64,
        )  # fmt: skip
        wanted: dict[str, tuple[str, ...]] = {
            "Builder": ("create_masked_load", "create_masked_store", "create_fmul", "create_exp", "create_select")
        }
        wanted |= {"Grid": ("_init_args_hst", "__call__"), "Reduction": ("apply",), "Function": ("run",)}
        wanted |= {"Rewriter": ("rewrite_ast", "_compile_and_exec"), "module": ("_patch_lang", "interpreter_semantic")}
        for owner, attributes in wanted.items():
            for attribute in attributes:
                getattr(getattr(names, owner), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"trace: it looks inside Triton's interpreter, as Triton {KNOWN} have it; Triton {triton.__version__} "
            f"has it otherwise ({error})"
        ) from error
    return names


@contextmanager
def watch_interpreter(
    trace: Trace, memory: dict[int, list[Site]], observer: Observer | None = None
) -> Iterator["InterpreterWatch"]:
    """Record in a trace what interpreted kernels do in the `with` block; yield the watch. memory: by a storage's
    address, the sites of its bad values. observer: sees every operation, and may replace its result."""
    watch = InterpreterWatch(trace, memory, private_names(), observer)
    with _ONE_TRACE:
        try:
            with interpreted_alone():  # not in the middle of a launch
                watch.install()
            yield watch
        finally:
            with interpreted_alone():
                watch.remove()


class InterpreterWatch:
    """Records in a trace what Triton's interpreter computes, between `install`, which patches it, and `remove`."""

    def __init__(
        self, trace: Trace, memory: dict[int, list[Site]], names: SimpleNamespace, observer: Observer | None = None
    ):
        self.trace, self.memory, self.names = trace, memory, names
        self.observed, self.observer = observer is not None, observer or Observer()
        self.observer.watch = self
        self._thread: int | None = None  # in which a kernel runs now
        self._tensors: dict[int, tuple[_Argument]] = {}
        self._kernel, self._silent = "", 0
        self._block_base: tuple[_Argument, ...] = ()
        self._sites: dict = {}
        self._places: dict = {}
        self._accesses: dict = {}
        self._replaced = ExitStack()
        self._folders = (str(Path(triton.__file__).parent) + os.sep, __file__, DIGITS)
        self._launcher = names.Grid.__call__.__code__

    def running(self) -> bool:
        """Whether a kernel is running now, in this thread."""
        return self._thread == threading.get_ident()

    @property
    def program(self) -> tuple[int, ...]:
        """The index in the grid of the program that is running."""
        return _plain(self.names.builder.grid_idx)

    def install(self) -> None:
        Builder = self.names.Builder
        for name in dir(Builder):
            kind = name.removeprefix("create_")
            if kind == name or kind in ("load", "store", "barrier", "assert", "print", "assume"):
                continue
            if kind in _MOVES or kind == "addptr":
                self._wrap(Builder, name, self._move, kind)
            elif kind == "masked_load":
                self._wrap(Builder, name, self._load)
            elif kind == "masked_store":
                self._wrap(Builder, name, self._store)
            elif kind in ("atomic_rmw", "atomic_cas"):
                self._wrap(Builder, name, self._add)
            elif kind.startswith(("tensor_pointer_", "descriptor_")):
                self._wrap(Builder, name, self._through_block)
            elif kind.startswith("fcmp") and self.observed:
                self._wrap(Builder, name, self._compare)
            elif not kind.startswith(("icmp", "fcmp", "make_", "get_", "advance", "histogram")):
                self._wrap(Builder, name, self._compute, kind)
        self._wrap(self.names.Reduction, "apply", self._reduce)
        self._wrap(self.names.Grid, "_init_args_hst", self._arguments)
        self._wrap(self.names.Grid, "__call__", self._launch)
        if self.observed:
            self._wrap(self.names.module, "_patch_lang_tensor", self._patch_tensor)

    def _wrap(self, owner: object, name: str, method: Callable, *more: object) -> None:
        """Patch a function: until `remove`, a call of it is method(the original, *more, *its arguments)."""
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            return method(original, *more, *args, **kwargs)

        self._replaced.enter_context(patch.object(owner, name, wrapped))

    def remove(self) -> None:
        self._replaced.close()

    def _launch(self, original, grid, *args, **kwargs):
        with interpreted_alone():
            outer = self._kernel, self._tensors, self._thread
            self._kernel, self._tensors, self._thread = grid.fn.__name__, {}, threading.get_ident()
            known = self.observer.began()
            try:
                with np.errstate(all="ignore"):
                    out = original(grid, *args, **kwargs)
                    self.observer.ended(self._kernel)
                    return out
            finally:
                self.observer.left(known)
                self.trace.grids[self._kernel] = tuple(self.names.builder.grid_dim)
                self._kernel, self._tensors, self._thread = outer

    def _arguments(self, original, grid, args, kwargs):
        args_hst, kwargs_hst = original(grid, args, kwargs)
        named = {**dict(zip(grid.arg_names, args_hst, strict=False)), **kwargs_hst}
        device = {**dict(zip(grid.arg_names, args, strict=False)), **kwargs}
        for name, x in named.items():
            x = getattr(x, "base", x)  # a descriptor's or a reinterpreted tensor
            if isinstance(x, torch.Tensor) and x.data_ptr():
                self._tensors.setdefault(x.data_ptr(), (_Argument(name, x),))
                own = getattr(device[name], "base", device[name])
                self.observer.given(name, x, own.device.type != "cpu")
        return args_hst, kwargs_hst

    def _move(self, original, kind: str, builder, *args):
        """Move values: the result gets the operand's `Site` and the argument it points into."""
        out = original(builder, *args)
        source = next((x for x in args if type(x) is self.names.Handle), None)
        if source is not None:
            known = source.__dict__
            if "site" in known:
                out.site = source.site
            if base := known.get("base") or source.data.dtype == np.uint64 and self._pointed_to(source):
                out.base = base
        self.observer.moved(kind, original, builder, args, out)
        return out

    def _patch_tensor(self, original, tensor, *args):
        """Patch `tl.tensor` as the interpreter does, but for its `x.T`, which is numpy's, unseen: call the builder."""
        builder, tl = self.names.builder, self.names.language

        def turned(tensor):
            rank = len(tensor.shape)
            order = [*range(rank - 2), rank - 1, rank - 2]
            shape = [tensor.shape[i] for i in order]
            return tl.tensor(builder.create_trans(tensor.handle, order), tl.block_type(tensor.dtype, shape))

        original(tensor, *args)
        # Undone with what the interpreter has put there. numpy 2.4 takes no array for a number.
        tensor.T = property(turned)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def _compare(self, original, builder, *args):
        out = original(builder, *args)
        if not self._silent:
            self.observer.compared(original, builder, args, out)
        return out

    def _compute(self, original, kind: str, builder, *args, **kwargs):
        out = original(builder, *args, **kwargs)
        if self._silent:
            return out
        operation = _WORDS.get(kind, kind)
        if operation in LN_BASE:
            self._headroom(operation, args[0])
        self.observer.computed(kind, operation, args, out)
        for part in out if isinstance(out, tuple) else (out,):  # a split has two halves
            if type(part) is self.names.Handle:
                self._made(operation, args, part)
        return out

    def _reduce(self, original, reduction, input):
        if not isinstance(input, tuple):
            return original(reduction, input)
        out = self._silently(original, reduction, input)
        if not self._silent:
            combine = getattr(reduction.combine_fn, "__name__", "")
            operation = _COMBINED.get(combine, combine or "reduce")
            if "Scan" in type(reduction).__name__:
                operation = f"cum{operation}" if operation in ("sum", "prod") else f"scan by {operation}"
            handles = tuple(x.handle for x in input)
            outs, again = [x.handle for x in out], partial(self._again, original, reduction, input)
            self.observer.reduced(reduction, operation, handles, outs, again)
            for x in outs:
                self._made(operation, handles, x)
        return out

    def _silently(self, original, reduction, input):
        """Reduce without recording the operations of its combine function."""
        self._silent += 1
        try:
            return original(reduction, input)
        finally:
            self._silent -= 1

    def _again(self, original, reduction, input, numbers: list) -> list[np.ndarray] | None:
        """Apply the same reduction to float64 numbers; return None where that is impossible."""
        tl, Handle, double = self.names.language, self.names.Handle, self.names.float64
        others = tuple(
            x if y is None
            else tl.tensor(Handle(y, double), tl.block_type(double, list(y.shape)) if x.type.is_block() else double)
            for x, y in zip(input, numbers, strict=True)
        )  # fmt: skip
        try:
            return [x.handle.data for x in self._silently(original, reduction, others)]
        except Exception:  # a user's function may take float32 alone
            return None

    def _values(self, handle) -> Any:
        """Return the numbers of a float tile, bfloat16 as float32; None for anything else."""
        data = handle.data
        if data.dtype.kind == "f":
            return data
        if data.dtype == np.uint16 and handle.dtype.scalar == self.names.bfloat16:
            return (data.astype(np.uint32) << 16).view(np.float32)
        return None

    def _made(self, operation: str, args: tuple, out) -> None:
        x = self._values(out)
        if x is None:
            if out.data.dtype == np.uint64:
                bases = dict.fromkeys(x for y in args for x in getattr(y, "__dict__", {}).get("base", ()))
                if bases:  # of a `where` between pointers there are two
                    out.base = tuple(bases)
            return
        if x is not out.data and operation != "to" and not self.observed:
            self.trace.note(
                f"{self._kernel} computes in bfloat16, which Triton's interpreter does wrongly: use float32 inputs, or "
                f"a trace on a GPU, which compiles the kernel."
            )
        finite = np.isfinite(x)
        if finite.all():
            for y in args:
                if "site" in getattr(y, "__dict__", ()):
                    self._dropped(operation, args, np.zeros_like(finite))
                    break
            return
        self._bad(operation, args, out, x, ~finite)

    def _bad(self, operation: str, args: tuple, out, x: np.ndarray, bad: np.ndarray) -> None:
        operands = [y for y in args if type(y) is self.names.Handle and self._values(y) is not None]
        parents = [y.site for y in operands if "site" in y.__dict__]
        nans = np.isnan(x)
        how = self._how(operation, operands, bad, nans)
        if how != How.BORN and not parents and not nans.any():
            return  # infinite because of a constant
        if parents:
            self._dropped(operation, args, bad)
        tile = partial(self._tile, out, x, bad, nans, operands, operation)
        site = self._found(operation, how, tile, bad, nans)
        for parent in parents:
            site.descends_from(parent)
        out.site = site

    def _how(self, operation: str, operands: list, bad: np.ndarray, nans: np.ndarray) -> str:
        values = [self._values(y) for y in operands]
        if all(np.isfinite(v).all() for v in values):
            return How.BORN
        if operation not in _ACROSS and all(v.shape == bad.shape for v in values):
            if (bad & np.all([np.isfinite(v) for v in values], axis=0)).any():
                return How.BORN
        if nans.any() and not any(np.isnan(v).any() for v in values):
            return How.BECAME_NAN
        return How.CARRIED

    def _dropped(self, operation: str, args: tuple, bad: np.ndarray) -> None:
        """Record non-finite lanes of operands that do not reach the result. bad: mask of its non-finite lanes."""
        if operation == "where":
            condition, one, other = args
            for y, lanes in ((one, condition.data), (other, ~condition.data.astype(bool))):
                if "site" in y.__dict__:
                    self._mask(y.site, "where", int((~np.isfinite(self._values(y)) & ~lanes.astype(bool)).sum()))
            return
        if bad.any():
            return  # carried on, in whatever lanes
        for y in args:
            if "site" in getattr(y, "__dict__", ()):
                self._mask(y.site, operation, int((~np.isfinite(self._values(y))).sum()))

    def _mask(self, site: Site, operation: str, lanes: int) -> None:
        if lanes:
            site.masked[self._place()[1], operation] += lanes

    def _through_block(self, original, builder, pointer, *args, **kwargs):
        outer = self._block_base
        base = getattr(pointer, "base", ())
        self._block_base = base if isinstance(base, tuple) else self._base(base)
        try:
            return original(builder, pointer, *args, **kwargs)
        finally:
            self._block_base = outer

    def _base(self, pointers) -> "tuple[_Argument, ...]":
        """Return the arguments into which pointers may point; empty if unknown."""
        return pointers.__dict__.get("base") or self._block_base or self._pointed_to(pointers)

    def _pointed_to(self, pointer) -> "tuple[_Argument, ...]":
        return self._tensors.get(int(pointer.data.reshape(-1)[0]), ()) if pointer.data.size == 1 else ()

    def _inside(self, operation: str, pointers, mask) -> tuple["list[_Touched]", np.ndarray | None]:
        """Return the arguments that an access touches, each with its lanes, and the lanes to suppress or None."""
        base = self._base(pointers)
        if not base:
            return [], None
        at, on = pointers.data, _lit(mask)
        used = at[on] if not on.all() else at
        first, *others = base
        if not others and (not used.size or (used.min() >= first.start and used.max() <= first.last)):
            return [(first, on)], None
        touched = [(x, on & (at >= x.start) & (at <= x.last)) for x in (first, *others)]
        outside = on & ~np.any([lanes for _, lanes in touched], axis=0)
        if not outside.any():
            return touched, None
        wild = outside.copy()
        for x, _ in touched:
            wild &= (at < x.storage_start) | (at > x.storage_last)
        where = wild if wild.any() else outside
        # Addresses in no argument count for the nearest one.
        away = [np.where(at < x.start, x.start - at, at - np.uint64(x.last)) for x, _ in touched]
        nearest = np.argmin(away, axis=0)
        touched = [(x, lanes | outside & (nearest == n)) for n, (x, lanes) in enumerate(touched)]
        for x, lanes in touched:
            if (lanes & where).any():
                self._beyond(operation, x, at, lanes & where, within=not wild.any())
        return touched, wild if wild.any() else None

    def _beyond(self, operation: str, base: "_Argument", at: np.ndarray, lanes: np.ndarray, within: bool) -> None:
        key, place = self._place()
        access = self._accesses.get((key, operation, within, base.name))
        if access is None:
            index = np.unravel_index(int(lanes.argmax()), lanes.shape)
            access = Access(place, operation, base.name, base.shape, 0, within, self.program, _plain(index), 0)
            self._accesses[key, operation, within, base.name] = access
            self.trace.accesses.append(access)
        touched = at[lanes].astype(np.int64)
        past, before = touched.max() - base.last, touched.min() - base.start
        furthest = past if past >= -before else before
        if abs(furthest) // base.itemsize > abs(access.beyond):
            access.beyond = int(np.sign(furthest)) * (int(abs(furthest)) // base.itemsize)
        access.lanes += int(lanes.sum())
        access.programs.add(self.program)

    def _load(self, original, builder, pointers, mask, other, *args, **kwargs):
        touched, wild = self._inside("load", pointers, mask)
        if wild is not None:
            mask = self.names.Handle(_lit(mask) & ~wild, self.names.int1)
        out = original(builder, pointers, mask, other, *args, **kwargs)
        x = self._values(out)
        if wild is not None and x is not None:
            if x is out.data:
                x[wild] = np.nan
            else:
                out.data[wild], x = 0x7FC0, np.where(wild, np.nan, x)
        if not self._silent:
            self.observer.loaded(touched, pointers, _lit(mask), other, out)
        if x is not None and not self._silent:
            bad = ~np.isfinite(x) & _lit(mask)
            if wild is not None:
                bad |= wild
            nans = np.isnan(x) & bad
            if (bad & (nans | (x > 0))).any():  # masks, and decays that forget all, use -inf
                how = How.READ if wild is None else How.BEYOND
                read = [argument for argument, lanes in touched if (lanes & bad).any()]
                into = ", ".join(argument.name for argument in read)
                site = self._found("load", how, partial(self._tile, out, x, bad, nans, [], "load"), bad, nans, into)
                for argument in read:
                    for writer in self.memory.get(argument.storage_start, ()):
                        site.descends_from(writer)
                out.site = site
            elif other is not None and "site" in other.__dict__:
                out.site = other.site
        return out

    def _store(self, original, builder, pointers, value, mask, *args, **kwargs):
        touched, wild = self._inside("store", pointers, mask)
        if wild is not None:
            mask = self.names.Handle(_lit(mask) & ~wild, self.names.int1)
        self._stored("store", touched, value, mask)
        self.observer.stored(touched, pointers, value, _lit(mask))
        return original(builder, pointers, value, mask, *args, **kwargs)

    def _add(self, original, builder, *args, **kwargs):
        # (operation, pointers, value, mask, …), or (pointers, compared, value, …)
        by_mask = not hasattr(args[0], "data")
        pointers, value = (args[1], args[2]) if by_mask else (args[0], args[2])
        mask = args[3] if by_mask else self.names.Handle(np.ones_like(pointers.data, dtype=bool), self.names.int1)
        touched, wild = self._inside("atomic", pointers, mask)
        if wild is not None and by_mask:
            mask = self.names.Handle(_lit(mask) & ~wild, self.names.int1)
            args = (*args[:3], mask, *args[4:])
        self._stored("atomic", touched, value, mask)
        out = original(builder, *args, **kwargs)
        word = getattr(args[0], "name", "CAS") if by_mask else "CAS"
        self.observer.added(word, touched, pointers, value, _lit(mask), out)
        return out

    def _stored(self, operation: str, touched: "list[_Touched]", value, mask) -> None:
        if "site" not in value.__dict__:
            return
        x = self._values(value)
        if x is None:
            return
        wrong, on = ~np.isfinite(x), _lit(mask)
        self._mask(value.site, "the store's mask", int((wrong & ~on).sum()))
        nowhere: list[tuple[_Argument | None, np.ndarray]] = [(None, on)]
        for argument, lanes in touched or nowhere:
            bad = wrong & on & lanes
            if not bad.any():
                continue
            nans = np.isnan(x) & bad
            into = argument.name if argument else ""
            tile = partial(self._tile, value, x, bad, nans, [], operation)
            site = self._found(operation, How.STORED, tile, bad, nans, into)
            site.descends_from(value.site)
            if argument is not None:
                reached = self.memory.setdefault(argument.storage_start, [])
                if site not in reached:
                    reached.append(site)

    def _place(self) -> tuple[tuple, Place]:
        """Return the current place in the kernel: a key, and the `Place` with its callers."""
        frame = outside(sys._getframe(1), self._folders)
        inner, calls, via = frame, [], []
        while frame is not None and frame.f_code is not self._launcher:
            if not frame.f_code.co_filename.startswith(self._folders):
                calls.append((frame.f_code, frame.f_lasti))
                via.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        key = tuple(calls)
        if key not in self._places:
            assert inner is not None  # a kernel's own line is running
            code = inner.f_code
            text = expression_at(code, inner.f_lasti, dedented=True)
            place = Place(code.co_filename, inner.f_lineno, text, self._kernel, via=tuple(reversed(via[1:])))
            self._places[key] = place
        return key, self._places[key]

    def _found(self, operation: str, how: str, tile, bad: np.ndarray, nans: np.ndarray, into: str = "") -> Site:
        key, place = self._place()
        site = self._sites.get((key, operation, into))
        if site is None:
            site = self._sites[key, operation, into] = self.trace.add(Site(place, operation, how, tile(place), into))
        number = int(nans.sum())
        site.count(number, int(bad.sum()) - number, self.program)
        return site

    def _tile(self, out, x: np.ndarray, bad: np.ndarray, nans: np.ndarray, operands, operation: str, place: Place):
        index = _plain(np.unravel_index(int(bad.argmax()), bad.shape))
        names = operand_names(place.expression, operation, len(operands)) if operands else ()
        shown = [
            operand(name or f"operand {i + 1}", self._values(y), index, x.shape)
            for i, (name, y) in enumerate(zip(names, operands, strict=True))
        ]
        number = int(nans.sum())
        shape, dtype = x.shape if x.size > 1 or x.ndim > 1 else (), out.dtype.scalar.name
        lanes = bad.astype(np.int8) + nans if bad.size <= 1 << 20 else None
        return Tile(
            self.program, shape, DTYPES.get(dtype, dtype), index if shape else (), number, int(bad.sum()) - number,
            tuple(shown), lanes,
        )  # fmt: skip

    def _headroom(self, operation: str, handle) -> None:
        x = self._values(handle)
        if x is None or not x.size:
            return
        if np.isnan(x).all():
            return
        largest = np.nanmax(x)
        key, place = self._place()
        known = self.trace._headroom.get(key)
        if known is not None and largest <= known.largest:
            return
        top = float(np.finfo(x.dtype).max) if x is handle.data else 3.3895314e38
        room = math.log(top) - float(largest) * LN_BASE[operation]
        index = _plain(np.unravel_index(int(np.nan_to_num(x, nan=-np.inf).argmax()), x.shape))
        self.trace._headroom[key] = Headroom(
            place, operation, float(largest), room, self.program, index, _plain(x.shape)
        )


class _Argument:
    """A tensor argument of a kernel: the addresses of its first and last elements, and of its storage."""

    def __init__(self, name: str, x: torch.Tensor):
        self.name, self.shape, self.itemsize = name, tuple(x.shape), x.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
        self.start = x.data_ptr()
        self.last = self.start + reach * self.itemsize
        storage = x.untyped_storage()
        self.storage_start = storage.data_ptr()
        self.storage_last = self.storage_start + storage.nbytes() - self.itemsize


_Touched = tuple[_Argument, np.ndarray]


def _lit(mask) -> np.ndarray:
    """Return a mask as a boolean array, True for active lanes. mask: an array for block pointers, a tile for others."""
    return np.asarray(mask.data).astype(bool)


def _plain(index) -> tuple[int, ...]:
    return tuple(int(i) for i in index)
