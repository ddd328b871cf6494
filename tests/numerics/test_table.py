"""Tables: heads, alignment, short numbers, and the same cells as text and as HTML."""

import math
import re
from typing import NamedTuple

import pytest
import torch

from flakit.numerics.table import Table, pivot

ROWS = [
    {"what": "o", "limit": 1.38629, "T": 64, "finite": True},
    {"what": "d<w>", "limit": math.inf, "T": 128, "finite": False},
]


def test_text_is_aligned():
    assert str(Table(ROWS, digits=3)).splitlines() == [
        "what  limit    T  finite",
        "o      1.39   64  yes",
        "d<w>    inf  128  no",
    ]


def test_html_escapes_and_aligns():
    shown = Table(ROWS, {"what": "tensor", "T": "tokens"}, caption="a & b")._repr_html_()
    assert "a &amp; b</caption>" in shown and '<td style="text-align: left">d&lt;w&gt;</td>' in shown
    assert '<th style="text-align: right">tokens</th>' in shown and "limit" not in shown


def test_a_number_is_not_broken_at_its_minus():
    shown = Table([{"error": 1.2e-7, "told": "from -1.5e-3 to -inf, well-known", "w": -8}])._repr_html_()
    unbroken = re.findall(r'<span style="white-space: nowrap">(.+?)</span>', shown)
    assert unbroken == ["1.2e-07", "-1.5e-3", "-inf", "-8"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-8.0, "-8"), (1234.5678, "1235"), (2.5e7, "2.5e+07"), (25_000_000, "25000000"), (-5e5, "-500000"),
        (1.3e-5, "1.3e-05"), (1e16, "1e+16"), (math.nan, "NaN"), (-math.inf, "-inf"), (None, ""),
        (torch.bfloat16, "bfloat16"), ((0, 15, 1), "0, 15, 1"), (True, "yes"),
    ],
)  # fmt: skip
def test_values(value, text):
    assert Table([{"x": value}]).cells == [[text]]


class Row(NamedTuple):
    what: str
    recorded: float
    law: float
    measured: float


def test_named_tuples_and_missing_cells():
    table = Table([Row("o", 1.0, 2.0, 3.0), {"what": "dr", "extra": 1}])
    assert table.heads == ["what", "recorded", "law", "measured", "extra"]
    assert table.cells[1] == ["dr", "", "", "", "1"]
    assert str(table).splitlines()[2].endswith("      1")  # a column with gaps is still one of numbers


def test_unknown_column():
    with pytest.raises(ValueError, match="columns: expected some of what, limit, T, finite, got error"):
        Table(ROWS, ["error"])


def test_a_table_of_nothing_still_says_what_it_would_hold():
    assert str(Table([], ["T", "l2"], caption="no recording here")).splitlines() == ["no recording here", "T  l2"]


def test_pivot():
    rows = [
        {"decay": decay, "form": form, "dtype": dtype, "l2": len(form) * decay}
        for decay in (-8.0, -1.0)
        for form in ("chunk", "recurrent")
        for dtype in (torch.float32, "bfloat16")
    ]
    made = pivot(rows, "decay", ["form", "dtype"], "l2")
    names = ["chunk, float32", "chunk, bfloat16", "recurrent, float32", "recurrent, bfloat16"]
    assert [list(row) for row in made] == [["decay", *names]] * 2
    assert [row["recurrent, bfloat16"] for row in made] == [-72.0, -9.0]
    with pytest.raises(ValueError, match="columns: expected one row for decay -8.0, chunk, got two"):
        pivot(rows, "decay", ["form"], "l2")
