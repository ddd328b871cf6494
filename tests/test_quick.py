"""What `make test` and the rest run: together every test once, and the first shows every value of every parameter."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.quick import each_value_once, left_out
from tests.run import QUICK, REST, WITHOUT_KERNELS, steps

pytest_plugins = ["pytester"]

ROWS = [{"op": op, "form": form, "T": T} for op in "abc" for form in "xy" for T in (1, 5, 9, 200)]


def shown(rows):
    return {value for row in rows for value in row.items()}


def test_few_rows_show_every_value_and_two_tests_show_other_combinations():
    one, another = (each_value_once(ROWS, seed=seed) for seed in ("one", "another"))
    assert one == each_value_once(ROWS, seed="one") != another
    for chosen in (one, another):
        assert shown(ROWS[n] for n in chosen) == shown(ROWS) and len(chosen) == 4


def test_cheap_rows_come_first():
    rows = [{"T": T, "heads": heads} for T in (1, 200) for heads in (1, 2)]
    chosen = [rows[n] for n in each_value_once(rows, [row["T"] * row["heads"] for row in rows])]
    assert shown(chosen) == shown(rows) and {"T": 200, "heads": 2} not in chosen


SUITE = """
    import numpy, pytest

    @pytest.mark.parametrize("place", ["torch", pytest.param("interpreted", marks=pytest.mark.interpret)])
    @pytest.mark.parametrize("x", [numpy.ones(2), numpy.ones(2), 1, True])
    @pytest.mark.parametrize("op", ["a", "b"])
    def test_many(op, x, place): pass

    @pytest.mark.interpret
    @pytest.mark.parametrize("op", ["a", "b"])
    @pytest.mark.parametrize("form", ["c", "d"])
    def test_next(op, form): pass

    @pytest.mark.interpret
    @pytest.mark.parametrize("setting", [1, 2, 3])
    def test_one_after_another(setting): pass

    @pytest.mark.parametrize("T", [1, pytest.param(4096, marks=pytest.mark.full)])
    def test_sizes(T): pass

    @pytest.mark.full
    def test_long(): pass

    def test_short(): pass
"""


@pytest.fixture
def selected(pytester):
    """The names of the tests that pytest selects with these options, of a suite with this project's conftest."""
    pytester.makeini("[pytest]\nmarkers =\n  full\n  interpret\n")
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makepyfile(SUITE)

    def collect(*options):
        lines = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
        return [line.split("::")[1] for line in lines if "::" in line]

    return collect


def test_the_quick_run_and_the_rest_are_everything_once(selected):
    everything, quick, rest = selected(), selected("-m", QUICK), selected("-m", REST)
    assert (
        sorted(quick + rest) == sorted(everything) and len(set(everything)) == len(everything) == 2 * 4 * 2 + 4 + 3 + 4
    )
    assert {"test_short", "test_sizes[1]", *(f"test_one_after_another[{n}]" for n in (1, 2, 3))} <= set(quick)
    assert {"test_long", "test_sizes[4096]"} <= set(rest)
    cases = [name[:-1].split("[")[1].split("-") for name in quick if "test_many" in name]
    compiled = [(op, x) for op, x, place in cases if place == "torch"]
    assert len(compiled) == 4 and {op for op, _ in compiled} == {"a", "b"} and len({x for _, x in compiled}) == 4
    assert len(cases) == len(compiled) + 1  # one combination of those interpreted
    assert sum("test_next" in name for name in quick) == 1


def test_interpreted_tests_of_a_file_take_turns():
    rows = [{"op": op, "form": form} for op in "abc" for form in "de"]
    tests = {"one.py::test_0": 0, "one.py::test_1": 1, "one.py::test_2": 2, "one.py::test_3": 0, "two.py::test_0": 0}

    def item(test, n):
        callspec = SimpleNamespace(params=rows[n])
        return SimpleNamespace(nodeid=f"{test}[{n}]", callspec=callspec, get_closest_marker="interpret".__eq__)

    items = [item(test, n) for test in tests for n in range(len(rows))]
    out = left_out(items)
    chosen = [x.nodeid for x in items if x not in out]
    assert chosen == [f"{test}[{each_value_once(rows, seed=test)[turn]}]" for test, turn in tests.items()]


def test_no_interpreted_test_lies_where_its_step_does_not_look():
    files = [path for folder in WITHOUT_KERNELS for path in Path(__file__).with_name(folder).rglob("*.py")]
    assert files
    assert [path for path in files if "mark.interpret" in path.read_text() or "PLACES" in path.read_text()] == []


def test_every_kind_of_test_has_one_step():
    kinds = [{"interpret"}, {"browser"}, {"browser", "full"}, {"browser", "full", "timed"}, {"notebook"}, {"gpu"}]
    kinds += [set(), {"full"}]
    for kind in kinds:
        marked = {name: name in kind for name in ("interpret", "browser", "notebook", "gpu", "full", "timed")}
        assert sum(eval(markers, {}, marked) for _, markers, *_ in steps(1, None)) == 1, kind
        if "full" not in kind:
            assert sum(eval(markers, {}, marked) for _, markers, *_ in steps(1, QUICK)) == 1, kind
