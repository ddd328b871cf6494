"""The times that docs/speed.md and README.md print are those recorded in h200_speed.json."""

import math
import re
from pathlib import Path

from flakit.bench.speed import SHARES, TRAINED
from flakit.numerics import recorded

ROOT = Path(__file__).parents[2]
SPEED = recorded.read("h200_speed")
MODEL = {"rwkv6": "rwkv6-init", "rwkv7": "rwkv7", "gsa": "gsa"}
"""The decays of a fresh model of each operator."""
DECAYS = {
    "−e^(x−3)": [TRAINED],
    "logsigmoid": ["logsigmoid"],
    "0.1, 1 and 5%": list(SHARES),
    "−5 everywhere": [-5.0],
    "−8, −20 or −inf everywhere": [-8.0, -20.0, -math.inf],
}
"""The decays of a row by words of its label; all other rows have a fresh model's."""
BEST = "fla, safe_gate, chunk_size 64, disable_recompute"
COLUMNS = "forward_ms", "both_ms", "extra_gib"


def rows(name, first):
    """[label, cells] of each row of the table whose head begins with `first`."""
    table = (ROOT / name).read_text(encoding="utf-8").partition(f"\n{first}")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip(" *") for cell in line.strip("|").split("|")]


def measured(op, who="flakit", decay=None, **sizes):
    """The recorded row of chunks of bfloat16 inputs."""
    sizes = {"B": 8, "K": 128 if op == "gsa" else 64} | sizes
    (row,) = SPEED.select(op=op, form="chunk", dtype="bfloat16", who=who, decay=decay or MODEL[op], **sizes)
    return row


def agrees(cell, values):
    """Whether a cell shows these values, each rounded as it is written there. A single number is the largest of those
    that were measured."""
    written = re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", cell)
    values = [value for value in values if value is not None]
    values = values if len(written) == len(values) else [max(values)]
    for number, value in zip(written, values, strict=True):
        mantissa, _, power = number.partition("e")
        unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        if abs(float(number) - value) > 0.5001 * unit:
            return False
    return True


def test_the_table_of_the_speed_page_is_recorded():
    wrong, compared, op = [], 0, ""
    for label, *cells in rows("docs/speed.md", "| operator, log decay"):
        if not label.startswith("the same"):
            op = label.partition(",")[0].lower()
            decays = next((found for words, found in DECAYS.items() if words in label), [MODEL[op]])
            sizes = {"B": 1} if "one sequence" in label else {"K": 512} if "heads of 512" in label else {}
        other = "wind" if "wind_rwkv" in label else BEST if "best settings" in label else "fla"
        for who, group in (("flakit", cells[:3]), (other, cells[3:6])):
            if re.match(r"\d", group[0]):
                peers = [measured(op, who, decay, **sizes) for decay in decays]
                shown = [*zip(group, COLUMNS, strict=True), *([(cells[6], "error")] if who != "flakit" else [])]
                for cell, column in shown:
                    if cell:
                        compared += 1
                        if not agrees(cell, [row[column] for row in peers]):
                            wrong.append((label, who, column, cell, [row[column] for row in peers]))
    assert wrong == []
    assert compared > 80


def test_the_ratios_of_the_speed_page_are_recorded():
    words = " ".join((ROOT / "docs/speed.md").read_text(encoding="utf-8").split())
    sentences = words.partition("So RWKV6 is ")[2].partition(" wind_rwkv's")[0]
    cases = [
        ("rwkv6", "fla", {}), ("gsa", "fla", {}), ("gsa", "fla", {"K": 512}), ("rwkv7", "fla", {}),
        ("rwkv7", BEST, {}), ("rwkv6", "fla", {"B": 1}), ("rwkv7", BEST, {"B": 1}),
    ]  # fmt: skip
    ratios = [measured(op, who, **sizes)["both_ms"] / measured(op, **sizes)["both_ms"] for op, who, sizes in cases]
    assert agrees(" ".join(re.findall(r"(\d\.\d)(?= times)", sentences)), ratios)


def test_the_table_of_the_readme_is_recorded():
    times = {label: (ours, theirs) for label, ours, _, theirs, _ in rows("README.md", "| | flakit, ms |")}
    best = "; with its best settings"
    expected = {
        "RWKV6, 32 heads of 64": ("rwkv6", {}, ["fla"]),
        "RWKV7, 32 heads of 64": ("rwkv7", {}, ["fla", BEST]),
        "RWKV7, one sequence of 32,768 tokens": ("rwkv7", {"B": 1}, ["fla", BEST]),
        "GSA, 16 heads of 128, 64 slots": ("gsa", {}, ["fla"]),
    }
    for label, (ours, theirs) in times.items():
        op, sizes, others = expected.pop(label.partition(";")[0])
        decays = [None, TRAINED] if "trained" in label else [None]
        assert agrees(ours.replace("*", ""), [measured(op, decay=decay, **sizes)["both_ms"] for decay in decays])
        theirs = theirs.removesuffix("; not timed")
        assert (best in theirs) == (BEST in others)
        assert agrees(theirs, [measured(op, who, **sizes)["both_ms"] for who in others])
    assert expected == {}
