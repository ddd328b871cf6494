"""Rows of the launch table for the GPU at hand: `flakit tune`.

From the row in use, one field after the other is changed: warps, blocks, stages, registers. A candidate must give the
result of the row in use before it is timed, and be clearly faster, at the end once more, to take its place. What is
timed are the row's own kernels, by the profiler, in a forward and backward of the operator.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..numerics import recorded
from ..numerics.operators import operator
from ..ops.common.launch import TABLE, Chip, Launch, chips
from .meter import Meter
from .speed import Case, Competitor, calls

Key = tuple[str, str]

GAIN = 0.02
"""Part of its time that a candidate has to save, since two measurements of one row differ by nearly as much."""

AGREES = {"16-bit": 4e-3, "float32": 1e-5}
"""Relative L2 by which another row's result may differ: rounding, in sums that another block cuts elsewhere."""

VALUES = {
    "num_warps": (1, 2, 4, 8),
    "BK": (16, 32, 64, 128),
    "BV": (16, 32, 64, 128),
    "num_stages": (1, 2, 3, 4),
    "maxnreg": (None, 96, 128, 168, 224),
}
"""What is tried, in this order."""


class Refused(Exception):
    """A candidate that cannot run here, or that computes something else."""


class Unreached(Exception):
    """A row that nothing launches on the inputs that are tried."""


def chosen(only: str = "") -> list[Key]:
    """The keys of the rows whose kernel or width holds each word of `only`; ValueError where none does."""
    found = [key for key in TABLE if all(word in " ".join(key) for word in only.split())]
    if not found:
        raise ValueError(f"only: expected words such as 'rwkv6 16-bit' or 'gsa.stream', got {only!r}")
    return found


OF_PARTS = "rwkv7.fused.carry", "rwkv7.fused.carry_grads", "rwkv7.fused.entering"
"""Kernels that are launched where heads are few, each with parts of its sequence."""


def cases_of(key: Key, B: int = 8) -> list[Case]:
    """The inputs on which a row is tuned, the first of those that launch it: what its kernel is mostly for."""
    (kernel, width), dtype = key, {"16-bit": "bfloat16", "float32": "float32"}[key[1]]
    if kernel == "scan":  # segments are scanned where there are few sequences and heads
        return [Case("rwkv6", "chunk", 1, 32768, 8, 64, 64, operator("rwkv6").profile, dtype)]
    if kernel in OF_PARTS:
        return [Case("rwkv7", "chunk", 1, 32768, 32, 64, 64, operator("rwkv7").profile, dtype)]
    op = kernel.partition(".")[0].removesuffix("128")
    form = "recurrent" if "recurrent" in kernel else "chunk"
    # Chunks of 16 are mild up to -6, longer ones are not at -5.
    hard = -8.0 if ".fused." in kernel else -5.0
    decay = hard if kernel.endswith(".dyadic") and width == "16-bit" else operator(op).profile
    M = {"gsa": 64, "gsa128": 128}.get(kernel.partition(".")[0])
    heads = [(16, 128), (32, 64)] if op == "gsa" else [(32, 64), (16, 128)]
    return [Case(op, form, B, 4096, H, K, K, decay, dtype, M=M) for H, K in heads]


def fields(key: Key) -> dict[str, tuple]:
    """What of a row may be changed, and the values to try.

    Where a program holds all of K, the row's BK says how large that may be, and stays; where it holds all of V too,
    neither says anything.
    """
    kernel, _ = key
    if kernel == "scan":
        return {"num_warps": VALUES["num_warps"], "BV": (256, 512, 1024, 2048)}
    whole = "recurrent" in kernel or kernel == "rwkv7.stream"
    both = ".fused." in kernel
    left_out = ("BK", "BV") if both else ("BK",) if whole else ()
    return {name: values for name, values in VALUES.items() if name not in left_out}


def fits(row: Launch, device: Chip) -> bool:
    """Whether the registers that a program is promised are there; shared memory is asked of the compiled kernel."""
    return (row.maxnreg or 0) * 32 * row.num_warps <= device.registers


def climb(
    key: Key, start: Launch, measure: Callable[[Launch, bool], float], device: Chip
) -> tuple[Launch, float, float]:
    """The best row that is found from `start`, its milliseconds and those of `start`.

    measure: milliseconds of a row, and whether they must be measured anew; raises `Refused`.
    """
    known = {start: measure(start, False)}

    def ms(row: Launch) -> float:
        if row not in known:
            try:
                known[row] = measure(row, False) if fits(row, device) else float("inf")
            except Refused:
                known[row] = float("inf")
        return known[row]

    best, last = start, None
    while best != last:
        last = best
        for field, values in fields(key).items():
            for row in [best._replace(**{field: value}) for value in values]:
                if ms(row) < (1 - GAIN) * ms(best):
                    best = row
    if best == start:
        return start, known[start], known[start]
    took, before = measure(best, True), measure(start, True)  # the best of many is also the luckiest
    return (best, took, before) if took < (1 - GAIN) * before else (start, before, before)


class Trial:
    """Times a row of the table on the GPU; keeps the inputs of the latest case, and what the latest row gave first."""

    def __init__(self, meter: Meter, B: int = 8):
        self.meter, self.B, self._given, self._key = meter, B, None, None

    def __call__(self, key: Key, row: Launch, anew: bool = False) -> float:
        self._prepare(key)
        with TABLE.using({key: row}):
            launched = self._launched(key)
            if anew or launched not in self._known:  # sizes may leave no difference between two rows
                self._known[launched] = self._measured(key, {name for name, _ in launched})
        return self._known[launched]

    def _prepare(self, key: Key) -> None:
        if key == self._key:
            return
        self._key, self._known, self._expected = key, {}, None
        for case in cases_of(key, self.B):
            if case != self._given:
                self._given, self._calls = case, None  # its tensors go before others come
                rival = Competitor(case.operator.forms[case.form])
                self._calls = calls(rival, case, case.inputs(self.meter.device))
            if self._launched(key):
                self._expected = self._results()
                return
        self._key = None
        raise Unreached(f"{' '.join(key)}: not launched by {' nor by '.join(map(str, cases_of(key, self.B)))}")

    def _results(self) -> dict[str, Tensor]:
        gradients = (f"d{name}" for name in self._given.operator.tensors)
        return {"o": self._calls["forward"](), **dict(zip(gradients, self._calls["both"](), strict=True))}

    def _launched(self, key: Key) -> tuple:
        """The row's kernels with their options, found without running them."""
        from .launches import watched

        with watched(run=False) as found:
            self._calls["both"]()
        return tuple((x.kernel.fn.__name__, tuple(sorted(x.options.items()))) for x in found if x.row == key)

    def _measured(self, key: Key, names: set[str]) -> float:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            found = self._results()
            self.meter.wait()
        except (OutOfResources, PTXASError, CompilationError) as error:
            raise Refused(str(error)) from None
        for name, like in self._expected.items():
            off = ((found[name].float() - like.float()).norm() / like.float().norm()).item()
            if not off <= AGREES[key[1]]:  # NaN is not
                raise Refused(f"{name} is off by {off:.1e}")
        return sum(kernel.ms for kernel in self.meter.kernels(self._calls["both"]) if kernel.kernel in names)


def tune(
    keys: Sequence[Key],
    device: Chip,
    trial: Callable[[Key, Launch, bool], float],
    progress: Callable[[str], None] = lambda what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[dict]:
    """One row at a time, columns as in `flakit/ops/common/rows`; each is used while the next ones are tuned.

    trial: milliseconds of a row's kernels, measured anew or not; raises `Refused` for one that cannot be taken, and
    `Unreached` for a key that it has no inputs for, of which `say` is told.
    """
    found: dict[Key, Launch] = {}
    for key in keys:
        with TABLE.using(found):
            tried = 0

            def measure(row: Launch, anew: bool, key: Key = key) -> float:
                nonlocal tried
                tried += 1
                progress(f"{' '.join(key)}: {tried}. {in_short(row)}")
                return trial(key, row, anew)

            try:
                best, ms, before = climb(key, TABLE[key], measure, device)
            except Unreached as error:
                say(str(error))
                continue
        found[key] = best
        yield {"kernel": key[0], "width": key[1], **best._asdict(), "ms": ms, "ms_before": before}


def in_short(row: Launch) -> str:
    registers = f", {row.maxnreg} registers" if row.maxnreg else ""
    return f"{row.BK} × {row.BV}, {row.num_warps} warps, {row.num_stages} stages{registers}"


def check(path: Path, device: Chip) -> None:
    """What stands in a file must have been tuned on the same kind of device: one file has one provenance."""
    if path.is_file() and (other := recorded.read(path, needs=("kernel", "width")).meta["device"]) != device.name:
        raise ValueError(f"{path}: expected rows tuned on {device.name}, got {other}'s; remove it or write another")


def write(path: Path, device: Chip, rows: Sequence[Mapping], command: str = "flakit tune") -> None:
    """Write rows to a file, in the place of those with their keys and beside all others that stand there."""
    check(path, device)
    anew = {(row["kernel"], row["width"]) for row in rows}
    there = recorded.read(path).rows if path.is_file() else ()
    kept = [row for row in there if (row["kernel"], row["width"]) not in anew]
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.write(path, recorded.provenance(command, device.name), [*kept, *rows])


def here() -> tuple[Chip, Trial]:
    """The GPU at hand, and what times rows on it, on batches that its memory has room for."""
    from ..ops.common.dispatch import has_triton, interpreted

    if not torch.cuda.is_available():
        raise RuntimeError("expected a CUDA GPU to time kernels on, found none")
    if not has_triton() or interpreted():
        raise RuntimeError("expected Triton, in a process without TRITON_INTERPRET")
    device, *others = chips()
    if others:  # whose rows would not be looked up
        raise RuntimeError(f"expected GPUs of one kind, got {device.name} and {others[0].name}: CUDA_VISIBLE_DEVICES=0")
    gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    return device, Trial(Meter(), B=8 if gib > 20 else 4 if gib > 10 else 1)
