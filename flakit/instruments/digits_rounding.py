"""Estimates lost digits without a float64 shadow: perturbs every rounding at random in several runs, and compares them.

The result of each operation that rounds is multiplied by 1 + u x, with x uniform in -1 … 1 and u the rounding of its
dtype. Digits in which the runs differ come from rounding alone. Values that are loaded, moved, selected or masked stay
unchanged; a systematic rounding (an addend that vanishes, a gate that becomes 1) may escape.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Group
from rich.text import Text

from ..numerics.words import number
from .digits import UNIT, right
from .digits_torch import _LANES, _RANDOM, _SUMS, _WORDS
from .digits_triton import _SAME, Observer, to_bfloat16
from .trace_record import DTYPES, Place, Trace, grid, restored_place

KEPT, MOST = 4, 1 << 14
"""Limits of what is compared: the first and the last tiles of a line, and elements of each."""
_ROUNDING = (
    *_LANES, *_SUMS, "add", "sub", "rsub", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "cumsum", "_to_copy",
    "_softmax",
)  # fmt: skip
_CHOOSING = ("fabs", "minimumf", "maximumf", "minnumf", "maxnumf", "clampf", "floor", "ceil")
_EXACT = ("neg", "abs", "relu", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "sign")


@dataclass(frozen=True)
class Spread:
    """The spread of a line or a stored tensor between runs: the largest deviation of a lane over its tile's RMS."""

    place: Place
    operation: str
    spread: float


class Rounds:
    """The result: `spreads` of several runs by line, largest first. repeatable: whether all runs had equal inputs."""

    def __init__(self, runs: int, spreads: list[Spread], repeatable: bool):
        self.runs, self.spreads, self.repeatable = runs, spreads, repeatable

    @classmethod
    def of(cls, run: Callable[[], object], runs: int) -> "Rounds":
        """Call `run` `runs` times under a trace, each time with other roundings; it has to start from the same numbers.
        Raises ValueError for fewer than two runs."""
        if runs < 2:
            raise ValueError(f"runs: expected two or more, which can differ, got {runs}")
        from .trace import watching

        observers = []
        for seed in range(runs):
            record = _Record(seed)
            with watching(Trace(), TileRounding(record), TorchRounding(record)):
                run()
            observers.append(record)
        keys = [key for key in observers[0].places if all(key in other.places for other in observers)]
        spreads, repeatable = [], all(other.places.keys() == observers[0].places.keys() for other in observers)
        for key in keys:
            place, operation = observers[0].places[key]
            apart = 0.0
            for tiles in zip(*(other.tiles(key) for other in observers), strict=False):
                if len({tile.shape for tile in tiles}) == 1:
                    apart = max(apart, _apart(np.stack(tiles)))
            if operation == "load":
                repeatable = repeatable and (apart == 0 or key not in observers[0].given)
            spreads.append(Spread(place, operation, apart))
        return cls(runs, sorted(spreads, key=lambda x: -x.spread), repeatable)

    def to_dict(self) -> dict:
        """Return plain lists, numbers and strings; a spread is the fields of its place beside its own."""
        spreads = [
            asdict(x.place) | {"text": x.place.statement, "operation": x.operation, "spread": x.spread}
            for x in self.spreads
        ]
        return {"runs": self.runs, "repeatable": self.repeatable, "spreads": spreads}

    @classmethod
    def from_dict(cls, data: Mapping) -> "Rounds":
        """Restore the `Rounds` whose `to_dict` returned these data."""
        spreads = [Spread(restored_place(x), x["operation"], float(x["spread"])) for x in data["spreads"]]
        return cls(data["runs"], spreads, data["repeatable"])

    def __rich__(self) -> Group:
        title = f"\nRandom rounding, {self.runs} runs: digits that they share"
        if not self.repeatable:
            words = "the runs began with other numbers, so that this says nothing: set a seed in the script"
            return Group(Text(title, style="bold"), Text(f"  {words}", style="yellow"))
        rows = [
            (x.place.short, f"{right(x.spread):.1f}", f"apart by {number(x.spread)}", x.place.code(48))
            for x in self.spreads
            if x.operation != "load"
        ]
        return Group(Text(title, style="bold"), grid(rows[:8]))


def _apart(tiles: np.ndarray) -> float:
    finite = np.isfinite(tiles)
    if not finite.all():
        return math.inf if (finite.any(0) & ~finite.all(0)).any() else 0.0
    scale = float(np.sqrt(np.mean(tiles**2)))
    return float(np.abs(tiles - tiles.mean(0)).max()) / scale if scale else 0.0


class _Record:
    """The tiles of one run. moved_in: addresses of memory that holds computed values, which may differ between runs.
    given: the (place, operation) of each input, loaded from other memory or drawn at random."""

    def __init__(self, seed: int):
        self.generator = np.random.default_rng(seed)
        self.places: dict = {}
        self.given: set = set()
        self.moved_in: set[int] = set()
        self._first: dict = {}
        self._last: dict = {}

    def moved(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x * (1 + UNIT.get(dtype, UNIT["float32"]) * self.generator.uniform(-1, 1, x.shape))

    def keep(self, where: tuple, operation: str, x: np.ndarray) -> None:
        _, place = where
        key = place, operation
        self.places.setdefault(key, (place, operation))
        tile = np.array(x.reshape(-1)[:MOST], np.float64)
        first = self._first.setdefault(key, [])
        tiles = first if len(first) < KEPT else self._last.setdefault(key, deque(maxlen=KEPT))
        tiles.append(tile)

    def tiles(self, key) -> list[np.ndarray]:
        return [*self._first[key], *self._last.get(key, ())]


class TileRounding(Observer):
    """Multiplies the results of interpreted kernels by random roundings."""

    def __init__(self, record: _Record):
        self.record = record

    def _move(self, operation: str, out) -> None:
        x = self.watch._values(out)
        if x is None:
            return
        dtype = DTYPES.get(out.dtype.scalar.name, out.dtype.scalar.name)
        moved = self.record.moved(x.astype(np.float64), dtype)
        out.data = to_bfloat16(moved) if dtype == "bfloat16" else moved.astype(x.dtype)
        self.record.keep(self.watch._place(), operation, self.watch._values(out))

    def computed(self, kind: str, operation: str, args, out) -> None:
        rounds = kind in _SAME and kind not in _CHOOSING
        if not isinstance(out, tuple) and (rounds or kind in ("dot", "fp_trunc", "fp_to_fp")):
            self._move(operation, out)

    def reduced(self, reduction, operation: str, handles, outs, again) -> None:
        if operation in ("sum", "cumsum", "prod", "cumprod"):
            for out in outs:
                self._move(operation, out)

    def loaded(self, touched, pointers, on, other, out) -> None:
        x = self.watch._values(out)
        if x is not None and touched:
            where = self.watch._place()
            self.record.keep(where, "load", x)
            if not any(argument.storage_start in self.record.moved_in for argument, _ in touched):
                self.record.given.add((where[1], "load"))

    def stored(self, touched, pointers, value, on) -> None:
        self.record.moved_in |= {argument.storage_start for argument, _ in touched}
        x = self.watch._values(value)
        if x is not None:
            self.record.keep(self.watch._place(), "store", x)

    def added(self, operation, touched, pointers, value, on, out) -> None:
        self.record.moved_in |= {argument.storage_start for argument, _ in touched}


class TorchRounding:
    """Multiplies the results of PyTorch's operations by random roundings, as the observer of a `TorchWatch`."""

    def __init__(self, record: _Record):
        self.record = record

    def before(self, func, operands) -> None:
        """Do nothing: perturbing results needs no operands."""

    def ran(self, func, name, args, kwargs, operands, before, made, out, custom, place) -> None:
        name = name.rstrip("_")
        if any(word in name for word in _RANDOM):
            for x in made:
                where = place()
                self.record.keep(where, "load", x.detach().cpu().double().numpy())
                self.record.given.add((where[1], "load"))
            return
        if any(_start(x) in self.record.moved_in for x in operands):
            self.record.moved_in |= {_start(x) for x in made}
        if custom or not operands or name not in _ROUNDING or name in _EXACT:
            return
        for x in made:
            if x.is_floating_point() and x.numel():
                dtype = str(x.dtype).removeprefix("torch.")
                with torch.no_grad():
                    x.copy_(torch.as_tensor(self.record.moved(x.detach().cpu().double().numpy(), dtype)))
                self.record.moved_in.add(_start(x))
                self.record.keep(place(), _WORDS.get(name, name), x.detach().cpu().double().numpy())


def _start(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
