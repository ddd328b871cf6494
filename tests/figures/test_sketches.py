"""Small pictures: both widths, what changes, and cells that can be pointed at."""

import numpy as np
import pytest

from flakit.figures.canvas import Cell
from flakit.figures.sketches.decay_blowup import (
    Counting,
    CountingShown,
    Ends,
    EndsShown,
    Fatal,
    FatalShown,
)
from flakit.figures.sketches.rwkv6_forward import Forgetting, ForgettingShown, Reading, ReadingShown
from flakit.figures.sketches.start_here import Broken, BrokenShown

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
    return CountingShown("its first row", anchor, factor, token, tokens, 8)


def fatal(*positions, row=0):
    lost = np.zeros(32, bool)
    lost[list(positions)] = True
    return FatalShown(-500.0, row, {"o": lost, "dk": np.zeros(32, bool)}, 16, 4)


PICTURES = {
    "broken": (Broken, broken(TRUE), broken(np.where(TRUE > 0, np.nan, TRUE), 0.5)),
    "reading": (Reading, reading(1.0, 0.0), reading(0.0, 1.0)),
    "forgetting": (
        Forgetting,
        ForgettingShown(-0.1, np.exp(-0.1 * np.arange(1, 9))),
        ForgettingShown(-1.0, np.exp(-1.0 * np.arange(1, 9))),
    ),
    "ends": (Ends, ends(80.0), ends(100.0)),
    "counting": (Counting, counting(-1, "key", 15, 0, 15), counting(4, "read", 0, 0, 4)),
    "fatal": (Fatal, fatal(4, 8, 20), fatal(row=-1)),
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
    assert picture.canvas.pixels[0] == round(100 * width) and picture.canvas.pixels[1] <= 300
    texts = [text for text in picture.canvas.figure.findobj(lambda x: hasattr(x, "get_fontsize")) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 8.5


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
        (-0.1, "90% is left after one more token. Half is left after 6.93"),
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
    shown = counting(4, "read", 0, 0, 4)
    assert "that of the read of token 0" in Counting(9.4).say(shown) and "tokens 0 to 4" in Counting(9.4).say(shown)
    assert "is in the exponent" in Counting(9.4).arithmetic(shown, Cell("tokens", 0, 4))
    assert "is not in the exponent" in Counting(9.4).arithmetic(shown, Cell("tokens", 0, 5))


def test_fatal_lists_the_positions_and_what_breaks():
    assert "breaks something at 3 of 32 positions: 4, 8 and 20.\nWhat breaks: o." in Fatal(9.4).say(fatal(4, 8, 20))
    assert "the row before each block" in (said := Fatal(9.4).say(fatal(row=-1))) and "breaks nothing" in said
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 4 more" in Fatal(9.4).say(fatal(*range(14), row=3))
    assert Fatal(9.4).arithmetic(fatal(20), Cell("chunk 1", 0, 4)) == "w = -500 at token 20 alone: lost in o"
