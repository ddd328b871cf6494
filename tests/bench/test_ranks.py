"""What is said of one sequence over several GPUs is what was recorded."""

from pathlib import Path

import pytest

from docs import tables
from flakit.bench.ranks import shared
from flakit.numerics import recorded

ROOT = Path(__file__).parents[2]
TABLE = recorded.read("h200_ranks")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("README.md", "{least:.2f} to {most:.2f} times as fast on two H200s as on one"),
        ("README.zh.md", "两张 H200 的速度是一张的 {least:.2f} 到 {most:.2f} 倍"),
        ("CHANGELOG.md", "on two GPUs that is {least:.2f} to {most:.2f} times as fast"),
    ],
)
def test_ratios_are_those_recorded(text, sentence):
    ratios = [row["alone_ms"] / row["together_ms"] for row in TABLE.rows]
    assert {(row["T"], row["ranks"]) for row in TABLE.rows} == {(262_144, 2)} and "H200" in TABLE.meta["device"]
    said = " ".join((ROOT / text).read_text().split())
    assert sentence.format(least=min(ratios), most=max(ratios)) in said
    of_four = [row["alone_ms"] / row["together_ms"] for row in recorded.read("h100_ranks").select(ranks=4)]
    assert f"{min(of_four):.2f} {'到' if 'zh' in text else 'to'} {max(of_four):.2f}" in said
    if text != "CHANGELOG.md":
        assert "262,144" in said


def test_the_table_of_the_operators_is_what_was_recorded():
    said = (ROOT / "docs/operators.md").read_text()
    for row in TABLE.rows:
        alone, together = row["alone_ms"], row["together_ms"]
        line = f"| {row['operator'].upper()} | {alone:.3g} | {together:.3g} | {alone / together:.2f} | "
        line += f"{row['bytes'] / 2**20:.1f} | {row['overlapped']:.0%} of {row['under_way_ms']:.2f} ms |"
        assert line in said


def test_the_table_of_two_and_four_gpus_is_what_was_recorded():
    said, table = (ROOT / "docs/operators.md").read_text(), recorded.read("h100_ranks")
    for op in ("rwkv6", "rwkv7", "gsa"):
        two, four = (table.select(operator=op, ranks=ranks)[0] for ranks in (2, 4))
        cells = [two["alone_ms"], two["together_ms"], four["together_ms"]]
        ratios = [row["alone_ms"] / row["together_ms"] for row in (two, four)]
        one, of_two, of_four = (f"{ms:.3g}" for ms in cells)
        assert f"| {op.upper()} | {one} | {of_two} | {ratios[0]:.2f} | {of_four} | {ratios[1]:.2f} |" in said


def test_more_ranks_are_as_accurate_as_one():
    table = recorded.read("cpu_ranks_accuracy")
    alone = {(r["operator"], r["dtype"], r["decay"]): r for r in table.select(ranks=1)}
    assert len(alone) == 3 * 2 * 3 and set(table.values("ranks")) == {1, 2, 3, 4, 8}
    for row in table.rows:
        one = alone[row["operator"], row["dtype"], row["decay"]]
        assert row["o"] < 1.3 * one["o"] and row["gradients"] < 1.3 * one["gradients"], row


def test_how_long_spans_of_time_overlap():
    messages, kernels = [(1.0, 3.0), (2.0, 4.0), (8.0, 9.0)], [(0.0, 1.5), (2.5, 3.5), (3.0, 3.25), (9.0, 10.0)]
    assert shared(messages, kernels) == (4.0, 1.5)
    assert shared(messages, []) == (4.0, 0.0) and shared([], kernels) == (0.0, 0.0)


def test_the_page_on_many_ranks_has_no_gaps():
    page, picture = tables.ranks((ROOT / "docs/ranks.md").read_text())
    assert "{{" not in page and "}}" not in page
    assert picture.alt in page
