"""The covering sets of a GPU, in covering/*.csv: the pairs of `tests.ops.settings`, in rows that share their kernels.

On a GPU a setting takes as long as its kernels take to compile, some ten of them, and a kernel is compiled for sizes,
dtypes, chunk size, states and whether tokens are packed. A pairwise set that does not look at this has kernels of its
own for every row. Here a first pairwise set, over what kernels are compiled for alone, says which kernels there are;
the rows are made of these and of all that changes no kernel, decays, lengths, layouts, batches, until every pair is
there. Rows with the same kernels stand together, so that one process compiles them and runs them all.

"full" is RWKV6's and RWKV7's, "gsa_full" GSA's, "fused" what fused chunks take: heads of 33 to 64 channels.
`python -m tests.gpu.covering` remakes the files; a test checks that what is committed still covers everything.
"""

import random
from collections import Counter
from pathlib import Path

from tests.ops import settings
from tests.ops.pairwise import Row, covering_rows, feasible_pairs, pairs_of
from tests.ops.settings import Setting

FUSED = {"K": (40, 64), "V": (56, 64), "chunk_size": ("16",)}
SETS = {name: settings.SETS[name] for name in ("full", "gsa_full")} | {"fused": settings.FULL | FUSED}
COMPILED = "K", "V", "dtype", "decay_dtype", "states", "chunk_size", "H", "M", "group"
"""The factors that kernels are compiled for; of packing, what `packed` says."""
CANDIDATES = 40
KERNEL_CANDIDATES = {"full": 200, "gsa_full": 1000, "fused": 1000}
"""Rows tried for each kernel; past these, a set of kernels got no smaller."""


def path(name: str) -> Path:
    return Path(__file__).with_name("covering") / f"{name}.csv"


def kernels(setting: Setting) -> tuple:
    """What a setting's kernels are compiled for: the same for all settings that share them."""
    wide = setting.decay_dtype == "float32" != setting.dtype
    own = [getattr(setting, factor) for factor in COMPILED if factor != "decay_dtype"]
    return setting.op, *own, wide, setting.packing != "none"


def load(name: str) -> list[Setting]:
    """The rows of a set of `SETS`."""
    return settings.read(path(name))


def covering_set(op: str, name: str = "full") -> list[Setting]:
    """An operator's settings, "full" or "fused"."""
    return settings.of_operator(op, load(f"gsa_{name}" if op == "gsa" else name))


def kinds(name: str) -> dict[str, tuple]:
    """What is paired: each factor's values, or the kinds that they are grouped into."""
    return {factor: tuple(values) for factor, values in SETS[name].items()}


def generate(name: str) -> list[Setting]:
    rows = [{factor: row[factor] for factor in SETS[name]} for row in _rows(name)]
    return sorted(settings.with_values(rows, SETS[name]), key=lambda s: (*map(str, kernels(s)), s.T, s.decay))


def _rows(name: str) -> list[Row]:
    """Greedy and deterministic: each new row is the best of some that are grown from a pair that is still missing."""
    factors, rng = kinds(name) | {"packed": (False, True)}, random.Random(0)
    compiled = [factor for factor in factors if factor in (*COMPILED, "packed")]
    shared = covering_rows(
        {factor: factors[factor] for factor in compiled}, _allowed, candidates=KERNEL_CANDIDATES[name]
    )
    missing = feasible_pairs(kinds(name), settings.allowed)
    missing |= {pair for row in shared for pair in pairs_of(row)}
    order = sorted(missing, key=lambda pair: sorted(map(repr, pair)))
    used, rows = Counter(), []
    while missing:
        order = [pair for pair in order if pair in missing]
        grown = []
        for pair in (rng.choice(order) for _ in range(CANDIDATES)):
            begun = [{**kernel, **dict(pair)} for kernel in shared if all(kernel.get(f, x) == x for f, x in pair)]
            begun = [row for row in begun if _allowed(row)] or [dict(pair)]
            grown.append(_grow(rng.choice(begun), factors, missing, used, rng))
        best = max(grown, key=lambda row: len(pairs_of(row) & missing))
        rows.append({factor: best[factor] for factor in factors})
        used.update(best.items())
        missing -= pairs_of(best)
        kernel = {factor: best[factor] for factor in compiled}
        if kernel not in shared:
            shared.append(kernel)
    return rows


def _allowed(row: Row) -> bool:
    """As of `tests.ops.settings`, where what is compiled for is the packing's."""
    packing = row.get("packing", "packed" if row.get("packed") else "none")
    if "packed" in row and row["packed"] != (packing != "none"):
        return False
    return settings.allowed(row | {"packing": packing})


def _grow(row: Row, factors, missing, used, rng) -> Row:
    for factor in rng.sample(list(factors), len(factors)):
        if factor not in row:
            values = [x for x in factors[factor] if _allowed({**row, factor: x})]
            gain = {x: sum(frozenset(((factor, x), other)) in missing for other in row.items()) for x in values}
            row[factor] = max(values, key=lambda x: (gain[x], -used[factor, x], rng.random()))
    return row


if __name__ == "__main__":
    for name in SETS:
        settings.write(path(name), SETS[name], generate(name))
