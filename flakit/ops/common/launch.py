"""Launch parameters of every kernel, in one place: no autotuning at run time, so a first call takes only seconds.

A row's key is (kernel, width): the width of the inputs is "16-bit" or "float32". "gsa128" is GSA with more than 64
slots, all of which a program holds in registers. In GSA's rows but "gsa.recurrent" BK counts slots: all of them, but
for "gsa.recurrent_pass" and "gsa.recurrent_grads", where a program has a block of BK. ROWS were tuned on an H200
(sm_90). Rows that `flakit tune` finds on another device are stored in a separate file, rows/sm_89.json and the like,
and replace ROWS there (`rows_for`).
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """A row of the launch table: one kernel's launch parameters for 16-bit or for float32 inputs."""

    BK: int
    """Largest block of key channels of a program; a smaller K takes the next power of two, at least 16."""
    BV: int
    """Likewise for value channels; for a scan, the elements of the state that a program carries."""
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Limit of registers a thread, where fewer let more programs run at once; None: the compiler's choice."""


CHUNK_SIZE = 32
"""Default chunk length in tokens, where neither LONG_CHUNK_SIZE nor SHORT_CHUNK_SIZE applies."""

LONG_CHUNK_SIZE = 64
"""Default chunk length of GSA in bfloat16 and float32 with 33 to 64 slots, as models have, and of RWKV6 in bfloat16
where K and V are 33 to 64; there only `stream_kernel` uses it, for the state entering each part of a sequence."""

SHORT_CHUNK_SIZE = 16
"""Default chunk length of RWKV7 in float32: in longer chunks, work inside them grows more than the rest shrinks."""

NARROWEST = 64
"""Least columns of product operands in long chunks. Their 64 rows select Hopper's wgmma, which reads 16-bit tiles in
lines of 128 bytes; Triton 3.6 compiles it wrongly for narrower tiles."""

CHECKPOINT = 32
"""Tokens between the states that a recurrent forward saves for its backward."""

TOGETHER = 2
"""Tokens whose rows a recurrent kernel loads at once, to wait for memory only once; divides CHECKPOINT."""

FULL_GPU = 512
"""Programs that fill a GPU where each walks its chunks one by one: about four a multiprocessor of an H200."""

SHORTEST_PART = 16
"""Chunks in the shortest part that `stream_kernel` walks; cutting sequences finer costs more than it gains."""

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Bytes of shared memory a block, by compute capability, of the chips for which the tests compile every row:
A100, then RTX 3090, RTX 4090, H100 and H200, B200, B300, RTX 5090 and their like."""

TWO_STAGES = 208 * 1024
"""Bytes of shared memory a block from which on GSA's kernels inside chunks load a block of K or V while they compute
with the one before it. Then two programs, as many as registers allow on a multiprocessor, take 176 to 208 KB."""

REGISTERS_OF_THREE = 168
"""Registers a thread with which three programs of four warps run at once on a multiprocessor."""

OVERLAPS = 90
"""Least compute capability of chips on which a launch can begin before the one before it has ended."""

RUN_ON = {90: "an NVIDIA H200"}
"""Devices on which ROWS were run, and not only compiled, by compute capability."""

ROWS = {
    ("scan", "16-bit"): Launch(1, 1024, 4, 1),
    ("scan", "float32"): Launch(1, 1024, 4, 1),
    ("rwkv6.stream", "16-bit"): Launch(64, 64, 4, 3),
    ("rwkv6.stream", "float32"): Launch(32, 64, 2, 2),
    ("rwkv6.output.mild", "16-bit"): Launch(64, 64, 4, 1, 168),
    ("rwkv6.output.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.output.dyadic", "float32"): Launch(32, 64, 4, 1),
    ("rwkv6.value_grads.mild", "16-bit"): Launch(64, 64, 4, 1, 168),
    ("rwkv6.value_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.value_grads.dyadic", "float32"): Launch(32, 64, 4, 1),
    ("rwkv6.key_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.key_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.key_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv6.fused.scores", "16-bit"): Launch(64, 64, 1, 1, 128),
    ("rwkv6.fused.forward", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.fused.backward", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.fused.chain", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.fused.grads", "16-bit"): Launch(64, 64, 4, 1, 168),
    ("rwkv6.fused.scores", "float32"): Launch(64, 64, 1, 1),
    ("rwkv6.fused.forward", "float32"): Launch(64, 64, 4, 1),
    ("rwkv6.fused.backward", "float32"): Launch(64, 64, 4, 1),
    ("rwkv6.recurrent", "16-bit"): Launch(512, 16, 1, 1),
    ("rwkv6.recurrent", "float32"): Launch(512, 16, 1, 1),
    ("rwkv6.recurrent_grads", "16-bit"): Launch(16, 512, 1, 1),
    ("rwkv6.recurrent_grads", "float32"): Launch(16, 512, 1, 1),
    ("rwkv7.prepare.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.prepare.dyadic", "float32"): Launch(32, 32, 2, 1),
    ("rwkv7.stream", "16-bit"): Launch(256, 64, 4, 1),
    ("rwkv7.stream", "float32"): Launch(256, 32, 4, 1),
    ("rwkv7.output.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.output.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.output.dyadic", "float32"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare_grads.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare_grads.dyadic", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare_grads.dyadic", "float32"): Launch(64, 64, 2, 1),
    ("rwkv7.value_grads.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.value_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.value_grads.dyadic", "float32"): Launch(64, 64, 2, 1),
    ("rwkv7.key_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.key_grads.dyadic", "16-bit"): Launch(64, 64, 8, 1),
    ("rwkv7.key_grads.dyadic", "float32"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.scores", "16-bit"): Launch(64, 64, 2, 1, 168),
    ("rwkv7.fused.carry", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.entering", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.forward", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.carry_grads", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.backward", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.chain", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.grads", "16-bit"): Launch(64, 64, 4, 1, 168),
    ("rwkv7.fused.scores", "float32"): Launch(64, 64, 2, 1),
    ("rwkv7.fused.carry", "float32"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.entering", "float32"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.forward", "float32"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.carry_grads", "float32"): Launch(64, 64, 4, 1),
    ("rwkv7.fused.grads", "float32"): Launch(64, 64, 2, 1),
    ("rwkv7.recurrent", "16-bit"): Launch(512, 16, 1, 1),
    ("rwkv7.recurrent", "float32"): Launch(512, 16, 1, 1),
    ("rwkv7.recurrent_grads", "16-bit"): Launch(512, 16, 1, 1),
    ("rwkv7.recurrent_grads", "float32"): Launch(512, 16, 1, 1),
    ("gsa.stream", "16-bit"): Launch(64, 128, 4, 2),
    ("gsa.stream", "float32"): Launch(64, 64, 4, 2),
    ("gsa.output", "16-bit"): Launch(64, 128, 4, 1),
    ("gsa.output", "float32"): Launch(64, 64, 4, 1),
    ("gsa.softmax_grads", "16-bit"): Launch(64, 64, 4, 2),
    ("gsa.softmax_grads", "float32"): Launch(64, 64, 4, 1),
    ("gsa.slot_grads", "16-bit"): Launch(64, 128, 4, 1),
    ("gsa.steep_slot_grads", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa.slot_grads", "float32"): Launch(64, 64, 4, 1),
    ("gsa.steep_slot_grads", "float32"): Launch(64, 64, 4, 1),
    ("gsa.pass_grads", "16-bit"): Launch(64, 128, 4, 1),
    ("gsa.pass_grads", "float32"): Launch(64, 64, 4, 1),
    ("gsa128.stream", "16-bit"): Launch(64, 64, 4, 2),
    ("gsa128.stream", "float32"): Launch(32, 64, 2, 2),
    ("gsa128.output", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.output", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.softmax_grads", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.softmax_grads", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.slot_grads", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.steep_slot_grads", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.slot_grads", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.steep_slot_grads", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.pass_grads", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.pass_grads", "float32"): Launch(16, 16, 8, 1),
    ("gsa.recurrent", "16-bit"): Launch(512, 128, 4, 1),
    ("gsa.recurrent", "float32"): Launch(512, 128, 4, 1),
    ("gsa.recurrent_pass", "16-bit"): Launch(8, 16, 1, 1),
    ("gsa.recurrent_pass", "float32"): Launch(8, 16, 1, 1),
    ("gsa.recurrent_grads", "16-bit"): Launch(32, 32, 1, 1),
    ("gsa.recurrent_grads", "float32"): Launch(32, 32, 1, 1),
}


class Table(dict):
    """Built-in launch rows by (kernel, width). `table[key]`, and no other method, prefers rows tuned for this GPU.
    version: a number that is another one after each change of rows."""

    def __init__(self, rows: Mapping[tuple[str, str], Launch]):
        super().__init__(rows)
        self.version = 0
        self._overrides: Mapping = {}
        self._known: dict = {}  # a cache: a decode step of a few microseconds needs several rows

    def __getitem__(self, key: tuple[str, str]) -> Launch:
        row = self._known.get(key)
        return self._find(key) if row is None else row

    def __setitem__(self, key: tuple[str, str], row: Launch) -> None:
        super().__setitem__(key, row)
        self._changed()

    def _find(self, key: tuple[str, str]) -> Launch:
        # Without CUDA no tensor is on a device: the interpreter, and compilation ahead of time.
        used = torch.cuda.is_initialized()
        row = self._overrides.get(key) or (_rows_here().get(key) if used else None) or super().__getitem__(key)
        if used:
            self._known[key] = row
        return row

    @contextmanager
    def using(self, rows: Mapping[tuple[str, str], Launch]) -> Iterator[None]:
        """In the `with` block, prefer these rows to all others, in every thread, since a backward runs in its own."""
        before, self._overrides = self._overrides, {**self._overrides, **rows}
        self._changed()
        try:
            yield
        finally:
            self._overrides = before
            self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._known.clear()


TABLE = Table(ROWS)


def width(itemsize: int) -> str:
    return "16-bit" if itemsize == 2 else "float32"


def cdiv(size: int, part: int) -> int:
    """Return size / part, rounded up. `triton.cdiv` takes 5 microseconds, and an operator call divides 60 times."""
    return -(-size // part)


def block(size: int, limit: int) -> int:
    """Return the block length for an axis: `size` rounded up to a power of two from 16 (tensor cores) to limit."""
    return min(max(16, 1 << (size - 1).bit_length()), limit)


def elements(size: int, rows: int, limit: int) -> int:
    """Return how many elements of a state one program of `scan_kernel` carries, at most limit, for `rows` states of
    `size` elements each. Few states are split finer, down to 256 elements: a scan is bound by load latency, which about
    two programs a multiprocessor hide."""
    BE = limit
    while BE > 256 and -(-size // BE) * rows < 256:
        BE //= 2
    return BE


class Chip(NamedTuple):
    """The limits of a CUDA device that decide which launches fit."""

    name: str
    capability: int
    """90 for sm_90."""
    shared: int
    """Bytes of shared memory a block."""
    registers: int = 65536
    """32-bit registers a multiprocessor."""


def chips() -> list[Chip]:
    """Return the CUDA devices of this process, one of each compute capability, the current one first."""
    current = torch.cuda.current_device()
    by_capability = {}
    for n in sorted(range(torch.cuda.device_count()), key=lambda n: n != current):
        chip = _chip(n)
        by_capability.setdefault(chip.capability, chip)
    return list(by_capability.values())


@cache
def _chip(n: int) -> Chip:
    device = torch.cuda.get_device_properties(n)
    shared = getattr(device, "shared_memory_per_block_optin", 49152)  # absent on AMD
    registers = getattr(device, "regs_per_multiprocessor", 65536)
    return Chip(device.name, 10 * device.major + device.minor, shared, registers)


def chip_of(x: torch.Tensor) -> Chip | None:
    """Return the NVIDIA GPU that has a tensor, or None: the interpreter, AMD."""
    return _chip(x.get_device()) if x.is_cuda and torch.version.hip is None else None


def rows_file(capability: int) -> Path:
    """Return the path of a device's tuned rows, in $FLAKIT_ROWS or rows/ beside this file. capability: 90 for sm_90."""
    folder = os.environ.get("FLAKIT_ROWS")
    return (Path(folder) if folder else Path(__file__).with_name("rows")) / f"sm_{capability}.json"


def read_rows(path: Path) -> tuple[dict, dict[tuple[str, str], Launch]]:
    """Return the "meta" (device, date, command, …) and the rows of a file of `flakit tune`; both empty without a file.

    Raises ValueError with the file, the row, the expected value and the actual one.
    """
    if not path.is_file():
        return {}, {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        meta, columns, rows = (content[key] for key in ("meta", "columns", "rows"))
        rows = [dict(zip(columns, row, strict=True)) for row in rows]
        keys = [(row["kernel"], row["width"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected meta, columns (kernel, width, ...) and rows, got {error!r}") from error
    launches = {}
    for key, row in zip(keys, rows, strict=True):
        missing = [name for name in Launch._fields if name not in row]
        values = {name: row.get(name) for name in Launch._fields}
        wrong = {n: x for n, x in values.items() if not (_positive(x) or (n == "maxnreg" and x is None))}
        if missing or wrong:
            got = ", ".join([*(f"no {name}" for name in missing), *(f"{n} = {x!r}" for n, x in wrong.items())])
            raise ValueError(f"{path}: {' '.join(map(str, key))}: expected whole numbers above 0, got {got}")
        launches[key] = Launch(**values)
    return meta, launches


def _positive(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def rows_for(chip: Chip) -> dict[tuple[str, str], Launch]:
    """Return the rows that replace built-in ones on a device, from its file; raises ValueError for a malformed file."""
    _, tuned = read_rows(rows_file(chip.capability))
    return tuned


@cache
def _rows_here() -> dict[tuple[str, str], Launch]:
    """Return the tuned rows for this machine's GPUs, {} if these differ in capability: the built-in rows fit all."""
    here = chips()
    return rows_for(here[0]) if len(here) == 1 else {}
