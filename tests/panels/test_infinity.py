"""The panel of one infinity's way: its steps, its words against its numbers, and what a screen reader is told."""

import contextlib
import io
import re

import pytest
import torch

from flakit.cases import infinity as case
from flakit.panels import infinity
from flakit.panels.infinity import PRESETS, STEPS, C

FINE, FIRST, READ, ZERO = (preset["decay"] for preset in PRESETS.values())


@pytest.fixture(scope="module")
def panel():
    return infinity()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def at(panel, decay, step):
    panel.set(decay=decay, step=STEPS.index(step) + 1)
    return panel.text


def alt(panel):
    return panel.picture.alt


def test_every_slider_has_a_label(panel):
    assert [knob.description for knob in panel.knobs.values()] == ["decay", "step", "seed"]


def test_every_step_says_and_lights_something_else(panel):
    texts, alts, pictures = set(), set(), set()
    for step in range(1, len(STEPS) + 1):
        panel.set(step=step)
        assert "[" in panel.text.splitlines()[0], "no term of the formula is lit"
        assert f"Step {step} of {len(STEPS)}, decay -13.5" in alt(panel)
        texts.add(panel.text)
        alts.add(alt(panel))
        pictures.add(panel.png)
    assert len(texts) == len(alts) == len(pictures) == len(STEPS)


@pytest.mark.parametrize("decay", [FINE, FIRST, READ, ZERO])
@pytest.mark.parametrize("step", STEPS[:-1])
def test_the_alternative_text_has_the_sentence(panel, decay, step):
    way = case.follow(decay)
    said = panel.alt_text(way, decay=decay, step=STEPS.index(step) + 1)
    assert panel.sentence(way, step) in said
    bad = [str(j) for j, x in enumerate(way.made.key) if not x.isfinite()]
    assert f"infinite keys: {', '.join(bad) or 'none'}." in said


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (READ, "e^-94.5 · e^94.5 = 9.1e-42 · inf = inf (true: 1)"),
        (ZERO, "e^-108.5 · e^108.5 = 0 · inf = NaN (true: 1)"),
        (FINE, "e^-73.5 · e^73.5 = 1.2e-32 · 8.3e+31 = 1 (true: 1)"),
    ],
)
def test_the_product_that_should_be_1(panel, decay, expected):
    assert expected in at(panel, decay, "pair").splitlines()


def test_a_number_that_a_gpu_may_flush(panel):
    assert "a GPU that flushes numbers below e^-87.3 has 0 here" in at(panel, READ, "read")
    assert "smallest number is e^-103.3, so this factor becomes 0" in at(panel, ZERO, "read")
    assert "an ordinary number" in at(panel, FINE, "read")


def test_the_mask_hides_it_and_the_gradient_shows_it(panel):
    assert "nothing bad is left to see" in at(panel, FIRST, "mask")
    assert "o is right" in at(panel, FIRST, "row")
    assert "0 · -inf = NaN" in at(panel, FIRST, "dr")
    assert "12% of the keys' factors are infinite, 100% of dr is lost." in panel.text
    assert "nothing of dr is lost" in at(panel, FINE, "dr")


def test_where_rows_of_the_output_are_lost_they_are_counted(panel):
    for decay in (READ, ZERO):
        (said,) = re.findall(r"(\d) of 8 rows of o", at(panel, decay, "row"))
        assert int(said) == int((~panel.result.made.o.isfinite()).any(-1).sum())


def test_two_percent(panel):
    text = at(panel, FIRST, "loss")
    lost = case.follow(-1.39, C=64).lost
    assert (lost["keys"], lost["dr"]) == (1 / 64, 1)
    assert "In a chunk of 64, at -1.39: 2% of the factors, 100% of dr." in text
    assert "From a decay of −11.09 on (88.72/8)" in text and "−12.67 on (88.72/7)" in text
    assert "gradient dr 100%" in alt(panel) and "output o 0%" in alt(panel)


def test_the_stops_lie_on_both_sides_of_what_happens(panel):
    """Between two neighbouring stops the fate of at most one factor changes."""
    fates = [case.follow(w).made for _, w in panel.knobs["decay"].options]
    kinds = [[*made.key.isinf().tolist(), *(made.read == 0).tolist()] for made in fates]
    for before, after in zip(kinds, kinds[1:], strict=False):
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1


def test_play_goes_through_the_steps_and_ends_at_the_last(panel):
    play, seen = panel.player.play, []
    while play.value < play.max:
        play.value += 1
        seen.append(panel.setting["step"])
    assert seen == list(range(2, len(STEPS) + 1)) and not play.repeat
    panel.player.step(1)
    assert panel.setting["step"] == len(STEPS) == play.value + 1
    panel.player.step(-1)
    assert panel.setting["step"] == play.value + 1 == len(STEPS) - 1


@pytest.mark.parametrize("label", PRESETS)
def test_presets(panel, label):
    lost = {FINE: "", FIRST: "dk dr dw", READ: "o dv dk dr dw", ZERO: "o dv dk dr dw"}[PRESETS[label]["decay"]]
    way = case.follow(**PRESETS[label])
    assert [name for name in case.TENSORS if way.lost[name]] == lost.split()
    (row,) = [child for child in panel.children if panel.player in getattr(child, "children", ())]
    (button,) = [child for child in row.children if getattr(child, "description", "") == label]
    button.click()
    assert panel.setting["decay"] == PRESETS[label]["decay"]


@pytest.mark.parametrize("seed", [0, 7])
def test_every_setting_has_words(panel, seed):
    for decay in (0.0, FINE, -12.68, -14.86, -16.0):
        way = case.follow(decay, seed=seed)
        for step in range(1, len(STEPS) + 1):
            said = panel.describe(way, decay=decay, step=step, seed=seed) + panel.alt_text(way, decay=decay, step=step)
            assert "{" not in said and len(said.splitlines()) >= 3


def test_script_prints_what_the_panel_shows(panel):
    panel.set(decay=FIRST)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(panel.as_python(), {})
    assert str(panel.result.made.dr) in printed.getvalue()
    assert "dr lost 1.0" in printed.getvalue() and f"keys lost {1 / C}" in printed.getvalue()
    assert torch.isnan(panel.result.made.dr).all()


@pytest.mark.parametrize("wrong", [{"decay": -17.0}, {"step": 0}, {"step": 10}])
def test_bad_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        infinity(**wrong)
