"""Reads and writes measurements recorded on another machine, stored in data/*.json with their provenance.

A file is a table: `{"meta": {...}, "columns": [names], "rows": [[values], ...]}`. data/README.md lists the files and
their columns. A value is a number, a string, null or a list of these; inf, -inf and nan, which JSON lacks, are strings.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import carried

META = ("device", "date", "torch", "triton", "command")
"""Required keys of a recording's meta: device, date (YYYY-MM-DD), versions, the command that reproduces it."""

_NON_FINITE = {"inf", "-inf", "nan"}


@dataclass(frozen=True)
class Recording:
    """A recorded table: `meta`, its provenance (see `META`), and `rows`, one dict a row."""

    meta: Mapping[str, str]
    columns: tuple[str, ...]
    rows: tuple[Mapping, ...]

    @property
    def label(self) -> str:
        """Device, date and versions in one line, which figures must show with recorded numbers."""
        device, date, torch, triton = (self.meta[name] for name in ("device", "date", "torch", "triton"))
        return f"recorded on {device}, {date}, torch {torch}, triton {triton}"

    def select(self, **fixed) -> list[Mapping]:
        """Return the rows with these values in these columns, e.g. `select(dtype="bfloat16", T=1024)`."""
        self._check(fixed)
        return [row for row in self.rows if all(row[name] == value for name, value in fixed.items())]

    def values(self, column: str) -> list:
        """Return the distinct values of a column, in recorded order. Raises ValueError for an unknown column."""
        self._check([column])
        return list(dict.fromkeys(row[column] for row in self.rows))

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.columns:
                raise ValueError(f"column: expected one of {', '.join(self.columns)}, got {name!r}")


def data_folder() -> Path:
    """Return the folder of the recordings that ship with flakit, or the one in the environment variable FLAKIT_DATA."""
    return Path(os.environ.get("FLAKIT_DATA") or carried.folder("data"))


def read(name: str | Path, *, needs: Sequence[str] = ()) -> Recording:
    """Read data/<name>.json, or any path ending in .json.

    needs: columns that must exist.
    Raises FileNotFoundError with the folder and its recordings, ValueError with the error in the format.
    """
    path = Path(name) if str(name).endswith(".json") else data_folder() / f"{name}.json"
    if not path.is_file():
        existing = ", ".join(sorted(p.stem for p in path.parent.glob("*.json"))) or "none"
        raise FileNotFoundError(
            f"no recording {path.name} in {path.parent} (there: {existing}); FLAKIT_DATA names another"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        meta, columns, rows = (content[key] for key in ("meta", "columns", "rows"))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: expected an object with meta, columns and rows, got {error!r}") from error
    for what, required, got in (("meta", META, meta), ("columns", needs, columns)):
        missing = [key for key in required if key not in got]
        if missing:
            raise ValueError(f"{path.name}: expected {what} to hold {', '.join(missing)}, got {', '.join(got)}")
    for n, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"{path.name}: expected {len(columns)} values in row {n}, got {len(row)}")
    read_rows = (dict(zip(columns, map(_from_json, row), strict=True)) for row in rows)
    return Recording(meta, tuple(columns), tuple(read_rows))


def script(doc: str | None, out: str | None = None, quick: str = "") -> argparse.ArgumentParser:
    """Return the parser of a script that makes a recording, with the option --out, by default data/<out>.json.

    doc: the script's docstring. quick: what an option --quick does, "" for no such option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out and carried.folder("data") / f"{out}.json")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(command: str, device: str | None = None, **more: str) -> dict[str, str]:
    """Return the meta of a recording made here and now: `META`, flakit's version, and `more`. command: the one that
    reproduces it. device: its name; None: the GPU's."""
    from .. import __version__

    name = torch.cuda.get_device_name() if device is None else device
    versions = {"torch": torch.__version__, "triton": version_of("triton") or "none", "flakit": __version__}
    return {"device": name, "date": datetime.date.today().isoformat(), **versions, "command": command, **more}


def write(path: str | Path, meta: Mapping[str, str], rows: Sequence[Mapping]) -> Path:
    """Write a table to path, a row a line, and return the path. Every row must have the columns of the first. meta: at
    least `META`; further keys (driver, commit, notes) are written, too. Raises ValueError if meta or rows lack any."""
    missing = [key for key in META if not meta.get(key)]
    if missing:
        raise ValueError(f"meta: expected {', '.join(META)}, got none for {', '.join(missing)}")
    if not rows:
        raise ValueError("rows: expected at least one row, got none")
    columns = list(rows[0])
    lines = []
    for n, row in enumerate(rows):
        if list(row) != columns:
            raise ValueError(f"rows: expected columns {columns} in row {n}, got {list(row)}")
        lines.append(json.dumps([_to_json(x) for x in row.values()], allow_nan=False))
    head = f'{{"meta": {json.dumps(dict(meta), indent=1)},\n"columns": {json.dumps(columns)},\n"rows": [\n'
    path = Path(path)
    path.write_text(head + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    return path


def _to_json(x):
    if isinstance(x, (list, tuple)):
        return [_to_json(each) for each in x]
    if isinstance(x, float):
        return float(f"{x:.4g}") if math.isfinite(x) else str(x)
    return x


def _from_json(x):
    if isinstance(x, list):
        return [_from_json(each) for each in x]
    return float(x) if x in _NON_FINITE else x
