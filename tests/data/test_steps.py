"""The tables of what was tried for speed agree with the tuning log, every experiment of which has an outcome."""

import math
import re

import pytest

from flakit.numerics import recorded

TUNING = (recorded.data_folder() / "tuning.md").read_text(encoding="utf-8")
STEPS = recorded.read("h200_steps")


def blocks():
    """[(section, a line of a table or a paragraph of it)]"""
    found = []
    for section in re.split(r"^## ", TUNING, flags=re.M):
        lines = re.sub(r"(?<!\n)\n(?![|\n])", " ", section).splitlines()
        found += [(section, line) for line in lines if line]
    return found


BLOCKS = blocks()


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def numbers(text):
    """Every number of a text, and the sums that it writes with a plus."""
    found = {float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text)}
    return found | {round(float(a) + float(b), 2) for a, b in re.findall(r"(\d+\.\d+) \+ (\d+\.\d+)", text)}


def several(x):
    return set() if x is None else set(x) if isinstance(x, list) else {x}


@pytest.mark.parametrize("row", STEPS.rows, ids=lambda row: f"{row['name']}, {row['part']}")
def test_a_step_is_that_of_tuning_md(row):
    ((section, line),) = [found for found in BLOCKS if found[1].removeprefix("| ").startswith(row["step"])]
    cells = cells_of(line)
    assert row["expected"] is None or row["expected"] == cells[1]
    assert cells[3] == ("yes" if row["kept"] else "no")
    assert row["day"] is None or section.startswith(row["day"])

    before, after = several(row["before_ms"]), several(row["after_ms"])
    assert before <= numbers(section)
    assert after <= numbers(line) or (cells[2] == "nothing" and after == before)
    assert several(row["times"]) | several(row["spilled"]) | several(row["code_kb"]) <= numbers(line)
    assert several(row["code_kb_before"]) <= numbers(section)
    assert bool(after) != bool(row["times"]), "milliseconds, or how many times as long"

    if row["expected_ms"] is not None:
        words, (start,) = row["expected"], before
        may_be = numbers(words) | {round(start + x, 3) for x in numbers(words)}
        may_be |= {start} if words in ("nothing", "as fast") else set()
        may_be |= {round(start / 2, 3)} if "half" in words else set()
        assert row["expected_ms"] in may_be


DATED = r"(Before )?2026-\d\d-\d\d( (and|to) \d\d)? · [^·]+ · [^·]+"


def test_a_record_is_found_by_its_heading():
    *records, last = re.findall(r"^## (.*)$", TUNING, re.M)
    assert len(records) > 25 and len(set(records)) == len(records) and last == "Open"
    assert [heading for heading in records if not re.fullmatch(DATED, heading)] == []
    days = [heading.removeprefix("Before ")[:10] for heading in records if "CPU" not in heading]
    assert days == sorted(days)


def test_every_experiment_says_whether_it_was_kept():
    tables = re.findall(r"^\| tried .*\n\|[-|]+\n((?:\|.*\n)+)", TUNING, re.M)
    status = [cells_of(line)[-1] for table in tables for line in table.splitlines()]
    assert "" not in status and status.count("yes") > 60 and status.count("no") > 40
    assert sum(row["kept"] for row in STEPS.rows) > len(STEPS.rows) / 3


def lines_below(head):
    """The rows of the log's table with such a head, and what follows them."""
    lines = [line for _, line in BLOCKS]
    (place,) = [n for n, line in enumerate(lines) if head in line]
    return lines[place + 2 :]


def test_how_many_sequences_it_takes():
    table = recorded.read("h200_waves")
    for row, line in zip(table.rows, lines_below("sequences | programs"), strict=False):
        assert [float(cell) for cell in cells_of(line)] == [
            row["B"],
            row["programs"],
            row["one_program_ms"],
            row["long_ms"],
        ]
        assert row["programs"] == row["B"] * table.meta["H"]


def test_what_steep_chunks_cost():
    table = recorded.read("h200_steep")
    decays, times = table.values("decay"), {(row["op"], row["decay"]): row for row in table.rows}
    assert len(times) == len(table.rows) == 2 * len(decays)
    for decay, line in zip(decays, lines_below("RWKV6 before | after"), strict=False):
        name, *cells = cells_of(line)
        first = {"trained": "-exp(x - 3)", -math.inf: "-inf everywhere"}.get(decay, "")
        first = first or (f"{decay:g} everywhere" if isinstance(decay, float) else decay.removesuffix(" steep"))
        assert first in name
        for op, before, after in (("rwkv6", *cells[:2]), ("rwkv7", *cells[2:])):
            row = times[op, decay]
            assert [row["before_ms"], row["after_ms"]] == [float(before), float(after.partition("(")[0])]
