"""Planted losses against the lines of their kernels: `python -m tests.instruments.digits_matrix FILE.png` draws it."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import flakit
from tests.instruments.digits_cases import CASES, Case, line_of
from tests.instruments.matrices import Cell, digits_matrix


def row(case: Case) -> tuple[list[Cell], int]:
    """The lines of a case that compute something, in the order of the source, and the position of the planted one."""
    with flakit.trace(digits=True) as t:
        kept = case.wrong()
    del kept
    named = {finding.line for finding in t.digits.findings}
    by_line: dict[int, list] = {}
    for line in t.digits.lines:
        by_line.setdefault(line.place.line, []).append(line)
    cells = []
    for _, lines in sorted(by_line.items()):
        blamed = [line for line in lines if line in named]
        lost = max(line.lost for line in lines)
        if blamed:  # of an absorbed addend the loss is seen where its sum is used
            lost = max(lost, min(blamed[0].blamed.weight and right_of(blamed[0]), 99.0))
        cells.append(Cell(lost, bool(blamed)))
    return cells, sorted(by_line).index(line_of(case))


def right_of(line) -> float:
    """The digits that the worst lane of a named line lost."""
    from math import inf, log10

    return inf if line.blamed.gain == inf else log10(max(line.blamed.gain, 1.0))


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") != "1":
        env = os.environ | {"TRITON_INTERPRET": "1"}
        return subprocess.call([sys.executable, "-m", __spec__.name, *sys.argv[1:]], env=env)
    from docs.execute import smaller

    rows = {case.shown: row(case) for case in CASES.values() if case.kernel}
    picture = digits_matrix(rows)
    Path(sys.argv[1]).write_bytes(base64.b64decode(smaller(base64.b64encode(picture.png()).decode())))
    print(picture.alt)
    for name, (cells, planted) in rows.items():
        print(f"{name:24} planted in {planted + 1}, named {[n + 1 for n, cell in enumerate(cells) if cell.named]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
