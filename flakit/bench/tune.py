"""Tune rows of the launch table for the current GPU: `flakit tune`.

Coordinate descent from the row in use, over warps, blocks, stages and registers. A candidate is timed only if its
results match those of the row in use. It replaces the row if it is clearly faster, confirmed by a second measurement.
The profiler times the row's own kernels, in a forward and backward of the operator.
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
"""The smallest relative improvement to accept: two measurements of one row differ by nearly as much."""

AGREES = {"16-bit": 4e-3, "float32": 1e-5}
"""The largest relative L2 difference between rows' results: other blocks round sums in another order."""

VALUES = {
    "num_warps": (1, 2, 4, 8),
    "BK": (16, 32, 64, 128),
    "BV": (16, 32, 64, 128),
    "num_stages": (1, 2, 3, 4),
    "maxnreg": (None, 96, 128, 168, 224),
}
"""The values to try for each field, in this order."""


class Refused(Exception):
    """Raised for a candidate that cannot run on this GPU, or gives other results."""


class Unreached(Exception):
    """Raised for a row of the launch table whose kernels none of `cases_of` launches."""


def chosen(only: str = "") -> list[Key]:
    """Return the keys of the rows whose kernel or width contains each word of `only`. Raise ValueError if there are
    none."""
    keys = [key for key in TABLE if all(word in " ".join(key) for word in only.split())]
    if not keys:
        raise ValueError(f"only: expected words such as 'rwkv6 16-bit' or 'gsa.stream', got {only!r}")
    return keys


OF_PARTS = "rwkv7.fused.carry", "rwkv7.fused.carry_grads", "rwkv7.fused.entering"
"""Kernels launched if there are few heads, whose sequences are then split into parts."""


def cases_of(key: Key, B: int = 8) -> list[Case]:
    """Return cases to tune a row on, its main use first; `Trial` takes the first that launches it. B: sequences."""
    (kernel, width), dtype = key, {"16-bit": "bfloat16", "float32": "float32"}[key[1]]
    if kernel == "scan":  # segments are scanned if sequences and heads are few
        return [Case("rwkv6", "chunk", 1, 32768, 8, 64, 64, operator("rwkv6").profile, dtype)]
    if kernel in OF_PARTS:
        return [Case("rwkv7", "chunk", 1, 32768, 32, 64, 64, operator("rwkv7").profile, dtype)]
    op = kernel.partition(".")[0].removesuffix("128")
    form = "recurrent" if "recurrent" in kernel else "chunk"
    # Of chunks of 16, one row is for any decay; longer chunks are not mild at -5.
    decay = -5.0 if kernel.endswith(".dyadic") and width == "16-bit" else operator(op).profile
    M = {"gsa": 64, "gsa128": 128}.get(kernel.partition(".")[0])
    heads = [(16, 128), (32, 64)] if op == "gsa" else [(32, 64), (16, 128)]
    if kernel == "gsa.recurrent":  # of a single token
        return [Case(op, form, B, 1, H, K, K, decay, dtype, M=M, decode=True) for H, K in heads]
    return [Case(op, form, B, 4096, H, K, K, decay, dtype, M=M) for H, K in heads]


def fields(key: Key) -> dict[str, tuple]:
    """Return the tunable fields of a row, and the values to try for each.

    BK stays fixed if a program holds all of K (it then is the largest K); BK and BV stay if it also holds all of V."""
    kernel, _ = key
    if kernel == "scan":
        return {"num_warps": VALUES["num_warps"], "BV": (256, 512, 1024, 2048)}
    in_blocks = "rwkv6.recurrent_grads", "gsa.recurrent_pass", "gsa.recurrent_grads"
    holds_k = ("recurrent" in kernel and kernel not in in_blocks) or kernel == "rwkv7.stream"
    holds_k_and_v = ".fused." in kernel
    fixed = ("BK", "BV") if holds_k_and_v else ("BK",) if holds_k else ()
    return {name: values for name, values in VALUES.items() if name not in fixed}


def fits(row: Launch, device: Chip) -> bool:
    """Return whether the device has a row's maxnreg registers for all its threads. Compiling checks shared memory."""
    return (row.maxnreg or 0) * 32 * row.num_warps <= device.registers


def climb(
    key: Key, start: Launch, measure: Callable[[Launch, bool], float], device: Chip
) -> tuple[Launch, float, float]:
    """Find the best row from `start` by coordinate descent. Return it, its milliseconds and those of `start`.

    measure: measure(row, anew) -> milliseconds; anew: measure again instead of using an earlier result. It raises
    `Refused` for a row that cannot be used."""
    measured_ms = {start: measure(start, False)}

    def ms(row: Launch) -> float:
        if row not in measured_ms:
            try:
                measured_ms[row] = measure(row, False) if fits(row, device) else float("inf")
            except Refused:
                measured_ms[row] = float("inf")
        return measured_ms[row]

    best, last = start, None
    while best != last:
        last = best
        for field, values in fields(key).items():
            for row in [best._replace(**{field: value}) for value in values]:
                if ms(row) < (1 - GAIN) * ms(best):
                    best = row
    if best == start:
        return start, measured_ms[start], measured_ms[start]
    after, before = measure(best, True), measure(start, True)  # the minimum of many measurements is biased
    return (best, after, before) if after < (1 - GAIN) * before else (start, before, before)


class Trial:
    """Times rows of the launch table on the GPU: trial(key, row) -> milliseconds. B: sequences. Caches the latest
    case's inputs, and the results with the row in use, which those with any candidate must match."""

    def __init__(self, meter: Meter, B: int = 8):
        self.meter, self.B, self._case, self._key = meter, B, None, None

    def __call__(self, key: Key, row: Launch, anew: bool = False) -> float:
        self._prepare(key)
        with TABLE.using({key: row}):
            launched = self._launched(key)
            if anew or launched not in self._measured_ms:  # for these sizes two rows may launch the same kernels
                self._measured_ms[launched] = self._measure(key, {name for name, _ in launched})
        return self._measured_ms[launched]

    def _prepare(self, key: Key) -> None:
        if key == self._key:
            return
        self._key, self._measured_ms, self._expected = key, {}, None
        for case in cases_of(key, self.B):
            if case != self._case:
                self._case, self._calls = case, None  # free the old tensors before allocating new ones
                rival = Competitor(case.operator.forms[case.form])
                self._calls = calls(rival, case, case.inputs(self.meter.device))
            if self._launched(key):
                self._expected = self._results()
                return
        self._key = None
        raise Unreached(f"{' '.join(key)}: not launched by {' nor by '.join(map(str, cases_of(key, self.B)))}")

    def _results(self) -> dict[str, Tensor]:
        gradients = (f"d{name}" for name in self._case.operator.tensors)
        both = dict(zip(gradients, self._calls["both"](), strict=True)) if "both" in self._calls else {}
        return {"o": self._calls["forward"](), **both}

    def _whole(self) -> Callable[[], object]:
        """Return the call that launches all of the case's kernels: of a decode, forward."""
        return self._calls.get("both", self._calls["forward"])

    def _launched(self, key: Key) -> tuple:
        """Return the row's kernels with their options, without running them."""
        from .launches import watched

        with watched(run=False) as launches:
            self._whole()()
        return tuple((x.kernel.fn.__name__, tuple(sorted(x.options.items()))) for x in launches if x.row == key)

    def _measure(self, key: Key, names: set[str]) -> float:
        """Return the milliseconds of the named kernels. Raise `Refused` if the row cannot run or gives other
        results."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            results = self._results()
            self.meter.wait()
        except (OutOfResources, PTXASError, CompilationError) as error:
            raise Refused(str(error)) from None
        for name, expected in self._expected.items():
            error = ((results[name].float() - expected.float()).norm() / expected.float().norm()).item()
            if not error <= AGREES[key[1]]:  # true for NaN
                raise Refused(f"{name} is off by {error:.1e}")
        return sum(kernel.ms for kernel in self.meter.kernels(self._whole()) if kernel.kernel in names)


def tune(
    keys: Sequence[Key],
    device: Chip,
    trial: Callable[[Key, Launch, bool], float],
    progress: Callable[[str], None] = lambda what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[dict]:
    """Tune one row after another, and yield each with the columns in `flakit/ops/common/rows`.

    Tuned rows are in use while the next ones are tuned. trial: trial(key, row, anew) -> milliseconds of a row's
    kernels; raises `Refused` for a row that cannot be used, and `Unreached` for a key without inputs, which is reported
    to `say` and skipped. progress: called before each trial."""
    tuned: dict[Key, Launch] = {}
    for key in keys:
        with TABLE.using(tuned):
            trials = 0

            def measure(row: Launch, anew: bool, key: Key = key) -> float:
                nonlocal trials
                trials += 1
                progress(f"{' '.join(key)}: {trials}. {in_short(row)}")
                return trial(key, row, anew)

            try:
                best, ms, before = climb(key, TABLE[key], measure, device)
            except Unreached as error:
                say(str(error))
                continue
        tuned[key] = best
        yield {"kernel": key[0], "width": key[1], **best._asdict(), "ms": ms, "ms_before": before}


def in_short(row: Launch) -> str:
    registers = f", {row.maxnreg} registers" if row.maxnreg else ""
    return f"{row.BK} × {row.BV}, {row.num_warps} warps, {row.num_stages} stages{registers}"


def check(path: Path, device: Chip) -> None:
    """Check that an existing file has rows of the same kind of device, else raise ValueError: a file has one
    provenance."""
    if path.is_file() and (other := recorded.read(path, needs=("kernel", "width")).meta["device"]) != device.name:
        raise ValueError(f"{path}: expected rows tuned on {device.name}, got {other}'s; remove it or write another")


def write(path: Path, device: Chip, rows: Sequence[Mapping], command: str = "flakit tune") -> None:
    """Write rows to a file, where they replace rows with the same keys. Raise ValueError for another device's file."""
    check(path, device)
    replaced = {(row["kernel"], row["width"]) for row in rows}
    existing = recorded.read(path).rows if path.is_file() else ()
    unchanged = [row for row in existing if (row["kernel"], row["width"]) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.write(path, recorded.provenance(command, device.name), [*unchanged, *rows])


def here() -> tuple[Chip, Trial]:
    """Return the current GPU and a `Trial` on it, with batches that fit its memory.

    Raises RuntimeError without a GPU or Triton, and for visible GPUs of several kinds."""
    from ..ops.common.dispatch import has_triton, interpreted

    if not torch.cuda.is_available():
        raise RuntimeError("expected a CUDA GPU to time kernels on, found none")
    if not has_triton() or interpreted():
        raise RuntimeError("expected Triton, in a process without TRITON_INTERPRET")
    device, *others = chips()
    if others:  # the table has rows for the first kind only
        raise RuntimeError(f"expected GPUs of one kind, got {device.name} and {others[0].name}: CUDA_VISIBLE_DEVICES=0")
    gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    return device, Trial(Meter(), B=8 if gib > 20 else 4 if gib > 10 else 1)
