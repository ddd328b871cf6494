"""The decay explorer: what it says at finite and non-finite settings, the law beside the measurement, its script."""

import contextlib
import io
import math
import re
import statistics
import time

import numpy as np
import pytest

from flakit.cases import anchor
from flakit.numerics.operators import OPERATORS
from flakit.panels import decay_explorer
from tests.panels.live import NOT_LIVE


@pytest.fixture(scope="module")
def shared():
    return decay_explorer()


@pytest.fixture
def panel(shared):
    shared.reset()
    return shared


def onset(panel):
    """(law, measured) as the readout gives them."""
    law = re.search(r"Law: \|[wg]\| <= (\S+)", panel.text)
    measured = re.search(r"Measured onset: (\S+)", panel.text)
    return float(law.group(1)), float(measured.group(1))


def test_finite_below_the_onset_and_not_above(panel):
    panel.set(decay=-1.36)
    below = panel.png
    assert panel.text.startswith("Finite: every tensor; largest error against float64: ")
    assert "NaN" not in panel.text
    panel.set(decay=-1.41)
    assert panel.png != below
    first, second, _ = panel.text.split("\n")
    assert first.startswith("Not finite: o 2% NaN (from t=63), dr 100% NaN (from t=0), dk ")
    assert "dw 100% NaN (from t=0)" in first
    assert second.startswith("Finite: du; largest error")


def test_one_token_breaks_a_first_row_anchor(panel):
    panel.set(scheme="first-row", decay=-0.5, spike=-88.7, at=16)
    assert "NaN" not in panel.text
    panel.set(spike=-88.8)
    assert "o <1% NaN (from t=16)" in panel.text and "dr <1% inf (from t=16)" in panel.text
    law, measured = onset(panel)
    assert law == pytest.approx(88.72, abs=0.01) and measured == pytest.approx(law, rel=1e-3)
    panel.set(at=17, spike=-500)
    assert panel.text.startswith("Finite: every tensor")
    assert "Law: no limit to |w|. Measured onset: none." in panel.text


AGREE = dict.fromkeys(OPERATORS, 2e-3)
EVERYWHERE = [
    pytest.param(op, scheme, dtype, id=f"{op}-{scheme}-{dtype}")
    for op in OPERATORS
    for scheme in anchor.SCHEMES
    for dtype in (("float32", "bfloat16", "float16") if op == "rwkv6" else ("float32",))
]


@pytest.mark.parametrize("op, scheme, dtype", EVERYWHERE)
def test_the_picture_agrees_with_the_law_on_either_side(panel, op, scheme, dtype):
    """On both sides of the panel's own law, what is shown must be what the law says."""
    panel.set(op=op, scheme=scheme, dtype=dtype, T=96)
    laws = {name: each.law for name, each in panel.result["onsets"].items()}
    measured = {name: each.measured for name, each in panel.result["onsets"].items()}
    for name, law in laws.items():
        assert measured[name] == (None if law is None else pytest.approx(law, rel=AGREE[op])), name
    least = min(filter(None, laws.values()), default=None)
    if least is None:
        panel.set(decay=-math.inf if scheme == "dyadic" else -500)
        assert panel.text.startswith("Finite: every tensor")
        return
    for side, finite in ((1 - 5 * AGREE[op], True), (1 + 5 * AGREE[op], False)):
        panel.set(decay=-least * side)
        assert panel.text.startswith("Finite: every tensor") == finite


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("decay", [0, -math.inf], ids=["none", "forget"])
def test_the_safe_form_is_exact_at_both_ends(panel, op, decay):
    panel.set(op=op, scheme="dyadic", decay=decay)
    assert panel.text.startswith("Finite: every tensor; largest error against float64: ")
    assert all(error.l2 < (1e-6 if op == "rwkv6" else 4e-6) for error in panel.result["errors"].values())


def test_only_masks_that_mean_something_are_offered(panel):
    offered = {scheme: None for scheme in ("none", "pairwise", "dyadic")}
    for scheme in offered:
        panel.set(scheme=scheme)
        offered[scheme] = [value for _, value in panel.knobs["mask"].options]
    assert offered == {
        "none": ["right", "none", "multiply", "where"],
        "pairwise": ["right", "none", "multiply", "where", "before"],
        "dyadic": ["right"],
    }
    panel.set(scheme="pairwise", mask="before")
    panel.set(scheme="middle")
    assert panel.setting["mask"] == "right"
    assert panel.knobs["mask"].label == "the right one of the scheme"
    panel.set(scheme="pairwise", mask="where", decay=-2)
    assert panel.text.startswith("Not finite: dr ")
    panel.set(mask="before")
    assert panel.text.startswith("Finite: every tensor")


def test_a_spike_beyond_the_end_is_an_error_in_words(panel):
    panel.set(T=16, at=16, spike=-3)
    assert panel.text == "ValueError: at: expected a token 0 … 15 for the spike, got 16"
    panel.set(T=17)
    assert panel.text.startswith("Finite")


@pytest.mark.parametrize(("scheme", "least"), [("middle", 11.09 / 9), ("pairwise", 88.72 / 64)])
def test_an_exponent_is_hatched_from_where_its_format_overflows(panel, scheme, least):
    """Exact differences stay in float32 whatever the factors are stored in."""
    for side, overflows in ((0.97, False), (1.03, True)):
        panel.set(scheme=scheme, mask="where", dtype="float16", decay=-least * side)
        assert any(np.isinf(each).any() for each in panel.result["exponents"]) == overflows


def test_an_operator_shows_its_own_tensors_and_reads(panel):
    shown = {}
    for op in OPERATORS:
        panel.set(op=op)
        hidden = panel.knobs["query"].layout.display == "none"
        shown[op] = (*panel.result["tensors"], None if hidden else panel.knobs["query"].options)
    assert shown == {
        "rwkv6": ("o", "dr", "dk", "dv", "dw", "du", None),
        "rwkv7": ("o", "dr", "dw", "dk", "dv", "da", "db", ("r", "a")),
        "gsa": ("o", "dq", "dk", "dv", "ds", "dg", None),
    }


def test_what_reads_inclusively_is_immune_to_the_first_rows_anchor(panel):
    """RWKV7's r and GSA read after their token's decay, so the first row's exponent is 0; RWKV7's a reads before."""
    panel.set(op="gsa", scheme="first-row", decay=-0.1, spike=-500, at=16)
    assert panel.text.startswith("Finite: every tensor") and "no limit to |g|" in panel.text
    panel.set(op="rwkv7", query="r")
    assert not any(np.isinf(each).any() for each in panel.result["exponents"])
    assert panel.text.startswith("Not finite: o ") and onset(panel)[0] == pytest.approx(88.72, abs=0.01)
    panel.set(query="a")
    assert np.isinf(panel.result["exponents"][0][16]).any()


def test_shows_the_chunk_that_breaks(panel):
    panel.set(scheme="previous-row-across", decay=-1.5)
    assert panel.result["index"] == 1  # the first chunk has none before it
    panel.set(scheme="first-row", decay=-0.1, spike=-200, at=100)
    assert panel.result["index"] == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"decay": -1.41},
        {"decay": -math.inf, "scheme": "middle", "dtype": "float16"},
        {"scheme": "first-row", "spike": -88.8, "at": 32, "T": 100, "chunk": 32, "seed": 3},
        {"scheme": "pairwise", "mask": "where", "decay": -2.0, "dtype": "bfloat16"},
        {"op": "rwkv7", "scheme": "first-row", "spike": -88.8, "at": 32, "T": 100, "query": "a"},
        {"op": "gsa", "scheme": "none", "decay": -1.5, "T": 70, "seed": 1},
    ],
    ids=str,
)
def test_the_script_runs_and_gives_the_same_numbers(panel, setting):
    panel.set(**setting)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    lines = printed.getvalue()
    for name, x in panel.result["tensors"].items():
        share = 100 * (1 - x.isfinite().float().mean().item())
        assert float(re.search(rf"^{name} +(\S+)% not finite", lines, re.M).group(1)) == pytest.approx(share, abs=0.006)
        said = re.search(rf"^{name} +law (\S+), measured (\S+)", lines, re.M).groups()
        assert said == tuple(f"{math.inf if x is None else x:.4g}" for x in panel.result["onsets"][name])


@pytest.mark.full
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("knob", ["decay", "T"])
def test_a_slider_is_live(panel, op, knob):
    panel.set(op=op)
    slider, took = panel.knobs[knob], []
    for _ in range(15):
        start = time.process_time()  # other work on the machine does not count
        if knob == "decay":
            slider.index += 1
        else:
            slider.value += 1
        took.append(time.process_time() - start)
    assert statistics.median(took) < NOT_LIVE, took


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="op: expected one of rwkv6, rwkv7, gsa, got 'gla'"):
        decay_explorer("gla")
    with pytest.raises(ValueError, match="scheme: expected one of none, first-row, .*, got 'last-row'"):
        decay_explorer(scheme="last-row")
    with pytest.raises(TypeError, match="no knob named decays"):
        decay_explorer(decays=-1)
