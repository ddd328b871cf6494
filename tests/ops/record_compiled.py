"""Bring data/compiled.json up to date: what every launch that test_compiled.py asks for needs on its chip.

    python -m tests.ops.record_compiled [--anew] [--workers N]

It compiles what the file does not have and leaves out what no test asks for any more; with --anew, it compiles all.
What is cut short goes on from there. Another Triton than the one that constraints.txt pins compiles for sm_90 alone,
which is what flakit has run on; each Triton's rows stand beside the others':

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

asked: dict[str, tuple[Launch, int]] = {}
"""By its key, each launch with its chip; workers are forked, since none of these could be sent to them."""


def record(wanted: Iterable[tuple[Launch, int]], *, anew: bool = False, workers: int = 1) -> list[str]:
    """Write the file; returns the keys of what was compiled for it."""
    asked.clear()
    asked.update((ledger.key(*each), each) for each in wanted)
    known = {} if anew else {key: found for key, found in ledger.read().items() if key in asked}
    # The longest first, so that no worker ends long after the others.
    missing = sorted((key for key in asked if key not in known), key=lambda key: -tile(asked[key][0]))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as empty, ProcessPoolExecutor(workers, get_context("fork")) as pool:
        running = {pool.submit(compiled, key, empty): key for key in missing}
        for n, ended in enumerate(as_completed(running), 1):
            key = running[ended]
            known[key] = ended.result()
            write(known)
            launch, chip = asked[key]
            print(f"{time.monotonic() - begun:4.0f} s  {n} of {len(missing)}  sm_{chip} {launch.name}", flush=True)
    write(known)
    return missing


def compiled(key: str, cache: str) -> Compiled:
    os.environ["TRITON_CACHE_DIR"] = cache  # an empty one: nothing that was compiled before
    return compile_for(*asked[key])


def write(known: Mapping[str, Compiled]) -> None:
    meta = recorded.provenance(f"{ledger.COMMAND} --anew", "no device: compiled for these chips, run on none")
    rows = [described(*asked[key]) | asdict(found) | {"key": key} for key, found in known.items()]
    rows += ledger.of_other_tritons()
    meta["triton"] = ", ".join(sorted({row["triton"] for row in rows}))
    recorded.write(ledger.FILE, meta, sorted(rows, key=lambda row: [row[name] for name in ORDER]))


def words(launch: Launch, chip: int) -> tuple[str, str, str, int]:
    """A launch in words: its row of the launch table, its kernel with the switches, the other constants; the chip."""
    constants = (f"{name} {x}" for name, x in launch.options.items() if type(x) is int and name != "MILD")
    return " ".join(launch.row), launch.name, ", ".join(constants), chip


def described(launch: Launch, chip: int) -> dict:
    found = zip(("row", "kernel", "constants", "chip"), words(launch, chip), strict=True)
    return {"triton": triton.__version__, **dict(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="compile all, what the file has too")
    parser.add_argument("--workers", type=int, default=cores(), help="kernels compiled at a time; default: a core each")
    options = parser.parse_args()

    from tests.ops.test_compiled import FOUND_ON, PINNED, asked_for

    wanted = [each for each in asked_for() if PINNED or each[1] == FOUND_ON]
    made = record(wanted, anew=options.anew, workers=options.workers)
    print(f"wrote {ledger.FILE}: {len(asked)} launches, {len(made)} of them compiled now")


if __name__ == "__main__":
    main()
