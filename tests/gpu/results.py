"""data/gpu_tests.json: of each card, Triton and file with GPU tests, what came of every test, and for which code.

A test's outcome is one letter of its row's `each`, in the order in which pytest collects the file: `.` passed, `F`
failed, `s` skipped (a second GPU is not there), `-` not run. `key` is the hash of `sources.key`: where it is another
today, what the row says is of older code. `seconds` are those of each test, in the same order: of the process that ran
it, what it compiled for others too; None where nobody has measured them.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from flakit.numerics import recorded
from tests.gpu import sources

FILE = sources.ROOT / "data" / "gpu_tests.json"
COMMAND = "python -m tests.gpu"
PASSED, FAILED, SKIPPED, NOT_RUN = ".Fs-"
COUNTED = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED, "not_run": NOT_RUN}


def read(path: Path = FILE) -> list[dict]:
    """The rows; none where nothing was ever recorded."""
    rows = [dict(row) for row in recorded.read(path).rows] if path.is_file() else []
    return [row | {"seconds": row.get("seconds", [])} for row in rows]


def write(path: Path, meta: Mapping[str, str], rows: Iterable[Mapping]) -> None:
    """At once: who reads it, and whoever ends this process, finds a whole file."""
    path = Path(path)
    beside = path.with_suffix(".tmp.json")
    recorded.write(beside, meta, sorted(rows, key=lambda row: (*place(row), row["file"])))
    os.replace(beside, path)


def row(
    ran: Mapping[str, str], file: str, key: str, each: str, failing: Iterable[str], seconds: Iterable[float | None] = ()
) -> dict:
    """One row. ran: the card, the versions, the commit and the day."""
    counts = {name: each.count(letter) for name, letter in COUNTED.items()}
    of = {name: ran[name] for name in ("commit", "date", "torch", "triton")}
    outcome = {"key": key, "each": each, "failing": list(failing), "seconds": list(seconds)}
    return {"card": ran["card"], "file": file, **counts, **of, **outcome}


def place(row: Mapping) -> tuple[str, str]:
    """Where it ran: the card, and the version of Triton, which compiles the kernels."""
    return row["card"], row["triton"]


def spent(row: Mapping) -> float:
    """Seconds of its tests in sum, of those that were measured."""
    return sum(x for x in row["seconds"] if x is not None)


def green(row: Mapping) -> bool:
    """Whether every test of the row's file that its machine can run has passed."""
    return not row["failed"] and not row["not_run"]


def of_today(row: Mapping, root: Path = sources.ROOT) -> bool:
    """Whether the row is of the code that is here."""
    path = root / row["file"]
    return path.is_file() and row["key"] == key(row["file"], row, root)


def key(file: str, ran: Mapping[str, str], root: Path = sources.ROOT) -> str:
    return sources.key(file, *(ran[name] for name in ("torch", "triton", "card")), root=root)
