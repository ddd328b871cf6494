"""The numbers that docs/speed.md and README.md print are those recorded in data/, or computed here."""

import math
import re
from pathlib import Path

from flakit.bench.speed import SHARES, TRAINED
from flakit.numerics import recorded
from flakit.numerics.evaluate import truth
from flakit.numerics.work import work
from tests.gpu.covering import covering_set
from tests.ops.settings import Setting, make

ROOT = Path(__file__).parents[2]
SPEED, ERRORS = recorded.read("h200_speed"), recorded.read("h200_errors")
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
COLUMNS = "forward_ms", "both_ms", "floor", "extra_gib"
FIRST_RUN, LAST_RUN = "2026-11-22", "2026-11-28"
"""The days of the covering sets' errors: of all settings, and of some with newer kernels."""
KINDS = [(dtype, output) for dtype in ("bfloat16", "float32") for output in ("o", "d")]
"""The columns of the tables of errors: of o, and of all gradients, whose names begin with d."""
DU = Setting(
    T=100, K=24, V=256, decay="model", dtype="bfloat16", decay_dtype="float32", states="final", packing="packed",
    layout="strided", scale="1", chunk_size="16", H=1, op="rwkv6",
)  # fmt: skip
DS = Setting(
    T=1, K=128, V=120, decay="forget", dtype="bfloat16", decay_dtype="float32", layout="expanded", chunk_size="32",
    H=1, B=3, op="gsa", M=24, group=4,
)  # fmt: skip
FEW = (DU, "du"), (DS, "ds")
"""Settings of the first run and a gradient of few numbers. The covering sets have been remade since."""


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def passage(name, begin, end):
    """The words of a text from `begin` on and before `end`, in one line."""
    words = " ".join(text(name).split())
    assert words.count(begin) == 1, f"{name}: expected once: {begin}"
    return words.partition(begin)[2].partition(end)[0]


def rows(name, first):
    """[label, cells] of each row of the table whose head begins with `first`."""
    table = text(name).partition(f"\n{first}")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip(" *") for cell in line.strip("|").split("|")]


def measured(op, who="flakit", decay=None, **sizes):
    """The recorded row of chunks of bfloat16 inputs, or of another form and dtype; with its floor."""
    sizes = {"B": 8, "K": 128 if op == "gsa" else 64, "form": "chunk", "dtype": "bfloat16", "decode": False} | sizes
    (row,) = SPEED.select(op=op, who=who, decay=decay or MODEL[op], **sizes)
    return row | {"floor": work(row, "both").floor_ms(**{name: SPEED.meta[name] for name in ("copy_tb_s", "tflops")})}


def shows(words, values):
    """Whether the numbers of a text are these values in order, each rounded as it is written there."""
    written = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?", words.replace("*", ""))
    if len(written) != len(values):
        return False
    for number, value in zip(written, values, strict=True):
        mantissa, _, power = number.partition("e")
        unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        if abs(float(number) - value) > 0.5001 * unit:
            return False
    return True


def agrees(cell, values):
    """Whether a cell shows these values. A single number may be the largest of several."""
    values = [value for value in values if value is not None]
    return shows(cell, values) or shows(cell, [max(values)])


# --- times ----------------------------------------------------------------------------------------------------------


def test_the_table_of_the_speed_page_is_recorded():
    wrong, compared, op = [], 0, ""
    for label, *cells in rows("docs/speed.md", "| operator, log decay"):
        if not label.startswith("the same"):
            op = label.partition(",")[0].lower()
            decays = next((found for words, found in DECAYS.items() if words in label), [MODEL[op]])
            sizes = {"B": 1} if "one sequence" in label else {"K": 512} if "heads of 512" in label else {}
            assert all(cells[:4])
        other = "wind" if "wind_rwkv" in label else BEST if "best settings" in label else "fla"
        theirs = dict(zip(("forward_ms", "both_ms", "extra_gib", "error"), cells[4:], strict=True))
        for who, group in (("flakit", dict(zip(COLUMNS, cells[:4], strict=True))), (other, theirs)):
            if re.match(r"\d", group["forward_ms"]):
                peers = [measured(op, who, decay, **sizes) for decay in decays]
                for column, cell in group.items():
                    if cell:
                        compared += 1
                        if not agrees(cell, [row[column] for row in peers]):
                            wrong.append((label, who, column, cell, [row[column] for row in peers]))
    assert wrong == []
    assert compared > 100


def test_the_ratios_of_the_speed_page_are_recorded():
    sentences = passage("docs/speed.md", "So RWKV6 is ", " Both other libraries")
    cases = [
        ("rwkv6", "fla", {}), ("gsa", "fla", {}), ("gsa", "fla", {"K": 512}), ("rwkv7", "fla", {}),
        ("rwkv7", BEST, {}), ("rwkv6", "fla", {"B": 1}), ("rwkv7", BEST, {"B": 1}), ("rwkv7", "wind", {}),
    ]  # fmt: skip
    ratios = [measured(op, who, **sizes)["both_ms"] / measured(op, **sizes)["both_ms"] for op, who, sizes in cases]
    assert shows(" ".join(re.findall(r"(\d\.\d)(?= times)", sentences)), ratios)


def test_the_rounds_of_the_texts_are_recorded():
    def slower(row):
        return 100 * (row["both_ms_other_round"] / row["both_ms"] - 1)

    ours = SPEED.select(who="flakit", form="chunk", dtype="bfloat16")
    (most,) = re.findall(r"the other round took 11 to (\d+)% longer", " ".join(text("docs/speed.md").split()))
    assert shows(most, [max(map(slower, ours))])
    shown = [row for row in ours if row["K"] < 512 and row["decay"] in (TRAINED, MODEL[row["op"]])]
    (most,) = re.findall(r"the slower took up to (\d+)% longer", text("README.md"))
    assert shows(most, [max(map(slower, shown))])


def test_the_picture_shows_quantiles_within_its_points():
    """A point is 5.5 points wide, 0.076 inches, in a picture of two decades in about six inches."""
    shown = [measured(op, decay=decay) for op in MODEL for decay in (TRAINED, MODEL[op])]
    shown += [measured("rwkv6", B=1), measured("rwkv7", B=1), measured("gsa", K=512)]
    for row in shown:
        assert 3 * max(abs(math.log10(row[f"both_ms_{part}"] / row["both_ms"])) for part in (20, 80)) < 0.038


def test_other_forms_and_decoding_are_recorded():
    labels = []
    for label, recurrent, exact in rows("docs/speed.md", "| | recurrent | chunks of float32 inputs"):
        labels.append(op := label.lower())
        for cell, sizes in ((recurrent, {"form": "recurrent"}), (exact, {"dtype": "float32"})):
            row = measured(op, **sizes)
            assert shows(cell, [row["forward_ms"], row["both_ms"]]), (label, cell)
    assert labels == list(MODEL)
    exact = [measured(op, dtype="float32") for op in MODEL]
    errors = passage("docs/speed.md", "of an output or a gradient is there ", "(GSA)")
    assert shows(errors, [row["error"] for row in exact])
    memory = passage("docs/speed.md", "Forward and gradients of RWKV6 take ", " GiB in float32")
    assert shows(memory, [exact[0]["extra_gib"]])

    decodes = passage("docs/speed.md", "One token from a CUDA graph, B 1, 16 and 256, takes ", "). Issuing")
    order = [("rwkv6", "flakit"), ("rwkv7", "flakit"), ("gsa", "flakit"), ("gsa", "fla")]
    tokens = [measured(op, who, form="recurrent", decode=True, B=B) for op, who in order for B in (1, 16, 256)]
    assert shows(decodes, [1e3 * row["forward_ms"] for row in tokens])


def test_first_calls_are_recorded():
    named = [measured(op, decay=TRAINED) for op in MODEL]
    for begin, end, when in (
        ("and then a first step took ", "and with", "first"),
        ("a full cache ", " (`torch", "warm"),
    ):
        words = passage("docs/speed.md", begin, end)
        assert shows(words, [row[f"{when}_{part}_s"] for row in named for part in ("forward", "backward")])
    assert "e508b12c" in SPEED.meta["notes"]


def test_the_readme_is_recorded():
    expected = {
        "RWKV6, 32 heads of 64": ("rwkv6", {}, ["fla"]),
        "RWKV7, 32 heads of 64": ("rwkv7", {}, ["fla", BEST]),
        "RWKV7, one sequence of 32,768 tokens": ("rwkv7", {"B": 1}, ["fla", BEST]),
        "GSA, 16 heads of 128, 64 slots": ("gsa", {}, ["fla"]),
    }
    for label, floor, ours, error, theirs, their_error in rows("README.md", "| | floor | flakit, decays of a wide,"):
        op, sizes, others = expected.pop(label)
        trained = not sizes
        own = [measured(op, decay=decay, **sizes) for decay in ([TRAINED] if trained else []) + [None]]
        peers = [measured(op, who, **sizes) for who in others]
        assert ours.startswith("not timed; ") != trained
        assert shows(floor, [own[0]["floor"]])
        assert shows(ours, [row["both_ms"] for row in own])
        assert shows(error, [max(row["error"] for row in own)])
        assert ("; with its best settings" in theirs) == (BEST in others)
        assert shows(theirs, [row["both_ms"] for row in peers])
        assert shows(their_error, [row["error"] for row in peers if row["error"]])
    assert expected == {}


def test_the_nearest_rival_of_the_readme_is_recorded():
    words = passage("README.md", "RWKV7 for bounded decays: ", "<!--")
    cases = ({}, "forward_ms"), ({}, "both_ms"), ({"B": 1}, "both_ms")
    assert shows(
        words, [measured("rwkv7", who, **sizes)[column] for sizes, column in cases for who in ("wind", "flakit")]
    )


def test_what_was_missed_is_recorded():
    reached = {label: cell for label, cell, *_ in rows("docs/speed.md", "| | reached | aimed at | what stops it |")}
    assert shows(reached["forward and all gradients, ms"], [measured("gsa")["both_ms"]])
    assert shows(reached["the same, 4 heads of 512, ms"], [measured("gsa", K=512)["both_ms"]])


# --- errors ---------------------------------------------------------------------------------------------------------


def worst(date, output, **fixed):
    """The row of the worst error of that day: of `output`, "o" or all gradients, "d"."""
    found = [row for row in ERRORS.select(date=date, **fixed) if row["output"].startswith(output)]
    return max(found, key=lambda row: row["l2"])


def test_the_table_of_errors_is_recorded():
    compared = 0
    for label, *cells in rows("docs/speed.md", "| | bfloat16, o |"):
        op, form = label.lower().split(", ")
        for cell, (dtype, output) in zip(cells, KINDS, strict=True):
            compared += 1
            assert shows(cell, [worst(FIRST_RUN, output, op=op, form=form, dtype=dtype)["l2"]]), (label, dtype, output)
    assert compared == 24


def test_the_table_of_newer_errors_is_recorded():
    counts = {}
    for label, *cells in rows("docs/speed.md", "| 28 November | bfloat16, o |"):
        op, count = re.fullmatch(r"(\w+), (\d+) tests", label).groups()
        counts[op] = int(count)
        assert int(count) == sum(row["settings"] for row in ERRORS.select(date=LAST_RUN, op=op.lower(), output="o"))
        for cell, (dtype, output) in zip(cells, KINDS, strict=True):
            ran = ERRORS.select(date=LAST_RUN, op=op.lower(), dtype=dtype)
            assert shows(cell, [worst(LAST_RUN, output, op=op.lower(), dtype=dtype)["l2"]] if ran else []), (
                label,
                cell,
            )
    words = passage("docs/speed.md", "On 28 November ", "ran again")
    every = 2 * sum(len(covering_set(op)) for op in MODEL)
    assert shows(words, [sum(counts.values()), every, counts["GSA"], counts["RWKV7"], counts["RWKV6"]])


def storing(setting, output):
    """The relative L2 error of the exact result, stored in bfloat16."""
    made, arriving = make(setting)
    exact = truth(setting.op, made, arriving=arriving)[output].double()
    return float((exact - exact.bfloat16().double()).norm() / exact.norm())


def test_the_largest_errors_are_those_of_storing_exact_results():
    above = [row for row in ERRORS.select(date=FIRST_RUN, dtype="bfloat16") if row["l2"] > 2e-3]
    assert {(row["op"], row["output"], row["l2_at"]) for row in above} == {
        (setting.op, output, str(setting)) for setting, output in FEW
    }
    words = passage("docs/speed.md", "Two gradients in bfloat16 are above ", " already.")
    costs = [storing(setting, output) for setting, output in FEW]
    errors = [max(row["l2"] for row in above if row["op"] == setting.op) for setting, _ in FEW]
    assert shows(" ".join(re.findall(r"\d\.\d{3}e-3", words)), errors + costs)

    newest = [worst(LAST_RUN, output, op="gsa", dtype="bfloat16") for output in ("o", "d")]
    settings = {str(setting): setting for setting in covering_set("gsa")}
    words = passage("docs/speed.md", "where storing the exact results costs ", " already")
    assert shows(words, [storing(settings[row["l2_at"]], row["output"]) for row in newest])


# --- kernels, compiled code, tests ----------------------------------------------------------------------------------


def test_the_table_of_kernels_is_recorded():
    named = {"gradients": "grads", "walk for D": "chain", "streams": "stream"}
    kernels = {(row["op"], row["kernel"]): row for row in recorded.read("h200_kernels").rows}
    others = {op: row["ms"] for (op, kernel), row in kernels.items() if kernel == "all others"}
    for label, cell in rows("docs/speed.md", "| operator | kernels |"):
        for part in cell.split(", "):
            name, numbers = re.fullmatch(r"([\w ]+?) (0\.\d+ of \d\.\d+(?: ms)?)", part).groups()
            row = kernels.pop((label.lower(), f"{named.get(name, name)}_kernel"))
            assert shows(numbers, [row["of_copy"], row["ms"]]), part
    assert {kernel for _, kernel in kernels} == {"all others"}
    words = passage("docs/speed.md", "Another ", ". GSA's times include")
    assert words.endswith("none for RWKV7") and "rwkv7" not in others
    assert shows(words, [others["rwkv6"], others["gsa"]])


def test_the_shared_memory_of_other_gpus_is_recorded():
    most = {}
    for row in recorded.read("compiled").rows:
        most[row["chip"]] = max(most.get(row["chip"], 0), row["shared"] / 1024)
    words = passage("docs/speed.md", "On an H200 the largest block takes ", "; compiled for 12.0 with")
    assert most[80] == most[120] and most[86] == most[89] and most[100] == most[103]
    assert shows(" ".join(re.findall(r"(\d+) KB", words)), [most[chip] for chip in (90, 80, 86, 100)])


def test_what_was_not_run_with_the_newer_triton_is_recorded():
    ran = {row["file"].rpartition("/")[2]: row for row in recorded.read("gpu_tests").rows if row["triton"] == "3.7.1"}
    words = passage("docs/speed.md", "With Triton 3.7.1, beside PyTorch 2.11, ", " Earlier kernels of the day")
    passed, missing = (sum(row[name] for row in ran.values()) for name in ("passed", "not_run"))
    assert shows(words.partition(" tests")[0], [passed])
    assert shows(words.partition("Among the ")[2].partition(" that")[0], [missing])
    listed = re.findall(r"(test_\w+\.py)` \((\d+)\)", words)
    assert len(listed) == 5
    assert [(ran[file]["passed"], ran[file]["not_run"]) for file, _ in listed] == [(0, int(n)) for _, n in listed]
