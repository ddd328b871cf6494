"""Pairwise covering sets: few rows in which any two values of any two factors occur together at least once.

Most faults need one or two things at once (an odd length, or an odd length with an initial state); the full product of
twelve factors is millions of runs, a pairwise set is as long as the two largest factors multiplied.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, object]
Pair = frozenset[tuple[str, object]]


def pairs_of(row: Mapping[str, object]) -> set[Pair]:
    return {frozenset(two) for two in combinations(row.items(), 2)}


def feasible_pairs(factors: Mapping[str, Sequence], allowed: Callable[[Row], bool]) -> set[Pair]:
    """Every pair of values of different factors that `allowed` accepts as a partial row."""
    return {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
        if allowed({a: x, b: y})
    }


def covering_rows(
    factors: Mapping[str, Sequence], allowed: Callable[[Row], bool], seed: int = 0, candidates: int = 40
) -> list[Row]:
    """Greedy and deterministic: each new row is the best of some candidates grown from a pair that is still missing.

    allowed: whether a partial row can be completed; it must accept some value of a missing factor whenever it accepts
    the row without it.
    """
    rng = random.Random(seed)
    missing = feasible_pairs(factors, allowed)
    order = sorted(missing, key=lambda pair: sorted(map(repr, pair)))  # sets have no order of their own
    used = Counter()
    rows = []
    while missing:
        order = [pair for pair in order if pair in missing]
        grown = (_grow(dict(rng.choice(order)), factors, allowed, missing, used, rng) for _ in range(candidates))
        best = max(grown, key=lambda row: len(pairs_of(row) & missing))
        rows.append({name: best[name] for name in factors})
        used.update(best.items())
        missing -= pairs_of(best)
    return rows


def _grow(row: Row, factors, allowed, missing, used, rng) -> Row:
    for name in rng.sample(list(factors), len(factors)):
        if name in row:
            continue
        values = [x for x in factors[name] if allowed({**row, name: x})]
        gain = {x: sum(frozenset(((name, x), other)) in missing for other in row.items()) for x in values}
        row[name] = max(values, key=lambda x: (gain[x], -used[name, x], rng.random()))
    return row
