"""Run the GPU tests that have not passed for the code as it is now, and keep what came of each one.

    python -m tests.gpu                      # what is left, by 16 processes
    python -m tests.gpu --only "rwkv6 and spike"
    python -m tests.gpu --limit-seconds 540  # stop then; the same command goes on
    python -m tests.gpu --again              # all of them: how long does the whole suite take?

Stopped in whatever way, Ctrl-C, a signal or the machine's end, it has written what it knows to data/gpu_tests.json,
which tests/gpu/results.py describes, and the next call runs the others. It ends with 0 when every test that this
machine can run has passed for this code, with 1 when one fails, with 3 when some are left. What has not passed runs
first, with --again too, and what is known to have passed stays so until it has run again. At the end it says how many
seconds all processes together took for each file, of the tests that were ever measured for this code.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from flakit.numerics import recorded
from tests.gpu import results, sources

LEFT = 3


def main(arguments: Sequence[str] | None = None, root: Path = sources.ROOT, card: str | None = None) -> int:
    """card: the name of the GPU; None asks for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=16, help="processes; default 16")
    parser.add_argument("--only", default="", help="tests whose names match, as pytest's -k")
    parser.add_argument("--limit-seconds", type=int, default=0, help="stop after so many")
    parser.add_argument("--again", action="store_true", help="run all of them, those that have passed too")
    parser.add_argument(
        "--file", type=Path, default=root / "data" / results.FILE.name, help="instead of the one in data/"
    )
    parser.add_argument("--commit", help="what to say where git cannot be asked")
    options, of_pytest = parser.parse_known_args(arguments)
    options.file = options.file.absolute()
    if card is None:
        if not torch.cuda.is_available():
            print("python -m tests.gpu: expected a CUDA GPU, found none", file=sys.stderr)
            return 2
        card = torch.cuda.get_device_name()
    return run(options, of_pytest, root, card)


def run(options: argparse.Namespace, of_pytest: list[str], root: Path, card: str) -> int:
    meta = recorded.provenance(results.COMMAND, card)
    ran = {name: meta[name] for name in ("date", "torch", "triton")}
    ran |= {"card": card, "commit": options.commit or commit(root)}
    files = sources.test_files(root)
    keys = {file: results.key(file, ran, root) for file in files}
    here = results.place(ran)
    rows = [row for row in results.read(options.file) if results.place(row) != here or row["file"] in keys]
    own = [row for row in rows if results.place(row) == here]
    mine = {row["file"]: row for row in own if row["key"] == keys[row["file"]]}
    left = [file for file in files if file not in mine or not results.green(mine[file]) or mine[file]["skipped"]]
    passed = f"{len(files) - len(left)} of {len(files)} files have passed for this code"
    print(f"{card}, Triton {ran['triton']}: {passed}", flush=True)
    left += [file for file in files if options.again and file not in left]
    with tempfile.TemporaryDirectory() as folder:
        run = {
            "root": str(root),
            "out": str(options.file),
            "meta": meta,
            "ran": ran,
            "keys": keys,
            "files": left,
            "again": options.again,
            "known": {file: row["each"] for file, row in mine.items()},
            "seconds": {file: row["seconds"] for file, row in mine.items()},
            # As last measured: of older code, even of another card, seconds still say which tests are long.
            "expected": {row["file"]: row["seconds"] for row in (*(row for row in rows if row not in own), *own)},
            "rows": rows,
        }
        (Path(folder) / "run.json").write_text(json.dumps(run))
        os.environ["FLAKIT_GPU_RUN"] = folder
        if left:
            _stop_after(options.limit_seconds)
            _pytest(options, of_pytest, root, left)
            signal.alarm(0)
    return _told(options.file, ran, keys)


def _pytest(options: argparse.Namespace, of_pytest: list[str], root: Path, files: list[str]) -> None:
    arguments = [f"--rootdir={root}", "-p", "tests.gpu.recording", "-q", "--tb=short", "--durations=20"]
    arguments += ["-p", "no:cacheprovider", "-n", str(options.n), "--dist=loadscope", "--continue-on-collection-errors"]
    arguments += ["-k", options.only] if options.only else []
    os.chdir(root)
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # of each instruction: a twentieth of the time to compile
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")  # no test on a GPU reads what a kernel was on the way
    pytest.main([*arguments, *of_pytest, *files])


def _stop_after(seconds: int) -> None:
    """From now on a signal to end, or the end of the time, is as Ctrl-C: pytest ends, and the results are written."""
    for name in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(name, _interrupt)
    signal.alarm(seconds)


def _interrupt(number, _):
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _told(file: Path, ran: Mapping[str, str], keys: Mapping[str, str]) -> int:
    """Says what is in the file of this card, Triton and code, and what it comes to. ran: as in `results.row`."""
    rows = {row["file"]: row for row in results.read(file) if results.place(row) == results.place(ran)}
    rows = {name: row for name, row in rows.items() if name in keys and row["key"] == keys[name]}
    total = Counter()
    for row in rows.values():
        total.update({name: row[name] for name in results.COUNTED})
        for test in row["failing"]:
            print(f"  failed: {row['file']}::{test}")
    for row in sorted((row for row in rows.values() if results.spent(row)), key=results.spent, reverse=True):
        print(f"{results.spent(row):8.0f} s  {row['file']}")
    measured = sum(x is not None for row in rows.values() for x in row["seconds"])
    print(f"{sum(map(results.spent, rows.values())):8.0f} s  of all processes, for {measured} of {total.total()} tests")
    unknown = [name for name in keys if name not in rows]
    words = [f"{n} {name.replace('_', ' ')}" for name, n in total.items() if n]
    print(f"{ran['card']}: {', '.join(words) or 'nothing run'}; {file}")
    if total["failed"]:
        return 1
    return LEFT if total["not_run"] or unknown else 0


def commit(root: Path) -> str:
    """The commit that is checked out, with a + where the files are no longer its; "?" where git does not say."""
    outputs = []
    for words in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain"]):
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        if done.returncode:
            return "?"
        outputs.append(done.stdout.strip())
    sha, changed = outputs
    return sha + "+" * bool([line for line in changed.splitlines() if not line.endswith(results.FILE.name)])


if __name__ == "__main__":
    sys.exit(main())
