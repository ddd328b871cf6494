"""The covering sets of a GPU still cover what they claim to, with few kernels."""

from dataclasses import replace
from functools import partial

import pytest

from flakit.numerics.operators import OPERATORS
from flakit.ops.common import bands_triton
from flakit.ops.common.launch import TABLE
from flakit.ops.gsa import api as gsa
from flakit.ops.rwkv6 import api as rwkv6
from flakit.ops.rwkv6 import fused_chunk_triton as fused_rwkv6
from flakit.ops.rwkv7 import api as rwkv7
from tests.gpu.covering import SETS, covering_set, generate, kernels, kinds, load
from tests.ops import settings
from tests.ops.checking import run
from tests.ops.pairwise import feasible_pairs, pairs_of
from tests.ops.settings import Setting
from tests.ops.test_settings import by_kind

MOST_KERNELS = {"full": 50, "gsa_full": 41, "fused": 12}
"""Different kernels of one name. What no set can do without: a pair of K and V each, 49 and 36; of the fused ones a
pair of H and states, 12."""


@pytest.mark.parametrize("name", SETS)
def test_every_pair_and_every_value_is_there(name):
    rows, factors = load(name), SETS[name]
    covered = set().union(*(pairs_of(by_kind(setting, factors)) for setting in rows))
    assert feasible_pairs(kinds(name), settings.allowed) <= covered
    for factor, values in factors.items():
        listed = [x for members in values.values() for x in members] if isinstance(values, dict) else values
        assert {getattr(setting, factor) for setting in rows} == set(listed), factor
    assert len({str(setting) for setting in rows}) == len(rows) < 95


@pytest.mark.parametrize("name", ["full", "gsa_full"])
def test_it_has_all_that_the_covering_set_of_other_devices_has(name):
    theirs = set().union(*(pairs_of(by_kind(setting, SETS[name])) for setting in settings.load(name)))
    ours = set().union(*(pairs_of(by_kind(setting, SETS[name])) for setting in load(name)))
    assert theirs <= ours


@pytest.mark.parametrize("name", SETS)
def test_rows_share_their_kernels_and_stand_together(name):
    compiled = [kernels(setting) for setting in load(name)]
    assert len(set(compiled)) <= MOST_KERNELS[name]
    assert len(set(compiled)) == 1 + sum(a != b for a, b in zip(compiled, compiled[1:], strict=False))


def test_kernels_differ_where_triton_compiles_others():
    setting = Setting(T=63, K=40, V=24, decay="-1.7", dtype="bfloat16", states="both", packing="packed")
    same = {"decay": "none", "layout": "strided", "scale": "1", "B": setting.B + 1, "T": 64}
    assert kernels(setting) == kernels(replace(setting, **same))
    for factor, x in {
        "K": 17,
        "V": 17,
        "dtype": "float32",
        "states": "none",
        "H": 7,
        "packing": "none",
    }.items():
        assert kernels(setting) != kernels(replace(setting, **{factor: x})), factor
    narrow = replace(setting, dtype="float32", decay_dtype="same")
    assert kernels(narrow) == kernels(replace(narrow, decay_dtype="float32"))


@pytest.mark.full
@pytest.mark.parametrize("name", SETS)
def test_committed_file_is_what_the_generator_makes(name):
    assert load(name) == generate(name), "run python -m tests.gpu.covering"


@pytest.mark.full
def test_every_row_of_the_launch_table_is_reached(monkeypatch):
    """The smaller settings first, until all of them are."""
    monkeypatch.setattr(fused_rwkv6, "FEWEST", 0)
    compiling = pytest.importorskip("tests.ops.compiling", reason="needs Triton", exc_type=ImportError)
    for module in (rwkv6, rwkv7, gsa):
        monkeypatch.setattr(module, "choose_backend", lambda backend, x: "triton")
    given = [(x, form) for op in OPERATORS for x in covering_set(op) for form in ("chunk", "recurrent")]
    given += [(x, "chunk") for op in ("rwkv6", "rwkv7") for x in covering_set(op, "fused")]
    missing = set(TABLE)
    for setting, form in sorted(given, key=lambda each: each[0].elements):
        made, arriving = settings.make(setting)
        for hopper in (False, True):
            monkeypatch.setattr(bands_triton, "runs_gluon", lambda *tensors, hopper=hopper: hopper)
            missing -= {x.row for x in compiling.launches(partial(run, setting, made, arriving, form))}
        decode, _ = settings.make(replace(setting, T=1, packing="none"))
        missing -= {x.row for x in compiling.launches(partial(OPERATORS[setting.op].forms["recurrent"], **decode))}
        if not missing:
            break
    assert not missing
