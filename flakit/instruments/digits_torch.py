"""Float64 shadows of PyTorch's tensors, for `trace(digits=True)`: repeats every operation on its operands' shadows.

A shadow belongs to a storage, so that views share it and a write through one is visible through the others. Interpreted
kernels read and write the same shadows.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from .digits import UNIT, Digits, Kind, Output, budget
from .digits_shadow import Births, Ledger, Shadow, anywhere, distance, nobody, product, relative, running, size, summed
from .trace_record import Place

MOST = 1 << 24
"""Tensors with more elements get no shadow, which would cost too much."""

_MOVES = (
    "cat", "stack", "index", "index_select", "gather", "flip", "roll", "clone", "constant_pad_nd", "repeat",
    "select_backward", "slice_backward", "diag_embed", "tril", "triu", "embedding", "unfold_backward",
    "as_strided_scatter", "contiguous", "expand_copy", "view_copy", "masked_select", "take", "take_along_dim",
    "zeros_like", "ones_like", "full_like",
)  # fmt: skip
_IN_PLACE = (
    "copy", "zero", "fill", "index_put", "index_copy", "scatter", "masked_fill", "select_scatter", "slice_scatter",
)  # fmt: skip
_SUMS = ("sum", "mean", "nansum")
_RANDOM = (
    "rand", "bernoulli", "dropout", "multinomial", "normal", "uniform", "exponential", "poisson", "random", "cauchy",
)  # fmt: skip
_NO_DECISION = ("_local_scalar_dense", "equal", "isfinite", "isnan", "isinf", "allclose", "is_nonzero")
_WORDS = {"mul": "multiply", "sub": "subtract", "div": "divide", "_to_copy": "to", "rsub": "subtract"}
_LANES = (
    "mul", "div", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "silu", "relu",
    "reciprocal", "neg", "abs", "pow", "square", "sin", "cos", "erf", "gelu", "softplus", "maximum", "minimum", "clamp",
    "clamp_min", "clamp_max", "threshold_backward", "sigmoid_backward", "tanh_backward", "silu_backward", "where",
    "masked_fill", "log_sigmoid_forward", "sign", "fmod", "remainder", "lerp", "addcmul", "addcdiv",
)  # fmt: skip


RANDOM = "random"
FAILED = "its shadow failed ({})"


class StoredShadow:
    """The float64 shadow of a storage: `exact`, float64 [n] for its n elements, and the `births` of their errors."""

    def __init__(self, x: Tensor):
        storage = x.untyped_storage()
        self.ref, self.dtype, self.itemsize = StorageWeakRef(storage), x.dtype, x.element_size()
        self.n = storage.nbytes() // self.itemsize
        flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (self.n,), (1,))
        self.exact = flat.to(torch.float64, copy=True)  # a view of it would keep the storage alive
        self.births: Births | None = None
        self.missing: Tensor | None = None
        self.absorber = -1
        self.written: np.ndarray | None = None
        self.used, self.anew = True, False
        self.place: Place | None = None
        self.view: tuple | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return the shadow of x, a view of the storage, as a view of `exact`."""
        return _viewed(self.exact, x)

    def follow(self) -> Births:
        """Return each element's `births`, [n]; allocate them, empty, at the first call."""
        if self.births is None:
            self.births = nobody(self.n).moved(lambda z: torch.as_tensor(z, device=self.exact.device))
        return self.births

    def births_at(self, element: np.ndarray) -> Births | None:
        """Return the births of elements of a storage on the CPU, None if no lane is tracked. element: their indices."""
        return self.births and self.births.moved(lambda z: z.numpy()[element])

    def bear(self, element: np.ndarray, births: Births | None) -> None:
        """Store the births of a CPU storage's elements. element: their indices. births: None if no error is tracked."""
        if births is not None or self.births is not None:
            for every, own in zip(self.follow(), births or nobody(element.shape), strict=True):
                every.numpy()[element] = own

    def shadow(self, x: Tensor, values: np.ndarray) -> Shadow:
        exact = _numpy(self.of(x))
        births = self.births and self.births.moved(lambda z: _numpy(_viewed(z, x)))
        if births is not None and not (births.lines >= 0).any():
            births = None
        missing = None if self.missing is None else _numpy(_viewed(self.missing, x))
        error = relative(distance(values, exact), exact)
        return Shadow(exact, births, missing, self.absorber, error, self.anew)

    def keep(self, x: Tensor, shadow: Shadow) -> None:
        """Store the shadow of a view x of the storage, which an operation computed."""
        if shadow.births is not None or self.births is not None:
            for every, own in zip(self.follow(), shadow.births or nobody(x.shape), strict=True):
                _viewed(every, x).copy_(torch.as_tensor(np.array(own)))
        if shadow.missing is not None or self.missing is not None:
            if self.missing is None:
                self.missing = torch.zeros(self.n, dtype=torch.float64, device=self.exact.device)
            _viewed(self.missing, x).copy_(torch.as_tensor(np.array(0.0 if shadow.missing is None else shadow.missing)))
            self.absorber = max(self.absorber, shadow.absorber)
        self.anew = self.anew or shadow.anew

    def values_in(self, storage) -> np.ndarray:
        """Return the elements of any storage of this shadow's dtype (the original's), as float64 [n]."""
        flat = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, 0, (self.n,), (1,))
        return _numpy(flat.double())


class Memory:
    """The shadows of all storages, by address."""

    def __init__(self):
        self._shadows: dict[int, StoredShadow] = {}

    def at(self, address: int) -> StoredShadow | None:
        shadow = self._shadows.get(address)
        if shadow is not None and shadow.ref.expired():
            del self._shadows[address]
            return None
        return shadow

    def of(self, x: Tensor) -> StoredShadow:
        """Return the shadow of x's storage; create it from the storage's values if there is none."""
        address = x.untyped_storage().data_ptr()
        shadow = self.at(address)
        if shadow is None or shadow.dtype != x.dtype or shadow.n * shadow.itemsize != x.untyped_storage().nbytes():
            shadow = self._shadows[address] = StoredShadow(x)
        return shadow

    def new(self, x: Tensor) -> StoredShadow:
        shadow = self._shadows[x.untyped_storage().data_ptr()] = StoredShadow(x)
        return shadow

    def forget(self, x: Tensor) -> None:
        self._shadows.pop(x.untyped_storage().data_ptr(), None)

    def sweep(self) -> None:
        for address in [address for address, shadow in self._shadows.items() if shadow.ref.expired()]:
            del self._shadows[address]

    def alive(self) -> list[StoredShadow]:
        return [shadow for shadow in list(self._shadows.values()) if not shadow.ref.expired()]


class TorchDigits:
    """Compares the result of every PyTorch operation with its shadow, as the observer of a `TorchWatch`."""

    def __init__(self, digits: Digits, ledger: Ledger, memory: Memory):
        self.digits, self.ledger, self.memory = digits, ledger, memory
        self._ran = 0

    def before(self, func, operands: Sequence[Tensor]) -> list[tuple[np.ndarray, Shadow]]:
        """Return an operation's operands as they are before it, with their shadows."""
        followed, changes = [], func._schema.is_mutable
        for x in operands:
            if not _followed(x):
                continue
            values = _numpy(x.detach().to(torch.float64, copy=changes))
            shadow = self.memory.of(x).shadow(x, values)
            followed.append((values, shadow.moved(np.copy) if changes else shadow))
        return followed

    def ran(self, func, name, args, kwargs, operands, before, results: Sequence[Tensor], out, custom, place: Callable):
        """After an operation `func`, called `name` in reports, set the shadows of its results.

        operands, results: the tensors in its arguments and in `out`, what it returned. before: from `self.before`.
        custom: whether it is a custom operator. place: returns (key, `Place`) of the calling line."""
        self._ran += 1
        self._last_args, self._alpha = args, kwargs.get("alpha", 1)
        if self._ran % 256 == 0:
            self.memory.sweep()
        name = name.rstrip("_")
        operands = [x for x in operands if _followed(x)]
        mutable = func._schema.is_mutable
        shares = {x.untyped_storage().data_ptr() for x in operands}
        outs = [x for x in results if _followed(x)]
        if not mutable and outs and all(x.untyped_storage().data_ptr() in shares for x in outs):
            return  # views
        if custom and all(self.memory.at(x.untyped_storage().data_ptr()) is not None for x in outs):
            return  # the operations inside have set the shadows
        if outs and max(x.numel() for x in outs) > 1:
            for x in operands:
                self.memory.of(x).used = True
        if not outs:
            self._decided(func, name, args, kwargs, operands, out, place)
            return
        why = self._hopeless(name, custom, operands, outs, results)
        if why == RANDOM and mutable:
            self.memory.new(outs[0])  # a source of numbers, exact as they are
            return
        shadows = None
        if not why and (operands or mutable):
            shadows, why = self._again(func, args, kwargs, results)
        for n, x in enumerate(results):
            if not _followed(x):
                continue
            exact = None if shadows is None else shadows[n]
            try:
                self._keep(func, name, x, exact, operands, before, place, why, shares)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:  # the script must go on
                self._keep(func, name, x, None, operands, before, place, FAILED.format(type(error).__name__), shares)
        self._last_args = ()  # they would live on

    def _hopeless(self, name: str, custom: bool, operands, outs, results) -> str:
        if custom:
            return "an operator of its own, whose inside was not seen"
        if any(x.is_complex() for x in results):
            return "complex numbers"
        if any(x.numel() > MOST for x in (*outs, *operands)):
            return "a shadow of so large a tensor is too dear"
        if any(word in name for word in _RANDOM) and (operands or "dropout" in name):
            return RANDOM
        return ""

    def _on_shadows(self, args, kwargs) -> tuple[tuple, dict]:
        """Return the arguments with shadows in place of tensors and float64 in place of other dtypes."""

        def shadow(x):
            if isinstance(x, Tensor):
                return self.memory.of(x).of(x) if _followed(x) else x
            return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

        return tree_map(shadow, (args, kwargs))

    def _again(self, func, args, kwargs, results) -> tuple[list | None, str]:
        """Run an operation on the shadows; return the float64 results, or None and the reason that there are none."""

        again, named = self._on_shadows(args, kwargs)
        if func.overloadpacket.__name__ in ("_softmax", "_log_softmax"):
            again = (*again[:2], False)
        try:
            out = func(*again, **named)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return None, f"it has no float64 form ({type(error).__name__})"
        shadows = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        shadows = [x for x in shadows if x.is_floating_point() or x.is_complex()]
        if len(shadows) != len(results) or any(a.shape != b.shape for a, b in zip(shadows, results, strict=True)):
            return None, "its float64 form has another shape"
        return shadows, ""

    def _keep(self, func, name, x, exact, operands, before, place, why, shares) -> None:
        values = _numpy(x.detach().double())
        dtype = str(x.dtype).removeprefix("torch.")
        word = _WORDS.get(name, name)
        in_place = x.untyped_storage().data_ptr() in shares
        if exact is None:
            stored = self.memory.new(x)  # from numbers, or from nothing
            if why:
                self.ledger.anew(place(), word, dtype, values, why)
                stored.anew, stored.used, stored.place, stored.view = True, False, place()[1], self._view(x)
            return
        if in_place:
            stored = self.memory.of(x)
        else:
            stored = self.memory.new(x)
            stored.of(x).copy_(exact)
        shadow = self._shadowed(func, name, word, dtype, x, values, _numpy(stored.of(x)), operands, before, place)
        stored.keep(x, shadow)
        stored.used, stored.place, stored.view = False, place()[1], self._view(x)

    def _shadowed(self, func, name, word, dtype, x, values, exact, operands, before, place) -> Shadow:
        where = place()
        narrower = name in ("_to_copy", "copy") and operands and x.element_size() < operands[-1].element_size()
        if name in _IN_PLACE and not narrower or name in _MOVES and func.namespace == "aten":
            inside = max((s.error for _, s in before), default=0.0)
            births = self._moved(before, exact, name)
            shadow = Shadow(exact, births, error=inside, anew=any(s.anew for _, s in before))
            return self.ledger.carried(where, word, dtype, values, shadow)
        how, kind = None, ""
        fits = all(_broadcasts(y.shape, exact.shape) for y, _ in before)
        if name in ("_to_copy", "copy"):
            kind = Kind.ROUNDING if narrower else ""
            before = before[-1:]
        elif name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm"):
            if name in ("mm", "bmm"):
                how = product
            elif name in ("addmm", "baddbmm") and len(before) == 3:
                before, how = [*before[1:], before[0]], product
            else:
                how = anywhere
        elif name in _SUMS and len(before) == 1:
            axes = self._last_args[1] if len(self._last_args) > 1 else None
            how = summed(None if axes in ([], ()) else axes)
        elif name == "cumsum":
            how = running(self._last_args[1] if len(self._last_args) > 1 else -1)
        elif name in ("add", "sub", "rsub") and len(before) in (1, 2) and fits:
            if len(before) == 1:
                before = self._with_number(before, exact.shape)
            word = "add" if name == "add" else "subtract"
            if name == "rsub":
                before = before[::-1]
            if self._alpha != 1:
                word = name
        elif not (name in _LANES and fits):
            how = anywhere
        return self.ledger.computed(where, word, dtype, values, exact, before, how, kind=kind)

    _last_args: Sequence = ()
    _alpha: float = 1

    def _with_number(self, before, shape):
        """Return both operands of an addition, in order, where `before` has only one: the other is a Python number, an
        integer tensor or the same tensor."""
        known = self._last_args[:2]
        number = [np.full(shape, float(x)) for x in known if isinstance(x, (int, float))]
        if not number:  # an integer tensor
            number = [_numpy(x.double()) for x in known if isinstance(x, Tensor) and not x.is_floating_point()]
        if not number:
            return [before[0], before[0]]  # twice the same tensor
        pair = number[0], Shadow(number[0])
        first = isinstance(known[0], Tensor) and known[0].is_floating_point()
        return [*before, pair] if first else [pair, *before]

    def _moved(self, before, exact, name):
        """Return the births of a result that moves values: the operand's own for an operation that leaves every lane in
        its place (`clone`, `tril`, …), else those of the worst lane for all."""
        known = [(y, s) for y, s in before if s.births is not None]
        if not known:
            return None
        for _, s in known[::-1]:
            if s.births.lines.shape == exact.shape and name in ("clone", "copy", "contiguous", "tril", "triu"):
                return s.births
        return anywhere(exact, known, None)[0]

    def _decided(self, func, name, args, kwargs, operands, out, place) -> None:
        """Record in how many lanes a comparison or an index differs when computed from the shadows."""
        operands = [x for x in operands if _followed(x)]
        if func._schema.is_mutable or name in _NO_DECISION or func.namespace != "aten":
            return
        if all(self.memory.of(x).place is None for x in operands):
            return  # nothing computed went in
        one = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        again, named = self._on_shadows(args, kwargs)
        try:
            exact = [x for x in tree_leaves(func(*again, **named)) if isinstance(x, Tensor)]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            dtype = str(one[0].dtype).removeprefix("torch.") if one else ""
            why = f"whether rounding decides it (its float64 form raises {type(error).__name__})"
            self.ledger.line(place(), name, dtype)[1].unmeasured = why
            return
        for a, b in zip(one, exact, strict=False):
            if a.shape == b.shape and a.numel():
                self.ledger.decided(place(), name, str(a.dtype).removeprefix("torch."), _numpy(a), _numpy(b))

    @staticmethod
    def _view(x: Tensor) -> tuple:
        return tuple(x.shape), x.stride(), x.storage_offset()

    def judge(self) -> None:
        """Compare every tensor that was computed and never used, a result of PyTorch code, with its shadow."""
        for shadow in self.memory.alive():
            if shadow.used or shadow.place is None or shadow.view is None or shadow.dtype == torch.float64:
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(shadow.ref.cdata)
            if storage is None:
                continue
            shape, stride, offset = shadow.view
            if not math.prod(shape):
                continue
            values = torch.from_numpy(shadow.values_in(storage)).as_strided(shape, stride, offset).numpy()
            exact = _numpy(shadow.exact.as_strided(shape, stride, offset))
            births = None if shadow.births is None else _numpy(shadow.births.lines.as_strided(shape, stride, offset))
            dtype = str(shadow.dtype).removeprefix("torch.")
            self.digits.judged(judged(_name(shadow.place), "", dtype, values, exact, births, shadow.anew, shape))


def judged(name, kernel, dtype, values, exact, births, anew, shape, format="") -> Output:
    """Return the `Output` of a result, given as an array of lanes, whose `index` is that of a lane.

    A lane may be wrong by the budget plus its own last rounding, which can be larger for a large lane in 16 bits."""
    off, scale = distance(values, exact), size(exact)
    allowed = max(budget(dtype), budget(format)) * scale
    with np.errstate(invalid="ignore"):
        over, line = off > allowed + UNIT.get(dtype, 0.0) * np.where(np.isfinite(exact), np.abs(exact), 0.0), -1
    counted = np.where(over, off, -1.0) if over.any() else off
    lane = np.unravel_index(int(counted.argmax()), off.shape)
    error = relative(counted[lane], exact)
    if births is not None and over.any():
        if births[lane] >= 0:
            line = int(births[lane])
        else:
            lines = births[over & (births >= 0)]
            line = int(np.bincount(lines).argmax()) if lines.size else -1
    at = tuple(int(i) for i in lane)
    return Output(name, kernel, dtype, tuple(shape), error, at, float(values[lane]), float(exact[lane]),
                  int(over.sum()), line, anew, format=format)  # fmt: skip


def _viewed(flat: Tensor, x: Tensor) -> Tensor:
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def _name(place: Place) -> str:
    words = f"{place.short}  {place.statement}"
    if place.backward:
        words += f" [{place.backward}]"
    return words if len(words) <= 90 else words[:89] + "…"


def _followed(x: Tensor) -> bool:
    return x.is_floating_point() and x.device.type != "meta" and x.layout == torch.strided and x.numel() > 0


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def _broadcasts(one: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(one) <= len(to) and all(a in (1, b) for a, b in zip(one[::-1], to[::-1], strict=False))
