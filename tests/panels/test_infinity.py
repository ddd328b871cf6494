"""The panel of one infinity's way: its steps, its words against its numbers, and what a screen reader is told."""

import itertools
import re

import numpy as np
import pytest
import torch

from flakit.cases import infinity as case
from flakit.figures.canvas import Cell
from flakit.panels import infinity
from flakit.panels.base import NARROW
from flakit.panels.infinity import BACKWARD, FORWARD, STEPS, WORDS, C, Infinity, _number
from tests.panels.reading import on_view, pointed, printed

FINE, FIRST, READ, ZERO = (preset["decay"] for preset in Infinity.presets.values())


@pytest.fixture(scope="module")
def panel():
    return infinity()


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


def at(panel, decay, step):
    panel.set(decay=decay, step=STEPS.index(step) + 1)
    return panel.text


def test_every_slider_has_a_label_and_show_names_those_on_view(panel):
    assert [knob.description for knob in panel.knobs.values()] == ["decay", "step", "seed"]
    assert on_view(infinity(show=("step",))) == ["step"]


def test_low_and_narrow_enough_for_a_small_screen(panel):
    for step in (1, len(STEPS)):
        panel.set(step=step)
        width, height = panel.canvas.pixels
        assert width <= round(100 * NARROW) and height <= 320


@pytest.mark.parametrize("step", STEPS)
def test_indices_and_powers_are_set_as_in_a_formula(panel, step):
    text = at(panel, FIRST, step)
    shown = panel.readout.value
    assert not re.search(r"[A-Za-z]_\w|e\^", re.sub(r"<[^>]*>", "", shown)), shown
    assert "e<sup>" in shown and "<sub>i</sub>" in shown and re.search(r"_[ij]", text)


def numbers_of(way, step, cell):
    """The number that stands in a cell, as computed and as it is."""
    made, true = way.made, way.true
    names = {"key": "key", "read": "read", "result": {"row": "o", "dr": "dr"}.get(step)}
    name = names.get(cell.map, {"pair": "pairs", "all": "scores", "dA": "dA"}.get(step))
    place = (max(cell.row, cell.column),) if cell.map in ("key", "read") else (cell.row, cell.column)
    return None if name is None else (getattr(made, name)[place].item(), getattr(true, name)[place].item())


@pytest.mark.parametrize("decay", [FINE, FIRST, READ, ZERO])
def test_the_arithmetic_of_every_printed_cell_ends_in_its_number(panel, decay):
    compared = set()
    for n, step in enumerate(STEPS[:-1], 1):
        panel.set(decay=decay, step=n)
        for name, (rows, columns) in panel.canvas.maps.items():
            for row, column in itertools.product(range(rows), range(columns)):
                cell = Cell(name, row, column)
                said = panel.arithmetic(panel.result, cell, **panel.setting)
                if not panel._figure.printed(cell):
                    assert said is None
                    continue
                numbers = numbers_of(panel.result, step, cell)
                if numbers is None:  # after the mask: which side of it; for dr: one term of the sum
                    assert said.startswith("pair (" if step != "dr" else "dA (")
                    continue
                got, true = map(float, re.search(r"= (\S+) \(true: (\S+)\)$", said).groups())
                assert (got, true) == pytest.approx(numbers, rel=0.06, abs=1e-44, nan_ok=True), said
                compared.add((step, name))
    assert {("key", "key"), ("pair", "pairs"), ("all", "pairs"), ("row", "result"), ("dr", "result")} <= compared


def test_a_term_of_dr_is_a_product_that_can_be_nan(panel):
    panel.set(decay=FIRST, step=STEPS.index("dr") + 1)
    said = pointed(panel, "pairs", 1, C - 1)
    assert said == panel.text.splitlines()[2] == "dA (1, 7) · k_7 e^92 = 0 · -inf = NaN (true: this term is 0)"
    box = panel.canvas.box
    lit = [tuple(place) for place in panel.picture.lit]
    for place in (box("key", None, C - 1), box("read", 1, None), box("result", 1, None)):
        assert ("same", *place) in lit


def test_the_bars_say_what_is_lost(panel):
    panel.set(decay=FIRST, step=len(STEPS))
    said = set()
    for chunk, size in (("left chunk", 8), ("right chunk", 64)):
        for row in range(panel.canvas.maps[chunk][0]):
            said.add(pointed(panel, chunk, row, 0))
            assert f"in a chunk of {size}, w = " in panel.picture.strip
    assert len(said) == 12 and "gradient dr in a chunk of 64, w = -1.39: NaN or infinite for 64 of 64 tokens" in said


def test_a_pair_that_must_not_count_is_called_so(panel):
    assert "a pair that must not count" in at(panel, FIRST, "pair") and "should make" in at(panel, READ, "pair")
    assert "1 of the 8 keys' factors is infinite." in panel.set(decay=FIRST).text


def test_pinned_pictures_have_the_whole_width():
    panel = infinity()
    panel.pin()
    assert panel._pictures.layout.flex == "1 1 100%"
    panel.pin()
    assert panel._pictures.layout.flex == f"0 1 {panel.canvas.pixels[0]}px"


def test_every_step_says_and_lights_something_else(panel):
    texts, alts, pictures = set(), set(), set()
    for step in range(1, len(STEPS) + 1):
        panel.set(step=step)
        assert "[" in panel.text.splitlines()[0], "no term of the formula is lit"
        assert f"Step {step} of {len(STEPS)}, decay -13.5" in panel.picture.alt
        texts.add(panel.text)
        alts.add(panel.picture.alt)
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
        (FINE, "e^-73.5 · e^73.5 = 1.2e-32 · 8.3e31 = 1 (true: 1)"),
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
    assert "o is right, and a test that looks only at o finds no fault" in at(panel, FIRST, "row")
    assert at(panel, FINE, "row").splitlines()[1].endswith("All are finite, so o is right.")
    assert "0 · -inf = NaN" in at(panel, FIRST, "dr")
    assert "1 of the 8 keys' factors is infinite. 8 of 8 rows of dr are lost." in panel.text
    assert "nothing of dr is lost" in at(panel, FINE, "dr")


def test_where_rows_of_the_output_are_lost_they_are_counted(panel):
    for decay in (READ, ZERO):
        (said,) = re.findall(r"(\d) of 8 rows of o", at(panel, decay, "row"))
        assert int(said) == int((~panel.result.made.o.isfinite()).any(-1).sum())


def test_two_percent(panel):
    text = at(panel, FIRST, "loss")
    lost = case.follow(-1.39, C=64).lost
    assert (lost["keys"], lost["dr"]) == (1 / 64, 1)
    assert "a chunk of 64 at w = -1.39: 1 of 64 keys' factors is infinite, 64 of 64 rows of dr are lost" in text
    assert "Its law is 88.72/64 = 1.386." in text
    assert "From a decay w of -11.09 on (88.72/8, the chunk's length)" in text and "From -12.67 on (88.72/7" in text
    assert "gradient dr 8 of 8" in panel.picture.alt and "output o 0 of 8" in panel.picture.alt


def test_what_each_law_costs_is_what_a_run_there_loses(panel):
    def rows(decay):
        return {name: share * C for name, share in case.follow(decay).lost.items() if name in case.TENSORS and share}

    text = at(panel, FINE, "loss")
    assert rows(-11.1) == {"dk": 1, "dr": C, "dw": C} and "costs all of dr and dw, and 1 of 8 rows of dk." in text
    assert {name: rows(-12.68)[name] for name in ("o", "dv")} == {"o": 1, "dv": 1}
    assert "costs 1 of 8 rows of o and dv." in text


@pytest.mark.parametrize("decay", [FINE, FIRST, READ, ZERO])
def test_a_score_that_the_mask_keeps_is_printed_as_before(panel, decay):
    """Both are rounded alike, though computed in another order."""
    at(panel, decay, "all")
    before = panel._figure._numbers["pairs"].strings.copy()
    at(panel, decay, "mask")
    after, kept = panel._figure._numbers["pairs"].strings, np.tri(C, k=-1, dtype=bool)
    assert after[kept].tolist() == before[kept].tolist() and set(after[~kept]) == {"0"}
    assert before[7, 6] == ("0.195" if decay in (FINE, FIRST) else "NaN")


@pytest.mark.parametrize(("decay", "last"), [(FINE, (7, 6)), (FIRST, (7, 7)), (READ, (7, 6))])
def test_the_sum_of_an_output_has_the_term_of_the_lit_pair(panel, decay, last):
    line = at(panel, decay, "row").splitlines()[2]
    way, (i, j) = panel.result, last
    assert way.cell == last
    term = f"{_number(way.made.kept[i, j])} · {_number(way.operands['v'][j, 0])}"
    assert f" + {term} = " in line


@pytest.mark.parametrize(("decay", "others"), [(FIRST, "so inf."), (READ, "(so is key 7)"), (ZERO, "keys 5 and 7)")])
def test_the_first_step_names_every_infinite_key(panel, decay, others):
    said = at(panel, decay, "key").splitlines()[1]
    j = panel.result.cell[1]
    assert others in said and f"Key {j}, " in said and f"e^({j + 1} · {-decay:g}) = e^{-decay * (j + 1):g}" in said


@pytest.mark.parametrize("decay", [0.0, FINE, FIRST, -12.5, READ, -14.8, ZERO])
def test_sentences_are_short(panel, decay):
    way = case.follow(decay)
    assert max(len(panel.sentence(way, step)) for step in STEPS) <= 300


def test_the_read_is_called_r_throughout():
    said = str((WORDS, FORWARD, BACKWARD))
    assert not re.search(r"\bq\b|q<sub>", said)


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


@pytest.mark.parametrize("label", Infinity.presets)
def test_presets(panel, label):
    lost = {FINE: "", FIRST: "dk dr dw", READ: "o dv dk dr dw", ZERO: "o dv dk dr dw"}[Infinity.presets[label]["decay"]]
    way = case.follow(**Infinity.presets[label])
    assert [name for name in case.TENSORS if way.lost[name]] == lost.split()
    (row,) = [child for child in panel.children if panel.player in getattr(child, "children", ())]
    (button,) = [child for child in row.children if getattr(child, "description", "") == label]
    button.click()
    assert panel.setting["decay"] == Infinity.presets[label]["decay"]


@pytest.mark.parametrize("seed", [0, 7])
def test_every_setting_has_words(panel, seed):
    for decay in (0.0, FINE, -12.68, -14.86, -16.0):
        way = case.follow(decay, seed=seed)
        for step in range(1, len(STEPS) + 1):
            said = panel.describe(way, decay=decay, step=step, seed=seed) + panel.alt_text(way, decay=decay, step=step)
            assert "{" not in said and len(said.splitlines()) >= 3


def test_script_prints_what_the_panel_shows(panel):
    panel.set(decay=FIRST)
    lines = printed(panel)
    assert str(panel.result.made.dr) in lines and "dr lost 1.0" in lines and f"keys lost {1 / C}" in lines
    assert torch.isnan(panel.result.made.dr).all()
