"""Small pictures of what their panels compute: both widths, what changes, what they say, and what each cell says."""

import functools
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from flakit.figures.canvas import Cell
from flakit.panels.knobs import stops_of
from flakit.panels.sketches import SKETCHES, rwkv6_backward, state_tracking
from tests.figures.words import assert_legible

INF, TURNS = float("inf"), state_tracking.TURNS
MANY = 2000  # cells of a map: beyond, a diagonal through all of its rows and columns is pointed at


def settings(name):
    """The knobs with the main one near one end, and at the other."""
    knobs = {knob: make() for knob, make in SKETCHES[name].knobs.items()}
    start, (main, *_) = {knob: widget.value for knob, widget in knobs.items()}, knobs
    stops = stops_of(knobs[main])
    return [start | {main: stop} for stop in (stops[1], stops[-1])]


@functools.cache
def picture_of(name):
    return SKETCHES[name](9.4)


def computed(name, **knobs):
    return SKETCHES[name].compute(**knobs)


def assert_like(text, expected):
    """That a text is the expected one, in which "..." stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("width", [9.4, 5.9])
@pytest.mark.parametrize("name", SKETCHES)
def test_draws_and_redraws_in_place(name, width):
    picture = SKETCHES[name](width)
    first, second = (computed(name, **knobs) for knobs in settings(name))
    pngs = []
    for shown in (first, second, first):
        picture.update(shown)
        pngs.append(picture.canvas.png())
    assert pngs[0] == pngs[2] != pngs[1]
    highest = 400 if name == "broken" else 300  # the first one of all is large
    assert picture.canvas.pixels[0] == round(100 * width) and picture.canvas.pixels[1] <= highest
    texts = [text for text in picture.canvas.figure.findobj(lambda x: hasattr(x, "get_fontsize")) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 8.5
    for shown in (first, second):
        picture.update(shown)
        assert_legible(picture.canvas)


@pytest.mark.parametrize("name", SKETCHES)
def test_every_cell_can_be_pointed_at_and_says_its_numbers(name):
    picture, shown = picture_of(name), computed(name, **settings(name)[0])
    picture.update(shown)
    assert picture.canvas.maps
    for map_name, (rows, columns) in picture.canvas.maps.items():
        cells = product(range(rows), range(columns))
        if rows * columns > MANY:
            cells = [(n % rows, n % columns) for n in range(max(rows, columns))]
        for row, column in cells:
            left, top, width, height = picture.canvas.box(map_name, row, column)
            cell = picture.canvas.cell(left + width / 2, top + height / 2)
            assert cell == Cell(map_name, row, column) and picture.arithmetic(shown, cell)


@pytest.mark.parametrize(("name", "knobs", "says"), [
    ("broken", {"decay": -1.0}, "At a decay of -1 everything is fine: ..."),
    ("broken", {"decay": -1.39}, "At a decay of -1.39, dr, dk and dw are broken; o, dv and du are fine.\n..."),
    ("broken", {"decay": -1.42}, "At a decay of -1.42, o, dr, dk, dv and dw are broken; du is fine.\n..."),
    ("forgetting", {"w": 0.0}, "With w = 0 nothing fades: after 40 more tokens all of it is left."),
    ("forgetting", {"w": -0.1}, "...90% is left after one more token. Half is left after 6.93 tokens."),
    ("forgetting", {"w": -5.0}, "...0.67% is left after one more token: less than half."),
    ("forgetting", {"w": -INF}, "With w = -inf nothing is left after one more token."),
    ("passing", {"t": 3}, "12 pairs of 28 pass token 3, and their sum is dw of it: -0.15. Read after it is -1.10, of "
     "which -0.95 comes from keys of token 3 and later."),
    ("passing", {"t": 7}, "No pair passes token 7..."),
    ("ends", {"exponent": 80}, "e^80 is 5.54e+34. What ...: float32 5.54e+34, bfloat16 5.55e+34, float16 inf."),
    ("ends", {"exponent": 100}, "e^100 is 2.69e+43. What ...: float32 inf, bfloat16 inf, float16 inf."),
    ("counting", {"anchor": 0}, "Anchored before token 0, at the start of the block (n = ge_0 = 0)...key 15...0 to "
     "15..."),
    ("counting", {"anchor": 9}, "Anchored before token 9 (n = ge_9 = gi_8)...that of reader 0...tokens 0 to 8..."),
    ("counting", {"anchor": 16}, "Anchored behind the last token (n = gi_15)..."),
    ("fatal", {"anchor": -2}, "Anchored before token p − 2, p the first of each block..."),
    ("fatal", {"anchor": 0}, "Anchored before token p, the first of each block...breaks nothing..."),
    ("fatal", {"anchor": 1}, "Anchored before token p + 1 of each block...breaks something at 6 of 128 positions: "
     "16, 32, 48, 80, 96 and 112.\nWhat breaks: o, dr, dv and dw."),
    ("fatal", {"anchor": 4}, "Anchored before token p + 4 of each block...16, 17, 18, 19, 32, 33, 34, 35, 48, 49 and "
     "14 more.\n..."),
    ("chunks", {"chunk": 1}, "Every token is a chunk of its own: 32 steps..."),
    ("chunks", {"chunk": 4}, "Chunks of 4 tokens: 8 steps, one after another. 48 pairs are computed inside chunks..."),
    ("chunks", {"chunk": 32}, "All tokens are one chunk: one step. All 496 pairs are computed inside it..."),
    ("split", {"anchor": 0}, "...the start of the chunk (n = ge_0 = 0). The largest factor of a reader is e^0 = 1, "
     "that of a key e^64 = 6.2e+27. The largest weight that they make is 1."),
    ("split", {"anchor": 8}, "The anchor lies before token 8 (n = ge_8 = gi_7)...e^8 = 2,981...that they make is 1."),
    ("split", {"anchor": 64}, "...the end of the chunk..."),
    ("ways", {"way": "halves of halves"}, "Four products make all 120 pairs. No factor is larger than 1."),
    ("ways", {"way": "one product"}, "One product makes all 120 pairs. The largest factor is e^8 = 2,981..."),
    ("ways", {"way": "blocks"}, "Three products make 96 pairs; the other 24 are computed one by one..."),
    ("editing", {"alpha": 0.0}, "...answers both: open 1, closed 1..."),
    ("editing", {"alpha": 0.3}, "...30% of what stood under the door is taken out...open 1, closed 0.7..."),
    ("editing", {"alpha": 1.0}, "...all of what stood under the door is taken out. The memory answers: open 1, "
     "closed 0..."),
    ("editing", {"alpha": 1.6}, "...more is taken out than stood there. Open is 1, and closed stands there turned "
     "round: -0.6..."),
    ("revisions", {"alpha": 0.0}, "...all 8 values count alike..."),
    ("revisions", {"alpha": 0.5}, "...the one before it 50%, and the first 0.78%..."),
    ("revisions", {"alpha": 1.0}, "...only the last value counts..."),
    ("revisions", {"alpha": 2.0}, "...the one before the last -1, the first -1..."),
    ("chained", {"spread": 0.0}, "One token, 16 times: token i finds up to 0.9 of what each earlier one put back. "
     "Through all edits the largest number is 1, and beyond the second diagonal 0.09."),
    ("chained", {"spread": 2.0}, "Keys that differ by 2: token i finds up to 0.44..."),
    ("walking_back", {"step": 1}, "...this is the token that writes..."),
    ("walking_back", {"step": 3}, "...of what token 1 wrote, 100%, 67%, 14% and 1.8% are left..."),
    ("walking_back", {"step": 8}, "Back, D_7: no token comes after..."),
    ("walking_back", {"step": 9}, "Back, D_6: no token after 6 is heard..."),
    ("walking_back", {"step": 10}, "...token 6 reads S_5..."),
    ("walking_back", {"step": 11}, "Back, D_4: of the numbers in D_5, 100%, 82%, 37% and 14% are left..."),
    ("growth", {"w": 0.4}, "...Everything is finite; the largest number is 3.8e+33."),
    ("growth", {"w": 0.8}, "...S is not finite from token 111 on. D, coming back, is not finite from token 79 down. "
     "Of dw, not one token is left."),
    ("slots", {"gate": 0.0}, "...every slot holds two tokens in full..."),
    ("slots", {"gate": -0.5}, "...keeps 61% of its old token..."),
    ("slots", {"gate": -INF}, "...are those of softmax attention over the last 4 tokens; they differ by..."),
    ("slot_gate", {"f": 0.0}, "...half is left after 8 tokens."),
    ("slot_gate", {"f": -20.0}, "...g = -2.5. A slot keeps 8.2% of itself at every token; less than half..."),
    ("pieces", {"handed": "state", "op": "gsa"}, "GSA: ...are those of the whole, to ...e-07."),
    ("pieces", {"handed": "detached", "op": "gsa"}, "GSA: ...The outputs are right, to ...; dv of the first piece is "
     "off by 26%."),
    ("pieces", {"handed": "nothing", "op": "rwkv6"}, "RWKV6: ...Its outputs are off by 71%..."),
    ("swaps", {"t": 0}, "Nothing has moved yet: A, B, C."),
    ("swaps", {"t": 2}, "Move 2 swaps 2nd and 3rd. Now they lie C, A, B..."),
    ("mirror", {"alpha": 0.0}, "...= 1: it is kept..."),
    ("mirror", {"alpha": 0.5}, "...= 0.5: part..."),
    ("mirror", {"alpha": 1.0}, "...= 0: it is forgotten..."),
    ("mirror", {"alpha": 1.5}, "...= -0.5: it is turned..."),
    ("mirror", {"alpha": 2.0}, "...= -1: it..."),
    ("again", {"alpha": 0.5}, "...of it is left."),
    ("again", {"alpha": TURNS}, "...as large as in the beginning..."),
    ("again", {"alpha": 2.0}, "...grows without end."),
    ("mean_of_means", {"cut": 6}, "...Each counts 0.0833..."),
    ("mean_of_means", {"cut": 1}, "...each of the first counts 0.5 and each of the others 0.0455..."),
    ("clipping", {"bad": "5"}, "The norm of all nine is 16.9..."),
    ("clipping", {"bad": "inf"}, "...eight are lost..."),
    ("clipping", {"bad": "NaN"}, "...has become nine."),
    ("f_proj", {"f": -10.0}, "...everything is finite."),
    ("f_proj", {"f": -20.0}, "...16 of 56 tokens have lost their gradient. The output is finite."),
    ("amplified", {"w": -0.1}, "...shrinks..."),
    ("amplified", {"w": 0.0}, "...stays as it was..."),
    ("amplified", {"w": 0.1}, "...no decay..."),
    ("budget", {"fault": 0.0, "dtype": "float32"}, "Nothing is planted: ...1% of its budget."),
    ("budget", {"fault": 1e-6, "dtype": "float32"}, "All values are 0.0001% too large...lost in the rounding of "
     "float32."),
    ("budget", {"fault": 1e-4, "dtype": "float32"}, "All values are 0.01% too large, and o, ... and du are called "
     "wrong."),
    ("roof", {"tokens": 1, "K": 128}, "...0.495 operations per byte. The bytes take 8.13 µs, the operations 0.0243 "
     "µs. The floor is set by the memory."),
    ("roof", {"tokens": 4096, "K": 512}, "...set by the products."),
    ("kept", {"chunk": 1, "itemsize": 4}, "A state after every token, 4 bytes a number: 17.2 GB..."),
    ("kept", {"chunk": 4, "itemsize": 2}, "A state every 4 tokens, 2 bytes a number: 2.15 GB. Written once and read "
     "once they take 1.03 ms, 6.4 times the forward's floor. The pairs inside chunks take 0.0016 ms."),
])  # fmt: skip
def test_the_sentence(name, knobs, says):
    assert_like(picture_of(name).say(computed(name, **knobs)), says)


@pytest.mark.parametrize(("name", "knobs", "at", "says"), [
    ("broken", {"decay": -1.39}, ("computed", 2, 5), "dr of token 5, channel 2: NaN (true: 1.814)"),
    ("reading", {"direction": 60}, ("scores", 1, 0), "token 1: 0.5 · 0 + 0.87 · 1 = 0.87"),
    ("reading", {"direction": 60}, ("output", 1, 0), "channel 1: 0.5 · 0 + 0.87 · 1 + 1.37 · -1 + 0.37 · 1 = -0.13"),
    ("forgetting", {"w": -0.1}, ("left", 0, 1), "after 2 more: e^(2 · -0.1) = 0.8187"),
    ("split", {"anchor": 0}, ("pairs", 7, 6), "token 7 reads token 6: e^-7 · e^7 = 1 (true: 1)"),
    ("chunks", {"chunk": 4}, ("pairs of tokens", 6, 3), "token 3 is in the state that enters at token 4, and token 6 "
     "reads it there; 0.819 of it..."),
    ("chunks", {"chunk": 4}, ("pairs", 0, 0), "8 · 4 · 3 / 2 = 48"),
    ("ways", {"way": "halves of halves"}, ("pairs", 1, 0), "...by product 4: e^0 · e^0 = 1..."),
    ("ways", {"way": "blocks"}, ("pairs", 1, 0), "...computed by itself..."),
    ("passing", {"t": 2}, ("pairs", 3, 1), "...leads past token 2..."),
    ("passing", {"t": 2}, ("pairs", 4, 2), "...does not lead past token 2..."),
    ("ends", {"exponent": 100}, ("lane 0", 0, 209), "float32: e^89 = inf (true: 4.49e+38)"),
    ("ends", {"exponent": 100}, ("lane 2", 0, 100), "float16: e^-20 = 0 (true: 2.06e-09)"),
    ("counting", {"anchor": 9}, ("tokens", 0, 8), "...is in the exponent..."),
    ("counting", {"anchor": 9}, ("tokens", 0, 9), "...is not in the exponent..."),
    ("fatal", {"anchor": 1}, ("chunk 1", 0, 16), "w = -500 at token 80 alone: lost in o, dr, dv and dw"),
    ("editing", {"alpha": 0.7}, ("now", 0, 1), "door, closed: 1 + -0.7 + 0 = 0.3"),
    ("editing", {"alpha": 0.7}, ("taken", 0, 1), "door, closed: -0.7 · 1 = -0.7"),
    ("editing", {"alpha": 0.7}, ("before", 1, 2), "lamp, on: 1"),
    ("chained", {"spread": 0.0}, ("found", 3, 1), "token 3 finds -0.9 times what token 1 put back"),
    ("chained", {"spread": 0.0}, ("inverse", 3, 1), "of what token 1 would find with no edits, -0.09 reaches token 3"),
    ("chained", {"spread": 0.0}, ("found", 1, 3), "token 1 comes before token 3..."),
    ("walking_back", {"step": 2}, ("S 3", 0, 0), "S_3 is not there yet at this step"),
    ("walking_back", {"step": 2}, ("S 2", 1, 0), "...= e^-0.2 · 1 + 0 · 0 = 0.82"),
    ("walking_back", {"step": 10}, ("D 5", 1, 1), "...= e^-0.2 · 0 + 1 · 0.4 = 0.4"),
    ("walking_back", {"step": 11}, ("D 4", 1, 1), "...= e^-0.2 · 0.4 + 0 · 0 = 0.33"),
    ("growth", {"w": 0.8}, ("tokens", 0, 119), "token 119: the largest number is 2.4e+41 in S (not finite in "
     "float32), 7.8e+24 in D and 7.7e+65 in dw (not finite in float32)"),
    ("slots", {"gate": -0.5}, ("holds", 0, 0), "...what the slot has kept since, 1 · e^-0.5 = 0.6065"),
    ("slots", {"gate": -0.5}, ("holds", 1, 5), "...nothing was written to the slot since = 1"),
    ("slots", {"gate": -0.5}, ("holds", 0, 1), "slot 0 holds nothing of token 1: it was written to slot 1..."),
    ("slots", {"gate": -0.5}, ("weights", 0, 1), "...p of slot 1 · what it holds = 0.45 · 0.61 = 0.27 (softmax "
     "attention: 0)"),
    ("slot_gate", {"f": -20.0}, ("left", 0, 1), "after 2 more: e^(2 · -2.5)..."),
    ("swaps", {"t": 0}, ("places", 2, 1), "after move 1 A lies 3rd"),
    ("mean_of_means", {"cut": 1}, ("targets", 0, 5), "target 5: 1/2 · 1/11 = 0.0455..."),
    ("f_proj", {"f": -20.0}, ("ds", 0, 40), "ds of token 40, slot 0: NaN (true: ..."),
    ("f_proj", {"f": -20.0}, ("exponent", 0, 24), "f = -20: 48 · -2.5 = -120; e^120 = inf (true: 1e52)"),
    ("two_forms", {"digits": 8}, ("tokens", 0, 0), "token 0: true 0.320912487, chunk 0.3203125, recurrent 0.3203125; "
     "a step is 0.00195 here"),
    ("two_forms", {"digits": 8}, ("off", 0, 0), "chunk: ... is 1.7e-03"),
    ("measures", {"wrong": "doubled"}, ("map", 1, 2), "..., which is 1 of the value and ..."),
    ("measures", {"wrong": "doubled"}, ("measures", 1, 0), "largest in its own units: 1: ..."),
    ("measures", {"wrong": "doubled"}, ("measures", 2, 0), "relative L2: 1, ..."),
    ("measures", {"wrong": "doubled"}, ("measures", 3, 0), "worst row: 1, ..."),
    ("amplified", {"w": -0.1}, ("distance", 0, 1), "after 2 tokens: 0.8187 of the difference (law: e^(2 · -0.1) = "
     "0.8187)"),
    ("budget", {"fault": 0.0, "dtype": "float32"}, ("tensors", 1, 0), "dr: off by 2.4e-08, allowed 7.7e-06"),
    ("roof", {"tokens": 4096, "K": 64}, ("times", 0, 0), "679.5 · 10⁶ bytes / 4.17 · 10¹² a second = 163 µs"),
    ("roof", {"tokens": 4096, "K": 64}, ("times", 1, 0), "17,180 · 10⁶ operations / 690 · 10¹² a second = 24.9 µs"),
    ("kept", {"chunk": 1, "itemsize": 4}, ("chunks", 0, 1), "C = 2: states 2 · 8.59 GB / 4.17 TB/s = 4.12 ms, pairs "
     "0.00078 ms"),
])  # fmt: skip
def test_the_arithmetic_of_a_cell(name, knobs, at, says):
    picture, shown = picture_of(name), computed(name, **knobs)
    picture.update(shown)
    assert_like(picture.arithmetic(shown, Cell(*at)), says)


def test_what_no_setting_shows_has_words_too():
    broken = replace(computed("broken", decay=-1.39), shares={"o": 0.0, "dr": 0.1})
    assert "dr is broken; o is fine" in picture_of("broken").say(broken)
    slots = computed("slots", gate=-INF)
    assert "they differ by nothing at all" in picture_of("slots").say(replace(slots, weights=slots.attention))
    budget = computed("budget", fault=1.5e-6, dtype="float32")
    only_o = replace(budget, errors=np.where(np.array(budget.names) == "o", 2.0, 0.5) * budget.allowed)
    assert picture_of("budget").say(only_o) == "All values are 0.00015% too large, and o is called wrong."


def test_halved_names_the_blocks_of_both_maps():
    halved, chained = (
        [text.get_text() for ax in picture_of(name).canvas.figure.axes for text in ax.texts if text.get_text()]
        for name in ("halved", "chained")
    )
    assert halved == ["$I - P_1$", "Q", "$I - P_2$", "$P_1^{-1}$", "X", "$P_2^{-1}$"] and chained == []


def test_growth_draws_bold_what_float32_holds_and_dotted_the_rest():
    picture, shown = picture_of("growth"), computed("growth", w=0.8)
    picture.update(shown)
    for name, (thin, bold) in picture._lines.items():
        nonzero = shown.sizes[name] > 0  # zero, such as D of the last token, has no logarithm
        assert np.array_equal(np.isfinite(bold.get_ydata()), shown.finite[name] & nonzero)
        assert np.array_equal(np.isfinite(thin.get_ydata()), ~shown.finite[name] & nonzero)
        if name != "dw":  # all of dw is lost, small numbers, too
            assert np.nanmin(thin.get_ydata()) >= rwkv6_backward.END
