"""The committed covering sets still cover what they claim to."""

from dataclasses import asdict

import pytest
import torch

from flakit.numerics.operators import OPERATORS, operator
from tests.ops.pairwise import covering_rows, feasible_pairs, pairs_of
from tests.ops.settings import (
    SETS,
    allowed,
    covering_set,
    generate,
    kinds,
    load,
    make,
    programs,
    sampled,
    strided,
)

SMALL_FACTORS = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False)}


def by_kind(setting, factors):
    """A row with the values that are grouped replaced by their group."""
    row = {}
    for factor, values in factors.items():
        value = getattr(setting, factor)
        row[factor] = (
            next(k for k, members in values.items() if value in members) if isinstance(values, dict) else value
        )
    return row


@pytest.mark.parametrize("name", SETS)
def test_every_pair_is_covered(name):
    covered = set().union(*(pairs_of(by_kind(setting, SETS[name])) for setting in load(name)))
    assert feasible_pairs(kinds(name), allowed) <= covered


@pytest.mark.parametrize("name", SETS)
def test_every_value_occurs_alone(name):
    rows = load(name)
    for factor, values in SETS[name].items():
        listed = [x for members in values.values() for x in members] if isinstance(values, dict) else values
        assert {getattr(setting, factor) for setting in rows} == set(listed), factor


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_sample_has_every_value_and_for_each_operator_what_matters_most(size):
    settings = [setting for op in OPERATORS for setting in covering_set(op, size)]
    sample = [param.values[0] for param in sampled(settings, programs) if not param.marks]
    assert len(sample) < len(settings) / 4
    for factor in asdict(settings[0]):
        assert {getattr(x, factor) for x in sample} == {getattr(x, factor) for x in settings}, factor
    for pair in [("op", "dtype"), ("op", "packing"), ("op", "layout"), ("op", "states"), ("packing", "layout")]:
        found, there = ({tuple(getattr(x, factor) for factor in pair) for x in rows} for rows in (sample, settings))
        assert found == there, pair


@pytest.mark.parametrize("name, largest", [("full", 256), ("gsa_full", 512)])
def test_full_set_holds_the_extremes(name, largest):
    rows = load(name)
    assert 70 <= len(rows) <= 90
    assert {min(s.T for s in rows), max(s.T for s in rows)} == {1, 4096}
    for size in ("K", "V"):
        assert {min(getattr(s, size) for s in rows), max(getattr(s, size) for s in rows)} == {16, largest}
    assert {"none", "forget"} <= {s.decay for s in rows if s.T == 4096}
    assert sum(s.K != s.V for s in rows) > 0.8 * len(rows)
    assert any(0 in s.lengths and 1 in s.lengths for s in rows)


@pytest.mark.parametrize("name", SETS)
def test_committed_file_is_what_the_generator_makes(name):
    assert load(name) == generate(name), "run python -m tests.ops.settings"


@pytest.mark.parametrize("name", SETS)
def test_ids_are_unique(name):
    ids = [str(setting) for setting in load(name)]
    assert len(set(ids)) == len(ids)


def test_generator_covers_and_respects_constraints():
    def together(row):
        return not (row.get("a") == 3 and row.get("b") == "y")

    rows = covering_rows(SMALL_FACTORS, together)
    covered = set().union(*map(pairs_of, rows))
    assert feasible_pairs(SMALL_FACTORS, together) <= covered
    assert frozenset((("a", 3), ("b", "y"))) not in covered
    assert len(rows) < 3 * 2 * 2
    assert rows == covering_rows(SMALL_FACTORS, together)


@pytest.mark.parametrize("name", ["full", "gsa_full"])
@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_layouts_are_what_they_say(layout, name):
    setting = next(s for s in load(name) if s.layout == layout and s.states == "both" and s.T > 1 and s.H > 1)
    made, arriving = make(setting)
    if layout == "expanded":
        states = operator(setting.op).parts(arriving[1])
        assert arriving[0].stride()[:2] == (0, 0) and all(x.stride()[0] == 0 for x in states)
    else:
        op = operator(setting.op)
        assert all(1 not in x.stride() for x in (*op.leaves(made).values(), arriving[0], *op.parts(arriving[1])))


@pytest.mark.parametrize("name", SETS)
def test_strided_offsets_are_a_column_of_a_table(name):
    packed = [s for s in load(name) if s.layout == "strided" and s.lengths]
    assert packed
    for setting in packed:
        made, _ = make(setting)
        assert made["cu_seqlens"].stride() == (2,)
        assert made["cu_seqlens"].diff().tolist() == setting.lengths
        in_memory = made["cu_seqlens"].as_strided((len(setting.lengths) + 1,), (1,))
        assert not torch.equal(in_memory, made["cu_seqlens"])  # who reads it raw reads something else


def test_strided_keeps_values():
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(strided(x), x) and not strided(x).is_contiguous()
