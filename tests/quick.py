"""What `make test` runs of a test with many cases: as few as show every value of every parameter.

Kernels that are interpreted take a hundred times as long: of the combinations that a test makes of several parameters
it runs one. The tests of a file take turns: its first test runs the first of its few combinations, the second the
second, and so on, from the beginning again after the last. What is left out is marked `full`, like what is marked so by
hand, and runs in `make test-all`.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import count
from zlib import crc32

import pytest

Row = Mapping[str, Hashable]


def each_value_once(rows: Sequence[Row], costs: Sequence[float] | None = None, seed: str = "") -> list[int]:
    """The places of few and cheap rows in which every value of every column occurs: greedy, and always the same ones.

    seed: settles which of equally good rows are taken, so that of two tests with the same parameters one shows the
    combinations that the other leaves out.
    """
    costs = costs or [1.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda n: crc32(f"{seed} {n}".encode()))
    missing = {value for row in rows for value in row.items()}
    chosen = []
    while missing:
        chosen.append(max(order, key=lambda n: len(missing & rows[n].items()) / costs[n]))
        missing -= rows[chosen[-1]].items()
    for n in sorted(chosen, key=lambda n: -costs[n]):
        if rows[n].items() <= {value for other in chosen if other != n for value in rows[other].items()}:
            chosen.remove(n)  # later rows show all that it does
    return sorted(chosen)


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those of the collected cases that `make test` does without."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("full"):
            place = next((name for name in ("interpret", "gpu") if item.get_closest_marker(name)), None)
            cases[item.nodeid.partition("[")[0], place].append(item)
    out, turns = [], defaultdict(count)
    for (test, place), beside in cases.items():
        rows = [_row(item) for item in beside]
        combined = sum(len(set(values)) > 1 for values in zip(*(row.values() for row in rows), strict=True)) > 1
        few = each_value_once(rows, seed=test)
        if place == "interpret" and combined:
            few = [few[next(turns[test.partition("::")[0]]) % len(few)]]
        out += [item for n, item in enumerate(beside) if n not in few]
    return out


def _row(item: pytest.Item) -> Row:
    """Its parameters: what is not a plain value is known by its identity, for it may not be comparable."""
    plain = (str, int, float, bool, type(None))
    return {
        name: (type(x), x) if isinstance(x, plain) else ("object", id(x)) for name, x in item.callspec.params.items()
    }
