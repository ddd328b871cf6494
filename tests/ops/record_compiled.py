"""Bring data/compiled.json up to date: the resources of every launch of test_compiled.py on its chip.

    python -m tests.ops.record_compiled [--anew] [--workers N]

It compiles launches without a row and drops rows that no test needs any more; with --anew, it compiles all. When
interrupted, it resumes at the next call. A Triton other than the one that constraints.txt pins compiles for sm_90
alone, on which flakit has run; the rows of other Tritons stay in the file:

    pip install --no-deps --target build/triton-3.6.0 triton==3.6.0
    PYTHONPATH=build/triton-3.6.0 python -m tests.ops.record_compiled
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context

import triton

from flakit.bench.launches import Launch
from flakit.numerics import recorded
from tests.ops import ledger
from tests.ops.compiling import Compiled, compile_for, tile
from tests.run import cores

ORDER = "triton", "chip", "row", "kernel", "constants", "key"

requested: dict[str, tuple[Launch, int]] = {}
"""The launches and chips by key. Workers are forked, since launches cannot be pickled."""


def record(wanted: Iterable[tuple[Launch, int]], *, anew: bool = False, workers: int = 1) -> list[str]:
    """Write the file; return the keys of what was compiled."""
    requested.clear()
    requested.update((ledger.key(*each), each) for each in wanted)
    known = {} if anew else {key: row for key, row in ledger.read().items() if key in requested}
    # Longest first, so that all workers finish at about the same time.
    missing = sorted((key for key in requested if key not in known), key=lambda key: -tile(requested[key][0]))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as empty, ProcessPoolExecutor(workers, get_context("fork")) as pool:
        running = {pool.submit(compiled, key, empty): key for key in missing}
        for n, future in enumerate(as_completed(running), 1):
            key = running[future]
            known[key] = future.result()
            write(known)
            launch, chip = requested[key]
            print(f"{time.monotonic() - start:4.0f} s  {n} of {len(missing)}  sm_{chip} {launch.name}", flush=True)
    write(known)
    return missing


def compiled(key: str, cache: str) -> Compiled:
    os.environ["TRITON_CACHE_DIR"] = cache  # empty, so that nothing comes from a cache
    return compile_for(*requested[key])


def write(known: Mapping[str, Compiled]) -> None:
    meta = recorded.provenance(f"{ledger.COMMAND} --anew", "no device: compiled for these chips, run on none")
    rows = [described(*requested[key]) | asdict(compiled) | {"key": key} for key, compiled in known.items()]
    rows += ledger.of_other_tritons()
    meta["triton"] = ", ".join(sorted({row["triton"] for row in rows}))
    recorded.write(ledger.FILE, meta, sorted(rows, key=lambda row: [row[name] for name in ORDER]))


def words(launch: Launch, chip: int) -> tuple[str, str, str, int]:
    """Return a launch's row of the launch table, its kernel with the switches, the other constants, and the chip."""
    constants = (f"{name} {x}" for name, x in launch.options.items() if type(x) is int and name != "MILD")
    return " ".join(launch.row), launch.name, ", ".join(constants), chip


def described(launch: Launch, chip: int) -> dict:
    columns = zip(("row", "kernel", "constants", "chip"), words(launch, chip), strict=True)
    return {"triton": triton.__version__, **dict(columns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="compile all, also what the file has")
    parser.add_argument("--workers", type=int, default=cores(), help="parallel compilations; default: one a core")
    options = parser.parse_args()

    from tests.ops.test_compiled import FOUND_ON, PINNED, asked_for

    wanted = [each for each in asked_for() if PINNED or each[1] == FOUND_ON]
    compiled_now = record(wanted, anew=options.anew, workers=options.workers)
    print(f"wrote {ledger.FILE}: {len(requested)} launches, {len(compiled_now)} of them compiled now")


if __name__ == "__main__":
    main()
