"""What README.md and docs/speed.md say of the GPU tests, written from data/gpu_tests.json.

python -m tests.gpu.summary          writes it there
python -m tests.gpu.summary --check  says what of the results is of older code than is here, or has not passed;
                                  ends with 1 where there is any
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu import results, sources

TEXTS = "README.md", "docs/speed.md"
BEGIN, END = "<!-- gpu tests: python -m tests.gpu.summary -->", "<!-- /gpu tests -->"


def totals(rows: Sequence[Mapping]) -> list[dict]:
    """For each card and Triton: how many tests came to what, on which days and versions; of several commits, how many
    passed on each, so that results of older code do not pass for today's."""
    cards = []
    for place in dict.fromkeys(map(results.place, rows)):
        own = [row for row in rows if results.place(row) == place]
        names = {name: sorted({row[name] for row in own}) for name in ("date", "torch", "triton")}
        names["commit"] = _passed_by_commit(own)
        counts = {name: sum(row[name] for row in own) for name in results.COUNTED}
        cards.append({"card": place[0], **counts, **{name: ", ".join(each) for name, each in names.items()}})
    return cards


def _passed_by_commit(rows: Sequence[Mapping]) -> list[str]:
    """Return the commits that tests ran on, those with most passed tests first and with their number if there are
    several."""
    passed = Counter()
    for row in rows:
        passed[row["commit"]] += row["passed"]
    return list(passed) if len(passed) == 1 else [f"{n} on {commit}" for commit, n in passed.most_common() if n]


def _others(x: Mapping) -> str:
    """What became of those that did not pass."""
    words = [f"{x[name]} {label}" for name, label in (("failed", "failed"), ("not_run", "not run yet")) if x[name]]
    return f", {', '.join(words)}" if words else ""


def text(name: str, rows: Sequence[Mapping]) -> str:
    """The words of one of the texts."""
    pinned = re.search(r"^triton==([\d.]+)", (sources.ROOT / "constraints.txt").read_text(), re.M)[1]
    if not rows:
        return "What the GPU tests (`python -m tests.gpu`) say of these kernels is not recorded yet."
    if name == "README.md":
        each = [
            f"on {x['card']} {x['passed']} of {sum(x[n] for n in results.COUNTED) - x['skipped']} passed{_others(x)} "
            f"({x['commit']}; {x['date']}, torch {x['torch']}, triton {x['triton']})"
            for x in totals(rows)
        ]
        newer = f"pip now installs Triton {pinned}, for which the tests compile every kernel"
        return f"GPU tests: {'; '.join(each)}. {newer}. [More](docs/speed.md)."
    lines = [
        "| GPU | passed | failed | skipped | not run | day | commit | torch | triton |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            "| " + " | ".join(str(x[n]) for n in ("card", *results.COUNTED, "date", "commit", "torch", "triton")) + " |"
            for x in totals(rows)
        ),
    ]
    tritons = sorted({row["triton"] for row in rows})
    on = f"What ran on a GPU ran on Triton {' and '.join(tritons)}; pip installs {pinned} today, for which"
    return "\n".join([*lines, "", f"{on} every kernel is compiled in the tests, and for sm_90 by both."])


def written(name: str, rows: Sequence[Mapping], root: Path = sources.ROOT) -> str:
    """The whole text as it should be."""
    before, rest = (root / name).read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{text(name, rows)}\n{END}{rest.split(END)[1]}"


def complaints(rows: Sequence[Mapping], root: Path = sources.ROOT) -> list[str]:
    """What is not as a release needs it: for every file with GPU tests a row of today's code, in which none failed and
    all were run, on one card and Triton at least."""
    if not rows:
        return [f"no GPU test is recorded: {results.COMMAND} on a machine with a GPU"]
    complete, complaining = [], []
    for place in dict.fromkeys(map(results.place, rows)):
        own = {row["file"]: row for row in rows if results.place(row) == place}
        wrong = {file: _wrong(own.get(file), root) for file in sources.test_files(root)}
        lines = [f"{place[0]}, Triton {place[1]}: {file}: {words}" for file, words in wrong.items() if words]
        complete.append(not lines)
        complaining += lines
    return [] if any(complete) else complaining


def _wrong(row: Mapping | None, root: Path) -> str:
    if row is None:
        return "not run"
    if not results.of_today(row, root):
        return f"run on other code, {row['commit']} of {row['date']}"
    return "" if results.green(row) else f"{row['failed']} failed, {row['not_run']} not run"


def main() -> int:
    rows = results.read()
    if sys.argv[1:] == ["--check"]:
        complaining = complaints(rows)
        print(*(f"GPU tests: {line}" for line in complaining), sep="\n", end="\n" * bool(complaining))
        return int(bool(complaining))
    for name in TEXTS:
        (sources.ROOT / name).write_text(written(name, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
