"""Small pictures: both widths, what changes, and cells that can be pointed at."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flakit.figures.canvas import Cell
from flakit.figures.sketches.audit_your_kernel import Budget, BudgetShown
from flakit.figures.sketches.chunk_backward import Passing, PassingShown
from flakit.figures.sketches.chunk_vs_recurrent import (
    Amplified,
    AmplifiedShown,
    Measures,
    MeasuresShown,
    TwoForms,
    TwoFormsShown,
)
from flakit.figures.sketches.chunking import Chunks, ChunksShown, Split, SplitShown, Ways, WaysShown
from flakit.figures.sketches.decay_blowup import (
    Counting,
    CountingShown,
    Ends,
    EndsShown,
    Fatal,
    FatalShown,
)
from flakit.figures.sketches.delta_rule import Editing, EditingShown, Revisions, RevisionsShown
from flakit.figures.sketches.delta_rule_in_chunks import Chained, ChainedShown
from flakit.figures.sketches.gsa import SlotGate, SlotGateShown, Slots, SlotsShown
from flakit.figures.sketches.rwkv6_backward import Growth, GrowthShown, Walk, WalkShown
from flakit.figures.sketches.rwkv6_forward import Forgetting, ForgettingShown, Reading, ReadingShown
from flakit.figures.sketches.speed import Kept, KeptShown, Roof, RoofShown, Tail, TailShown
from flakit.figures.sketches.start_here import Broken, BrokenShown
from flakit.figures.sketches.state_tracking import Again, AgainShown, Mirror, MirrorShown, Swaps, SwapsShown
from flakit.figures.sketches.states_and_shapes import Pieces, PiecesShown
from flakit.figures.sketches.training import Clipping, ClippingShown, FProj, FProjShown, MeanOfMeans, MeanOfMeansShown
from flakit.numerics.errors import compare
from tests.figures.words import assert_legible

RANDOM = np.random.default_rng(0)
TRUE = RANDOM.normal(size=(6, 4))
KEYS, VALUES = np.array([[1.0, 0], [0, 1]]), np.array([[2.0, 0], [0, 3]])


def broken(computed, dr=0.0):
    return BrokenShown(-1.0, computed, TRUE, {"o": 0.0, "dr": dr, "dk": 0.0, "dw": dr})


def reading(x, y):
    query = np.array([x, y])
    return ReadingShown(query, KEYS, VALUES, KEYS @ query, (KEYS @ query) @ VALUES)


def ends(exponent):
    exponents, formats = np.arange(-120.0, 121), {"float64": np.float64, "float32": np.float32, "float16": np.float16}
    with np.errstate(over="ignore"):
        held = {name: np.exp(exponents).astype(dtype) for name, dtype in formats.items()}
        values = {name: float(dtype(np.exp(exponent))) for name, dtype in formats.items()}
    smallest = {name: float(np.finfo(dtype).smallest_normal) for name, dtype in formats.items()}
    return EndsShown(exponent, values, exponents, held, smallest)


def counting(anchor, factor, token, first, last):
    tokens = np.zeros(16, bool)
    tokens[first : last + 1] = True
    return CountingShown(anchor, factor, token, tokens)


def fatal(*positions, anchor=1):
    lost = np.zeros(32, bool)
    lost[list(positions)] = True
    return FatalShown(-500.0, anchor, {"o": lost, "dk": np.zeros(32, bool)}, 16, 4)


def chunks(chunk, T=8):
    i, j = np.indices((T, T))
    kinds = np.select([i < j, i == j, i // chunk == j // chunk], [3, 2, 0], 1)
    return ChunksShown(chunk, kinds, np.exp(-0.1 * (i - j - 1)), -0.1)


def split(anchor, C=8):
    read, key = anchor - np.arange(C, dtype=float), np.arange(C) + 1.0 - anchor
    return SplitShown(anchor, -1.0, read, key, np.exp(read)[:, None] * np.exp(key))


def ways(halves, C=4):
    i, j = np.indices((C, C))
    past = i > j
    product = np.where(i // 2 > j // 2, 1, 2) if halves else np.where(i // 2 > j // 2, 1, 0)
    exponent = np.where(past, 0.0 if halves else 2.0, np.nan)
    return WaysShown(-1.0, np.where(past, product, -1), exponent, exponent)


def editing(alpha):
    before, written = np.array([[0.0, 1, 0, 0], [0, 0, 1, 0]]), np.array([[1.0, 0, 0, 0], [0, 0, 0, 0]])
    taken = -alpha * np.array([[0.0, 1, 0, 0], [0, 0, 0, 0]])
    return EditingShown(alpha, before, taken, written, before + taken + written)


def revisions(alpha):
    return RevisionsShown(alpha, (1 - alpha) ** np.arange(7.0, -1, -1))


def chained(spread):
    found = np.tril(np.full((4, 4), -0.9 / (1 + spread)), -1)
    return ChainedShown(spread, found, np.linalg.inv(np.eye(4) - found))


def walk(step, T=4):
    """Token 0 writes, token 2 reads; one of two rows keeps all, of the other half is left at every token."""
    keep = np.array([1.0, 0.5])
    r, k, v, do = (np.zeros((T, 2)) for _ in range(4))
    k[0], v[0], r[2], do[2] = 1.0, (0.4, -0.8), 1.0, (1.0, 0.25)
    states = np.stack([keep[:, None] ** t * v[0] for t in range(T)])
    gradients = np.stack([keep[:, None] ** (1 - t) * do[2] if t < 2 else np.zeros((2, 2)) for t in range(T)])
    return WalkShown(step, 0, 2, r, k, np.log(keep) + np.zeros((T, 1)), v, do, states, gradients)


def growth(w, T=120, end=38.5):
    grown = np.exp(w * np.arange(T))
    sizes = {"S": grown, "D": grown[::-1], "dw": grown[-1] + np.zeros(T)}
    finite = {name: size < 10**end for name, size in sizes.items()}
    return GrowthShown(w, sizes, finite, end)


def slots(gate):
    kept = float(np.exp(gate))
    holds, p = np.array([[kept, 0, 1, 0], [0, kept, 0, 1]]), np.array([0.25, 0.75])
    return SlotsShown(gate, holds, p, p @ holds, np.array([0, 0, 0.25, 0.75]))


def slot_gate(f):
    f_at, gate = np.linspace(7, -41, 9), -np.logaddexp(0, -f) / 8
    return SlotGateShown(f, gate, np.exp(gate * np.arange(1, 9)), f_at, -np.logaddexp(0, -f_at) / 8)


def pieces(handed):
    fine, off = np.full(8, 1e-7), np.array([1e-7] * 4 + [0.5, 0.3, 0.2, 0.1])
    o_second, dv_first = (1e-7 if handed != "nothing" else 0.4), (1e-7 if handed == "state" else 0.6)
    o, dv = (off if handed == "nothing" else fine), (fine if handed == "state" else off[::-1])
    return PiecesShown("GSA", handed, 4, o, dv, o_second, dv_first, max(o_second, dv_first))


MOVES, ORDERED = np.array([[0, 1], [1, 2]]), np.array([[0, 1, 2], [1, 0, 2], [1, 2, 0]])
KAPPA = np.array([1.0, -1.0]) / 2**0.5


def mirror(alpha):
    before = np.array([0.9, 0.3])
    return MirrorShown(alpha, KAPPA, before, before - alpha * (KAPPA @ before) * KAPPA)


def again(alpha):
    return AgainShown(-0.5, alpha, (np.exp(-0.5) - alpha) ** np.arange(1, 9))


def mean_of_means(cut):
    averaged = np.where(np.arange(6) < cut, 0.5 / cut, 0.5 / (6 - cut))
    return MeanOfMeansShown(cut, averaged, np.full(6, 1 / 6))


def clipping(bad):
    before = np.arange(1.0, 10).reshape(3, 3)
    before[1, 1] = bad
    with np.errstate(invalid="ignore"):
        norm = np.sqrt((before**2).sum())
        return ClippingShown(before, before / norm, norm)


def f_proj(f, lost):
    ds = RANDOM.normal(size=(6, 3))
    stops = -np.arange(0.0, 31, 10)
    computed = np.where(np.arange(6)[:, None] < lost, np.nan, ds)
    return FProjShown(f, stops, stops / 8, -6 * stops, 48, 88.72, -20.0, computed, ds, True)


def two_forms(digits, chunk, recurrent):
    true = np.array([1.0, -0.5, 0.25])
    off = {"chunk": abs(chunk - true).max(), "recurrent": abs(recurrent - true).max()}
    return TwoFormsShown(digits, chunk, recurrent, true, 2.0**-digits * np.array([2, 1, 0.5]), 0.5, off)


def measures(wrong, got):
    return MeasuresShown(wrong, got, TRUE, compare(torch.tensor(got), torch.tensor(TRUE)))


def amplified(w):
    left = np.exp(w * np.arange(1, 9))
    return AmplifiedShown(w, left, left)


def budget(fault):
    return BudgetShown(fault, "float32", ("o", "dr"), np.array([1e-8, 2e-8]) + fault, np.array([1e-5, 2e-5]))


def roof(intensity):
    return RoofShown(4, 64, 2 * 10**9, round(intensity * 2 * 10**9), 4.0, 800.0)


def kept(at, itemsize=4):
    chunks = [1, 2, 4, 8]
    sizes = itemsize * 1e9 / np.array(chunks)
    return KeptShown(at, itemsize, chunks, sizes, 2e-9 * sizes / 4.0, 0.01 * np.array(chunks), 0.25, 4.0)


def tail(by_head, *at):
    steep = np.zeros((4, 8), bool)
    steep[at] = True
    return TailShown(1000, by_head, steep, 16, 64, 512)


PICTURES = {
    "roof": (Roof, roof(10), roof(400)),
    "kept": (Kept, kept(0), kept(2, 2)),
    "tail": (Tail, tail(True, 1, 2), tail(False, 1, 2)),
    "budget": (Budget, budget(0.0), budget(1.5e-5)),
    "swaps": (Swaps, SwapsShown(0, MOVES, ORDERED), SwapsShown(2, MOVES, ORDERED)),
    "mirror": (Mirror, mirror(0.5), mirror(2.0)),
    "again": (Again, again(0.5), again(2.0)),
    "mean_of_means": (MeanOfMeans, mean_of_means(3), mean_of_means(1)),
    "clipping": (Clipping, clipping(5), clipping(np.nan)),
    "f_proj": (FProj, f_proj(-10.0, 0), f_proj(-20.0, 2)),
    "broken": (Broken, broken(TRUE), broken(np.where(TRUE > 0, np.nan, TRUE), 0.5)),
    "reading": (Reading, reading(1.0, 0.0), reading(0.0, 1.0)),
    "forgetting": (
        Forgetting,
        ForgettingShown(-0.1, np.exp(-0.1 * np.arange(1, 9))),
        ForgettingShown(-1.0, np.exp(-1.0 * np.arange(1, 9))),
    ),
    "ends": (Ends, ends(80.0), ends(100.0)),
    "counting": (Counting, counting(0, "key", 15, 0, 15), counting(9, "read", 0, 0, 8)),
    "fatal": (Fatal, fatal(4, 8, 20), fatal(anchor=0)),
    "chunks": (Chunks, chunks(2), chunks(4)),
    "passing": (Passing, PassingShown(2, np.tri(5, k=-1)), PassingShown(4, np.tri(5, k=-1))),
    "split": (Split, split(0), split(4)),
    "ways": (Ways, ways(True), ways(False)),
    "editing": (Editing, editing(0.0), editing(0.7)),
    "revisions": (Revisions, revisions(0.5), revisions(1.5)),
    "chained": (Chained, chained(0.0), chained(3.0)),
    "halved": (Chained, replace(chained(0.0), halves=True), replace(chained(3.0), halves=True)),
    "walking_back": (Walk, walk(2), walk(7)),
    "growth": (Growth, growth(0.4), growth(0.8)),
    "slots": (Slots, slots(-0.5), slots(-np.inf)),
    "slot_gate": (SlotGate, slot_gate(0.0), slot_gate(-20.0)),
    "pieces": (Pieces, pieces("state"), pieces("nothing")),
    "two_forms": (
        TwoForms,
        two_forms(8, np.array([1.004, -0.5, 0.25]), np.array([1.0, -0.501, 0.25])),
        two_forms(11, np.array([1.0, -0.5, 0.2501]), np.array([1.0, -0.5, 0.25])),
    ),
    "measures": (Measures, measures("doubled", 2 * TRUE), measures("inputs", TRUE + 0.01)),
    "amplified": (Amplified, amplified(-0.1), amplified(0.1)),
}


@pytest.mark.parametrize("width", [9.4, 5.9])
@pytest.mark.parametrize("name", PICTURES)
def test_draws_and_redraws_in_place(name, width):
    make, first, second = PICTURES[name]
    picture = make(width)
    seen = []
    for shown in (first, second, first):
        picture.update(shown)
        seen.append(picture.canvas.png())
    assert seen[0] == seen[2] != seen[1]
    highest = 400 if name == "broken" else 300  # the first one of all is large
    assert picture.canvas.pixels[0] == round(100 * width) and picture.canvas.pixels[1] <= highest
    texts = [text for text in picture.canvas.figure.findobj(lambda x: hasattr(x, "get_fontsize")) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 8.5
    for shown in (first, second):
        picture.update(shown)
        assert_legible(picture.canvas)


@pytest.mark.parametrize("name", PICTURES)
def test_every_cell_can_be_pointed_at_and_says_its_numbers(name):
    make, shown, _ = PICTURES[name]
    picture = make(9.4)
    picture.update(shown)
    assert picture.canvas.maps
    for map_name, (rows, columns) in picture.canvas.maps.items():
        for row in range(rows):
            for column in range(columns):
                left, top, width, height = picture.canvas.box(map_name, row, column)
                cell = picture.canvas.cell(left + width / 2, top + height / 2)
                assert cell == Cell(map_name, row, column) and picture.arithmetic(shown, cell)


def test_the_arithmetic_is_that_of_the_cell():
    _, shown, bad = PICTURES["broken"]
    t, c = np.argwhere(np.isnan(bad.computed))[0]
    assert Broken(9.4).arithmetic(bad, Cell("computed", c, t)).endswith(f"NaN (true: {TRUE[t, c]:.4g})")
    shown = reading(0.6, 0.8)
    assert Reading(9.4).arithmetic(shown, Cell("scores", 1, 0)) == "token 1: 0.6 · 0 + 0.8 · 1 = 0.8"
    assert Reading(9.4).arithmetic(shown, Cell("output", 1, 0)) == "channel 1: 0.6 · 0 + 0.8 · 3 = 2.4"
    assert (
        Forgetting(9.4).arithmetic(PICTURES["forgetting"][1], Cell("left", 0, 1))
        == "after 2 more: e^(2 · -0.1) = 0.8187"
    )
    said = Split(9.4).arithmetic(split(0), Cell("pairs", 7, 6))
    assert said == "token 7 reads token 6: e^-7 · e^7 = 1 (true: 1)"
    said = Chunks(9.4).arithmetic(chunks(4), Cell("pairs of tokens", 6, 3))
    assert said.startswith("token 3 is in the state that enters at token 4, and token 6 reads it there; 0.819 of it")
    assert Chunks(9.4).arithmetic(chunks(4), Cell("pairs", 0, 0)) == "2 · 4 · 3 / 2 = 12"
    assert "by product 2: e^0 · e^0 = 1" in Ways(9.4).arithmetic(ways(True), Cell("pairs", 1, 0))
    assert "computed by itself" in Ways(9.4).arithmetic(ways(False), Cell("pairs", 1, 0))


def test_what_passes_a_token_is_said_in_both_sums():
    shown = PassingShown(2, np.tri(5, k=-1))
    assert Passing(9.4).say(shown) == (
        "4 pairs of 10 pass token 2, and their sum is dw of it: 4.00. Read after it is 7.00, of which 3.00 comes from "
        "keys of token 2 and later."
    )
    assert Passing(9.4).say(PassingShown(4, np.tri(5, k=-1))).startswith("No pair passes token 4")
    assert "leads past token 2" in Passing(9.4).arithmetic(shown, Cell("pairs", 3, 1))
    assert "does not lead past token 2" in Passing(9.4).arithmetic(shown, Cell("pairs", 4, 2))


def test_the_sentence_names_what_is_broken():
    _, fine, bad = PICTURES["broken"]
    assert "everything is fine" in Broken(9.4).say(fine)
    assert "dr and dw are broken; o and dk are fine" in Broken(9.4).say(bad)
    alone = BrokenShown(-1.0, TRUE, TRUE, {"o": 0.0, "dr": 0.1})
    assert "dr is broken; o is fine" in Broken(9.4).say(alone)


@pytest.mark.parametrize(
    ("w", "says"),
    [
        (0.0, "nothing fades: after 8 more tokens"),
        (-0.1, "90% is left after one more token. Half is left after 6.93 tokens"),
        (-5.0, "0.67% is left after one more token: less than half"),
        (-np.inf, "nothing is left after one more token"),
    ],
)
def test_forgetting_says_how_fast(w, says):
    with np.errstate(invalid="ignore"):
        shown = ForgettingShown(w, np.exp(w * np.arange(1, 9)))
    assert says in Forgetting(9.4).say(shown)


def test_ends_says_what_each_format_holds():
    picture = Ends(9.4)
    picture.update(ends(100.0))
    assert "float64 2.69e+43, float32 inf, float16 inf" in picture.say(ends(100.0))
    assert picture.arithmetic(ends(100.0), Cell("lane 1", 0, 209)) == "float32: e^89 = inf (true: 4.49e+38)"
    assert picture.arithmetic(ends(100.0), Cell("lane 2", 0, 100)) == "float16: e^-20 = 0 (true: 2.06e-09)"


def test_counting_says_whose_factor_it_is_and_which_tokens_are_in_it():
    shown, picture = counting(9, "read", 0, 0, 8), Counting(9.4)
    said = picture.say(shown)
    assert "before token 9 (n = ge_9 = gi_8)" in said and "that of reader 0" in said and "tokens 0 to 8" in said
    assert "is in the exponent" in picture.arithmetic(shown, Cell("tokens", 0, 8))
    assert "is not in the exponent" in picture.arithmetic(shown, Cell("tokens", 0, 9))
    assert "before token 0, at the start of the block" in picture.say(counting(0, "key", 15, 0, 15))
    assert "behind the last token (n = gi_15)" in picture.say(counting(16, "read", 0, 0, 15))


def test_fatal_lists_the_positions_and_what_breaks():
    assert "breaks something at 3 of 32 positions: 4, 8 and 20.\nWhat breaks: o." in Fatal(9.4).say(fatal(4, 8, 20))
    assert "before token p, the first" in (said := Fatal(9.4).say(fatal(anchor=0))) and "breaks nothing" in said
    assert "before token p + 1 of each" in Fatal(9.4).say(fatal(4)) and "p − 2," in Fatal(9.4).say(fatal(4, anchor=-2))
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 4 more" in Fatal(9.4).say(fatal(*range(14), anchor=4))
    assert Fatal(9.4).arithmetic(fatal(20), Cell("chunk 1", 0, 4)) == "w = -500 at token 20 alone: lost in o"


def test_chunks_are_counted_in_words():
    say = Chunks(9.4).say
    assert say(chunks(1)).startswith("Every token is a chunk of its own: 8 steps")
    assert say(chunks(4)).startswith("Chunks of 4 tokens: 2 steps, one after another. 12 pairs are computed inside")
    assert say(chunks(8)).startswith("All tokens are one chunk: one step. All 28 pairs")


def test_an_anchor_says_how_large_the_factors_are():
    say = Split(9.4).say
    assert (
        "the start of the chunk (n = ge_0 = 0). The largest factor of a reader is e^0 = 1, that of a key e^8 = 2,981"
        in say(split(0))
    )
    assert "The anchor lies before token 4 (n = ge_4 = gi_3)" in say(split(4)) and "weight that they make is 1." in say(
        split(4)
    )
    assert "the end of the chunk" in say(split(8))


def test_ways_say_what_no_product_makes():
    assert Ways(9.4).say(ways(True)) == "Two products make all 6 pairs. No factor is larger than 1."
    said = Ways(9.4).say(ways(False))
    assert said.startswith("One product makes 4 pairs; the other 2 are computed one by one. The largest factor is e^2")


@pytest.mark.parametrize(
    ("alpha", "says"),
    [
        (0.0, "answers both: open 1, closed 1"),
        (0.3, "30% of what stood under the door is taken out"),
        (0.3, "open 1, closed 0.7"),
        (1.0, "all of what stood under the door is taken out. The memory answers: open 1, closed 0"),
        (1.6, "more is taken out than stood there. Open is 1, and closed stands there turned round: -0.6"),
    ],
)
def test_editing_says_what_the_memory_answers(alpha, says):
    assert says in Editing(9.4).say(editing(alpha))


def test_editing_adds_up_the_numbers_of_a_cell():
    picture, shown = Editing(9.4), editing(0.7)
    assert picture.arithmetic(shown, Cell("now", 0, 1)) == "door, closed: 1 + -0.7 + 0 = 0.3"
    assert picture.arithmetic(shown, Cell("taken", 0, 1)) == "door, closed: -0.7 · 1 = -0.7"
    assert picture.arithmetic(shown, Cell("before", 1, 2)) == "lamp, on: 1"


@pytest.mark.parametrize(
    ("alpha", "says"),
    [
        (0.0, "all 8 values count alike"),
        (0.5, "the one before it 50%, and the first 0.78%"),
        (1.0, "only the last value counts"),
        (2.0, "the one before the last -1, the first -1"),
    ],
)
def test_revisions_says_which_values_count(alpha, says):
    assert says in Revisions(9.4).say(revisions(alpha))


def test_halved_names_the_blocks_of_both_maps():
    picture = Chained(9.4)
    picture.update(replace(chained(0.0), halves=True))
    shown = [text.get_text() for ax in picture.canvas.figure.axes for text in ax.texts if text.get_visible()]
    assert shown == ["$I - P_1$", "Q", "$I - P_2$", "$P_1^{-1}$", "X", "$P_2^{-1}$"]
    picture.update(chained(0.0))
    assert not any(text.get_visible() for ax in picture.canvas.figure.axes for text in ax.texts)


def test_chained_says_how_far_an_edit_reaches():
    picture, same = Chained(9.4), chained(0.0)
    assert "up to 0.9 of what each earlier one put back" in picture.say(same)
    assert "the largest number is 1, and beyond the second diagonal 0.09" in picture.say(same)
    assert "Keys that differ by 2: token i finds up to 0.3" in picture.say(chained(2.0))
    assert picture.arithmetic(same, Cell("found", 3, 1)) == "token 3 finds -0.9 times what token 1 put back"
    assert "token 3 before" not in picture.arithmetic(same, Cell("inverse", 3, 1))
    assert picture.arithmetic(same, Cell("found", 1, 3)).startswith("token 1 comes before token 3")


def test_the_walk_says_where_it_is_and_hides_what_is_not_there_yet():
    picture = Walk(9.4)
    said = [picture.say(walk(step)) for step in range(8)]
    assert "this is the token that writes" in said[0]
    assert "of what token 0 wrote, 100% and 25% are left" in said[2]
    assert "D_3: no token comes after" in said[4] and "D_2: no token after 2 is heard" in said[5]
    assert "token 2 reads S_1" in said[6] and "in D_1, 100% and 50% are left" in said[7]
    picture.update(walk(2))
    assert picture.arithmetic(walk(2), Cell("S 3", 0, 0)) == "S_3 is not there yet at this step"
    assert picture.arithmetic(walk(2), Cell("S 2", 1, 0)).endswith("= e^-0.69 · 0.2 + 0 · 0 = 0.1")
    assert picture.arithmetic(walk(7), Cell("D 1", 1, 1)).endswith("= e^-0.69 · 0 + 1 · 0.25 = 0.25")
    assert picture.arithmetic(walk(7), Cell("D 0", 1, 1)).endswith("= e^-0.69 · 0.25 + 0 · 0 = 0.12")


@pytest.mark.parametrize(
    ("w", "says"),
    [
        (0.4, "Everything is finite; the largest number is 4.7e+20"),
        (0.8, "S is not finite from token 111 on. D, coming back, is not finite from token 8 down. Of dw, not one"),
    ],
)
def test_growth_says_what_is_lost(w, says):
    assert says in Growth(9.4).say(growth(w))


def test_growth_draws_bold_what_float32_holds_and_dotted_the_rest():
    picture = Growth(9.4)
    picture.update(shown := growth(0.8))
    for name, (thin, bold) in picture._lines.items():
        assert np.array_equal(np.isfinite(bold.get_ydata()), shown.finite[name])
        assert np.array_equal(np.isfinite(thin.get_ydata()), ~shown.finite[name])
        assert np.nanmin(thin.get_ydata()) >= 38.5
    assert picture.arithmetic(shown, Cell("tokens", 0, 119)) == (
        "token 119: the largest number is 2.2e+41 in S (not finite in float32), 1 in D and 2.2e+41 in dw (not finite "
        "in float32)"
    )


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (0.0, "every slot holds two tokens in full"),
        (-0.5, "keeps 61% of its old token"),
        (-np.inf, "are those of softmax attention over the last 2 tokens; they differ by nothing at all"),
    ],
)
def test_slots_say_how_far_from_attention_they_are(gate, says):
    assert says in Slots(9.4).say(slots(gate))


def test_slots_tell_what_they_hold():
    picture, shown = Slots(9.4), slots(-0.5)
    assert "what the slot has kept since, 1 · e^-0.5 = 0.6065" in picture.arithmetic(shown, Cell("holds", 0, 0))
    assert "nothing was written to the slot since = 1" in picture.arithmetic(shown, Cell("holds", 1, 3))
    assert "holds nothing of token 1: it was written to slot 1" in picture.arithmetic(shown, Cell("holds", 0, 1))
    said = picture.arithmetic(shown, Cell("weights", 0, 1))
    assert "p of slot 1 · what it holds = 0.75 · 0.61 = 0.45 (softmax attention: 0)" in said


def test_a_gate_says_how_fast_its_slot_fades():
    assert "half is left after 8 tokens" in SlotGate(9.4).say(slot_gate(0.0))
    assert "g = -2.5. A slot keeps 8.2% of itself at every token; less than half" in SlotGate(9.4).say(slot_gate(-20.0))
    assert SlotGate(9.4).arithmetic(slot_gate(-20.0), Cell("left", 0, 1)).startswith("after 2 more: e^(2 · -2.5)")


@pytest.mark.parametrize(
    ("handed", "says"),
    [
        ("state", "are those of the whole, to 1.0e-07"),
        ("detached", "The outputs are right, to 1.0e-07; dv of the first piece is off by 60%"),
        ("nothing", "Its outputs are off by 40%"),
    ],
)
def test_pieces_say_what_is_lost(handed, says):
    assert says in Pieces(9.4).say(pieces(handed))


def test_cards_are_told_by_their_places():
    assert Swaps(9.4).say(SwapsShown(0, MOVES, ORDERED)) == "Nothing has moved yet: A, B, C."
    said = Swaps(9.4).say(SwapsShown(2, MOVES, ORDERED))
    assert said.startswith("Move 2 swaps 2nd and 3rd. Now they lie B, C, A")
    assert Swaps(9.4).arithmetic(SwapsShown(0, MOVES, ORDERED), Cell("places", 2, 1)) == "after move 1 C lies 3rd"


@pytest.mark.parametrize(
    ("alpha", "says"),
    [(0, "1: it is kept"), (0.5, "0.5: part"), (1, "0: it is forgotten"), (1.5, "-0.5: it is turned"), (2, "-1: it")],
)
def test_a_mirror_says_what_becomes_of_the_state(alpha, says):
    assert f"= {says}" in Mirror(9.4).say(mirror(alpha))


@pytest.mark.parametrize(
    ("alpha", "says"),
    [(0.5, "of it is left"), (1 + np.exp(-0.5), "as large as in the beginning"), (2.0, "grows without end")],
)
def test_again_says_whether_it_grows(alpha, says):
    assert says in Again(9.4).say(again(alpha))


def test_a_mean_of_means_says_what_each_target_counts():
    assert "Each counts 0.167" in MeanOfMeans(9.4).say(mean_of_means(3))
    assert "each of the first counts 0.5 and each of the others 0.1" in MeanOfMeans(9.4).say(mean_of_means(1))
    cell = Cell("targets", 0, 5)
    assert MeanOfMeans(9.4).arithmetic(mean_of_means(1), cell).startswith("target 5: 1/2 · 1/5 = 0.1")


@pytest.mark.parametrize(
    ("bad", "says"), [(5, "The norm of all nine is 16.9"), (np.inf, "eight are lost"), (np.nan, "has become nine")]
)
def test_clipping_says_what_is_left(bad, says):
    assert says in Clipping(9.4).say(clipping(bad))


def test_gates_say_what_is_lost():
    assert "everything is finite" in FProj(9.4).say(f_proj(-10.0, 0))
    assert "2 of 6 tokens have lost their gradient. The output is finite" in FProj(9.4).say(f_proj(-20.0, 2))
    lost = f_proj(-20.0, 2)
    assert FProj(9.4).arithmetic(lost, Cell("ds", 0, 1)).startswith("ds of token 1, slot 0: NaN (true: ")
    assert FProj(9.4).arithmetic(lost, Cell("exponent", 0, 2)) == "f = -20: 48 · -2.5 = -120; e^120 = inf (true: 1e52)"


def test_the_arithmetic_of_the_comparison_is_that_of_the_cell():
    shown = PICTURES["two_forms"][1]
    assert TwoForms(9.4).arithmetic(shown, Cell("tokens", 0, 0)) == (
        "token 0: true 1, chunk 1.004, recurrent 1; a step is 0.00781 here"
    )
    assert "chunk" in TwoForms(9.4).arithmetic(shown, Cell("off", 0, 0))
    doubled = PICTURES["measures"][1]
    assert ", which is 1 of the value and " in Measures(9.4).arithmetic(doubled, Cell("map", 1, 2))
    says = [Measures(9.4).arithmetic(doubled, Cell("measures", n, 0)) for n in range(1, 4)]
    assert [each.split(": ")[1].rstrip(",:").split(",")[0] for each in says] == ["1", "1", "1"]
    assert Amplified(9.4).arithmetic(amplified(-0.1), Cell("distance", 0, 1)) == (
        "after 2 tokens: 0.8187 of the difference (law: e^(2 · -0.1) = 0.8187)"
    )


@pytest.mark.parametrize(("w", "says"), [(-0.1, "shrinks"), (0.0, "stays as it was"), (0.1, "no decay")])
def test_what_becomes_of_a_difference(w, says):
    assert says in Amplified(9.4).say(amplified(w))


def test_a_budget_names_what_is_called_wrong():
    picture = Budget(9.4)
    assert "1% of its budget" in picture.say(budget(0.0)) and "lost" in picture.say(budget(1e-6))
    assert picture.say(budget(1.5e-5)) == "All values are 0.0015% too large, and o is called wrong."
    assert "o and dr are called wrong" in picture.say(budget(1e-3))
    assert picture.arithmetic(budget(0.0), Cell("tensors", 1, 0)) == "dr: off by 2.0e-08, allowed 2.0e-05"


def test_the_roof_says_what_sets_the_floor():
    picture = Roof(9.4)
    assert "10 operations per byte. The bytes take 500 µs, the operations 25 µs. The floor is set by the memory" in (
        picture.say(roof(10))
    )
    assert picture.say(roof(400)).endswith("set by the products.")
    said = picture.arithmetic(roof(10), Cell("times", 0, 0))
    assert said == "2,000 · 10⁶ bytes / 4 · 10¹² a second = 500 µs"
    said = picture.arithmetic(roof(400), Cell("times", 1, 0))
    assert said == "800,000 · 10⁶ operations / 800 · 10¹² a second = 1,000 µs"


def test_kept_states_say_what_they_cost():
    assert "A state after every token, 4 bytes a number: 4 GB" in Kept(9.4).say(kept(0))
    said = Kept(9.4).say(kept(2, 2))
    assert said.startswith(
        "A state every 4 tokens, 2 bytes a number: 500 MB. Written once and read once they take 0.25"
    )
    assert "1 times the forward's floor" in said and said.endswith("take 0.04 ms.")
    assert (
        Kept(9.4).arithmetic(kept(0), Cell("chunks", 0, 1)) == "C = 2: states 2 · 2 GB / 4 TB/s = 1 ms, pairs 0.02 ms"
    )
