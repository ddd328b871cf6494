"""Float64 shadows of the tiles of interpreted kernels, for `trace(digits=True)`.

Every operation that a `trace_triton.InterpreterWatch` reports is repeated in float64. If the interpreter rounds
differently from a GPU, its result is replaced by that of a GPU, and a note says so: casts to bfloat16 (the interpreter
truncates), arithmetic in bfloat16 (it adds up bit patterns), and products whose operands a GPU rounds to TF32.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .digits import Digits, Kind, Output
from .digits_shadow import Births, Ledger, Shadow, anywhere, distance, nobody, product, relative, running, summed
from .digits_torch import FAILED, Memory, StoredShadow, judged
from .trace_record import DTYPES

_SAME: dict[str, Callable] = {
    "fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide, "precise_divf": np.divide,
    "frem": np.fmod, "minimumf": np.minimum, "minnumf": np.fmin, "maximumf": np.maximum, "maxnumf": np.fmax,
    "clampf": np.clip, "fma": lambda x, y, z: x * y + z, "exp": np.exp, "exp2": np.exp2, "log": np.log,
    "log2": np.log2, "sqrt": np.sqrt, "precise_sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
    "cos": np.cos, "floor": np.floor, "ceil": np.ceil, "fabs": np.abs,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
}  # fmt: skip
_CASTS = ("fp_trunc", "fp_ext", "fp_to_fp")
_CHANGES = {
    "cat": lambda a, b: np.concatenate([a, b]),
    "join": lambda a, b: np.stack([a, b], axis=-1),
}
BFLOAT16 = "Casts to bfloat16 and arithmetic in it round to the nearest, as a GPU does and the interpreter does not."
AS_TF32 = (
    "Where a product of float32 tiles asks for TF32 (tl.dot's default), its operands are rounded to it by a cast: the "
    "interpreter itself ignores input_precision. The order in which a GPU adds is not imitated."
)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, ties to even; return the bits as uint16, in the shape of x."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up = bits + (0x7FFF + ((bits >> 16) & 1))
    return np.where(np.isnan(x), 0x7FC0, up >> 16).astype(np.uint16).reshape(x.shape)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 numbers to TF32, ten mantissa bits, ties away from zero; return them as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x1000) & 0xFFFFE000).view(np.float32).reshape(x.shape)
    return np.where(np.isfinite(x), rounded, x)


class Observer:
    """An observer of an `InterpreterWatch`, its `watch`, which calls these methods after each operation; they may
    replace the result. This one ignores all of them."""

    watch: Any = None

    def ignore(self, *_) -> Any:
        pass

    began = ended = left = given = moved = computed = compared = reduced = loaded = stored = added = ignore


class TileDigits(Observer):
    """Compares every operation of interpreted kernels with its shadow."""

    def __init__(self, digits: Digits, ledger: Ledger, memory: Memory):
        self.digits, self.ledger, self.memory = digits, ledger, memory
        self._tensors: dict[int, tuple[str, torch.Tensor, StoredShadow]] = {}
        self._stored: dict[int, None] = {}  # storages, in the order in which they were first written

    def _values(self, handle) -> Any:
        """Return the numbers of a float tile; None for anything else."""
        return self.watch._values(handle)

    def of(self, handle) -> Shadow:
        """Return the shadow of a tile; a constant without one is its own shadow."""
        shadow = handle.__dict__.get("shadow")
        if shadow is None:
            shadow = handle.shadow = Shadow(self._values(handle).astype(np.float64))
        return shadow

    def _pairs(self, handles) -> list[tuple[np.ndarray, Shadow]]:
        return [(self._values(x), self.of(x)) for x in handles]

    def _dtype(self, handle) -> str:
        name = handle.dtype.scalar.name
        return DTYPES.get(name, name)

    def _anew(self, operation: str, out, why: str) -> None:
        out.shadow = self.ledger.anew(self.watch._place(), operation, self._dtype(out), self._values(out), why)

    def _carried(self, operation: str, out, shadow: Shadow) -> None:
        """Set the shadow of `out`, the result of an operation that only moves values."""
        where, dtype, x = self.watch._place(), self._dtype(out), self._values(out)
        out.shadow = self.ledger.carried(where, operation, dtype, x, shadow, self.watch.program)

    def _record(
        self, operation: str, out, exact: np.ndarray, pairs, how: Callable | None = None, kind: str = ""
    ) -> None:
        """Set the shadow of `out`, which an operation computed; exact, pairs, how, kind: as in `Ledger.computed`."""
        where, dtype, x = self.watch._place(), self._dtype(out), self._values(out)
        out.shadow = self.ledger.computed(where, operation, dtype, x, exact, pairs, how, self.watch.program, kind)

    def moved(self, kind: str, original, builder, args, out) -> None:
        if self._values(out) is None:
            return
        source = next((x for x in args if type(x) is self.watch.names.Handle), None)
        if source is None or kind == "bitcast" or self._values(source) is None:
            if source is not None:
                self._anew(kind, out, "the bits of a number read as another's")
            return
        if "shadow" not in source.__dict__:
            return
        Handle, double = self.watch.names.Handle, self.watch.names.float64
        types = {"f": double, "i": self.watch.names.int32}

        def move(z: np.ndarray) -> np.ndarray:
            z = np.asarray(z, np.float64) if z.dtype.kind == "f" else z
            tile = Handle(z, types[z.dtype.kind])
            return original(builder, *[tile if x is source else x for x in args]).data

        out.shadow = self.of(source).moved(move)

    def computed(self, kind: str, operation: str, args, out) -> None:
        """Set the shadow of `out`, the result of an operation; replace its values if a GPU rounds them differently.

        kind: the name of the builder's method without "create_". args: its arguments; tiles are tensor handles."""
        try:
            self._computed(kind, operation, args, out)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # the kernel must go on
            for part in out if isinstance(out, tuple) else (out,):
                if self._values(part) is not None:
                    self._anew(operation, part, FAILED.format(type(error).__name__))

    def _computed(self, kind: str, operation: str, args, out) -> None:
        if isinstance(out, tuple):
            for n, part in enumerate(out):
                if self._values(part) is not None:
                    part.shadow = self.of(args[0]).moved(operator.itemgetter((..., n)))
            return
        if self._values(out) is None:
            if kind in ("fp_to_si", "fp_to_ui") and self._values(args[0]) is not None:
                exact = np.trunc(self.of(args[0]).exact)
                self.ledger.decided(self.watch._place(), operation, "integer", np.trunc(self._values(args[0])), exact)
            return
        Handle = self.watch.names.Handle
        operands = [x for x in args if type(x) is Handle and self._values(x) is not None]
        dtype = self._dtype(out)
        if kind in _CASTS:
            self._cast(operation, args, out, dtype)
        elif kind == "dot":
            self._dot(args, out)
        elif kind == "select":
            self._select(args, out)
        elif kind in ("si_to_fp", "ui_to_fp"):
            exact = args[0].data.astype(np.float64)
            if dtype == "bfloat16":
                out.data = to_bfloat16(exact)
            self._record(operation, out, exact, [])
        elif kind in _SAME:
            self._bfloat16(kind, operands, out)
            pairs = self._pairs(operands)
            self._record(operation, out, _SAME[kind](*(s.exact for _, s in pairs)), pairs)
        elif kind == "gather":
            source, indices, axis = args[0], args[1].data, args[2]
            shadow = self.of(source).moved(lambda z: np.take_along_axis(z, indices, axis=axis))
            self._carried(operation, out, shadow)
        elif kind in _CHANGES and len(operands) == 2:
            out.shadow = _merged(_CHANGES[kind], *map(self.of, operands))
        elif not operands and not any(type(x) is Handle for x in args):
            return  # a constant
        else:
            self._anew(operation, out, "an operation that no shadow follows")

    def _bfloat16(self, kind: str, operands, out) -> None:
        bfloat16 = self.watch.names.bfloat16
        if not any(x.dtype.scalar == bfloat16 for x in operands):
            return
        values = _SAME[kind](*(self._values(x) for x in operands))
        if out.dtype.scalar == bfloat16:
            out.data = to_bfloat16(values)
        else:
            out.data = np.asarray(values, out.data.dtype)
        self.digits.note(BFLOAT16)

    def _cast(self, operation: str, args, out, dtype: str) -> None:
        source = args[0]
        x = self._values(source)
        if x is None:
            self._anew(operation, out, "a number format that no shadow follows")
            return
        rounding = args[2] if len(args) > 2 else None
        if dtype == "bfloat16" and getattr(rounding, "name", "RTNE") == "RTNE":
            out.data = to_bfloat16(x)
            self.digits.note(BFLOAT16)
        narrower = out.dtype.scalar.primitive_bitwidth < source.dtype.scalar.primitive_bitwidth
        shadow = self.of(source)
        self._record(operation, out, shadow.exact, [(x, shadow)], kind=Kind.ROUNDING if narrower else "")
        out.shadow.missing, out.shadow.absorber = shadow.missing, shadow.absorber

    def _dot(self, args, out) -> None:
        a, b, d = args[:3]
        x, y, z = (self._values(h) for h in (a, b, d))
        if x is None or y is None or z is None:
            self._anew("dot", out, "a product of integers, or of eight-bit numbers")
            return
        sa, sb, sd = self.of(a), self.of(b), self.of(d)
        precision, kind = getattr(args[3], "name", str(args[3])) if len(args) > 3 else "", ""
        if precision == "TF32" and x.dtype == y.dtype == np.float32 and x is a.data and y is b.data:
            left, right = to_tf32(x), to_tf32(y)
            if (left != x).any() or (right != y).any():
                kind = Kind.TF32
                out.data = np.matmul(left, right, dtype=z.dtype) + z
            self.digits.note(AS_TF32)
        elif x is not a.data or y is not b.data:
            out.data = np.matmul(x, y, dtype=np.float32).astype(z.dtype) + z
            self.digits.note(BFLOAT16)
        self._record("dot", out, sa.exact @ sb.exact + sd.exact, [(x, sa), (y, sb), (z, sd)], product, kind)

    def _select(self, args, out) -> None:
        condition, one, other = args
        if self._values(one) is None:
            return
        lit, a, b = condition.data.astype(bool), self.of(one), self.of(other)
        shadow = _merged(lambda x, y: np.where(lit, x, y), a, b)
        if a.missing is not None or b.missing is not None:
            gone = [0.0 if s.missing is None else s.missing for s in (a, b)]
            shadow.missing, shadow.absorber = np.where(lit, *gone), max(a.absorber, b.absorber)
        self._carried("where", out, shadow)

    def compared(self, original, builder, args, out) -> None:
        """Repeat a comparison of float tiles on their shadows; redo one of bfloat16, whose bits `original` compares."""
        if any(x.dtype.scalar == self.watch.names.bfloat16 for x in args):
            Handle, single = self.watch.names.Handle, self.watch.names.float32
            out.data = original(builder, *(Handle(self._values(x), single) for x in args)).data
            self.digits.note(BFLOAT16)
        if any("shadow" in x.__dict__ and x.shadow.error for x in args):
            Handle, double = self.watch.names.Handle, self.watch.names.float64
            exact = original(builder, *(Handle(self.of(x).exact, double) for x in args)).data
            self.ledger.decided(self.watch._place(), "comparison", "bool", out.data, exact)

    def reduced(self, reduction, operation: str, handles, outs, again) -> None:
        """Set the shadows of `outs`, the results of a reduction or scan of the tiles `handles`. again: a function that
        applies the same one to float64 arrays, and returns None where it cannot."""
        values = [self._values(h) for h in handles]
        where, axis = self.watch._place, reduction.axis
        if len(handles) == 1 and values[0] is not None and operation in ("sum", "cumsum"):
            (out,), (h,) = outs, handles
            if h.dtype.scalar == self.watch.names.bfloat16:
                self._anew(operation, out, "a sum in bfloat16, which the interpreter does wrongly")
                return
            s = self.of(h)
            if operation == "sum":
                exact, how = s.exact.sum(axis=axis, keepdims=reduction.keep_dims), summed(axis)
            else:
                turned = np.flip(s.exact, axis) if reduction.reverse else s.exact
                exact = np.cumsum(turned, axis=axis)
                exact, how = np.flip(exact, axis) if reduction.reverse else exact, running(axis, reduction.reverse)
            self._record(operation, out, np.asarray(exact).reshape(self._values(out).shape), [(values[0], s)], how)
            return
        floats = [h for h, x in zip(handles, values, strict=True) if x is not None]
        if not floats:
            return
        exact = again([self.of(h).exact if x is not None else None for h, x in zip(handles, values, strict=True)])
        pairs = self._pairs(floats)
        for n, out in enumerate(outs):
            x = self._values(out)
            if x is None:
                if exact is not None:
                    self.ledger.decided(where(), operation, "integer", out.data, exact[n].reshape(out.data.shape))
            elif exact is None:
                self._anew(operation, out, "its function has no float64 form")
            else:
                self._record(operation, out, exact[n].reshape(x.shape), pairs, anywhere)

    def given(self, name: str, x: torch.Tensor, on_device: bool) -> None:
        """Register an argument of the kernel that begins. on_device: it is a copy of a GPU's tensor."""
        address = x.untyped_storage().data_ptr()
        if x.is_floating_point() and x.numel() and address not in self._tensors:
            self._tensors[address] = name, x, self.memory.of(x)
            if on_device:
                self.digits.note("An argument on a GPU is copied for the interpreter, and taken as exact.")

    def began(self) -> tuple:
        """Begin a kernel; return the state of one that is running, for `left`."""
        outer = self._tensors, self._stored
        self._tensors, self._stored = {}, {}
        return outer

    def left(self, outer: tuple) -> None:
        self._tensors, self._stored = outer

    def ended(self, kernel: str) -> None:
        """End a kernel: compare each tensor that it wrote with its shadow."""
        for address in self._stored:
            name, x, shadow = self._tensors[address]
            on = shadow.written
            if on is None:
                continue
            flat = np.flatnonzero(on)
            if not flat.size or shadow.dtype == torch.float64:
                continue
            values = shadow.values_in(x.untyped_storage())[flat]
            self.digits.judged(stored_output(name, kernel, x, shadow, flat, values)[0])

    def _there(self, argument, at: np.ndarray, lanes: np.ndarray, dtype: str) -> tuple[StoredShadow | None, np.ndarray]:
        """Return the shadow of an argument's memory, and the indices of the elements that the lanes access. The shadow
        is None if the memory is accessed as another dtype than its tensor's."""
        known = self._tensors.get(argument.storage_start)
        if known is None:
            return None, at
        shadow = known[2]
        element = ((at[lanes] - np.uint64(argument.storage_start)) // np.uint64(shadow.itemsize)).astype(np.int64)
        if str(shadow.dtype).removeprefix("torch.") != dtype:
            return None, element
        return shadow, element

    def loaded(self, touched, pointers, on: np.ndarray, other, out) -> None:
        x = self._values(out)
        if x is None:
            return
        dtype, where = self._dtype(out), self.watch._place()
        shadow = Shadow(x.astype(np.float64))
        if other is not None and "shadow" in other.__dict__:
            shadow.exact = np.where(on, shadow.exact, other.shadow.exact)
        for argument, lanes in touched:
            lanes = lanes & on
            memory, element = self._there(argument, pointers.data, lanes, dtype)
            if memory is None:
                if argument.storage_start in self._tensors:
                    shadow = self.ledger.anew(where, "load", dtype, x, "memory read as another type")
                continue
            wrong = element >= memory.n
            element = np.where(wrong, 0, element)
            shadow.exact[lanes] = np.where(wrong, shadow.exact[lanes], memory.exact.numpy()[element])
            shadow.anew |= memory.anew
            births = memory.births_at(element)
            if births is not None and (births.lines >= 0).any():
                shadow.births = shadow.births or nobody(x.shape)
                for every, own in zip(shadow.births, births, strict=True):
                    every[lanes] = own
        shadow.error = relative(distance(x, shadow.exact), shadow.exact)
        out.shadow = self.ledger.carried(where, "load", dtype, x, shadow, self.watch.program)

    def stored(self, touched, pointers, value, on: np.ndarray) -> None:
        x = self._values(value)
        for argument, lanes in touched:
            lanes = lanes & on
            dtype = "" if x is None else self._dtype(value)
            memory, element = self._there(argument, pointers.data, lanes, dtype)
            if memory is None:
                self._rewritten(argument, x)
                continue
            self._written(argument, memory, element)
            shadow = self.of(value)
            inside = element < memory.n

            def lanes_of(z, lanes=lanes, inside=inside):
                return np.broadcast_to(z, lanes.shape)[lanes][inside]

            memory.exact.numpy()[element[inside]] = lanes_of(shadow.exact)
            memory.bear(element[inside], shadow.births and shadow.births.moved(lanes_of))
            memory.anew |= shadow.anew
        if x is not None:
            shadow = self.of(value)
            self.ledger.carried(self.watch._place(), "store", self._dtype(value), x, shadow, self.watch.program)

    def _written(self, argument, memory: StoredShadow, element: np.ndarray) -> None:
        if memory.written is None:
            memory.written = np.zeros(memory.n, bool)
        memory.written[element[element < memory.n]] = True
        memory.used = True  # judged when the kernel ends
        self._stored[argument.storage_start] = None

    def _rewritten(self, argument, x) -> None:
        """Restart the shadow of an argument's memory, written as bits of another type. x: floats stored, or None."""
        known = self._tensors.get(argument.storage_start)
        if known is None or x is not None and known[2].dtype == torch.float64:
            return
        name, tensor, _ = known
        memory = self.memory.new(tensor)
        memory.anew = True
        self._tensors[argument.storage_start] = name, tensor, memory
        where = self.watch._place()
        self.ledger.anew(where, "store", "bits", np.zeros(1), f"{name} is written as numbers of another type")

    def added(self, operation: str, touched, pointers, value, on: np.ndarray, out) -> None:
        """Set the shadows after an atomic operation. touched: by argument of the kernel, the mask of lanes that access
        it. pointers, value, on: the operands and the mask. out: the result, the values in memory before."""
        x, where = self._values(value), self.watch._place()
        if x is None:
            for argument, _ in touched:
                if argument.storage_start in self._tensors:
                    self._rewritten(argument, None)
            return
        for argument, lanes in touched:
            lanes = lanes & on
            memory, element = self._there(argument, pointers.data, lanes, self._dtype(value))
            if memory is None:
                continue
            self._written(argument, memory, element)
            s, elements = self.of(value), memory.exact.numpy()

            def on_lanes(z, lanes=lanes):
                return np.broadcast_to(z, lanes.shape)[lanes]

            before = elements[element].copy()
            mine = on_lanes(s.exact)
            if operation == "FADD":
                np.add.at(elements, element, mine)
            elif operation == "XCHG":
                elements[element] = mine
            else:
                values = memory.values_in(self._tensors[argument.storage_start][1].untyped_storage())
                elements[element] = values[element]
                memory.anew = True
                self.ledger.anew(where, "atomic", self._dtype(value), x, f"atomic {operation}")
                continue
            now = memory.values_in(self._tensors[argument.storage_start][1].untyped_storage())[element]
            was = on_lanes(self._values(out))
            old = Shadow(before, memory.births_at(element), error=relative(distance(was, before), before))
            addend = Shadow(mine, s.births and s.births.moved(on_lanes), error=s.error)
            pairs = [(was, old), (on_lanes(x), addend)]
            word = "add" if operation == "FADD" else "atomic"
            shadow = self.ledger.computed(
                where, word, self._dtype(value), now, elements[element], pairs, None, self.watch.program
            )
            memory.bear(element, shadow.births)
        back = self._values(out)
        if back is not None:
            out.shadow = Shadow(back.astype(np.float64), anew=True)


def _merged(merge: Callable[[np.ndarray, np.ndarray], np.ndarray], a: Shadow, b: Shadow) -> Shadow:
    """Return the shadow of a tile whose lanes come from two others. merge: does so with two arrays."""
    shadow = Shadow(merge(a.exact, b.exact), error=max(a.error, b.error), anew=a.anew or b.anew)
    if a.births is not None or b.births is not None:
        both = (s.births or nobody(s.exact.shape) for s in (a, b))
        shadow.births = Births(*(merge(*pair) for pair in zip(*both, strict=True)))
    return shadow


def stored_output(
    name: str, kernel: str, x: torch.Tensor, shadow: StoredShadow, at: np.ndarray, values: np.ndarray, format: str = ""
) -> tuple[Output, int]:
    """Return the `Output` of a kernel's argument x, and the position of its worst lane in `at`. at, values: indices of
    elements of x's storage and what was stored there, [n] each. format: as in `judged`."""
    births = None if shadow.births is None else shadow.births.lines.numpy()[at]
    dtype, exact = str(shadow.dtype).removeprefix("torch."), shadow.exact.numpy()[at]
    output = judged(name, kernel, dtype, values, exact, births, shadow.anew, x.shape, format)
    (lane,), index = output.index, {}
    left = int(at[lane] - x.storage_offset())
    for stride, axis in sorted(zip(x.stride(), range(x.ndim), strict=True), reverse=True):
        index[axis], left = divmod(left, stride) if stride else (0, left)
    output.index = tuple(index[axis] for axis in range(x.ndim))
    return output, lane
