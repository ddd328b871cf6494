"""One infinity's way as a picture: every number printed, what is not finite hatched, what is not there yet blank."""

import numpy as np
import pytest

from flakit.figures import style
from flakit.figures.canvas import Cell
from flakit.figures.infinity import LIT, LossFigure, WayFigure, rounded, short
from tests.figures.test_plots import area, has_colour
from tests.figures.words import assert_legible

C, K = 4, 2
EXPONENTS = (np.arange(C) * -40.0, np.arange(1, C + 1) * 40.0)


@pytest.fixture
def figure():
    return WayFigure(C, K)


def update(figure, lit=None, **values):
    figure.update(exponents=EXPONENTS, words={}, lit=lit or {}, **values)


def printed(figure, name):
    return list(figure._numbers[name].strings.flat)


@pytest.mark.parametrize("power", range(-45, 39))
@pytest.mark.parametrize("digits", [1, 9.4])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_fits_into_its_cell(power, digits, sign):
    x = sign * digits * 10.0**power
    assert len(short(x)) <= 6
    assert float(short(x)) == pytest.approx(x, rel=0.12)


def test_every_number_is_printed(figure):
    pairs = np.arange(16.0).reshape(4, 4)
    pairs[1, 2], pairs[3, 3] = np.inf, np.nan
    update(figure, key=[1, 2, np.inf, -np.inf], pairs=pairs)
    assert printed(figure, "key") == ["1", "2", "inf", "-inf"]
    assert printed(figure, "pairs")[6] == "inf" and printed(figure, "pairs")[15] == "NaN"
    assert printed(figure, "read") == [""] * C and printed(figure, "result") == [""] * (C * K)
    looks = style.NAN["facecolor"], style.INF["facecolor"]
    shown = [area(figure.canvas, colour) for colour in looks]
    update(figure, key=[1, 2, 3, 4])
    assert printed(figure, "pairs") == [""] * 16
    legend = [area(figure.canvas, colour) for colour in looks]  # says what both look like, at any time
    assert all(0 < small < large for small, large in zip(legend, shown, strict=True))


def test_a_masked_cell_is_not_there_yet(figure):
    pairs = np.ma.masked_all((C, C))
    pairs[2, 1] = np.inf
    update(figure, pairs=pairs)
    assert [text for text in printed(figure, "pairs") if text] == ["inf"]


def test_the_lit_cell(figure):
    update(figure, lit={"pairs": (2, 1)}, pairs=np.zeros((C, C)))
    assert [name for name, frame in figure._lit.items() if frame.get_visible()] == ["pairs"]
    assert figure._lit["pairs"].get_xy() == (0.5, 1.5) and has_colour(figure.canvas, LIT["edgecolor"])
    update(figure, pairs=np.zeros((C, C)))
    assert not has_colour(figure.canvas, LIT["edgecolor"])


def test_the_border_has_exactly_the_past_below_it(figure):
    """Down a column, the line is met before the first row whose token is later than the key, and nowhere else."""
    x, y = figure._diagonal.get_data()
    level = {tuple(sorted(x[n : n + 2])): y[n] for n in range(len(x) - 1) if y[n] == y[n + 1]}
    assert set(level) == {(j - 0.5, j + 0.5) for j in range(C - 1)}  # no key of the last column is read
    below = {(i, j) for j in range(C - 1) for i in range(C) if i > level[j - 0.5, j + 0.5]}
    assert below == {(i, j) for i in range(C) for j in range(i)}
    upright = {x[n]: tuple(sorted(y[n : n + 2])) for n in range(len(x) - 1) if x[n] == x[n + 1]}
    assert upright == {j - 0.5: (j - 0.5, j + 0.5) for j in range(1, C)}


def test_what_is_not_there_yet_is_white_and_what_is_zero_is_not(figure):
    update(figure)
    blank = area(figure.canvas, style.EMPTY)
    update(figure, pairs=np.zeros((C, C)))
    left, top, width, height = figure.canvas.box("pairs")
    across, down = figure.canvas.pixels
    assert area(figure.canvas, style.EMPTY) - blank > 0.8 * width * across * height * down > 100 * blank


def test_factors_that_have_no_part_are_dimmed(figure):
    figure.update(exponents=EXPONENTS, words={}, lit={}, key=[1, 2, 3, 4], read=[1, 2, 3, 4], dim=True)
    assert not has_colour(figure.canvas, style.FINITE)
    update(figure, key=[1, 2, 3, 4], read=[1, 2, 3, 4])
    assert has_colour(figure.canvas, style.FINITE)


@pytest.mark.parametrize("x", [0.195, -0.245, 0.105, 0.0525, 9.9e4])
@pytest.mark.parametrize("off", [1, 1 - 1e-7, 1 + 1e-7])
def test_an_error_of_the_last_digit_is_not_seen(x, off):
    assert short(x * off) == short(x) and rounded(x * off, 2) == rounded(x, 2)


def test_all_words_are_inside_and_apart(figure):
    exponents = (np.arange(C) * -108.5, np.arange(1, C + 1) * 108.5)
    words = {"key": "each key's factor", "read": "each read's\nfactor", "pairs": "scores", "result": "output o"}
    figure.update(exponents=exponents, words=words, lit={}, key=np.full(C, -9e-42))
    assert_legible(figure.canvas)
    update(figure, key=np.full(C, -9e-42), read=np.full(C, 9e-42), pairs=np.zeros((C, C)), result=np.zeros((C, K)))
    assert_legible(figure.canvas)
    losses = LossFigure("what is lost", ["the keys' factors", "gradient dr"])
    losses.update(["chunk of 8, w = -11.5"] * 2, [[0.1, 1]] * 2, [["10%", "100%"]] * 2)
    assert_legible(losses.canvas)


def test_the_longest_number_leaves_its_cell_a_margin(figure):
    """All letters lie between the cell's edges, large enough to be read."""
    update(figure, pairs=np.full((C, C), -9e-42), result=np.full((C, K), -9e-42))
    figure.canvas.png()
    for numbers in (figure._numbers["pairs"], figure._numbers["result"]):
        stamp = numbers._stamps[short(-9e-42)]
        assert not stamp[:, [0, -1], 3].any() and stamp[..., 3].any()


def test_a_number_that_is_printed_can_be_pointed_at(figure):
    update(figure, key=[1, 2, 3, 4])
    assert set(figure.canvas.maps) == {"key", "read", "pairs", "result"}
    assert figure.printed(Cell("key", 0, 3)) and not figure.printed(Cell("pairs", 0, 3))


def test_losses():
    figure = LossFigure("what is lost", ["a", "b"])
    figure.update(["here", "there"], [[0.25, 1.0], [0.0, 0.5]], [["25%", "100%"], ["0%", "50%"]])
    assert [[bar.get_width() for bar in bars] for bars in figure._bars] == [[0.25, 1.0], [0.0, 0.5]]
    assert [[text.get_text() for text in texts] for texts in figure._shares] == [["25%", "100%"], ["0%", "50%"]]
    assert has_colour(figure.canvas, style.NAN["facecolor"])
    assert [bars[0].get_hatch() for bars in figure._bars] == [style.INF["hatch"]] * 2  # factors overflow, no NaN
