"""The decay explorer: what it says at finite and non-finite settings, the law beside the measurement, its script."""

import itertools
import math
import re
import statistics
import time

import numpy as np
import pytest
import torch

from flakit.cases import anchor
from flakit.cases.anchor import OPERATORS
from flakit.figures.canvas import Cell
from flakit.numerics.evaluate import truth
from flakit.numerics.inputs import inputs
from flakit.panels import decay_explorer
from flakit.panels.decay_explorer import _right
from flakit.panels.knobs import stops_of
from flakit.panels.shared import tensors
from tests.panels.live import NOT_LIVE
from tests.panels.reading import pointed, printed, resize, sizes


@pytest.fixture(scope="module")
def shared():
    return decay_explorer()


@pytest.fixture
def panel(shared, monkeypatch):
    """As it starts, but drawn only by what a test does with it: one that looks before finds nothing."""
    with monkeypatch.context() as unseen:
        unseen.setattr(shared, "redraw", lambda: None)
        shared.reset()
    shared.result, shared.picture.png = None, b""
    shared.say("")
    return shared


def onset(panel):
    """(law, measured) as the readout gives them."""
    law = re.search(r"The law: .* beyond \|[wg]\| = (\S+) ", panel.text)
    measured = re.search(r"; measured: (\S+)\.", panel.text)
    return float(law.group(1)), float(measured.group(1))


def fine(panel):
    return panel.text.startswith(("Every tensor is fine, right to ", "Every tensor is finite, but "))


def test_finite_below_the_onset_and_not_above(panel):
    panel.set(decay=-1.36)
    below = panel.png
    assert fine(panel) and "NaN" not in panel.text
    panel.set(decay=-1.41)
    assert panel.png != below
    first, second = panel.text.split("\n")
    assert re.match(
        r"o, dr, dk, dv and dw are broken; du is fine, right to at least 6 digits\. "
        r"2% of o and dk \(first at token 63\), all of dr and dw ",
        first,
    )
    assert second == "The law: dr and dw break first, beyond |w| = 1.375 per token; measured: 1.375."


def test_one_token_breaks_a_first_row_anchor(panel):
    panel.set(scheme="first-row", decay=-0.5, spike=-88.7, at=16)
    assert "NaN" not in panel.text
    panel.set(spike=-88.8)
    assert "<1% of o and dw (first at token 16) and 12% of dv are NaN; <1% of dr (first at token 16)" in panel.text
    law, measured = onset(panel)
    assert law == pytest.approx(88.72, abs=0.01) and measured == pytest.approx(law, rel=1e-3)
    panel.set(at=17, spike=-500)
    assert fine(panel)
    assert "The law: nothing breaks, however strong the decay of token 17; measured: nothing does." in panel.text


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
        assert fine(panel)
        return
    for side, finite in ((1 - 5 * AGREE[op], True), (1 + 5 * AGREE[op], False)):
        panel.set(decay=-least * side)
        assert fine(panel) == finite


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("decay", [0, -math.inf], ids=["none", "forget"])
def test_the_safe_form_is_exact_at_both_ends(panel, op, decay):
    panel.set(op=op, scheme="dyadic", decay=decay)
    assert fine(panel)
    assert all(error.l2 < (1e-6 if op == "rwkv6" else 4e-6) for error in panel.result["errors"].values())


@pytest.mark.full
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
    assert panel.text.startswith("dr, dk and dw are broken;")
    panel.set(mask="before")
    assert fine(panel)


def test_a_spike_beyond_the_end_is_an_error_in_words(panel):
    panel.set(T=16, at=16, spike=-3)
    assert panel.text == "ValueError: at: expected a token 0 … 15 for the spike, got 16"
    panel.set(T=17)
    assert fine(panel)


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
    assert fine(panel) and "nothing breaks, however strong the decay of token 16" in panel.text
    panel.set(op="rwkv7", query="r")
    assert not any(np.isinf(each).any() for each in panel.result["exponents"])
    assert panel.text.startswith("Every tensor is broken.") and onset(panel)[0] == pytest.approx(88.72, abs=0.01)
    panel.set(query="a")
    assert np.isinf(panel.result["exponents"][0][16]).any()


def test_shows_the_chunk_that_breaks(panel):
    panel.set(scheme="previous-row-across", decay=-1.5)
    assert panel.result["index"] == 1  # the first chunk has none before it
    panel.set(scheme="first-row", decay=-0.1, spike=-200, at=100)
    assert panel.result["index"] == 1


def sides(panel):
    """Of every tensor that breaks, how far the nearest stops of the slider are from its onset, as a factor."""
    stops = np.array([-x for x in stops_of(panel.knobs["decay"])])
    for name, (law, measured) in panel.result["onsets"].items():
        if law is not None:
            below, above = stops[stops < min(law, measured)].max(), stops[stops > max(law, measured)].min()
            yield name, law, below / law, above / law


@pytest.mark.parametrize("op, scheme, dtype", EVERYWHERE)
def test_the_slider_stops_on_both_sides_of_every_onset(panel, op, scheme, dtype):
    panel.set(op=op, scheme=scheme, dtype=dtype)
    found = list(sides(panel))
    assert all(0.98 < below < 1 < above < 1.02 for _, _, below, above in found), found
    # Between two that differ there is one, too.
    laws = sorted({law for _, law, *_ in found})
    stops = [-x for x in stops_of(panel.knobs["decay"])]
    for low, high in zip(laws, laws[1:], strict=False):
        assert high / low < 1.002 or any(low < stop < high for stop in stops), (low, high)


def test_from_the_first_notebooks_start_the_tensors_fail_one_after_another(panel):
    """Step by step with the arrow key, from fine to all lost: dr and dw, then dk, then o and dv."""
    panel.set(decay=-1.33)
    slider, seen = panel.knobs["decay"], []
    while slider.value > -1.5:
        broken = {name for name, x in panel.result["tensors"].items() if not x.isfinite().all()}
        if broken not in seen:
            seen.append(broken)
        slider.index += 1
    assert seen == [set(), {"dr", "dw"}, {"dr", "dw", "dk"}, {"dr", "dw", "dk", "o", "dv"}]


@pytest.mark.full
def test_the_stops_follow_the_setting_and_the_value_stays(panel):
    panel.set(decay=-1.38)
    assert -1.38 in stops_of(panel.knobs["decay"])
    panel.knobs["scheme"].value = "block-start"
    stops = stops_of(panel.knobs["decay"])
    assert panel.setting["decay"] == -1.38 and -1.37 not in stops
    assert any(5.78 < -x < 5.83 for x in stops) and any(5.84 < -x < 5.91 for x in stops)
    panel.knobs["chunk"].value, panel.knobs["scheme"].value = 32, "none"
    assert any(2.7 < -x < 2.772 for x in stops_of(panel.knobs["decay"])) and panel.setting["decay"] == -1.38
    assert panel.player.play.max == len(stops_of(panel.knobs["decay"])) - 1
    panel.set(**panel.presets["bug A"])
    assert {-88.7, -88.8} <= set(stops_of(panel.knobs["spike"])) and panel.setting["spike"] == -88.8
    assert all(0.9 < x / y < 1.2 or y < 0.011 for x, y in itertools.pairwise(even(panel)))  # the decay's are even again


def even(panel):
    return [-x for x in stops_of(panel.knobs["decay"]) if 0 < -x < math.inf][::-1]


def test_a_value_of_ones_own_is_a_stop_until_it_is_left():
    """The browser counts stops: it must be told when one has gone, though it was the one that moved."""
    panel = decay_explorer(decay=-0.777)
    slider, told = panel.knobs["decay"], []
    send, after = slider.send_state, stops_of(slider)[slider.index + 1]
    slider.send_state = lambda key=None: (told.append(slider.get_state(key)), send(key))
    slider.set_state({"index": slider.index + 1})  # as an arrow key does
    assert slider.value == panel.setting["decay"] == after and -0.777 not in stops_of(slider)
    assert told[-1]["index"] == slider.index and len(told[-1]["_options_labels"]) == len(stops_of(slider))


PRESETS = {
    "rwkv6": [set(), {"dr", "dk", "dw"}, {"o", "dr", "dk", "dv", "dw"}, {"o", "dr", "dv", "dw"}],
    "rwkv7": [set(), {"dr", "dw"}, *[{"o", "dr", "dw", "dk", "dv", "da", "db"}] * 2],
    "gsa": [set(), *[{"o", "dq", "dk", "dv", "ds", "dg"}] * 2, set()],  # reads inclusively: no bug A
}


@pytest.mark.parametrize("op", OPERATORS)
def test_presets_show_what_they_say(panel, op, monkeypatch):
    panel.set(op=op)
    assert list(panel.presets) == ["fine", "first NaN", "all NaN", "bug A"]
    for setting, broken in zip(panel.presets.values(), PRESETS[op], strict=True):
        with monkeypatch.context() as unseen:
            unseen.setattr(panel, "redraw", lambda: None)
            panel.set(spike=-3, at=3, dtype="float16", mask="right", T=100, chunk=32)  # a preset undoes all of it
        panel.set(**setting)
        found = {name for name, x in panel.result["tensors"].items() if not x.isfinite().all()}
        assert found == broken and (fine(panel) == (not broken))
        assert all(re.search(rf"\b{name}\b", panel.text) for name in broken) or len(broken) == len(tensors(op))
        assert panel.picture.alt.endswith(panel.text)


def test_three_knobs_on_view_and_words_on_all(panel):
    assert panel.on_view == ("decay", "spike", "scheme") and panel.player is not None
    assert all(knob.description for knob in panel.knobs.values())
    assert [
        each.description for each in decay_explorer(show=["decay"])._more.children if each.description == "decay"
    ] == []


def test_the_longest_title_ends_before_the_key(panel):
    resize(panel, 600)
    panel.set(**panel.presets["bug A"])
    panel.set(decay=-math.inf, dtype="bfloat16")
    panel.canvas.png()
    figure, renderer = panel.canvas.figure, panel.canvas._agg.get_renderer()
    title = max(text.get_window_extent(renderer).x1 for text in figure.texts if "token 16" in text.get_text())
    assert title < figure.legends[0].get_window_extent(renderer).x0, "its hatches too"
    resize(panel, 1000)


def test_low_enough_at_both_widths(panel):
    assert sizes(panel) == [(590, 412), (940, 482)]


def test_a_pairs_arithmetic_is_what_its_format_computes(panel):
    panel.set(decay=-1.5)
    said = pointed(panel, "key", 63, 62)  # 63 tokens of decay undone for the next token's read
    made = re.fullmatch(r"token 63, key 62: e\^(\S+) · e\^(\S+) = (\S+) · inf = inf \(true: 1\)", said)
    down, up, read = map(float, made.groups())
    assert (down, up) == (-94.5, 94.5) and read == pytest.approx(math.exp(-94.5), rel=0.02)  # subnormal: few digits
    assert pointed(panel, "read", 62, 63) == (
        "token 62, key 63, the future: e^-93 · e^96 = 4.1e-41 · inf = inf, then masked: 0; but in the sums of the "
        "gradients 0 · inf is NaN"
    )
    panel.set(mask="multiply")
    assert pointed(panel, "read", 62, 63).endswith("= inf, then times 0: NaN")
    panel.set(mask="right", decay=-1.38)  # the factor is finite, with its key it is not
    assert re.search(r"2\.3e\+38 .*; with its key k_63 = (\S+) · 2\.3e\+38 = inf$", pointed(panel, "key", 10, 63))
    panel.set(scheme="pairwise")
    assert pointed(panel, "read", 9, 5) == "token 9, key 5: e^-4.14 = 0.0159 (true: 0.0159)"
    assert pointed(panel, "read", 5, 9).startswith("token 5, key 9: no product is formed")
    panel.set(scheme="previous-row", mask="right", decay=-math.inf)
    assert pointed(panel, "read", 40, 30) == "token 40, key 30: e^NaN · e^NaN = NaN · NaN = NaN (true: 0)"


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scheme", ["none", "middle", "pairwise", "dyadic"])
def test_every_kind_of_pair_has_its_truth(panel, op, dtype, scheme):
    """The true weight of a pair is the decay between its tokens; finite products agree with it."""
    panel.set(op=op, dtype=dtype, scheme=scheme, decay=-0.75, T=100)
    inclusive = next(iter(OPERATORS[op].reads.values()))
    for i, j in ((1, 0), (17, 15), (40, 20), (63, 1), (33, 32)):
        said = pointed(panel, "read", i, j)
        made, true = re.search(r"(\S+) \(true: (\S+)\)", said).groups()
        exact = math.exp(-0.75 * (i - j - (not inclusive)))
        assert float(true) == pytest.approx(exact, rel=6e-3)
        if math.isfinite(float(made)):
            assert float(made) == pytest.approx(exact, rel=6e-3)


@pytest.mark.parametrize("op", OPERATORS)
def test_values_stand_beside_float64(panel, op):
    panel.set(op=op, T=100, decay=-0.3)
    exact = truth(op, inputs(op, T=100, H=1, K=32, decay=-0.3, dtype=torch.float32, decay_dtype=torch.float32))
    for name, x in exact.items():
        if name in panel.canvas.maps:
            said = pointed(panel, name, 70, 5)
            got, true = (float(y) for y in re.search(r": (\S+) \(true: (\S+)\)$", said).groups())
            assert true == pytest.approx(x[0, 70, 0, 5].item(), rel=1e-3) and got == pytest.approx(true, rel=1e-3)
    panel.set(decay=-3.0)
    assert re.search(r"(NaN|inf) \(true: -?\d\S*\)$", pointed(panel, "o", 60, 5))


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({"o": 3.2e-7, "dk": 2.5e-8}, "Every tensor is fine, right to at least 6 digits."),
        ({"o": 2e-2, "dk": 1e-8}, "Every tensor is fine, right to one digit."),
        ({"o": 0.0}, "Every tensor is fine, equal to float64's."),
        ({"o": 1e-7, "dk": 0.4}, "Every tensor is finite, but dk is off by 40%."),
        ({"o": 1e-7, "dw": math.inf}, "Every tensor is finite, but dw should be 0."),
    ],
)
def test_a_sentence_says_to_how_many_digits_tensors_are_right(errors, said):
    assert _right(errors, "all") == said


def test_a_mask_that_shows_the_future_is_not_called_fine(panel):
    panel.set(mask="none", decay=-0.1)
    assert panel.text.startswith("Every tensor is finite, but ") and " is off by " in panel.text


def test_an_onset_says_law_and_measurement(panel):
    panel.set(decay=-1.39)
    assert pointed(panel, "onset", 1, 0) == (
        "dr breaks beyond |w| = 1.3746 per token by the law, at 1.3747 as measured; now 1.39: broken"
    )
    assert pointed(panel, "onset", 5, 0) == "du never breaks, by the law and as measured: fine"


def test_a_token_lights_up_in_the_other_maps(panel):
    panel.set(decay=-1.0)
    lit = panel.beside(Cell("key", 40, 30))
    assert {("read", 40, 30), ("o", 40, None), ("dr", 40, None), ("dk", 30, None)} <= set(lit)
    lit = panel.beside(Cell("dk", 12, 3))
    assert {("dr", 12, None), ("read", 12, None), ("key", None, 12)} <= set(lit)
    assert not any(name in ("dk", "du") for name, *_ in lit)
    assert panel.beside(Cell("dk", 100, 3)) and not panel.beside(Cell("onset", 0, 0))


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
    lines = printed(panel)
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
